//! PTX helpers: ballots, shuffles of words, bit operations, and wgmma with the left factor in registers.

use cubecl::prelude::*;

use blocksparse_cubecl::arch::ptx::{Half, val};
use blocksparse_cubecl::arch::tma::{DEPTH, ROW_ELEMENTS, registers};

/// Returns a ballot over the warp: one bit per unit whose `x` is greater than its `y`.
#[cube]
pub fn votes_above(x: u32, y: u32) -> u32 {
    let o: u32;
    gpu_asm!("{{ .reg .pred p; setp.gt.u32 p, {x}, {y}; vote.sync.ballot.b32 {o}, p, 0xffffffff; }}",
        o = out(_) o, x = in(_) val::<u32>(x), y = in(_) val::<u32>(y), options(nomem));
    o
}

/// Returns lane `lane`'s word.
#[cube]
pub fn word_of(x: u32, lane: u32) -> u32 {
    let o: u32;
    gpu_asm!("shfl.sync.idx.b32 {o}, {i}, {l}, 31, 0xffffffff;", o = out(_) o, i = in(_) val::<u32>(x), l = in(_) val::<u32>(lane), options(nomem));
    o
}

/// Returns the previous lane's word; the first lane gets its own.
#[cube]
pub fn word_before(x: u32) -> u32 {
    let o: u32;
    gpu_asm!("shfl.sync.up.b32 {o}, {i}, 1, 0, 0xffffffff;", o = out(_) o, i = in(_) val::<u32>(x), options(nomem));
    o
}

/// Counts the set bits.
#[cube]
pub fn count_bits(x: u32) -> u32 {
    let o: u32;
    gpu_asm!("popc.b32 {o}, {i};", o = out(_) o, i = in(_) val::<u32>(x), options(pure, nomem));
    o
}

/// Returns the index of the lowest set bit; at least one bit must be set.
#[cube]
pub fn lowest_bit(x: u32) -> u32 {
    let o: u32;
    gpu_asm!("{{ .reg .b32 r; brev.b32 r, {i}; bfind.shiftamt.u32 {o}, r; }}", o = out(_) o, i = in(_) val::<u32>(x), options(pure, nomem));
    o
}

/// Returns the PTX of `a · bᵀ` `[64, cols]`. A warp's 16 rows of `a` are in registers that follow the sums; `b` is K-major in shared memory, in spans of 64
/// columns.
fn register_product_text(half: Half, cols: usize, depth: usize, span: usize) -> String {
    let (ty, sums) = (half.ptx(), cols / 2);
    let mut text = String::from("{ .reg .b64 b; wgmma.fence.sync.aligned; ");
    for k in 0..depth {
        let (of, within) = (k * DEPTH / ROW_ELEMENTS, k * DEPTH % ROW_ELEMENTS * 2);
        text += &format!(
            "add.s64 b, $3, {}; wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.{ty}.{ty} {{{}}}, {{{}}}, b, {}, 1, 1, 0; ",
            (of * span + within) >> 4,
            registers(0, sums),
            registers(sums + 4 * k, 4),
            usize::from(k > 0),
        );
    }
    text + "wgmma.commit_group.sync.aligned; /* $0 $1 $2 */ }"
}

fn wait_product_text(sums: usize) -> String {
    let mut text = String::from("{ /* $0 $1 */ wgmma.wait_group.sync.aligned 0; ");
    for i in 0..sums {
        text += &format!("mov.f32 %{i}, %{}; ", sums + i);
    }
    text + "}"
}

/// Starts the product of rows `depth` times 16 wide, whose words are in two vectors. [`wait_product`] must run before the result is read.
#[cube]
pub fn register_product<P: Size, R: Size, S: Size>(
    low: Vector<u32, P>,
    high: Vector<u32, R>,
    b: u64,
    #[comptime] half: Half,
    #[comptime] depth: usize,
    #[comptime] span: usize,
) -> Vector<f32, S> {
    let out: Vector<f32, S>;
    let sums = S::value();
    gpu_asm!("{body} /* {d} {p} {r} {b} */",
        body = const register_product_text(half, sums * 2, depth, span),
        d = out(_) out, p = in(_) val::<Vector<u32, P>>(low), r = in(_) val::<Vector<u32, R>>(high), b = in(_) val::<u64>(b));
    out
}

/// Waits for the product that [`register_product`] started.
#[cube]
pub fn wait_product<S: Size>(c: Vector<f32, S>) -> Vector<f32, S> {
    let out: Vector<f32, S>;
    let sums = S::value();
    gpu_asm!("{body} /* {d} {c} */", body = const wait_product_text(sums),
        d = out(_) out, c = in(_) val::<Vector<f32, S>>(c));
    out
}

/// Makes this unit's writes to shared memory visible to wgmma.
#[cube]
pub fn async_fence() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}
