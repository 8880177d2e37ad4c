"""Makes the files of this folder: tiny models with random weights under the names of real ones, and what they compute.

Made with torch 1.13, transformers 4.30.2 and safetensors. `python make.py` from this folder writes all files anew, with other bytes
where a version draws other random numbers; the tests compare with whatever is here.
"""
import json
import sys

import torch
from safetensors.torch import save_file

sys.path.append("../../../../../examples/enwik8/pytorch")
from sparse_transformer import SparseTransformer  # noqa: E402


def spread(model):
    """Weights of a size that shows every mistake: norms are no longer 1 and 0, nor biases 0."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_gain = ("norm" in name.lower() or "ln_" in name) and name.endswith("weight")
            parameter.copy_(1 + 0.3 * noise if is_gain else 0.4 * noise)
    return model.eval()


def tokens(count, batch, length):
    return torch.randint(count, (batch, length), generator=torch.Generator().manual_seed(5))


def own():
    config = {
        "d_model": 8, "n_heads": 2, "vocab_size": 16, "context": 24, "n_layers": 2, "embedding_width": 8, "d_ff": 16,
        "factorization": {"merged": [{"local": {"window": 6}}, {"fixed": {"stride": 8, "columns": 2, "num_verts": 1}}]},
    }
    model = spread(SparseTransformer(config))
    x = tokens(16, 2, 20)
    with torch.no_grad():
        save_file({"tokens": x, "logits": model(x)}, "own.golden.safetensors")
    save_file(model.state_dict(), "own.safetensors", {"format": "pt"})
    torch.save(model.state_dict(), "own.pt")
    torch.save({"step": 3, "model": model.state_dict()}, "own.nested.pt")
    with open("own.json", "w") as file:
        json.dump(config, file)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=20, n_positions=24, n_embd=8, n_layer=2, n_head=2)
    model = spread(GPT2LMHeadModel(config))
    x = tokens(20, 2, 20)
    with torch.no_grad():
        save_file({"tokens": x, "logits": model(x).logits}, "gpt2.golden.safetensors")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    # As `save_pretrained` writes a language model: the head is the embedding, and stored once.
    del state["lm_head.weight"]
    # Older versions store masks, too.
    state["transformer.h.0.attn.bias"] = torch.ones(24, 24).tril().to(torch.uint8).view(1, 1, 24, 24)
    state["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(state, "gpt2.safetensors", {"format": "pt"})


def longformer():
    from transformers import LongformerConfig, LongformerModel

    config = LongformerConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=34, attention_window=[8, 4], type_vocab_size=2, layer_norm_eps=1e-5,
    )
    model = spread(LongformerModel(config))
    # Tokens above 1, which is padding; the second sequence is shorter.
    x = tokens(18, 2, 32) + 2
    x[1, 27:] = 1
    mask = (x != 1).long()
    # The first token of both, and one more of the first.
    is_global = torch.zeros_like(x)
    is_global[:, 0] = 1
    is_global[0, 13] = 1
    with torch.no_grad():
        windows = model(x, attention_mask=mask).last_hidden_state
        out = model(x, attention_mask=mask, global_attention_mask=is_global).last_hidden_state
    golden = {"tokens": x, "mask": mask, "is_global": is_global, "windows": windows, "out": out}
    save_file({name: tensor.contiguous() for name, tensor in golden.items()}, "longformer.golden.safetensors")
    save_file(model.state_dict(), "longformer.safetensors", {"format": "pt"})


own()
gpt2()
longformer()
