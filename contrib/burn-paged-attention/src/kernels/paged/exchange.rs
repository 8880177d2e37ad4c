//! Exchange among the lanes of a key: by shuffles if there are plane operations. Otherwise a cube is one plane, and lanes use shared memory.

use cubecl::prelude::*;

use crate::kernels::paged::tile::Tile;
use blocksparse_cubecl::arch::ptx;

/// Reduce-scatters `values` over the lanes of each group: lane `l` gets the sums from `l · lane_scores` on (with copies if there are fewer sums than
/// lanes). Overwrites `values` and `shared`.
#[cube]
pub fn deal<A: Float>(values: &mut Array<A>, shared: &mut [A], #[comptime] t: Tile) -> Array<A> {
    let mut own = Array::<A>::new(comptime!(t.lane_scores()));
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(t.lanes);
    if comptime!(t.shuffles) {
        // Half of the remaining sums goes to the other half of the lanes, until each lane has its own.
        #[unroll]
        for step in 0..comptime!(t.lanes.ilog2()) {
            let distance = comptime!(t.lanes >> (step + 1));
            let left = comptime!(t.scores() >> step);
            if comptime!(left > 1) {
                let half = comptime!(left / 2);
                let upper = lane & distance != 0;
                #[unroll]
                for i in 0..half {
                    let low = values[i];
                    let high = values[comptime!(i + half)];
                    let kept = select(upper, high, low);
                    let given = select(upper, low, high);
                    values[i] = kept + shuffle_xor::<A>(given, comptime!(distance as u32), t);
                }
            } else {
                let other = shuffle_xor::<A>(values[0], comptime!(distance as u32), t);
                values[0] += other;
            }
        }
        #[unroll]
        for i in 0..comptime!(t.lane_scores()) {
            own[i] = values[i];
        }
    } else {
        let scores = comptime!(t.scores());
        #[unroll]
        for i in 0..scores {
            shared[unit * scores + i] = values[i];
        }
        sync_cube();
        let first = lane * comptime!(t.lane_scores()) / comptime!(t.copies());
        #[unroll]
        for i in 0..comptime!(t.lane_scores()) {
            let mut sum = A::new(0.0);
            for other in 0..comptime!(t.lanes) {
                sum += shared[(unit - lane + other) * scores + first + i];
            }
            own[i] = sum;
        }
        sync_cube();
    }
    own
}

/// All-gathers the scores of the group: the inverse of [`deal`] without a sum.
#[cube]
pub fn collect<A: Float>(own: &Array<A>, shared: &mut [A], #[comptime] t: Tile) -> Array<A> {
    let mut all = Array::<A>::new(comptime!(t.scores()));
    let count = comptime!(t.lane_scores());
    if comptime!(t.shuffles) {
        let first = UNIT_POS_PLANE - UNIT_POS_PLANE % comptime!(t.lanes as u32);
        #[unroll]
        for i in 0..comptime!(t.scores()) {
            let source = first + comptime!(t.lane_of(i) as u32);
            all[i] = shuffle::<A>(own[comptime!(i % count)], source, t);
        }
    } else {
        let unit = UNIT_POS as usize;
        let lane = unit % comptime!(t.lanes);
        #[unroll]
        for i in 0..count {
            shared[unit * count + i] = own[i];
        }
        sync_cube();
        #[unroll]
        for i in 0..comptime!(t.scores()) {
            let source = unit - lane + comptime!(t.lane_of(i));
            all[i] = shared[source * count + comptime!(i % count)];
        }
        sync_cube();
    }
    all
}

/// Broadcasts a number of each row, on which the row's lanes agree, to all lanes.
#[cube]
pub fn of_rows<A: Float>(own: A, shared: &mut [A], #[comptime] t: Tile) -> Array<A> {
    let mut all = Array::<A>::new(comptime!(t.rows));
    if comptime!(t.shuffles) {
        let first = UNIT_POS_PLANE - UNIT_POS_PLANE % comptime!(t.lanes as u32);
        #[unroll]
        for row in 0..comptime!(t.rows) {
            let source = first + comptime!((row * t.row_lanes()) as u32);
            all[row] = shuffle::<A>(own, source, t);
        }
    } else {
        let unit = UNIT_POS as usize;
        let lane = unit % comptime!(t.lanes);
        shared[unit] = own;
        sync_cube();
        #[unroll]
        for row in 0..comptime!(t.rows) {
            all[row] = shared[unit - lane + comptime!(row * t.row_lanes())];
        }
        sync_cube();
    }
    all
}

/// Reduces the maximum, or the sum, over the lanes of a row, for all of them.
#[cube]
pub fn across_row<A: Float>(
    own: A,
    shared: &mut [A],
    #[comptime] max: bool,
    #[comptime] t: Tile,
) -> A {
    let mut result = own;
    if comptime!(t.shuffles) {
        #[unroll]
        for step in 0..comptime!(t.row_lanes().ilog2()) {
            let other = shuffle_xor::<A>(result, comptime!(1u32 << step), t);
            result = combine::<A>(result, other, max);
        }
    } else {
        let unit = UNIT_POS as usize;
        let first = unit - unit % comptime!(t.row_lanes());
        shared[unit] = own;
        sync_cube();
        result = shared[first];
        for other in 1..comptime!(t.row_lanes()) {
            result = combine::<A>(result, shared[first + other], max);
        }
        sync_cube();
    }
    result
}

#[cube]
fn combine<A: Float>(a: A, b: A, #[comptime] max: bool) -> A {
    if comptime!(max) { a.max(b) } else { a + b }
}

/// Shuffles with the lane at XOR distance `distance`. On CUDA, CubeCL's shuffles query the active lanes each time; the PTX version assumes that all
/// are active.
#[cube]
pub fn shuffle_xor<A: Float>(x: A, #[comptime] distance: u32, #[comptime] t: Tile) -> A {
    if comptime!(t.ptx) {
        A::cast_from(ptx::shuffle_xor(f32::cast_from(x), distance))
    } else {
        plane_shuffle_xor(x, distance)
    }
}

/// Shuffles from a lane.
#[cube]
pub fn shuffle<A: Float>(x: A, lane: u32, #[comptime] t: Tile) -> A {
    if comptime!(t.ptx) {
        A::cast_from(ptx::shuffle(f32::cast_from(x), lane))
    } else {
        plane_shuffle(x, lane)
    }
}

/// Returns whether `x` differs from `y` in any lane.
#[cube]
pub fn any_differ<A: Float>(x: A, y: A, #[comptime] t: Tile) -> bool {
    if comptime!(t.ptx) {
        ptx::any_differ(f32::cast_from(x), f32::cast_from(y)) != 0u32
    } else {
        plane_any(x != y)
    }
}
