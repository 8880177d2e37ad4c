//! The products of linear layers on CubeCL devices.

use blocksparse_cubecl::rows::{Window, column_sums, window_sums};
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};

use crate::kernels::rows::beside::{BesideMatrix, rounded_beside};
use crate::linear::products::{Primitives, Products};
use crate::linear::wgmma;
use burn_blocksparse::internal::cube::*;
use burn_blocksparse::internal::prelude::*;

/// Products by our kernels where they apply, else by Burn's matmul, called directly; sums over rows by our kernels.
pub(crate) struct Kernels;

impl Products<CubeBackend> for Kernels {
    /// Sums are f32 in any case, so a half-precision matmul may also write f32: with the same kernels and without copies of the factors.
    fn product(lhs: CubeTensor, rhs: CubeTensor, dtype: FloatDType) -> CubeTensor {
        let rows = lhs.meta.shape()[lhs.rank() - 2];
        let columns = rhs.meta.shape()[rhs.rank() - 1];
        // Outputs that Burn allocates may have gaps between rows.
        let out = match lhs.rank() {
            2 => empty(&lhs, [rows, columns], dtype.into()),
            _ => empty(&lhs, [lhs.meta.shape()[0], rows, columns], dtype.into()),
        };
        if wgmma::multiply(&lhs, &rhs, &out).is_some() {
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
        let weights: Vec<CubeTensor> = weights.into_iter().map(by_rows).collect();
        let [rows, _] = weights[0].meta.shape().dims();
        let element = weights[0].dtype;
        let matrices: Vec<_> = weights
            .iter()
            .map(|weight| BesideMatrix {
                handle: &weight.handle,
                width: weight.meta.shape()[1],
                pitch: weight.meta.strides()[0],
            })
            .collect();
        let width = matrices.iter().map(|matrix| matrix.width).sum();
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

    fn parts(lhs: &CubeTensor, rhs: &CubeTensor) -> Option<CubeTensor> {
        wgmma::parts(lhs, rhs)
    }

    fn sum_rows(matrix: CubeTensor) -> CubeTensor {
        let matrix = into_contiguous(matrix);
        let [rows, width] = matrix.meta.shape().dims();
        let sums = empty(&matrix, [width], matrix.dtype);
        match column_sums(&matrix.client, typed(&matrix), [rows, width], typed(&sums)) {
            Ok(()) => sums,
            Err(_) => <Primitives as Products<CubeBackend>>::sum_rows(matrix),
        }
    }
}

/// Returns a matrix with contiguous elements in each row; gaps between rows are allowed. Copies it if necessary.
fn by_rows(matrix: CubeTensor) -> CubeTensor {
    let (shape, strides) = (matrix.meta.shape(), matrix.meta.strides());
    let lies = strides[1] == 1
        && strides[0] >= shape[1]
        && matrix.qparams.is_none()
        && !matrix.meta.is_tiled();
    match lies {
        true => matrix,
        false => into_contiguous(matrix),
    }
}
