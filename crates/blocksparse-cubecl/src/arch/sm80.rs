//! PTX of this tier: mma.sync, ldmatrix, cp.async.

use cubecl::prelude::*;

use super::Four;
pub use crate::arch::ptx::*;

/// What the products' operands are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// Tensors of half precision, as they are.
    Half(Half),
    /// Tensors of f32, rounded to 10 bits of mantissa.
    Tf32,
}

impl Element {
    /// Bytes in memory.
    pub fn bytes(self) -> usize {
        match self {
            Self::Half(_) => 2,
            Self::Tf32 => 4,
        }
    }

    /// Depth of one mma.sync: 32 bytes.
    pub fn depth(self) -> usize {
        32 / self.bytes()
    }

    /// Of half precision, its type.
    pub fn half(self) -> Half {
        match self {
            Self::Half(half) => half,
            Self::Tf32 => Half::Bf16,
        }
    }

    /// Loads a number from `$1`, or 0 where `$2` is.
    fn load_text(self) -> &'static str {
        match self {
            Self::Half(Half::Bf16) => {
                "{ .reg .pred p; .reg .b16 l, h; mov.b16 l, 0; mov.b16 h, 0; setp.ne.u32 p, $2, 0; \
                 @p ld.global.nc.b16 h, [$1]; mov.b32 $0, {l, h}; }"
            }
            Self::Half(Half::F16) => {
                "{ .reg .pred p; .reg .b16 h; mov.b16 h, 0; setp.ne.u32 p, $2, 0; \
                 @p ld.global.nc.b16 h, [$1]; cvt.f32.f16 $0, h; }"
            }
            Self::Tf32 => {
                "{ .reg .pred p; .reg .f32 h; mov.f32 h, 0f00000000; setp.ne.u32 p, $2, 0; \
                 @p ld.global.nc.f32 h, [$1]; mov.f32 $0, h; }"
            }
        }
    }

    fn shape(self) -> String {
        match self {
            Self::Half(half) => format!("m16n8k16.row.col.f32.{0}.{0}.f32", half.ptx()),
            Self::Tf32 => String::from("m16n8k8.row.col.f32.tf32.tf32.f32"),
        }
    }
}

/// `a · b + c` of 16 rows and 8 columns.
#[cube]
pub fn multiply(
    a: Vector<u32, Four>,
    b0: u32,
    b1: u32,
    c: Vector<f32, Four>,
    #[comptime] element: Element,
) -> Vector<f32, Four> {
    let o: Vector<f32, Four>;
    gpu_asm!("mma.sync.aligned.{t} {o}, {a}, {{{x}, {y}}}, {c};", t = const element.shape(),
        o = out(_) o, a = in(_) val::<Vector<u32, Four>>(a), x = in(_) val::<u32>(b0), y = in(_) val::<u32>(b1),
        c = in(_) val::<Vector<f32, Four>>(c), options(pure, nomem));
    o
}

/// Rounds to tf32.
#[cube]
pub fn round(x: u32) -> u32 {
    let o: u32;
    gpu_asm!("cvt.rna.tf32.f32 {o}, {i};", o = out(_) o, i = in(_) val::<u32>(x), options(pure, nomem));
    o
}

/// Operands as mma.sync takes them.
#[cube]
pub fn operand(x: Vector<u32, Four>, #[comptime] element: Element) -> Vector<u32, Four> {
    let mut o = x;
    if comptime!(element == Element::Tf32) {
        #[unroll]
        for i in 0..4usize {
            o.insert(i, round(x.extract(i)));
        }
    }
    o
}

/// The bits of a number.
#[cube]
pub fn bits_of(x: f32) -> u32 {
    let o: u32;
    gpu_asm!("mov.b32 {o}, {i};", o = out(_) o, i = in(_) val::<f32>(x), options(pure, nomem));
    o
}

/// The number of these bits.
#[cube]
pub fn of_bits(x: u32) -> f32 {
    let o: f32;
    gpu_asm!("mov.b32 {o}, {i};", o = out(_) o, i = in(_) val::<u32>(x), options(pure, nomem));
    o
}

/// Four 8 × 8 matrices, whose rows the four eights of a warp's lanes name.
#[cube]
pub fn load_matrices(address: u32, #[comptime] offset: usize) -> Vector<u32, Four> {
    let o: Vector<u32, Four>;
    gpu_asm!("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {o}, [{a}+{i}];", o = out(_) o, a = in(_) val::<u32>(address),
        i = const offset);
    o
}

/// As `load_matrices`, each transposed.
#[cube]
pub fn load_transposes(address: u32, #[comptime] offset: usize) -> Vector<u32, Four> {
    let o: Vector<u32, Four>;
    gpu_asm!("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {o}, [{a}+{i}];", o = out(_) o, a = in(_) val::<u32>(address),
        i = const offset);
    o
}

/// The address of a buffer.
#[cube]
pub fn address<T: CubePrimitive>(buffer: &[T]) -> u64 {
    // SAFETY: the pointer is only turned into an address. What is there is read by PTX, at rows that exist and offsets within them.
    let pointer = unsafe { buffer.as_ptr_unchecked() };
    let o: u64;
    gpu_asm!("mov.u64 {o}, {p};", o = out(_) o, p = in(_) pointer, options(nomem));
    o
}

/// Starts to copy 16 bytes at `base + position · stride` to shared memory, or zeros where the position is
/// [`NOWHERE`](crate::mma::tile::NOWHERE).
#[cube]
pub fn copy_piece(target: u32, base: u64, position: u32, stride: u32) {
    gpu_asm!("{{ .reg .pred p; .reg .b32 r, n; .reg .b64 a; setp.eq.u32 p, {x}, 0xffffffff; selp.b32 r, 0, {x}, p; \
              selp.b32 n, 0, 16, p; mad.wide.u32 a, r, {s}, {b}; cp.async.cg.shared.global [{t}], [a], 16, n; }}",
        t = in(_) val::<u32>(target), b = in(_) val::<u64>(base), x = in(_) val::<u32>(position), s = in(_) val::<u32>(stride));
}

/// As `copy_piece`, where rows are more than 4 GB apart.
#[cube]
pub fn copy_far_piece(target: u32, base: u64, position: u32, stride: u64) {
    gpu_asm!("{{ .reg .pred p; .reg .b32 r, n; .reg .b64 a; setp.eq.u32 p, {x}, 0xffffffff; selp.b32 r, 0, {x}, p; \
              selp.b32 n, 0, 16, p; cvt.u64.u32 a, r; mad.lo.u64 a, a, {s}, {b}; \
              cp.async.cg.shared.global [{t}], [a], 16, n; }}",
        t = in(_) val::<u32>(target), b = in(_) val::<u64>(base), x = in(_) val::<u32>(position), s = in(_) val::<u64>(stride));
}

/// Starts to copy 8 bytes to shared memory, or zeros if `bytes` is 0.
#[cube]
pub fn copy_pair(target: u32, source: u64, bytes: u32) {
    gpu_asm!("cp.async.ca.shared.global [{t}], [{s}], 8, {n};",
        t = in(_) val::<u32>(target), s = in(_) val::<u64>(source), n = in(_) val::<u32>(bytes));
}

/// Starts to copy a word to shared memory.
#[cube]
pub fn copy_word(target: u32, source: u64) {
    gpu_asm!("cp.async.ca.shared.global [{t}], [{s}], 4;",
        t = in(_) val::<u32>(target), s = in(_) val::<u64>(source));
}

/// Adds to the number at an address that no other unit adds to, if `adds` is not 0. Nobody waits for it.
#[cube]
pub fn add_number(address: u64, x: f32, adds: u32) {
    gpu_asm!("{{ .reg .pred p; setp.ne.u32 p, {n}, 0; @p red.relaxed.gpu.global.add.f32 [{a}], {x}; }}",
        a = in(_) val::<u64>(address), x = in(_) val::<f32>(x), n = in(_) val::<u32>(adds));
}

/// Waits for the copies that this unit started.
#[cube]
pub fn wait_copies() {
    gpu_asm!("cp.async.wait_all;");
}

/// Ends a group of the copies that this unit started.
#[cube]
pub fn commit_copies() {
    gpu_asm!("cp.async.commit_group;");
}

/// Waits for this unit's copies but for those of the last `groups` groups.
#[cube]
pub fn wait_copies_but(#[comptime] groups: usize) {
    gpu_asm!("cp.async.wait_group {n};", n = const groups);
}

/// For which lanes of the warp `x` is not `y`, a bit each.
#[cube]
pub fn lanes_that_differ(x: u32, y: u32) -> u32 {
    let o: u32;
    gpu_asm!("{{ .reg .pred p; setp.ne.u32 p, {x}, {y}; vote.sync.ballot.b32 {o}, p, 0xffffffff; }}",
        o = out(_) o, x = in(_) val::<u32>(x), y = in(_) val::<u32>(y), options(nomem));
    o
}

/// The word of a lane.
#[cube]
pub fn word_of_lane(x: u32, lane: u32) -> u32 {
    let o: u32;
    gpu_asm!("shfl.sync.idx.b32 {o}, {i}, {l}, 31, 0xffffffff;", o = out(_) o, i = in(_) val::<u32>(x), l = in(_) val::<u32>(lane), options(nomem));
    o
}

/// Two neighbouring words.
#[cube]
pub fn shared_load_pair(address: u32) -> Vector<u32, Const<2>> {
    let o: Vector<u32, Const<2>>;
    gpu_asm!("ld.shared.v2.u32 {o}, [{a}];", o = out(_) o, a = in(_) val::<u32>(address));
    o
}

/// The number at an address that no unit writes to, or 0.
#[cube]
pub fn load_number(address: u64, exists: u32, #[comptime] element: Element) -> f32 {
    let o: f32;
    gpu_asm!("{body} /* {o} {a} {x} */", body = const element.load_text(), o = out(_) o,
        a = in(_) val::<u64>(address), x = in(_) val::<u32>(exists), options(nomem));
    o
}
