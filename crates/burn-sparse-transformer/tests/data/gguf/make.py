"""Writes golden.gguf with the package gguf (0.19.0): blocks of random bytes of each type that is quantised, beside what that package makes of them.

python make.py
"""

import pathlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

# Where a block has half-precision numbers, which random bytes would make infinite.
HALVES = {
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q5_1: [0, 2],
    Type.Q8_0: [0],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
}

random = np.random.default_rng(7)
writer = gguf.GGUFWriter(pathlib.Path(__file__).with_name("golden.gguf"), "golden")
writer.add_uint8("of.uint8", 200)
writer.add_int8("of.int8", -100)
writer.add_uint16("of.uint16", 60_000)
writer.add_int16("of.int16", -30_000)
writer.add_uint32("of.uint32", 4_000_000_000)
writer.add_int32("of.int32", -2_000_000_000)
writer.add_uint64("of.uint64", 2**64 - 1)
writer.add_int64("of.int64", -(2**63))
writer.add_float32("of.float32", 0.1)
writer.add_float64("of.float64", 0.1)
writer.add_bool("of.bool", True)
writer.add_string("of.string", "Grüße")
writer.add_array("of.strings", ["", "Ġt he", "日本"])
writer.add_array("of.integers", [3, -1, 4])
writer.add_array("of.floats", [0.5, -2.0])
writer.add_array("of.bools", [True, False])
for kind, halves in HALVES.items():
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, blocks = (2, 2) if block == 32 else (1, 1)
    data = random.integers(0, 256, [rows * blocks, size], dtype=np.uint8)
    for at in halves:
        numbers = random.normal(size=[rows * blocks, 1]).astype("<f2")
        data[:, at : at + 2] = numbers.view(np.uint8)
    data = data.reshape(rows, blocks * size)
    writer.add_tensor(kind.name, data, raw_dtype=kind)
    writer.add_tensor(f"{kind.name}.numbers", gguf.dequantize(data, kind).astype(np.float32))
numbers = random.normal(size=[3, 5]).astype(np.float32)
writer.add_tensor("F32", numbers)
writer.add_tensor("F16", numbers.astype(np.float16))
writer.add_tensor("BF16", gguf.quantize(numbers, Type.BF16), raw_dtype=Type.BF16)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
