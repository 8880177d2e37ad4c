//! Divergence of the softmax of a query's scores from its target attention.

use crate::kernels::indexer::pairs::{PairSizes, Sizes, key_of};
use crate::kernels::selection::across_cube;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::row_tile::{Combine, RowTile, across_lanes};

/// Lower than every score; the exponential of its difference to a score is 0.
const LOWEST: f32 = -3.0e38;
/// Lower bound of divisors and of the arguments of logarithms.
const LEAST: f32 = 1e-30;
/// Number of columns of a cube of the kernel that spreads lists.
const SPREAD: usize = 256;

/// Replaces the `scores` of each query by the gradient of its loss with respect to them, `softmax − wanted`, and 0 where there is no key. One query per cube.
#[cube(launch_unchecked, address_type = "dynamic")]
fn compare_rows(
    scores: &mut [f32],
    wanted: &[f32],
    keys: ComptimeOption<Box<[i32]>>,
    losses: &mut [f32],
    s: Sizes,
    #[comptime] is_listed: bool,
    #[comptime] t: RowTile,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(t.shared()));
    let unit = UNIT_POS as usize;
    let exists = CUBE_POS < s.batch * s.rows;
    // Surplus cubes read the last row and write nothing.
    let at = CUBE_POS.min(s.batch * s.rows - 1);
    let entry = at / s.rows;
    let row = at % s.rows;
    let start = at * s.columns;
    let mut seen = s.columns;
    if comptime!(!is_listed) {
        seen = s.position(row) + 1;
    }

    let mut most = f32::new(LOWEST);
    let mut total = 0.0f32.runtime();
    let mut column = unit;
    while column < seen {
        if key_of(&keys, entry, row, column, &s, is_listed) >= 0 {
            most = max(most, scores[start + column]);
            total += wanted[start + column];
        }
        column += comptime!(t.lanes);
    }
    most = across_lanes::<f32>(most, &mut shared, t, Combine::Max);
    total = across_lanes::<f32>(total, &mut shared, t, Combine::Sum);
    let mut sum = 0.0f32.runtime();
    column = unit;
    while column < seen {
        if key_of(&keys, entry, row, column, &s, is_listed) >= 0 {
            sum += (scores[start + column] - most).exp();
        }
        column += comptime!(t.lanes);
    }
    sum = across_lanes::<f32>(sum, &mut shared, t, Combine::Sum);
    let sum = max(sum, f32::new(LEAST));
    let total = max(total, f32::new(LEAST));
    let log = most + sum.ln();

    let mut loss = 0.0f32.runtime();
    column = unit;
    while column < s.columns {
        let mut by_score = 0.0f32.runtime();
        // Hidden columns are written, too.
        if column < seen && key_of(&keys, entry, row, column, &s, is_listed) >= 0 {
            let score = scores[start + column];
            let share = wanted[start + column] / total;
            loss += share * (max(share, f32::new(LEAST)).ln() - (score - log));
            by_score = (score - most).exp() / sum - share;
        }
        if exists {
            scores[start + column] = by_score;
        }
        column += comptime!(t.lanes);
    }
    loss = across_lanes::<f32>(loss, &mut shared, t, Combine::Sum);
    if exists && unit == 0 {
        losses[entry * s.seq_q + s.start + row] = loss;
    }
}

/// Buffers of [`compare`].
#[derive(Clone, Copy, Debug)]
pub struct Compared<'a> {
    /// Scores, f32 `[batch, rows, columns]`. Replaced by the gradient of the sum of losses with respect to them, 0 where there is no key.
    pub scores: &'a Handle,
    /// Target attention in the same shape; only its shares among the keys count.
    pub wanted: &'a Handle,
    /// Listed keys, if keys are listed: i32 `[batch, seq_q, listed]`.
    pub keys: Option<&'a Handle>,
    /// Losses, f32 `[batch, seq_q]`, of which the computed rows are written.
    pub losses: &'a Handle,
}

/// Computes the losses of queries, `Σ t · ln(t / softmax(x))` over the keys of each, and their gradients with respect to the scores.
///
/// # Errors
/// [`KernelError`] if there are more rows than a launch has cubes, or the device cannot index the elements.
pub fn compare(client: &Client, sizes: &PairSizes, buffers: &Compared) -> Result<(), KernelError> {
    let rows = sizes.batch * sizes.rows[1];
    let address = address_of(
        client,
        sizes.elements().max(sizes.list_elements()).max(2 * rows),
    )?;
    let t = across_cube(client);
    let cubes = spread(client, rows as u64)?;
    // SAFETY: a cube reads and writes elements of its own, existing row; the buffers have the lengths that `buffer` gets.
    unsafe {
        compare_rows::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(t.units() as u32),
            address,
            buffer(buffers.scores, sizes.elements()),
            buffer(buffers.wanted, sizes.elements()),
            optional(buffers.keys, sizes.list_elements()),
            buffer(buffers.losses, sizes.batch * sizes.seq[0]),
            sizes.launch(),
            sizes.listed.is_some(),
            t,
        );
    }
    Ok(())
}

/// Fills each query's row with zeros, and then writes the numbers of the keys that the query lists. One query per cube.
#[cube(launch_unchecked, address_type = "dynamic")]
fn spread_rows(numbers: &[f32], keys: &[i32], out: &mut [f32], s: Sizes, count: usize) {
    // Every unit must reach the barrier; surplus cubes write nothing.
    let is_row = CUBE_POS < count;
    let row = CUBE_POS.min(count - 1);
    let columns = select(is_row, s.columns, 0usize);
    let end = select(is_row, s.seq_kv, 0usize);
    let list = (row / s.rows * s.seq_q + s.start + row % s.rows) * s.columns;
    let mut key = UNIT_POS as usize;
    while key < end {
        out[row * s.seq_kv + key] = 0.0f32;
        key += comptime!(SPREAD);
    }
    sync_storage();
    let mut place = UNIT_POS as usize;
    while place < columns {
        let key = keys[list + place];
        if key >= 0i32 && (key as usize) < s.seq_kv {
            out[row * s.seq_kv + key as usize] = numbers[row * s.columns + place];
        }
        place += comptime!(SPREAD);
    }
}

/// Scatters numbers of listed keys, f32 `[batch, rows, listed]`, to the positions of the keys: `[batch, rows, seq_kv]`, 0 elsewhere. `keys` are i32
/// `[batch, seq_q, listed]`, ascending, then −1.
pub fn spread_listed(
    client: &Client,
    sizes: &PairSizes,
    [numbers, keys]: [&Handle; 2],
    out: &Handle,
) -> Result<(), KernelError> {
    let rows = sizes.batch * sizes.rows[1];
    let count = rows * sizes.seq[1];
    let largest = count.max(sizes.elements()).max(sizes.list_elements());
    let address = address_of(client, 2 * largest)?;
    let cubes = spread(client, rows as u64)?;
    // SAFETY: a cube reads the list and the elements of an existing row, below `rows`, and writes that row; the buffers have the lengths that `buffer` gets.
    unsafe {
        spread_rows::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(SPREAD as u32),
            address,
            buffer(numbers, sizes.elements()),
            buffer(keys, sizes.list_elements()),
            buffer(out, count),
            sizes.launch(),
            rows,
        );
    }
    Ok(())
}
