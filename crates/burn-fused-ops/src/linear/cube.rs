//! Linear layers on CubeCL devices.

use crate::kernels::rows::beside::rounded_beside;
use blocksparse_cubecl::rows::{Window, column_sums, window_sums};
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, FloatDType};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};

use crate::linear::activation::kernels as activations;
use crate::linear::activation::kind::Activation;
use crate::linear::forms;
#[cfg(feature = "cuda")]
use crate::linear::fused;
use crate::linear::heads::kernels as heads;
#[cfg(feature = "cuda")]
use crate::linear::mlp::steps;
use crate::linear::named_product as named;
use crate::linear::ops::LinearOps;
use crate::linear::products::{Primitives, Products};
use crate::linear::values::{
    ActivationGrads, ActivationSaved, ActivationTask, BiasedRows, HeadGroups, HeadParts, JoinCall,
    Joined, LinearCall, LinearGrads, LinearInputs, LinearOutput, LinearSaved, LinearTask,
};
#[cfg(feature = "cuda")]
use crate::linear::values::{LinearForm, MlpOuterSaved, MlpOuterTask};
#[cfg(feature = "cuda")]
use crate::linear::wgmma;
use burn_blocksparse::internal::cube::{empty, typed, uses_reference};
use burn_blocksparse::internal::values::ThreeFloats;

/// Burn's matmul, called directly, and our sums over rows.
pub(crate) struct Kernels;

impl Products<CubeBackend> for Kernels {
    /// Sums are f32 in any case, so products of half-precision numbers may be written as f32, too: by the same kernels, without a copy of the
    /// factors.
    fn product(lhs: CubeTensor, rhs: CubeTensor, dtype: FloatDType) -> CubeTensor {
        let rows = lhs.meta.shape()[lhs.rank() - 2];
        let columns = rhs.meta.shape()[rhs.rank() - 1];
        // Burn's own outputs may have gaps between their rows.
        let out = match lhs.rank() {
            2 => empty(&lhs, [rows, columns], dtype.into()),
            _ => empty(&lhs, [lhs.meta.shape()[0], rows, columns], dtype.into()),
        };
        #[cfg(feature = "cuda")]
        if wgmma::multiply(&lhs, &rhs, &out) {
            return out;
        }
        if named::multiply(&lhs, &rhs, &out) {
            return out;
        }
        let result = matmul(lhs, rhs, Some(out), MatmulStrategy::default(), dtype.into());
        result.unwrap_or_else(|error| panic!("linear: Burn's matmul: {error:?}"))
    }

    fn sum_matrices(matrices: CubeTensor, widths: &[usize]) -> Vec<CubeTensor> {
        let matrices = into_contiguous(matrices);
        let [count, inner, pitch] = matrices.meta.shape().dims();
        let mut start = 0;
        let mut parts = Vec::new();
        for &width in widths {
            let sum = empty(&matrices, [inner, width], matrices.dtype);
            let window = Window {
                start,
                width,
                pitch,
            };
            let result = window_sums(
                &matrices.client,
                typed(&matrices),
                [count, inner],
                window,
                typed(&sum),
            );
            if result.is_err() {
                return <Primitives as Products<CubeBackend>>::sum_matrices(matrices, widths);
            }
            parts.push(sum);
            start += width;
        }
        parts
    }

    fn joined(weights: Vec<CubeTensor>, dtype: FloatDType) -> CubeTensor {
        let weights: Vec<CubeTensor> = weights.into_iter().map(into_contiguous).collect();
        let [rows, _] = weights[0].meta.shape().dims();
        let element = weights[0].dtype;
        let matrices: Vec<_> = weights
            .iter()
            .map(|weight| (&weight.handle, weight.meta.shape()[1]))
            .collect();
        let width = matrices.iter().map(|(_, width)| width).sum();
        if weights.iter().all(|weight| weight.dtype == element) {
            let out = empty(&weights[0], [rows, width], dtype.into());
            let result = rounded_beside(
                &out.client,
                &matrices,
                dtype_to_elem_type(element),
                rows,
                typed(&out),
            );
            if result.is_ok() {
                return out;
            }
        }
        <Primitives as Products<CubeBackend>>::joined(weights, dtype)
    }

    #[cfg(feature = "cuda")]
    fn parts(lhs: &CubeTensor, rhs: &CubeTensor) -> Option<CubeTensor> {
        wgmma::parts(lhs, rhs)
    }

    fn weight_rows(x: &CubeTensor) -> usize {
        match named::kernel(&x.client, x.dtype) {
            // A partial product is written and read in f32, and these kernels are as fast with few.
            Some(_) => 4096,
            None => <Primitives as Products<CubeBackend>>::weight_rows(x),
        }
    }

    fn sum_rows(matrix: CubeTensor) -> CubeTensor {
        let matrix = into_contiguous(matrix);
        let [rows, width] = matrix.meta.shape().dims();
        let sums = empty(&matrix, [width], matrix.dtype);
        let element = dtype_to_elem_type(matrix.dtype);
        let result = column_sums(
            &matrix.client,
            (&matrix.handle, element),
            [rows, width],
            (&sums.handle, element),
        );
        match result {
            Ok(()) => sums,
            Err(_) => <Primitives as Products<CubeBackend>>::sum_rows(matrix),
        }
    }
}

/// Which kernel runs the products of a layer of `[rows, inputs, outputs]`, or why Burn's first one does.
pub(crate) fn text(
    device: &CubeDevice,
    dtype: DType,
    lengths: [usize; 3],
) -> Result<String, String> {
    #[cfg(feature = "cuda")]
    let own = wgmma::text(device, dtype, lengths);
    #[cfg(not(feature = "cuda"))]
    let own = Err::<String, _>("built without the feature cuda".to_owned());
    own.or_else(|why| match named::text(device, dtype, lengths) {
        Ok(text) => Ok(format!("{text}; not on wgmma or mma.sync: {why}")),
        Err(other) => Err(format!("{other}; not on wgmma or mma.sync: {why}")),
    })
}

impl LinearOps for CubeBackend {
    fn linear_forward(inputs: LinearInputs<Self>, call: LinearCall) -> LinearOutput<Self> {
        if uses_reference() {
            return forms::forward::<Self, Primitives>(inputs, call);
        }
        #[cfg(feature = "cuda")]
        {
            let is_fused = match call.form {
                LinearForm::Rows => false,
                LinearForm::FromHeads => FloatDType::from(inputs.x.dtype) == call.dtype,
                _ => true,
            };
            if is_fused && wgmma::is_half(call.dtype) {
                return fused::forward(inputs, call);
            }
        }
        forms::forward::<Self, Kernels>(inputs, call)
    }

    fn linear_backward(saved: LinearSaved<Self>, task: LinearTask) -> LinearGrads<Self> {
        if uses_reference() {
            return forms::backward::<Self, Primitives>(saved, task);
        }
        #[cfg(feature = "cuda")]
        if let Some(heads) = task.heads.filter(|_| wgmma::is_half(task.dtype)) {
            return fused::backward_of_heads(saved, heads, task);
        }
        forms::backward::<Self, Kernels>(saved, task)
    }

    fn bias_activation(inputs: BiasedRows<Self>, activation: Activation) -> CubeTensor {
        activations::bias_activation(inputs, activation)
    }

    fn bias_activation_backward(
        saved: ActivationSaved<Self>,
        activation: Activation,
        task: ActivationTask,
    ) -> ActivationGrads<Self> {
        activations::bias_activation_backward(saved, activation, task)
    }

    fn split_heads(inputs: BiasedRows<Self>, parts: HeadParts) -> ThreeFloats<Self> {
        heads::split_heads(inputs, parts)
    }

    fn join_heads(tensors: ThreeFloats<Self>, call: JoinCall) -> Joined<Self> {
        heads::join_heads(tensors, call)
    }

    fn split_head_groups(x: CubeTensor, first: usize) -> HeadGroups<Self> {
        heads::split_head_groups(x, first)
    }

    fn cat_head_groups(parts: HeadGroups<Self>) -> CubeTensor {
        heads::cat_head_groups(parts)
    }

    #[cfg(feature = "cuda")]
    fn mlp_outer_backward(saved: MlpOuterSaved<Self>, task: MlpOuterTask) -> ActivationGrads<Self> {
        match uses_reference() || !wgmma::is_half(task.dtype) {
            true => steps::outer_backward::<Self>(saved, task),
            false => fused::outer_backward(saved, task),
        }
    }
}
