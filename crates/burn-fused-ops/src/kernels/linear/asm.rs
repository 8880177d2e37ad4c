//! The main loop of a product, as one PTX text: products in flight across the loop's back edge need their sums in the same registers before and after it, and
//! an asm statement has no operands that are both input and output.

use cubecl::prelude::*;

use blocksparse_cubecl::arch::ptx::{Half, val};
use blocksparse_cubecl::arch::tma::{DEPTH, ROW_ELEMENTS, registers};

/// Products of depth 16 in a slab.
pub const STEPS: usize = ROW_ELEMENTS / DEPTH;

/// Comptime parameters of a main loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MainLoop {
    /// Type of the factors.
    pub half: Half,
    /// Columns of a warpgroup's sums.
    pub cols: usize,
    /// Slabs in shared memory, and bytes of a slab.
    pub stages: usize,
    pub slab_bytes: usize,
    /// Offset of the barriers that say that a slab is free; those that say that it is full come first.
    pub empty: u32,
    /// True if rows of the left factor, respectively columns of the right one, are contiguous.
    pub across: [bool; 2],
    /// Offset in a factor's slab of each step of depth 16, in units of 16 bytes.
    pub offsets: [[usize; STEPS]; 2],
}

/// Inputs after the sums: the descriptors of the first slab's factors, the address of the barriers, the number of the first slab, the number of slabs, and
/// whether this unit signals that its warp has read a slab.
///
/// A slab's products are started while those of the previous slab are computed. A slab is freed when the next slab's products have been started and its own
/// are complete.
fn main_loop_text(of: MainLoop) -> String {
    let (cols, stages, empty) = (of.cols, of.stages, of.empty);
    let out = registers(0, cols / 2);
    let ty = of.half.ptx();
    let [trans_a, trans_b] = of.across.map(usize::from);
    let slab = of.slab_bytes >> 4;
    let mut text = format!(
        "{{ .reg .pred more, adds, done, leads, frees, wraps; .reg .b64 da, db, at; .reg .b32 left, s, phase, bar, before; \
         mov.b32 left, $5; rem.u32 s, $4, {stages}; div.u32 phase, $4, {stages}; and.b32 phase, phase, 1; \
         setp.ne.u32 leads, $6, 0; setp.ne.u32 adds, left, left; mov.b32 before, $3; \
         SLAB: shl.b32 bar, s, 3; add.u32 bar, bar, $3; mul.wide.u32 at, s, {slab}; add.s64 da, $1, at; add.s64 db, $2, at; \
         AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [bar], phase; @!done bra AGAIN; \
         wgmma.fence.sync.aligned; "
    );
    for k in 0..STEPS {
        let adds = if k == 0 { "adds" } else { "1" };
        // The increment of the last step is unused.
        let [step_a, step_b] = of
            .offsets
            .map(|to| to.get(k + 1).map_or(0, |next| next - to[k]));
        text += &format!(
            "wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.{ty}.{ty} {{{out}}}, da, db, {adds}, 1, 1, {trans_a}, {trans_b}; \
             add.s64 da, da, {step_a}; add.s64 db, db, {step_b}; "
        );
    }
    text + &format!(
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1; \
         and.pred frees, leads, adds; @frees mbarrier.arrive.shared::cta.b64 _, [before + {empty}]; \
         setp.eq.u32 adds, s, s; mov.b32 before, bar; \
         add.u32 s, s, 1; setp.eq.u32 wraps, s, {stages}; @wraps mov.b32 s, 0; @wraps xor.b32 phase, phase, 1; \
         sub.u32 left, left, 1; setp.ne.u32 more, left, 0; @more bra SLAB; \
         wgmma.wait_group.sync.aligned 0; @leads mbarrier.arrive.shared::cta.b64 _, [before + {empty}]; /* $0 */ }}"
    )
}

/// Computes the sums of `count ≥ 1` slabs from number `first` on: `[64, cols]` of a warpgroup.
#[cube]
pub fn main_loop<S: Size>(
    a: u64,
    b: u64,
    barriers: u32,
    first: u32,
    count: u32,
    lead: u32,
    #[comptime] of: MainLoop,
) -> Vector<f32, S> {
    let out: Vector<f32, S>;
    gpu_asm!("{body} /* {d} {a} {b} {r} {f} {c} {l} */",
        body = const main_loop_text(of),
        d = out(_) out, a = in(_) val::<u64>(a), b = in(_) val::<u64>(b), r = in(_) val::<u32>(barriers),
        f = in(_) val::<u32>(first), c = in(_) val::<u32>(count), l = in(_) val::<u32>(lead));
    out
}

/// Waits for a number of cycles.
#[cube]
pub fn pause(#[comptime] cycles: u32) {
    let _waited: u32;
    gpu_asm!("{{ .reg .pred more; .reg .b32 from; mov.u32 from, %%clock; AGAIN: mov.u32 {w}, %%clock; sub.u32 {w}, {w}, from; setp.lt.u32 more, {w}, {n}; @more bra AGAIN; }}",
        w = out(_) _waited, n = const cycles);
}
