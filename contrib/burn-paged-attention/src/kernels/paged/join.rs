//! Joins the softmax states of a cube, and the shares of a page list in the cube that ends last.

// Integers in kernels lack `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use crate::kernels::paged::mma_tile::{MmaTile, UNROLLED};
use crate::kernels::paged::page_list::{Share, Sizes, cube_of};
use blocksparse_cubecl::arch::ptx::{global_address, pack, read_four_words_once, val};
use blocksparse_cubecl::shared::addressing::Four;
use blocksparse_cubecl::shared::score::{LOW, LOWEST_MAX};

/// Softmax states of a cube in shared memory: `outs` `[parts, rows, width]`, `tops` and `totals` `[parts, rows]`.
#[derive(CubeType)]
pub struct Parts<A: Float> {
    pub outs: Shared<[A]>,
    pub tops: Shared<[A]>,
    pub totals: Shared<[A]>,
}

/// Allocates shared memory for `parts`, `rows` and `width` of `shape`; its last number is the units of the cube.
#[cube]
pub fn room_for<A: Float>(#[comptime] shape: [usize; 4]) -> Parts<A> {
    let rows = comptime!(shape[0] * shape[1]);
    Parts::<A> {
        outs: Shared::<[A]>::new_slice(comptime!(rows * shape[2])),
        tops: Shared::<[A]>::new_slice(rows),
        totals: Shared::<[A]>::new_slice(rows),
    }
}

/// Results of shares: outputs `[items, shared_heads, group_rows, value_width]`; and their lse, followed by the first share and the number of shares
/// of each page list.
#[derive(CubeType, CubeLaunch)]
pub struct ShareOuts<A: Float> {
    pub partial: Box<[A]>,
    pub stats: Box<[A]>,
}

/// Joins parts in order: `out = Σ_x exp(top_x − top) out_x / total`, `lse = top + ln total`.
#[cube]
pub fn join_parts<A: Float>(
    of: &Parts<A>,
    to: &mut ShareOuts<A>,
    share: &Share,
    sizes: &Sizes,
    #[comptime] shape: [usize; 4],
) {
    let parts = comptime!(shape[0]);
    let rows = comptime!(shape[1]);
    let width = comptime!(shape[2]);
    let cube = cube_of(sizes);
    let first_row = cube.block * rows;
    let first = (cube.item * sizes.shared_heads + cube.shared_head) * sizes.group_rows + first_row;
    let unit = UNIT_POS as usize;
    let mut at = unit;
    while at < comptime!(rows * width) {
        let row = at / width;
        if first_row + row < sizes.group_rows {
            let mut top = A::new(LOWEST_MAX);
            #[unroll]
            for part in 0..parts {
                top = top.max(of.tops[part * rows + row]);
            }
            let mut total = A::new(0.0);
            let mut sum = A::new(0.0);
            #[unroll]
            for part in 0..parts {
                let weight = (of.tops[part * rows + row] - top).exp();
                total += weight * of.totals[part * rows + row];
                sum += weight * of.outs[part * comptime!(rows * width) + at];
            }
            let is_one = total > A::new(0.0);
            let divisor = select(is_one, total, A::new(1.0));
            to.partial[first * width + at] = sum / divisor;
            if at % width == 0 {
                to.stats[first + row] = select(is_one, top + divisor.ln(), A::new(LOW));
            }
        }
        at += comptime!(shape[3]);
    }
    let is_first = cube.block == 0 && cube.shared_head == 0 && cube.item == share.first_item;
    if unit == 0 && is_first {
        to.stats[sizes.info + 2 * share.page_list] = A::cast_from(share.first_item);
        to.stats[sizes.info + 2 * share.page_list + 1] = A::cast_from(share.items);
    }
}

/// Returns how many cubes arrived before, of a counter that wraps to 0 after `most`. Their earlier writes are visible afterwards.
#[cube]
fn arrive(counter: u64, most: u32) -> u32 {
    let o: u32;
    gpu_asm!("fence.acq_rel.gpu; atom.global.inc.u32 {o}, [{a}], {m}; fence.acq_rel.gpu;",
        o = out(_) o, a = in(_) val::<u64>(counter), m = in(_) val::<u32>(most));
    o
}

/// Tensors for joining the shares of a page list.
#[derive(CubeType, CubeLaunch)]
pub struct Joined {
    /// `[batch, kv_heads, blocks of queries]`: zeros before and after a call.
    counters: Box<[u32]>,
    /// `[heads]`
    sinks: ComptimeOption<Box<[f32]>>,
    /// `[batch, heads, rows, value_width]` in words, and `[batch, heads, rows]`.
    out: Box<[u32]>,
    lse: Box<[f32]>,
}

/// Joins the shares of a page list if this cube's share is the last to be written: `lse = ln(Σ_x exp(lse_x) + exp(sink))` and
/// `out = Σ_x exp(lse_x − lse) · out_x` for the cube's queries, in the order of the shares, like [`merge`](crate::kernels::paged::merge::merge).
/// `head` is the KV head counted over all sequences; `shared` has one element.
#[cube]
pub fn join_shares(
    from: &ShareOuts<f32>,
    to: &mut Joined,
    shared: &mut [u32],
    share: &Share,
    head: usize,
    sizes: &Sizes,
    #[comptime] t: MmaTile,
) {
    let cube = cube_of(sizes);
    let unit = UNIT_POS as usize;
    let list_head = share.page_list * sizes.shared_heads + cube.shared_head;
    let counter = list_head * sizes.row_blocks + cube.block;
    let counter = global_address::<u32>(&to.counters[..]) + counter as u64 * 4u64;
    // Wait until all units have written.
    sync_cube();
    if unit == 0 {
        shared[0] = arrive(counter, share.items as u32 - 1u32);
    }
    sync_cube();
    if shared[0] + 1u32 == share.items as u32 {
        let vectors = comptime!(t.value_width / 4);
        let first_row = cube.block * comptime!(t.rows());
        let rows = min(sizes.group_rows - first_row, comptime!(t.rows()));
        let step = sizes.shared_heads * sizes.group_rows;
        let start = (share.first_item * sizes.shared_heads + cube.shared_head) * sizes.group_rows
            + first_row;
        let address = global_address::<f32>(&from.partial[..]);
        let mut at = unit;
        while at < rows * vectors {
            let row = at / vectors;
            let vector = at % vectors;
            let query = head * sizes.group_rows + first_row + row;
            let mut top = LOWEST_MAX.runtime();
            let mut total = 0.0f32.runtime();
            #[comptime]
            match &to.sinks {
                ComptimeOption::Some(sinks) => {
                    let heads = sizes.tables * sizes.shared_heads * sizes.group_rows / sizes.rows;
                    let sink = sinks[query / sizes.rows % heads];
                    top = top.max(sink);
                    total = (sink - top).exp();
                }
                ComptimeOption::None => {}
            }
            let mut sum = Vector::<f32, Four>::zeroed();
            let mut item = 0usize;
            while item < share.items {
                let mut x = Array::<Vector<u32, Four>>::new(UNROLLED);
                let mut logs = Array::<f32>::new(UNROLLED);
                let mut highest = top;
                #[unroll]
                for i in 0..UNROLLED {
                    let place = start + min(item + i, share.items - 1) * step + row;
                    let source = address + (place * vectors + vector) as u64 * 16u64;
                    x[i] = read_four_words_once(source, 0u32, 1u32);
                    logs[i] = select(item + i < share.items, from.stats[place], LOW);
                    highest = highest.max(logs[i]);
                }
                let shrink = (top - highest).exp();
                top = highest;
                total *= shrink;
                sum *= Vector::<f32, Four>::empty().fill(shrink);
                #[unroll]
                for i in 0..UNROLLED {
                    let weight = (logs[i] - top).exp();
                    total += weight;
                    #[unroll]
                    for word in 0..4usize {
                        let number = f32::reinterpret(x[i].extract(word));
                        sum.insert(word, sum.extract(word) + weight * number);
                    }
                }
                item += UNROLLED;
            }
            let is_one = total > 0.0f32;
            let divisor = select(is_one, total, 1.0f32);
            let inverse = 1.0f32 / divisor;
            #[unroll]
            for pair in 0..2usize {
                let low = sum.extract(comptime!(2 * pair)) * inverse;
                let high = sum.extract(comptime!(2 * pair + 1)) * inverse;
                to.out[(query * vectors + vector) * 2 + pair] = pack(low, high, t.half);
            }
            if vector == 0 {
                let log = top + divisor.ln();
                to.lse[query] = select(is_one, log, f32::new(f32::NEG_INFINITY));
            }
            at += comptime!(t.units());
        }
    }
}
