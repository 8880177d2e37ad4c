#!/usr/bin/env python3
"""Moves crates/blocksparse/src/kernels into the crate blocksparse-cubecl. Run in the root of a checkout."""
import os, re, subprocess, sys
root = os.getcwd()
def sh(*a): subprocess.check_call(a)
def read(p): return open(p).read()
def write(p, s):
    os.makedirs(os.path.dirname(p) or ".", exist_ok=True); open(p, "w").write(s)
old = "crates/blocksparse/src/kernels"; new = "crates/blocksparse-cubecl/src"
os.makedirs("crates/blocksparse-cubecl", exist_ok=True)
sh("git", "mv", old, new)
sh("git", "mv", f"{new}/mod.rs", f"{new}/lib.rs")
# Paths inside of the moved files.
def split_group(text):
    """Top-level items of the inside of a use group."""
    parts, depth, cur = [], 0, ""
    for c in text:
        if c == "{": depth += 1
        if c == "}": depth -= 1
        if c == "," and depth == 0:
            parts.append(cur.strip()); cur = ""
        else: cur += c
    if cur.strip(): parts.append(cur.strip())
    return parts
for base, _, files in os.walk(new):
    for f in files:
        if not f.endswith(".rs"): continue
        p = os.path.join(base, f); s = read(p)
        # `use crate::{...}` groups that mix kernels and the rest
        def group(m):
            indent, vis, body = m.group(1), m.group(2) or "", m.group(3)
            own, other = [], []
            for part in split_group(body):
                if part.startswith("kernels::"): own.append(part[len("kernels::"):])
                else: other.append(part)
            out = []
            if own: out.append(f"{indent}{vis}use crate::{{{', '.join(own)}}};")
            if other: out.append(f"{indent}{vis}use blocksparse::{{{', '.join(other)}}};")
            return "\n".join(out)
        s = re.sub(r"^([ \t]*)(pub(?:\([a-z]+\))? )?use crate::\{((?:[^;])*?)\};", group, s, flags=re.M)
        s = re.sub(r"\bcrate::kernels\b(?!::)", "\x01", s)
        s = re.sub(r"\bcrate::kernels::", "\x01::", s)
        s = re.sub(r"\bcrate::(?=[A-Za-z{])", "blocksparse::", s)
        s = s.replace("$blocksparse::", "$crate::")
        s = s.replace("\x01", "crate")
        s = s.replace("pub(in crate::", "pub(in crate::")
        write(p, s)
# The moved crate.
lib = read(f"{new}/lib.rs")
lib = lib.replace("#![warn(clippy::undocumented_unsafe_blocks)]", "#![warn(missing_docs)]\n#![warn(clippy::undocumented_unsafe_blocks)]", 1)
write(f"{new}/lib.rs", lib)
write("crates/blocksparse-cubecl/Cargo.toml", '''[package]
name = "blocksparse-cubecl"
version.workspace = true
edition.workspace = true
rust-version.workspace = true
license.workspace = true
readme = "README.md"
keywords.workspace = true
categories.workspace = true
description = "Block-sparse attention in CubeCL kernels"

[features]
default = []
# The kernels on NVIDIA tensor cores (inline PTX); needs CubeCL's CUDA C++ compiler in the application.
cuda-asm = ["dep:cubecl-cpp"]

[dependencies]
blocksparse = { workspace = true }
bytemuck = { version = "1" }
cubecl = { workspace = true }
cubecl-cpp = { workspace = true, optional = true }
cubecl-environment = { workspace = true }
thiserror = { workspace = true }

[dev-dependencies]
proptest = { workspace = true }
rstest = { workspace = true }
''')
write("crates/blocksparse-cubecl/README.md", '''# blocksparse-cubecl

Exact softmax attention over the kept blocks of a `blocksparse::BlockLayout`, forward and backward, in
[CubeCL](https://github.com/tracel-ai/cubecl) kernels. The application brings the runtime: CUDA, Vulkan, Metal, WebGPU.

The crate does not depend on Burn. `burn-blocksparse` is the operation on Burn tensors. The
[kernels' page](../../docs/kernels.md) explains each family.

| feature | contents |
|---|---|
| `cuda-asm` | the kernels on NVIDIA tensor cores, from compute capability 8.0 on; needs CubeCL's CUDA C++ compiler |

## Versions and licence

CubeCL is pinned exactly, `=0.11.3`. The minimum Rust version is 1.95. MIT or Apache-2.0, at your option.
''')
def edit(p, *pairs):
    s = read(p)
    for a, b in pairs:
        if a not in s: print(f"{p}: not found: {a[:60]!r}", file=sys.stderr)
        s = s.replace(a, b)
    write(p, s)
edit("crates/blocksparse/Cargo.toml",
 ('features = ["kernels", "draw"]', 'features = ["draw"]'),
 ('''# The CubeCL kernels, for whatever runtime the application brings.
kernels = ["dep:cubecl", "dep:cubecl-environment", "dep:bytemuck"]
# The kernels on NVIDIA tensor cores (inline PTX); needs CubeCL's CUDA C++ compiler in the application.
cuda-asm = ["kernels", "dep:cubecl-cpp"]
''', ''),
 ('''bytemuck = { version = "1", optional = true }
cubecl = { workspace = true, optional = true }
cubecl-cpp = { workspace = true, optional = true }
cubecl-environment = { workspace = true, optional = true }
''', ''))
edit("crates/blocksparse/src/lib.rs",
 ('''//! - `kernels`: attention over a layout in CubeCL kernels, `kernels`.
//! - `cuda-asm`: with it the kernels use NVIDIA's tensor cores, from compute capability 8.0 on; the application brings CubeCL's
//!   CUDA C++ compiler.
''', ''),
 ('''attention over a layout in Burn; this crate knows nothing of Burn.''','''attention over a layout in Burn, by the kernels of `blocksparse-cubecl`; this crate knows neither.'''),
 ('''#[cfg(feature = "kernels")]
pub mod kernels;
''', ''))
edit("crates/blocksparse/README.md",
 ('''| `kernels` | attention in CubeCL kernels, forward and backward; the application brings the runtime |
| `cuda-asm` | these kernels on NVIDIA tensor cores; needs CubeCL's CUDA C++ compiler |
''', ''),
 ("The crate does not depend on Burn. `burn-blocksparse` is the operation on Burn tensors.",
  "The crate depends on no GPU library and not on Burn. `blocksparse-cubecl` has the kernels, `burn-blocksparse` the operation on\nBurn tensors."))
edit("Cargo.toml",
 ('    "crates/blocksparse",\n', '    "crates/blocksparse",\n    "crates/blocksparse-cubecl",\n'),
 ('blocksparse = { path = "crates/blocksparse", version = "0.1.0", default-features = false }\n',
  'blocksparse = { path = "crates/blocksparse", version = "0.1.0", default-features = false }\nblocksparse-cubecl = { path = "crates/blocksparse-cubecl", version = "0.1.0", default-features = false }\n'),
 ('blocksparse = { opt-level = 2 }\n', 'blocksparse = { opt-level = 2 }\nblocksparse-cubecl = { opt-level = 2 }\n'))
edit("crates/burn-blocksparse/Cargo.toml",
 ('"blocksparse/kernels"', '"dep:blocksparse-cubecl"'), ('"blocksparse/cuda-asm"', '"blocksparse-cubecl/cuda-asm"'),
 ('blocksparse = { workspace = true }\n', 'blocksparse = { workspace = true }\nblocksparse-cubecl = { workspace = true, optional = true }\n'))
edit("bench/Cargo.toml",
 ('"blocksparse/cuda-asm"', '"blocksparse-cubecl/cuda-asm"'),
 ('blocksparse = { workspace = true, features = ["kernels"] }\n', 'blocksparse = { workspace = true }\nblocksparse-cubecl = { workspace = true }\n'))
# Users.
for base in ["crates/burn-blocksparse", "crates/burn-sparse-transformer", "crates/cuda-interpreter", "bench", "tests", "examples", "docs", "tools", ".ci"]:
    for d, _, files in os.walk(base):
        if "/target" in d: continue
        for f in files:
            p = os.path.join(d, f)
            if not f.endswith((".rs", ".md", ".sh", ".py", ".toml")) and base not in (".ci", "tools"): continue
            try: s = read(p)
            except (UnicodeDecodeError, FileNotFoundError): continue
            t = s
            def selfgroup(m):
                rest = m.group(3).strip()
                return f"{m.group(1)}use blocksparse_cubecl as kernels;\n{m.group(1)}use blocksparse_cubecl::{{{rest}}};"
            t = re.sub(r"^([ \t]*)use blocksparse::kernels::\{\s*(self),((?:[^;])*?)\};", selfgroup, t, flags=re.M)
            t = re.sub(r"\buse blocksparse::kernels;", "use blocksparse_cubecl as kernels;", t)
            t = re.sub(r"\bblocksparse::kernels\b", "blocksparse_cubecl", t)
            if f.endswith(".md") or base in (".ci", "tools") or f.endswith((".sh", ".py")):
                t = t.replace("crates/blocksparse/src/kernels", "crates/blocksparse-cubecl/src")
            t = t.replace("-p blocksparse --no-default-features --features kernels", "-p blocksparse-cubecl --no-default-features")
            if t != s: write(p, t)
sh("cargo", "fmt", "--all")
