"""Cuts Rust and Markdown into code, quoted code, prose and strings, so that a rename meets identifiers only."""
import re

def rust_parts(text):
    """[(kind, text)] with kind 'code', 'comment' or 'string'."""
    out, i, start, n = [], 0, 0, len(text)
    def flush(to):
        if to > start: out.append(("code", text[start:to]))
    while i < n:
        c = text[i]
        if c == "/" and text.startswith("//", i):
            flush(i); j = text.find("\n", i); j = n if j < 0 else j
            # Lines of comment in a row are one part, so that fences are seen.
            while True:
                m = re.match(r"\n[ \t]*//[^\n]*", text[j:j + 4000])
                if not m: break
                j += m.end()
            out.append(("comment", text[i:j])); i = start = j
        elif c == "/" and text.startswith("/*", i):
            flush(i); j = text.find("*/", i); j = n if j < 0 else j + 2
            out.append(("comment", text[i:j])); i = start = j
        elif c in "rbc" and (i == 0 or not (text[i-1].isalnum() or text[i-1] == "_")) and (m := re.match(r'[bc]?r(#*)"', text[i:i+20])):
            flush(i); j = text.find('"' + m[1], i + m.end()); j = n if j < 0 else j + 1 + len(m[1])
            out.append(("string", text[i:j])); i = start = j
        elif c == '"':
            flush(i); j = i + 1
            while j < n and text[j] != '"': j += 2 if text[j] == "\\" else 1
            out.append(("string", text[i:j + 1])); i = start = j + 1
        elif c == "'":
            m = re.match(r"'(\\.[^']*|[^\\'])'", text[i:i+16])
            i += m.end() if m else 1
        else: i += 1
    flush(n)
    return out

SPAN = re.compile(r"\[`?[\w:]+(?:\(\))?`?\](?:\((?:[^()\s]|\(\))*\)|: [\w:]+)?|(`+)(?:(?!\1)[^\n]|\n(?!\s*(?:///|//!|//)?\s*\n))*?\1|\]\((?:[^()\s]|\(\))*\)")

def prose(text, sub, fence_code=True):
    """`sub` on the code within prose: fences that hold Rust, backticks, and targets of links."""
    out, code = [], False
    block = []
    def flush():
        nonlocal block
        if block:
            out.append(SPAN.sub(lambda m: sub(m[0]), "\n".join(block))); block = []
    for line in text.split("\n"):
        bare = re.sub(r"^[ \t]*(///|//!|//)?[ \t]?", "", line)
        if bare.lstrip().startswith("```"):
            flush()
            if code is False:
                lang = bare.lstrip()[3:].split(",")[0].strip()
                code = "rust" if lang in ("", "rust", "no_run", "should_panic", "compile_fail", "ignore") else "other"
            else: code = False
            out.append(line); continue
        if code == "rust" and fence_code:
            flush(); out.append("".join(t if k == "string" else sub(t) for k, t in rust_parts(line)))
        elif code == "other": flush(); out.append(line)
        else: block.append(line)
    flush()
    return "\n".join(out)

def rename(path, text, sub, string=lambda t: t):
    if path.endswith(".rs"):
        return "".join(sub(t) if k == "code" else prose(t, sub) if k == "comment" else string(t) for k, t in rust_parts(text))
    if path.endswith(".md"): return prose(text, sub)
    return text
