//! Products with block-sparse weights and their gradients, built from batched matmuls, which every backend has. Targets are the output blocks in the forward
//! pass and the input blocks for the gradient with respect to x. Targets with the same number of kept blocks form one batch of products: the left factors are
//! the source blocks, gathered along the columns, and the right factors are the kept blocks, stacked along the rows. So the work is proportional to the kept
//! blocks.

use std::collections::BTreeMap;

use blocksparse::WeightLayout;

use crate::linear::products::{Products, as_rows, groups, made_in, rounded, with_width};
use crate::sparse_linear::values::{
    Pass, SparseLinearCall, SparseLinearInputs, SparseLinearOutput, SparseLinearSaved,
};
use burn_blocksparse::internal::prelude::*;
use burn_blocksparse::internal::upload;

/// Most elements gathered at once. A single target may need more, but no more than x has.
const CHUNK: usize = 1 << 24;

/// Computes one of the products in `dtype`, which is that of the factors or of sums.
pub(crate) trait SparseProducts<B: Backend> {
    fn sparse_product(
        pass: Pass,
        factors: [FloatTensor<B>; 2],
        layout: &WeightLayout,
        dtype: FloatDType,
    ) -> FloatTensor<B>;
}

/// Block-sparse products by gathering blocks and multiplying them with `P`.
pub(crate) struct Gathered<P>(std::marker::PhantomData<P>);

impl<B: Backend, P: Products<B>> SparseProducts<B> for Gathered<P> {
    fn sparse_product(
        pass: Pass,
        [lhs, rhs]: [FloatTensor<B>; 2],
        layout: &WeightLayout,
        dtype: FloatDType,
    ) -> FloatTensor<B> {
        let device = lhs.device();
        let rows = lhs.shape()[0];
        if layout.is_empty() || rows == 0 {
            let shape = match pass {
                Pass::Forward => Shape::new([rows, layout.outputs()]),
                Pass::Input => Shape::new([rows, layout.inputs()]),
                Pass::Weight => Shape::new(layout.shape()),
            };
            return B::float_zeros(shape, &device, dtype);
        }
        match pass {
            Pass::Forward => {
                let targets = Targets::outputs(layout);
                targets.product::<B, P>(lhs, rhs, dtype)
            }
            Pass::Input => {
                let targets = Targets::inputs(layout);
                let order = indices::<B>(&lhs, layout.input_order().iter().copied());
                let weight = Array::<B>(rhs).select(0, order).swap(1, 2);
                targets.product::<B, P>(lhs, weight.0, dtype)
            }
            Pass::Weight => {
                let targets = Targets::outputs(layout);
                targets.outer::<B, P>(lhs, rhs, dtype)
            }
        }
    }
}

/// Output or input blocks, and the kept blocks that each sums over.
struct Targets<'a> {
    block: usize,
    /// Range of each target's kept blocks in `sources`.
    offsets: &'a [u32],
    /// Source block that each kept block is multiplied with.
    sources: &'a [u32],
}

/// Targets with the same number of kept blocks.
struct Batch {
    targets: Vec<usize>,
    /// Kept blocks per target.
    count: usize,
}

impl<'a> Targets<'a> {
    fn outputs(layout: &'a WeightLayout) -> Self {
        Self {
            block: layout.block(),
            offsets: layout.output_offsets(),
            sources: layout.input_blocks(),
        }
    }

    fn inputs(layout: &'a WeightLayout) -> Self {
        Self {
            block: layout.block(),
            offsets: layout.input_offsets(),
            sources: layout.output_blocks_by_input(),
        }
    }

    /// Groups all targets by their number of kept blocks; groups are split so that what is gathered for `rows` stays within [`CHUNK`].
    fn batches(&self, rows: usize) -> Vec<Batch> {
        let mut by_count: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (target, pair) in self.offsets.windows(2).enumerate() {
            let count = (pair[1] - pair[0]) as usize;
            by_count.entry(count).or_default().push(target);
        }
        let batches = by_count.into_iter().flat_map(|(count, targets)| {
            let gathered = (rows * count * self.block).max(1);
            let most = (CHUNK / gathered).max(1);
            let chunks: Vec<Batch> = (targets.chunks(most))
                .map(|targets| Batch {
                    targets: targets.to_vec(),
                    count,
                })
                .collect();
            chunks
        });
        batches.collect()
    }

    /// Returns the indices of a batch's kept blocks.
    fn places(&self, batch: &Batch) -> Vec<u32> {
        let places = batch.targets.iter().flat_map(|&target| {
            let first = self.offsets[target];
            first..first + batch.count as u32
        });
        places.collect()
    }

    /// Gathers the source blocks of a batch from `[rows, blocks, block]`: `[rows, targets, count · block]`.
    fn gathered<B: Backend>(&self, source: &Array<B>, places: &[u32], batch: &Batch) -> Array<B> {
        let rows = source.shape()[0];
        let met = places.iter().map(|&place| self.sources[place as usize]);
        let blocks = source.clone().select(1, indices::<B>(&source.0, met));
        blocks.reshape([rows, batch.targets.len(), batch.count * self.block])
    }

    /// Reshapes `[rows, sources · block]` to `[rows, sources, block]`.
    fn cut<B: Backend>(&self, matrix: FloatTensor<B>) -> Array<B> {
        let [rows, width] = matrix.shape().dims();
        Array::<B>(matrix).reshape([rows, width / self.block, self.block])
    }

    /// Sums the products of each target with its kept blocks, which are `[blocks, block, block]` in the order of the targets.
    fn product<B: Backend, P: Products<B>>(
        &self,
        source: FloatTensor<B>,
        weight: FloatTensor<B>,
        dtype: FloatDType,
    ) -> FloatTensor<B> {
        let rows = source.shape()[0];
        let (source, weight) = (self.cut::<B>(source), Array::<B>(weight));
        let batches = self.batches(rows);
        let parts = batches.iter().map(|batch| {
            let targets = batch.targets.len();
            if batch.count == 0 {
                let shape = [rows, targets, self.block];
                return Array::zeros(shape, &source.0.device(), dtype);
            }
            let places = self.places(batch);
            let lhs = self.gathered(&source, &places, batch).swap(0, 1);
            let rhs = weight.clone().select(0, indices::<B>(&weight.0, places));
            let rhs = rhs.reshape([targets, batch.count * self.block, self.block]);
            Array::<B>(P::product(lhs.0, rhs.0, dtype)).swap(0, 1)
        });
        let parts = parts.collect();
        let targets = batches
            .iter()
            .flat_map(|batch| batch.targets.iter().copied());
        let out = in_order(parts, 1, targets.collect());
        let width = (self.offsets.len() - 1) * self.block;
        out.reshape([rows, width]).0
    }

    /// Returns `sourceᵀ · grad` for each kept block: `[blocks, block, block]`, in the dtype of sums.
    fn outer<B: Backend, P: Products<B>>(
        &self,
        source: FloatTensor<B>,
        grad: FloatTensor<B>,
        dtype: FloatDType,
    ) -> FloatTensor<B> {
        let rows = source.shape()[0];
        // The product of two tall matrices is computed as one product per group of rows, and the results are added.
        let groups = groups(rows);
        let (source, grad) = (self.cut::<B>(source), self.cut::<B>(grad));
        let batches = self.batches(rows);
        let batches = batches.iter().filter(|batch| batch.count > 0);
        let parts = batches.clone().map(|batch| {
            let (targets, height) = (batch.targets.len(), batch.count * self.block);
            let places = self.places(batch);
            // Batch over row groups and targets: [groups · targets, rows / groups, width].
            let grouped = |matrix: Array<B>, width: usize| {
                let matrix = matrix.reshape([groups, rows / groups, targets, width]);
                let shape = [groups * targets, rows / groups, width];
                matrix.swap(1, 2).reshape(shape)
            };
            let lhs = grouped(self.gathered(&source, &places, batch), height);
            let columns = batch.targets.iter().map(|&target| target as u32);
            let columns = indices::<B>(&grad.0, columns);
            let rhs = grouped(grad.clone().select(1, columns), self.block);
            let mut made = Array::<B>(P::product(lhs.swap(1, 2).0, rhs.0, dtype));
            if groups > 1 {
                let sums = made.reshape([groups, targets * height * self.block]);
                made = Array::<B>(P::sum_rows(sums.0));
            }
            made.reshape([targets * batch.count, self.block, self.block])
        });
        let parts = parts.collect();
        let places = batches.flat_map(|batch| self.places(batch));
        in_order(parts, 0, places.map(|place| place as usize).collect()).0
    }
}

/// Concatenates parts along `dim` and permutes the entries: entry `i` goes to index `places[i]`.
fn in_order<B: Backend>(parts: Vec<Array<B>>, dim: usize, places: Vec<usize>) -> Array<B> {
    let all = Array::cat(parts, dim);
    if places.is_sorted() {
        return all;
    }
    let mut from = vec![0; places.len()];
    for (entry, place) in places.into_iter().enumerate() {
        from[place] = entry as u32;
    }
    let from = indices::<B>(&all.0, from);
    all.select(dim, from)
}

fn indices<B: Backend>(
    like: &FloatTensor<B>,
    indices: impl IntoIterator<Item = u32>,
) -> IntTensor<B> {
    let indices = indices.into_iter().map(|index| index as i32);
    upload::indices::<B>(&like.device(), indices.collect())
}

/// Computes one of the products in any dtype.
fn product<B: Backend, S: SparseProducts<B>>(
    pass: Pass,
    factors: [FloatTensor<B>; 2],
    call: &SparseLinearCall,
) -> FloatTensor<B> {
    let made = made_in(call.dtype, factors[0].dtype().into());
    let product = S::sparse_product(pass, factors, &call.layout, made);
    rounded::<B>(product, call.dtype)
}

/// Returns `x · W` with factors rounded to the product's dtype.
pub(crate) fn forward<B: Backend, S: SparseProducts<B>>(
    inputs: SparseLinearInputs<B>,
    call: SparseLinearCall,
) -> SparseLinearOutput<B> {
    let changed = |tensor: &FloatTensor<B>| FloatDType::from(tensor.dtype()) != call.dtype;
    let is_changed = [changed(&inputs.x), changed(&inputs.weight)];
    let x = rounded::<B>(inputs.x, call.dtype);
    let weight = rounded::<B>(inputs.weight, call.dtype);
    let shape = with_width(&x.shape(), call.layout.outputs());
    let factors = [as_rows::<B>(x.clone()), weight.clone()];
    let out = product::<B, S>(Pass::Forward, factors, &call);
    SparseLinearOutput {
        out: B::float_reshape(out, shape),
        x: is_changed[0].then_some(x).into(),
        weight: is_changed[1].then_some(weight).into(),
    }
}

/// Returns a gradient: `dx = dy · Wᵀ`, or `dW = xᵀ · dy` of the kept blocks.
pub(crate) fn backward<B: Backend, S: SparseProducts<B>>(
    saved: SparseLinearSaved<B>,
    call: SparseLinearCall,
    pass: Pass,
) -> FloatTensor<B> {
    let SparseLinearSaved { factor, grad } = saved;
    if pass != Pass::Weight {
        let shape = with_width(&grad.shape(), call.layout.inputs());
        let factors = [as_rows::<B>(grad), factor];
        return B::float_reshape(product::<B, S>(pass, factors, &call), shape);
    }
    let factors = [as_rows::<B>(factor), as_rows::<B>(grad)];
    // Sums over rows are rounded once, whatever the result's dtype.
    let sums = SparseLinearCall {
        dtype: accumulate_in(factors[0].dtype().into()),
        layout: call.layout,
    };
    let made = product::<B, S>(pass, factors, &sums);
    rounded::<B>(made, call.dtype)
}
