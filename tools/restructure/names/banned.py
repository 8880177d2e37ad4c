#!/usr/bin/env python3
"""Lists public names, and first lines of public items' docs, that hold a banned word. `banned.py WORKTREE [--docs]`"""
import os, re, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import rustuse as R
root = os.path.abspath(sys.argv[1])
BAD = {"walk","walks","walked","mass","masses","likeness","pick","picks","picked","listed","neighbour","neighbours","neighbouring","kept","numbers","given","keeping","apart","together"}
TEXT = re.compile(r"\b(walk(?:s|ed|ing)?|mass(?:es)?|likeness|picks?|picked|listed|neighbour\w*|rows at(?! a time)|numbers|given|keeping|apart|together|kept(?! blocks?))\b", re.I)
def words(n): return [w.lower() for w in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", n)]
names, docs = [], []
known = {l.split("::")[-1] for l in open(os.path.join(root, "docs/dev/public-names.txt"))} if os.path.exists(os.path.join(root, "docs/dev/public-names.txt")) else set()
known = {k.strip() for k in known}
for p in R.tracked(root, (".rs",)):
    if not re.match(r"crates/(blocksparse|burn-blocksparse|burn-sparse-transformer)/src/", p): continue
    if re.search(r"/src/(kernels|plan|backends|reference)/", p): continue
    text = R.read(root, p)
    for m in re.finditer(r"^((?:[ \t]*///[^\n]*\n)*)((?:[ \t]*#\[[^\n]*\]\n)*)([ \t]*)pub (?:const fn|unsafe fn|fn|struct|enum|trait|const|type|mod|(?=\w+:))\s*(\w+)", text, re.M):
        n = m[4]
        line = text.count("\n", 0, m.end()) + 1
        if set(words(n)) & BAD: names.append(f"{p}:{line}: {n}")
        first = re.match(r"[ \t]*/// ?([^\n]*)", m[1])
        if first and TEXT.search(re.sub(r"`[^`]*`|\]\([^)]*\)", "", first[1])): docs.append(f"{p}:{line}: {n}: {first[1][:160]}")
    for m in re.finditer(r"^pub enum (\w+)[^{]*\{(.*?)^\}", text, re.M | re.S):
        for v in re.finditer(r"^    ([A-Z]\w*)", m[2], re.M):
            if set(words(v[1])) & BAD: names.append(f"{p}: {m[1]}::{v[1]}")
print(len(names), "names"); print("\n".join(names))
print(len(docs), "first lines")
if "--docs" in sys.argv: print("\n".join(docs))
