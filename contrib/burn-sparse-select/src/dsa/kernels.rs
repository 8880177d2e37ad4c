//! Scores, selections and losses by kernels, on devices that have them. `None` means that the caller has to use Burn's operations: the device has no kernels,
//! or they do not serve the sizes or the dtype.

use std::sync::LazyLock;

use crate::kernels::indexer::PairSizes;
use blocksparse::{HadamardFp8, LayoutShape, Pattern};
use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use crate::dsa::backend::{available, has_block_sums, has_maxima, has_top_k, rounds};
use crate::dsa::found::{DsaTarget, Found};
use crate::dsa::ops::{
    AmongKeys, BlockMaxima, ComparedKeys, IndexInputs, IndexerChoice, IndexerLoss, IndexerOps,
    IndexerScores, TargetInputs,
};
use crate::dsa::scores::{DsaIndex, DsaLists, together};
use crate::selection::layouts::LayoutCache;
use burn_blocksparse::internal::device::cube;
use burn_blocksparse::{AttentionOptions, SparseAttentionCall};

/// Layouts of dense attention, used to compute lse.
static DENSE: LazyLock<LayoutCache> = LazyLock::new(LayoutCache::default);
/// Block size of these layouts.
const BLOCK: usize = 64;

/// Least number of queries for the kernel over blocks. With fewer, launches cost more than the products.
const FEWEST_QUERIES: usize = 128;

/// Casts queries and keys to f32 if their dtypes differ.
fn of_one_dtype([q, k]: [Tensor<4>; 2]) -> [Tensor<4>; 2] {
    match q.dtype() == k.dtype() {
        true => [q, k],
        false => [q, k].map(|x| x.cast(DType::F32)),
    }
}

/// Returns the index in the form that kernels take.
fn prepared(index: &DsaIndex) -> DsaIndex {
    let index = index.clone().without_autodiff();
    let [q, k] = of_one_dtype([index.q, index.k]);
    DsaIndex { q, k, ..index }
}

fn inputs(index: DsaIndex) -> IndexInputs<Dispatch> {
    IndexInputs {
        q: index.q.into_dispatch(),
        k: index.k.into_dispatch(),
        weights: index.weights.into_dispatch(),
    }
}

/// Returns how many queries are scored at once, with about `numbers` scores.
fn rows_together(index: &DsaIndex, numbers: usize) -> usize {
    together(index.q.dims(), index.seq_kv(), numbers)
}

/// Returns whether kernels serve a range of queries over these keys.
fn is_served([q, k]: [&Tensor<4>; 2], rows: [usize; 2], listed: Option<usize>) -> bool {
    let sizes = PairSizes::new(q.dims(), k.dims(), rows, listed);
    cube::of(&q.device()).is_some_and(|device| available(&device, q.dtype(), &sizes))
}

/// Returns whether kernels compute the scores of an index, about `numbers` at a time.
pub(crate) fn has_scores(index: &DsaIndex, numbers: usize) -> bool {
    let index = prepared(index);
    let rows = [0, rows_together(&index, numbers)];
    is_served([&index.q, &index.k], rows, None)
}

/// Rotates rows and rounds them to fp8; `None` if no kernel does that.
pub(crate) fn rounded(x: &Tensor<4>, of: HadamardFp8) -> Option<Tensor<4>> {
    let [.., width] = x.dims();
    let is_served = cube::of(&x.device()).is_some_and(|device| rounds(&device, x.dtype(), width));
    is_served.then(|| {
        let x = x.clone().into_dispatch();
        Tensor::from_dispatch(<Dispatch as IndexerOps>::indexer_rows(x, of))
    })
}

/// Computes the scores of a range of queries, `[batch, rows, seq_kv]`. The `near` keys up to a query's own get the highest score; keys after it are scored only
/// if `all` is true.
pub(crate) fn scores(index: &DsaIndex, rows: [usize; 2], near: usize, all: bool) -> Tensor<3> {
    let call = IndexerScores {
        rows,
        near,
        all,
        in_fp8: index.is_in_fp8(),
    };
    let index = inputs(prepared(index));
    Tensor::from_dispatch(<Dispatch as IndexerOps>::indexer_scores(index, call))
}

/// Returns the keys of the `most` highest scores of all queries, `[batch, seq_q, most]`, ascending, then −1, including the last `near` keys that a query sees.
/// `seen`, `[batch or 1, seq_q]`, is the number of keys that each query sees; by default those up to its position. `None` also if no kernel selects them.
pub(crate) fn top_k(
    index: &DsaIndex,
    seen: Option<&Tensor<2, Int>>,
    [most, near]: [usize; 2],
    numbers: usize,
) -> Option<Tensor<3, Int>> {
    let is_served = cube::of(&index.q.device()).is_some_and(|device| has_top_k(&device));
    if !is_served || !has_scores(index, numbers) {
        return None;
    }
    let call = IndexerChoice {
        most,
        near,
        chunk_elements: numbers,
        in_fp8: index.is_in_fp8(),
        block: None,
    };
    let index = inputs(prepared(index));
    Some(choice(index, None, seen.cloned(), call))
}

/// Runs the selection among the listed keys, or all keys, of which queries see the first `seen`.
fn choice(
    index: IndexInputs<Dispatch>,
    lists: Option<Tensor<3, Int>>,
    seen: Option<Tensor<2, Int>>,
    call: IndexerChoice,
) -> Tensor<3, Int> {
    let among = AmongKeys {
        lists: lists.map(Tensor::into_dispatch).into(),
        seen: seen.map(Tensor::into_dispatch).into(),
    };
    Tensor::from_dispatch(<Dispatch as IndexerOps>::indexer_choice(index, among, call))
}

/// Runs [`top_k`] among the keys of blocks that each query lists, `[batch, seq_q, blocks]`, of which it sees the first `seen`. `None` also if no kernel runs
/// over blocks, or there are too few queries for it.
pub(crate) fn top_k_in_blocks(
    index: &DsaIndex,
    (lists, seen): (&Tensor<3, Int>, &Tensor<2, Int>),
    [most, near]: [usize; 2],
    block: usize,
    numbers: usize,
) -> Option<Tensor<3, Int>> {
    let index = prepared(index);
    let [_, seq_q, count] = lists.dims();
    let listed = count * block;
    let rows = [0, (numbers / listed).clamp(1, seq_q)];
    let device = cube::of(&index.q.device())?;
    let sizes = PairSizes::new(index.q.dims(), index.k.dims(), rows, Some(listed));
    if seq_q < FEWEST_QUERIES
        || !has_top_k(&device)
        || !has_block_sums(&device, index.q.dtype(), &sizes, block)
    {
        return None;
    }
    let call = IndexerChoice {
        most,
        near,
        chunk_elements: numbers,
        in_fp8: false,
        block: Some(block),
    };
    let (lists, seen) = (Some(lists.clone()), Some(seen.clone()));
    Some(choice(inputs(index), lists, seen, call))
}

/// Returns the list indices of the `most` highest scores of queries, `[queries, most]`, ascending, then −1, including the last `near`. Queries list keys by
/// slots, `[queries, listed]`, and see the first `seen` of them. `None` also if queries and keys have different dtypes.
pub(crate) fn top_k_in_lists(
    index: &DsaLists,
    [most, near]: [usize; 2],
    numbers: usize,
) -> Option<Tensor<2, Int>> {
    let DsaLists { slots, seen, .. } = index;
    let q = index.q.clone().swap_dims(0, 1).unsqueeze::<4>();
    let k = index.keys.clone().unsqueeze::<4>();
    let [queries, listed] = slots.dims();
    let together = (numbers / listed.max(1)).clamp(1, queries);
    let is_served = q.dtype() == k.dtype()
        && cube::of(&q.device()).is_some_and(|device| has_top_k(&device))
        && is_served([&q, &k], [0, together], Some(listed));
    if !is_served {
        return None;
    }
    let inputs = IndexInputs {
        q: q.into_dispatch(),
        k: k.into_dispatch(),
        weights: (index.weights.clone())
            .swap_dims(0, 1)
            .unsqueeze::<3>()
            .into_dispatch(),
    };
    let call = IndexerChoice {
        most,
        near,
        chunk_elements: numbers,
        in_fp8: false,
        block: None,
    };
    let (slots, seen) = (slots.clone().unsqueeze(), seen.clone().unsqueeze());
    Some(choice(inputs, Some(slots), Some(seen), call).squeeze_dim(0))
}

/// Computes the highest products of a range of queries `[batch, heads, seq_q, width]` with the keys of each of the first blocks:
/// `[batch, heads, rows, blocks]`. Keys are `[batch, 1, seq_kv, width]`. `None` if no kernel computes them without writing all products.
pub(crate) fn maxima(
    [q, k]: [&Tensor<4>; 2],
    rows: [usize; 2],
    [block, blocks]: [usize; 2],
) -> Option<Tensor<4>> {
    let call = BlockMaxima {
        rows,
        block,
        blocks,
    };
    let is_served = q.dtype() == k.dtype()
        && cube::of(&q.device())
            .is_some_and(|device| has_maxima(&device, q.dtype(), q.dims(), &call));
    is_served.then(|| {
        let [q, k] = [q, k].map(|x| x.clone().into_dispatch());
        Tensor::from_dispatch(<Dispatch as IndexerOps>::indexer_maxima(q, k, call))
    })
}

/// Computes the mean of all elements in a fixed order. Burn's mean over all dimensions may be a kernel with atomics, and one over a long dimension runs in a
/// single cube.
fn mean(x: Tensor<2>) -> Tensor<1> {
    let count = x.shape().num_elements();
    let width = (1..=count.isqrt())
        .rev()
        .find(|width| count.is_multiple_of(*width));
    let width = width.unwrap_or(1);
    let sums = x.reshape([count / width, width]).mean_dim(1);
    sums.reshape([1, count / width]).mean_dim(1).reshape([1])
}

/// Computes the mean loss of queries and its gradients, relative to attention with this lse, or to dense attention. About `numbers` scores are in memory at a
/// time.
pub(crate) fn loss(
    index: &DsaIndex,
    [q, k]: [&Tensor<4>; 2],
    scale: f64,
    over: DsaTarget,
    lse: Option<Tensor<3>>,
    numbers: usize,
) -> Option<Found> {
    let index = prepared(index);
    let [q, k] = of_one_dtype([q, k].map(|x| x.clone().without_autodiff()));
    let ([_, heads, seq_q, _], seq_kv) = (q.dims(), k.dims()[2]);
    let together = rows_together(&index, numbers);
    let rows = [0, together];
    let (listed, keys, causal) = match over {
        DsaTarget::All => (None, ComparedKeys::All, true),
        DsaTarget::Chosen(lists) => {
            let keys = lists.keys().clone();
            let [.., listed] = keys.dims();
            let keys = ComparedKeys::Indices(keys.into_dispatch());
            (Some(listed), keys, lists.is_causal())
        }
    };
    // Checked without lists as well, because the gradient with respect to keys runs over all pairs.
    for listed in [listed, None] {
        if !is_served([&index.q, &index.k], rows, listed) || !is_served([&q, &k], rows, listed) {
            return None;
        }
    }
    let lse = match lse {
        Some(lse) => lse,
        None => {
            let shape = LayoutShape::new(heads, [seq_q, seq_kv], BLOCK);
            let layout = DENSE.of_pattern(&Pattern::causal(), shape).ok()?;
            let options = AttentionOptions::default().scale(scale);
            let (_, lse) = SparseAttentionCall::new(q.clone(), k.clone(), k.clone(), &layout)
                .options(options)
                .run_with_lse()
                .ok()?;
            lse
        }
    };
    let target = TargetInputs {
        q: q.into_dispatch(),
        k: k.into_dispatch(),
        lse: lse.into_dispatch(),
        over: keys,
    };
    let call = IndexerLoss {
        scale,
        rows: together,
        causal,
    };
    let found = <Dispatch as IndexerOps>::indexer_loss(inputs(index), target, call);
    Some(Found {
        loss: mean(Tensor::from_dispatch(found.losses)),
        q: Tensor::from_dispatch(found.q),
        k: Tensor::from_dispatch(found.k),
        weights: Tensor::from_dispatch(found.weights),
    })
}
