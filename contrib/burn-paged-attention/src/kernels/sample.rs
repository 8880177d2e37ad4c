//! Kernel that samples a token from each row of logits.
//!
//! Nothing is sorted. Floats map to integers of the same order, so a threshold by rank or by cumulative weight is found by bisection over the
//! integers, in 32 steps. A cube has a row.
//!
//! No factor and no difference overflows: a temperature is split into two factors, and differences are taken of halves. If the penalty makes the
//! largest logit of a row infinite, all elements are instead multiplied by a factor that leaves none larger than its logit (`shrunk`), which keeps
//! their order.

// Comptime conditions stay separate from runtime ones.
#![allow(clippy::collapsible_if)]

use crate::sample_options::SampleOptions;
use blocksparse_cubecl::limits::most_units;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::order_key::{INFINITE, number};
use blocksparse_cubecl::shared::row_tile::{
    Combine, Pair, RowTile, across_lanes, pair_across_lanes, pair_shared,
};

const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Units of a row, and of a row with more than [`LONG`] elements.
const LANES: usize = 256;
const LONG_LANES: usize = 1024;
const LONG: usize = 16_384;

/// Lower bound of every logit.
const LOWEST: f32 = f32::MIN;

/// A penalty above 2¹²⁴, or with a reciprocal above it, is split into two factors. Both leave the largest logit finite.
const MOST_PENALTY: f64 = (1u128 << 124) as f64;

impl SampleOptions {
    /// Returns the reciprocal of the temperature as two normal f32 factors, since alone it may overflow or underflow f32.
    fn factors(&self) -> [f64; 2] {
        let normal = |x: f64| x.clamp(f32::MIN_POSITIVE.into(), f32::MAX.into());
        let whole = match self.temperature {
            0.0 => 1.0,
            temperature => 1.0 / temperature,
        };
        let factor = normal(whole);
        [factor, normal(whole / factor)]
    }

    /// Returns the penalty as two factors.
    fn penalties(&self) -> [f64; 2] {
        let within = |x: f64| x.clamp(1.0 / MOST_PENALTY, MOST_PENALTY);
        let penalty = within(self.repetition);
        [penalty, within(self.repetition / penalty)]
    }

    fn launch(&self, client: &Client, vocab: usize, seen: bool) -> Result<Sampled, KernelError> {
        let properties = client.properties();
        let most = most_units(properties);
        let wanted = match vocab > LONG {
            true => LONG_LANES,
            false => LANES,
        };
        let lanes = (vocab.next_power_of_two()).min(wanted.min(1 << most.ilog2()));
        let limit = || KernelError::limit("units of a row", most as u32, most + 1);
        let tile = RowTile::new(properties, lanes, F32, 1).ok_or_else(limit)?;
        Ok(Sampled {
            tile: RowTile {
                lanes,
                rows: 1,
                vector: 1,
                row_vectors: vocab,
                plane: tile.plane.min(lanes),
            },
            greedy: self.temperature == 0.0,
            top_k: self.top_k.is_some_and(|most| most < vocab),
            top_p: self.top_p < 1.0,
            min_p: self.min_p > 0.0,
            seen: seen && self.repetition != 1.0,
            is_wide: self.penalties()[1] != 1.0,
            is_reward: self.repetition < 1.0,
        })
    }
}

/// Comptime shape of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Sampled {
    tile: RowTile,
    greedy: bool,
    top_k: bool,
    top_p: bool,
    min_p: bool,
    seen: bool,
    /// Whether the penalty is split into two factors.
    is_wide: bool,
    /// Whether the penalty is below 1.
    is_reward: bool,
}

/// Parameters that turn a row's logits into weights.
#[derive(CubeType, Clone, Copy)]
struct Row {
    start: usize,
    /// Its largest element.
    most: f32,
    /// Reciprocal of the temperature, as two factors.
    factor: f32,
    more: f32,
    penalty: Penalty,
    /// Whether its elements are shrunk.
    is_shrunk: bool,
}

/// Penalty of seen tokens, as two factors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Penalty {
    by: f32,
    more: f32,
}

/// Candidates: all above a bound, and `ties` of those equal to it.
#[derive(CubeType, Clone, Copy)]
struct Kept {
    bound: u32,
    ties: f32,
}

/// Maps a float to an integer of the same order: 0 for NaN and −∞, which never count.
#[cube]
fn ordered(bits: u32) -> u32 {
    let key = select(bits >> 31 == 1, !bits, bits | 0x8000_0000);
    let none = bits & 0x7fff_ffff > 0x7f80_0000 || bits == 0xff80_0000;
    select(none, 0u32, key)
}

/// Multiplies a number by the penalty.
#[cube]
fn times(z: f32, penalty: &Penalty, #[comptime] s: Sampled) -> f32 {
    let mut product = z * penalty.by;
    if comptime!(s.is_wide) {
        product *= penalty.more;
    }
    product
}

/// Divides a number by the penalty.
#[cube]
fn over(z: f32, penalty: &Penalty, #[comptime] s: Sampled) -> f32 {
    let mut quotient = z / penalty.by;
    if comptime!(s.is_wide) {
        quotient /= penalty.more;
    }
    quotient
}

/// Shrinks an element: multiplies it by the penalty if that is below 1, and otherwise divides.
#[cube]
fn shrunk(z: f32, penalty: &Penalty, #[comptime] s: Sampled) -> f32 {
    if comptime!(s.is_reward) {
        times(z, penalty, s)
    } else {
        over(z, penalty, s)
    }
}

/// Inverts [`shrunk`].
#[cube]
fn grown(z: f32, penalty: &Penalty, #[comptime] s: Sampled) -> f32 {
    if comptime!(s.is_reward) {
        over(z, penalty, s)
    } else {
        times(z, penalty, s)
    }
}

/// Returns the probability of an element relative to the largest.
#[cube]
fn weight(key: u32, row: &Row, #[comptime] s: Sampled) -> f32 {
    // The difference of halves is finite.
    let mut half = number(key) * 0.5f32 - row.most * 0.5f32;
    if comptime!(s.seen) {
        if row.is_shrunk {
            half = grown(half, &row.penalty, s);
        }
    }
    (half * row.factor * row.more * 2.0f32).exp()
}

/// Returns the order key of an element of a row, after the penalty.
#[cube]
fn key_at(
    logits: &[u32],
    seen: &ComptimeOption<Box<[i32]>>,
    at: usize,
    penalty: &Penalty,
    is_shrunk: bool,
    #[comptime] s: Sampled,
) -> u32 {
    let mut bits = logits[at];
    if comptime!(s.seen) {
        let was_seen = seen.as_ref().unwrap()[at] != 0;
        let z = f32::reinterpret(bits);
        let mut lower = z;
        if is_shrunk {
            // Elements that the penalty would enlarge stay; all others shrink.
            let mut is_larger = z <= 0.0;
            if comptime!(s.is_reward) {
                is_larger = z > 0.0;
            }
            let is_larger = was_seen && is_larger;
            let other = shrunk(z, penalty, s);
            let other = select(was_seen, shrunk(other, penalty, s), other);
            lower = select(is_larger, z, other);
        } else if was_seen {
            lower = select(z > 0.0, over(z, penalty, s), times(z, penalty, s));
            // Clamp instead of infinity: then the whole row is shrunk.
            lower = max(min(lower, f32::MAX), f32::MIN);
        }
        // NaN and infinities stay.
        let none = bits & 0x7fff_ffff >= 0x7f80_0000;
        bits = select(none, bits, u32::reinterpret(lower));
    }
    ordered(bits)
}

/// Sums the weights of the elements above a bound (`a`), and counts them (`b`).
#[cube]
fn above(
    logits: &[u32],
    seen: &ComptimeOption<Box<[i32]>>,
    bound: u32,
    row: &Row,
    shared: &mut [f32],
    step: usize,
    #[comptime] s: Sampled,
) -> Pair<f32> {
    let mut weight_sum = 0.0f32.runtime();
    let mut count = 0.0f32.runtime();
    let mut column = UNIT_POS as usize;
    while column < comptime!(s.tile.row_vectors) {
        let at = row.start + column;
        let key = key_at(logits, seen, at, &row.penalty, row.is_shrunk, s);
        if key > bound {
            weight_sum += weight(key, row, s);
            count += 1.0f32;
        }
        column += comptime!(s.tile.lanes);
    }
    pair_across_lanes::<f32>(weight_sum, count, shared, step, comptime!(s.tile))
}

/// Condition that ends a search for a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Until {
    /// Fewer elements than the limit are above it.
    Fewer,
    /// Their weight is less than the limit.
    Less,
    /// Their weight is at most the limit.
    NoMore,
}

/// Finds the smallest bound from `least` on that meets the condition.
#[cube]
fn bound_of(
    logits: &[u32],
    seen: &ComptimeOption<Box<[i32]>>,
    least: u32,
    limit: f32,
    row: &Row,
    shared: &mut [f32],
    #[comptime] until: Until,
    #[comptime] s: Sampled,
) -> u32 {
    let mut low = least;
    let mut high = 0xffff_ffffu32.runtime();
    for step in 0..32usize {
        let middle = low + (high - low) / 2;
        let there = above(logits, seen, middle, row, shared, step, s);
        let is_enough = match comptime!(until) {
            Until::Fewer => there.b < limit,
            Until::Less => there.a < limit,
            Until::NoMore => there.a <= limit,
        };
        if low < high {
            if is_enough {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
    }
    // The next search begins with the other half of the shared memory.
    sync_cube();
    low
}

/// Sums the weights of all candidates.
#[cube]
fn weight_sum_of(
    logits: &[u32],
    seen: &ComptimeOption<Box<[i32]>>,
    kept: &Kept,
    row: &Row,
    shared: &mut [f32],
    #[comptime] s: Sampled,
) -> f32 {
    let there = above(logits, seen, kept.bound, row, shared, 0, s);
    sync_cube();
    let mut weight_sum = there.a;
    if kept.ties > 0.0 {
        weight_sum += kept.ties * weight(kept.bound, row, s);
    }
    weight_sum
}

/// Samples `tokens[r]` from `logits[r]` by `draws[r]` in [0, 1): the first, by descending probability, whose cumulative weight exceeds that share;
/// −1 if no logit is finite.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sample(
    logits: &[u32],
    draws: &[f32],
    seen: ComptimeOption<Box<[i32]>>,
    tokens: &mut [i32],
    factor: f32,
    more: f32,
    top_k: f32,
    top_p: f32,
    half_gap: f32,
    penalty: Penalty,
    #[comptime] s: Sampled,
) {
    let t = comptime!(s.tile);
    let vocab = comptime!(t.row_vectors);
    let lane = UNIT_POS as usize;
    let mut shared = Shared::<[f32]>::new_slice(comptime!(pair_shared(&s.tile)));
    let mut one = Shared::<[f32]>::new_slice(comptime!(s.tile.shared()));
    let mut counts = Shared::<[u32]>::new_slice(comptime!(s.tile.lanes));
    let start = CUBE_POS * vocab;

    let mut most = LOWEST.runtime();
    let mut most_shrunk = LOWEST.runtime();
    let mut column = lane;
    while column < vocab {
        let key = key_at(logits, &seen, start + column, &penalty, false, s);
        if key != 0 {
            most = max(most, number(key));
        }
        if comptime!(s.seen) {
            let key = key_at(logits, &seen, start + column, &penalty, true, s);
            if key != 0 {
                most_shrunk = max(most_shrunk, number(key));
            }
        }
        column += comptime!(t.lanes);
    }
    most = across_lanes::<f32>(most, &mut one, t, Combine::Max);
    let mut is_shrunk = false.runtime();
    if comptime!(s.seen) {
        most_shrunk = across_lanes::<f32>(most_shrunk, &mut one, t, Combine::Max);
        is_shrunk = most >= f32::MAX || most <= f32::MIN;
        most = select(is_shrunk, most_shrunk, most);
    }
    let largest = ordered(u32::reinterpret(most));
    let row = Row {
        start,
        most,
        factor,
        more,
        penalty,
        is_shrunk,
    };

    // Bound of the token, and its index among equal elements.
    let mut bound = largest;
    let mut place = 0.0f32.runtime();
    // If the largest logit is infinite, whose key is above all others, take it.
    let is_drawn = largest < comptime!(INFINITE);
    if comptime!(!s.greedy) {
        let mut kept = Kept {
            bound: 0u32.runtime(),
            ties: 0.0f32.runtime(),
        };
        if comptime!(s.top_k) {
            kept.bound = bound_of(
                logits,
                &seen,
                0u32,
                top_k,
                &row,
                &mut shared,
                Until::Fewer,
                s,
            );
            let there = above(logits, &seen, kept.bound, &row, &mut shared, 0, s);
            sync_cube();
            kept.ties = select(kept.bound == 0, 0.0f32, top_k - there.b);
        }
        if comptime!(s.top_p) {
            let limit = top_p * weight_sum_of(logits, &seen, &kept, &row, &mut shared, s);
            let least = kept.bound;
            kept.bound = bound_of(
                logits,
                &seen,
                least,
                limit,
                &row,
                &mut shared,
                Until::Less,
                s,
            );
            let there = above(logits, &seen, kept.bound, &row, &mut shared, 0, s);
            sync_cube();
            let ties = ((limit - there.a) / weight(kept.bound, &row, s)).ceil();
            let before = above(logits, &seen, kept.bound - 1, &row, &mut shared, 0, s);
            sync_cube();
            let mut equal = before.b - there.b;
            if kept.bound == least {
                equal = min(equal, kept.ties);
            }
            kept.ties = select(kept.bound == 0, 0.0f32, min(equal, ties));
        }
        if comptime!(s.min_p) {
            let mut gap = half_gap;
            if comptime!(s.seen) {
                if is_shrunk {
                    gap = shrunk(half_gap, &row.penalty, s);
                }
            }
            let least = (most * 0.5 + gap) * 2.0;
            let least = ordered(u32::reinterpret(least));
            let least = max(least, 1u32) - 1;
            if least > kept.bound {
                kept.bound = least;
                kept.ties = 0.0f32.runtime();
            }
        }
        let weight_sum = weight_sum_of(logits, &seen, &kept, &row, &mut shared, s);
        // Rounding must not reach the full sum.
        let limit = min(draws[CUBE_POS] * weight_sum, weight_sum * 0.9999998);
        bound = bound_of(
            logits,
            &seen,
            kept.bound,
            limit,
            &row,
            &mut shared,
            Until::NoMore,
            s,
        );
        let there = above(logits, &seen, bound, &row, &mut shared, 0, s);
        sync_cube();
        let before = above(logits, &seen, bound - 1, &row, &mut shared, 0, s);
        sync_cube();
        let mut equal = before.b - there.b;
        if bound == kept.bound {
            equal = min(equal, kept.ties);
        }
        let ahead = ((limit - there.a) / weight(bound, &row, s)).floor();
        place = max(min(ahead, equal - 1.0), 0.0f32);
        bound = select(is_drawn, bound, largest);
        place = select(is_drawn, place, 0.0f32);
    }

    // Equal elements are ordered by column: a lane counts adjacent ones.
    let own = comptime!(s.tile.row_vectors.div_ceil(s.tile.lanes));
    let first = lane * own;
    let last = min(first + own, vocab);
    let mut equal = 0u32.runtime();
    let mut at = first;
    while at < last {
        let key = key_at(logits, &seen, start + at, &row.penalty, is_shrunk, s);
        equal += select(key == bound && key != 0, 1u32, 0u32);
        at += 1usize;
    }
    counts[lane] = equal;
    sync_cube();
    let mut before = 0u32.runtime();
    let mut all = 0u32.runtime();
    for other in 0..comptime!(t.lanes) {
        let count = counts[other];
        before += select(other < lane, count, 0u32);
        all += count;
    }
    let wanted = u32::cast_from(place);
    if all == 0 {
        if lane == 0 {
            tokens[CUBE_POS] = i32::new(-1);
        }
    } else if before <= wanted && wanted < before + equal {
        let mut left = wanted - before;
        let mut at = first;
        let mut found = vocab.runtime();
        while at < last {
            let key = key_at(logits, &seen, start + at, &row.penalty, is_shrunk, s);
            if key == bound {
                if left == 0 && found == vocab {
                    found = at;
                }
                left = select(left == 0, 0u32, left - 1);
            }
            at += 1usize;
        }
        tokens[CUBE_POS] = i32::cast_from(found);
    }
}

/// Describes the launch of [`sample_rows`].
///
/// # Errors
/// [`KernelError`] if the device does not support cubes of so many units.
pub fn sample_text(
    client: &Client,
    vocab: usize,
    options: &SampleOptions,
) -> Result<String, KernelError> {
    let Sampled { tile, .. } = options.launch(client, vocab, true)?;
    Ok(format!(
        "1 row of {} units a cube, nothing sorted",
        tile.lanes
    ))
}

/// Samples a token from each row of `logits` `[rows, vocab]`, f32, by `draws` `[rows]`, f32 in [0, 1), into `tokens` `[rows]`, i32; −1 if no logit
/// is finite. `seen` `[rows, vocab]`, i32, marks seen tokens. All contiguous.
///
/// # Errors
/// [`KernelError`] if the device does not support cubes of so many units, or there are too many rows.
pub fn sample_rows(
    client: &Client,
    options: &SampleOptions,
    [rows, vocab]: [usize; 2],
    [logits, draws]: [&Handle; 2],
    seen: Option<&Handle>,
    tokens: &Handle,
) -> Result<(), KernelError> {
    let sampled = options.launch(client, vocab, seen.is_some())?;
    if rows == 0 {
        return Ok(());
    }
    let most = client.properties().hardware.max_cube_count.0;
    if rows > most as usize {
        return Err(KernelError::limit("rows of a launch", most, rows));
    }
    let elements = rows * vocab;
    let address = address_of(client, elements)?;
    let seen = seen.filter(|_| sampled.seen);
    let [factor, more] = options.factors();
    let [penalty, more_penalty] = options.penalties();
    // SAFETY: units read columns below the vocabulary of their cube's row, and one unit of a row writes its token; the buffers have the stated
    // lengths (see `buffer`).
    unsafe {
        sample::launch_unchecked(
            client,
            CubeCount::Static(rows as u32, 1, 1),
            CubeDim::new_1d(sampled.tile.lanes as u32),
            address,
            buffer(logits, elements),
            buffer(draws, rows),
            optional(seen, elements),
            buffer(tokens, rows),
            factor as f32,
            more as f32,
            options.top_k.unwrap_or(vocab) as f32,
            options.top_p as f32,
            (0.5 * options.min_p.ln() * options.temperature) as f32,
            PenaltyLaunch::new(penalty as f32, more_penalty as f32),
            sampled,
        );
    }
    Ok(())
}
