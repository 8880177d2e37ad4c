"""The Sparse Transformer (Child et al., 2019, arXiv:1904.10509) in PyTorch, with the names of `enwik8 export --format safetensors`.

Dense attention under a mask of pairs: slow, and simple to check. Needs torch and, for safetensors files, safetensors.

    python sparse_transformer.py logits exported/model.safetensors exported/model.json "The history of"
    python sparse_transformer.py save exported/model.safetensors exported/model.json model.pt
"""
import json
import math
import sys

import torch
from torch import nn


def allowed(pattern, head, i, j):
    """Whether query i of a head sees key j, by a pattern as `model.json` has it. A few of the library's patterns."""
    (kind, p), = pattern.items() if isinstance(pattern, dict) else [(pattern, {})]
    if kind == "union":
        return any(allowed(part, head, i, j) for part in p)
    if kind == "intersection":
        return all(allowed(part, head, i, j) for part in p)
    if kind == "per_head":
        return allowed(p[head % len(p)], head, i, j)
    if j > i:
        return kind == "dense"
    if kind == "local":
        return i - j < p["window"]
    if kind == "strided":
        return (i - j) % p["stride"] == 0
    if kind == "streaming":
        return j < p["sink"] or i - j < p["window"]
    if kind == "fixed":
        stride, group = p["stride"], head % p["num_verts"]
        return i // stride == j // stride or (stride - 1 - j % stride) // p["columns"] == group
    if kind in ("causal", "dense"):
        return True
    raise ValueError(f"a pattern that this script does not know: {pattern}")


def layer_pattern(factorization, layer):
    (kind, patterns), = factorization.items()
    if kind == "interleaved" or len(patterns) == 1:
        return patterns[layer % len(patterns)]
    return {"union" if kind == "merged" else "per_head": patterns}


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, mask):
        def split(y):
            return y.view(*y.shape[:2], self.heads, -1).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        return self.output((weights @ v).transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.linear_inner, self.linear_outer = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        hidden = self.linear_inner(x)
        return self.linear_outer(hidden * torch.sigmoid(1.702 * hidden))


class Block(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.mha, self.norm_1 = Attention(width, heads), nn.LayerNorm(width)
        self.pwff, self.norm_2 = FeedForward(width, inner), nn.LayerNorm(width)

    def forward(self, x, mask):
        x = x + self.mha(self.norm_1(x), mask)
        return x + self.pwff(self.norm_2(x))


class Positions(nn.Module):
    """Position i is in row i // columns and column i % columns of a matrix."""

    def __init__(self, rows, columns, width):
        super().__init__()
        self.row = nn.Parameter(torch.randn(rows, width) * 0.02)
        self.column = nn.Parameter(torch.randn(columns, width) * 0.02)

    def forward(self, length):
        i = torch.arange(length)
        return self.row[i // len(self.column)] + self.column[i % len(self.column)]


class SparseTransformer(nn.Module):
    """Of a `model.json`."""

    def __init__(self, config):
        super().__init__()
        width, context = config["d_model"], config["context"]
        columns = config["embedding_width"] or 1 << (math.isqrt(context) - 1).bit_length()
        inner = config["d_ff"] or 4 * width
        self.token_embedding = nn.Embedding(config["vocab_size"], width)
        self.position_embedding = Positions(-(-context // columns), columns, width)
        layers = range(config["n_layers"])
        self.blocks = nn.ModuleList(Block(width, config["n_heads"], inner) for _ in layers)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, config["vocab_size"], bias=False)
        self.heads = range(config["n_heads"])
        self.patterns = [layer_pattern(config["factorization"], layer) for layer in layers]

    def forward(self, tokens):
        positions = range(tokens.shape[1])
        x = self.token_embedding(tokens) + self.position_embedding(len(positions))
        for block, pattern in zip(self.blocks, self.patterns):
            pairs = [[[allowed(pattern, h, i, j) for j in positions] for i in positions] for h in self.heads]
            x = block(x, torch.tensor(pairs))
        return self.output(self.norm(x))


def load(weights, config):
    """The model of a safetensors file or a state dict, all of whose tensors must fit."""
    with open(config) as file:
        model = SparseTransformer(json.load(file))
    if weights.endswith(".safetensors"):
        from safetensors.torch import load_file

        state = load_file(weights)
    else:
        state = torch.load(weights)
    model.load_state_dict(state)
    return model.eval()


if __name__ == "__main__":
    command, weights, config, argument = sys.argv[1:]
    model = load(weights, config)
    if command == "save":
        torch.save(model.state_dict(), argument)
    else:
        tokens = torch.tensor([list(argument.encode())])
        with torch.no_grad():
            last = model(tokens)[0, -1]
        for logit, byte in zip(*last.topk(5)):
            print(f"{bytes([byte])!r} {logit:.5f}")
