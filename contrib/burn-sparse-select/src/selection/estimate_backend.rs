//! Block scores on CubeCL devices.

use std::ops::Range;

use crate::kernels::rows::blocks::{Beside, Blocked, RowBlocks, block_means};
use crate::kernels::selection::{
    AlikeScores, Antidiagonals, CompressedInputs, CompressedPlan, FlexTensors, GateSizes, Kept,
    LineSizes, MeanProducts, SeenRows, Touched, Wanted, alike_scores, antidiagonal_attention_sums,
    check, compressed_attention_sums, flex_blocks, line_sums, mean_products, query_picks,
    touched_blocks,
};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::kernel::{cast, into_contiguous, slice};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};

use crate::selection::estimate_ops::{BlockScores, CompressedCall, EstimateOps, ScoredBy};
use burn_blocksparse::internal::cube::readable as rows_readable;
use burn_blocksparse::internal::cube::{empty, launched, uses_reference, view};

/// Returns whether a device has kernels for block scores.
pub(crate) fn available(device: &CubeDevice) -> bool {
    !uses_reference() && check(&device.client()).is_ok()
}

/// Converts a tensor to what kernels read: contiguous, and f32 instead of f64.
fn readable(x: CubeTensor) -> CubeTensor {
    // Scores are f32 for every input dtype.
    into_contiguous(match x.dtype {
        DType::F64 => cast(x, DType::F32),
        _ => x,
    })
}

/// Returns a range of rows of `[batch, heads, seq, width]`.
fn rows_of(x: &CubeTensor, rows: Range<usize>) -> CubeTensor {
    let [batch, heads, seq, width] = x.meta.shape().dims();
    match rows == (0..seq) {
        true => x.clone(),
        false => into_contiguous(slice(x.clone(), &[0..batch, 0..heads, rows, 0..width])),
    }
}

/// Computes attention sums via compressed blocks, or a selection by them, into a new tensor.
fn of_compressed(
    [q, k, lse]: [CubeTensor; 3],
    call: &CompressedCall,
    wanted: &Wanted,
    (columns, dtype): (usize, DType),
) -> CubeTensor {
    // Eight elements are 16 bytes.
    let q = rows_readable(q, 8);
    let (k, lse) = (into_contiguous(k), into_contiguous(cast(lse, DType::F32)));
    let plan = CompressedPlan::new(&q.client, dtype_to_elem_type(q.dtype), call.shape);
    let plan =
        plan.unwrap_or_else(|reason| panic!("attention sums of compressed blocks: {reason}"));
    let rows = match wanted {
        Wanted::AttentionSums(rows) => rows.len(),
        Wanted::Choice { .. } => call.shape.seq[0],
    };
    let dims = [call.shape.batch, call.shape.heads[1], rows, columns];
    let out = empty(&q, dims, dtype);
    let inputs = CompressedInputs {
        q: view(&q),
        k: k.handle.clone(),
        lse: lse.handle.clone(),
    };
    launched(compressed_attention_sums(
        &q.client,
        &plan,
        &inputs,
        call.scale,
        wanted,
        &out.handle,
    ));
    out
}

impl EstimateOps for CubeBackend {
    fn block_scores(q: CubeTensor, k: CubeTensor, call: BlockScores) -> CubeTensor {
        let [q, k] = [q, k].map(readable);
        let [batch, heads, seq_q, width] = q.meta.shape().dims();
        let [_, kv_heads, seq_kv, _] = k.meta.shape().dims::<4>();
        let (lists, seq) = ([batch * heads, batch * kv_heads], [seq_q, seq_kv]);
        let (block, rows, factor) = (call.block, call.rows.clone(), call.factor);
        let blocks = seq_kv.div_ceil(block);
        let made = empty(&q, [batch, heads, rows.len(), blocks], DType::F32);
        let (client, element, out) = (&q.client, dtype_to_elem_type(q.dtype), &made.handle);
        let of_last = |queries: usize| {
            let queries = queries.min(seq_q);
            let sizes = LineSizes {
                lists,
                seq: [queries, seq_kv],
                width,
                factor,
            };
            (rows_of(&q, seq_q - queries..seq_q), sizes)
        };
        let touched = |kept| Touched {
            lists: lists[0],
            seq,
            block,
            rows: rows.clone(),
            kept,
        };
        let products = MeanProducts {
            lists,
            rows: rows.len(),
            blocks,
            width,
            factor,
            seen: call.causal.then_some(SeenRows {
                seq,
                block,
                first: rows.start,
            }),
        };
        let queries = rows.start * block..(rows.end * block).min(seq_q);
        launched(match call.by {
            ScoredBy::Antidiagonals { stride } => {
                let of = Antidiagonals {
                    lists,
                    seq,
                    width,
                    block,
                    stride,
                    causal: call.causal,
                    factor: factor / stride as f64,
                    rows,
                };
                antidiagonal_attention_sums(client, element, [&q.handle, &k.handle], &of, out)
            }
            ScoredBy::Lines { queries, kept } => {
                let (last, sizes) = of_last(queries);
                let sums = empty(&q, [lists[0], 2, seq_kv], DType::F32);
                let inputs = [&last.handle, &k.handle];
                launched(line_sums(client, element, inputs, &sizes, &sums.handle));
                touched_blocks(client, &sums.handle, &touched(kept), out)
            }
            ScoredBy::Flex { gamma, limits } => {
                let (last, sizes) = of_last(block);
                let tensors = FlexTensors {
                    q: &q.handle,
                    last: &last.handle,
                    k: &k.handle,
                };
                let of = touched(Kept::Share(gamma));
                flex_blocks(client, element, tensors, &sizes, &of, &limits, out)
            }
            // A single row is its own mean.
            ScoredBy::Means if block == 1 && q.dtype == DType::F32 => {
                let rows = [&rows_of(&q, queries).handle, &k.handle];
                mean_products(client, rows, &products, None, out)
            }
            ScoredBy::Means => {
                let q = rows_of(&q, queries.clone());
                let means = |heads, rows| empty(&q, [batch, heads, rows, width], DType::F32);
                let q_means = means(heads, rows.len());
                let k_means = means(kv_heads, blocks);
                let of_queries = RowBlocks::new(lists[0], [queries.len(), width], block);
                let of_keys = RowBlocks::new(lists[1], [seq_kv, width], block);
                let both = [(&q, &of_queries, &q_means), (&k, &of_keys, &k_means)];
                let [first, second] = both.map(|(x, of, means)| Blocked {
                    x: &x.handle,
                    of,
                    means: &means.handle,
                });
                let beside = Beside {
                    second: Some(second),
                    ..Beside::default()
                };
                launched(block_means(client, element, first, beside));
                let means = [&q_means.handle, &k_means.handle];
                mean_products(client, means, &products, None, out)
            }
            ScoredBy::Alike { similarity, smooth } => {
                let q = rows_of(&q, queries.clone());
                let of = AlikeScores {
                    products,
                    seq: [queries.len(), seq_kv],
                    block,
                    similarity,
                    smooth,
                };
                alike_scores(client, element, [&q.handle, &k.handle], &of, out)
            }
        });
        made
    }

    fn query_picks(q: CubeTensor, k: CubeTensor, call: GateSizes) -> CubeTensor {
        // Eight elements are 16 bytes.
        let (q, k) = (rows_readable(into_contiguous(q), 8), readable(k));
        let [batch, heads, seq_q, _] = q.meta.shape().dims();
        let picks = empty(&q, [batch, heads, seq_q, call.most], DType::I32);
        let element = dtype_to_elem_type(q.dtype);
        let inputs = [&q.handle, &k.handle];
        launched(query_picks(
            &q.client,
            element,
            inputs,
            &call,
            &picks.handle,
        ));
        picks
    }

    fn compressed_attention_sums(
        q: CubeTensor,
        k: CubeTensor,
        lse: CubeTensor,
        call: CompressedCall,
    ) -> CubeTensor {
        let wanted = Wanted::AttentionSums(call.rows.clone());
        let of = (call.shape.chosen_from(), DType::F32);
        of_compressed([q, k, lse], &call, &wanted, of)
    }

    fn compressed_choice(
        q: CubeTensor,
        k: CubeTensor,
        lse: CubeTensor,
        call: CompressedCall,
    ) -> CubeTensor {
        let wanted = Wanted::Choice {
            forced: call.forced,
            most: call.most,
        };
        of_compressed([q, k, lse], &call, &wanted, (call.most, DType::I32))
    }
}
