#!/usr/bin/env python3
"""Part A: moves the public names of burn-blocksparse and burn-sparse-transformer into topic modules. `a_modules.py WORKTREE`."""
import os, re, subprocess, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import rustuse as R
from names import OPS, OPS_ROOT, LAYERS, LAYERS_ROOT

root = os.path.abspath(sys.argv[1])
OP, LY = "crates/burn-blocksparse/src", "crates/burn-sparse-transformer/src"

def git(*a): subprocess.run(["git", *a], cwd=root, check=True)
def module_file(src, name):
    for p in (f"{src}/{name}/mod.rs", f"{src}/{name}.rs"):
        if os.path.isfile(os.path.join(root, p)): return p
    return None

ITEM_USE = re.compile(r"^(?P<attr>(?:#\[[^\n]*\]\n)*)pub use (?P<tree>[^;]+);\n", re.M)

def exports(lib):
    """name -> (path, attributes) of every `pub use` of the root."""
    out = {}
    for m in ITEM_USE.finditer(lib):
        for path, alias in R.flatten(re.sub(r"\s+", " ", m["tree"])):
            out[alias or path[-1]] = (path, m["attr"])
    return out

def place(spec, root_names, exported, crate):
    homes = {}
    for module, s in spec.items():
        for n in s["names"].split():
            assert n not in homes, n
            homes[n] = module
    roots = set(root_names.split())
    for n in sorted(exported):
        if n in homes or n in roots: continue
        if re.search(r"Ops$", n): homes[n] = "backend"
        print(f"{crate}: new name {n}: {homes.get(n, 'stays at the root')}")
    gone = [n for n in homes if n not in exported]
    if gone: print(f"{crate}: not exported any more: {gone}")
    return {n: h for n, h in homes.items() if n in exported}

def demote_and_collect(text, wanted, keep_all, demoted):
    """`pub` items of a module file that are not in `wanted` become `pub(crate)`; returns what is public. `demoted`: what was `pub use`d, and whence."""
    have = set()
    def use(m):
        leaves = R.flatten(re.sub(r"\s+", " ", m["tree"]))
        keep = [l for l in leaves if keep_all or (l[1] or l[0][-1]) in wanted]
        drop = [l for l in leaves if l not in keep]
        have.update((l[1] or l[0][-1]) for l in keep)
        demoted.update({(l[1] or l[0][-1]): l[0] for l in drop})
        out = ""
        if keep: out += m["attr"] + ("\n" + m["attr"]).join(R.emit("", "pub ", [p], 10**6) for p in R.render(keep)) + "\n"
        if drop: out += m["attr"] + ("\n" + m["attr"]).join(R.emit("", "pub(crate) ", [p], 10**6) for p in R.render(drop)) + "\n"
        return out
    text = ITEM_USE.sub(use, text)
    def item(m):
        if m[2] == "mod":
            return f"pub(crate) mod {m[3]}"
        if keep_all or m[3] in wanted:
            have.add(m[3]); return m[0]
        return f"pub(crate) {m[1]}{m[2]} {m[3]}"
    text = re.sub(r"^pub ((?:unsafe |async )*)(const fn|fn|struct|enum|trait|const|static|type|mod) (\w+)", item, text, flags=re.M)
    return text, have

def drop_private(text, names):
    """Takes `names` out of the private `use`s of a file's top level."""
    def use(m):
        leaves = R.flatten(re.sub(r"\s+", " ", m["tree"]))
        keep = [l for l in leaves if (l[1] or l[0][-1]) not in names]
        if len(keep) == len(leaves): return m[0]
        if not keep: return ""
        return m["attr"] + ("\n" + m["attr"]).join(R.emit("", "", [p], 10**6) for p in R.render(keep)) + "\n"
    return re.sub(r"^(?P<attr>(?:#\[[^\n]*\]\n)*)use (?P<tree>[^;]+);\n", use, text, flags=re.M)

def drop_use(text, name):
    """Takes `name` out of the `pub(crate) use`s of a file's top level."""
    def use(m):
        leaves = R.flatten(re.sub(r"\s+", " ", m["tree"]))
        keep = [l for l in leaves if (l[1] or l[0][-1]) != name]
        if len(keep) == len(leaves): return m[0]
        if not keep: return ""
        return m["attr"] + ("\n" + m["attr"]).join(R.emit("", "pub(crate) ", [p], 10**6) for p in R.render(keep)) + "\n"
    return re.sub(r"^(?P<attr>(?:#\[[^\n]*\]\n)*)pub\(crate\) use (?P<tree>[^;]+);\n", use, text, flags=re.M)

def header(text, doc):
    """A public module's first doc lines; the map of its files becomes a plain comment below."""
    m = re.match(r"((?://![^\n]*\n)*)", text)
    lines, rest = m[1].split("\n")[:-1], text[m.end():]
    docs, plain, inside = [], [], False
    for l in lines:
        if l.strip() == "//! ```text": inside = True; continue
        if inside and l.strip() == "//! ```": inside = False; continue
        (plain if inside else docs).append(l)
    while docs and docs[-1].strip() == "//!": docs.pop()
    if doc is not None:
        more = docs[1:] if docs else []
        docs = [f"//! {d}".rstrip() for d in doc.split("\n")] + more
    out = "\n".join(docs) + "\n"
    if plain: out += "\n" + "\n".join("//" + l[3:] for l in plain) + "\n"
    return out + ("" if rest.startswith("\n") else "\n") + rest

def grouped(names, exported, relative):
    """`pub use` lines of `names`, one group of attributes after another."""
    by = {}
    for n in names:
        path, attr = exported[n]
        attr = re.sub(r"#\[doc\(hidden\)\]\n", "", attr)
        by.setdefault(attr, []).append((relative(path), None))
    out = ""
    for attr in sorted(by):
        for p in R.render(by[attr]): out += attr + R.emit("", "pub ", [p], 10**6) + "\n"
    return out

EXTERN = {"blocksparse", "burn_blocksparse", "burn", "cubecl"}

def arrange(src, spec, homes, exported):
    """Writes the topic modules of a crate and its lib.rs."""
    lib_path = f"{src}/lib.rs"
    lib = R.read(root, lib_path)
    absolute = lambda path: path if path[0] in EXTERN or path[0] == "crate" else ("crate",) + path
    # Facades last: what a module does not show any more they take from where it is.
    for module, s in sorted(spec.items(), key=lambda x: bool(x[1].get("facade"))):
        names = [n for n, h in homes.items() if h == module]
        if s.get("facade"):
            assert module_file(src, module) is None, module
            text = "\n".join(f"//! {d}".rstrip() for d in s["doc"].split("\n")) + "\n\n" + grouped(names, exported, absolute)
            R.write(root, f"{src}/{module}.rs", text)
        else:
            path = module_file(src, module)
            text = header(R.read(root, path), s["doc"])
            demoted = {}
            text, have = demote_and_collect(text, set(names), s.get("keep_all"), demoted)
            for n, path_of in demoted.items():
                if n in exported and exported[n][0] == (module, n):
                    exported[n] = ((module,) + path_of, exported[n][1])
                    text = re.sub(rf"^mod {path_of[0]};", f"pub(crate) mod {path_of[0]};", text, flags=re.M)
                    # Nothing in the crate may need it under its old path then.
                    used = any(re.search(rf"\b{module}::(\{{[^}}]*\b)?{n}\b|super::(\{{[^}}]*\b)?{n}\b", R.read(root, q)) for q in R.tracked(root, (".rs",)) if q.startswith(src) and not q.endswith("/lib.rs"))
                    inside = len(re.findall(rf"\b{n}\b", text)) > 1
                    if not used and not inside:
                        text = drop_use(text, n)
            missing = [n for n in names if n not in have]
            if missing:
                text = drop_private(text, set(missing))
                rel = lambda p: p[1:] if p[0] == module else absolute(p)
                lines = grouped(missing, exported, rel)
                first = re.search(r"^(#\[[^\n]*\]\n)*(pub(\([^)]*\))? )?use ", text, re.M)
                at = (first or re.search(r"^(#\[[^\n]*\]\n)*(pub|fn|struct|///|impl)", text, re.M)).start()
                text = text[:at] + lines + "\n" + text[at:]
            R.write(root, path, text)
    # lib.rs
    names = [n for n in exported if n not in homes]
    first = ITEM_USE.search(lib).start()
    lib = ITEM_USE.sub("", lib)
    roots = ""
    attrs = {}
    for n in names: attrs.setdefault(exported[n][1], []).append((exported[n][0], None))
    for attr in sorted(attrs):
        for p in R.render(attrs[attr]): roots += attr + R.emit("", "pub ", [p], 10**6) + "\n"
    body = lib[first:]
    lib = lib[:first].rstrip("\n") + "\n\n" + roots + ("\n" + body.strip("\n") + "\n" if body.strip() else "")
    for module, s in spec.items():
        hidden = "#[doc(hidden)]\n" if s.get("hidden") else ""
        if re.search(rf"^mod {module};", lib, re.M):
            lib = re.sub(rf"^mod {module};", f"{hidden}pub mod {module};", lib, flags=re.M)
        elif not re.search(rf"^pub mod {module};", lib, re.M):
            # In its place by the alphabet among the modules.
            mods = list(re.finditer(r"^((?:#\[[^\n]*\]\n)*)(?:pub )?mod (\w+);\n", lib, re.M))
            after = [m for m in mods if m[2] < module]
            at = after[-1].end() if after else mods[0].start()
            lib = lib[:at] + f"{hidden}pub mod {module};\n" + lib[at:]
    R.write(root, lib_path, lib)

# 0. What is exported, and where it goes.
op_lib, ly_lib = R.read(root, f"{OP}/lib.rs"), R.read(root, f"{LY}/lib.rs")
if "pub mod backend;" in op_lib: sys.exit("done already")
op_ex, ly_ex = exports(op_lib), exports(ly_lib)
op_home, ly_home = place(OPS, OPS_ROOT, op_ex, "burn-blocksparse"), place(LAYERS, LAYERS_ROOT, ly_ex, "burn-sparse-transformer")
op_mods = set(re.findall(r"^(?:pub )?mod (\w+);", op_lib, re.M))
ly_mods = set(re.findall(r"^(?:pub )?mod (\w+);", ly_lib, re.M))

# 1. Private modules that give up their names to public ones.
MOVED = {"ops": "backend", **{s["moved_from"]: m for m, s in OPS.items() if s.get("moved_from")}}
for old, new in MOVED.items():
    p = module_file(OP, old)
    git("mv", os.path.dirname(p) if p.endswith("/mod.rs") else p, f"{OP}/{new}" + ("" if p.endswith("/mod.rs") else ".rs"))
for p in R.tracked(root):
    if not p.startswith(OP + "/"): continue
    text = was = R.read(root, p)
    for old, new in MOVED.items():
        text = R.rewrite_uses(text, {"crate"}, lambda q: ("crate", new) + q[2:] if q[1:2] == (old,) else q)
        text = re.sub(rf"\bcrate::{old}\b(?=::)", f"crate::{new}", text)
    if p == f"{OP}/lib.rs":
        for old, new in MOVED.items():
            text = re.sub(rf"^mod {old};\n", f"mod {new};\n", text, flags=re.M)
            text = re.sub(rf"^(pub use ){old}::", rf"\1{new}::", text, flags=re.M)
    if text != was: R.write(root, p, text)
op_ex = {n: ((MOVED.get(q[0], q[0]),) + q[1:], a) for n, (q, a) in op_ex.items()}
op_mods = {MOVED.get(m, m) for m in op_mods}

# 2. Every use of a name.
def mapper(crate, homes, mods=()):
    def change(q):
        if q[0] != crate or len(q) < 2 or q[1] not in homes: return q
        n = q[1]
        if crate == "crate" and n in mods and not n[0].isupper(): return q
        return (crate, homes[n]) + q[1:]
    return change

def paths(text, crate, homes, mods=()):
    def sub(m):
        n = m[1]
        if n not in homes: return m[0]
        if crate == "crate" and n in mods and not n[0].isupper(): return m[0]
        return f"{crate}::{homes[n]}::{n}"
    return re.sub(rf"(?<![\w:]){crate}::(\w+)(?![\w])", sub, text)

# `pages` has submodules of names: `burn_blocksparse::pages::X` -> `burn_blocksparse::paged::pages::X`, by the same rule.
ly_before = dict(ly_ex)
for p in R.tracked(root):
    if p.startswith("docs/log.md"): continue
    text = was = R.read(root, p)
    for crate, homes in (("burn_blocksparse", op_home), ("burn_sparse_transformer", ly_home)):
        if crate in text:
            text = R.rewrite_uses(text, {crate}, mapper(crate, homes))
            text = paths(text, crate, homes)
    for src, homes, mods in ((OP, op_home, op_mods), (LY, ly_home, ly_mods)):
        if p.startswith(src + "/"):
            text = R.rewrite_uses(text, {"crate"}, mapper("crate", homes, mods))
            text = paths(text, "crate", homes, mods)
    if text != was: R.write(root, p, text)
change = mapper("burn_blocksparse", op_home)
ly_ex = {n: (change(q), a) for n, (q, a) in ly_ex.items()}

# 3. The modules themselves.
arrange(OP, OPS, op_home, op_ex)
arrange(LY, LAYERS, ly_home, ly_ex)
# 4. Pages that name files or say where the names are.
for p, pairs in (("docs/design.md", ((r"src/ops/    ", "src/backend/"), (r"(?<=`)ops/", "backend/"), (r"src/block_sparse/   ", "src/sparse_linear/"), (r"(?<=`)block_sparse/(?=mod|values|products)", "sparse_linear/"))),
                 ("docs/training-ops.md", ((r"All are in `burn_blocksparse`\.", "All are in `burn_blocksparse::ops`."),))):
    path = os.path.join(root, p)
    if not os.path.isfile(path): print(f"{p}: not there"); continue
    text = R.read(root, p)
    for a, b in pairs: text = re.sub(a, b, text)
    R.write(root, p, text)
here = os.path.dirname(os.path.abspath(__file__))
for src, text, before in ((OP, "front-op.txt", "//! # Features\n"), (LY, "front-layers.txt", "//! # The model and backends\n")):
    lib = R.read(root, f"{src}/lib.rs")
    front = "".join(f"//! {l}".rstrip() + "\n" for l in open(os.path.join(here, text), encoding="utf-8").read().split("\n")[:-1])
    if "# Which item for which job" not in lib:
        assert before in lib, f"{src}/lib.rs has no {before!r}"
        R.write(root, f"{src}/lib.rs", lib.replace(before, front + before, 1))
subprocess.run(["cargo", "fmt", "--all"], cwd=root, check=True)
for src in (OP, LY):
    lib = R.read(root, f"{src}/lib.rs")
    n = len(exports(lib)) + len(re.findall(r"^pub mod ", lib, re.M))
    print(f"{src}: {n} names at the root")
