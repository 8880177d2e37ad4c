#!/usr/bin/env python3
"""Gives each op of crates/burn-blocksparse one folder: its trait (ops.rs) and its backends (backend.rs) beside what it is.
Run in the root of a checkout."""
import os, re, subprocess, sys
SRC = "crates/burn-blocksparse/src"
def sh(*a): subprocess.check_call(a)
def read(p): return open(p).read()
def write(p, s):
    os.makedirs(os.path.dirname(p) or ".", exist_ok=True); open(p, "w").write(s)

# old module -> new module
MOVES = {
 "backend::activation": "activation::ops", "backends::activation": "activation::backend",
 "backend::block_sparse": "sparse_linear::ops", "backends::block_sparse": "sparse_linear::backend",
 "backends::wgmma_blocks": "sparse_linear::wgmma",
 "backends::blocks": "blocks::backend",
 "clusters": "clusters::", "backend::clusters": "clusters::ops", "backends::clusters": "clusters::backend",
 "dropout": "dropout::", "backend::dropout": "dropout::ops", "backends::dropout": "dropout::backend",
 "backend::embedding": "embedding::ops", "backends::embedding": "embedding::backend",
 "backend::estimates": "selection::estimate_ops", "backends::estimates": "selection::estimate_backend",
 "backend::fixed": "graph::ops", "backends::fixed": "graph::backend",
 "backend::gates": "gates::ops", "backends::gates": "gates::backend",
 "backend::heads": "heads::ops", "backends::heads": "heads::backend",
 "backend::heads_apart": "heads::apart_ops", "backends::heads_apart": "heads::apart_backend",
 "backend::indexer": "dsa::ops", "backends::indexer": "dsa::backend",
 "backend::key_lists": "selection::key_list_ops", "backends::key_lists": "selection::key_list_backend",
 "backend::linear": "linear::ops", "backends::linear": "linear::backend",
 "backends::named_product": "linear::named_product", "backends::wgmma_product": "linear::wgmma",
 "backends::matmul": "linear::matmul",
 "backend::listed": "selection::list_ops", "backends::listed": "selection::list_backend",
 "backend::loss": "loss::ops", "backends::loss": "loss::backend",
 "masses": "masses::", "backend::masses": "masses::ops", "backends::masses": "masses::backend",
 "backend::mlp": "mlp::ops", "backends::mlp": "mlp::backend",
 "backend::norm": "norm::ops", "backends::norm": "norm::backend",
 "backend::optim": "optim::ops", "backends::optim": "optim::backend",
 "order": "order::", "backend::order": "order::ops", "backends::order": "order::backend",
 "backend::page_choice": "paged::choice_ops", "backends::page_choice": "paged::choice_backend",
 "backend::page_slots": "paged::slot_ops", "backends::page_slots": "paged::slot_backend",
 "backend::paged": "paged::ops", "backends::paged": "paged::backend",
 "backend::projection": "projection::ops", "backends::projection": "projection::backend",
 "backend::rows": "rows::ops", "backends::rows": "rows::backend", "backends::row_steps": "rows::steps",
 "backend::sampling": "sampling::ops", "backends::sampling": "sampling::backend",
 "backend::selection": "selection::ops", "backends::selection": "selection::backend",
 "attention": "attention::",
 "backends::autodiff": "attention::autodiff", "backends::cube": "cube", "backends::outputs": "outputs",
 "reference": "attention::reference",
}
def path_of(mod):
    """The file of a module path, or None."""
    p = f"{SRC}/{mod.replace('::', '/')}"
    for c in (p + ".rs", p + "/mod.rs"):
        if os.path.exists(c): return c
# --- what the old mod.rs files declare: attributes of each module, names re-exported
def decls(text):
    out, attrs = {}, []
    for line in text.splitlines():
        if line.startswith("#["): attrs.append(line); continue
        m = re.match(r"(pub(?:\([a-z]+\))? )?mod ([a-z_]+);", line)
        if m: out[m.group(2)] = list(attrs)
        attrs = []
    return out
ops_mod, back_mod = read(f"{SRC}/backend/mod.rs"), read(f"{SRC}/backends/mod.rs")
attrs = {f"backend::{k}": v for k, v in decls(ops_mod).items()}
attrs |= {f"backends::{k}": v for k, v in decls(back_mod).items()}
lib = read(f"{SRC}/lib.rs")
lib_attrs = decls(lib)
names = {}
def target(mod):
    new = MOVES.get(mod)
    return mod if new is None else new.rstrip(":")
for m in re.finditer(r"^pub(?:\(crate\))? use ((?:crate::)?[a-z_:]+)::(\{[^}]*\}|[A-Za-z_]+);", ops_mod, flags=re.M):
    root = m.group(1)
    root = root[7:] if root.startswith("crate::") else f"backend::{root}"
    for i in [i.strip() for i in m.group(2).strip("{}").split(",") if i.strip()]: names[i] = root
names["BlockSparseOps"] = "attention::ops"
def insert_decl(s, decl):
    """After the inner docs and attributes."""
    rows = s.split("\n"); i = 0
    while i < len(rows) and (rows[i].startswith("//!") or rows[i].startswith("#![") or rows[i].startswith("// ") or not rows[i].strip()): i += 1
    return "\n".join(rows[:i]) + ("\n" if i and rows[i-1].strip() else "") + decl + "\n" + "\n".join(rows[i:])
# --- one flat list of imports of the old roots
def flat(s):
    def repl(m):
        indent, vis, root, body = m.group(1), m.group(2) or "", m.group(3), m.group(4)
        items, depth, cur = [], 0, ""
        for c in body:
            depth += (c == "{") - (c == "}")
            if c == "," and depth == 0: items.append(cur); cur = ""
            else: cur += c
        items.append(cur)
        return "\n".join(f"{indent}{vis}use {root}{i.strip()};" for i in items if i.strip())
    prev = None
    while prev != s:
        prev = s
        s = re.sub(r"^([ \t]*)(pub(?:\([a-z]+\))? )?use (crate::(?:backend|backends)::)\{((?:[^;])*)\};", repl, s, flags=re.M)
    return s
def retarget(s):
    s = flat(s)
    # names re-exported by ops
    s = re.sub(r"\bcrate::backend::([A-Z][A-Za-z_0-9]*)", lambda m: f"crate::{target(names[m.group(1)])}::{m.group(1)}" if m.group(1) in names else m.group(0), s)
    # `use crate::{a, b}` groups: split those that name moved modules
    def group(m):
        indent, vis, body = m.group(1), m.group(2) or "", m.group(3)
        items, depth, cur = [], 0, ""
        for c in body:
            depth += (c == "{") - (c == "}")
            if c == "," and depth == 0: items.append(cur); cur = ""
            else: cur += c
        items.append(cur)
        return "\n".join(f"{indent}{vis}use crate::{i.strip()};" for i in items if i.strip())
    s = re.sub(r"^([ \t]*)(pub(?:\([a-z]+\))? )?use crate::\{((?:[^;])*)\};", group, s, flags=re.M)
    for old in sorted(MOVES, key=len, reverse=True):
        new = MOVES[old].rstrip(":")
        if old == new: continue
        s = re.sub(rf"\bcrate::{old}\b", f"crate::{new}", s)
    return s
LOCAL = {"outputs", "cube", "order", "paged", "wgmma_product", "wgmma_blocks", "linear", "norm", "optim", "rows", "heads", "activation", "autodiff"}
texts = {}
moved = {}
for old, new in MOVES.items():
    src = path_of(old)
    if src is None: print("missing", old, file=sys.stderr); continue
    if new.endswith("::"):
        dst = f"{SRC}/{new[:-2]}/mod.rs"
    elif os.path.basename(src) == "mod.rs":
        dst = None  # a folder
    else:
        dst = f"{SRC}/{new.replace('::', '/')}.rs"
    moved[old] = (src, dst, new)
for old, (src, dst, new) in moved.items():
    s = read(src)
    if old.startswith("backends::"):
        s = re.sub(r"(?<!super::)\bsuper::(%s)\b" % "|".join(LOCAL), lambda m: f"crate::backends::{m.group(1)}" if f"backends::{m.group(1)}" in MOVES else m.group(0), s)
        s = s.replace("pub(super)", "pub(crate)").replace("pub(in crate::backends)", "pub(crate)")
    if old.startswith("backend::"):
        def fix(m):
            return f"use crate::backend::{m.group(1)};"
        s = re.sub(r"^use super::(\{[^}]*\}|[A-Z][A-Za-z]*);", fix, s, flags=re.M)
    write(src, s)
os.makedirs(f"{SRC}/attention", exist_ok=True)
for old, (src, dst, new) in moved.items():
    if dst is None:
        sh("git", "mv", os.path.dirname(src), f"{SRC}/{new.replace('::', '/')}"); continue
    os.makedirs(os.path.dirname(dst), exist_ok=True)
    sh("git", "mv", src, dst)
sh("git", "rm", "-q", "-f", f"{SRC}/backends/mod.rs")
# the façade keeps its list; the trait of attention gets a file
p = f"{SRC}/backend/mod.rs"; s = read(p)
i = s.index("/// Block-sparse attention as a backend operation.")
trait = s[i:]
head = s[:i]
privates = re.findall(r"^use [^;]*;\n", head, flags=re.M)
head = re.sub(r"^use [^;]*;\n", "", head, flags=re.M)
head = re.sub(r"^(#\[cfg[^\n]*\]\n)?mod [a-z_]+;\n", "", head, flags=re.M)
head = re.sub(r"^(#\[cfg[^\n]*\]\n)?pub\(crate\) use [^;]*;\n", "", head, flags=re.M)
def facade(m):
    items = [i.strip() for i in m.group(2).strip("{}").split(",") if i.strip()]
    root = m.group(1)
    root = root[7:] if root.startswith("crate::") else target(f"backend::{root}")
    root = target(root)
    return f"pub use crate::{root}::{{{', '.join(items)}}};"
head = re.sub(r"^pub use ((?:crate::)?[a-z_:]+)::(\{[^}]*\}|[A-Za-z_]+);", facade, head, flags=re.M)
head = re.sub(r"\n{3,}", "\n\n", head).rstrip() + "\npub use crate::attention::ops::BlockSparseOps;\n"
write(p, head)
used = [n for n, m in names.items() if re.search(rf"\b{n}\b", trait) and n != "BlockSparseOps"]
os.makedirs(f"{SRC}/attention", exist_ok=True)
write(f"{SRC}/attention/ops.rs", "//! The backend trait of attention. The default bodies are the reference implementation in Burn primitives.\n\n"
  + "".join(privates) + "".join(f"use crate::{target(names[n])}::{n};\n" for n in used) + "\n" + trait + '''
#[cfg(feature = "flex")]
impl BlockSparseOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl BlockSparseOps for burn::backend::NdArray {}
''')
p = f"{SRC}/attention/mod.rs"; write(p, insert_decl(read(p), "pub(crate) mod ops;\n"))
added = {}
for old, (src, dst, new) in moved.items():
    if new.endswith("::") or "::" not in new:
        continue
    parent, name = new.rsplit("::", 1)
    a = attrs.get(old, lib_attrs.get(old, []))
    added.setdefault(parent, []).append("".join(x + "\n" for x in a) + f"pub(crate) mod {name};\n")
for parent, lines in added.items():
    p = path_of(parent); s = read(p)
    s = insert_decl(s, "".join(lines))
    write(p, s)
# lib.rs
lib = lib.replace("mod backends;\n", '#[cfg(feature = "cube")]\nmod cube;\n').replace("mod op_plan;\n", 'mod op_plan;\n').replace("mod reference;\n", "")
lib = lib.replace("mod order;\n", '#[cfg(feature = "autodiff")]\nmod outputs;\nmod order;\n', 1)
lib = retarget(lib)
write(f"{SRC}/lib.rs", lib)
for d, _, fs in os.walk(SRC):
    for f in fs:
        if f.endswith(".rs"):
            p = os.path.join(d, f); s = read(p); t = retarget(s) if p != f"{SRC}/lib.rs" else s
            if t != s: write(p, t)
