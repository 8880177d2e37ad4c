//! Gradients of an indexer's loss through its scores. A cube has rows, which are (query, head) pairs or keys, and loops over columns, which are keys or (query,
//! head) pairs. It computes their products, the gradient of each pair from these, and multiplies it with the columns.
//!
//! ```text
//! by queries   rows: (query, head)   columns: keys up to the last of the queries, or the keys that a query lists
//! by keys      rows: keys            columns: (query, head), from the first query on that sees one of the keys
//! ```
//!
//! There are few keys compared to their columns, so several cubes split the mainloop of a tile of keys. Each takes every n-th step, and has sums of its own.

use crate::kernels::indexer::mma;
use crate::kernels::indexer::pairs::{
    PairInputs, PairSizes, SharedGradient, SharedGradientLaunch, Sizes, check, key_of,
};
use crate::kernels::indexer::rows::{ACROSS, DEPTH, PITCH, SIDE, fill, multiply};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::addressing::Four;

/// Target number of cubes per multiprocessor for rows of keys, and maximum number of cubes that split a mainloop.
const KEY_CUBES: usize = 4;
const MOST_PARTS: usize = 16;
/// Number of rows of a unit.
const OWN: usize = 4;
/// Vectors of four from one row of pair gradients to the next.
const PAIR_PITCH: usize = ACROSS + 1;

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct GradientTile {
    width: usize,
    /// Number of units along the rows.
    down: usize,
    by_keys: bool,
    is_listed: bool,
    /// True to add to the existing contents of the output.
    adds: bool,
    /// True if no query has a key after its own position.
    causal: bool,
}

impl GradientTile {
    fn rows(&self) -> usize {
        self.down * OWN
    }

    fn units(&self) -> usize {
        self.down * ACROSS
    }

    fn fours(&self) -> usize {
        self.width.div_ceil(4)
    }

    /// Returns the number of vectors of four of a gradient row that a unit holds.
    fn unit_fours(&self) -> usize {
        self.fours().div_ceil(ACROSS)
    }

    /// Returns the number of columns, in each quarter of a tile's columns, whose rows are in shared memory at a time. They reuse the memory
    /// of the products' factors.
    fn together(&self) -> usize {
        let fit = SIDE * PITCH / (4 * self.fours());
        1 << fit.max(1).ilog2().min(ACROSS.ilog2())
    }
}

/// A row or a column of the products: a (query, head) pair, or a key.
#[derive(CubeType, Clone, Copy)]
struct Line {
    /// Offset of its first element.
    start: usize,
    is_there: bool,
}

/// Returns the (query, head) pair at index `row · heads + head`.
#[cube]
fn query_line(at: usize, entry: usize, s: &Sizes, #[comptime] width: usize) -> Line {
    let row = at / s.heads;
    let is_there = row < s.rows;
    let query = s.start + select(is_there, row, 0usize);
    let start = ((entry * s.heads + at % s.heads) * s.seq_q + query) * width;
    Line { start, is_there }
}

#[cube]
fn key_line(key: i32, entry: usize, s: &Sizes, #[comptime] width: usize) -> Line {
    let is_there = key >= 0 && key < s.seq_kv as i32;
    let key = select(is_there, key, 0i32) as usize;
    Line {
        start: (entry * s.seq_kv + key) * width,
        is_there,
    }
}

/// Copies a vector of four of a row or a column to shared memory: of a (query, head) pair from `q`, or of a key from `k`.
#[cube]
fn fill_line<E: Float, N: Size>(
    q: &[Vector<E, N>],
    k: &[Vector<E, N>],
    shared: &mut Shared<[Vector<f32, Four>]>,
    place: usize,
    line: Line,
    four: usize,
    #[comptime] is_key: bool,
    #[comptime] width: usize,
) {
    let is_there = line.is_there && four < comptime!(width.div_ceil(4));
    if comptime!(is_key) {
        fill::<E, N>(k, shared, place, line.start, four, is_there, width);
    } else {
        fill::<E, N>(q, shared, place, line.start, four, is_there, width);
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn gradient<E: Float, N: Size>(
    q: &[Vector<E, N>],
    k: &[Vector<E, N>],
    weights: &[f32],
    keys: ComptimeOption<Box<[i32]>>,
    by_scores: &[f32],
    out: &mut [f32],
    by_weights: ComptimeOption<Box<[f32]>>,
    s: Sizes,
    of_cubes: SharedGradient,
    #[comptime] t: GradientTile,
    #[define(E)] _element: ElemType,
) {
    // Surplus cubes read the last tile and write nothing.
    let (tiles, parts) = (of_cubes.tiles, of_cubes.parts);
    let exists = CUBE_POS < tiles;
    let cube = CUBE_POS.min(tiles - 1);
    let part = cube % parts;
    let tile = cube / parts;
    let unit = UNIT_POS as usize;
    let unit_x = unit % comptime!(ACROSS);
    let unit_y = unit / comptime!(ACROSS);
    let width = comptime!(t.width);
    let fours = comptime!(t.fours());
    let unit_fours = comptime!(t.unit_fours());
    let mut entry = tile / of_cubes.row_tiles;
    let mut row0 = tile % of_cubes.row_tiles * comptime!(t.rows());
    // Query whose listed keys are read, if keys are listed.
    let mut lister = 0usize.runtime();
    // End of the rows (exclusive).
    let mut row_end = s.rows * s.heads;
    let mut first = 0usize.runtime();
    let mut end = s.columns;
    if comptime!(t.by_keys) {
        row_end = s.seq_kv;
        end = s.rows * s.heads;
        let position = s.position(0usize);
        if comptime!(t.causal) && row0 > position {
            first = (row0 - position) * s.heads / comptime!(SIDE) * comptime!(SIDE);
        }
    } else if comptime!(t.is_listed) {
        lister = entry % s.rows;
        entry /= s.rows;
        row0 += lister * s.heads;
        row_end = (lister + 1) * s.heads;
    } else {
        let last = (row0 + comptime!(t.rows() - 1)).min(row_end - 1) / s.heads;
        end = s.position(last) + 1;
    }

    let mut left = Shared::<[Vector<f32, Four>]>::new_slice(comptime!(t.rows() * PITCH));
    let mut right = Shared::<[Vector<f32, Four>]>::new_slice(comptime!(SIDE * PITCH));
    let mut pairs = Shared::<[Vector<f32, Four>]>::new_slice(comptime!(t.rows() * PAIR_PITCH));
    let mut products = Array::<f32>::new(comptime!(OWN * 4));
    let mut sums = Array::<Vector<f32, Four>>::new(comptime!(OWN * unit_fours));
    let mut weight_sums = Array::<f32>::new(OWN);
    #[unroll]
    for i in 0..comptime!(OWN * unit_fours) {
        sums[i] = Vector::<f32, Four>::zeroed();
    }
    #[unroll]
    for i in 0..OWN {
        weight_sums[i] = 0.0f32;
    }

    let mut column0 = first + part * comptime!(SIDE);
    while column0 < end {
        #[unroll]
        for i in 0..comptime!(OWN * 4) {
            products[i] = 0.0f32;
        }
        for depth in range_stepped(0usize, fours, DEPTH) {
            sync_cube();
            let mut at = unit;
            while at < comptime!(t.rows() * DEPTH) {
                let own = row0 + at / comptime!(DEPTH);
                let four = at % comptime!(DEPTH);
                let line = row_line(own, row_end, entry, &s, t);
                let place = at / comptime!(DEPTH) * comptime!(PITCH) + four;
                fill_line::<E, N>(q, k, &mut left, place, line, depth + four, t.by_keys, width);
                at += comptime!(t.units());
            }
            at = unit;
            while at < comptime!(SIDE * DEPTH) {
                let column = column0 + at / comptime!(DEPTH);
                let four = at % comptime!(DEPTH);
                let line = column_line(&keys, entry, lister, column, &s, t);
                let place = at / comptime!(DEPTH) * comptime!(PITCH) + four;
                let is_key = comptime!(!t.by_keys);
                fill_line::<E, N>(q, k, &mut right, place, line, depth + four, is_key, width);
                at += comptime!(t.units());
            }
            sync_cube();
            let first_row = unit_y * comptime!(OWN);
            multiply(&left, &right, &mut products, first_row, unit_x, OWN, ACROSS);
        }

        // Gradients of the pairs.
        #[unroll]
        for i in 0..OWN {
            let own = row0 + unit_y * comptime!(OWN) + i;
            let mut of_pairs = Vector::<f32, Four>::zeroed();
            #[unroll]
            for j in 0..4usize {
                let column = column0 + unit_x + comptime!(j * ACROSS);
                let mut at = own;
                let mut key = column;
                if comptime!(t.by_keys) {
                    at = column;
                    key = own;
                }
                let row = at / s.heads;
                let head = at % s.heads;
                let is_there = own < row_end && column < end && key < s.columns;
                let row = select(is_there, row, 0usize);
                let by_score =
                    by_scores[(entry * s.rows + row) * s.columns + select(is_there, key, 0usize)];
                let by_score = select(is_there, by_score, 0.0f32);
                let weight = weights[(entry * s.heads + head) * s.seq_q + s.start + row];
                let product = products[comptime!(i * 4 + j)];
                weight_sums[i] += by_score * max(product, 0.0f32);
                of_pairs.insert(j, select(product > 0.0f32, by_score * weight, 0.0f32));
            }
            pairs[(unit_y * comptime!(OWN) + i) * comptime!(PAIR_PITCH) + unit_x] = of_pairs;
        }

        // Multiplies them with the columns, a part of which is in shared memory at a time.
        let together = comptime!(t.together());
        for col0 in range_stepped(0usize, ACROSS, together) {
            sync_cube();
            let mut at = unit;
            while at < comptime!(4 * t.together() * fours) {
                let four = at % fours;
                let place = at / fours;
                let column =
                    column0 + place / together * comptime!(ACROSS) + col0 + place % together;
                let line = column_line(&keys, entry, lister, column, &s, t);
                let is_key = comptime!(!t.by_keys);
                fill_line::<E, N>(q, k, &mut right, at, line, four, is_key, width);
                at += comptime!(t.units());
            }
            sync_cube();
            for col in 0..together {
                let mut of_rows = Array::<Vector<f32, Four>>::new(OWN);
                #[unroll]
                for i in 0..OWN {
                    of_rows[i] =
                        pairs[(unit_y * comptime!(OWN) + i) * comptime!(PAIR_PITCH) + col0 + col];
                }
                #[unroll]
                for j in 0..4usize {
                    #[unroll]
                    for f in 0..unit_fours {
                        // A unit beyond a row's end repeats its last vector and does not store the result.
                        let four = (unit_x + comptime!(f * ACROSS)).min(comptime!(fours - 1));
                        let other = right[(comptime!(j * together) + col) * fours + four];
                        #[unroll]
                        for i in 0..OWN {
                            sums[comptime!(i * unit_fours + f)] +=
                                Vector::new(of_rows[i].extract(j)) * other;
                        }
                    }
                }
            }
        }
        column0 += parts * comptime!(SIDE);
    }

    // For gradients with respect to keys each part has its own sums.
    let part_start = part * s.batch * s.seq_kv * width;

    #[unroll]
    for i in 0..OWN {
        let own = row0 + unit_y * comptime!(OWN) + i;
        let line = row_line(own, row_end, entry, &s, t);
        if exists && line.is_there {
            #[unroll]
            for f in 0..unit_fours {
                let value = sums[comptime!(i * unit_fours + f)];
                #[unroll]
                for c in 0..4usize {
                    let within = (unit_x + comptime!(f * ACROSS)) * 4 + c;
                    if within < width {
                        let at = part_start + line.start + within;
                        let mut number = value.extract(c) * of_cubes.factor;
                        if comptime!(t.adds) {
                            number += out[at];
                        }
                        out[at] = number;
                    }
                }
            }
        }
    }
    if comptime!(!t.by_keys) {
        // Reduces over the units of a row, in the shared memory of the pair gradients.
        let mut by_weights = by_weights.clone().unwrap();
        sync_cube();
        let mut own_sums = Vector::<f32, Four>::zeroed();
        #[unroll]
        for i in 0..OWN {
            own_sums.insert(i, weight_sums[i]);
        }
        pairs[unit_y * comptime!(OWN * PAIR_PITCH) + unit_x] = own_sums;
        sync_cube();
        if unit_x == 0 {
            let mut total = Vector::<f32, Four>::zeroed();
            for other in 0..ACROSS {
                total += pairs[unit_y * comptime!(OWN * PAIR_PITCH) + other];
            }
            #[unroll]
            for i in 0..OWN {
                let own = row0 + unit_y * comptime!(OWN) + i;
                if exists && own < row_end {
                    let at = (entry * s.heads + own % s.heads) * s.seq_q;
                    by_weights[at + s.start + own / s.heads] = total.extract(i) * of_cubes.factor;
                }
            }
        }
    }
}

/// Returns a row of the gradient.
#[cube]
fn row_line(own: usize, end: usize, entry: usize, s: &Sizes, #[comptime] t: GradientTile) -> Line {
    if comptime!(t.by_keys) {
        key_line(own as i32, entry, s, t.width)
    } else {
        let line = query_line(own, entry, s, t.width);
        Line {
            start: line.start,
            // Rows after those of a listing query belong to another query.
            is_there: line.is_there && own < end,
        }
    }
}

/// Returns what a column refers to.
#[cube]
fn column_line(
    keys: &ComptimeOption<Box<[i32]>>,
    entry: usize,
    lister: usize,
    column: usize,
    s: &Sizes,
    #[comptime] t: GradientTile,
) -> Line {
    if comptime!(t.by_keys) {
        query_line(column, entry, s, t.width)
    } else {
        let within = column < s.columns;
        let column = select(within, column, 0usize);
        let key = key_of(keys, entry, lister, column, s, t.is_listed);
        key_line(select(within, key, -1i32), entry, s, t.width)
    }
}

/// Inputs of the gradients.
#[derive(Clone, Copy, Debug)]
pub struct IndexerGradients<'a> {
    /// The index, whose keys have one head.
    pub inputs: PairInputs<'a>,
    /// Gradients with respect to scores: f32 `[batch, rows, columns]`, 0 where there is no key.
    pub by_scores: &'a Handle,
    /// Factor of the scores times that of the loss.
    pub factor: f64,
}

impl IndexerGradients<'_> {
    fn launch(
        &self,
        client: &Client,
        sizes: &PairSizes,
        t: GradientTile,
        [row_tiles, tiles, parts]: [usize; 3],
        out: (&Handle, usize),
        by_weights: Option<&Handle>,
    ) -> Result<(), KernelError> {
        let vector = self.inputs.vector(client, sizes.width);
        let [q, k] = sizes.inputs();
        let largest = q.max(k).max(out.1).max(sizes.elements());
        let address = address_of(client, largest.max(2 * tiles))?;
        let cubes = spread(client, tiles as u64)?;
        // SAFETY: a unit reads existing rows of queries and keys and existing entries of pairs; it writes its own elements of existing rows. Lists hold keys of
        // the sequence or negative numbers. The buffers have the lengths that `buffer` gets.
        unsafe {
            gradient::launch_unchecked(
                client,
                cubes,
                CubeDim::new_1d(t.units() as u32),
                address,
                vector,
                buffer(self.inputs.q, q / vector),
                buffer(self.inputs.k, k / vector),
                buffer(self.inputs.of_rows, sizes.row_elements()),
                optional(self.inputs.keys, sizes.list_elements()),
                buffer(self.by_scores, sizes.elements()),
                buffer(out.0, out.1),
                optional(by_weights, sizes.row_elements()),
                sizes.launch(),
                SharedGradientLaunch::new(row_tiles, tiles, parts, self.factor as f32),
                t,
                self.inputs.element,
            );
        }
        Ok(())
    }
}

/// Computes the gradients with respect to the computed queries and their weights, in f32 tensors of all queries: `[batch, heads, seq_q, width]` and
/// `[batch, heads, seq_q]`.
///
/// # Errors
/// Those of [`check`], or if there are more tiles than a launch has cubes.
pub fn by_queries(
    client: &Client,
    sizes: &PairSizes,
    gradients: &IndexerGradients,
    [by_q, by_weights]: [&Handle; 2],
) -> Result<(), KernelError> {
    check(client, gradients.inputs.element, sizes)?;
    let [_, rows] = sizes.rows;
    let is_listed = sizes.listed.is_some();
    let heads = sizes.heads[0];
    // A query that lists keys has its own tiles.
    let (lines, groups) = match is_listed {
        true => (heads, sizes.batch * rows),
        false => (rows * heads, sizes.batch),
    };
    let out = (by_q, sizes.inputs()[0]);
    let flags = [false, false, !is_listed];
    if let Ok(t) = mma::GradientTile::new(client, sizes, &gradients.inputs, flags) {
        let work = mma::GradientWork {
            lines,
            groups,
            parts: 1,
            out,
            by_weights: Some(by_weights),
        };
        return mma::launch_gradient(client, sizes, gradients, work, t);
    }
    let down = match is_listed {
        true => heads.div_ceil(OWN).next_power_of_two().clamp(2, ACROSS),
        false => ACROSS,
    };
    let t = GradientTile {
        width: sizes.width,
        down,
        by_keys: false,
        is_listed,
        adds: false,
        causal: !is_listed,
    };
    let row_tiles = lines.div_ceil(t.rows());
    let tiles = [row_tiles, groups * row_tiles, 1];
    gradients.launch(client, sizes, t, tiles, out, Some(by_weights))
}

/// Returns the number of parts for [`by_keys`] that keeps a device busy.
pub fn key_parts(client: &Client, sizes: &PairSizes) -> usize {
    let known = client.properties().hardware.num_streaming_multiprocessors;
    let cubes = sizes.batch * sizes.seq[1].div_ceil(SIDE);
    let steps = (sizes.rows[1] * sizes.heads[0]).div_ceil(SIDE);
    let wanted = KEY_CUBES * known.map_or(1, |known| known as usize);
    wanted
        .div_ceil(cubes.max(1))
        .clamp(1, MOST_PARTS)
        .min(steps.max(1))
}

/// Computes the gradient with respect to keys from the computed queries, f32 `[parts, batch, 1, seq_kv, width]`, in `parts` parts that the caller adds. With
/// `adds` it accumulates onto the output. It covers all keys, not lists; `causal` means that no query has an entry for a key after its position.
pub fn by_keys(
    client: &Client,
    sizes: &PairSizes,
    gradients: &IndexerGradients,
    (by_k, parts): (&Handle, usize),
    [adds, causal]: [bool; 2],
) -> Result<(), KernelError> {
    check(client, gradients.inputs.element, sizes)?;
    let out = (by_k, parts * sizes.inputs()[1]);
    let flags = [true, adds, causal];
    if let Ok(t) = mma::GradientTile::new(client, sizes, &gradients.inputs, flags) {
        let work = mma::GradientWork {
            lines: sizes.seq[1],
            groups: sizes.batch,
            parts,
            out,
            by_weights: None,
        };
        return mma::launch_gradient(client, sizes, gradients, work, t);
    }
    let t = GradientTile {
        width: sizes.width,
        down: ACROSS,
        by_keys: true,
        is_listed: false,
        adds,
        causal,
    };
    let row_tiles = sizes.seq[1].div_ceil(t.rows());
    let tiles = [row_tiles, sizes.batch * row_tiles * parts, parts];
    gradients.launch(client, sizes, t, tiles, out, None)
}
