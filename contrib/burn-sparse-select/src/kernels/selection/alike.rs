//! Scores of blocks by their means, where blocks are alike in themselves.
//!
//! ```text
//! means of all keys      if keys are taken less those                       two launches
//! means and likenesses   of blocks of keys and of queries, each read once   a cube a block
//! products of means
//! their softmax          +∞ where a block is not alike                      a plane a row
//! ```

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::rows::blocks::{Beside, Blocked, RowBlocks, block_means};
use crate::kernels::rows::whole::whole_means;
use crate::kernels::selection::means::{Likeness, MeanProducts, mean_products, softmax_of_seen};
use blocksparse_cubecl::error::KernelError;

/// Which scores are wanted.
#[derive(Clone, Debug, PartialEq)]
pub struct AlikeScores {
    /// Products of means; `rows` are of the queries that are given.
    pub products: MeanProducts,
    /// Queries that are given, and keys.
    pub seq: [usize; 2],
    /// Queries and keys of a block.
    pub block: usize,
    /// The least self-similarity of a block whose mean stands for it: the mean of the cosines of all pairs of its rows.
    pub similarity: f64,
    /// Whether keys are taken less their mean over the sequence.
    pub smooth: bool,
}

/// The softmax of products of means over the blocks that rows see, `[lists, rows, blocks]`, as [`softmax_of_seen`] has it with the likenesses of blocks. `q` is
/// contiguous `[lists, queries, width]`, `k` `[kv lists, keys, width]`.
///
/// # Errors
/// [`KernelError`] if the device cannot run it.
pub fn alike_scores(
    client: &Client,
    element: ElemType,
    [q, k]: [&Handle; 2],
    of: &AlikeScores,
    out: &Handle,
) -> Result<(), KernelError> {
    crate::kernels::selection::check(client)?;
    let ([lists, kv_lists], width) = (of.products.lists, of.products.width);
    let [queries, keys] = of.seq;
    let made = |numbers: usize| client.empty(numbers * size_of::<f32>());
    let q_blocks = RowBlocks::new(lists, [queries, width], of.block);
    let k_blocks = RowBlocks::new(kv_lists, [keys, width], of.block);
    let [q_count, k_count] = [&q_blocks, &k_blocks].map(|of| of.lists * of.blocks());
    let less = match of.smooth {
        true => Some(whole_means(client, element, k, [kv_lists, keys, width])?),
        false => None,
    };
    let [q_means, k_means] = [q_count, k_count].map(|count| made(count * width));
    let [q_alike, k_alike] = [q_count, k_count].map(made);
    let of_queries = Blocked {
        x: q,
        of: &q_blocks,
        means: &q_means,
    };
    let of_keys = Blocked {
        x: k,
        of: &k_blocks,
        means: &k_means,
    };
    let beside = Beside {
        second: Some(of_queries),
        alike: Some([&k_alike, &q_alike]),
        less: less.as_ref(),
        only: None,
    };
    block_means(client, element, of_keys, beside)?;
    let MeanProducts { rows, blocks, .. } = of.products;
    mean_products(client, [&q_means, &k_means], &of.products, None, out)?;
    let likeness = Likeness {
        alike: [&q_alike, &k_alike],
        kv_lists,
        limit: of.similarity as f32,
    };
    let dims = [lists, rows, blocks];
    softmax_of_seen(client, out, dims, of.products.seen, Some(likeness))
}
