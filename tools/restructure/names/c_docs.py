#!/usr/bin/env python3
"""Part C, docs: the first lines of public items' docs, in the field's words. `c_docs.py WORKTREE`. Rules, not places: they survive edits."""
import os, re, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import rustuse as R
root = os.path.abspath(sys.argv[1])
# In order; text in backticks and links is left alone unless a rule names it.
RULES = [(re.compile(a), b) for a, b in [
 # kept
 (r"(keys|Last keys|First keys), which are kept whatever their scores", r"\1, which are never evicted"),
 (r"\bare kept whatever their (?:scores?|masses)", "are always selected"), (r"\bWhich are kept whatever their score", "Which are always selected"),
 (r"\bis kept whatever its score", "is always selected"), (r"\bare kept whatever they get", "are always retained"),
 (r"How many are kept\.", "How many are selected."), (r"Sets which blocks are kept by their scores", "Sets which blocks are selected by their scores"),
 (r"in place of keeping it", "instead of storing it"), (r"kept for the backward pass", "stored for the backward pass"), (r"if it is to be kept", "if it is to be stored"),
 (r"are kept for their scores", "are retained for their scores"), (r"\bkept input blocks\b", "kept blocks of inputs"), (r"\bkept key blocks\b", "kept blocks of keys"),
 (r"\bkept tokens\b", "candidates"), (r"each position less are kept", "each position less are stored"),
 (r", kept or not\b", ", all of them"), (r"`kept\(", "`kept("), (r"(?<!`)\bkept\b(?! blocks?)(?!\()", "retained"),
 # neighbours
 (r"What (?:neighbouring queries'|neighbours') lists are expected to have in common", "The share that the lists of adjacent queries are expected to have in common"),
 (r"with what neighbouring queries' lists are expected to have in common", "with the share that the lists of adjacent queries are expected to have in common"),
 (r"What the lists of eight neighbouring queries have in common", "The share that the lists of eight adjacent queries have in common"),
 (r"\bNeighbouring\b", "Adjacent"), (r"\bneighbouring\b", "adjacent"), (r"block and its neighbours", "block and the adjacent ones"),
 (r"over `pool` neighbours", "over `pool` adjacent keys"), (r"as ranges of neighbours", "as contiguous ranges"),
 # together
 (r"LRU|Layouts by what queries see, the latest of a few sizes\. Copies keep theirs together\.", "An LRU cache of layouts by what queries see; clones share it."),
 (r"\bchoose together\b", "share one choice"), (r"that are computed together", "that are computed at once"), (r"chosen together, by the sum", "chosen as one, by the sum"),
 (r"share a KV head count together", "share a KV head count as one"), (r"heads of queries which share keys chose together", "heads of queries which share keys chose as one"),
 (r", all heads together", ", over all heads"), (r"of all query heads together", "of all query heads"), (r"Width of what all heads see together", "Width of all heads' values"),
 (r", of all (rows|its table rows) together", r", over all \1"), (r", in all layers together", ", over all layers"), (r"batch entries together", "over all batch entries"),
 (r"The norm of many tensors together", "The norm over many tensors"), (r"of `model`'s parameters together", "over all of `model`'s parameters"),
 (r"of their norm together", "of their joint norm"), (r"`capacity` together for each", "`capacity` in all for each"),
 # apart
 (r"Whether it may tell heads apart", "Whether its heads may differ"), (r"How far apart these are", "The distance between these"),
 # numbers
 (r"^Its numbers\.", "Its configuration."), (r"Checks the (rule's )?numbers\b", r"Checks the \1parameters"), (r"^The numbers of a (call|choice)", r"Parameters of a \1"),
 (r"^The numbers of \[`Nsa`\]", "Parameters of [`Nsa`]"), (r"Numbers of AdamW's step that stay the same", "Hyperparameters of AdamW"),
 (r"^Numbers of 16 bits below it keep", "Random words of 16 bits below it keep"), (r"by their numbers\b", "by their indices"), (r"negative numbers left out", "negative indices left out"),
 (r"numbers below 0 and from", "indices below 0 and from"), (r"NaN after all numbers", "NaN last"), (r"numbers in capitals are whole", "values in capitals are integers"),
 (r"in a table whose numbers change", "in a table whose words change"), (r"blocks are whole numbers of", "blocks are multiples of"), (r"`entries` are the numbers that", "`entries` are the indices that"),
 (r"The highest numbers of rows", "The top-k of rows"), (r"Lists of the highest numbers of each row, and where numbers stand in them", "The top-k of each row, and the place of each column in it"),
 (r"The `most` highest numbers of each row", "The `most` highest elements of each row"), (r"of those in eight bits a number what the numbers stand for", "of those in eight bits what they stand for"),
 (r"^The numbers of \[`FusedAdamW`\]", "Hyperparameters of [`FusedAdamW`]"), (r"with the numbers that the last", "with what the last"),
 (r"\bA number is (?=retained|kept)", "An element is "), (r"the number at a column", "the element at a column"), (r"where a number is", "where an element is"),
 (r"^Rows at places:", "Gathered rows:"), (r"^By the rows at places", "By the gathered rows"), (r"The norm of all gradients together is", "The norm over all gradients is"), (r"of the norm of all gradients together", "of the norm over all gradients"),
 (r"What the numbers are", "What the elements are"), (r"with new numbers", "with new values"), (r"with the numbers of the last write", "with the values of the last write"),
 (r"copy numbers of the host", "copy host data"), (r"Of the numbers, in their dtype", "Of the data, in its dtype"), (r"Overwrites the numbers", "Overwrites the elements"),
 (r"(?<!\w)Numbers\b", "Elements"), (r"(?<!random )\bnumbers\b", "elements"),
 # walks
 (r"one for each walk over pages of its keys", "one for each list of pages of its keys"), (r"the pages of each walk", "the pages of each list"), (r"queries of walks over pages", "queries over pages"),
 (r"[Pp]ages of a part of a walk", "Pages of one split"), (r"Splits walks into parts of so many pages", "Splits lists of pages into parts of so many"),
 (r"region one of each walk", "region one of each query"), (r"in the order of the walk", "in the order in which they are read"), (r"at the end of a walk of so many", "that sees so many"),
 (r"the last of a walk among them", "the last one of a sequence among them"), (r"Whether kernels walk the lists of keys", "Whether kernels gather single keys by the lists"),
 (r"Whether kernels walk the lists", "Whether kernels gather by the lists"), (r"every row of the call is a walk", "every row of the call has a list of its own"),
 (r"of each walk and head of keys", "of each query and head of keys"),
 # given, listed
 (r"The name that it was given", "Its name"), (r"of the `p` given", "of the `p` patterns"), (r"Ids are given out in order", "Ids are assigned in order"), (r"pages that are given back", "pages that are freed"),
 (r"with its results given: returns", "with known results: returns"), (r"The lists that are given, in any order", "Lists, in any order"), (r"The lists of blocks that are given:", "Lists of blocks:"),
 (r"and none are listed here", "and this layout lists none"), (r"are listed class by class", "are ordered class by class"), (r"How positions are listed", "How positions are ordered"),
 (r"Listed places of a class", "Places of a class"), (r"slots of the listed pages", "slots of these pages"), (r"Blocks listed for each tile", "Blocks of each tile"), (r"their pairs those that are listed:", "their pairs those in the lists:"),
 (r"Pages that are listed for each walk", "Pages that a query selects"),
 # masses
 (r"Which masses of compressed blocks", "Which importance scores of compressed blocks"), (r"\bmasses\b", "importance scores"), (r"\bmass\b", "importance"),
]]
LINE = re.compile(r"^((?:[ \t]*///[^\n]*\n)+)(?=(?:[ \t]*#\[[^\n]*\]\n)*[ \t]*pub (?:const fn|unsafe fn|fn|struct|enum|trait|const|type|mod|(?=\w+:))\s*\w+)", re.M)
changed = 0
for p in R.tracked(root, (".rs",)):
    if not re.match(r"crates/(blocksparse|burn-blocksparse|burn-sparse-transformer|burn-fused-ops)/src/", p): continue
    if re.search(r"/src/(kernels|plan|backends|reference)/", p): continue
    text = R.read(root, p)
    def first(m):
        head, nl, rest = m[1].partition("\n")
        indent, sep, line = head.partition("/// ")
        # Code and links stay, but for rules that name them.
        new = line
        for pattern, to in RULES:
            if "`" in pattern.pattern: new = pattern.sub(to, new)
            else: new = "".join(pattern.sub(to, t) if i % 2 == 0 else t for i, t in enumerate(re.split(r"(`[^`]*`|\]\([^)]*\))", new)))
        return indent + sep + new + nl + rest
    out = LINE.sub(first, text)
    if out != text: R.write(root, p, out); changed += 1
print(f"docs of {changed} files changed")
