#!/usr/bin/env python3
"""After mover.py: arch/ knows nothing of shared/."""
import re
S = "crates/blocksparse-cubecl/src"
def read(p): return open(f"{S}/{p}").read()
def write(p, s): open(f"{S}/{p}", "w").write(s)
write("arch/mod.rs", '''//! What kernels say to a device in its own language: PTX, and planes of 32 units.

#[cfg(feature = "cuda-asm")]
pub(crate) mod ptx;
#[cfg(feature = "cuda-asm")]
pub(crate) mod sm80;
#[cfg(feature = "cuda-asm")]
pub(crate) mod sm90;
#[cfg(feature = "cuda-asm")]
pub(crate) mod swizzled;
#[cfg(feature = "cuda-asm")]
pub(crate) mod tma;

pub(crate) mod planes;

use cubecl::prelude::*;

/// Four numbers: the width of shared memory accesses.
pub type Four = Const<4>;
''')
w = read("shared/walk.rs")
w = re.sub(r"/// Four numbers: the width of shared memory accesses\.\npub type Four = Const<4>;\n", "pub use crate::arch::Four;\n", w)
write("shared/walk.rs", w)
write("arch/sm80.rs", read("arch/sm80.rs").replace("use crate::shared::walk::Four;", "use super::Four;"))
m = read("shared/mod.rs")
write("shared/mod.rs", m.replace("several tiers share.\npub", "several tiers share.\n\npub", 1))
