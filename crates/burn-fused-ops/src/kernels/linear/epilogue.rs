//! Epilogues: operations on a tile's sums.
//!
//! A unit holds two of 64 rows, and two of every eight columns. The four units of a row exchange, so that each holds eight columns of every 32, which are 16
//! bytes in half precision. It applies the activation to those and writes them.

// Comptime conditions stay separate from runtime conditions.
#![allow(clippy::collapsible_if)]

use cubecl::prelude::*;

use crate::kernels::linear::tile::{Epilogue, ProductTile};
use blocksparse_cubecl::arch::ptx::{
    Half, global_address, pack, pack_at, read_four_words_once, shared_load, shared_store,
    shuffle_xor, trade_four, unpack,
};
use blocksparse_cubecl::arch::tma::named_sync;
use blocksparse_cubecl::shared::curve::{ActivationKind, Curve, slope, value};

/// Columns that the four units of a row hold at a time.
const CHUNK: usize = 32;

/// Position of a tile.
#[derive(CubeType, Clone, Copy)]
pub struct Place {
    pub row: u32,
    pub col: u32,
    /// Row tile over all matrices of the output.
    pub row_tile: u32,
    /// Matrix of the output.
    pub matrix: u32,
    /// Matrix of the batch.
    pub batch: u32,
    pub first: u32,
    pub count: u32,
}

/// Size of the result, and its layout by heads.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct ResultShape {
    pub rows: u32,
    pub cols: u32,
    /// Rows of a batch entry.
    seq: u32,
    /// Number of batch entries.
    batch: u32,
    /// Offset of the heads of the second and of the third part, and the end of all.
    second: u32,
    third: u32,
    end: u32,
}

/// Position of a unit among the multiplying warps.
#[derive(CubeType, Clone, Copy)]
pub struct Lane {
    /// Index among the multiplying units.
    pub unit: u32,
    pub warp: u32,
    pub lane: u32,
}

#[cube]
impl Lane {
    /// Returns the unit's first row of a tile; its second is eight rows below.
    pub fn row(&self) -> u32 {
        self.warp * 16 + self.lane / 4
    }
}

/// Batch entry and position of a row of heads.
#[derive(CubeType, Clone, Copy)]
struct HeadRow {
    batch: u32,
    place: u32,
}

/// Returns the offset of eight columns of a row, in units of eight elements.
#[cube]
fn eights(
    shape: &ResultShape,
    row: u32,
    head_row: &HeadRow,
    place: &Place,
    col: u32,
    #[comptime] t: ProductTile,
) -> u32 {
    match comptime!(t.epilogue) {
        Epilogue::Heads { dim } => {
            let width = comptime!(dim as u32);
            let head = col / width;
            let in_second = head >= shape.second;
            let in_third = head >= shape.third;
            let first = select(in_third, shape.third, select(in_second, shape.second, 0u32));
            let end = select(
                in_third,
                shape.end,
                select(in_second, shape.third, shape.second),
            );
            let matrix = shape.batch * first + head_row.batch * (end - first) + head - first;
            (matrix * shape.seq + head_row.place) * comptime!(dim as u32 / 8) + col % width / 8
        }
        _ => (place.matrix * shape.rows + row) * (shape.cols / 8) + col / 8,
    }
}

#[cube]
fn unpack_two(word: u32, #[comptime] half: Half) -> Vector<f32, Const<2>> {
    let mut two = Vector::<f32, Const<2>>::zeroed();
    two.insert(0usize, unpack(word, false, half));
    two.insert(1usize, unpack(word, true, half));
    two
}

#[cube]
fn pack_two(two: &Vector<f32, Const<2>>, #[comptime] half: Half) -> u32 {
    pack(two.extract(0usize), two.extract(1usize), half)
}

/// Returns the bias of word `j` of eight columns from `col` on.
#[cube]
fn bias_of<W: Size>(
    bias: &ComptimeOption<Box<[Vector<f32, W>]>>,
    col: u32,
    #[comptime] j: usize,
) -> Vector<f32, Const<2>> {
    let mut two = Vector::<f32, Const<2>>::zeroed();
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => {
            let four = bias[(col / 4) as usize + comptime!(j / 2)];
            two.insert(0usize, four.extract(comptime!(j % 2 * 2)));
            two.insert(1usize, four.extract(comptime!(j % 2 * 2 + 1)));
        }
        ComptimeOption::None => {}
    }
    two
}

/// Returns eight columns of one of the unit's two rows, in half precision.
#[cube]
fn own_eight<S: Size>(
    sums: &Vector<f32, S>,
    lane: u32,
    #[comptime] chunk: usize,
    #[comptime] lower: usize,
    #[comptime] half: Half,
) -> Vector<u32, Const<4>> {
    let mut own = Vector::<u32, Const<4>>::zeroed();
    #[unroll]
    for j in 0..4usize {
        let n = comptime!(16 * chunk + 4 * j + 2 * lower);
        own.insert(j, pack_at::<S>(sums, n, half));
    }
    trade_four(own, lane)
}

/// [`own_eight`] with a bias added in f32: rounded once.
#[cube]
fn biased_eight<S: Size>(
    sums: &Vector<f32, S>,
    own: &Vector<f32, Const<8>>,
    lane: u32,
    #[comptime] chunk: usize,
    #[comptime] lower: usize,
    #[comptime] half: Half,
) -> Vector<u32, Const<4>> {
    let mut words = Vector::<u32, Const<4>>::zeroed();
    #[unroll]
    for j in 0..4usize {
        let n = comptime!(16 * chunk + 4 * j + 2 * lower);
        let pair = pack(
            sums.extract(n) + own.extract(comptime!(2 * j)),
            sums.extract(comptime!(n + 1)) + own.extract(comptime!(2 * j + 1)),
            half,
        );
        words.insert(j, pair);
    }
    trade_four(words, lane)
}

/// Returns the bias of the columns of a chunk that the unit's sums belong to.
#[cube]
fn own_bias<W: Size>(
    bias: &ComptimeOption<Box<[Vector<f32, W>]>>,
    first: u32,
    cols: u32,
    lane: u32,
) -> Vector<f32, Const<8>> {
    let mut own = Vector::<f32, Const<8>>::zeroed();
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => {
            let odd = lane & 1 != 0;
            #[unroll]
            for j in 0..4usize {
                let col = min(first + comptime!(8 * j as u32) + lane % 4 * 2, cols - 2);
                let four = bias[(col / 4) as usize];
                own.insert(
                    comptime!(2 * j),
                    select(odd, four.extract(2usize), four.extract(0usize)),
                );
                own.insert(
                    comptime!(2 * j + 1),
                    select(odd, four.extract(3usize), four.extract(1usize)),
                );
            }
        }
        ComptimeOption::None => {}
    }
    own
}

/// Sums over the eight units that share columns. Each unit gets the sum of one of eight columns, [`summed_column`].
#[cube]
fn over_rows(x: &Array<Vector<f32, Const<2>>>, lane: u32) -> f32 {
    let mut mine = Array::<f32>::new(8usize);
    #[unroll]
    for j in 0..8usize {
        mine[j] = x[comptime!(j / 2)].extract(comptime!(j % 2));
    }
    #[unroll]
    for step in 0..3usize {
        let kept = comptime!(4usize >> step);
        let high = lane & comptime!(16u32 >> step as u32) != 0;
        #[unroll]
        for j in 0..kept {
            let (low, up) = (mine[j], mine[comptime!(j + kept)]);
            let sent = select(high, low, up);
            mine[j] = select(high, up, low) + shuffle_xor(sent, comptime!(16u32 >> step as u32));
        }
    }
    mine[0]
}

/// Returns the column of a chunk whose sum a unit gets.
#[cube]
fn summed_column(lane: u32) -> u32 {
    lane % 4 * 8 + (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1)
}

/// Loads what the epilogue combines with a tile's sums, so that the loads overlap with the products: a vector per chunk for each of the two rows.
#[cube]
pub fn prepare<W: Size>(
    before: &ComptimeOption<Box<[Vector<u32, W>]>>,
    place: &Place,
    shape: &ResultShape,
    own: &Lane,
    #[comptime] t: ProductTile,
) -> Array<Vector<u32, Const<4>>> {
    let is_read = comptime!(matches!(t.epilogue, Epilogue::Gradient { .. }));
    let steps = comptime!(if is_read { 2 * t.cols / CHUNK } else { 1 });
    let mut held = Array::<Vector<u32, Const<4>>>::new(steps);
    #[comptime]
    match before {
        ComptimeOption::Some(before) => {
            let address = global_address::<Vector<u32, W>>(before);
            #[unroll]
            for step in 0..steps {
                let (chunk, lower) = comptime!(((step / 2) as u32, (step % 2) as u32));
                let col = place.col + comptime!(CHUNK as u32 * chunk) + own.lane % 4 * 8;
                let row = place.row + own.row() + comptime!(8 * lower);
                let at = (place.matrix * shape.rows + row) * (shape.cols / 8) + col / 8;
                // Zeros for rows past the last one.
                let end = select(col < shape.cols, shape.rows, 0u32);
                held[step] = read_four_words_once(address + u64::cast_from(at) * 16, row, end);
            }
        }
        ComptimeOption::None => {}
    }
    held
}

/// Applies the epilogue to a warp's sums and writes the results. Units exchange values, so all of them must call this.
#[cube]
pub fn finish<S: Size, W: Size>(
    sums: &Vector<f32, S>,
    out: &mut [Vector<u32, W>],
    second: &mut ComptimeOption<Box<[Vector<u32, W>]>>,
    bias: &ComptimeOption<Box<[Vector<f32, W>]>>,
    held: &Array<Vector<u32, Const<4>>>,
    totals: &mut ComptimeOption<Box<[f32]>>,
    place: &Place,
    shape: &ResultShape,
    own: &Lane,
    base: u32,
    #[comptime] t: ProductTile,
) {
    let chunks = comptime!(t.cols / CHUNK);
    let lane = own.lane;
    let mut head_rows = Array::<u32>::new(4usize);
    if comptime!(matches!(t.epilogue, Epilogue::Heads { .. })) {
        #[unroll]
        for lower in 0..2usize {
            let row = place.row + own.row() + comptime!(8 * lower as u32);
            head_rows[comptime!(2 * lower)] = row / shape.seq;
            head_rows[comptime!(2 * lower + 1)] = row % shape.seq;
        }
    }
    #[unroll]
    for chunk in 0..chunks {
        let first = place.col + comptime!((CHUNK * chunk) as u32);
        let col = first + lane % 4 * 8;
        let near = min(col, shape.cols - 8);
        let added = match comptime!(t.epilogue) {
            Epilogue::Heads { .. } => own_bias::<W>(bias, first, shape.cols, lane),
            _ => Vector::<f32, Const<8>>::zeroed(),
        };
        // Both rows exchange before either is used, so that one exchange overlaps with the other row's arithmetic.
        let mut fours = Array::<Vector<u32, Const<4>>>::new(2usize);
        #[unroll]
        for lower in 0..2usize {
            fours[lower] = match comptime!(t.epilogue) {
                Epilogue::Heads { .. } => {
                    biased_eight::<S>(sums, &added, lane, chunk, lower, t.half)
                }
                _ => own_eight::<S>(sums, lane, chunk, lower, t.half),
            };
        }
        let mut column_sums = Array::<Vector<f32, Const<2>>>::new(4usize);
        #[unroll]
        for j in 0..4usize {
            column_sums[j] = Vector::<f32, Const<2>>::zeroed();
        }
        #[unroll]
        for lower in 0..2usize {
            let row = place.row + own.row() + comptime!(8 * lower as u32);
            let head_row = HeadRow {
                batch: head_rows[comptime!(2 * lower)],
                place: head_rows[comptime!(2 * lower + 1)],
            };
            let at = eights(shape, row, &head_row, place, col, t) as usize;
            let inside = row < shape.rows && col < shape.cols;
            match comptime!(t.epilogue) {
                // Sums of exponentials, maxima, line sums and top-k choices have their own store functions.
                Epilogue::Plain
                | Epilogue::LogSums { .. }
                | Epilogue::Maxima { .. }
                | Epilogue::LineSums
                | Epilogue::Highest(_) => {
                    let four = fours[lower];
                    if inside {
                        out[at] = as_stored::<W>(&four);
                    }
                }
                Epilogue::Heads { .. } => {
                    let four = fours[lower];
                    if inside {
                        out[at] = as_stored::<W>(&four);
                    }
                }
                Epilogue::Activation(activation) => {
                    let four = fours[lower];
                    let mut made = Vector::<u32, W>::zeroed();
                    #[unroll]
                    for j in 0..4usize {
                        let x = unpack_two(four.extract(j), t.half) + bias_of::<W>(bias, near, j);
                        let y = value::<f32, Const<2>>(x, comptime!(fast(activation)));
                        made.insert(j, pack_two(&y, t.half));
                    }
                    if inside {
                        if comptime!(second.is_some()) {
                            second.as_mut().unwrap()[at] = as_stored::<W>(&four);
                        }
                        out[at] = made;
                    }
                }
                Epilogue::Gradient { activation, .. } => {
                    let four = fours[lower];
                    let u = held[comptime!(2 * chunk + lower)];
                    let mut made = Vector::<u32, W>::zeroed();
                    let mut active = Vector::<u32, W>::zeroed();
                    #[unroll]
                    for j in 0..4usize {
                        let x = unpack_two(u.extract(j), t.half) + bias_of::<W>(bias, near, j);
                        let grad = unpack_two(four.extract(j), t.half)
                            * slope::<f32, Const<2>>(x, comptime!(fast(activation)));
                        made.insert(j, pack_two(&grad, t.half));
                        if comptime!(t.sums()) {
                            column_sums[j] += grad;
                        }
                        if comptime!(second.is_some()) {
                            let y = value::<f32, Const<2>>(x, comptime!(fast(activation)));
                            active.insert(j, pack_two(&y, t.half));
                        }
                    }
                    if inside {
                        if comptime!(second.is_some()) {
                            second.as_mut().unwrap()[at] = active;
                        }
                        out[at] = made;
                    }
                }
            }
        }
        if comptime!(t.sums()) {
            let total = over_rows(&column_sums, lane);
            let at = own.warp * comptime!(t.cols as u32)
                + comptime!((CHUNK * chunk) as u32)
                + summed_column(lane);
            shared_store(
                base + comptime!(t.totals()) + at * 4,
                u32::reinterpret(total),
            );
        }
    }
    if comptime!(t.sums()) {
        write_totals(totals, place, shape, own, base, t);
    }
}

fn fast(activation: ActivationKind) -> Curve {
    Curve {
        activation,
        fast: true,
    }
}

/// Sums over the 64 rows of a warpgroup, from the sums of its warps.
#[cube]
fn write_totals(
    totals: &mut ComptimeOption<Box<[f32]>>,
    place: &Place,
    shape: &ResultShape,
    own: &Lane,
    base: u32,
    #[comptime] t: ProductTile,
) {
    let group = own.warp / 4;
    named_sync(1 + group, 128u32);
    #[unroll]
    for half in 0..comptime!(t.cols.div_ceil(128)) {
        let within = own.unit % 128 + comptime!(128 * half as u32);
        if within < comptime!(t.cols as u32) {
            let first =
                base + comptime!(t.totals()) + (group * comptime!(4 * t.cols as u32) + within) * 4;
            let mut sum = f32::reinterpret(shared_load(first));
            #[unroll]
            for warp in 1..4u32 {
                let next = shared_load(first + comptime!(warp * t.cols as u32 * 4));
                sum += f32::reinterpret(next);
            }
            let col = place.col + within;
            if col < shape.cols {
                let row = place.row_tile * 2 + group;
                totals.as_mut().unwrap()[(row * shape.cols + col) as usize] = sum;
            }
        }
    }
    // Wait before the next tile's sums overwrite them.
    named_sync(1 + group, 128u32);
}

/// Converts a vector to that of the result's buffer.
#[cube]
pub fn as_stored<W: Size>(four: &Vector<u32, Const<4>>) -> Vector<u32, W> {
    let mut words = Vector::<u32, W>::zeroed();
    #[unroll]
    for j in 0..4usize {
        words.insert(j, four.extract(j));
    }
    words
}
