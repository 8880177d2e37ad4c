//! Plans on described devices.

use cubecl::ir::{ElemType, FloatKind};

use crate::kernels::selection::compressed::{CompressedPlan, CompressedShape};
use blocksparse_cubecl::call::HAS_PTX;
use blocksparse_cubecl::described::Fake;
use blocksparse_cubecl::tuning::TierLimit;

const BF16: ElemType = ElemType::Float(FloatKind::BF16);
const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Checks which calls the kernel serves, and the tiles of its cubes.
#[test]
fn attention_sums_on_described_devices() {
    let shape = CompressedShape {
        batch: 1,
        heads: [64, 4],
        seq: [65_536, 65_536],
        width: 128,
        blocks: [32, 16, 64],
    };
    let f16 = ElemType::Float(FloatKind::F16);
    let plan = |device: &Fake, dtype, shape, limit| {
        let plan = CompressedPlan::of(&device.properties, dtype, shape, limit);
        plan.map(|plan| plan.to_string())
    };
    let on_h200 = |dtype, shape| plan(&Fake::sm90(), dtype, shape, TierLimit::None);
    if !HAS_PTX {
        assert_eq!(on_h200(BF16, shape), Err("feature `cuda` is off"));
        return;
    }
    let on_wgmma = "wgmma  256 units a cube of 8 queries, 1 of a warp with 16 rows each, 64 compressed blocks at a time in 37 KiB shared";
    let on_mma = "mma  128 units a cube of 8 queries, 2 of a warp with 16 rows each, 64 compressed blocks at a time in 39 KiB shared";
    for dtype in [BF16, f16] {
        assert_eq!(on_h200(dtype, shape).unwrap(), on_wgmma);
        let on_a100 = plan(&Fake::sm80(), dtype, shape, TierLimit::None);
        assert_eq!(on_a100.unwrap(), on_mma);
        let limited = plan(&Fake::sm90(), dtype, shape, TierLimit::Mma);
        assert_eq!(limited.unwrap(), on_mma);
    }
    let groups = |heads| CompressedShape { heads, ..shape };
    for (heads, wgmma, mma) in [
        (
            [32, 4],
            "16 queries, 2 of a warp with 8 rows",
            "16 queries, 4 of",
        ),
        (
            [24, 4],
            "16 queries, 2 of a warp with 8 rows",
            "16 queries, 4 of",
        ),
        (
            [16, 4],
            "32 queries, 4 of a warp with 4 rows",
            "32 queries, 8 of",
        ),
        (
            [4, 4],
            "128 queries, 16 of a warp with 1 rows",
            "64 queries, 16 of",
        ),
    ] {
        let text = on_h200(BF16, groups(heads)).unwrap();
        assert!(text.contains(wgmma), "{text}");
        let text = plan(&Fake::sm80(), BF16, groups(heads), TierLimit::None).unwrap();
        assert!(text.contains(mma), "{text}");
    }
    let blocks = |blocks| CompressedShape { blocks, ..shape };
    let wide = |width| CompressedShape { width, ..shape };
    let widths = "the width of keys is no multiple of 16 up to 256";
    let overlaps = "too many compressed blocks overlap a block, or no power of two begins in it";
    for (dtype, shape, reason) in [
        (F32, shape, "the dtype is neither bf16 nor f16"),
        (BF16, groups([64, 2]), "more than 16 heads share keys"),
        (BF16, wide(72), widths),
        (BF16, wide(272), widths),
        (BF16, blocks([32, 16, 48]), overlaps),
        (BF16, blocks([32, 16, 2048]), overlaps),
        (BF16, blocks([1024, 16, 64]), overlaps),
    ] {
        assert_eq!(on_h200(dtype, shape), Err(reason));
    }
    let capability = "the device is not of compute capability 8.0 or up";
    let turing = Fake::new("cuda", "ptx_sm75", 65_536, &[F32]);
    for device in [&turing, &Fake::webgpu()] {
        assert_eq!(plan(device, BF16, shape, TierLimit::None), Err(capability));
    }
    let simt = plan(&Fake::sm90(), BF16, shape, TierLimit::Simt);
    assert_eq!(simt, Err("BLOCKSPARSE_TIER says simt"));
    // For every width the keys fit next to the sums; wgmma has keys in spans of 64 elements.
    for width in (16..=256).step_by(16) {
        let text = on_h200(BF16, wide(width)).unwrap();
        assert_eq!(text.starts_with("wgmma"), width % 64 == 0, "{text}");
        plan(&Fake::sm80(), BF16, wide(width), TierLimit::None).unwrap();
    }
}
