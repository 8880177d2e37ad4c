//! Rows that [`round_rows`](crate::kernels::indexer::round_rows) rounded, in bytes: E4M3, with a scale a row, for GPUs of compute capability 9.0.

use crate::kernels::indexer::pairs::{KeyBytes, PairInputs, PairSizes};
use crate::kernels::indexer::rounding::{inverse_of, scale_exponent, scale_of};
use blocksparse_cubecl::arch::ptx::{four_bytes, highest_across};
use blocksparse_cubecl::prelude::*;

/// Warps of a cube, and rows of each, which are all on their way before the first is looked at.
const WARPS: usize = 8;
const ROWS: usize = 4;
/// Numbers of a lane, which are a load: rows have 128.
pub(crate) const PACKED: usize = 4;
const LANES: usize = 32;

/// Which rows are packed: those of some queries, head by head.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Rows {
    heads: usize,
    seq: usize,
    start: usize,
    rows: usize,
    count: usize,
}

/// `x` is `[batch, heads, seq, 128]`; bytes, `[batch, rows, heads, 128]`, and scales, `[batch, rows, heads]`, are of the rows from `start` on. Scales are
/// multiplied by `of_rows`, `[batch, heads, seq]`, if there are some.
#[cube(launch_unchecked, address_type = "dynamic")]
fn pack<E: Float, N: Size>(
    x: &[Vector<E, N>],
    of_rows: ComptimeOption<Box<[f32]>>,
    bytes: &mut [u32],
    scales: &mut [f32],
    r: Rows,
    #[comptime] is_scaled: bool,
    #[define(E)] _dtype: ElemType,
) {
    let lane = UNIT_POS as usize % LANES;
    let first = (CUBE_POS * WARPS + UNIT_POS as usize / LANES) * ROWS;
    let mut numbers = Array::<f32>::new(comptime!(ROWS * PACKED));
    #[unroll]
    for i in 0..ROWS {
        let four = x[place(first + i, &r) * LANES + lane];
        #[unroll]
        for j in 0..PACKED {
            numbers[comptime!(PACKED * i + j)] = f32::cast_from(four.extract(j));
        }
    }
    #[unroll]
    for i in 0..ROWS {
        let mut most = 0u32.runtime();
        #[unroll]
        for j in 0..PACKED {
            let number = numbers[comptime!(PACKED * i + j)];
            most = max(most, u32::reinterpret(number) & 0x7fff_ffff);
        }
        let most = highest_across(most);
        let exponent = scale_exponent(most);
        let inverse = inverse_of(exponent);
        let at = comptime!(PACKED * i);
        let word = four_bytes(
            numbers[at] * inverse,
            numbers[comptime!(at + 1)] * inverse,
            numbers[comptime!(at + 2)] * inverse,
            numbers[comptime!(at + 3)] * inverse,
        );
        let row = first + i;
        if row < r.count {
            bytes[row * LANES + lane] = word;
            if lane == 0 {
                let mut scale = scale_of(exponent, most);
                if comptime!(is_scaled) {
                    let of_rows = of_rows.clone().unwrap();
                    scale *= of_rows[place(row, &r)];
                }
                scales[row] = scale;
            }
        }
    }
}

/// The row of `x` of one that is packed; of those behind the last the last one's.
#[cube]
fn place(row: usize, r: &Rows) -> usize {
    let row = row.min(r.count - 1);
    let query = row / r.heads;
    (query / r.rows * r.heads + row % r.heads) * r.seq + r.start + query % r.rows
}

/// The keys of a call in bytes.
pub(crate) fn pack_keys(
    client: &Client,
    sizes: &PairSizes,
    inputs: &PairInputs,
) -> Result<KeyBytes, KernelError> {
    let seq = sizes.seq[1];
    let rows = PackedRows {
        batch: sizes.batch,
        heads: 1,
        seq,
        rows: [0, seq],
    };
    let (numbers, scales) = rows.pack(client, inputs.element, inputs.k, None, 0)?;
    Ok(KeyBytes { numbers, scales })
}

/// The queries of a call in bytes, with their scales times what they have in `of_rows`, and room for `more` of these behind the last.
pub(crate) fn pack_queries(
    client: &Client,
    sizes: &PairSizes,
    inputs: &PairInputs,
    more: usize,
) -> Result<(Handle, Handle), KernelError> {
    let rows = PackedRows {
        batch: sizes.batch,
        heads: sizes.heads[0],
        seq: sizes.seq[0],
        rows: sizes.rows,
    };
    rows.pack(client, inputs.element, inputs.q, Some(inputs.of_rows), more)
}

/// [`Rows`] on the host.
struct PackedRows {
    batch: usize,
    heads: usize,
    seq: usize,
    /// The first, and how many.
    rows: [usize; 2],
}

impl PackedRows {
    fn pack(
        &self,
        client: &Client,
        element: ElemType,
        x: &Handle,
        of_rows: Option<&Handle>,
        more: usize,
    ) -> Result<(Handle, Handle), KernelError> {
        let &Self {
            batch,
            heads,
            seq,
            rows: [start, rows],
        } = self;
        let count = batch * rows * heads;
        let all = batch * heads * seq;
        let bytes = client.empty(count * LANES * 4);
        let scales = client.empty((count + more) * 4);
        let address = address_of(client, all.max(count) * LANES * PACKED)?;
        let cubes = spread(client, count.div_ceil(WARPS * ROWS) as u64)?;
        // SAFETY: a unit reads elements of a row that there is, and writes its own. The buffers have the lengths they say (see `buffer`).
        unsafe {
            pack::launch_unchecked(
                client,
                cubes,
                CubeDim::new_1d((WARPS * LANES) as u32),
                address,
                PACKED,
                buffer(x, all * LANES),
                optional(of_rows, all),
                buffer(&bytes, count * LANES),
                buffer(&scales, count),
                RowsLaunch::new(heads, seq, start, rows, count),
                of_rows.is_some(),
                element,
            );
        }
        Ok((bytes, scales))
    }
}
