//! Attention of queries to blocks that each of them chose, in parts of heads.

use std::ops::Range;

use blocksparse::{BlockLayout, LayoutShape};
use burn::tensor::{DType, Int, Tensor};

use super::query_lists::QueryLists;
use crate::attention::attention_with_lse;
use crate::device_layout::{DeviceLayout, DeviceLayoutOptions};
use crate::error::OpError;
use crate::merge::merge_parts;
use crate::options::AttentionOptions;
use crate::rows::rows_at;

/// Numbers of packed queries and of their outputs that are in memory at a time, unless one head has more.
const PACKED: usize = 1 << 31;

/// Attention over a layout, which is the same for all heads, and over what queries chose beside it: out and lse.
///
/// Heads are computed so many at a time that packed queries take little memory. Where a graph is kept it holds those of all heads anyway, and parts are no
/// smaller than the heads of a head of keys: the gradient of a part is as large as that of the whole.
pub(crate) fn attention_of_choice(
    x: [Tensor<4>; 3],
    near: &BlockLayout,
    lists: Option<QueryLists>,
    options: &AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    in_parts(x, near, lists, options, PACKED)
}

/// [`attention_of_choice`] with other numbers at a time.
fn in_parts(
    [q, k, v]: [Tensor<4>; 3],
    near: &BlockLayout,
    lists: Option<QueryLists>,
    options: &AttentionOptions,
    packed: usize,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let all = [q.clone(), k.clone(), v.clone()];
    let (out, lse) = {
        let [q, k, v] = all;
        attention_with_lse(q, k, v, near, options.clone())?
    };
    let Some(lists) = lists else {
        return Ok((out, lse));
    };
    let [batch, heads, _, head_dim] = q.dims();
    let ([_, kv_heads, ..], [.., value_dim]) = (k.dims(), v.dims());
    let group = heads / kv_heads;
    let of_head = batch * lists.queries.dims()[2] * (head_dim + value_dim);
    let fitting = (packed / of_head.max(1)).max(1);
    let members = match q.is_autodiff() || k.is_autodiff() || v.is_autodiff() {
        true => group,
        // As many in each part, or one less.
        false => group.div_ceil(group.div_ceil(fitting)),
    };
    if fitting >= heads || members == heads {
        let lists = lists.for_heads(heads);
        return with_lists([q, k, v], (out, lse), lists, options);
    }
    let parts = parts_of(kv_heads, group, members, fitting);
    let mut found = (Vec::new(), Vec::new());
    for part in parts {
        let of_keys = part.start / group..part.end.div_ceil(group);
        let x = [
            q.clone().slice_dim(1, part.clone()),
            k.clone().slice_dim(1, of_keys.clone()),
            v.clone().slice_dim(1, of_keys),
        ];
        let near = (
            out.clone().slice_dim(1, part.clone()),
            lse.clone().slice_dim(1, part.clone()),
        );
        let (out, lse) = with_lists(x, near, lists.of_heads(heads, part), options)?;
        found.0.push(out);
        found.1.push(lse);
    }
    Ok((Tensor::cat(found.0, 1), Tensor::cat(found.1, 1)))
}

/// Ranges of heads, each of whole groups or within one, of `members` heads of a group, and of at most `fitting` in all where groups are whole.
fn parts_of(kv_heads: usize, group: usize, members: usize, fitting: usize) -> Vec<Range<usize>> {
    if members < group {
        let groups = (0..kv_heads).map(|kv_head| kv_head * group);
        let parts = groups.flat_map(|first| {
            let starts = (first..first + group).step_by(members);
            starts.map(move |start| start..(start + members).min(first + group))
        });
        return parts.collect();
    }
    let heads = kv_heads * group;
    let step = (fitting / group).max(1) * group;
    let starts = (0..heads).step_by(step);
    starts
        .map(|start| start..(start + step).min(heads))
        .collect()
}

/// What queries see near them, merged with what they chose.
fn with_lists(
    [q, k, v]: [Tensor<4>; 3],
    near: (Tensor<4>, Tensor<3>),
    lists: QueryLists,
    options: &AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let layout = layout_of(&lists, k.dims()[2])?;
    let packed = rows_at(q, lists.queries.clone(), lists.places.clone())?;
    let far = attention_with_lse(packed, k, v, &layout, options.clone())?;
    merge_parts(near, far, lists.places, lists.choices)
}

/// The layout of tiles of packed queries, each with one block, which is several of the layout's.
fn layout_of(lists: &QueryLists, seq_kv: usize) -> Result<DeviceLayout, OpError> {
    let [batch, heads, tiles] = lists.tile_blocks.dims();
    let device = lists.tile_blocks.device();
    let parts = lists.block / lists.tile;
    let dims = [batch, heads, tiles, parts];
    let part = Tensor::<1, Int>::arange(0..parts as i64, (&device, DType::I32));
    let part = part.reshape([1, 1, 1, parts]).expand(dims);
    // Parts of block −1 are negative, too.
    let blocks = lists.tile_blocks.clone().unsqueeze_dim::<4>(3);
    let indices = blocks.mul_scalar(parts as i32).expand(dims) + part;
    let counts = Tensor::<3, Int>::full([batch, heads, tiles], parts as i32, (&device, DType::I32));
    let shape = LayoutShape {
        heads,
        seq_q: tiles * lists.tile,
        seq_kv,
        block_size: lists.tile,
    };
    DeviceLayout::from_block_indices(indices, counts, DeviceLayoutOptions::new(shape))
}

#[cfg(test)]
mod tests {
    use blocksparse::Pattern;

    use super::*;
    use crate::{ScoreCall, Selection};

    #[test]
    fn parts_are_of_whole_groups_or_within_one() {
        assert_eq!(parts_of(2, 4, 3, 3), [0..3, 3..4, 4..7, 7..8]);
        assert_eq!(parts_of(3, 2, 2, 5), [0..4, 4..6]);
        assert_eq!(parts_of(3, 1, 1, 2), [0..2, 2..3]);
        // One group at least.
        assert_eq!(parts_of(2, 4, 4, 1), [0..4, 4..8]);
    }

    /// However many heads at a time, with lists of their own or of their group's.
    #[cfg(feature = "flex")]
    #[test]
    fn parts_give_what_the_whole_gives() {
        use burn::tensor::{Device, Distribution};
        let device = Device::flex();
        let random = |heads| Tensor::<4>::random([2, heads, 60, 4], Distribution::Default, &device);
        let [q, k, v] = [random(6), random(2), random(2)];
        let near = Pattern::chunked(8).and_causal().layout(6, 60, 8).unwrap();
        for text in ["moba:8,3", "moba:8,3,share=sum"] {
            let selection: Selection = text.parse().unwrap();
            let lists = selection.query_lists(&ScoreCall::new(q.clone(), k.clone()));
            let lists = lists.unwrap().unwrap();
            let of_head = 2 * lists.queries.dims()[2] * 8;
            let run = |q: &Tensor<4>, heads: usize| {
                let x = [q.clone(), k.clone(), v.clone()];
                let options = AttentionOptions::default();
                let lists = Some(lists.clone());
                let (out, lse) = in_parts(x, &near, lists, &options, heads * of_head).unwrap();
                (out.into_data(), lse.into_data())
            };
            let whole = run(&q, 6);
            for heads in [0, 1, 2, 3, 4, 5] {
                assert!(run(&q, heads) == whole, "{text}, {heads} heads at a time");
                #[cfg(feature = "autodiff")]
                assert!(
                    run(&q.clone().autodiff(), heads) == whole,
                    "{text}, {heads} heads"
                );
            }
        }
    }
}
