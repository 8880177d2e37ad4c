"""Reading and writing `use` trees, in Rust sources, doc comments and Markdown."""
import os, re, subprocess

def tracked(root, exts=(".rs", ".md")):
    out = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True).stdout
    return [p for p in out.split("\n") if p.endswith(tuple(exts)) and os.path.isfile(os.path.join(root, p))]

def read(root, p):
    with open(os.path.join(root, p), encoding="utf-8") as f: return f.read()

def write(root, p, text):
    path = os.path.join(root, p)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f: f.write(text)

def split_top(s):
    parts, depth, cur = [], 0, ""
    for c in s:
        if c == "{": depth += 1
        if c == "}": depth -= 1
        if c == "," and depth == 0:
            parts.append(cur); cur = ""
        else: cur += c
    parts.append(cur)
    return [p.strip() for p in parts if p.strip()]

def flatten(tree, prefix=()):
    """`a::{b, c::d as e}` -> [(('a','b'), None), (('a','c','d'), 'e')]; `self` stays a last segment."""
    tree = tree.strip()
    if "{" in tree:
        head, rest = tree.split("{", 1)
        rest = rest.rstrip()
        assert rest.endswith("}"), tree
        head = tuple(x for x in head.strip().split("::") if x)
        out = []
        for part in split_top(rest[:-1]): out += flatten(part, prefix + head)
        return out
    m = re.match(r"^(.*?)(?:\s+as\s+(\w+))?$", tree, re.S)
    return [(prefix + tuple(m[1].strip().split("::")), m[2])]

def render(leaves):
    """Leaves -> `use` paths, one a module, names sorted by rustfmt later."""
    groups = {}
    for path, alias in leaves:
        groups.setdefault(path[:-1], []).append(path[-1] + (f" as {alias}" if alias else ""))
    out = []
    for mod in sorted(groups):
        names = sorted(set(groups[mod]), key=lambda n: (n != "self", n))
        head = "::".join(mod)
        if len(names) == 1 and names[0] != "self":
            out.append(f"{head}::{names[0]}" if head else names[0])
        else:
            out.append(f"{head}::{{{', '.join(names)}}}")
    return out

USE = re.compile(r"(?P<vis>(?:pub(?:\([^)]*\))?\s+)?)use\s+(?P<crate>\w+)::")

def uses(text, crates):
    """(start of line, prefix of line, visibility, tree as written, end) of each `use` of one of `crates`."""
    for m in USE.finditer(text):
        if m["crate"] not in crates: continue
        line = text.rfind("\n", 0, m.start()) + 1
        prefix = text[line:m.start()]
        if not re.fullmatch(r"\s*(//[/!]\s*)?(#\s+)?(#\[[^\]]*\]\s*)?", prefix): continue
        end = text.find(";", m.end())
        if end < 0: continue
        tree = text[m.start("crate"):end]
        if len(tree) > 4000: continue
        comment = re.match(r"\s*(//[/!])?\s*(#\s+)?", prefix)
        tree = re.sub(r"\n[ \t]*(//[/!])?[ \t]*(#[ \t]+)?", " ", tree)
        yield line, prefix, m["vis"], tree, end + 1

def emit(prefix, vis, paths, width=100):
    """Lines of `use`s with the prefix of the line they stood in; those in comments are wrapped here, the others by rustfmt."""
    lines = []
    for path in paths:
        one = f"{prefix}{vis}use {path};"
        if len(one) > width and "{" in path:
            head, names = path.split("{", 1)
            lines.append(f"{prefix}{vis}use {head}{{")
            cur = ""
            for name in names.rstrip("}").split(", "):
                if cur and len(prefix) + 4 + len(cur) + len(name) + 2 > width:
                    lines.append(f"{prefix}    {cur}"); cur = ""
                cur += (" " if cur else "") + name + ","
            lines.append(f"{prefix}    {cur}")
            lines.append(f"{prefix}}};")
        else: lines.append(one)
    return "\n".join(lines)

def rewrite_uses(text, crates, change):
    """Rewrites each `use` of `crates` by `change(path) -> path`, path a tuple of segments."""
    out, at = "", 0
    for line, prefix, vis, tree, end in list(uses(text, crates)):
        if line < at: continue
        leaves = flatten(tree)
        new = [(change(path), alias) for path, alias in leaves]
        if new == leaves: continue
        # An attribute on the line above is of every `use` that comes of this one.
        attribute = re.search(r"((?:[ \t]*#\[[^\n]*\]\n)+)$", text[:line])
        between = "\n"
        lines = emit(prefix, vis, render(new))
        if attribute and not prefix.strip().startswith("//"):
            lines = ("\n" + attribute[1]).join(emit(prefix, vis, [p]) for p in render(new))
        out += text[at:line] + lines
        at = end
    return out + text[at:]
