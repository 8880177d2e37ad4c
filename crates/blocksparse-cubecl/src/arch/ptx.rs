//! PTX that the tensor-core tiers share: warp operations, shared memory by address, fast math.
//!
//! `$i` in a text is operand `i`, the output first. Every operand must occur in its text, if only in a PTX comment.

use std::fmt;

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

/// Half-precision element type of the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Half {
    /// 8 exponent bits.
    Bf16,
    /// 5 exponent bits.
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

    /// Returns its name in PTX.
    pub fn ptx(self) -> &'static str {
        match self {
            Half::Bf16 => "bf16",
            Half::F16 => "f16",
        }
    }
}

impl fmt::Display for Half {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.ptx())
    }
}

/// Reads a variable, because inline asm gets a mutable variable as a pointer.
#[cube]
pub fn val<T: CubePrimitive>(x: T) -> T {
    intrinsic!(|scope| { x.read_value(scope).into() })
}

instructions! {
    /// Tells the compiler that `x` is the same in all units of a warp.
    pub fn uniform(x: u32) -> u32 = "shfl.sync.idx.b32 {o}, {x}, 0, 31, 0xffffffff;", options(nomem);

    /// Returns this unit's index in the cube, read from `%tid.x` again instead of kept in a register.
    pub fn unit() -> u32 = "mov.u32 {o}, %%tid.x;", options(nomem);
}

/// Returns the address of a cube's shared memory.
#[cube]
pub fn shared_address(memory: &Shared<[u32]>) -> u32 {
    // SAFETY: the pointer is only converted to an address. PTX reads and writes there, at offsets below the length that the tile allocates.
    generic_to_shared::<u32>(unsafe { memory.as_ptr_unchecked() })
}

instructions! {
    pub fn shared_store(address: u32, x: u32) = "st.shared.u32 [{address}], {x};";

    /// Stores two elements at an address that is a multiple of 8 bytes.
    pub fn shared_store_two(address: u32, first: f32, second: f32) = "st.shared.v2.f32 [{address}], {{{first}, {second}}};";

    /// Atomically increments a counter in shared memory.
    pub fn shared_count(address: u32) = "red.shared.add.u32 [{address}], 1;";

    pub fn shared_load(address: u32) -> u32 = "ld.shared.u32 {o}, [{address}];";

    pub fn shared_load_four(address: u32) -> Vector<f32, Const<4>> = "ld.shared.v4.f32 {o}, [{address}];";

    /// Loads four words at an address that is a multiple of 16 bytes.
    pub fn shared_load_words(address: u32) -> Vector<u32, Const<4>> = "ld.shared.v4.u32 {o}, [{address}];";

    /// Whether `x` differs from `y` in any unit of the warp.
    pub fn any_differ(x: f32, y: f32) -> u32 =
        "{{ .reg .pred p, q; setp.ne.f32 p, {x}, {y}; vote.sync.any.pred q, p, 0xffffffff; selp.u32 {o}, 1, 0, q; }}", options(nomem);

    pub fn shuffle_xor(x: f32; mask: u32) -> f32 = "shfl.sync.bfly.b32 {o}, {x}, {mask}, 31, 0xffffffff;", options(nomem);
}

/// Returns the units of the warp whose `is_so` is true, one bit each.
#[cube]
pub fn ballot(is_so: bool) -> u32 {
    let x = select(is_so, 1u32, 0u32);
    let o: u32;
    gpu_asm!("{{ .reg .pred p; setp.ne.u32 p, {x}, 0; vote.sync.ballot.b32 {o}, p, 0xffffffff; }}",
        o = out(_) o, x = in(_) val::<u32>(x), options(nomem));
    o
}

instructions! {
    /// Returns the sum over the warp.
    pub fn total_across(x: u32) -> u32 = "redux.sync.add.u32 {o}, {x}, 0xffffffff;", options(nomem);

    /// Returns the maximum over the warp.
    pub fn highest_across(x: u32) -> u32 = "redux.sync.max.u32 {o}, {x}, 0xffffffff;", options(nomem);

    /// Returns the minimum over the warp.
    pub fn lowest_across(x: u32) -> u32 = "redux.sync.min.u32 {o}, {x}, 0xffffffff;", options(nomem);

    /// Whether `x` is nonzero in any unit of the warp.
    pub fn above_any(x: u32) -> u32 =
        "{{ .reg .pred p, q; setp.ne.u32 p, {x}, 0; vote.sync.any.pred q, p, 0xffffffff; selp.u32 {o}, 1, 0, q; }}", options(nomem);
}

instructions! {
    /// Selects bytes of two words by the digits of `selector`.
    fn chosen_bytes(low: u32, high: u32; selector: u32) -> u32 = "prmt.b32 {o}, {low}, {high}, {selector};", options(pure, nomem);
}

/// Joins the lower halves of two words, `low`'s in the lower half, or the upper halves.
#[cube]
pub fn merge_words(low: u32, high: u32, #[comptime] upper: bool) -> u32 {
    chosen_bytes(
        low,
        high,
        comptime!(if upper { 0x7632u32 } else { 0x5410u32 }),
    )
}

/// Joins the even bytes of two words, `low`'s first, or the odd bytes.
#[cube]
pub fn bytes_of(low: u32, high: u32, #[comptime] odd: bool) -> u32 {
    chosen_bytes(
        low,
        high,
        comptime!(if odd { 0x7531u32 } else { 0x6420u32 }),
    )
}

instructions! {
    /// Rotates a word to the left.
    pub fn rotate(x: u32, by: u32) -> u32 = "shf.l.wrap.b32 {o}, {x}, {x}, {by};", options(pure, nomem);

    /// Returns `x` of a lane.
    pub fn shuffle(x: f32, lane: u32) -> f32 = "shfl.sync.idx.b32 {o}, {x}, {lane}, 31, 0xffffffff;", options(nomem);

    /// Returns a lane's word.
    pub fn shuffle_word(x: u32, lane: u32) -> u32 = "shfl.sync.idx.b32 {o}, {x}, {lane}, 31, 0xffffffff;", options(nomem);

    /// Returns `x` of the lane whose index differs in the bits of `mask`.
    pub fn trade(x: u32; mask: u32) -> u32 = "shfl.sync.bfly.b32 {o}, {x}, {mask}, 31, 0xffffffff;", options(nomem);

    pub fn log2(x: f32) -> f32 = "lg2.approx.ftz.f32 {o}, {x};", options(pure, nomem);

    /// Returns `2^x`.
    pub fn exp2(x: f32) -> f32 = "ex2.approx.ftz.f32 {o}, {x};", options(pure, nomem);

    pub fn reciprocal(x: f32) -> f32 = "rcp.approx.ftz.f32 {o}, {x};", options(pure, nomem);

    pub fn larger(a: f32, b: f32) -> f32 = "max.f32 {o}, {a}, {b};", options(pure, nomem);

    /// Returns `a · b + c`.
    pub fn multiply_add(a: f32, b: f32, c: f32) -> f32 = "fma.rn.ftz.f32 {o}, {a}, {b}, {c};", options(pure, nomem);
}

/// Packs two values in half precision, `low` in the lower half.
#[cube]
pub fn pack(low: f32, high: f32, #[comptime] half: Half) -> u32 {
    let o: u32;
    gpu_asm!("cvt.rn.{t}x2.f32 {o}, {h}, {l};", t = const half.ptx(), o = out(_) o,
        h = in(_) val::<f32>(high), l = in(_) val::<f32>(low), options(pure, nomem));
    o
}

/// Packs elements `at` and `at + 1` of a vector in half precision.
#[cube]
pub fn pack_at<S: Size>(x: &Vector<f32, S>, #[comptime] at: usize, #[comptime] half: Half) -> u32 {
    pack(x.extract(at), x.extract(comptime!(at + 1)), half)
}

instructions! {
    /// Packs four values of at most 448 in E4M3, the first in the lowest byte. Rounds as `encode` does.
    pub fn four_bytes(a: f32, b: f32, c: f32, d: f32) -> u32 =
        "{{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, {b}, {a}; cvt.rn.satfinite.e4m3x2.f32 h, {d}, {c}; mov.b32 {o}, {{l, h}}; }}", options(pure, nomem);

    /// Computes `a · b + c` of pairs in half precision, without flushing subnormal numbers.
    pub fn multiply_add_pair(a: u32, b: u32, c: u32; half: Half) -> u32 = "fma.rn.{half}x2 {o}, {a}, {b}, {c};", options(pure, nomem);

    /// Returns the 64-bit product of two words as lower and upper word.
    pub fn multiply_wide(a: u32, b: u32) -> Vector<u32, Const<2>> =
        "{{ .reg .b64 p; mul.wide.u32 p, {a}, {b}; mov.b64 {o}, p; }}", options(pure, nomem);
}

/// Transposes a 4 × 4 block of words between four neighbouring units. Before, a unit has 4 of every 16 bytes of its row; after, it has 16 contiguous bytes.
/// Being a transposition, it is its own inverse.
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

instructions! {
    /// Transposes a warp's 8 × 8 matrix of halves: lane `4 g + t` gets columns `2 t` and `2 t + 1` of row `g`.
    pub fn transpose(x: u32) -> u32 = "movmatrix.sync.aligned.m8n8.trans.b16 {o}, {x};", options(nomem);
}

const READ_FOUR_WORDS: &str = "{ .reg .pred p; setp.lt.u32 p, %5, %6; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; \
     @p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; /* $0 $1 $2 $3 */ }";

/// Returns the global address of a buffer.
#[cube]
pub fn global_address<T: CubePrimitive>(buffer: &[T]) -> u64 {
    // SAFETY: the pointer is only converted to an address. PTX reads and writes there, at offsets that the host has checked against the buffer's length.
    let pointer = unsafe { buffer.as_ptr_unchecked() };
    let o: u64;
    gpu_asm!("cvta.to.global.u64 {o}, {p};", o = out(_) o, p = in(_) pointer);
    o
}

instructions! {
    /// Unpacks one of two values in half precision.
    pub fn unpack(pair: u32; high: bool, half: Half) -> f32 =
        "{body} /* {o} {pair} */" with half.unpack_text(high), options(pure, nomem);

    /// Like `read_four_words`, for memory that this unit will write later.
    pub fn read_four_words_once(address: u64, index: u32, end: u32) -> Vector<u32, Const<4>> =
        "{body} /* {o} {address} {index} {end} */" with READ_FOUR_WORDS.replace(".nc", "");

    /// Reads 16 bytes of read-only memory at an address, or 0 unless `index < end`.
    pub fn read_four_words(address: u64, index: u32, end: u32) -> Vector<u32, Const<4>> =
        "{body} /* {o} {address} {index} {end} */" with READ_FOUR_WORDS, options(nomem);
}
