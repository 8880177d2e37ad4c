"""A tiny random Llama (the model in Flax knows no other base of rotations than 10,000) in Hugging Face's files, two shards, and its logits by `transformers`' own model in float64.

pip install "transformers==4.46.3" "jax[cpu]<0.5" "flax<0.10.3" "numpy<2.2" safetensors
"""
import json
import os

os.environ["JAX_ENABLE_X64"] = "1"
import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file
from transformers import FlaxLlamaForCausalLM, LlamaConfig

here = os.path.dirname(os.path.abspath(__file__))
config = LlamaConfig(
    hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=56, num_hidden_layers=2,
    vocab_size=48, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False,
)
model = FlaxLlamaForCausalLM(config, seed=0, dtype=jax.numpy.float64)
rng = np.random.default_rng(7)
weights, params = {}, {}
for name, value in flatten_dict(model.params).items():
    scale = 1.0 if name[-1] == "embedding" else 0.3
    drawn = rng.normal(0.0, scale, value.shape)
    if name[-1] == "weight":  # of a norm
        drawn = 1.0 + drawn
    drawn = drawn.astype(np.float32)
    params[name] = drawn.astype(np.float64)
    *path, last = name
    theirs = ".".join(path) + ".weight"
    weights[theirs] = np.ascontiguousarray(drawn.T) if last == "kernel" else drawn
tokens = rng.integers(0, config.vocab_size, (2, 40))
logits = np.asarray(model(tokens, params=unflatten_dict(params)).logits)
names = sorted(weights)
shards = [names[: len(names) // 2], names[len(names) // 2:]]
files = [f"model-0000{shard + 1}-of-00002.safetensors" for shard in range(2)]
for file, part in zip(files, shards):
    save_file({name: weights[name] for name in part}, os.path.join(here, file), metadata={"format": "pt"})
index = {name: file for file, part in zip(files, shards) for name in part}
size = sum(value.nbytes for value in weights.values())
with open(os.path.join(here, "model.safetensors.index.json"), "w") as out:
    json.dump({"metadata": {"total_size": size}, "weight_map": index}, out, indent=1)
with open(os.path.join(here, "config.json"), "w") as out:
    out.write(config.to_json_string(use_diff=False))
tokens.astype("<i4").tofile(os.path.join(here, "tokens.i32"))
logits.astype("<f4").tofile(os.path.join(here, "logits.f32"))
print(logits.dtype, logits.std(), sorted(weights))
