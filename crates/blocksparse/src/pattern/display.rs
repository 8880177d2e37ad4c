//! Display text of patterns.

use std::fmt;

use super::Pattern;

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |f: &mut fmt::Formatter<'_>, name: &str, parts: &[Pattern]| {
            write!(f, "{name}(")?;
            for (index, part) in parts.iter().enumerate() {
                let comma = if index > 0 { ", " } else { "" };
                write!(f, "{comma}{part}")?;
            }
            write!(f, ")")
        };
        match self {
            Self::Dense => write!(f, "dense"),
            Self::Causal => write!(f, "causal"),
            Self::Local { window } => write!(f, "local({window})"),
            Self::Strided { stride } => write!(f, "strided({stride})"),
            Self::Fixed {
                stride,
                columns,
                num_verts: 1,
            } => write!(f, "fixed({stride}, {columns})"),
            Self::Fixed {
                stride,
                columns,
                num_verts,
            } => write!(f, "fixed({stride}, {columns}, num_verts = {num_verts})"),
            Self::PrefixLm { prefix } => write!(f, "prefix_lm({prefix})"),
            Self::Streaming { window, sink } => write!(f, "streaming({window}, sink = {sink})"),
            Self::Window { reach, dilation: 1 } => write!(f, "window({reach})"),
            Self::Window { reach, dilation } => write!(f, "window({reach}, dilation = {dilation})"),
            Self::Chunked {
                size,
                before: 0,
                after: 0,
            } => write!(f, "chunked({size})"),
            Self::Chunked {
                size,
                before,
                after,
            } => write!(f, "chunked({size}, before = {before}, after = {after})"),
            Self::Global { ranges } | Self::GlobalKeys { ranges } => {
                let ranges = ranges.iter().map(|&(first, after)| {
                    match first.checked_add(1) == Some(after) {
                        true => first.to_string(),
                        false => format!("{first}..{after}"),
                    }
                });
                let name = match self {
                    Self::Global { .. } => "global",
                    _ => "global_keys",
                };
                write!(f, "{name}({})", few(ranges))
            }
            Self::Columns {
                stride,
                columns,
                num_verts,
            } => write!(f, "columns({stride}, {columns}, num_verts = {num_verts})"),
            Self::Rows {
                stride,
                rows,
                num_verts,
            } => write!(f, "rows({stride}, {rows}, num_verts = {num_verts})"),
            Self::VerticalSlash { vertical, slash } => {
                let lists = [vertical, slash].map(|list| few(list.iter().map(usize::to_string)));
                write!(f, "vertical_slash([{}], [{}])", lists[0], lists[1])
            }
            Self::Documents { starts } => {
                write!(f, "documents({})", few(starts.iter().map(usize::to_string)))
            }
            Self::Packed { starts, pattern } => {
                let starts = few(starts.iter().map(usize::to_string));
                write!(f, "packed([{starts}], {pattern})")
            }
            Self::RandomBlocks {
                block,
                blocks,
                count,
                seed,
            } => write!(
                f,
                "random_blocks({block}, {blocks}, {count}, seed = {seed})"
            ),
            Self::Union(parts) => list(f, "union", parts),
            Self::Intersection(parts) => list(f, "intersection", parts),
            Self::PerHead(parts) => list(f, "per_head", parts),
            Self::FromFn(function) => write!(f, "{}", function.name),
        }
    }
}

/// Joins a list; of a long one only the first few items.
fn few(items: impl ExactSizeIterator<Item = String>) -> String {
    const FEW: usize = 8;
    let count = items.len();
    let mut shown: Vec<String> = items.take(FEW).collect();
    if count > FEW {
        shown.push(format!("… {count} in all"));
    }
    shown.join(", ")
}
