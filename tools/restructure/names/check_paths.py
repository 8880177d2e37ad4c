#!/usr/bin/env python3
"""A quick check without a compiler: every path `crate::…`, `burn_blocksparse::…`, `burn_sparse_transformer::…`, `blocksparse::…` in code
and in doc comments leads to an item. `check_paths.py WORKTREE`. Not a compiler: it knows no macros and no visibility below `pub`."""
import os, re, sys, functools
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import rustuse as R, lex
root = os.path.abspath(sys.argv[1])
SRC = {"blocksparse": "crates/blocksparse/src", "burn_blocksparse": "crates/burn-blocksparse/src", "burn_sparse_transformer": "crates/burn-sparse-transformer/src"}
if os.path.isdir(os.path.join(root, "crates/blocksparse-cubecl")): SRC["blocksparse_cubecl"] = "crates/blocksparse-cubecl/src"

@functools.lru_cache(None)
def module(src, path):
    """(private and public names) of a module, or None."""
    base = os.path.join(root, src, *path)
    for f in ([os.path.join(root, src, "lib.rs")] if not path else [base + ".rs", os.path.join(base, "mod.rs")]):
        if os.path.isfile(f): break
    else: return None
    text = "".join(t if k == "code" else " " for k, t in lex.rust_parts(open(f, encoding="utf-8").read()))
    pub, all_ = {}, set()
    for m in re.finditer(r"^(?:\s{0,8})(pub(?:\([^)]*\))? )?(?:unsafe |async |const (?=fn))*(fn|struct|enum|union|trait|type|const|static|mod|macro_rules!) (\w+)", text, re.M):
        all_.add(m[3])
        if m[1] == "pub " and not m[0].startswith(" "): pub[m[3]] = m[2]
    for m in re.finditer(r"^\s{0,4}(pub(?:\([^)]*\))? )?use ([^;]+);", text, re.M):
        for leaf, alias in R.flatten(re.sub(r"\s+", " ", m[2])):
            n = alias or leaf[-1]
            if n == "*": all_.add("*")
            all_.add(n)
            if m[1] == "pub ": pub[n] = "use"
    return frozenset(pub), frozenset(all_), frozenset(n for n, k in pub.items() if k == "mod")

bad = 0
def check(p, crate, path):
    global bad
    inside = crate == "crate"
    if inside:
        src = next((s for s in SRC.values() if p.startswith(s + "/")), None)
        if src is None: return
    else:
        src = SRC.get(crate)
        if src is None: return
    at = ()
    for i, seg in enumerate(path):
        m = module(src, at)
        if m is None: return
        names = m[1] if inside else m[0]
        if seg in ("self", "*", "super") or seg.endswith("Metadata"): return
        if seg not in names and "*" not in m[1]:
            print(f"{p}: {crate}::{'::'.join(path)}: no {seg}"); bad += 1; return
        at += (seg,)
        if module(src, at) is None: return

for p in R.tracked(root):
    if p == "docs/log.md" or p.startswith("CHANGELOG") or "/target/" in p: continue
    text = R.read(root, p)
    crates = set(SRC) | ({"crate"} if p.endswith(".rs") else set())
    spans = []
    for line, prefix, vis, tree, end in R.uses(text, crates):
        spans.append((line, end))
        for leaf, alias in R.flatten(tree): check(p, leaf[0], leaf[1:])
    rest, at = "", 0
    for a, b in spans:
        if a >= at: rest += text[at:a]; at = b
    rest += text[at:]
    for m in re.finditer(rf"(?<![\w:$/\"])({'|'.join(crates)})((?:::\w+)+)", rest):
        check(p, m[1], tuple(m[2].split("::")[1:]))
print(f"{bad} paths lead nowhere")
