#!/usr/bin/env python3
"""Cuts the circle of eight among the kernels' modules. Run after split.py and mover.py in the root of a checkout."""
import os, re, subprocess, sys
S = "crates/blocksparse-cubecl/src"
def read(p): return open(f"{S}/{p}").read()
def write(p, s): open(f"{S}/{p}", "w").write(s)
def cut(text, start, end):
    i = text.index(start); j = text.index(end, i)
    return text[:i] + text[j:], text[i:j]
# Bits that order numbers
keep = read("on_device/keep.rs")
keep, key = cut(keep, "/// A number that orders f32 numbers, given as bits", "/// The key of +")
key = key.replace("#[cube]\nfn number", "#[cube]\npub fn number")
write("on_device/keep.rs", re.sub(r"^(use cubecl::prelude::\*;\n)", r"\1\nuse crate::shared::order_key::{key, number};\n", keep, count=1, flags=re.M))
write("shared/order_key.rs", "//! Integers that order f32 numbers.\n\nuse cubecl::prelude::*;\n\n" + key.strip() + "\n")
# What a bias is read by
score = read("simt/score.rs")
score, strides = cut(score, "/// Strides of a contiguous bias", "/// A query and a key.")
score, distances = cut(score, "/// A table of biases of distances, `[heads", "/// Adds the biases of the unit's distances")
write("shared/biases.rs", "//! How the `simt` tier reads biases.\n\nuse cubecl::prelude::*;\n\n" + strides + distances.strip() + "\n")
score = re.sub(r"^(use super::tile::\*;\n)", r"\1pub use crate::shared::biases::{BiasStrides, Distances};\n", score, count=1, flags=re.M)
write("simt/score.rs", score)
m = read("shared/mod.rs")
m = m.replace("pub mod bins;", "pub mod biases;\npub mod bins;").replace("pub mod score;", "pub mod order_key;\npub mod score;")
write("shared/mod.rs", m)
for d, _, fs in os.walk(S):
    for f in fs:
        if not f.endswith(".rs"): continue
        p = os.path.relpath(os.path.join(d, f), S); s = read(p); t = s
        t = t.replace("crate::on_device::keep::key;", "crate::shared::order_key::key;").replace("crate::on_device::key;", "crate::shared::order_key::key;")
        t = t.replace("use super::simt::score::{BiasStridesLaunch, DistancesLaunch};", "use super::shared::biases::{BiasStridesLaunch, DistancesLaunch};")
        t = t.replace("use crate::on_device::{key, planes};", "use crate::on_device::planes;\nuse crate::shared::order_key::key;")
        if p.startswith("on_device/"):
            t = t.replace("use super::keep::key;", "use crate::shared::order_key::key;")
            t = t.replace("pub(super) use keep::key;\n", "")
            t = re.sub(r"use super::keep::\{([^}]*)\bkey, ", r"use crate::shared::order_key::key;\nuse super::keep::{\1", t)
        if t != s: write(p, t)
