//! Autodiff of products with block-sparse weights.

use crate::sparse_linear::ops::BlockSparseLinearOps;
use crate::sparse_linear::values::{
    Pass, SparseLinearCall, SparseLinearInputs, SparseLinearOutput, SparseLinearSaved,
};
use burn_blocksparse::internal::custom_gradient::*;
use burn_blocksparse::internal::prelude::*;

impl<B: BlockSparseLinearOps, C: CheckpointStrategy> BlockSparseLinearOps for Autodiff<B, C> {
    fn block_sparse_linear_forward(
        inputs: SparseLinearInputs<Self>,
        call: SparseLinearCall,
    ) -> SparseLinearOutput<Self> {
        let SparseLinearInputs { x, weight } = inputs;
        // The checkpointer stores the factors that the product reads unchanged.
        let [x_is_itself, weight_is_itself] =
            [&x, &weight].map(|factor| own_dtype(factor) == call.dtype);
        let reads =
            |[by_x, by_weight]: [bool; 2]| [by_weight && x_is_itself, by_x && weight_is_itself];
        let factors = [x, weight].map(Some);
        let out = custom_gradient::<B, C, _, _>(factors, reads, |factors, wanted| {
            let dtypes = wanted_dtypes(&factors, wanted);
            let [x, weight] = factors.map(there);
            let layout = call.layout.clone();
            let made = B::block_sparse_linear_forward(SparseLinearInputs { x, weight }, call);
            let x = made.x.into_option().filter(|_| wanted[1]);
            let weight = made.weight.into_option().filter(|_| wanted[0]);
            (made.out, move |[own_x, own_weight], grad| {
                let gradient = |dtype: Option<FloatDType>, factor, pass| {
                    let (dtype, layout) = (dtype?, layout.clone());
                    let (factor, grad) = (there(factor), grad.clone());
                    let saved = SparseLinearSaved { factor, grad };
                    let call = SparseLinearCall { layout, dtype };
                    Some(B::block_sparse_linear_backward(saved, call, pass))
                };
                let [by_x, by_weight] = dtypes;
                let by_x = gradient(by_x, own_weight.or(weight), Pass::Input);
                let by_weight = gradient(by_weight, own_x.or(x), Pass::Weight);
                [by_x, by_weight]
            })
        });
        SparseLinearOutput {
            out,
            x: OptFloat::None,
            weight: OptFloat::None,
        }
    }
}
