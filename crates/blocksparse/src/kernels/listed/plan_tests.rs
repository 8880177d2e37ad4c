//! Which calls are taken, and what they run, on devices that are only described.

use cubecl::ir::{DeviceProperties, ElemType, FloatKind};

use super::plan::*;
use crate::kernels::tests::Fake;

const BF16: ElemType = ElemType::Float(FloatKind::BF16);
const F32: ElemType = ElemType::Float(FloatKind::F32);

/// A device of so much shared memory.
fn device(fingerprint: &str, shared: usize) -> DeviceProperties {
    Fake::new("cuda", fingerprint, shared, &[]).properties
}

fn hopper() -> DeviceProperties {
    device("ptx_sm90", 232_448)
}

/// Native sparse attention with the paper's numbers, but for widths and heads.
fn nsa(heads: [usize; 2], dims: [usize; 2]) -> ListedRequest {
    let [heads, kv_heads] = heads;
    let n = 65_536;
    ListedRequest::new(
        [1, heads, kv_heads],
        [n, n],
        dims,
        BF16,
        [64, 13],
        [64, 14_336],
    )
}

fn printed(request: ListedRequest) -> String {
    ListedPlan::new(&hopper(), request).unwrap().to_string()
}

#[test]
fn plans_fill_a_multiprocessor_with_steps() {
    assert_eq!(
        printed(nsa([64, 4], [128, 128])),
        "listed  16 rows of a query walk its list of 13 blocks of 64 keys\n  \
         forward  32 keys a step, 32 units, 3 stages in 52 KiB shared\n  \
         dQ       32 keys a step, 32 units, 3 stages in 52 KiB shared\n  \
         dK, dV   64 keys × 64 rows a step, 128 units, 4 parts, 104 KiB shared"
    );
    assert_eq!(
        printed(nsa([64, 4], [192, 128])),
        "listed  16 rows of a query walk its list of 13 blocks of 64 keys\n  \
         forward  16 keys a step, 32 units, 5 stages in 53 KiB shared\n  \
         dQ       16 keys a step, 32 units, 5 stages in 53 KiB shared\n  \
         dK, dV   64 keys × 32 rows a step, 128 units, 4 parts, 86 KiB shared"
    );
    // More heads are more warps of a cube, with one ring.
    let of_64 = printed(nsa([256, 4], [128, 128]));
    assert!(of_64.contains("64 rows of a query"), "{of_64}");
}

#[test]
fn what_kernels_do_not_take_says_why() {
    let good = nsa([64, 4], [128, 128]);
    let refused = |properties: &DeviceProperties, request: ListedRequest| {
        ListedPlan::new(properties, request).unwrap_err()
    };
    let on_hopper = |request| refused(&hopper(), request);
    assert!(refused(&device("ptx_sm75", 65_536), good).contains("8.0"));
    assert!(refused(&device("wgpu", 32_768), good).contains("8.0"));
    assert!(refused(&device("ptx_sm80", 16_384), good).contains("shared memory"));
    assert!(on_hopper(ListedRequest { dtype: F32, ..good }).contains("bf16"));
    for heads in [[32, 4], [4, 4], [40, 2], [512, 2]] {
        assert!(on_hopper(nsa(heads, [128, 128])).contains("multiple of 16"));
    }
    for dims in [[96, 128], [128, 192], [256, 64], [8, 8]] {
        assert!(on_hopper(nsa([64, 4], dims)).contains("head_dim"));
    }
    for block in [2, 8, 48, 96] {
        assert!(on_hopper(ListedRequest { block, ..good }).contains("blocks"));
    }
    let large = ListedRequest {
        batch: 1 << 9,
        ..good
    };
    assert!(on_hopper(large).contains("32 bits"));
}

#[test]
fn every_served_shape_has_room() {
    for shared in [101_376, 166_912, 232_448] {
        for group in [16, 32, 48, 64, 128] {
            for head_dim in [64, 128, 192] {
                for value_dim in [64, 128] {
                    let request = nsa([2 * group, 2], [head_dim, value_dim]);
                    let request = ListedRequest {
                        seq_q: 4096,
                        seq_kv: 4096,
                        ..request
                    };
                    let plan = ListedPlan::new(&device("ptx_sm80", shared), request);
                    if shared > 101_376 || group < 64 {
                        let plan = plan.unwrap_or_else(|why| panic!("{request:?}: {why}"));
                        for tile in [plan.forward, plan.queries] {
                            assert!(tile.shared_bytes() <= shared);
                            assert_eq!(tile.inner.rows(), group);
                        }
                    }
                }
            }
        }
    }
}
