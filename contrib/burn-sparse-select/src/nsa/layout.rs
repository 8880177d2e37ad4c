//! Which compressed blocks a query sees: those whose last token is no later than itself.

use blocksparse::{BlockLayout, BlockMask, LayoutShape};

use burn_blocksparse::OpError;

/// The layout of queries from a position on over compressed blocks of `block` tokens, one beginning every `stride`.
pub(crate) fn of_entries(
    name: &str,
    shape: LayoutShape,
    [block, stride]: [usize; 2],
    first: i64,
) -> Result<BlockLayout, OpError> {
    let b = shape.block_size;
    let last_token = |entry: usize| (entry * stride + block) as i64 - 1;
    let is_seen = |query: usize, entry: usize| last_token(entry) <= query as i64 + first;
    let one = LayoutShape { heads: 1, ..shape };
    let layout = BlockLayout::from_block_fn(name, one, |_, q_block, kv_block| {
        let (from, to) = (q_block * b, ((q_block + 1) * b).min(shape.seq_q) - 1);
        let entries = (kv_block * b, ((kv_block + 1) * b).min(shape.seq_kv) - 1);
        if !is_seen(to, entries.0) {
            return None;
        }
        Some(match is_seen(from, entries.1) {
            true => BlockMask::corner(b, b, b),
            false => BlockMask::from_fn(b, |row, column| is_seen(from + row, entries.0 + column)),
        })
    })?;
    Ok(layout.of_first_head(shape.heads)?)
}
