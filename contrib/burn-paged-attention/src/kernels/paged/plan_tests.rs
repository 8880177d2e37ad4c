//! Plans of paged attention on described devices.

use cubecl::ir::{ElemType, FloatKind};

use crate::kernels::paged::{PagedPlan, PagedShape};
use blocksparse_cubecl::call::HAS_PTX;
use blocksparse_cubecl::described::Fake;
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::tuning::TierLimit;

const BF16: ElemType = ElemType::Float(FloatKind::BF16);
const F32: ElemType = ElemType::Float(FloatKind::F32);

/// A decoding call: 32 query heads on 8 KV heads of width 128.
fn paged(batch: usize, entries: usize, dtype: ElemType) -> PagedShape {
    PagedShape::new(
        [batch, 32, 8, 1],
        [1, entries],
        [8 * batch * entries, 32],
        [128; 2],
        dtype,
    )
}

/// Shares keep the device busy whatever the table's capacity, and do not outnumber the pages.
#[test]
fn pages_are_shared_out() {
    let device = Fake::sm90();
    let shares = |shape| {
        let plan = PagedPlan::of(&device.properties, shape, TierLimit::Simt).unwrap();
        plan.shares()
    };
    // 132 multiprocessors for the 8 KV heads of a page list.
    assert_eq!(shares(paged(1, 1024, F32)), [16, 17]);
    assert_eq!(shares(paged(1, 1 << 20, F32)), [16, 17]);
    assert_eq!(shares(paged(1, 8, F32)), [4, 5]);
    // Two waves of a share each, and some for unequal lengths; a single wave if there are few page lists.
    assert_eq!(shares(paged(32, 128, F32)), [48, 48]);
    assert_eq!(shares(paged(3, 1024, F32)), [16, 16]);
    // Three waves, since two would leave the second half empty.
    assert_eq!(shares(paged(24, 128, F32)), [64, 64]);
    // More page lists than units: cubes do not choose.
    assert_eq!(shares(paged(300, 128, F32)), [32, 332]);
    let mut shape = paged(3, 100, F32);
    shape.fixed_split = Some(8);
    assert_eq!(shares(shape), [0, 39]);
    shape.selected = Some(10);
    assert_eq!(shares(shape), [0, 6]);
}

#[test]
fn pages_on_described_devices() {
    let plan = |device: &Fake, shape, limit| {
        let plan = PagedPlan::of(&device.properties, shape, limit);
        plan.map(|plan| plan.to_string())
    };
    let shape = paged(4, 64, F32);
    let text = plan(&Fake::sm80(), shape, TierLimit::Simt).unwrap();
    let expected = "pages of 32  not on the mma tier: BLOCKSPARSE_TIER says simt\n\
                    pages of 32  simt  256 units a cube of 4 queries, 8 keys of 32 lanes at a time, 4 numbers a load, planes; \
                    up to 16 parts of 4 page lists, merged by 4 × 32 units";
    assert_eq!(text, expected);
    let text = plan(&Fake::webgpu(), shape, TierLimit::None).unwrap();
    assert!(text.contains("32 units a cube of 4 queries"), "{text}");
    // Visibility needs more buffers than WebGPU guarantees.
    let mut seen = shape;
    seen.visibility = true;
    let error = plan(&Fake::webgpu(), seen, TierLimit::None).unwrap_err();
    let message = "buffers of a launch must be at most 8, a limit of the device, got 11";
    assert_eq!(error.to_string(), message);
    let error = plan(&Fake::webgpu(), paged(4, 64, BF16), TierLimit::None).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { .. }));
    let mut wide = shape;
    wide.widths = [128, 1 << 20];
    let error = plan(&Fake::sm90(), wide, TierLimit::None).unwrap_err();
    assert!(matches!(error, KernelError::SharedMemory { .. }));
    let half = plan(&Fake::sm80(), paged(4, 64, BF16), TierLimit::None).unwrap();
    let tier = if HAS_PTX { "mma  128 units" } else { "simt" };
    assert!(half.contains(tier), "{half}");
}
