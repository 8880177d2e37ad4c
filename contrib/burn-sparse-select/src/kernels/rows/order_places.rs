//! What a pass of a sort by bucket reads and writes.

use cubecl::prelude::*;

/// The bucket of what is no token.
pub(crate) const NONE: u32 = 0xffff_ffff;

/// Of a sort.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Sizes {
    pub groups: usize,
    pub length: usize,
    /// Groups of a list.
    pub rounds: usize,
    /// Places of a group.
    pub room: usize,
    /// Buckets.
    pub count: u32,
    /// The lowest bit that is sorted by.
    pub shift: u32,
}

/// The token at place `at` of a group in the order before, and so many bits that it is sorted by; [`NONE`] behind the last.
#[cube]
pub(crate) fn token_at(
    buckets: &[i32],
    before: &[i32],
    at: usize,
    group: usize,
    sizes: &Sizes,
    #[comptime] bits: u32,
    #[comptime] is_first: bool,
) -> (usize, u32) {
    let first = group * sizes.length;
    let mut token = at;
    let mut digit = NONE.runtime();
    if at < sizes.length {
        if comptime!(!is_first) {
            token = before[first + at] as usize;
        }
        let bucket = max(buckets[first + token], 0i32) as u32;
        let bucket = min(bucket, sizes.count - 1u32);
        digit = (bucket >> sizes.shift) & comptime!((1u32 << bits) - 1);
    }
    (token, digit)
}

/// Puts a token to a place of its group.
#[cube]
pub(crate) fn put(
    tokens: &mut [i32],
    places: &mut [i32],
    choices: &mut [i32],
    group: usize,
    token: usize,
    place: u32,
    sizes: &Sizes,
) {
    let list = group / sizes.rounds;
    let round = group % sizes.rounds;
    let at = group * sizes.room + place as usize;
    tokens[at] = token as i32;
    choices[at] = (token * sizes.rounds + round) as i32;
    let own = (list * sizes.length + token) * sizes.rounds + round;
    places[own] = (round * sizes.room) as i32 + place as i32;
}

/// What fills up a group's places.
#[cube]
pub(crate) fn fill(
    tokens: &mut [i32],
    choices: &mut [i32],
    group: usize,
    #[comptime] units: usize,
    sizes: &Sizes,
) {
    let mut at = sizes.length + UNIT_POS as usize;
    while at < sizes.room {
        tokens[group * sizes.room + at] = -1i32;
        choices[group * sizes.room + at] = -1i32;
        at += units;
    }
}
