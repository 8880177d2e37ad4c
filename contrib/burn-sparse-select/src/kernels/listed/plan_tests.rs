//! Which calls are served, and their plans, on described devices.

use cubecl::ir::{DeviceProperties, ElemType, FloatKind};

use crate::kernels::listed::by_block::ByBlock;
use crate::kernels::listed::costs::Costs;
use crate::kernels::listed::mainloops::{ByKeys, Mainloop, Mainloops};
use crate::kernels::listed::request::ListedRequest;
use crate::kernels::listed::warpgroups;
use blocksparse_cubecl::described::Fake;

const BF16: ElemType = ElemType::Float(FloatKind::BF16);
const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Returns a device with `shared` bytes of shared memory.
fn device(fingerprint: &str, shared: usize) -> DeviceProperties {
    Fake::new("cuda", fingerprint, shared, &[]).properties
}

fn hopper() -> DeviceProperties {
    device("ptx_sm90", 232_448)
}

/// Returns the request of native sparse attention with the paper's parameters, except for widths and heads.
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

fn ampere() -> DeviceProperties {
    device("ptx_sm80", 166_912)
}

fn printed(request: ListedRequest) -> String {
    Mainloops::alone(&hopper(), request).unwrap().to_string()
}

#[test]
fn plans_fill_a_multiprocessor_with_steps() {
    assert_eq!(
        printed(nsa([64, 4], [128, 128])),
        "listed  16 rows of a query attend to its list of 13 blocks of 64 keys\n  \
         forward  32 keys a step, 32 units, 3 stages in 52 KiB shared\n  \
         dQ       32 keys a step, 32 units, 3 stages in 52 KiB shared\n  \
         dK, dV   64 keys × 64 rows a step, 128 units, 4 parts, 104 KiB shared"
    );
    assert_eq!(
        printed(nsa([64, 4], [192, 128])),
        "listed  16 rows of a query attend to its list of 13 blocks of 64 keys\n  \
         forward  16 keys a step, 32 units, 5 stages in 53 KiB shared\n  \
         dQ       16 keys a step, 32 units, 5 stages in 53 KiB shared\n  \
         dK, dV   64 keys × 32 rows a step, 128 units, 4 parts, 86 KiB shared"
    );
    // More heads give a cube more warps, with one ring.
    let of_64 = printed(nsa([256, 4], [128, 128]));
    assert!(of_64.contains("64 rows of a query"), "{of_64}");
}

/// Returns the request of lists of single keys, as in DeepSeek sparse attention.
fn keys(heads: usize, n: usize, most: usize) -> ListedRequest {
    ListedRequest::of_keys([1, heads, 1], [n, n], [128, 128], BF16, most, true)
}

#[test]
fn lists_of_single_keys_have_records() {
    assert_eq!(
        printed(keys(16, 65_536, 2048)),
        "listed  16 rows of a query attend to its list of 2048 keys\n  \
         forward  32 keys a step, 32 units, 3 stages in 52 KiB shared\n  \
         dQ       32 keys a step, 32 units, 3 stages in 52 KiB shared\n  \
         dK, dV   16 keys a step of a warp, a record of each pair, 64 units, 2 stages in 43 KiB shared"
    );
    let short = ListedRequest::of_keys([2, 32, 2], [3, 70], [64, 64], BF16, 500, false);
    assert!(Mainloops::alone(&hopper(), short).is_ok());
    let refused = Mainloops::alone(&hopper(), keys(16, 1 << 19, 4096)).unwrap_err();
    assert!(refused.contains("32 bits"));
}

/// The forward pass of many heads runs on wgmma, if they fill its rows and the device has it.
#[rstest::rstest]
#[case(128, [128, 128], Some("128 keys a step on wgmma, 256 units, 3 stages in 225 KiB shared"))]
#[case(100, [64, 64], Some("128 keys a step on wgmma, 256 units, 3 stages in 113 KiB shared"))]
#[case(128, [192, 128], Some("64 keys a step on wgmma, 256 units, 3 stages in 169 KiB shared"))]
#[case(64, [128, 128], Some("64 keys a step on wgmma, 128 units, 3 stages in 113 KiB shared"))]
#[case(48, [64, 128], Some("64 keys a step on wgmma, 128 units, 3 stages in 81 KiB shared"))]
#[case(80, [128, 128], None)]
#[case(32, [128, 128], None)]
#[case(64, [80, 64], None)]
fn many_heads_are_on_wgmma(
    #[case] heads: usize,
    #[case] dims: [usize; 2],
    #[case] line: Option<&str>,
) {
    let request = ListedRequest::of_keys([1, heads, 1], [4096; 2], dims, BF16, 512, true);
    let plan = Mainloops::alone(&hopper(), request).unwrap();
    let printed = plan.forward_line();
    match line {
        Some(line) => assert_eq!(printed, format!("  forward  {line}")),
        None => assert!(!printed.contains("wgmma"), "{printed}"),
    }
    for mainloop in [plan.forward, plan.queries] {
        match mainloop {
            Mainloop::Warpgroups(tile) => {
                assert!(tile.shared_bytes() <= 232_448);
                assert!(matches!(tile.warp_keys(), 8 | 16 | 32));
            }
            Mainloop::Warps(_) => assert_eq!(line, None),
        }
    }
    let on_wgmma = matches!(plan.by_keys, ByKeys::WarpgroupRecords(_));
    assert_eq!(on_wgmma, line.is_some());
    let printed = Mainloops::alone(&ampere(), request).unwrap().to_string();
    assert!(!printed.contains("wgmma"), "{printed}");
}

/// Adjacent queries fill two warpgroups where one query fills none.
#[rstest::rstest]
#[case(8, [128, 128], Some(16))]
#[case(16, [128, 128], Some(8))]
#[case(16, [192, 128], Some(8))]
#[case(24, [64, 64], Some(5))]
#[case(32, [64, 128], Some(4))]
#[case(40, [128, 128], Some(3))]
#[case(4, [128, 128], None)]
#[case(20, [128, 128], None)]
#[case(48, [128, 128], None)]
#[case(64, [128, 128], None)]
#[case(16, [80, 128], None)]
fn few_heads_share_lists_with_their_neighbours(
    #[case] heads: usize,
    #[case] dims: [usize; 2],
    #[case] together: Option<usize>,
) {
    let request = ListedRequest::of_keys([1, heads, 1], [4096; 2], dims, BF16, 512, true);
    assert_eq!(warpgroups::neighbours(&request), together);
    let plan = Mainloops::together(&hopper(), request);
    assert_eq!(plan.ok().map(|plan| plan.together), together);
    assert!(Mainloops::together(&ampere(), request).is_err());
    if let Ok(plan) = plan {
        let (
            Mainloop::Warpgroups(forward),
            Mainloop::Warpgroups(queries),
            ByKeys::WarpgroupRecords(spread),
        ) = (plan.forward, plan.queries, plan.by_keys)
        else {
            panic!("neighbours are on wgmma: {plan}");
        };
        for tile in [forward, queries] {
            assert!(tile.shared_bytes() <= 232_448);
            assert_eq!(Some(tile.queries), together);
        }
        assert!(spread.shared_bytes() <= 232_448);
        assert_eq!(Some(spread.inner.queries), together);
    }
}

#[test]
fn neighbours_print_what_they_run() {
    let plan = Mainloops::together(&hopper(), keys(16, 65_536, 2048)).unwrap();
    assert_eq!(
        plan.to_string(),
        "listed  8 neighbouring queries of 16 rows attend to the union of their lists of 2048 keys\n  \
         forward  128 keys a step on wgmma, 256 units, 3 stages in 225 KiB shared\n  \
         dQ       64 keys a step on wgmma, 256 units, 3 stages in 161 KiB shared\n  \
         dK, dV   64 keys a step of a warpgroup on wgmma, a record of each pair, 256 units in 193 KiB shared"
    );
    let few = ListedRequest {
        seq_q: 7,
        ..keys(16, 65_536, 2048)
    };
    assert!(Mainloops::together(&hopper(), few).is_err());
}

/// Overlapping lists of blocks.
#[test]
fn neighbours_share_blocks_that_are_alike() {
    let request = nsa([64, 4], [128, 128]);
    assert_eq!(
        Mainloops::together(&hopper(), request).unwrap().to_string(),
        "listed  8 neighbouring queries of 16 rows attend to the union of their lists of 13 blocks of 64 keys\n  \
         forward  128 keys a step on wgmma, 256 units, 3 stages in 225 KiB shared\n  \
         dQ       64 keys a step on wgmma, 256 units, 3 stages in 161 KiB shared\n  \
         dK, dV   64 keys × 64 rows a step, 128 units, 4 parts, 104 KiB shared"
    );
    for (overlap, together) in [(0.0, false), (0.2, false), (0.85, true)] {
        let costs = Costs::new(&request.with_overlap(overlap), true);
        assert_eq!(costs.together[0] < costs.alone[0], together, "{overlap}");
    }
}

/// Strategies for lists of random keys, measured on an H100: each choice is the fastest, or within a tenth of it.
#[rstest::rstest]
#[case([16, 65_536, 2048], [false, false])]
#[case([16, 65_536, 8192], [true, true])]
#[case([128, 65_536, 2048], [false, false])]
#[case([16, 16_384, 128], [false, false])]
#[case([16, 16_384, 512], [false, false])]
#[case([8, 16_384, 512], [false, true])]
#[case([4, 16_384, 512], [true, true])]
#[case([16, 8192, 2048], [true, true])]
fn ways_are_those_that_were_measured(#[case] sizes: [usize; 3], #[case] in_tiles: [bool; 2]) {
    let [heads, n, most] = sizes;
    let costs = Costs::new(&keys(heads, n, most), true);
    let found = [0, 1].map(|pass| costs.tiles[pass] < costs.alone[pass]);
    assert_eq!(found, in_tiles, "{costs:?}");
}

/// The same with groups of adjacent queries, for overlapping lists.
#[rstest::rstest]
#[case([16, 65_536, 2048], 0, [false, true])]
#[case([16, 65_536, 2048], 90, [true, true])]
#[case([16, 65_536, 8192], 0, [true, false])]
#[case([16, 65_536, 8192], 95, [true, true])]
#[case([8, 65_536, 2048], 90, [true, true])]
#[case([32, 65_536, 2048], 90, [true, true])]
#[case([16, 16_384, 512], 0, [false, true])]
#[case([16, 16_384, 512], 90, [true, true])]
#[case([16, 16_384, 128], 90, [true, true])]
#[case([16, 8192, 2048], 90, [true, false])]
#[case([16, 4096, 512], 90, [true, true])]
fn neighbours_share_lists_where_that_was_faster(
    #[case] sizes: [usize; 3],
    #[case] overlap: u8,
    #[case] together: [bool; 2],
) {
    let [heads, n, most] = sizes;
    let request = ListedRequest {
        overlap,
        ..keys(heads, n, most)
    };
    let costs = Costs::new(&request, true);
    let found = [0, 1].map(|pass| costs.together[pass] < costs.alone[pass].min(costs.tiles[pass]));
    assert_eq!(found, together, "{costs:?}");
}

/// Blocks are multiplied with the queries that list them if blocks are long and lists overlap little.
#[rstest::rstest]
#[case([64, 13], 85, false)]
#[case([64, 13], 0, true)]
#[case([128, 15], 85, true)]
#[case([128, 15], 0, true)]
fn blocks_meet_queries_where_that_should_be_faster(
    #[case] blocks: [usize; 2],
    #[case] overlap: u8,
    #[case] by_block: bool,
) {
    let ([block, most], n, sizes) = (blocks, 65_536, [1, 64, 4]);
    let tiles = (n * most + 63 * n / block) / 64;
    let request = ListedRequest::new(sizes, [n, n], [128, 128], BF16, [block, most], [64, tiles]);
    let request = ListedRequest { overlap, ..request };
    let costs = Costs::new(&request, true);
    let found = costs.by_block < costs.alone[0].min(costs.together[0]);
    assert_eq!(found, by_block, "{costs:?}");
    for (backward, lines) in [(false, 2), (true, 3)] {
        let plan = ByBlock::new(&hopper(), request, backward).unwrap();
        assert!(plan.lines()[0].contains("blocks of"));
        assert_eq!(plan.lines().len(), lines);
        assert!(ByBlock::new(&ampere(), request, backward).is_err());
    }
}

/// Records cover some queries at a time, a multiple of 32 or all of them.
#[test]
fn records_have_a_bound() {
    let queries = |heads, n, most| keys(heads, n, most).lists_of_records(n, most);
    assert_eq!(queries(16, 65_536, 2048), Some(512));
    assert_eq!(queries(16, 65_536, 8192), Some(128));
    assert_eq!(queries(16, 300, 40), Some(300));
    let many = ListedRequest {
        batch: 256,
        ..keys(16, 1024, 4096)
    };
    assert_eq!(many.lists_of_records(1024, 4096), None);
}

#[test]
fn what_kernels_do_not_take_says_why() {
    let good = nsa([64, 4], [128, 128]);
    let refused = |properties: &DeviceProperties, request: ListedRequest| {
        Mainloops::alone(properties, request).unwrap_err()
    };
    let on_hopper = |request| refused(&hopper(), request);
    assert!(refused(&device("ptx_sm75", 65_536), good).contains("8.0"));
    assert!(refused(&device("wgpu", 32_768), good).contains("8.0"));
    assert!(refused(&device("ptx_sm80", 16_384), good).contains("shared memory"));
    assert!(on_hopper(ListedRequest { dtype: F32, ..good }).contains("bf16"));
    assert!(on_hopper(nsa([512, 2], [128, 128])).contains("more than 128 heads"));
    for dims in [[72, 128], [128, 192], [256, 64], [8, 8]] {
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
        for group in [1, 8, 16, 20, 32, 48, 64, 128] {
            for head_dim in [16, 48, 64, 128, 192] {
                for value_dim in [16, 64, 128] {
                    let request = nsa([2 * group, 2], [head_dim, value_dim]);
                    let request = ListedRequest {
                        seq_q: 4096,
                        seq_kv: 4096,
                        ..request
                    };
                    let plan = Mainloops::alone(&device("ptx_sm80", shared), request);
                    if shared > 101_376 || group < 64 {
                        let plan = plan.unwrap_or_else(|why| panic!("{request:?}: {why}"));
                        for mainloop in [plan.forward, plan.queries] {
                            let Mainloop::Warps(tile) = mainloop else {
                                panic!("{plan}");
                            };
                            assert!(tile.shared_bytes() <= shared);
                            assert_eq!(
                                (tile.heads, tile.inner.rows()),
                                (group, group.next_multiple_of(16))
                            );
                        }
                    }
                }
            }
        }
    }
}
