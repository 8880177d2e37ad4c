//! PTX that CubeCL has no functions for: wgmma products, bulk copies of shared memory, fast math.
//!
//! `$i` in a text is operand `i` (the output first), and `%n` is register `n` of all operands in sequence. Every operand must occur in its text, so the
//! last ones are named in a PTX comment.

use cubecl::prelude::*;

pub use crate::arch::ptx::*;
pub use crate::arch::tma::*;

/// PTX of `a · bᵀ` of two K-major operands in shared memory. Both are stored in spans of 128 bytes of a row, `a_span` and `b_span` bytes apart. The first
/// step overwrites the output, so nothing has to be zeroed.
fn product_text(of: ProductShape, cols: usize) -> String {
    let (half, fp8, dim) = (of.half, of.fp8, of.depth);
    let (a_span, b_span) = (of.a_span, of.b_span);
    // FP8 operands are always K-major.
    let (ty, depth, majors) = match fp8 {
        true => ("e4m3", 2 * DEPTH, ""),
        false => (half.ptx(), DEPTH, ", 0, 0"),
    };
    let out = registers(0, cols / 2);
    let mut text = String::from("{ .reg .b64 a, b; wgmma.fence.sync.aligned; ");
    for k in 0..dim.div_ceil(DEPTH) {
        let (span, within) = (k * DEPTH / ROW_ELEMENTS, k * DEPTH % ROW_ELEMENTS * 2);
        let (a, b) = ((span * a_span + within) >> 4, (span * b_span + within) >> 4);
        let add = usize::from(k > 0);
        text += &format!(
            "add.s64 a, $1, {a}; add.s64 b, $2, {b}; \
             wgmma.mma_async.sync.aligned.m64n{cols}k{depth}.f32.{ty}.{ty} {{{out}}}, a, b, {add}, 1, 1{majors}; "
        );
    }
    text + "wgmma.commit_group.sync.aligned; /* $0 */ }"
}

/// PTX that moves `used` registers of an accumulator of `acc` registers to the output, because inline asm has no operands that are both input and output.
/// ptxas removes the moves.
fn moved(acc: usize, used: usize) -> String {
    (0..used)
        .map(|i| format!("mov.f32 %{i}, %{}; ", acc + i))
        .collect()
}

/// PTX of `c + p · b`, with `p` in registers and `b` (`[cols, dim]`, MN-major) in shared memory. The accumulator has `acc` registers, of which `dim / 2`
/// are used, and is moved to the output. Without `add`, it is `p · b` and there is no input `c`.
fn accumulate_text(half: Half, acc: usize, cols: usize, dim: usize, add: bool) -> String {
    let (ty, used) = (half.ptx(), dim / 2);
    let mut text = String::from("{ .reg .b64 b; ");
    let (p, b) = match add {
        true => (2 * acc, "$3"),
        false => (acc, "$2"),
    };
    if add {
        text += &moved(acc, used);
    }
    text += "wgmma.fence.sync.aligned; ";
    for k in 0..cols / DEPTH {
        text += &format!(
            "add.s64 b, {b}, {}; wgmma.mma_async.sync.aligned.m64n{dim}k16.f32.{ty}.{ty} {{{}}}, {{{}}}, b, {}, 1, 1, 1; ",
            (k * DEPTH * ROW) >> 4,
            registers(0, used),
            registers(p + 4 * k, 4),
            usize::from(add || k > 0),
        );
    }
    text + "wgmma.commit_group.sync.aligned; }"
}

/// PTX of `c + p · bᵀ` in FP8. `p` is in registers, four per 32 columns. `b` is in shared memory, as consecutive blocks of [`FP8_COLUMNS`] of its columns,
/// with rows of that many bytes. The accumulator is moved as in [`accumulate_text`].
fn accumulate_fp8_text(acc: usize, cols: usize, dim: usize) -> String {
    let used = dim / 2;
    let mut text = String::from("{ .reg .b64 b; ");
    text += &moved(acc, used);
    text += "wgmma.fence.sync.aligned; ";
    for (k, column) in (0..cols).step_by(32).enumerate() {
        let (block, within) = (column / FP8_COLUMNS, column % FP8_COLUMNS);
        text += &format!(
            "add.s64 b, $3, {}; wgmma.mma_async.sync.aligned.m64n{dim}k32.f32.e4m3.e4m3 {{{}}}, {{{}}}, b, 1, 1, 1; ",
            (block * dim * FP8_COLUMNS + within) >> 4,
            registers(0, used),
            registers(2 * acc + 4 * k, 4),
        );
    }
    text + "wgmma.commit_group.sync.aligned; }"
}

fn wait_text(pending: usize, acc: usize, used: usize) -> String {
    let moved = moved(acc, used);
    format!("{{ /* $0 $1 */ wgmma.wait_group.sync.aligned {pending}; {moved}}}")
}

/// PTX of `aᵀ · b`, with `a` (`[depth, 64]`) and `b` (`[depth, cols]`) both MN-major in shared memory.
fn wide_product_text(half: Half, cols: usize, depth: usize) -> String {
    let (ty, out) = (half.ptx(), registers(0, cols / 2));
    let mut text = String::from("{ .reg .b64 a, b; wgmma.fence.sync.aligned; ");
    for k in 0..depth / DEPTH {
        let offset = (k * DEPTH * ROW) >> 4;
        let add = usize::from(k > 0);
        text += &format!(
            "add.s64 a, $1, {offset}; add.s64 b, $2, {offset}; \
             wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.{ty}.{ty} {{{out}}}, a, b, {add}, 1, 1, 1, 1; "
        );
    }
    text + "wgmma.commit_group.sync.aligned; /* $0 */ }"
}

/// PTX of `c + a · b`, with `a` (`[64, depth]`) K-major, in spans of 64 columns that are `a_span` bytes apart, and `b` (`[depth, dim]`) MN-major, both in
/// shared memory. The accumulator is moved as in [`accumulate_text`].
fn accumulate_shared_text(
    half: Half,
    acc: usize,
    dim: usize,
    depth: usize,
    a_span: usize,
) -> String {
    let (ty, used) = (half.ptx(), dim / 2);
    let mut text = String::from("{ .reg .b64 a, b; ");
    text += &moved(acc, used);
    text += "wgmma.fence.sync.aligned; ";
    for k in 0..depth / DEPTH {
        let (span, within) = (k * DEPTH / ROW_ELEMENTS, k * DEPTH % ROW_ELEMENTS * 2);
        text += &format!(
            "add.s64 a, $2, {}; add.s64 b, $3, {}; \
             wgmma.mma_async.sync.aligned.m64n{dim}k16.f32.{ty}.{ty} {{{}}}, a, b, 1, 1, 1, 0, 1; ",
            (span * a_span + within) >> 4,
            (k * DEPTH * ROW) >> 4,
            registers(0, used),
        );
    }
    text + "wgmma.commit_group.sync.aligned; /* $0 $1 */ }"
}

/// PTX that stores 16 rows of a left operand, swizzled, with spans of 64 columns `span` bytes apart. `$1` is the address of this unit's first pair.
fn store_left_text(width: usize, span: usize) -> String {
    let mut text = String::from("{ .reg .b32 a; ");
    for eight in 0..width / 2 {
        let (at, chunk) = (eight / 8 * span, (eight % 8) << 4);
        text += &format!(
            "xor.b32 a, $1, {chunk}; st.shared.b32 [a + {at}], %{}; st.shared.b32 [a + {}], %{}; ",
            2 * eight,
            at + 8 * ROW,
            2 * eight + 1,
        );
    }
    text + "/* $0 */ }"
}

/// PTX that loads or stores a unit's registers in groups of four. The same group of a warpgroup's units is contiguous.
fn own_text(width: usize, load: bool) -> String {
    let mut text = String::new();
    for four in 0..width / 4 {
        let (at, words) = (four * 128 * 16, registers(4 * four, 4));
        text += &match load {
            true => format!("ld.shared.v4.b32 {{{words}}}, [$1 + {at}]; "),
            false => format!("st.shared.v4.b32 [$1 + {at}], {{{words}}}; "),
        };
    }
    text + "/* $0 */"
}

/// PTX that stores each lane's groups of four for every 16 columns.
fn store_sixteen_text(width: usize, eight: usize) -> String {
    let mut text = String::new();
    for lower in 0..2 {
        for four in 0..width / 8 {
            let [a, b, c, d] = [0, 1, 4, 5].map(|i| 8 * four + i + 2 * lower);
            let at = lower * eight + 512 * four;
            text += &format!("st.shared.v4.f32 [$1 + {at}], {{%{a}, %{b}, %{c}, %{d}}}; ");
        }
    }
    text + "/* $0 */"
}

/// PTX that loads the half at address `$1`, or 0 unless `$2 < $3`.
fn read_half_text(half: Half) -> String {
    let widen = match half {
        Half::Bf16 => "mov.b32 $0, {zero, h};",
        Half::F16 => "cvt.f32.f16 $0, h;",
    };
    format!(
        "{{ .reg .pred p; .reg .b16 h, zero; setp.lt.u32 p, $2, $3; mov.b16 zero, 0; mov.b16 h, 0; \
         @p ld.global.nc.b16 h, [$1]; {widen} }}"
    )
}

fn bulk_instruction(add: bool) -> &'static str {
    match add {
        true => "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
        false => "cp.async.bulk.global.shared::cta.bulk_group",
    }
}

/// Keys that are contiguous in a row of transposed FP8 values.
pub const FP8_COLUMNS: usize = 64;

/// Operands of `a · bᵀ`: element type, depth in 16-bit elements, and bytes between spans of 64 of these.
#[derive(Clone, Copy)]
pub struct ProductShape {
    pub half: Half,
    /// Whether the operands are E4M3.
    pub fp8: bool,
    pub depth: usize,
    pub a_span: usize,
    pub b_span: usize,
}

instructions! {
    /// Starts `a · bᵀ` `[64, cols]`. `wait` before using the result.
    pub fn product<S = width>(a: u64, b: u64; of: ProductShape) -> Vector<f32, S> =
        "{body} /* {o} {a} {b} */" with product_text(of, 2 * width);

    /// Starts `c + p · b` `[64, dim]`. `wait` before using the result.
    pub fn accumulate<P = width, O = acc>(c: Vector<f32, O>, p: Vector<u32, P>, b: u64; half: Half, dim: usize) -> Vector<f32, O> =
        "{body} /* {o} {c} {p} {b} */" with accumulate_text(half, acc, 4 * width, dim, true);

    /// Starts `c + p · bᵀ` `[64, dim]` in FP8. `wait` before using the result.
    pub fn accumulate_fp8<P = width, O = acc>(c: Vector<f32, O>, p: Vector<u32, P>, b: u64; dim: usize) -> Vector<f32, O> =
        "{body} /* {o} {c} {p} {b} */" with accumulate_fp8_text(acc, 8 * width, dim);

    /// Starts `p · b` `[64, dim]`. `wait` before using the result.
    pub fn weigh<P = width, O = acc>(p: Vector<u32, P>, b: u64; half: Half, dim: usize) -> Vector<f32, O> =
        "{body} /* {o} {p} {b} */" with accumulate_text(half, acc, 4 * width, dim, false);

    /// Starts `aᵀ · b` `[64, 2 · O]` of operands with `depth` rows. `wait` before using the result.
    pub fn wide_product<O = width>(a: u64, b: u64; half: Half, depth: usize) -> Vector<f32, O> =
        "{body} /* {o} {a} {b} */" with wide_product_text(half, 2 * width, depth);

    /// Starts `c + a · b` `[64, dim]` of a K-major `a` and a `b` with `depth` rows. `wait` before using the result.
    pub fn accumulate_shared<O = acc>(c: Vector<f32, O>, a: u64, b: u64; half: Half, dim: usize, depth: usize, a_span: usize) -> Vector<f32, O> =
        "{body} /* {o} {c} {a} {b} */" with accumulate_shared_text(half, acc, dim, depth, a_span);

    /// Stores a left operand in shared memory, in the layout of a right operand or an operand of `wide_product`.
    pub fn store_left<P = width>(p: Vector<u32, P>, address: u32; span: usize) =
        "{body} /* {p} {address} */" with store_left_text(width, span);

    /// Stores a unit's registers for the unit with the same index of another warpgroup. Addresses of consecutive units are 16 bytes apart.
    pub fn store_own<P = width>(p: Vector<u32, P>, address: u32) = "{body} /* {p} {address} */" with own_text(width, false);

    /// Loads what `store_own` stored.
    pub fn load_own<P = width>(address: u32) -> Vector<u32, P> = "{body} /* {o} {address} */" with own_text(width, true);

    /// Stores a warp's 16 rows in shared memory: for every 16 columns, groups of four of all lanes. The lower eight rows are `eight` bytes further.
    pub fn store_sixteen<O = width>(x: Vector<f32, O>, address: u32; eight: usize) =
        "{body} /* {x} {address} */" with store_sixteen_text(width, eight);

    /// Reads a half-precision number of read-only memory, or 0 unless `index < end`.
    pub fn read_half(address: u64, index: u32, end: u32; half: Half) -> f32 =
        "{body} /* {o} {address} {index} {end} */" with read_half_text(half), options(nomem);

    /// Waits until at most `pending` of the latest products are unfinished.
    pub fn wait<N = acc>(c: Vector<f32, N>; pending: usize, used: usize) -> Vector<f32, N> =
        "{body} /* {o} {c} */" with wait_text(pending, acc, used);

    /// Makes this unit's writes to shared memory visible to wgmma and TMA.
    pub fn async_fence() = "fence.proxy.async.shared::cta;";
}

/// Starts a copy of shared memory to global memory, or its addition as f32. `bulk_wait` waits for it.
#[cube]
pub fn bulk_store(target: u64, source: u32, #[comptime] bytes: usize, #[comptime] add: bool) {
    gpu_asm!("{i} [{t}], [{s}], {b};", i = const bulk_instruction(add),
        t = in(_) val::<u64>(target), s = in(_) val::<u32>(source), b = const bytes);
}

instructions! {
    /// Commits the unit's bulk copies since the last commit as a group.
    pub fn bulk_commit() = "cp.async.bulk.commit_group;";

    /// Waits until the unit's bulk copies are in memory.
    pub fn bulk_wait() = "cp.async.bulk.wait_group 0;";

    /// Reads a word that another cube may be writing.
    pub fn peek(address: u64) -> u32 = "ld.relaxed.gpu.global.u32 {o}, [{address}];";

    /// Reads four elements that other cubes have written, from L2.
    pub fn peek_four(address: u64) -> Vector<f32, Const<4>> = "ld.relaxed.gpu.global.v4.f32 {o}, [{address}];";

    /// Reads two elements of read-only memory.
    pub fn read_two(address: u64) -> Vector<f32, Const<2>> = "ld.global.nc.v2.f32 {o}, [{address}];", options(nomem);

    /// Atomically increments a counter that all cubes share, and returns its old value.
    pub fn draw(address: u64) -> u32 = "atom.relaxed.gpu.global.add.u32 {o}, [{address}], 1;";

    /// Orders the unit's earlier accesses, and those it has observed, before its later ones, device-wide.
    pub fn device_fence() = "fence.acq_rel.gpu;";

    /// Orders the unit's earlier reads of global memory before its later bulk copies and additions.
    pub fn async_fence_global() = "fence.proxy.async.global;";

    /// Waits until a word equals `x`.
    pub fn wait_until(address: u64, x: u32) =
        "{{ .reg .pred done; .reg .u32 now; AGAIN: ld.relaxed.gpu.global.u32 now, [{address}]; setp.eq.u32 done, now, {x}; @!done bra AGAIN; }}";

    /// Writes a word that another cube may be reading.
    pub fn post(address: u64, x: u32) = "st.relaxed.gpu.global.u32 [{address}], {x};";

    pub fn store_number(address: u64, x: f32) = "st.global.f32 [{address}], {x};";

    /// Writes two elements to an address that is a multiple of 8.
    pub fn store_pair(address: u64, x: f32, y: f32) = "st.global.v2.f32 [{address}], {{{x}, {y}}};";

    /// Waits for the other lanes of the warp.
    pub fn sync_warp() = "bar.warp.sync 0xffffffff;";
}

/// Starts a TMA copy of a box of a `[batch, head, class, row, column]` tensor map into shared memory.
#[cube]
pub fn load_class_box(
    map: u64,
    target: u32,
    bar: u32,
    column: u32,
    row: u32,
    class: u32,
    head: u32,
    batch: u32,
) {
    gpu_asm!("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [{s}], [{m}, {{{x}, {y}, {c}, {z}, {w}}}], [{b}];",
        s = in(_) val::<u32>(target), m = in(_) val::<u64>(map), x = in(_) val::<u32>(column),
        y = in(_) val::<u32>(row), c = in(_) val::<u32>(class), z = in(_) val::<u32>(head), w = in(_) val::<u32>(batch),
        b = in(_) val::<u32>(bar));
}

/// Starts a TMA copy of a box of a `[row, column]` tensor map into shared memory.
#[cube]
pub fn load_line(map: u64, target: u32, bar: u32, column: u32, row: u32) {
    gpu_asm!("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [{s}], [{m}, {{{x}, {y}}}], [{b}];",
        s = in(_) val::<u32>(target), m = in(_) val::<u64>(map), x = in(_) val::<u32>(column),
        y = in(_) val::<u32>(row), b = in(_) val::<u32>(bar));
}

instructions! {
    /// Returns `2^x`. Volatile, or ptxas moves a wait for a wgmma before it.
    pub fn exp2(x: f32) -> f32 = "ex2.approx.ftz.f32 {o}, {x};", options(nomem);
}

/// Starts a TMA copy of a box of 64 columns at a place into shared memory. With `residue`, the map has the class as a dimension.
#[cube]
pub fn load_at(
    map: u64,
    target: u32,
    bar: u32,
    span: u32,
    place: u32,
    class_len: u32,
    head: u32,
    batch: u32,
    #[comptime] residue: bool,
) {
    let column = span * comptime!(ROW_ELEMENTS as u32);
    if comptime!(residue) {
        let (row, class) = (place % class_len, place / class_len);
        load_class_box(map, target, bar, column, row, class, head, batch);
    } else {
        load_box(map, target, bar, column, place, head, batch);
    }
}
