//! PTX of the mma tier: mma.sync, ldmatrix, cp.async.

use cubecl::prelude::*;

use super::Four;
pub use crate::arch::ptx::*;

/// Element type of the products' operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// Tensors of half precision, unchanged.
    Half(Half),
    /// Tensors of f32, rounded to 10 mantissa bits.
    Tf32,
}

impl Element {
    /// Bytes per element in memory.
    pub fn bytes(self) -> usize {
        match self {
            Self::Half(_) => 2,
            Self::Tf32 => 4,
        }
    }

    /// Depth of one mma.sync, which is 32 bytes.
    pub fn depth(self) -> usize {
        32 / self.bytes()
    }

    /// Returns the half-precision type, and bf16 for tf32.
    pub fn half(self) -> Half {
        match self {
            Self::Half(half) => half,
            Self::Tf32 => Half::Bf16,
        }
    }

    /// PTX that loads a number from `$1`, or 0 if `$2` is 0.
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

/// Computes `a · b + c` of 16 rows and 8 columns.
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

instructions! {
    /// Rounds to tf32.
    pub fn round(x: u32) -> u32 = "cvt.rna.tf32.f32 {o}, {x};", options(pure, nomem);
}

/// Rounds operands to the precision of mma.sync.
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

instructions! {
    pub fn bits_of(x: f32) -> u32 = "mov.b32 {o}, {x};", options(pure, nomem);

    pub fn of_bits(x: u32) -> f32 = "mov.b32 {o}, {x};", options(pure, nomem);

    /// Loads four 8 × 8 matrices, whose row addresses come from the four groups of eight lanes.
    pub fn load_matrices(address: u32; offset: usize) -> Vector<u32, Four> =
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {o}, [{address}+{offset}];";

    /// Like `load_matrices`, with each matrix transposed.
    pub fn load_transposes(address: u32; offset: usize) -> Vector<u32, Four> =
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {o}, [{address}+{offset}];";
}

/// Returns the address of a buffer.
#[cube]
pub fn address<T: CubePrimitive>(buffer: &[T]) -> u64 {
    // SAFETY: the pointer is only converted to an address. PTX reads there, at existing rows and offsets within them.
    let pointer = unsafe { buffer.as_ptr_unchecked() };
    let o: u64;
    gpu_asm!("mov.u64 {o}, {p};", o = out(_) o, p = in(_) pointer, options(nomem));
    o
}

instructions! {
    /// Starts a copy of 16 bytes at `base + position · stride` to shared memory, or of zeros if the position is [`NOWHERE`](crate::mma::tile::NOWHERE).
    pub fn copy_piece(target: u32, base: u64, position: u32, stride: u32) =
        "{{ .reg .pred p; .reg .b32 r, n; .reg .b64 a; setp.eq.u32 p, {position}, 0xffffffff; selp.b32 r, 0, {position}, p; \
              selp.b32 n, 0, 16, p; mad.wide.u32 a, r, {stride}, {base}; cp.async.cg.shared.global [{target}], [a], 16, n; }}";

    /// Like `copy_piece`, for rows more than 4 GB apart.
    pub fn copy_far_piece(target: u32, base: u64, position: u32, stride: u64) =
        "{{ .reg .pred p; .reg .b32 r, n; .reg .b64 a; setp.eq.u32 p, {position}, 0xffffffff; selp.b32 r, 0, {position}, p; \
              selp.b32 n, 0, 16, p; cvt.u64.u32 a, r; mad.lo.u64 a, a, {stride}, {base}; \
              cp.async.cg.shared.global [{target}], [a], 16, n; }}";

    /// Starts a copy of 8 bytes to shared memory, or of zeros if `bytes` is 0.
    pub fn copy_pair(target: u32, source: u64, bytes: u32) = "cp.async.ca.shared.global [{target}], [{source}], 8, {bytes};";

    /// Starts a copy of a word to shared memory.
    pub fn copy_word(target: u32, source: u64) = "cp.async.ca.shared.global [{target}], [{source}], 4;";

    /// Adds to a number that no other unit adds to, if `adds` is nonzero. Does not wait for the result.
    pub fn add_number(address: u64, x: f32, adds: u32) =
        "{{ .reg .pred p; setp.ne.u32 p, {adds}, 0; @p red.relaxed.gpu.global.add.f32 [{address}], {x}; }}";

    /// Waits for this unit's copies.
    pub fn wait_copies() = "cp.async.wait_all;";

    /// Commits this unit's copies as a group.
    pub fn commit_copies() = "cp.async.commit_group;";

    /// Waits for this unit's copies except the last `groups` groups.
    pub fn wait_copies_but(; groups: usize) = "cp.async.wait_group {groups};";

    /// Returns the lanes of the warp whose `x` differs from `y`, one bit each.
    pub fn lanes_that_differ(x: u32, y: u32) -> u32 =
        "{{ .reg .pred p; setp.ne.u32 p, {x}, {y}; vote.sync.ballot.b32 {o}, p, 0xffffffff; }}", options(nomem);

    /// Loads two consecutive words.
    pub fn shared_load_pair(address: u32) -> Vector<u32, Const<2>> = "ld.shared.v2.u32 {o}, [{address}];";
}

/// Starts a copy of 16 bytes of the row at a position to shared memory. Rows begin at `base` and are `stride` pieces of 16 bytes apart; with `far`, that
/// may exceed 4 GB.
#[cube]
pub fn copy_of_row(target: u32, base: u64, position: u32, stride: u64, #[comptime] far: bool) {
    if comptime!(far) {
        copy_far_piece(target, base, position, stride * 16);
    } else {
        copy_piece(target, base, position, u32::cast_from(stride) * 16);
    }
}

instructions! {
    /// Loads a read-only number, or 0 if `exists` is 0.
    pub fn load_number(address: u64, exists: u32; element: Element) -> f32 =
        "{body} /* {o} {address} {exists} */" with element.load_text(), options(nomem);
}
