//! The bias of a tile of pairs, kept in shared memory because all members read it.

use cubecl::prelude::*;

use super::bias_store::PairPlace;
use super::options::*;
use super::pair_tile::PairTile;
use super::rows::pack_all;
use crate::arch::sm90::*;
use crate::shared::addressing::{Four, PlanWords};

/// Stores the bias of the unit's pairs in shared memory, in a slot of its own. All members share it.
#[cube]
pub fn keep_bias<S: Size, P: Size>(
    own_bias: u32,
    args: &ComptimeOption<PairArgs>,
    of: &PairPlace,
    rows: &UnitRows,
    plan: &PlanWords,
    #[comptime] t: PairTile,
) {
    let of_first = options_of(args, of.batch, of.head, comptime!(t.only_bias()));
    let bias = add_biases::<S>(
        Vector::<f32, S>::zeroed(),
        f32::new(0.0),
        args,
        &of_first,
        rows,
        plan,
        of.entry,
        comptime!(t.only_bias()),
    );
    // The bias has that type, so nothing is rounded.
    store_own::<P>(pack_all::<S, P>(bias, t.half), own_bias);
}

/// Adds the stored bias to scores. Scales them first, if they are still plain products.
#[cube]
pub fn add_kept_bias<S: Size>(
    s_in: Vector<f32, S>,
    own_bias: u32,
    scale: f32,
    #[comptime] t: PairTile,
) -> Vector<f32, S> {
    let mut s = s_in;
    let scaled = comptime!(t.score.softcap || t.other_biases().score.biased());
    #[unroll]
    for four in 0..comptime!(t.cols / 16) {
        let words = load_own::<Four>(own_bias + comptime!(four as u32 * 128 * 16));
        #[unroll]
        for i in 0..8usize {
            let at = comptime!(8 * four + i);
            let word = words.extract(comptime!(i / 2));
            let bias = unpack(word, comptime!(i % 2 == 1), t.half);
            if comptime!(scaled) {
                s.insert(at, s.extract(at) + bias);
            } else {
                s.insert(at, multiply_add(s.extract(at), scale, bias));
            }
        }
    }
    s
}
