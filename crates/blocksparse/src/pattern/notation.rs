//! Patterns as text, for command lines and configuration files: `"fixed:128,32".parse::<Pattern>()`.
//!
//! ```text
//! heads        = union { "/" union }                     heads in turn
//! union        = intersection { "+" intersection }
//! intersection = part { "&" part }
//! part         = "(" heads ")" | one of Pattern::NOTATION
//! ```

use std::str::FromStr;

use crate::{LayoutError, Pattern};

/// Maximum depth of nested brackets, since patterns are parsed and used recursively.
const MAX_DEPTH: usize = 32;

/// Maximum number of children of a `tree` node, and of windows of `deepspeed-variable`.
const MANY: usize = 1 << 20;

impl Pattern {
    /// Forms that `"…".parse::<Pattern>()` reads. Names in capitals stand for integers, `[…]` is optional, and `,…` means further values.
    ///
    /// Forms combine with `&` (pairs that all parts allow), `+` (pairs that any part allows; `&` binds tighter) and `/` (heads use the
    /// parts in turn; binds least), and with brackets. Spaces around parts and numbers are ignored. The [`Display`](std::fmt::Display) text of a pattern
    /// is a different notation.
    ///
    /// | text | pattern |
    /// |---|---|
    /// | `vertical:3+slash:0,1` | the pairs of `Pattern::vertical_slash([3], [0, 1])` |
    /// | `deepspeed-variable:100,16,32+global-keys:0` | those of `Pattern::deepspeed_variable(&[16, 32], 100, [0], false)`; with `global:0` of `…, true)` |
    /// | `tree:CHILDREN` | a callback over the nodes of a complete tree, level by level: each node sees itself and its ancestors |
    ///
    /// ```
    /// use blocksparse::Pattern;
    ///
    /// let pattern: Pattern = "documents:0,40 & (local:8 + strided:16)".parse()?;
    /// let near_or_strided = Pattern::union([Pattern::local(8), Pattern::strided(16)]);
    /// assert_eq!(pattern, Pattern::intersection([Pattern::documents([0, 40]), near_or_strided]));
    ///
    /// let error = "fixed:128".parse::<Pattern>().unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "cannot read 'fixed:128' as a pattern: expected fixed:STRIDE,COLUMNS[,VERTS], got 1 number"
    /// );
    /// # Ok::<(), blocksparse::LayoutError>(())
    /// ```
    pub const NOTATION: &[&str] = &[
        "dense",
        "causal",
        "local:WINDOW",
        "strided:STRIDE",
        "merged-strided:STRIDE",
        "fixed:STRIDE,COLUMNS[,VERTS]",
        "prefix:LENGTH",
        "streaming:WINDOW,SINK",
        "window:REACH[,DILATION]",
        "chunked:SIZE[,BEFORE,AFTER]",
        "global:TOKEN,…",
        "global-keys:TOKEN,…",
        "longformer:REACH,DILATION,TOKEN,…",
        "bigbird:BLOCK,BLOCKS,RANDOM[,SEED]",
        "random-blocks:BLOCK,BLOCKS,COUNT[,SEED]",
        "deepspeed-fixed:STRIDE,COLUMNS,VERTS[,horizontal]",
        "deepspeed-variable:SEQ,WINDOW,…",
        "vertical:COLUMN,…",
        "slash:DISTANCE,…",
        "documents:START,…",
        "packed:START,…(PATTERN)",
        "tree:CHILDREN",
    ];
}

/// Parses the notation of [`Pattern::NOTATION`]. Combinations of parameters are checked when a layout is built, as for any pattern.
impl FromStr for Pattern {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<Self, LayoutError> {
        parse(text)
    }
}

fn parse(text: &str) -> Result<Pattern, LayoutError> {
    check_brackets(text)?;
    joined(text, '/', Pattern::PerHead, |union| {
        joined(union, '+', Pattern::Union, |intersection| {
            joined(intersection, '&', Pattern::Intersection, parse_part)
        })
    })
}

/// Splits the text at `separator` outside of brackets, parses the parts and joins them. A single part is returned as it is.
fn joined(
    text: &str,
    separator: char,
    join: fn(Vec<Pattern>) -> Pattern,
    parse: impl Fn(&str) -> Result<Pattern, LayoutError>,
) -> Result<Pattern, LayoutError> {
    let text = text.trim();
    let mut depth = 0;
    let parts = text.split(|c| {
        depth += match c {
            '(' => 1,
            ')' => -1,
            _ => 0,
        };
        c == separator && depth == 0
    });
    let parts: Vec<&str> = parts.collect();
    if let Some(empty) = parts.iter().position(|part| part.trim().is_empty())
        && parts.len() > 1
    {
        let side = if empty == 0 { "before" } else { "after" };
        let before = parts[..empty.max(1)].iter();
        let at: usize = before.map(|part| part.chars().count() + 1).sum();
        let expected = format!("a pattern {side} '{separator}' at character {at}");
        return Err(error(text, expected, "nothing"));
    }
    let mut parts = (parts.into_iter().map(parse)).collect::<Result<Vec<_>, _>>()?;
    Ok(match parts.len() {
        1 => parts.remove(0),
        _ => join(parts),
    })
}

fn check_brackets(text: &str) -> Result<(), LayoutError> {
    let mut open = Vec::new();
    for (at, c) in (1..).zip(text.trim().chars()) {
        match c {
            '(' if open.len() == MAX_DEPTH => {
                let expected = format!("at most {MAX_DEPTH} brackets inside of one another");
                return Err(error(text, expected, "more"));
            }
            '(' => open.push(at),
            ')' if open.pop().is_none() => {
                let expected = format!("'(' before ')' at character {at}");
                return Err(error(text, expected, "none"));
            }
            _ => {}
        }
    }
    match open.pop() {
        None => Ok(()),
        Some(at) => {
            let expected = format!("')' after '(' at character {at}");
            Err(error(text, expected, "none"))
        }
    }
}

fn parse_part(text: &str) -> Result<Pattern, LayoutError> {
    let text = text.trim();
    if let Some(inner) = text.strip_prefix('(').and_then(|t| t.strip_suffix(')')) {
        return parse(inner);
    }
    let (name, arguments) = text.split_once(':').unwrap_or((text, ""));
    let name = name.trim();
    let forms = Pattern::NOTATION.iter().copied();
    let Some(form) = forms.clone().find(|form| name_of(form) == name) else {
        return Err(match name.is_empty() {
            true => error(text, format!("a pattern such as {SUCH_AS}"), "nothing"),
            false => error(text, expected_for(name), format!("'{name}'")),
        });
    };
    if name == "packed" {
        let inner = arguments.split_once('(');
        let Some((starts, Some(inner))) = inner.map(|(s, inner)| (s, inner.strip_suffix(')')))
        else {
            return Err(error(text, form, "no pattern in brackets"));
        };
        return match numbers(text, form, starts)? {
            starts if starts.is_empty() => Err(error(text, form, "no number")),
            starts => Ok(Pattern::packed(starts, parse(inner)?)),
        };
    }
    let (arguments, horizontal) = match arguments.trim_end().strip_suffix("horizontal") {
        Some(rest) if name == "deepspeed-fixed" => (rest.trim_end().trim_end_matches(','), true),
        _ => (arguments, false),
    };
    let numbers = numbers(text, form, arguments)?;
    Ok(match (name, numbers.as_slice()) {
        ("dense", []) => Pattern::dense(),
        ("causal", []) => Pattern::causal(),
        ("local", &[window]) => Pattern::local(window),
        ("strided", &[stride]) => Pattern::strided(stride),
        ("merged-strided", &[stride]) => Pattern::merged_strided(stride),
        ("fixed", &[stride, columns]) => Pattern::fixed(stride, columns),
        ("fixed", &[stride, columns, verts]) => Pattern::fixed_heads(stride, columns, verts),
        ("prefix", &[prefix]) => Pattern::prefix_lm(prefix),
        ("streaming", &[window, sink]) => Pattern::streaming(window, sink),
        ("window", &[reach]) => Pattern::window(reach),
        ("window", &[reach, dilation]) => Pattern::dilated_window(reach, dilation),
        ("chunked", &[size]) => Pattern::chunked(size),
        ("chunked", &[size, before, after]) => Pattern::chunked_window(size, before, after),
        ("global", [_, ..]) => Pattern::global(numbers),
        ("global-keys", [_, ..]) => Pattern::global_keys(numbers),
        ("longformer", &[reach, dilation, ref tokens @ ..]) if !tokens.is_empty() => {
            Pattern::longformer(reach, dilation, tokens.iter().copied())
        }
        ("bigbird", &[block, blocks, random]) => Pattern::bigbird(block, blocks, random, 0),
        ("bigbird", &[block, blocks, random, seed]) => {
            Pattern::bigbird(block, blocks, random, seed as u64)
        }
        ("random-blocks", &[block, blocks, count]) => {
            Pattern::random_blocks(block, blocks, count, 0)
        }
        ("random-blocks", &[block, blocks, count, seed]) => {
            Pattern::random_blocks(block, blocks, count, seed as u64)
        }
        ("deepspeed-fixed", &[stride, columns, verts]) => {
            Pattern::deepspeed_fixed(stride, columns, verts, horizontal)
        }
        ("deepspeed-variable", &[seq, ref windows @ .., last]) => {
            if seq / last.max(1) > MANY {
                let expected = format!("SEQ of at most {MANY} of the last WINDOW");
                return Err(error(text, expected, format!("{seq} of {last}")));
            }
            Pattern::deepspeed_variable(&[windows, &[last]].concat(), seq, [], false)
        }
        ("vertical", [_, ..]) => Pattern::vertical_slash(numbers, []),
        ("slash", [_, ..]) => Pattern::vertical_slash([], numbers),
        ("documents", [_, ..]) => Pattern::documents(numbers),
        ("tree", &[children @ 1..=MANY]) => tree(children as i64),
        ("tree", &[children]) => {
            let expected = format!("CHILDREN between 1 and {MANY}");
            return Err(error(text, expected, children.to_string()));
        }
        (_, numbers) => {
            return Err(error(
                text,
                form,
                match numbers.len() {
                    0 => "no number".to_owned(),
                    1 => "1 number".to_owned(),
                    count => format!("{count} numbers"),
                },
            ));
        }
    })
}

/// Forms that an error suggests if none resembles the given name.
const SUCH_AS: &str = "causal, local:WINDOW or fixed:STRIDE,COLUMNS[,VERTS]";

/// Returns the forms that an unknown name may mean: those with a common prefix, or within a small edit distance.
fn expected_for(name: &str) -> String {
    let name = name.to_lowercase();
    let near = |form: &&&str| {
        let known = name_of(form);
        let begins = name.len() > 2 && (known.starts_with(&name) || name.starts_with(known));
        begins || distance(known, &name) <= known.len().min(name.len()) / 3
    };
    let found: Vec<&str> = Pattern::NOTATION.iter().filter(near).copied().collect();
    match found.is_empty() {
        true => format!("a name of Pattern::NOTATION, as in {SUCH_AS}"),
        false => found.join(" or "),
    }
}

/// Returns the Levenshtein distance between two texts.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// Returns the name of a form: `fixed` of `fixed:STRIDE,COLUMNS[,VERTS]`.
fn name_of(form: &str) -> &str {
    form.split_once(':').map_or(form, |(name, _)| name)
}

/// Parses a comma-separated list, which may be empty.
fn numbers(text: &str, form: &str, list: &str) -> Result<Vec<usize>, LayoutError> {
    if list.trim().is_empty() {
        return Ok(Vec::new());
    }
    let number = |number: &str| {
        let number = number.trim();
        let expected = || format!("{form} with whole numbers");
        (number.parse()).map_err(|_| error(text, expected(), format!("'{number}'")))
    };
    list.split(',').map(number).collect()
}

fn error(part: &str, expected: impl Into<String>, got: impl Into<String>) -> LayoutError {
    LayoutError::Notation {
        part: part.trim().to_owned(),
        expected: expected.into(),
        got: got.into(),
    }
}

/// Returns the pattern of a complete tree with `children` children per node, level by level: a node sees itself and its ancestors.
fn tree(children: i64) -> Pattern {
    Pattern::from_pair_fn(format!("tree({children})"), move |i, j| {
        let mut node = i;
        while node > j.max(0) {
            node = (node - 1) / children;
        }
        node == j
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Pattern {
        text.parse().unwrap()
    }

    /// Every form with its pattern.
    fn cases() -> Vec<(&'static str, Pattern)> {
        vec![
            ("dense", Pattern::dense()),
            ("causal", Pattern::causal()),
            ("local:8", Pattern::local(8)),
            ("strided:8", Pattern::strided(8)),
            ("merged-strided:8", Pattern::merged_strided(8)),
            ("fixed:128,32", Pattern::fixed(128, 32)),
            ("fixed:128, 32, 4", Pattern::fixed_heads(128, 32, 4)),
            ("prefix:5", Pattern::prefix_lm(5)),
            ("streaming:16,4", Pattern::streaming(16, 4)),
            ("window:4", Pattern::window(4)),
            ("window:4,2", Pattern::dilated_window(4, 2)),
            ("chunked:16", Pattern::chunked(16)),
            ("chunked:16,1,0", Pattern::chunked_window(16, 1, 0)),
            ("global:0,7", Pattern::global([0, 7])),
            ("global-keys:0,7", Pattern::global_keys([0, 7])),
            ("longformer:4,2,0,7", Pattern::longformer(4, 2, [0, 7])),
            ("bigbird:8,16,3", Pattern::bigbird(8, 16, 3, 0)),
            ("bigbird:8,16,3,5", Pattern::bigbird(8, 16, 3, 5)),
            ("random-blocks:8,16,3", Pattern::random_blocks(8, 16, 3, 0)),
            (
                "random-blocks:8,16,3,5",
                Pattern::random_blocks(8, 16, 3, 5),
            ),
            (
                "deepspeed-fixed:32,8,2",
                Pattern::deepspeed_fixed(32, 8, 2, false),
            ),
            (
                "deepspeed-fixed:32,8,2, horizontal",
                Pattern::deepspeed_fixed(32, 8, 2, true),
            ),
            (
                "deepspeed-variable:100,16,32",
                Pattern::deepspeed_variable(&[16, 32], 100, [], false),
            ),
            ("vertical:3", Pattern::vertical_slash([3], [])),
            ("slash:0,1", Pattern::vertical_slash([], [0, 1])),
            ("documents:0,40", Pattern::documents([0, 40])),
            (
                "packed:0,40(fixed:8,2)",
                Pattern::packed([0, 40], Pattern::fixed(8, 2)),
            ),
        ]
    }

    #[test]
    fn every_notation_is_read() {
        for (text, pattern) in cases() {
            assert_eq!(parse(text), pattern, "{text}");
        }
        let written: Vec<&str> = cases().iter().map(|(text, _)| name_of(text)).collect();
        for form in Pattern::NOTATION {
            let name = name_of(form);
            assert!(written.contains(&name) || name == "tree", "{form}");
        }
    }

    #[test]
    fn combinations_bind_as_documented() {
        let [documents, local, strided] = [
            Pattern::documents([0, 40]),
            Pattern::local(16),
            Pattern::strided(64),
        ];
        let both = Pattern::intersection([documents.clone(), local.clone()]);
        let either = Pattern::union([local.clone(), strided.clone()]);
        for (text, pattern) in [
            ("local:16 + strided:64", either.clone()),
            (
                "documents:0,40&local:16 + strided:64",
                Pattern::union([both.clone(), strided.clone()]),
            ),
            (
                "documents:0,40 & (local:16+strided:64)",
                Pattern::intersection([documents, either.clone()]),
            ),
            (
                "local:16+strided:64 / documents:0,40&local:16",
                Pattern::per_head([either.clone(), both]),
            ),
            ("((local:16))", local.clone()),
            (
                "packed:0,40(local:16+strided:64)/(local:16)",
                Pattern::per_head([Pattern::packed([0, 40], either), local]),
            ),
        ] {
            assert_eq!(parse(text), pattern, "{text}");
        }
        let pairs = |pattern: Pattern| pattern.layout(1, 100, 8).unwrap().to_dense(0);
        assert_eq!(
            pairs(parse("vertical:3+slash:0,1")),
            pairs(Pattern::vertical_slash([3], [0, 1]))
        );
        assert_eq!(
            pairs(parse("deepspeed-variable:100,16,32+global-keys:0")),
            pairs(Pattern::deepspeed_variable(&[16, 32], 100, [0], false))
        );
    }

    #[test]
    fn nodes_of_a_tree_see_their_ancestors() {
        let tree = parse("tree:2");
        let seen: Vec<i64> = (0..16).filter(|&j| tree.attends(0, 12, j)).collect();
        assert_eq!(seen, [0, 2, 5, 12]);
        assert_eq!(tree.to_string(), "tree(2)");
        let path = parse("tree:1");
        assert!((0..9).all(|j| path.attends(0, 5, j) == (j <= 5)));
    }

    #[test]
    fn mistakes_name_the_part_what_was_expected_and_what_came() {
        let deep = format!("{}causal{}", "(".repeat(33), ")".repeat(33));
        let rows = "
            lokal:8+causal | lokal:8 | local:WINDOW | 'lokal'
            Local:8 | Local:8 | local:WINDOW | 'Local'
            stride:8 | stride:8 | strided:STRIDE | 'stride'
            global_keys:8 | global_keys:8 | global:TOKEN,… or global-keys:TOKEN,… | 'global_keys'
            spiral:3 | spiral:3 | a name of Pattern::NOTATION, as in causal, local:WINDOW or fixed:STRIDE | 'spiral'
            local | local | local:WINDOW | no number
            local:x | local:x | local:WINDOW with whole numbers | 'x'
            local:-1 | local:-1 | whole numbers | '-1'
            local:8, | local:8, | whole numbers | ''
            fixed:1 | fixed:1 | fixed:STRIDE,COLUMNS[,VERTS] | 1 number
            causal:3 | causal:3 | causal | 1 number
            causal & fixed:1,2,3,4 | fixed:1,2,3,4 | fixed:STRIDE | 4 numbers
            local:8+ | local:8+ | after '+' at character 8 | nothing
            /local:8 | /local:8 | before '/' at character 1 | nothing
            causal/local:8 & /dense | local:8 & | a pattern after '&' at character 9 | nothing
            causal&(local:8+) | local:8+ | a pattern after '+' | nothing
            longformer:4,2 | longformer:4,2 | TOKEN | 2 numbers
            local:8,horizontal | local:8,horizontal | whole | 'horizontal'
            tree:0 | tree:0 | CHILDREN between 1 and 1048576 | 0
            packed:0 | packed:0 | (PATTERN) | no pattern in brackets
            packed:(causal) | packed:(causal) | START | no number
            packed:0(lokal) | lokal | local:WINDOW | 'lokal'
            causal) | causal) | before ')' at character 7 | none
            (causal)(dense) | causal)(dense | '(' before ')' | none
            deepspeed-variable:99999999999,1 | deepspeed-variable:99999999999,1 | at most 1048576 | 99999999999 of 1
        ";
        let rows = rows.trim().lines().map(|row| {
            let parts: Vec<&str> = row.trim().split(" | ").collect();
            (parts[0], parts[1], parts[2], parts[3])
        });
        let others = [
            ("", "", "a pattern such as causal, local:WINDOW", "nothing"),
            (
                " local:8 ++ dense",
                "local:8 ++ dense",
                "a pattern after '+' at character 9",
                "nothing",
            ),
            (
                " (causal&(dense)",
                "(causal&(dense)",
                "')' after '(' at character 1",
                "none",
            ),
            (&deep, &deep, "at most 32 brackets", "more"),
        ];
        for (text, part, expected, got) in rows.chain(others) {
            let LayoutError::Notation {
                part: a,
                expected: b,
                got: c,
            } = text.parse::<Pattern>().unwrap_err()
            else {
                panic!("{text}: another error");
            };
            assert_eq!((a.as_str(), c.as_str()), (part, got), "{text}");
            assert!(b.contains(expected), "{text}: {b}");
            assert!(b.len() < 100, "{text}: {b}");
        }
    }
}
