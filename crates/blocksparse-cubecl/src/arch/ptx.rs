//! PTX that the tensor-core tiers share: warps, shared memory at addresses, fast math.
//!
//! `$i` in a text is operand `i`, the output first. Every operand has to occur in its text, if only in a PTX comment.

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

/// The type of the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Half {
    /// 8 bits of exponent.
    Bf16,
    /// 5 bits of exponent.
    F16,
}

impl Half {
    fn unpack_text(self, high: bool) -> &'static str {
        match (self, high) {
            (Half::Bf16, false) => "shl.b32 $0, $1, 16; /* $0 $1 */",
            (Half::Bf16, true) => "and.b32 $0, $1, 0xffff0000; /* $0 $1 */",
            (Half::F16, false) => "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }",
            (Half::F16, true) => "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }",
        }
    }

    /// Its name in PTX.
    pub fn ptx(self) -> &'static str {
        match self {
            Half::Bf16 => "bf16",
            Half::F16 => "f16",
        }
    }
}

/// Reads a variable. An asm gets a mutable variable as a pointer.
#[cube]
pub fn val<T: CubePrimitive>(x: T) -> T {
    intrinsic!(|scope| { x.read_value(scope).into() })
}

/// A number that is the same in all units of a warp, told to the compiler.
#[cube]
pub fn uniform(x: u32) -> u32 {
    let o: u32;
    gpu_asm!("shfl.sync.idx.b32 {o}, {i}, 0, 31, 0xffffffff;", o = out(_) o, i = in(_) val::<u32>(x), options(nomem));
    o
}

/// This unit's place in the cube, read anew.
#[cube]
pub fn unit() -> u32 {
    let o: u32;
    gpu_asm!("mov.u32 {o}, %%tid.x;", o = out(_) o, options(nomem));
    o
}

/// The address of a cube's shared memory.
#[cube]
pub fn shared_address(memory: &Shared<[u32]>) -> u32 {
    // SAFETY: the pointer is only turned into an address. What is there is read and written by PTX, at offsets below the length
    // that the tile asks for.
    generic_to_shared::<u32>(unsafe { memory.as_ptr_unchecked() })
}

#[cube]
pub fn shared_store(address: u32, x: u32) {
    gpu_asm!("st.shared.u32 [{a}], {x};", a = in(_) val::<u32>(address), x = in(_) val::<u32>(x));
}

/// Two numbers, at a multiple of eight bytes.
#[cube]
pub fn shared_store_two(address: u32, first: f32, second: f32) {
    gpu_asm!("st.shared.v2.f32 [{a}], {{{x}, {y}}};", a = in(_) val::<u32>(address), x = in(_) val::<f32>(first), y = in(_) val::<f32>(second));
}

/// Adds one to a number in shared memory that other units add to, too.
#[cube]
pub fn shared_count(address: u32) {
    gpu_asm!("red.shared.add.u32 [{a}], 1;", a = in(_) val::<u32>(address));
}

#[cube]
pub fn shared_load(address: u32) -> u32 {
    let o: u32;
    gpu_asm!("ld.shared.u32 {o}, [{a}];", o = out(_) o, a = in(_) val::<u32>(address));
    o
}

#[cube]
pub fn shared_load_four(address: u32) -> Vector<f32, Const<4>> {
    let o: Vector<f32, Const<4>>;
    gpu_asm!("ld.shared.v4.f32 {o}, [{a}];", o = out(_) o, a = in(_) val::<u32>(address));
    o
}

/// Four words, at a multiple of 16 bytes.
#[cube]
pub fn shared_load_words(address: u32) -> Vector<u32, Const<4>> {
    let o: Vector<u32, Const<4>>;
    gpu_asm!("ld.shared.v4.u32 {o}, [{a}];", o = out(_) o, a = in(_) val::<u32>(address));
    o
}

#[cube]
pub fn shared_store_words(address: u32, x: Vector<u32, Const<4>>) {
    gpu_asm!("st.shared.v4.u32 [{a}], {x};", a = in(_) val::<u32>(address), x = in(_) val::<Vector<u32, Const<4>>>(x));
}

/// Whether `x` differs from `y` in any unit of the warp.
#[cube]
pub fn any_differ(x: f32, y: f32) -> u32 {
    let o: u32;
    gpu_asm!("{{ .reg .pred p, q; setp.ne.f32 p, {x}, {y}; vote.sync.any.pred q, p, 0xffffffff; selp.u32 {o}, 1, 0, q; }}",
        o = out(_) o, x = in(_) val::<f32>(x), y = in(_) val::<f32>(y), options(nomem));
    o
}

#[cube]
pub fn shuffle_xor(x: f32, #[comptime] mask: u32) -> f32 {
    let o: f32;
    gpu_asm!("shfl.sync.bfly.b32 {o}, {i}, {m}, 31, 0xffffffff;", o = out(_) o, i = in(_) val::<f32>(x), m = const mask, options(nomem));
    o
}

/// The units of the warp for which it is so, as bits.
#[cube]
pub fn ballot(is_so: bool) -> u32 {
    let x = select(is_so, 1u32, 0u32);
    let o: u32;
    gpu_asm!("{{ .reg .pred p; setp.ne.u32 p, {x}, 0; vote.sync.ballot.b32 {o}, p, 0xffffffff; }}",
        o = out(_) o, x = in(_) val::<u32>(x), options(nomem));
    o
}

/// The sum over the units of the warp.
#[cube]
pub fn total_across(x: u32) -> u32 {
    let o: u32;
    gpu_asm!("redux.sync.add.u32 {o}, {x}, 0xffffffff;", o = out(_) o, x = in(_) val::<u32>(x), options(nomem));
    o
}

/// The highest number of the units of the warp.
#[cube]
pub fn highest_across(x: u32) -> u32 {
    let o: u32;
    gpu_asm!("redux.sync.max.u32 {o}, {x}, 0xffffffff;", o = out(_) o, x = in(_) val::<u32>(x), options(nomem));
    o
}

/// The lowest number of the units of the warp.
#[cube]
pub fn lowest_across(x: u32) -> u32 {
    let o: u32;
    gpu_asm!("redux.sync.min.u32 {o}, {x}, 0xffffffff;", o = out(_) o, x = in(_) val::<u32>(x), options(nomem));
    o
}

/// Whether `x` is not 0 in any unit of the warp.
#[cube]
pub fn above_any(x: u32) -> u32 {
    let o: u32;
    gpu_asm!("{{ .reg .pred p, q; setp.ne.u32 p, {x}, 0; vote.sync.any.pred q, p, 0xffffffff; selp.u32 {o}, 1, 0, q; }}",
        o = out(_) o, x = in(_) val::<u32>(x), options(nomem));
    o
}

/// An 8 × 8 matrix of half precision transposed: lane `4 g + t` has the word of row `g` and columns `2t, 2t + 1`.
#[cube]
pub fn transpose_eight(x: u32) -> u32 {
    let o: u32;
    gpu_asm!("movmatrix.sync.aligned.m8n8.trans.b16 {o}, {i};", o = out(_) o, i = in(_) val::<u32>(x), options(nomem));
    o
}

/// The lower halves of two words, `low`'s in the lower half, or the higher ones.
#[cube]
pub fn merge_words(low: u32, high: u32, #[comptime] upper: bool) -> u32 {
    let selector = comptime!(if upper { 0x7632u32 } else { 0x5410u32 });
    let o: u32;
    gpu_asm!("prmt.b32 {o}, {l}, {h}, {s};", o = out(_) o, l = in(_) val::<u32>(low), h = in(_) val::<u32>(high),
        s = const selector, options(pure, nomem));
    o
}

/// The even bytes of two words, `low`'s first, or the odd ones.
#[cube]
pub fn bytes_of(low: u32, high: u32, #[comptime] odd: bool) -> u32 {
    let selector = comptime!(if odd { 0x7531u32 } else { 0x6420u32 });
    let o: u32;
    gpu_asm!("prmt.b32 {o}, {l}, {h}, {s};", o = out(_) o, l = in(_) val::<u32>(low), h = in(_) val::<u32>(high),
        s = const selector, options(pure, nomem));
    o
}

/// A word turned to the left.
#[cube]
pub fn rotate(x: u32, by: u32) -> u32 {
    let o: u32;
    gpu_asm!("shf.l.wrap.b32 {o}, {i}, {i}, {s};", o = out(_) o, i = in(_) val::<u32>(x), s = in(_) val::<u32>(by),
        options(pure, nomem));
    o
}

/// The number of a lane.
#[cube]
pub fn shuffle(x: f32, lane: u32) -> f32 {
    let o: f32;
    gpu_asm!("shfl.sync.idx.b32 {o}, {i}, {l}, 31, 0xffffffff;", o = out(_) o, i = in(_) val::<f32>(x), l = in(_) val::<u32>(lane), options(nomem));
    o
}

/// A lane's word.
#[cube]
pub fn shuffle_word(x: u32, lane: u32) -> u32 {
    let o: u32;
    gpu_asm!("shfl.sync.idx.b32 {o}, {i}, {l}, 31, 0xffffffff;", o = out(_) o, i = in(_) val::<u32>(x), l = in(_) val::<u32>(lane), options(nomem));
    o
}

/// The other lane's number.
#[cube]
pub fn trade(x: u32, #[comptime] mask: u32) -> u32 {
    let o: u32;
    gpu_asm!("shfl.sync.bfly.b32 {o}, {i}, {m}, 31, 0xffffffff;", o = out(_) o, i = in(_) val::<u32>(x), m = const mask, options(nomem));
    o
}

#[cube]
pub fn log2(x: f32) -> f32 {
    let o: f32;
    gpu_asm!("lg2.approx.ftz.f32 {o}, {i};", o = out(_) o, i = in(_) val::<f32>(x), options(pure, nomem));
    o
}

/// `2^x`.
#[cube]
pub fn exp2(x: f32) -> f32 {
    let o: f32;
    gpu_asm!("ex2.approx.ftz.f32 {o}, {i};", o = out(_) o, i = in(_) val::<f32>(x), options(pure, nomem));
    o
}

#[cube]
pub fn reciprocal(x: f32) -> f32 {
    let o: f32;
    gpu_asm!("rcp.approx.ftz.f32 {o}, {i};", o = out(_) o, i = in(_) val::<f32>(x), options(pure, nomem));
    o
}

#[cube]
pub fn larger(a: f32, b: f32) -> f32 {
    let o: f32;
    gpu_asm!("max.f32 {o}, {a}, {b};", o = out(_) o, a = in(_) val::<f32>(a), b = in(_) val::<f32>(b), options(pure, nomem));
    o
}

/// `a · b + c`.
#[cube]
pub fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    let o: f32;
    gpu_asm!("fma.rn.ftz.f32 {o}, {a}, {b}, {c};", o = out(_) o, a = in(_) val::<f32>(a), b = in(_) val::<f32>(b), c = in(_) val::<f32>(c), options(pure, nomem));
    o
}

/// Two numbers in half precision, `low` in the lower half.
#[cube]
pub fn pack(low: f32, high: f32, #[comptime] half: Half) -> u32 {
    let o: u32;
    gpu_asm!("cvt.rn.{t}x2.f32 {o}, {h}, {l};", t = const half.ptx(), o = out(_) o,
        h = in(_) val::<f32>(high), l = in(_) val::<f32>(low), options(pure, nomem));
    o
}

/// Four numbers of at most 448 in E4M3, the first in the lowest eight bits, as [`encode`](crate::shared::codec::encode) rounds them.
#[cube]
pub fn four_bytes(a: f32, b: f32, c: f32, d: f32) -> u32 {
    let o: u32;
    gpu_asm!("{{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, {b}, {a}; cvt.rn.satfinite.e4m3x2.f32 h, {d}, {c}; mov.b32 {o}, {{l, h}}; }}",
        o = out(_) o, a = in(_) val::<f32>(a), b = in(_) val::<f32>(b), c = in(_) val::<f32>(c), d = in(_) val::<f32>(d),
        options(pure, nomem));
    o
}

/// `a · b + c` of two numbers each in half precision, without a loss for subnormal ones.
#[cube]
pub fn multiply_add_pair(a: u32, b: u32, c: u32, #[comptime] half: Half) -> u32 {
    let o: u32;
    gpu_asm!("fma.rn.{t}x2 {o}, {a}, {b}, {c};", t = const half.ptx(), o = out(_) o, a = in(_) val::<u32>(a),
        b = in(_) val::<u32>(b), c = in(_) val::<u32>(c), options(pure, nomem));
    o
}

/// One of two numbers in half precision.
#[cube]
pub fn unpack(pair: u32, #[comptime] high: bool, #[comptime] half: Half) -> f32 {
    let o: f32;
    gpu_asm!("{body} /* {o} {i} */", body = const half.unpack_text(high), o = out(_) o, i = in(_) val::<u32>(pair),
        options(pure, nomem));
    o
}

/// The product of two words: its lower and its higher word.
#[cube]
pub fn multiply_wide(a: u32, b: u32) -> Vector<u32, Const<2>> {
    let o: Vector<u32, Const<2>>;
    gpu_asm!("{{ .reg .b64 p; mul.wide.u32 p, {a}, {b}; mov.b64 {o}, p; }}",
        o = out(_) o, a = in(_) val::<u32>(a), b = in(_) val::<u32>(b), options(pure, nomem));
    o
}

/// A unit has 4 of every 16 bytes of its row. Four neighbours trade theirs, so that each has 16 at a time: a transposition,
/// so it also undoes itself.
#[cube]
pub fn trade_four(own: Vector<u32, Const<4>>, lane: u32) -> Vector<u32, Const<4>> {
    let odd = lane & 1 != 0;
    let high = lane & 2 != 0;
    let w0 = own.extract(0usize);
    let w1 = own.extract(1usize);
    let w2 = own.extract(2usize);
    let w3 = own.extract(3usize);
    let from0 = trade(select(odd, w0, w1), 1u32);
    let from1 = trade(select(odd, w2, w3), 1u32);
    let a0 = select(odd, from0, w0);
    let a1 = select(odd, w1, from0);
    let b0 = select(odd, from1, w2);
    let b1 = select(odd, w3, from1);
    let from0 = trade(select(high, a0, b0), 2u32);
    let from1 = trade(select(high, a1, b1), 2u32);
    let mut four = Vector::<u32, Const<4>>::zeroed();
    four.insert(0usize, select(high, from0, a0));
    four.insert(1usize, select(high, from1, a1));
    four.insert(2usize, select(high, b0, from0));
    four.insert(3usize, select(high, b1, from1));
    four
}

/// A warp's 8 × 8 matrix of halves, of which each unit has two of a row, transposed.
#[cube]
pub fn transpose(x: u32) -> u32 {
    let o: u32;
    gpu_asm!("movmatrix.sync.aligned.m8n8.trans.b16 {o}, {x};", o = out(_) o, x = in(_) val::<u32>(x), options(nomem));
    o
}

const READ_FOUR_WORDS: &str = "{ .reg .pred p; setp.lt.u32 p, %5, %6; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; \
     @p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; /* $0 $1 $2 $3 */ }";

/// The address of a buffer.
#[cube]
pub fn global_address<T: CubePrimitive>(buffer: &[T]) -> u64 {
    // SAFETY: the pointer is only turned into an address. What is there is read and written by PTX, at offsets that the host has
    // checked the buffer's length against.
    let pointer = unsafe { buffer.as_ptr_unchecked() };
    let o: u64;
    gpu_asm!("cvta.to.global.u64 {o}, {p};", o = out(_) o, p = in(_) pointer);
    o
}

/// `read_four_words` of memory that the unit itself will write.
#[cube]
pub fn read_four_words_once(address: u64, index: u32, end: u32) -> Vector<u32, Const<4>> {
    let o: Vector<u32, Const<4>>;
    gpu_asm!("{body} /* {o} {a} {i} {e} */", body = const READ_FOUR_WORDS.replace(".nc", ""), o = out(_) o,
        a = in(_) val::<u64>(address), i = in(_) val::<u32>(index), e = in(_) val::<u32>(end));
    o
}

/// 16 bytes at an address of constant memory, or 0 unless `index < end`.
#[cube]
pub fn read_four_words(address: u64, index: u32, end: u32) -> Vector<u32, Const<4>> {
    let o: Vector<u32, Const<4>>;
    gpu_asm!("{body} /* {o} {a} {i} {e} */", body = const READ_FOUR_WORDS, o = out(_) o,
        a = in(_) val::<u64>(address), i = in(_) val::<u32>(index), e = in(_) val::<u32>(end), options(nomem));
    o
}
