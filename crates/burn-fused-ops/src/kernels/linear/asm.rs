//! The main loop of a product in PTX. As one text, because products in flight across the end of a loop need their sums in the same registers
//! before and after it, and an asm has no operands that are both input and output.

use cubecl::prelude::*;

use blocksparse_cubecl::arch::ptx::{Half, val};
use blocksparse_cubecl::arch::tma::{DEPTH, ROW_ELEMENTS, registers};

/// Products of 16 of the depth in a slab.
pub const STEPS: usize = ROW_ELEMENTS / DEPTH;

/// What a main loop multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MainLoop {
    /// The type of the factors.
    pub half: Half,
    /// Columns of a warpgroup's sums.
    pub cols: usize,
    /// Slabs in shared memory, and bytes from one to the next.
    pub stages: usize,
    pub slab_bytes: usize,
    /// Where the barriers are that say that a slab is free, after those that say that it is full.
    pub empty: u32,
    /// Whether rows of the left factor, and columns of the right one, are what is contiguous.
    pub across: [bool; 2],
    /// From a factor's slab to each 16 of its depth, in 16 bytes.
    pub offsets: [[usize; STEPS]; 2],
}

/// Inputs behind the sums: the descriptors of the first slab's factors, the address of the barriers, the first slab's number, how many there are, and
/// whether this unit tells that its warp has read a slab.
///
/// A slab's products are started while those of the slab before it are computed; a slab is free when the next one's have been started and its own are
/// done.
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
        // What the last step adds is not used.
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

/// The sums of `count ≥ 1` slabs from number `first` on: `[64, cols]` of a warpgroup.
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

/// Waits so many cycles.
#[cube]
pub fn pause(#[comptime] cycles: u32) {
    let _waited: u32;
    gpu_asm!("{{ .reg .pred more; .reg .b32 from; mov.u32 from, %%clock; AGAIN: mov.u32 {w}, %%clock; sub.u32 {w}, {w}, from; setp.lt.u32 more, {w}, {n}; @more bra AGAIN; }}",
        w = out(_) _waited, n = const cycles);
}
