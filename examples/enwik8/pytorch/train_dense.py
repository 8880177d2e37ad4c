"""Trains the model of `enwik8 train --attention dense` in PyTorch, on the same data, and logs as the trainer does.

The same model, initialisation, recipe and splits; dense causal attention by scaled_dot_product_attention, bf16 autocast,
torch.compile, fused AdamW. It is the peer in the comparison by time of docs/benchmarks.md. Windows are drawn at random,
where the trainer goes through a shuffled list of them. With --seconds the schedule is as long as so much time of steps
allows, measured before on a copy. Validation is not in a step's time. A run writes a checkpoint behind each validation, and
goes on from it if it is started again.

    python train_dense.py runs/torch --data enwik8 --preset small --seconds 60
    cargo run -p blocksparse-bench --features plot --bin plot -- runs torch=runs/torch sparse=runs/sparse curves.png
"""
import argparse
import copy
import json
import math
import os
import pathlib
import time

import torch
from torch import nn
from torch.nn import functional as F

PRESETS = {
    "small": dict(context=2048, layers=8, heads=8, width=384, batch=16, dropout=0.1, scale=1.0, rate=5e-4, warmup=1000),
    "paper": dict(context=12288, layers=30, heads=8, width=512, batch=8, dropout=0.4, scale=0.125, rate=3.5e-4, warmup=5000),
}


class Block(nn.Module):
    def __init__(self, width, heads, layers, dropout, scale):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for linear in (self.qkv, self.output, self.inner, self.outer):
            residual = math.sqrt(2 * layers) if linear in (self.output, self.outer) else 1
            nn.init.normal_(linear.weight, std=scale / math.sqrt(linear.in_features) / residual)
            nn.init.zeros_(linear.bias)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.output(heads.transpose(1, 2).reshape(x.shape)), self.dropout, self.training)
        hidden = self.inner(self.norm_2(x))
        return x + F.dropout(self.outer(hidden * torch.sigmoid(1.702 * hidden)), self.dropout, self.training)


class Model(nn.Module):
    def __init__(self, context, layers, heads, width, dropout, scale, columns=128):
        super().__init__()
        self.columns = columns
        self.token = nn.Embedding(256, width)
        self.row, self.column = nn.Embedding(-(-context // columns), width), nn.Embedding(columns, width)
        for table, tables in ((self.token, 1), (self.row, 2), (self.column, 2)):
            nn.init.normal_(table.weight, std=scale / math.sqrt(width * tables))
        self.blocks = nn.ModuleList(Block(width, heads, layers, dropout, scale) for _ in range(layers))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.zeros_(self.output.weight)

    def forward(self, x, y):
        i = torch.arange(x.shape[1], device=x.device)
        h = self.token(x) + self.row(i // self.columns) + self.column(i % self.columns)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.output(self.norm(h)).flatten(0, 1).float(), y.flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eval-every", type=int, default=500)
    parser.add_argument("--eval-windows", type=int, default=32)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    for name, kind in (("context", int), ("batch", int), ("dropout", float), ("rate", float), ("warmup", int), ("scale", float)):
        parser.add_argument(f"--{name}", type=kind)
    args = parser.parse_args()
    recipe = PRESETS[args.preset] | {name: value for name, value in vars(args).items() if name in PRESETS["small"] and value is not None}
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    data = torch.frombuffer(bytearray(pathlib.Path(args.data).read_bytes()), dtype=torch.uint8)
    ends = len(data) * 90 // 100, len(data) * 95 // 100
    training, held_out = data[:ends[0]].cuda(), data[ends[0]:ends[1]].cuda()
    if args.eval_windows < recipe["batch"]:
        parser.error(f"--eval-windows must be at least a batch, which is {recipe['batch']}")
    context, batch, rate, warmup = (recipe[name] for name in ("context", "batch", "rate", "warmup"))
    model = Model(context, *(recipe[name] for name in ("layers", "heads", "width", "dropout", "scale"))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, eps=1e-8, weight_decay=args.weight_decay, fused=True)
    compiled = torch.compile(model)
    offsets = torch.arange(context + 1, device="cuda")

    def loss_of(data, starts):
        windows = data[starts[:, None] + offsets].long()
        with torch.autocast("cuda", torch.bfloat16):
            return compiled(windows[:, :-1], windows[:, 1:])

    def step():
        loss = loss_of(training, torch.randint(len(training) - context, (batch,), device="cuda"))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()

    @torch.no_grad()
    def validate(windows=None):
        model.eval()
        starts = torch.arange(0, len(held_out) - context, context, device="cuda")
        if windows is not None:
            starts = starts[:: max(1, len(starts) // windows)]
        losses = [loss_of(held_out, part).item() for part in starts.split(batch) if len(part) == batch]
        model.train()
        return sum(losses) / len(losses), len(losses) * batch * context

    args.run.mkdir(parents=True, exist_ok=True)
    checkpoint, log_path = args.run / "checkpoint.pt", args.run / "log.jsonl"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu")
        steps, done, logged = state["steps"], state["step"], state["logged"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"][0])
        torch.cuda.set_rng_state(state["random"][1])
        os.truncate(log_path, logged)
        print(f"goes on behind step {done} of {steps}", flush=True)
    else:
        steps, done = args.steps, 0
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        times = []
        for _ in range(13):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
        usual = sorted(times[3:])[5]
        if steps is None:
            steps = max(1, int(args.seconds / usual))
        print(f"{usual * 1e3:.1f} ms a step, {steps} steps", flush=True)
        model.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
        log_path.write_text("")

    def save(number):
        random = torch.get_rng_state(), torch.cuda.get_rng_state()
        state = dict(steps=steps, step=number, logged=log_path.stat().st_size, model=model.state_dict(),
                     optimizer=optimizer.state_dict(), random=random)
        torch.save(state, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)

    with open(log_path, "a") as log:
        def write(kind, number, loss, **more):
            log.write(json.dumps({"kind": kind, "step": number, "loss": loss, "bits_per_byte": loss / math.log(2)} | more) + "\n")
            log.flush()

        for number in range(done + 1, steps + 1):
            progress = (number - 1 - warmup) / max(1, steps - warmup)
            factor = number / warmup if number <= warmup else 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            began = time.perf_counter()
            loss, norm = step()
            ms = (time.perf_counter() - began) * 1e3
            write("train", number, loss, learning_rate=rate * factor, grad_norm=norm, ms=ms, tokens_per_s=batch * context / ms * 1e3)
            if number % args.eval_every == 0 and number < steps:
                loss, count = validate(args.eval_windows)
                write("validation", number, loss, bytes=count)
                save(number)
        loss, count = validate()
        write("final", steps, loss, bytes=count)
        print(f"{steps} steps, {loss / math.log(2):.4f} bits per byte of {count} held-out bytes", flush=True)


if __name__ == "__main__":
    main()
