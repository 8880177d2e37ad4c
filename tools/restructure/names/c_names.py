#!/usr/bin/env python3
"""Part C: renames public identifiers by renames.tsv. `c_names.py WORKTREE`. Code, code in comments and pages, links; no strings, no prose."""
import os, re, subprocess, sys
here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, here)
import lex, rustuse as R

root = os.path.abspath(sys.argv[1])
rows = []
for line in open(os.path.join(here, "renames.tsv"), encoding="utf-8"):
    if line.startswith("#") or not line.strip(): continue
    f = line.rstrip("\n").split("\t") + [""] * 4
    rows.append(dict(old=f[0], new=f[1], how=f[2], scope=[s for s in f[3].split(",") if s], note=f[4]))

NOT_AFTER = {"Fixed": r"(?<!Pattern::)(?<!Self::)", "Chosen": r"(?<!DsaTarget::)", "Residual": "", "Norm": r"(?<!Config::)"}

rows.sort(key=lambda r: not r["how"].startswith("variant:"))  # Stable: variants while their enums have the old names.

def rules(path):
    out = []
    for r in rows:
        how, old = r["how"], re.escape(r["old"])
        inside = not r["scope"] or any(path == s or path.startswith(s.rstrip("/") + "/") for s in r["scope"])
        if how.startswith("variant:"):
            enum = how.split(":")[1]
            out.append((re.compile(rf"(?<={enum}::){old}\b"), r["new"]))
            if path in r["scope"]: out.append((re.compile(rf"\b{old}\b"), r["new"]))
        elif not inside: continue
        elif how == "type": out.append((re.compile(rf"{NOT_AFTER.get(r['old'], '')}\b{old}(?=(?:Metadata)?\b)"), r["new"]))
        elif how == "word": out.append((re.compile(rf"(?<!mod )\b{old}\b(?!!|::(?!<))"), r["new"]))
        elif how == "field": out.append((re.compile(rf"(?<=\.){old}\b(?!\()|(?<![:.\w]){old}(?=: )"), r["new"]))
        elif how == "super": out.append((re.compile(rf"(?<=super::){old}\b"), r["new"]))
        elif how == "access": out.append((re.compile(rf"(?<=[\w)]\.){old}\b(?!\()"), r["new"]))
        elif how == "pubmethod": out.append((re.compile(rf"(?<=    pub fn ){old}\b|(?<=[\w)]\.){old}(?=\()|(?<=Self::){old}\b"), r["new"]))
        elif how == "argument":
            # A method that takes something, where one of the same name takes nothing.
            out.append((re.compile(rf"(?<=\.){old}(?=\([^)])|(?<=fn ){old}(?=\(&self, )|(?<=DeviceLayout::){old}\b|(?<=Self::){old}\b"), r["new"]))
        elif how == "method":
            out.append((re.compile(rf"(?<=fn ){old}\b|(?<=\.){old}(?=\(|::<)|(?<=`){old}(?=(?:\(\))?`)"), r["new"]))
            out.append((re.compile(rf"(\b(?:Self|[A-Z]\w*)(?:::<[^<>]*>)?::){old}\b"), r"\1" + r["new"]))
            if r["old"].isupper(): out.append((re.compile(rf"(?<=const ){old}\b"), r["new"]))
    return out

def inline(t, path):
    """Variables in format strings: `{old}`, `{old:?}`."""
    if "{" not in t: return t
    for r in rows:
        if r["how"] == "word" and "{" + r["old"] in t and (not r["scope"] or any(path == q or path.startswith(q.rstrip("/") + "/") for q in r["scope"])):
            t = re.sub(rf"(?<!\{{)\{{{re.escape(r['old'])}(?=[}}:])", "{" + r["new"], t)
    return t

# A prefilter: most files meet few of the names.
olds = re.compile("|".join(re.escape(r["old"]) for r in rows))
changed, strings = 0, []
# Strings that name an item: errors, and what tests expect of them.
STRINGS = re.compile(r"is differentiable once|options\.choice_walk|must be Forced \{|^\"(attention_masses|residual_norm)\"$")
for p in R.tracked(root):
    if p == "docs/log.md": continue
    text = R.read(root, p)
    if p == "CHANGELOG.md" and "### Names, old to new" in text: continue
    if not olds.search(text): continue
    rs = rules(p)
    def sub(t):
        for pattern, new in rs: t = pattern.sub(new, t)
        return t
    out = lex.rename(p, text, sub, lambda t: inline((sub(t) if STRINGS.search(t) else t).replace("got AboveMax(", "got MinP("), p))
    if p.endswith(".rs"):
        for k, t in lex.rust_parts(out):
            if k == "string":
                hit = [r["old"] for r in rows if r["how"] in ("word", "type") and len(r["old"]) > 5 and not r["note"].startswith("of ") and re.search(rf"\b{re.escape(r['old'])}\b", t)]
                if hit: strings.append(f"{p}: {hit}: {t[:100]!r}")
    if out != text: R.write(root, p, out); changed += 1
print(f"{changed} files changed")
print("strings that keep an old name (look at them):", *strings, sep="\n  ")

# What is written to files keeps its text.
p = "crates/blocksparse/src/pages/eviction/config.rs"
text = R.read(root, p)
if 'rename = "given"' not in text:
    R.write(root, p, re.sub(r"^    Custom,$", '    #[serde(rename = "given")]\n    Custom,', text, count=1, flags=re.M))

# The table in the change log: public names only.
# Those of `backend` and `internal` are nobody's.
listed = {l.strip() for l in open(os.path.join(root, "docs/dev/public-names.txt"), encoding="utf-8")} if os.path.exists(os.path.join(root, "docs/dev/public-names.txt")) else set()
public = {l.split("::")[-1] for l in listed if "::backend::" not in l and "::internal::" not in l}
lines = []
for r in rows:
    m = re.match(r"of ([\w, ]+)", r["note"])
    if r["how"].startswith("variant:"): owners = [r["how"].split(":")[1]]
    elif m: owners = m[1].split(", ")
    else: owners = None
    if owners is None and (r["old"] in public or not public): lines.append(f"| `{r['old']}` | `{r['new']}` |")
    if owners is not None:
        lines += [f"| `{o}::{r['old']}` | `{r['new']}` |" for o in owners if o in public or not public]
table = "\n".join(dict.fromkeys(sorted(lines, key=str.lower)))
log = R.read(root, "CHANGELOG.md")
if "### Names, old to new" not in log:
    section = f"""### Names, old to new
Names moved into topic modules, so `use burn_blocksparse::X` may become `use burn_blocksparse::selection::X`: `docs/dev/public-names.txt` lists
where each stands. These also have other names. Text forms, records and saved configurations are as they were.

| old | new |
|---|---|
{table}
"""
    at = re.search(r"^## ", log, re.M)
    nxt = re.search(r"^## ", log[at.end():], re.M)
    end = at.end() + nxt.start() if nxt else len(log)
    log = log[:end].rstrip("\n") + "\n\n" + section + ("\n" + log[end:] if nxt else "")
    R.write(root, "CHANGELOG.md", log)
subprocess.run(["cargo", "fmt", "--all"], cwd=root, check=True)
