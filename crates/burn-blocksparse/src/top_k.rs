//! Layouts chosen by content: the key blocks whose means score highest.

use blocksparse::{BlockLayout, BlockMask, LayoutShape};
use burn::tensor::{DType, Tensor};

use crate::AttentionError;

/// How [`top_k_blocks`] chooses. Build it from [`TopKOptions::new`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopKOptions {
    /// Width of a block: 8, 16, 32, 64 or 128.
    pub block_size: usize,
    /// Key blocks of each row of query blocks, the forced ones among them (more, if more are forced).
    pub k: usize,
    /// Whether queries see no later keys. The last query sits at the last key.
    pub causal: bool,
    /// Whether the blocks of the queries' own positions are forced.
    pub diagonal: bool,
    /// How many of the first key blocks are forced.
    pub first: usize,
}

impl TopKOptions {
    /// `k` blocks of `block_size` for each row: causal, the diagonal forced, the first block not.
    pub fn new(block_size: usize, k: usize) -> Self {
        Self {
            block_size,
            k,
            causal: true,
            diagonal: true,
            first: 0,
        }
    }

    /// Sets whether queries see no later keys.
    pub fn causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Sets whether the blocks of the queries' own positions are forced.
    pub fn diagonal(mut self, diagonal: bool) -> Self {
        self.diagonal = diagonal;
        self
    }

    /// Forces the first `blocks` key blocks (attention sinks).
    pub fn first(mut self, blocks: usize) -> Self {
        self.first = blocks;
        self
    }
}

/// A layout per batch entry and head, of the key blocks that score highest for each row of query blocks: the score of a pair of blocks is
/// `mean(q) · mean(k)` (as the block-sparse heads of MInference choose, Jiang et al., 2024). Ties go to the earlier block.
///
/// The scores, `batch · heads · q_blocks · kv_blocks` numbers, are **read back to the host**, which waits for the device, and the layout is built there: choose
/// once per sequence or per a few steps, not per layer and step. The choice is not differentiable; attention over the layout is.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{AttentionOptions, TopKOptions, attention, top_k_blocks};
///
/// let [q, k, v] = [(); 3]
///     .map(|_| Tensor::<4>::random([1, 2, 256, 16], Distribution::Default, &Device::flex()));
/// let layout = top_k_blocks(q.clone(), k.clone(), TopKOptions::new(32, 3).first(1))?;
/// let out = attention(q, k, v, &layout, AttentionOptions::default())?;
/// # assert_eq!(out.dims(), [1, 2, 256, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `q`: `[batch, heads, seq_q, head_dim]`
/// - `k`: `[batch, kv_heads, seq_kv, head_dim]`; `kv_heads` divides `heads`
///
/// # Errors
/// [`AttentionError`] if shapes, dtypes or devices do not fit each other, or an option is out of range.
pub fn top_k_blocks(
    q: Tensor<4>,
    k: Tensor<4>,
    options: TopKOptions,
) -> Result<BlockLayout, AttentionError> {
    check(&q, &k, &options)?;
    let [batch, heads, seq_q, _] = q.dims();
    let [_, kv_heads, seq_kv, _] = k.dims();
    let shape = LayoutShape {
        heads,
        seq_q,
        seq_kv,
        block_size: options.block_size,
    };
    // The sizes are the layout's to check, before anything is computed with them.
    BlockLayout::from_block_fn("sizes", shape, |_, _, _| None)?;
    let scores = scores(q, k, heads / kv_heads, options.block_size);
    let [_, _, q_blocks, kv_blocks] = scores.dims();
    let scores: Vec<f32> = (scores.into_data().to_vec()).expect("scores are f32");
    let rows: Vec<Vec<bool>> = (scores.chunks(kv_blocks).enumerate())
        .map(|(row, scores)| choose(scores, row % q_blocks, shape, &options))
        .collect();
    let layouts = (0..batch).map(|entry| {
        BlockLayout::from_block_fn("top_k", shape, |head, q_block, kv_block| {
            let row = (entry * heads + head) * q_blocks + q_block;
            rows[row][kv_block].then(|| mask(q_block, kv_block, shape, &options))
        })
    });
    let layouts = layouts.collect::<Result<Vec<_>, _>>()?;
    Ok(BlockLayout::stack_batch(&layouts)?)
}

fn check(q: &Tensor<4>, k: &Tensor<4>, options: &TopKOptions) -> Result<(), AttentionError> {
    let [batch, heads, _, head_dim] = q.dims();
    let [k_batch, kv_heads, _, k_dim] = k.dims();
    let at_least_1 = [
        ("q's batch", batch),
        ("q's head_dim", head_dim),
        ("options.k", options.k),
    ];
    for (argument, got) in at_least_1 {
        if got == 0 {
            return Err(AttentionError::argument(argument, "at least 1", got));
        }
    }
    AttentionError::expect_same("k's batch", batch, "q's", k_batch)?;
    AttentionError::expect_same("k's head_dim", head_dim, "q's", k_dim)?;
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(AttentionError::argument(
            "k's kv_heads",
            format!("a divisor of the {heads} heads of q"),
            kv_heads,
        ));
    }
    AttentionError::expect_same("k's dtype", q.dtype(), "q's", k.dtype())?;
    AttentionError::expect_same("k's device", q.device(), "q's", k.device())
}

/// `[batch, heads, q_blocks, kv_blocks]`, f32. The scale changes no order.
fn scores(q: Tensor<4>, k: Tensor<4>, group: usize, block_size: usize) -> Tensor<4> {
    let (q, k) = (means(q.detach(), block_size), means(k.detach(), block_size));
    let [batch, heads, q_blocks, dim] = q.dims();
    let kv_blocks = k.dims()[2];
    let q = q.reshape([batch, heads / group, group * q_blocks, dim]);
    let scores = q.matmul(k.transpose());
    scores.reshape([batch, heads, q_blocks, kv_blocks])
}

/// Means over blocks of rows, in f32: `[batch, heads, blocks, dim]`.
fn means(x: Tensor<4>, block_size: usize) -> Tensor<4> {
    let [batch, heads, seq, dim] = x.dims();
    let x = x.cast(DType::F32);
    let blocks = seq.div_ceil(block_size);
    let whole = seq / block_size;
    let rows = |from, to| x.clone().slice([0..batch, 0..heads, from..to, 0..dim]);
    let mut parts = Vec::new();
    if whole > 0 {
        let rows = rows(0, whole * block_size);
        let rows = rows.reshape([batch * heads, whole, block_size, dim]);
        parts.push(rows.mean_dim(2).reshape([batch, heads, whole, dim]));
    }
    if whole < blocks {
        parts.push(rows(whole * block_size, seq).mean_dim(2));
    }
    Tensor::cat(parts, 2)
}

/// Which key blocks a row of query blocks keeps.
fn choose(scores: &[f32], q_block: usize, shape: LayoutShape, options: &TopKOptions) -> Vec<bool> {
    let [first, last] = positions(q_block, shape);
    let b = shape.block_size as i64;
    let start = |kv_block: usize| kv_block as i64 * b;
    let allowed = |kv_block: usize| !options.causal || start(kv_block) <= last;
    let on_diagonal = |kv_block: usize| start(kv_block) <= last && first < start(kv_block) + b;
    let forced =
        |kv_block: usize| kv_block < options.first || (options.diagonal && on_diagonal(kv_block));
    let candidates = (0..scores.len()).filter(|&kv_block| allowed(kv_block));
    let (mut chosen, mut rest): (Vec<_>, Vec<_>) =
        candidates.partition(|&kv_block| forced(kv_block));
    let key = |kv_block: usize| match scores[kv_block].is_nan() {
        true => f32::NEG_INFINITY,
        false => scores[kv_block],
    };
    rest.sort_by(|&x, &y| key(y).total_cmp(&key(x)));
    rest.truncate(options.k.saturating_sub(chosen.len()));
    chosen.extend(rest);
    let mut kept = vec![false; scores.len()];
    chosen.iter().for_each(|&kv_block| kept[kv_block] = true);
    kept
}

/// Positions of the first and the last query of a block; the last of all queries sits at the last key.
fn positions(q_block: usize, shape: LayoutShape) -> [i64; 2] {
    let offset = shape.seq_kv as i64 - shape.seq_q as i64;
    let first = q_block * shape.block_size;
    let last = (first + shape.block_size).min(shape.seq_q) - 1;
    [first as i64 + offset, last as i64 + offset]
}

fn mask(q_block: usize, kv_block: usize, shape: LayoutShape, options: &TopKOptions) -> BlockMask {
    let b = shape.block_size;
    let [first, _] = positions(q_block, shape);
    BlockMask::from_fn(b, |row, column| {
        !options.causal || (kv_block * b + column) as i64 <= first + row as i64
    })
}
