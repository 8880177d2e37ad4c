//! Attention by blocks. A cube has the keys and values of a block in shared memory, and the queries that selected it are streamed, with as many heads of
//! queries as fill the 64 rows of a warpgroup's step. A block is read once for very many queries, where a query's mainloop reads it for each. The memory
//! traffic is then rows of q, and the output part of each selection, which [`merge`](crate::kernels::listed::merge) merges.
//!
//! ```text
//! cube, for tiles of places of the same block, one after the other:
//!     copy K and V of the block                                 cp.async, by all warps
//!     every warpgroup, for every third step of 64 rows:
//!         wait until all warps' copies of q are complete        mbarrier
//!         start s = q · Kᵀ                                      wgmma
//!         start to copy this warp's rows of q of the next step  cp.async
//!         p = exp2(s − m)    l = Σ p                            registers
//!         o = p · V                                             wgmma, p in registers
//!         write o / l and m + log l                             in the order of places
//! ```
//!
//! The gradient with respect to queries is the same loop, with rows of dO next to those of q: `dp = dO · Vᵀ`, `ds = exp2(s − lse) ∘ (dp − delta)` and a part
//! `ds · K` per selection.
//!
//! Warpgroups share only keys and values, so one computes weights or writes while another multiplies. A stage of q is overwritten one step after its last read:
//! a warp that passes a step's barrier knows that all warps of the warpgroup have finished the weights of the step before.

// Compile-time conditions stay separate from runtime ones; kernels have no `is_multiple_of`.
#![allow(clippy::collapsible_if, clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use blocksparse_cubecl::arch::sm90::*;
use blocksparse_cubecl::arch::swizzled::{
    ROWS_AT_A_TIME, Spans, copies_are_there, copy_row, lane_row, own_copies,
};
use blocksparse_cubecl::hopper::output::{OutShape, RowPosition, quad_sum, store_row, write_row};
use blocksparse_cubecl::hopper::rows::{ROW_PAIR, pack_all};
use blocksparse_cubecl::hopper::softmax::softmax;
use blocksparse_cubecl::mma::tile::NOWHERE;
use blocksparse_cubecl::shared::addressing::Four;
use blocksparse_cubecl::shared::score::LOWEST_MAX;

use crate::kernels::listed::views::{Input, first_row};
use crate::kernels::listed::warpgroups::mainloop::{by_scores, weights};
use crate::kernels::listed::warpgroups::tile::{GROUP_ROWS, WarpgroupTile};

/// Number of q stages of a warpgroup: one is multiplied while the next is copied.
const STAGES: usize = 2;

/// Compile-time shape of the kernel, part of the key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockTile {
    pub half: Half,
    /// Width of queries and keys, a multiple of 64.
    pub head_dim: usize,
    /// Width of values, a multiple of 64.
    pub value_dim: usize,
    /// Number of heads that share a list, a divisor of 64.
    pub heads: usize,
    /// Number of keys of a block: 64 or 128.
    pub block: usize,
    /// Number of places of a tile.
    pub tile: usize,
    /// True if rows of the output's gradient follow those of queries.
    pub backward: bool,
    /// True if rows of keys or values are more than 4 GB apart.
    pub far_rows: bool,
}

impl BlockTile {
    /// Returns the number of warpgroups of a cube. In the backward pass registers for two matmuls of scores limit it to 2.
    fn warpgroups(&self) -> usize {
        if self.backward { 2 } else { 3 }
    }

    fn warps(&self) -> usize {
        4 * self.warpgroups()
    }

    pub fn units(&self) -> usize {
        32 * self.warps()
    }

    /// Returns the width of the output.
    pub fn out_dim(&self) -> usize {
        match self.backward {
            true => self.head_dim,
            false => self.value_dim,
        }
    }

    /// Returns the number of places of a step.
    fn step_places(&self) -> usize {
        GROUP_ROWS / self.heads
    }

    fn tile_steps(&self) -> usize {
        self.tile / self.step_places()
    }

    fn keys(&self) -> Spans {
        Spans {
            rows: self.block,
            dim: self.head_dim,
            far: self.far_rows,
        }
    }

    fn values(&self) -> Spans {
        Spans {
            dim: self.value_dim,
            ..self.keys()
        }
    }

    /// Returns the layout of the rows of a step.
    fn rows(&self) -> Spans {
        Spans::far(GROUP_ROWS, self.head_dim)
    }

    /// Returns the layout of the rows of width value_dim after them, which only the backward pass has.
    fn second(&self) -> Spans {
        Spans::far(GROUP_ROWS, self.value_dim)
    }

    fn step_bytes(&self) -> usize {
        let second = match self.backward {
            true => self.second().bytes(),
            false => 0,
        };
        self.rows().bytes() + second
    }

    fn values_offset(&self) -> usize {
        self.keys().bytes()
    }

    /// Returns the offset of the first warpgroup's stages; those of the others follow.
    fn ring_offset(&self) -> usize {
        self.values_offset() + self.values().bytes()
    }

    fn group_bytes(&self) -> usize {
        STAGES * self.step_bytes()
    }

    /// Returns the offset of the barriers, one per stage.
    fn full(&self) -> usize {
        self.ring_offset() + self.warpgroups() * self.group_bytes()
    }

    /// Returns the bytes of a cube's shared memory.
    pub fn shared_bytes(&self) -> usize {
        self.full() + self.warpgroups() * STAGES * 8
    }

    /// Returns the number of registers of output sums.
    pub fn sums(&self) -> usize {
        WarpgroupTile::sums(self.out_dim())
    }
}

/// Places that a cube processes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Places {
    /// First list of the launch over all batch entries and KV heads, and number of KV heads.
    pub first_list: u32,
    pub kv_heads: u32,
    /// Number of tiles of a list, and of a cube.
    pub tiles: u32,
    pub run: u32,
}

/// Attends from the queries of each tile to the tile's block. `queries` `[lists, tiles · tile]` holds the query at each place, and `tile_blocks`
/// `[lists, tiles]` the block of each tile; both are negative for empty entries, and unused tiles come last. Writes for each place and head a part of the
/// output to `parts` `[lists of the launch, tiles · tile, heads, value_dim]`, and its lse to `logs`; entries of empty places are unspecified. In the backward
/// pass `logs` holds lse and delta of each row instead, and parts are those of dQ, of width head_dim.
#[cube(launch_unchecked)]
pub fn by_block<S: Size, P: Size, O: Size>(
    q: Input,
    k: Input,
    v: Input,
    grad_out: Input,
    queries: &[i32],
    tile_blocks: &[i32],
    parts: &mut [Vector<u32, Four>],
    logs: &mut [f32],
    places: Places,
    scale: f32,
    log2_scale: f32,
    #[comptime] t: BlockTile,
) {
    let (of_keys, of_values) = comptime!((t.keys(), t.values()));
    let (of_rows, second) = comptime!((t.rows(), t.second()));
    let warpgroups = comptime!(t.warpgroups() as u32);
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let group = warp / 4;
    if UNIT_POS_X == 0 {
        #[unroll]
        for i in 0..comptime!((t.warpgroups() * STAGES) as u32) {
            barrier_init(base + comptime!(t.full() as u32 + 8 * i), 4u32);
        }
        barrier_fence();
    }
    let list = places.first_list + CUBE_POS_Y;
    let (batch, kv_head) = (list / places.kv_heads, list % places.kv_heads);
    let keys = first_row(&k, batch, kv_head);
    let values = first_row(&v, batch, kv_head);
    let first_head = kv_head * comptime!(t.heads as u32);
    let own = Step {
        rows: first_row(&q, batch, first_head),
        head: q.strides.head,
        query: q.strides.row,
        grads: first_row(&grad_out, batch, first_head),
        grad_head: grad_out.strides.head,
        grad_query: grad_out.strides.row,
        ring: base + comptime!(t.ring_offset() as u32) + group * comptime!(t.group_bytes() as u32),
        warp: warp % 4,
        lane,
    };
    let full = base + comptime!(t.full() as u32) + group * comptime!(8 * STAGES as u32);
    let q_desc = descriptor(own.ring, 16usize);
    let out_desc = descriptor(own.ring + comptime!(of_rows.bytes() as u32), 16usize);
    let values_at = base + comptime!(t.values_offset() as u32);
    let (k_desc, v_desc) = (descriptor(base, 16usize), descriptor(values_at, 16usize));
    let k_depth = descriptor(base, comptime!(of_keys.span_bytes()));
    let v_depth = descriptor(values_at, comptime!(of_values.span_bytes()));
    let of_list = list * places.tiles;
    let shape = comptime!(OutShape {
        value_dim: t.out_dim(),
        half: t.half,
        dropout: false,
    });

    let last = min(CUBE_POS_X * places.run + places.run, places.tiles);
    let mut tile = CUBE_POS_X * places.run;
    // Number of earlier steps of the warpgroup.
    let mut number = 0u32.runtime();
    while tile < last {
        let block = tile_blocks[(of_list + tile) as usize];
        let mut end = last;
        if block >= 0i32 {
            end = tile + 1;
            let mut is_same = end < last;
            while is_same {
                is_same = false;
                if tile_blocks[(of_list + end) as usize] == block {
                    end += 1u32;
                    is_same = end < last;
                }
            }
            // After this no warp reads the previous block.
            sync_cube();
            let first_key = block as u32 * comptime!(t.block as u32);
            let mut four = warp;
            while four < comptime!((t.block / ROWS_AT_A_TIME) as u32) {
                let row = four * comptime!(ROWS_AT_A_TIME as u32) + lane_row(lane);
                let key = first_key + row;
                let key = select(key < k.strides.len, key, comptime!(NOWHERE).runtime());
                copy_row(base, row, keys, key, k.strides.row, lane, of_keys);
                copy_row(values_at, row, values, key, v.strides.row, lane, of_values);
                four += comptime!(t.warps() as u32);
            }
            let first = (of_list + tile) * comptime!(t.tile as u32);
            let steps = uniform((end - tile) * comptime!(t.tile_steps() as u32));
            let mut step = group;
            let mut names = Array::<u32>::new(comptime!(GROUP_ROWS / 4 / ROWS_AT_A_TIME));
            if step < steps {
                read_names(queries, &mut names, first, step, &own, t);
                copy_step(&names, number, &own, t);
            }
            own_copies();
            sync_cube();
            if step < steps {
                copies_are_there(full + number % comptime!(STAGES as u32) * 8, lane);
            }
            let next = step + warpgroups;
            if next < steps {
                read_names(queries, &mut names, first, next, &own, t);
            }
            let seen = k.strides.len - first_key;
            while step < steps {
                let stage = number % comptime!(STAGES as u32);
                barrier_wait(full + stage * 8, number / comptime!(STAGES as u32) % 2);
                let within = u64::cast_from(stage * comptime!((t.step_bytes() >> 4) as u32));
                let s_started = product::<S>(
                    q_desc + within,
                    k_desc,
                    comptime!(of_rows.product(of_keys, t.half, t.head_dim)),
                );
                // Registers of a wgmma in flight must not be copied, so this is an expression instead of an assignment.
                let dp_started = if comptime!(t.backward) {
                    product::<S>(
                        out_desc + within,
                        v_desc,
                        comptime!(second.product(of_values, t.half, t.value_dim)),
                    )
                } else {
                    Vector::<f32, S>::zeroed()
                };
                let row = own.warp * 16 + lane / 4;
                let known = known_of(&logs[..], queries, first, step, row, list, q.strides.len, t);
                let next = step + warpgroups;
                if next < steps {
                    copy_step(&names, number + 1, &own, t);
                    let behind = next + warpgroups;
                    if behind < steps {
                        read_names(queries, &mut names, first, behind, &own, t);
                    }
                }
                let under_way = comptime!(if t.backward { 1usize } else { 0usize });
                let s = wait::<S>(s_started, under_way, comptime!(t.block / 2));
                let s = hide_behind::<S>(s, seen, lane, t.block);
                let place = (CUBE_POS_Y * places.tiles + tile) * comptime!(t.tile as u32)
                    + step * comptime!(t.step_places() as u32);
                let first_row = place * comptime!(t.heads as u32);
                let upper = RowPosition {
                    position: row,
                    exists: true.runtime(),
                };
                let lower = RowPosition {
                    position: row + ROW_PAIR,
                    exists: true.runtime(),
                };
                if comptime!(t.backward) {
                    let p = weights::<S>(s, known.lse0, known.lse1, log2_scale, t.block);
                    let dp = wait::<S>(dp_started, 0usize, comptime!(t.block / 2));
                    let ds = by_scores::<S>(p, dp, known.delta0, known.delta1, t.block);
                    let left = pack_all::<S, P>(ds, t.half);
                    let started = weigh::<P, O>(left, k_depth, t.half, t.head_dim);
                    if next < steps {
                        copies_are_there(full + (number + 1) % comptime!(STAGES as u32) * 8, lane);
                    }
                    let dq = wait::<O>(started, 0usize, comptime!(t.head_dim / 2));
                    write_row::<O>(parts, &dq, 0usize, scale, first_row, &upper, shape);
                    write_row::<O>(parts, &dq, 2usize, scale, first_row, &lower, shape);
                } else {
                    let (least, none) = (f32::new(LOWEST_MAX), f32::new(0.0));
                    let soft = softmax::<S>(s, 0u32, least, least, none, none, log2_scale, None);
                    let p = pack_all::<S, P>(soft.p, t.half);
                    let started = weigh::<P, O>(p, v_depth, t.half, t.value_dim);
                    if next < steps {
                        copies_are_there(full + (number + 1) % comptime!(STAGES as u32) * 8, lane);
                    }
                    let o = wait::<O>(started, 0usize, comptime!(t.value_dim / 2));
                    let (top0, top1) = (soft.m0 * log2_scale, soft.m1 * log2_scale);
                    let (sum0, sum1) = (quad_sum(soft.l0), quad_sum(soft.l1));
                    let one = f32::new(1.0);
                    store_row::<O>(
                        parts, logs, &o, 0usize, top0, sum0, one, first_row, &upper, shape,
                    );
                    store_row::<O>(
                        parts, logs, &o, 2usize, top1, sum1, one, first_row, &lower, shape,
                    );
                }
                number += 1u32;
                step = next;
            }
        }
        tile = end;
    }
}

/// Addresses and strides by which a warp copies its rows of a step.
#[derive(CubeType, Clone, Copy)]
struct Step {
    /// Address of the row of the first query and head of the list.
    rows: u64,
    /// Pieces of 16 bytes from one head to the next, and from one query to the next.
    head: u64,
    query: u64,
    /// Address and strides of the output's gradient, likewise.
    grads: u64,
    grad_head: u64,
    grad_query: u64,
    /// Address of the warpgroup's stages.
    ring: u32,
    /// Index of the warp in the warpgroup.
    warp: u32,
    lane: u32,
}

/// Reads the queries of the rows that the lane copies of a step, or [`NOWHERE`].
#[cube]
fn read_names(
    queries: &[i32],
    names: &mut Array<u32>,
    first: u32,
    step: u32,
    own: &Step,
    #[comptime] t: BlockTile,
) {
    let first = first + step * comptime!(t.step_places() as u32);
    #[unroll]
    for i in 0..comptime!(GROUP_ROWS / 4 / ROWS_AT_A_TIME) {
        let row = own.warp * 16 + comptime!((i * ROWS_AT_A_TIME) as u32) + lane_row(own.lane);
        let query = queries[(first + row / comptime!(t.heads as u32)) as usize];
        names[i] = select(query >= 0i32, query as u32, comptime!(NOWHERE).runtime());
    }
}

/// Starts to copy the warp's rows of a step.
#[cube]
fn copy_step(names: &Array<u32>, number: u32, own: &Step, #[comptime] t: BlockTile) {
    let (of, second) = comptime!((t.rows(), t.second()));
    let stage = number % comptime!(STAGES as u32);
    let matrix = own.ring + stage * comptime!(t.step_bytes() as u32);
    #[unroll]
    for i in 0..comptime!(GROUP_ROWS / 4 / ROWS_AT_A_TIME) {
        let row = own.warp * 16 + comptime!((i * ROWS_AT_A_TIME) as u32) + lane_row(own.lane);
        let head = u64::cast_from(row % comptime!(t.heads as u32)) * 16;
        let from = own.rows + head * own.head;
        copy_row(matrix, row, from, names[i], own.query, own.lane, of);
        if comptime!(t.backward) {
            let from = own.grads + head * own.grad_head;
            let behind = matrix + comptime!(of.bytes() as u32);
            copy_row(
                behind,
                row,
                from,
                names[i],
                own.grad_query,
                own.lane,
                second,
            );
        }
    }
}

/// lse and delta of the unit's two rows of a step, for the backward pass.
#[derive(CubeType, Clone, Copy)]
struct RowPair {
    lse0: f32,
    delta0: f32,
    lse1: f32,
    delta1: f32,
}

/// Reads them. Rows of empty places get values that contribute nothing.
#[cube]
fn known_of(
    stats: &[f32],
    queries: &[i32],
    first: u32,
    step: u32,
    row: u32,
    list: u32,
    seq_q: u32,
    #[comptime] t: BlockTile,
) -> RowPair {
    let mut of = Array::<f32>::new(4usize);
    let heads = comptime!(t.heads as u32);
    #[unroll]
    for i in 0..2usize {
        let (lse, delta) = comptime!((2 * i, 2 * i + 1));
        of[lse] = f32::new(0.0);
        of[delta] = f32::new(0.0);
        if comptime!(t.backward) {
            let row = row + comptime!(i as u32 * ROW_PAIR);
            let place = first + step * comptime!(t.step_places() as u32) + row / heads;
            let query = queries[place as usize];
            if query >= 0i32 {
                let at = ((list * heads + row % heads) * seq_q + query as u32) as usize * 2;
                of[lse] = stats[at];
                of[delta] = stats[at + 1];
            }
        }
    }
    RowPair {
        lse0: of[0],
        delta0: of[1],
        lse1: of[2],
        delta1: of[3],
    }
}

/// Masks keys after the last one.
#[cube]
fn hide_behind<S: Size>(
    s_in: Vector<f32, S>,
    seen: u32,
    lane: u32,
    #[comptime] cols: usize,
) -> Vector<f32, S> {
    let mut s = s_in;
    if uniform(seen) < comptime!(cols as u32) {
        let infinity = f32::new(f32::NEG_INFINITY);
        let own = lane % 4 * 2;
        #[unroll]
        for at in 0..comptime!(cols / 2) {
            let column = own + comptime!((at / 4 * 8 + at % 2) as u32);
            s.insert(at, select(column < seen, s.extract(at), infinity));
        }
    }
    s
}
