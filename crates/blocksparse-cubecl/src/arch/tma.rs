//! PTX of wgmma's operands, mbarriers and TMA, at run-time addresses. The `hopper` tier and the matmuls of layers share it.

use cubecl::prelude::*;

use crate::arch::ptx::val;

/// Bytes per row of shared memory: the span of the 128-byte swizzle, which repeats after 8 rows.
pub const ROW: usize = 128;

/// 16-bit elements per row.
pub const ROW_ELEMENTS: usize = ROW / 2;

/// Depth of one wgmma.
pub const DEPTH: usize = 16;

/// Returns the names of `count` registers, `%first, …`.
pub fn registers(first: usize, count: usize) -> String {
    let names: Vec<String> = (first..first + count).map(|i| format!("%{i}")).collect();
    names.join(", ")
}

/// Returns the descriptor of an operand with the 128-byte swizzle: its address, the distance of its 64-wide spans if the wide side is not the depth, and
/// groups of 8 rows of 128 bytes.
#[cube]
pub fn descriptor(address: u32, #[comptime] span: usize) -> u64 {
    let low = (address >> 4u32) | comptime!((span as u32 >> 4) << 16);
    u64::cast_from(low) | comptime!((1u64 << 62) | (64u64 << 32))
}

/// Like `descriptor`, of an operand with rows of 32, 64 or 128 bytes and a swizzle of the same width.
#[cube]
pub fn descriptor_of(address: u32, #[comptime] span: usize, #[comptime] row: usize) -> u64 {
    let low = (address >> 4u32) | comptime!((span as u32 >> 4) << 16);
    let swizzle = comptime!(match row {
        128 => 1u64,
        64 => 2u64,
        _ => 3u64,
    });
    u64::cast_from(low) | comptime!((swizzle << 62) | ((row as u64 / 2) << 32))
}

instructions! {
    pub fn barrier_init(bar: u32; arrivals: u32) = "mbarrier.init.shared::cta.b64 [{bar}], {arrivals};";
}

/// Initialises the barriers of a ring of stages, eight bytes apart: "full" waits for TMA alone, "empty" for all warps. Makes them visible to TMA, and other
/// barriers initialised before.
#[cube]
pub fn ring_init(full: u32, empty: u32, #[comptime] stages: usize, #[comptime] warps: u32) {
    #[unroll]
    for i in 0..stages {
        let offset = comptime!(8 * i as u32);
        barrier_init(full + offset, 1u32);
        barrier_init(empty + offset, warps);
    }
    barrier_fence();
}

instructions! {
    /// Makes initialised barriers visible to TMA.
    pub fn barrier_fence() = "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;";

    /// Arrives, and makes the phase wait for `bytes` of TMA.
    pub fn barrier_expect(bar: u32; bytes: usize) = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{bar}], {bytes};";

    pub fn barrier_arrive(bar: u32) = "mbarrier.arrive.shared::cta.b64 _, [{bar}];";

    /// Waits for the end of the phase with this parity.
    pub fn barrier_wait(bar: u32, parity: u32) =
        "{{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [{bar}], {parity}; @done bra DONE; bra AGAIN; DONE: }}";
}

/// Starts a TMA copy of a box of a `[batch, head, row, column]` tensor map into shared memory.
#[cube]
pub fn load_box(map: u64, target: u32, bar: u32, column: u32, row: u32, head: u32, batch: u32) {
    gpu_asm!("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [{s}], [{m}, {{{x}, {y}, {z}, {w}}}], [{b}];",
        s = in(_) val::<u32>(target), m = in(_) val::<u64>(map), x = in(_) val::<u32>(column),
        y = in(_) val::<u32>(row), z = in(_) val::<u32>(head), w = in(_) val::<u32>(batch), b = in(_) val::<u32>(bar));
}

instructions! {
    /// Waits at a named barrier for `units` units, including those that only arrive.
    pub fn named_sync(id: u32; units: u32) = "bar.sync {id}, {units};";
}

/// Waits at a named barrier, and returns whether `is_so` is true in any of the units.
#[cube]
pub fn named_any(id: u32, is_so: bool, #[comptime] units: u32) -> bool {
    let x = select(is_so, 1u32, 0u32);
    let o: u32;
    gpu_asm!("{{ .reg .pred p, q; setp.ne.u32 p, {x}, 0; bar.red.or.pred q, {b}, {n}, p; selp.u32 {o}, 1, 0, q; }}",
        o = out(_) o, x = in(_) val::<u32>(x), b = in(_) val::<u32>(id), n = const units);
    o != 0
}

instructions! {
    /// Arrives at a named barrier without waiting.
    pub fn named_arrive(id: u32; units: u32) = "bar.arrive {id}, {units};";
}
