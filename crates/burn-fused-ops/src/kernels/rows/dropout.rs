//! Dropout of rows.

use crate::kernels::prelude::*;
use blocksparse::ElementDropout;
use blocksparse::internal::STREAM;
use blocksparse_cubecl::seeds;
use blocksparse_cubecl::shared::dropout::{Mask, kept_eight};
use blocksparse_cubecl::shared::row_tile::RowTile;

const UNITS: u32 = 256;

/// Kernel argument from which the mask of an [`ElementDropout`] is computed.
#[derive(CubeType, CubeLaunch)]
pub struct StreamMask {
    /// Key of the generator, and threshold.
    pub mask: Mask,
    /// Site of the dropout in the model.
    pub site: u32,
    /// Offset added to row indices.
    pub first_row: u32,
    /// Factor of kept elements.
    pub factor: InputScalar,
}

/// Returns the factors, `factor` or 0, of the elements of a vector that begins at `column` of `row`.
#[cube]
pub fn stream_factors<A: Float, N: Size>(
    stream: &StreamMask,
    row: usize,
    column: usize,
) -> Vector<A, N> {
    let width = N::value();
    let factor = stream.factor.get::<A>();
    let last = u32::new(comptime!(STREAM as i64));
    let (row, column) = (row as u32 + stream.first_row, column as u32);
    let mut factors = Vector::<A, N>::zeroed();
    // A vector of fewer than eight elements begins at a multiple of its width, so it has one counter.
    let eights = comptime!(width.div_ceil(8));
    #[unroll]
    for eight in 0..eights {
        let counter = column / 8 + comptime!(eight as u32);
        let mut kept = kept_eight(&stream.mask, last, stream.site, row, counter);
        if comptime!(width < 8) {
            kept >>= column % 8;
        }
        #[unroll]
        for i in 0..comptime!(width / eights) {
            let bit = kept & comptime!(1u32 << i) != 0;
            factors.insert(comptime!(8 * eight + i), select(bit, factor, A::new(0.0)));
        }
    }
    factors
}

/// Returns the kernel argument of a dropout, or of none, with the factor in `accumulator`.
pub(crate) fn stream_mask(
    dropout: Option<&ElementDropout>,
    accumulator: ElemType,
) -> StreamMaskLaunch {
    let dropout = dropout.copied().unwrap_or(ElementDropout::new(0.0, 0, 0));
    StreamMaskLaunch::new(
        seeds::mask(dropout.seed, dropout.threshold()),
        dropout.site,
        dropout.first_row,
        InputScalar::new(dropout.factor(), accumulator),
    )
}

/// Computes `output = m ∘ input`, one vector per unit.
#[cube(launch_unchecked, address_type = "dynamic")]
fn apply<E: Float, A: Float, N: Size>(
    input: &[Vector<E, N>],
    output: &mut [Vector<E, N>],
    vectors: usize,
    row_vectors: usize,
    mask: StreamMask,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let at = ABSOLUTE_POS;
    if at < vectors {
        let (row, column) = (at / row_vectors, at % row_vectors * N::value());
        let value = Vector::<A, N>::cast_from(input[at]);
        output[at] = Vector::<E, N>::cast_from(value * stream_factors::<A, N>(&mask, row, column));
    }
}

/// Returns the launch of [`stream_dropout`]: elements of a vector, number of vectors, cubes.
fn launch_of(
    client: &Client,
    [rows, width]: [usize; 2],
    element: ElemType,
) -> Result<(usize, usize, CubeCount), KernelError> {
    let tile = RowTile::new(client.properties(), width, element, usize::MAX);
    let vector = tile.map_or(1, |tile| tile.vector);
    let vectors = rows * (width / vector);
    let cubes = spread(client, (vectors as u64).div_ceil(UNITS.into()))?;
    Ok((vector, vectors, cubes))
}

/// Describes the launch of [`stream_dropout`].
///
/// # Errors
/// Those of [`stream_dropout`].
pub fn stream_dropout_text(
    client: &Client,
    sizes: [usize; 2],
    element: ElemType,
) -> Result<String, KernelError> {
    let (vector, vectors, _) = launch_of(client, sizes, element)?;
    Ok(format!(
        "dropout: {vectors} vectors of {vector}, a unit each"
    ))
}

/// Computes `output = m ∘ input`, both contiguous `[rows, width]`. The gradient with respect to the input is the same operation on the output's gradient.
///
/// # Errors
/// [`KernelError::Limit`] if the device cannot index the matrix.
pub fn stream_dropout(
    client: &Client,
    (input, element): Typed,
    [rows, width]: [usize; 2],
    output: &Handle,
    dropout: &ElementDropout,
) -> Result<(), KernelError> {
    if rows * width == 0 {
        return Ok(());
    }
    let (vector, vectors, cubes) = launch_of(client, [rows, width], element)?;
    let units = vectors.next_multiple_of(UNITS as usize);
    let address = address_of(client, (rows * width).max(2 * units))?;
    let accumulator = accumulator_of(element);
    // SAFETY: a unit reads and writes its vector, if it exists; the buffers have the declared lengths (see `buffer`).
    unsafe {
        apply::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS),
            address,
            vector,
            buffer(input, vectors),
            buffer(output, vectors),
            vectors,
            width / vector,
            stream_mask(Some(dropout), accumulator),
            [element, accumulator],
        );
    }
    Ok(())
}
