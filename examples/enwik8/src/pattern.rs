//! The command line's notation for patterns, e.g. `fixed:128,32` or `local:64+strided:64`.

use burn_blocksparse::Pattern;

/// What can be written, for error messages and `--help`.
pub const CHOICES: &str = "dense, causal, local:WINDOW, strided:STRIDE, merged-strided:STRIDE, \
     fixed:STRIDE,COLUMNS[,VERTS], prefix:LENGTH, streaming:WINDOW,SINK, window:REACH[,DILATION], \
     chunked:SIZE[,BEFORE,AFTER], global:TOKEN,…, bigbird:BLOCK,BLOCKS,RANDOM[,SEED], \
     deepspeed-fixed:STRIDE,COLUMNS,VERTS, vertical:COLUMN,…, slash:DISTANCE,…, documents:START,…, tree:CHILDREN, a union of these with '+', \
     or an intersection with '&', which binds tighter";

/// Reads a pattern; the parts of a union are joined by `+`, those of an intersection by `&`.
///
/// # Errors
/// What is wrong with the text, and the choices.
pub fn parse(text: &str) -> Result<Pattern, String> {
    let mut parts = text
        .split('+')
        .map(parse_intersection)
        .collect::<Result<Vec<_>, _>>()?;
    Ok(match parts.len() {
        1 => parts.remove(0),
        _ => Pattern::union(parts),
    })
}

fn parse_intersection(text: &str) -> Result<Pattern, String> {
    let mut parts = text
        .split('&')
        .map(|part| parse_part(part.trim()))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(match parts.len() {
        1 => parts.remove(0),
        _ => Pattern::intersection(parts),
    })
}

/// Checks a pattern and hands its text back: run configurations store what the user wrote.
pub fn checked(text: &str) -> Result<String, String> {
    parse(text).map(|_| text.to_owned())
}

/// The stride of the first strided or fixed part: the natural width of the position matrix (§5.3).
pub fn stride(text: &str) -> Option<usize> {
    text.split(['+', '&']).find_map(|part| {
        let (name, arguments) = part.trim().split_once(':')?;
        match name {
            "strided" | "merged-strided" | "fixed" => {
                arguments.split(',').next()?.trim().parse().ok()
            }
            _ => None,
        }
    })
}

/// Whether no position attends to a later one, as a model that predicts the next byte needs.
pub fn is_causal(text: &str) -> bool {
    parse(text).is_ok_and(|pattern| pattern.is_causal())
}

fn parse_part(part: &str) -> Result<Pattern, String> {
    let (name, arguments) = part.split_once(':').unwrap_or((part, ""));
    let numbers = numbers(part, arguments)?;
    let pattern = match (name, numbers.as_slice()) {
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
        ("bigbird", &[block, blocks, random]) => Pattern::bigbird(block, blocks, random, 0),
        ("bigbird", &[block, blocks, random, seed]) => {
            Pattern::bigbird(block, blocks, random, seed as u64)
        }
        ("deepspeed-fixed", &[stride, columns, verts]) => {
            Pattern::deepspeed_fixed(stride, columns, verts, false)
        }
        ("vertical", [_, ..]) => Pattern::vertical_slash(numbers, []),
        ("slash", [_, ..]) => Pattern::vertical_slash([], numbers),
        ("documents", [_, ..]) => Pattern::documents(numbers),
        ("tree", &[children @ 1..=CHILDREN]) => tree(children as i64),
        _ => {
            return Err(format!(
                "unknown pattern '{part}'; the choices are {CHOICES}"
            ));
        }
    };
    Ok(pattern)
}

/// The most children that a node of a tree may have.
const CHILDREN: usize = 1 << 20;

/// Nodes of a complete tree, level by level, each with so many children: a node sees itself and its ancestors.
fn tree(children: i64) -> Pattern {
    Pattern::from_fn(format!("tree({children})"), move |_head, i, j| {
        let mut node = i;
        while node > j.max(0) {
            node = (node - 1) / children;
        }
        node == j
    })
}

fn numbers(part: &str, arguments: &str) -> Result<Vec<usize>, String> {
    if arguments.is_empty() {
        return Ok(Vec::new());
    }
    arguments
        .split(',')
        .map(|number| {
            number.trim().parse().map_err(|_| {
                format!("'{number}' in pattern '{part}' is not a whole number; the choices are {CHOICES}")
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_notation_is_read() {
        let cases = [
            ("dense", Pattern::dense()),
            ("causal", Pattern::causal()),
            ("local:8", Pattern::local(8)),
            ("strided:8", Pattern::strided(8)),
            ("merged-strided:8", Pattern::merged_strided(8)),
            ("fixed:128,32", Pattern::fixed(128, 32)),
            ("fixed:128, 32, 4", Pattern::fixed_heads(128, 32, 4)),
            ("prefix:5", Pattern::prefix_lm(5)),
            ("streaming:16,4", Pattern::streaming(16, 4)),
            (
                "local:8 + strided:8",
                Pattern::union([Pattern::local(8), Pattern::strided(8)]),
            ),
            ("window:4", Pattern::window(4)),
            ("window:4,2+global:0,7", Pattern::longformer(4, 2, [0, 7])),
            ("chunked:16", Pattern::chunked(16)),
            ("chunked:16,1,0", Pattern::chunked_window(16, 1, 0)),
            ("bigbird:8,16,3", Pattern::bigbird(8, 16, 3, 0)),
            ("bigbird:8,16,3,5", Pattern::bigbird(8, 16, 3, 5)),
            (
                "deepspeed-fixed:32,8,2",
                Pattern::deepspeed_fixed(32, 8, 2, false),
            ),
            (
                "vertical:3+slash:0,1",
                Pattern::union([
                    Pattern::vertical_slash([3], []),
                    Pattern::vertical_slash([], [0, 1]),
                ]),
            ),
            (
                "documents:0,40&local:16 + strided:64",
                Pattern::union([
                    Pattern::intersection([Pattern::documents([0, 40]), Pattern::local(16)]),
                    Pattern::strided(64),
                ]),
            ),
        ];
        for (text, pattern) in cases {
            assert_eq!(parse(text).unwrap(), pattern, "{text}");
        }
    }

    #[test]
    fn nodes_of_a_tree_see_their_ancestors() {
        let tree = parse("tree:2").unwrap();
        let seen: Vec<i64> = (0..16).filter(|&j| tree.attends(0, 12, j)).collect();
        assert_eq!(seen, [0, 2, 5, 12]);
        assert_eq!(tree.to_string(), "tree(2)");
        assert!(parse("tree:0").is_err());
        let path = parse("tree:1").unwrap();
        assert!((0..9).all(|j| path.attends(0, 5, j) == (j <= 5)));
    }

    #[test]
    fn mistakes_list_the_choices() {
        for text in [
            "", "lokal:8", "local", "local:x", "fixed:1", "causal:3", "local:8+",
        ] {
            let message = parse(text).unwrap_err();
            assert!(
                message.contains("merged-strided:STRIDE"),
                "{text}: {message}"
            );
        }
    }

    #[test]
    fn strides_and_causality() {
        assert_eq!(stride("fixed:64,16"), Some(64));
        assert_eq!(stride("local:32+strided:16"), Some(16));
        assert_eq!(stride("causal"), None);
        assert!(is_causal("local:32+strided:16"));
        assert!(!is_causal("local:32+prefix:16"));
        assert!(!is_causal("dense"));
        assert!(is_causal("documents:0,40&causal+slash:9"));
        assert!(!is_causal("documents:0,40+slash:9"));
    }
}
