//! PTX of numbers of 8 bits: E4M3, 4 bits of exponent and 3 of fraction (OCP 8-bit floating point, 2023).

use cubecl::prelude::*;

use blocksparse_cubecl::arch::ptx::val;
use blocksparse_cubecl::arch::tma::registers;

/// Depth of one wgmma of bytes.
const BYTE_DEPTH: usize = 32;

/// The upper word of descriptors of rows of 128 bytes, swizzled as wide. It is a constant, so that steps of a product add to the lower word alone.
const SWIZZLED: u32 = (1 << 30) | 64;

/// `a · bᵀ`: `a` in registers, `b` in shared memory in rows of 128 bytes. The first step overwrites the output.
fn product_text(cols: usize, depth: usize) -> String {
    let (out, words) = (registers(0, cols / 2), cols / 2);
    let mut text = format!(
        "{{ .reg .b32 l, h; .reg .b64 b; mov.b32 h, {SWIZZLED}; wgmma.fence.sync.aligned; "
    );
    for k in 0..depth / BYTE_DEPTH {
        text += &format!(
            "add.u32 l, $2, {}; mov.b64 b, {{l, h}}; \
             wgmma.mma_async.sync.aligned.m64n{cols}k{BYTE_DEPTH}.f32.e4m3.e4m3 {{{out}}}, {{{}}}, b, {}, 1, 1; ",
            (k * BYTE_DEPTH) >> 4,
            registers(words + 4 * k, 4),
            usize::from(k > 0),
        );
    }
    text + "wgmma.commit_group.sync.aligned; }"
}

/// Starts `a · bᵀ` `[64, 2 · S]` of rows of four times as many bytes as `a` has words. The result is there after a
/// [`wait`](blocksparse_cubecl::arch::sm90::wait).
#[cube]
pub(crate) fn byte_product<P: Size, S: Size>(a: Vector<u32, P>, b: u32) -> Vector<f32, S> {
    let out: Vector<f32, S>;
    let width = S::value();
    let words = P::value();
    let cols = comptime!(width * 2);
    let depth = comptime!(words * 8);
    gpu_asm!("{body} /* {d} {a} {b} */",
        body = const product_text(cols, depth),
        d = out(_) out, a = in(_) val::<Vector<u32, P>>(a), b = in(_) val::<u32>(b));
    out
}

/// The lower word of the descriptor of a right operand in rows of 128 bytes.
#[cube]
pub(crate) fn swizzled(address: u32) -> u32 {
    address >> 4u32 | comptime!(1u32 << 16)
}

/// Copies bytes of memory, a multiple of 16, to shared memory.
#[cube]
pub(crate) fn bulk_load(target: u32, source: u64, bar: u32, #[comptime] bytes: usize) {
    gpu_asm!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{t}], [{s}], {n}, [{b}];",
        t = in(_) val::<u32>(target), s = in(_) val::<u64>(source), n = const bytes, b = in(_) val::<u32>(bar));
}
