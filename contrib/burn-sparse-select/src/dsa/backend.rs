//! An indexer's scores, selections and losses on CubeCL devices.

use crate::kernels::indexer as kernels;
use crate::kernels::indexer::{
    Compared, IndexerGradients, KeyBytes, PairInputs, PairSizes, PairSum, QueriesOfBlocks,
    TopKKeys, block_sums, by_keys, by_queries, check, check_rounding, compare, key_bytes,
    key_parts, pair_sums, round_rows, spread_listed, top_k_keys,
};
use crate::kernels::selection::{RowsView, RunMaxima};
use blocksparse::HadamardFp8;
use blocksparse_cubecl::primitives::radix_select::RadixTile;
use blocksparse_cubecl::rows::column_sums;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl::ir::ElemType;

use crate::dsa::ops::{
    AmongKeys, BlockMaxima, ComparedKeys, IndexInputs, IndexerChoice, IndexerGrads, IndexerLoss,
    IndexerOps, IndexerScores, TargetInputs,
};
use burn_blocksparse::internal::cube::{
    empty, integers, launched, readable, typed, uses_reference,
};

/// Alignment of rows in elements of half precision: 16 bytes.
const ALIGNMENT: usize = 8;

/// Number of slabs of queries whose lists by blocks are in memory at a time.
const SLABS: usize = 32;

/// Returns the kernel's type of a float dtype of up to 32 bits, or with `half` of half precision only.
fn element_of(dtype: DType, half: bool) -> Option<ElemType> {
    let is_float = match dtype {
        DType::F32 => !half,
        _ => matches!(dtype, DType::F16 | DType::BF16),
    };
    (is_float && !uses_reference()).then(|| dtype_to_elem_type(dtype))
}

/// Returns whether kernels serve pairs of these sizes and dtype on a device.
pub(crate) fn available(device: &CubeDevice, dtype: DType, sizes: &PairSizes) -> bool {
    let element = element_of(dtype, false);
    element.is_some_and(|element| check(&device.client(), element, sizes).is_ok())
}

/// Returns whether a device has the kernel that selects keys by scores.
pub(crate) fn has_top_k(device: &CubeDevice) -> bool {
    RadixTile::new(&device.client(), usize::MAX >> 1).is_ok()
}

/// Returns whether a device has the kernel that scores the keys of listed blocks, for one batch entry at a time.
pub(crate) fn has_block_sums(
    device: &CubeDevice,
    dtype: DType,
    sizes: &PairSizes,
    block: usize,
) -> bool {
    let (client, sizes) = (device.client(), PairSizes { batch: 1, ..*sizes });
    element_of(dtype, true)
        .is_some_and(|element| kernels::has_block_sums(&client, element, &sizes, block))
}

/// Returns whether a device has the kernel that rounds rows of this width.
pub(crate) fn rounds(device: &CubeDevice, dtype: DType, width: usize) -> bool {
    let element = element_of(dtype, false);
    element.is_some_and(|element| check_rounding(&device.client(), element, width).is_ok())
}

/// Returns the problem of the highest products per block, for queries `[batch, heads, .., width]`.
fn run_maxima([batch, heads, _, width]: [usize; 4], call: &BlockMaxima) -> RunMaxima {
    RunMaxima {
        rows: [batch * heads, call.rows[1]],
        columns: call.blocks * call.block,
        width,
        run: call.block,
    }
}

/// Returns whether a device has the kernel of the highest products per block, for these queries.
pub(crate) fn has_maxima(
    device: &CubeDevice,
    dtype: DType,
    q: [usize; 4],
    call: &BlockMaxima,
) -> bool {
    let of = run_maxima(q, call);
    element_of(dtype, true).is_some_and(|element| of.is_served(&device.client(), element))
}

/// Contiguous tensors of queries, keys, and per-query numbers (weights or lse, in f32).
struct Pairs {
    q: CubeTensor,
    k: CubeTensor,
    of_rows: CubeTensor,
}

impl Pairs {
    fn new([q, k, of_rows]: [CubeTensor; 3]) -> Self {
        Self {
            q: into_contiguous(q),
            k: into_contiguous(k),
            of_rows: into_contiguous(cast(of_rows, DType::F32)),
        }
    }

    fn sizes(&self, rows: [usize; 2], listed: Option<usize>) -> PairSizes {
        let [q, k] = [&self.q, &self.k].map(|x| x.meta.shape().dims());
        PairSizes::new(q, k, rows, listed)
    }

    fn inputs<'a>(
        &'a self,
        keys: Option<&'a CubeTensor>,
        bytes: Option<&'a KeyBytes>,
    ) -> PairInputs<'a> {
        PairInputs {
            element: dtype_to_elem_type(self.q.dtype),
            q: &self.q.handle,
            k: &self.k.handle,
            of_rows: &self.of_rows.handle,
            keys: keys.map(|keys| &keys.handle),
            bytes,
        }
    }

    /// Packs the keys in fp8, if rows are rounded to it and a kernel serves them in this form.
    fn bytes(&self, sizes: &PairSizes, sum: &PairSum, in_fp8: bool) -> Option<KeyBytes> {
        let inputs = self.inputs(None, None);
        if !in_fp8 {
            return None;
        }
        let mut bytes = None;
        let packed = key_bytes(&self.q.client, sizes, &inputs, sum);
        launched(packed.map(|found| bytes = found));
        bytes
    }

    /// Computes sums of pairs: `[batch, rows, columns]`.
    fn sums(
        &self,
        sizes: &PairSizes,
        keys: Option<&CubeTensor>,
        bytes: Option<&KeyBytes>,
        sum: &PairSum,
    ) -> CubeTensor {
        let dims = [sizes.batch, sizes.rows[1], sizes.columns()];
        let out = empty(&self.q, dims, DType::F32);
        let inputs = self.inputs(keys, bytes);
        launched(pair_sums(&self.q.client, sizes, &inputs, sum, &out.handle));
        out
    }

    /// Returns the factor of the scores.
    fn factor(&self) -> f64 {
        let [_, heads, _, width] = self.q.meta.shape().dims::<4>();
        1.0 / ((heads * width) as f64).sqrt()
    }
}

fn index_pairs(index: IndexInputs<CubeBackend>) -> Pairs {
    Pairs::new([index.q, index.k, index.weights])
}

/// Selects the keys of the highest scores within the blocks that queries list.
fn choice_in_blocks(
    index: IndexInputs<CubeBackend>,
    ([blocks, seen], block): ([&CubeTensor; 2], usize),
    call: &IndexerChoice,
) -> CubeTensor {
    let [q, k] = [index.q, index.k].map(|x| readable(into_contiguous(x), ALIGNMENT));
    let pairs = Pairs::new([q, k, index.weights]);
    let [batch, seq_q, count] = blocks.meta.shape().dims();
    let (listed, factor) = (count * block, pairs.factor());
    let top_k = TopKKeys {
        most: call.most,
        near: call.near,
        seen: Some(1),
    };
    let of_entry = PairSizes {
        batch: 1,
        ..pairs.sizes([0, seq_q], Some(listed))
    };
    let slabs = top_k.slabs(&of_entry, call.chunk_elements);
    let numbers = slabs.iter().map(PairSizes::elements).max().unwrap_or(0);
    let scores = empty(&pairs.q, [numbers], DType::F32);
    let lists = empty(&pairs.q, [batch, seq_q, call.most], DType::I32);
    let client = &pairs.q.client;
    let behind = |of: &CubeTensor, numbers: usize| {
        let bytes = numbers * of.dtype.size();
        of.handle.clone().offset_start(bytes as u64)
    };
    let part = |of: &CubeTensor, entry: usize| {
        let dims = of.meta.shape();
        behind(of, entry % dims[0] * (dims.num_elements() / dims[0]))
    };
    for entry in 0..batch {
        let of = [&pairs.q, &pairs.k, &pairs.of_rows, &lists, seen];
        let [q, k, of_rows, lists, seen] = of.map(|of| part(of, entry));
        let inputs = PairInputs {
            q: &q,
            k: &k,
            of_rows: &of_rows,
            ..pairs.inputs(None, None)
        };
        // Slabs of equally many rows get their lists in one launch.
        let as_long = slabs.chunk_by(|a, b| a.rows[1] == b.rows[1]);
        for slabs in as_long.flat_map(|slabs| slabs.chunks(SLABS)) {
            let first = &slabs[0];
            let own = behind(blocks, (entry * seq_q + first.rows[0]) * count);
            let queries = QueriesOfBlocks::new(client, first, slabs.len(), (&own, block));
            launched(queries.and_then(|queries| {
                slabs.iter().enumerate().try_for_each(|(slab, sizes)| {
                    let of = (&queries, slab);
                    block_sums(client, sizes, &inputs, of, factor, &scores.handle)?;
                    let numbers = [&scores.handle, &lists];
                    top_k_keys(client, sizes, &top_k, numbers, Some(&seen))
                })
            }));
        }
    }
    let dims = [batch * seq_q, call.most, count];
    let [of, by] = [&lists.handle, &blocks.handle];
    launched(kernels::keys_of_places(client, of, by, dims, block));
    lists
}

impl IndexerOps for CubeBackend {
    fn indexer_scores(index: IndexInputs<Self>, call: IndexerScores) -> CubeTensor {
        let pairs = index_pairs(index);
        let sum = PairSum::Scores {
            factor: pairs.factor(),
            near: call.near,
            all: call.all,
        };
        let sizes = pairs.sizes(call.rows, None);
        let bytes = pairs.bytes(&sizes, &sum, call.in_fp8);
        pairs.sums(&sizes, None, bytes.as_ref(), &sum)
    }

    fn indexer_choice(
        index: IndexInputs<Self>,
        among: AmongKeys<Self>,
        call: IndexerChoice,
    ) -> CubeTensor {
        let lists = among.lists.into_option().map(integers);
        let seen = among.seen.into_option().map(integers);
        if let (Some(block), Some(blocks), Some(seen)) = (call.block, &lists, &seen) {
            return choice_in_blocks(index, ([blocks, seen], block), &call);
        }
        let pairs = index_pairs(index);
        let [batch, _, seq_q, _] = pairs.q.meta.shape().dims();
        let top_k = TopKKeys {
            most: call.most,
            near: call.near,
            seen: seen.as_ref().map(|seen| seen.meta.shape()[0]),
        };
        // The selection kernel forces near keys, so scores need not.
        let sum = PairSum::Scores {
            factor: pairs.factor(),
            near: 0,
            all: seen.is_some(),
        };
        let listed = lists.as_ref().map(|lists| lists.meta.shape()[2]);
        let all = pairs.sizes([0, seq_q], listed);
        let bytes = pairs.bytes(&all, &sum, call.in_fp8);
        let slabs = top_k.slabs(&all, call.chunk_elements);
        let numbers = slabs.iter().map(PairSizes::elements).max().unwrap_or(0);
        // All slabs reuse the same buffer of scores.
        let scores = empty(&pairs.q, [numbers], DType::F32);
        let chosen = empty(&pairs.q, [batch, seq_q, call.most], DType::I32);
        let client = &pairs.q.client;
        let seen = seen.as_ref().map(|seen| &seen.handle);
        let inputs = pairs.inputs(lists.as_ref(), bytes.as_ref());
        for sizes in &slabs {
            launched(pair_sums(client, sizes, &inputs, &sum, &scores.handle));
            let numbers = [&scores.handle, &chosen.handle];
            launched(top_k_keys(client, sizes, &top_k, numbers, seen));
        }
        chosen
    }

    fn indexer_maxima(q: CubeTensor, k: CubeTensor, call: BlockMaxima) -> CubeTensor {
        let [q, k] = [q, k].map(|x| readable(into_contiguous(x), ALIGNMENT));
        let dims @ [batch, heads, seq_q, width] = q.meta.shape().dims();
        let [_, _, seq_kv, _] = k.meta.shape().dims::<4>();
        let (of, bytes) = (run_maxima(dims, &call), q.dtype.size());
        let [first, rows] = call.rows;
        let queries = RowsView::new(&q.handle, [batch * heads, seq_q, width]);
        let queries = queries.rows(first, rows, bytes);
        let keys = RowsView::new(&k.handle, [batch, seq_kv, width]).rows(0, of.columns, bytes);
        let out = empty(&q, [batch, heads, rows, call.blocks], DType::F32);
        let element = dtype_to_elem_type(q.dtype);
        launched(of.launch(&q.client, element, [&queries, &keys], &out.handle));
        out
    }

    fn indexer_rows(x: CubeTensor, of: HadamardFp8) -> CubeTensor {
        let x = into_contiguous(x);
        let dims: [usize; 4] = x.meta.shape().dims();
        let [.., width] = dims;
        let rows = dims.iter().product::<usize>() / width;
        let out = empty(&x, dims, x.dtype);
        let element = dtype_to_elem_type(x.dtype);
        launched(round_rows(
            &x.client,
            element,
            &x.handle,
            [rows, width],
            of,
            &out.handle,
        ));
        out
    }

    fn indexer_loss(
        index: IndexInputs<Self>,
        target: TargetInputs<Self>,
        call: IndexerLoss,
    ) -> IndexerGrads<Self> {
        let TargetInputs { q, k, lse, over } = target;
        let (index, target) = (index_pairs(index), Pairs::new([q, k, lse]));
        let keys = match over {
            ComparedKeys::All => None,
            ComparedKeys::Indices(keys) => Some(into_contiguous(cast(keys, DType::I32))),
        };
        let listed = keys.as_ref().map(|keys| keys.meta.shape()[3]);
        let [batch, heads, seq_q, width] = index.q.meta.shape().dims();
        let [_, _, seq_kv, _] = index.k.meta.shape().dims();
        let new = |like: &CubeTensor| {
            let dims = like.meta.shape().dims::<4>();
            empty(like, dims, DType::F32)
        };
        let losses = empty(&index.q, [batch, seq_q], DType::F32);
        let by_q = new(&index.q);
        let by_weights = empty(&index.q, [batch, heads, seq_q], DType::F32);
        let client = index.q.client.clone();
        let factor = index.factor();
        let scores = PairSum::Scores {
            factor,
            near: 0,
            all: false,
        };
        let weights = PairSum::Weights { scale: call.scale };
        let step = call.rows;
        let parts = key_parts(&client, &index.sizes([0, step], None));
        let in_parts = empty(&index.q, [parts, batch * seq_kv * width], DType::F32);
        for start in (0..seq_q).step_by(step) {
            let rows = [start, step.min(seq_q - start)];
            let sizes = index.sizes(rows, listed);
            let x = index.sums(&sizes, keys.as_ref(), None, &scores);
            let of_target = target.sizes(rows, listed);
            let wanted = target.sums(&of_target, keys.as_ref(), None, &weights);
            let compared = Compared {
                scores: &x.handle,
                wanted: &wanted.handle,
                keys: keys.as_ref().map(|keys| &keys.handle),
                losses: &losses.handle,
            };
            launched(compare(&client, &sizes, &compared));
            let mut gradients = IndexerGradients {
                inputs: index.inputs(keys.as_ref(), None),
                by_scores: &x.handle,
                factor: factor / (batch * seq_q) as f64,
            };
            let found = [&by_q.handle, &by_weights.handle];
            launched(by_queries(&client, &sizes, &gradients, found));
            // The gradient with respect to keys sums over all queries that list a key. It runs over all pairs, most of which contribute nothing.
            let all = PairSizes {
                listed: None,
                ..sizes
            };
            let dense = keys.as_ref().map(|keys| {
                let dense = empty(&x, [batch, rows[1], seq_kv], DType::F32);
                let of_lists = [&x.handle, &keys.handle];
                launched(spread_listed(&client, &sizes, of_lists, &dense.handle));
                dense
            });
            gradients.inputs.keys = None;
            gradients.by_scores = &dense.as_ref().unwrap_or(&x).handle;
            let out = (&in_parts.handle, parts);
            launched(by_keys(
                &client,
                &all,
                &gradients,
                out,
                [start > 0, call.causal],
            ));
        }
        let by_k = new(&index.k);
        let (matrix, of_parts) = ([parts, batch * seq_kv * width], typed(&in_parts));
        launched(column_sums(&client, of_parts, matrix, typed(&by_k)));
        IndexerGrads {
            losses,
            q: by_q,
            k: by_k,
            weights: by_weights,
        }
    }
}
