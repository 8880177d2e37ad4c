//! Rows rotated by a Hadamard matrix and rounded to fp8 times a power of two per row, on any CubeCL runtime.
//!
//! The rotation spreads large elements over the whole row, which reduces the rounding error. Products of rotated queries and keys equal those of the original
//! rows. Rounded elements keep the row's dtype, which represents them exactly, so every matmul computes the same scores. GPUs of compute capability 9.0 also
//! use them in bytes: E4M3, with a scale per row.

use blocksparse::{HADAMARD_WIDTHS, HadamardFp8};

use crate::kernels::indexer::pairs::{KeyBytes, PairInputs, PairSizes, check_device, vector};
use blocksparse_cubecl::arch::planes;
use blocksparse_cubecl::arch::ptx::{four_bytes, highest_across};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::codec::{INFINITY, nearest_e4m3};

/// Bits of NaN.
const NAN: u32 = 0x7fc0_0000;

/// Number of elements of a row that a unit has.
const OWN: usize = 8;
const UNITS: usize = 256;

/// Returns the f32 exponent of a row's scale as in [`HadamardFp8::round`], from the bits of the row's largest absolute value.
#[cube]
pub(crate) fn scale_exponent(largest: u32) -> u32 {
    // The largest E4M3 number, 448, is 1.75 · 2⁸.
    let is_above = (largest & 0x7f_ffff) > 0x60_0000;
    let exponent = (largest >> 23u32) + select(is_above, 1u32, 0u32);
    max(exponent, 9u32) - 8u32
}

/// Returns the row's scale, a power of two with this exponent. It is NaN if the largest absolute value is infinite or NaN.
#[cube]
pub(crate) fn scale_of(exponent: u32, largest: u32) -> f32 {
    f32::reinterpret(select(largest < INFINITY, exponent << 23u32, NAN.runtime()))
}

/// Returns the reciprocal of the scale, by which elements are multiplied before rounding.
#[cube]
pub(crate) fn inverse_of(exponent: u32) -> f32 {
    f32::reinterpret((254u32 - exponent) << 23u32)
}

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Rounding {
    width: usize,
    /// True if units exchange elements by plane shuffles, and if these are PTX.
    planes: bool,
    ptx: bool,
}

impl Rounding {
    fn new(client: &Client, width: usize) -> Self {
        let properties = client.properties();
        Self {
            width,
            planes: planes::are_there(properties),
            ptx: planes::have_ptx(properties),
        }
    }

    /// Returns the number of elements that units exchange through shared memory.
    fn shared(&self) -> usize {
        if self.planes { 1 } else { OWN * UNITS }
    }

    /// Returns the number of units of a row.
    fn pieces(&self) -> usize {
        self.width / OWN
    }

    /// Returns the number of rows of a cube.
    fn rows(&self) -> usize {
        UNITS / self.pieces()
    }

    /// Returns the number of butterfly stages between units.
    fn stages(&self) -> usize {
        self.pieces().ilog2() as usize
    }
}

/// Returns the elements of the partner unit at a power-of-two distance, which is adjacent in the cube.
#[cube]
fn others(
    own: &Array<f32>,
    shared: &mut Shared<[f32]>,
    #[comptime] count: usize,
    #[comptime] distance: usize,
    #[comptime] t: Rounding,
) -> Array<f32> {
    let mut theirs = Array::<f32>::new(count);
    if comptime!(t.planes) {
        #[unroll]
        for i in 0..count {
            theirs[i] = planes::traded(own[i], comptime!(distance as u32), t.ptx);
        }
    } else {
        let unit = UNIT_POS as usize;
        #[unroll]
        for i in 0..count {
            shared[comptime!(i * UNITS) + unit] = own[i];
        }
        sync_cube();
        #[unroll]
        for i in 0..count {
            theirs[i] = shared[comptime!(i * UNITS) + (unit ^ distance)];
        }
        sync_cube();
    }
    theirs
}

/// Returns the larger absolute value by comparing bits, so NaN is the largest.
#[cube]
fn larger(x: f32, y: f32) -> f32 {
    let (x, y) = (
        u32::reinterpret(x) & 0x7fff_ffff,
        u32::reinterpret(y) & 0x7fff_ffff,
    );
    f32::reinterpret(max(x, y))
}

/// Rotates and rounds rows. `x` and `out` are `[rows, width]`. Rotated elements are multiplied by `factor`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn round<E: Float, N: Size>(
    x: &[Vector<E, N>],
    out: &mut [Vector<E, N>],
    rows: usize,
    factor: f32,
    #[comptime] t: Rounding,
    #[define(E)] _dtype: ElemType,
) {
    // Elements of a unit are `UNITS` apart, so units access different banks.
    let mut shared = Shared::<[f32]>::new_slice(comptime!(t.shared()));
    let unit = UNIT_POS as usize;
    let piece = unit % comptime!(t.pieces());
    let row = CUBE_POS * comptime!(t.rows()) + unit / comptime!(t.pieces());
    // Units after the last row repeat it.
    let source = row.min(rows - 1) * comptime!(t.width) + piece * OWN;
    let mut own = Array::<f32>::new(OWN);
    let vector = N::value();
    #[unroll]
    for line in 0..comptime!(OWN / vector) {
        let numbers = x[source / vector + line];
        #[unroll]
        for i in 0..vector {
            own[comptime!(line * vector + i)] = f32::cast_from(numbers.extract(i));
        }
    }
    // Butterfly stages within a unit, then between units.
    #[unroll]
    for stage in 0..3usize {
        let distance = comptime!(1usize << stage);
        #[unroll]
        for i in 0..comptime!(OWN / 2) {
            let low = comptime!(i / distance * 2 * distance + i % distance);
            let high = comptime!(low + distance);
            let (a, b) = (own[low], own[high]);
            own[low] = a + b;
            own[high] = a - b;
        }
    }
    #[unroll]
    for stage in 0..comptime!(t.stages()) {
        let distance = comptime!(1usize << stage);
        let sign = select(piece / distance % 2 == 1, -1.0f32, 1.0f32);
        let theirs = others(&own, &mut shared, OWN, distance, t);
        #[unroll]
        for i in 0..OWN {
            // Products with a sign are exact, so a fused multiply-add gives the same result.
            own[i] = own[i] * sign + theirs[i];
        }
    }
    // Without the sign, float bits compare like the floats, and NaN is the largest.
    let mut most = Array::<f32>::new(1usize);
    most[0] = 0.0f32;
    #[unroll]
    for i in 0..OWN {
        own[i] *= factor;
        most[0] = larger(most[0], own[i]);
    }
    #[unroll]
    for stage in 0..comptime!(t.stages()) {
        let theirs = others(&most, &mut shared, 1usize, comptime!(1usize << stage), t);
        most[0] = larger(most[0], theirs[0]);
    }
    let most = u32::reinterpret(most[0]);
    let exponent = scale_exponent(most);
    let (scale, inverse) = (scale_of(exponent, most), inverse_of(exponent));
    if row < rows {
        #[unroll]
        for line in 0..comptime!(OWN / vector) {
            let mut numbers = Vector::<E, N>::zeroed();
            #[unroll]
            for i in 0..vector {
                let at = comptime!(line * vector + i);
                numbers.insert(i, E::cast_from(nearest_e4m3(own[at] * inverse) * scale));
            }
            out[source / vector + line] = numbers;
        }
    }
}

/// Rotates and rounds contiguous rows of f32, f16 or bf16, `[rows, width]`, as [`HadamardFp8::round`] does. f16 loses numbers below 2⁻²⁴.
///
/// # Errors
/// [`KernelError`] if the device lacks the type, its cubes are too small, the width is not [supported](HadamardFp8::takes), or there are more rows than a
/// launch has cubes for.
pub fn round_rows(
    client: &Client,
    element: ElemType,
    x: &Handle,
    [rows, width]: [usize; 2],
    of: HadamardFp8,
    out: &Handle,
) -> Result<(), KernelError> {
    check_rounding(client, element, width)?;
    if rows == 0 {
        return Ok(());
    }
    let t = Rounding::new(client, width);
    let vector = vector(client, element, width, [x, out]);
    let numbers = rows * width;
    let address = address_of(client, numbers)?;
    let cubes = spread(client, rows.div_ceil(t.rows()) as u64)?;
    // SAFETY: a unit reads elements of existing rows and writes its own elements of an existing row.
    unsafe {
        round::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            address,
            vector,
            buffer(x, numbers / vector),
            buffer(out, numbers / vector),
            rows,
            of.factor(width),
            t,
            element,
        );
    }
    Ok(())
}

/// Checks that a device rounds rows of this element type and width.
pub fn check_rounding(client: &Client, element: ElemType, width: usize) -> Result<(), KernelError> {
    check_device(client, element, UNITS, "units of a cube that rounds rows")?;
    if !HadamardFp8::takes(width) {
        let what = "numbers of a row that is rotated, a power of two from 8 on";
        return Err(KernelError::limit(what, HADAMARD_WIDTHS[1] as u32, width));
    }
    Ok(())
}

/// Number of warps of a cube, and of rows of each, which are all loaded before the first is used.
const WARPS: usize = 8;
const ROWS: usize = 4;
/// Number of elements of a lane, which are one load: rows have 128.
pub(crate) const PACKED: usize = 4;
const LANES: usize = 32;

/// Rows to pack: those of some queries, with their heads.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Rows {
    heads: usize,
    seq: usize,
    start: usize,
    rows: usize,
    count: usize,
}

/// Converts rounded rows to bytes and scales. `x` is `[batch, heads, seq, 128]`. Bytes `[batch, rows, heads, 128]` and scales `[batch, rows, heads]` cover the
/// rows from `start` on. Scales are multiplied by `of_rows`, `[batch, heads, seq]`, if present.
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

/// Returns the row of `x` of a packed row; rows after the last repeat it.
#[cube]
fn place(row: usize, r: &Rows) -> usize {
    let row = row.min(r.count - 1);
    let query = row / r.heads;
    (query / r.rows * r.heads + row % r.heads) * r.seq + r.start + query % r.rows
}

/// Packs the keys of a call in fp8.
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

/// Packs the queries of a call in fp8. Their scales are multiplied by `of_rows`, and their buffer has space for `more` further scales.
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
    /// First row and number of rows.
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
        // SAFETY: a unit reads elements of an existing row and writes its own. The buffers have the lengths that `buffer` gets.
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
