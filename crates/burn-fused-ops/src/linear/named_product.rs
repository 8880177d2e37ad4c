//! A kernel of CubeK's for products of half-precision numbers on tensor cores, by name.
//!
//! Burn takes CubeK's first kernel for every product, or with its feature `autotune` tries all of them. The first is slow on large products; trying takes
//! minutes for each new shape, and on Hopper a kernel that failed to launch counts as the fastest. Here one is named that was the fastest at the shapes
//! of layers (docs/dev/benchmark-details.md, "Burn's products"): on an H200 2.2 to 2.8 times as fast as the first.

use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{DType, TensorMetadata};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::ir::features::Tma;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level::Strategy;
use cubek::matmul::multi_level::components::tile::TileMatmulKind;
use cubek::matmul::multi_level::routines::batch::ordered_double_buffering::OrderedSelectionArgs;
use cubek::matmul::routine::BlueprintStrategy::Inferred;
use cubek::std::InputBinding;

/// TMA reads strides of multiples of 16 bytes.
const MULTIPLE: usize = 8;
/// Below this a tile is mostly empty.
const LEAST: usize = 64;

/// A kernel with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    /// Some planes load by TMA, the others multiply.
    SpecializedTma,
    /// Each plane loads and multiplies, two stages.
    OrderedDouble,
}

impl Named {
    /// As plans print it.
    fn name(self) -> &'static str {
        match self {
            Self::SpecializedTma => "CubeK's specialized TMA kernel",
            Self::OrderedDouble => "CubeK's ordered double-buffered kernel",
        }
    }

    fn strategy(self) -> Strategy {
        match self {
            Self::SpecializedTma => Strategy::SpecializedTmaMma(Inferred(().into())),
            Self::OrderedDouble => Strategy::OrderedDoubleMma(Inferred(OrderedSelectionArgs {
                partition_k: Some(2),
                row_count: Some(8),
                rows_per_plane: Some(2),
                tile_matmul: TileMatmulKind::Mma,
            })),
        }
    }
}

/// The kernel for products of a dtype on a device, if there is one that is faster than Burn's first.
pub(crate) fn kernel(client: &Client, dtype: DType) -> Option<Named> {
    if !matches!(dtype, DType::BF16 | DType::F16) {
        return None;
    }
    let features = &client.properties().features;
    match features.tma.contains(Tma::Base) {
        true => Some(Named::SpecializedTma),
        false if !features.matmul.mma.is_empty() => Some(Named::OrderedDouble),
        false => None,
    }
}

/// Which kernel runs the products of a layer of `[rows, inputs, outputs]`, or why Burn's first one does.
pub(crate) fn text(
    device: &CubeDevice,
    dtype: DType,
    lengths: [usize; 3],
) -> Result<String, String> {
    let Some(named) = kernel(&device.client(), dtype) else {
        return Err(format!(
            "kernels that are faster than Burn's first are for bf16 and f16 on tensor cores, not for {dtype:?} here"
        ));
    };
    match takes(lengths) {
        true => Ok(format!("products: {}", named.name())),
        false => Err(format!(
            "{} takes multiples of {MULTIPLE} from {LEAST} on, not {lengths:?}",
            named.name()
        )),
    }
}

/// Whether a product has a shape that the kernels are for.
fn takes(lengths: [usize; 3]) -> bool {
    (lengths.iter()).all(|length| *length >= LEAST && length.is_multiple_of(MULTIPLE))
}

/// `out = lhs · rhs` of matrices or batches of them, if there is a kernel for it.
pub(crate) fn multiply(lhs: &CubeTensor, rhs: &CubeTensor, out: &CubeTensor) -> bool {
    let Some(named) = kernel(&lhs.client, lhs.dtype) else {
        return false;
    };
    let rank = lhs.rank();
    let [rows, inner] = [rank - 2, rank - 1].map(|dim| lhs.meta.shape()[dim]);
    let columns = rhs.meta.shape()[rank - 1];
    let plain = |tensor: &CubeTensor| {
        let start = tensor.handle.offset_start.unwrap_or(0) as usize;
        let strides = tensor.meta.strides();
        // One of the two last dimensions is contiguous, and everything else begins at multiples of 16 bytes.
        let mut outer =
            (0..rank).filter(|dim| strides[*dim] != 1 && tensor.meta.shape()[*dim] != 1);
        start.is_multiple_of(16)
            && (strides[rank - 1] == 1 || strides[rank - 2] == 1)
            && outer.all(|dim| strides[dim].is_multiple_of(MULTIPLE))
            && tensor.qparams.is_none()
            && !tensor.meta.is_tiled()
    };
    if !takes([rows, inner, columns]) || !plain(lhs) || !plain(rhs) {
        return false;
    }
    let element = dtype_to_elem_type(lhs.dtype);
    let mut elements = MatmulElems::from_globals(&MatmulGlobalElems {
        lhs: element,
        rhs: element,
        out: dtype_to_elem_type(out.dtype),
    });
    let result = launch_ref(
        &named.strategy().into(),
        &lhs.client,
        InputBinding::new(lhs.clone().binding(), element),
        InputBinding::new(rhs.clone().binding(), element),
        out.clone().binding(),
        &mut elements,
    );
    // What it refuses before it launches, Burn's other kernels do.
    result.is_ok()
}
