//! Scores by which blocks are chosen, on CubeCL devices.

use crate::kernels::rows::blocks::{Blocked, RowBlocks, block_means_of_two};
use crate::kernels::selection::{
    AlikeScores, Antidiagonals, CompressedInputs, CompressedPlan, FlexLimits, FlexTensors,
    GateSizes, LineSizes, MeanProducts, SeenRows, Touched, Wanted, alike_scores,
    antidiagonal_attention_sums, check, compressed_attention_sums, flex_blocks, line_sums,
    mean_products, query_picks, touched_blocks,
};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::kernel::{cast, into_contiguous, slice};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};

use crate::selection::estimate_ops::{CompressedCall, EstimateOps, LikeBlocks, MeanScores};
use burn_blocksparse::internal::cube::readable as rows_readable;
use burn_blocksparse::internal::cube::{empty, launched, uses_reference, view};

/// Returns whether kernels make scores on a device.
pub(crate) fn available(device: &CubeDevice) -> bool {
    !uses_reference() && check(&device.client()).is_ok()
}

/// As kernels read it.
fn readable(x: CubeTensor) -> CubeTensor {
    // Scores are f32, whatever they are made of.
    into_contiguous(match x.dtype {
        DType::F64 => cast(x, DType::F32),
        _ => x,
    })
}

/// The last rows of `[batch, heads, seq, width]`.
fn last(x: &CubeTensor, rows: usize) -> CubeTensor {
    let [batch, heads, seq, width] = x.meta.shape().dims();
    let ranges = [0..batch, 0..heads, seq - rows..seq, 0..width];
    into_contiguous(slice(x.clone(), &ranges))
}

/// Room for scores.
fn scores(q: &CubeTensor, k: &CubeTensor, rows: usize, block: usize) -> CubeTensor {
    let [batch, heads, ..] = q.meta.shape().dims::<4>();
    let blocks = k.meta.shape()[2].div_ceil(block);
    empty(q, [batch, heads, rows, blocks], DType::F32)
}

/// Attention sums of compressed blocks, or what they choose, in a new tensor of these sizes.
fn of_compressed(
    [q, k, lse]: [CubeTensor; 3],
    call: &CompressedCall,
    wanted: &Wanted,
    (columns, dtype): (usize, DType),
) -> CubeTensor {
    // 16 bytes have eight numbers.
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
    fn antidiagonal_attention_sums(
        q: CubeTensor,
        k: CubeTensor,
        call: Antidiagonals,
    ) -> CubeTensor {
        let [q, k] = [q, k].map(readable);
        let out = scores(&q, &k, call.rows.len(), call.block);
        let element = dtype_to_elem_type(q.dtype);
        let inputs = [&q.handle, &k.handle];
        launched(antidiagonal_attention_sums(
            &q.client,
            element,
            inputs,
            &call,
            &out.handle,
        ));
        out
    }

    fn blocks_of_lines(
        q: CubeTensor,
        k: CubeTensor,
        sizes: LineSizes,
        call: Touched,
    ) -> CubeTensor {
        let [q, k] = [q, k].map(readable);
        let [queries, keys] = sizes.seq;
        let last = last(&q, queries);
        let sums = empty(&q, [call.lists, 2, keys], DType::F32);
        let out = scores(&q, &k, call.rows.len(), call.block);
        let element = dtype_to_elem_type(q.dtype);
        let inputs = [&last.handle, &k.handle];
        launched(line_sums(&q.client, element, inputs, &sizes, &sums.handle));
        launched(touched_blocks(&q.client, &sums.handle, &call, &out.handle));
        out
    }

    fn flex_blocks(
        q: CubeTensor,
        k: CubeTensor,
        sizes: LineSizes,
        call: Touched,
        limits: FlexLimits,
    ) -> CubeTensor {
        let [q, k] = [q, k].map(readable);
        let last = last(&q, sizes.seq[0]);
        let out = scores(&q, &k, call.rows.len(), call.block);
        let tensors = FlexTensors {
            q: &q.handle,
            last: &last.handle,
            k: &k.handle,
        };
        let element = dtype_to_elem_type(q.dtype);
        launched(flex_blocks(
            &q.client,
            element,
            tensors,
            &sizes,
            &call,
            &limits,
            &out.handle,
        ));
        out
    }

    fn query_picks(q: CubeTensor, k: CubeTensor, call: GateSizes) -> CubeTensor {
        // 16 bytes have eight numbers.
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

    fn mean_scores(q: CubeTensor, k: CubeTensor, call: MeanScores) -> CubeTensor {
        let MeanCall { q, k, seq, of } = MeanCall::new(q, k, &call);
        let out = scores(&q, &k, of.rows, call.block);
        let element = dtype_to_elem_type(q.dtype);
        let ([lists, kv_lists], width) = (of.lists, of.width);
        let means = |x: &CubeTensor, rows: usize| {
            let [batch, heads, ..] = x.meta.shape().dims::<4>();
            empty(x, [batch, heads, rows, width], DType::F32)
        };
        let (q_means, k_means) = (means(&q, of.rows), means(&k, of.blocks));
        let q_blocks = RowBlocks::new(lists, [seq[0], width], call.block);
        let k_blocks = RowBlocks::new(kv_lists, [seq[1], width], call.block);
        let of_queries = Blocked {
            x: &q.handle,
            of: &q_blocks,
            means: &q_means.handle,
        };
        let of_keys = Blocked {
            x: &k.handle,
            of: &k_blocks,
            means: &k_means.handle,
        };
        launched(block_means_of_two(
            &q.client,
            element,
            [of_queries, of_keys],
        ));
        let inputs = [&q_means.handle, &k_means.handle];
        launched(mean_products(&q.client, inputs, &of, &out.handle));
        out
    }

    fn alike_scores(
        q: CubeTensor,
        k: CubeTensor,
        call: MeanScores,
        like: LikeBlocks,
    ) -> CubeTensor {
        let MeanCall { q, k, seq, of } = MeanCall::new(q, k, &call);
        let out = scores(&q, &k, of.rows, call.block);
        let element = dtype_to_elem_type(q.dtype);
        let of = AlikeScores {
            products: of,
            seq,
            block: call.block,
            similarity: like.similarity,
            smooth: like.smooth,
        };
        let inputs = [&q.handle, &k.handle];
        launched(alike_scores(&q.client, element, inputs, &of, &out.handle));
        out
    }
}

/// Products of means of some rows of blocks.
struct MeanCall {
    /// Of those rows.
    q: CubeTensor,
    k: CubeTensor,
    /// Of these tensors.
    seq: [usize; 2],
    of: MeanProducts,
}

impl MeanCall {
    fn new(q: CubeTensor, k: CubeTensor, call: &MeanScores) -> Self {
        let [q, k] = [q, k].map(readable);
        let (block, rows) = (call.block, call.rows.clone());
        let [batch, heads, seq_q, width] = q.meta.shape().dims();
        let [_, kv_heads, seq_kv, _] = k.meta.shape().dims::<4>();
        let of = MeanProducts {
            lists: [batch * heads, batch * kv_heads],
            rows: rows.len(),
            blocks: seq_kv.div_ceil(block),
            width,
            factor: call.factor,
            seen: call.causal.then_some(SeenRows {
                seq: [seq_q, seq_kv],
                block,
                first: rows.start,
            }),
        };
        let queries = rows.start * block..(rows.end * block).min(seq_q);
        let seq = [queries.len(), seq_kv];
        let q = match rows == (0..seq_q.div_ceil(block)) {
            true => q,
            false => {
                let ranges = [0..batch, 0..heads, queries, 0..width];
                into_contiguous(slice(q, &ranges))
            }
        };
        Self { q, k, seq, of }
    }
}
