//! Products with block-sparse weights on CubeCL devices.

use blocksparse::WeightLayout;
use burn::tensor::{DType, FloatDType};

use crate::linear::cube_products::Kernels;
use crate::linear::products::Primitives;
use crate::sparse_linear::ops::BlockSparseLinearOps;
use crate::sparse_linear::products::{Gathered, SparseProducts, backward, forward};
use crate::sparse_linear::values::{
    Pass, SparseLinearCall, SparseLinearInputs, SparseLinearOutput, SparseLinearSaved,
};
use crate::sparse_linear::wgmma;
use burn_blocksparse::internal::cube::*;

/// Describes the launches of products of `rows` rows, or returns why Burn's operations run instead.
pub(crate) fn text(
    device: &CubeDevice,
    dtype: DType,
    rows: usize,
    layout: &WeightLayout,
) -> Result<String, String> {
    if uses_reference() {
        return Err("BLOCKSPARSE_REFERENCE is set".to_owned());
    }
    wgmma::text(device, dtype, rows, layout).map_err(|why| {
        format!("{why}: kept blocks are gathered and multiplied in batches of Burn's")
    })
}

/// Products by our kernel if it supports the call, else gathered products.
struct SparseKernels;

impl SparseProducts<CubeBackend> for SparseKernels {
    fn sparse_product(
        pass: Pass,
        factors: [CubeTensor; 2],
        layout: &WeightLayout,
        dtype: FloatDType,
    ) -> CubeTensor {
        match wgmma::product(pass, [&factors[0], &factors[1]], layout, dtype.into()) {
            Some(made) => made,
            None => <Gathered<Kernels> as SparseProducts<CubeBackend>>::sparse_product(
                pass, factors, layout, dtype,
            ),
        }
    }
}

impl BlockSparseLinearOps for CubeBackend {
    fn block_sparse_linear_forward(
        inputs: SparseLinearInputs<Self>,
        call: SparseLinearCall,
    ) -> SparseLinearOutput<Self> {
        match uses_reference() {
            true => forward::<Self, Gathered<Primitives>>(inputs, call),
            false => forward::<Self, SparseKernels>(inputs, call),
        }
    }

    fn block_sparse_linear_backward(
        saved: SparseLinearSaved<Self>,
        call: SparseLinearCall,
        pass: Pass,
    ) -> CubeTensor {
        match uses_reference() {
            true => backward::<Self, Gathered<Primitives>>(saved, call, pass),
            false => backward::<Self, SparseKernels>(saved, call, pass),
        }
    }
}
