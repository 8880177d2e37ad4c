#!/usr/bin/env python3
"""mover.py SRC TABLE: moves modules of a crate. TABLE: lines `old::path new::path` (new file path follows). Adjusts paths and declarations."""
import os, re, subprocess, sys
SRC, TABLE = sys.argv[1], sys.argv[2]
def sh(*a): subprocess.check_call(a)
def read(p): return open(p).read()
def write(p, s):
    os.makedirs(os.path.dirname(p) or ".", exist_ok=True); open(p, "w").write(s)
MOVES = [l.split() for l in read(TABLE).splitlines() if l.strip() and not l.startswith("#")]
MAP = {a: b for a, b in MOVES}
ROOT = "lib.rs"
def file_of(mod):
    p = f"{SRC}/{mod.replace('::', '/')}"
    for c in (p + ".rs", p + "/mod.rs"):
        if os.path.exists(c): return c
def mod_of(path):
    rel = os.path.relpath(path, SRC)[:-3].split("/")
    if rel[-1] in ("mod", "lib"): rel = rel[:-1]
    return rel
def items(body):
    out, depth, cur = [], 0, ""
    for c in body:
        depth += (c == "{") - (c == "}")
        if c == "," and depth == 0: out.append(cur.strip()); cur = ""
        else: cur += c
    out.append(cur.strip())
    return [i for i in out if i]
def moved(path):
    """The new absolute path of `a::b::c` if a prefix of it moves."""
    parts = path.split("::")
    for n in range(len(parts), 0, -1):
        pre = "::".join(parts[:n])
        if pre in MAP: return "::".join([MAP[pre]] + parts[n:])
    return None
def flatten_use(tree):
    """All leaves of a use tree, as (path, alias) strings."""
    tree = tree.strip()
    m = re.match(r"^(.*?)\{(.*)\}$", tree, flags=re.S)
    if not m: return [tree]
    pre = m.group(1)
    out = []
    for i in items(m.group(2)):
        for leaf in flatten_use(i):
            out.append(pre[:-2] if leaf == "self" else (re.sub(r"::$", "", pre) + leaf[4:] if leaf.startswith("self as") else pre + leaf))
    return out
def rewrite(text, mod, is_moved):
    def absolute(path, nest):
        """crate-absolute form of a path that begins with super or crate, or None."""
        if path.startswith("crate::"): return path[7:]
        m = re.match(r"^((?:super::)+)(.*)$", path, flags=re.S)
        if not m: return None
        n = m.group(1).count("super") - nest
        if n <= 0: return None
        base = mod[:len(mod) - n]
        return "::".join(base + [m.group(2)])
    def use(m):
        indent, vis, tree = m.group(1), m.group(2) or "", m.group(3)
        nest = len(indent) // 4 if in_nested(text, m.start()) else 0
        leaves = flatten_use(tree)
        changed, out = False, []
        for leaf in leaves:
            a = absolute(leaf, nest)
            if a is None: out.append(leaf); continue
            new = moved(a.split(" as ")[0].strip())
            alias = " as " + leaf.split(" as ")[1].strip() if " as " in leaf else ""
            if new is not None: out.append("crate::" + new + alias); changed = True
            elif is_moved and leaf.startswith("super::"): out.append("crate::" + a); changed = True
            else: out.append(leaf)
        if not changed: return m.group(0)
        return "\n".join(f"{indent}{vis}use {o};" for o in out)
    def in_nested(t, at):
        depth = 0
        for k in re.finditer(r"^(?:[ ]*)(?:#\[[^\n]*\]\s*)?(?:pub(?:\([^)]*\))? )?mod [a-z_0-9]+ \{|^\}", t[:at], flags=re.M):
            depth += 1 if "{" in k.group(0) else (-1 if depth else 0)
        return depth > 0
    text = re.sub(r"^([ \t]*)(pub(?:\([^)]*\))? )?use ((?:crate|super)::[^;]*);", use, text, flags=re.M)
    # Paths in expressions, docs and attributes.
    def inline(m):
        path = m.group(0)
        line_start = text2.rfind("\n", 0, m.start()) + 1
        if re.match(r"\s*(pub(\([^)]*\))? )?use ", text2[line_start:m.start()]): return path
        nest = 1 if in_nested(text2, m.start()) else 0
        a = absolute(path, nest)
        if a is None: return path
        new = moved(a)
        if new is not None: return "crate::" + new
        if is_moved and path.startswith("super::"): return "crate::" + a
        return path
    text2 = text
    text = re.sub(r"(?<![\w:])(?:crate::|(?:super::)+)[A-Za-z_][\w]*(?:::[A-Za-z_][\w]*)*", inline, text2)
    # visibilities
    def vis(m):
        path = m.group(1)
        new = moved(path)
        return f"pub(in crate::{new})" if new else m.group(0)
    text = re.sub(r"pub\(in crate::([\w:]+)\)", vis, text)
    if is_moved:
        text = text.replace("pub(super)", "pub(crate)")
        text = re.sub(r"pub\(in (?:crate|super)[\w:]*\)", "pub(crate)", text)
    return text
# rewrite all files first, in place
for d, _, fs in os.walk(SRC):
    for f in fs:
        if not f.endswith(".rs"): continue
        p = os.path.join(d, f); mod = mod_of(p); name = "::".join(mod)
        is_moved = any(name == a or name.startswith(a + "::") and not MAP.get(a) is None and os.path.isdir(f"{SRC}/{a.replace('::','/')}") for a in MAP)
        s = read(p); t = rewrite(s, mod, name in MAP)
        if t != s: write(p, t)
# move files, and their declarations
def parent_file(mod):
    par = mod.rsplit("::", 1)[0] if "::" in mod else ""
    return (file_of(par) if par else f"{SRC}/{ROOT}")
for old, new in MOVES:
    src = file_of(old)
    if src is None: print("missing", old, file=sys.stderr); continue
    par = parent_file(old); leaf = old.split("::")[-1]; s = read(par)
    m = re.search(rf"^((?:(?:#\[[^\n]*\]|//[^\n!]*)\n)*)(pub(?:\([^)]*\))? )?mod {leaf};\n", s, flags=re.M)
    attrs = ""
    if m:
        attrs = m.group(1); s = s[:m.start()] + s[m.end():]; write(par, s)
        attrs = "".join(l + "\n" for l in attrs.splitlines() if l.startswith("#["))
    else: print("no declaration of", old, file=sys.stderr)
    # a folder of the same name
    newdir = f"{SRC}/{new.rsplit('::', 1)[0].replace('::', '/')}" if "::" in new else SRC
    os.makedirs(newdir, exist_ok=True)
    if os.path.basename(src) == "mod.rs":
        sh("git", "mv", os.path.dirname(src), f"{SRC}/{new.replace('::', '/')}")
    else:
        sh("git", "mv", src, f"{SRC}/{new.replace('::', '/')}.rs")
    par = parent_file(new)
    if par is None:
        np = f"{newdir}/mod.rs"; write(np, f"//! {new.rsplit('::', 1)[0]}\n\n"); sh("git", "add", np); par = np
        up = parent_file(new.rsplit("::", 1)[0]); u = read(up)
        decl = f"mod {new.rsplit('::', 2)[-2]};\n"
        u2 = re.sub(r"^(?=(?:#\[[^\n]*\]\n)*(?:pub(?:\([^)]*\))? )?mod )", decl, u, count=1, flags=re.M)
        write(up, u2)
    s = read(par); leaf = new.split("::")[-1]
    decl = f"{attrs}pub(crate) mod {leaf};\n"
    rows = s.split("\n"); i = 0
    while i < len(rows) and (rows[i].startswith("//!") or rows[i].startswith("#![") or rows[i].startswith("// ") or not rows[i].strip()): i += 1
    s = "\n".join(rows[:i]) + ("\n" if i and rows[i-1].strip() else "") + decl + "\n".join(rows[i:])
    write(par, s)
sh("cargo", "fmt", "--all")
