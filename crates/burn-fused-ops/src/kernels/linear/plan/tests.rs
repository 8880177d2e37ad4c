//! What products run, on described devices.

use crate::kernels::linear::plan::*;

/// An H200's.
const MULTIPROCESSORS: usize = 132;
const SHARED: usize = 232_448;

fn request(lengths: [usize; 3], parts: bool) -> ProductRequest {
    ProductRequest {
        wide: parts,
        parts,
        ..ProductRequest::plain(true, lengths)
    }
}

fn best(request: ProductRequest) -> ProductPlan {
    ProductPlan::on_wgmma(request, MULTIPROCESSORS, SHARED).unwrap()[0]
}

#[test]
fn products_of_layers_are_planned_as_they_were_measured() {
    for (lengths, parts, expected) in [
        (
            [49_152, 1536, 512],
            false,
            "tiles of 128 × 256, 4 slabs of 64, 132 cubes",
        ),
        (
            [49_152, 512, 512],
            false,
            "tiles of 128 × 256, 4 slabs of 64, 132 cubes",
        ),
        (
            [8192, 8192, 8192],
            false,
            "tiles of 128 × 256, 4 slabs of 64, 132 cubes",
        ),
        (
            [512, 2048, 49_152],
            true,
            "tiles of 128 × 256, 4 slabs of 64, 128 cubes, the depth in 4 parts",
        ),
        (
            [512, 512, 49_152],
            true,
            "tiles of 128 × 128, 7 slabs of 64, 128 cubes, the depth in 8 parts",
        ),
        (
            [1, 8, 8],
            false,
            "tiles of 128 × 64, 8 slabs of 64, 1 cubes",
        ),
    ] {
        let plan = best(request(lengths, parts));
        assert_eq!(
            plan.to_string(),
            format!("wgmma, {expected}"),
            "{lengths:?}"
        );
    }
}

/// Shared memory decides how many slabs a cube has, and whether two cubes share a multiprocessor.
#[test]
fn products_on_mma_fit_their_devices() {
    for (name, multiprocessors, shared, expected) in [
        (
            "8.0",
            108,
            163 << 10,
            [
                "tiles of 128 × 256, 256 units, 3 slabs of 64, 108 cubes",
                "tiles of 128 × 128, 128 units, 2 slabs of 64, 216 cubes",
                "tiles of 128 × 128, 256 units, 4 slabs of 64, 108 cubes",
                "tiles of 128 × 64, 128 units, 3 slabs of 64, 216 cubes",
            ]
            .as_slice(),
        ),
        (
            "8.6, 8.9, 12.0",
            84,
            99 << 10,
            &[
                "tiles of 128 × 256, 256 units, 2 slabs of 64, 84 cubes",
                "tiles of 128 × 128, 256 units, 3 slabs of 64, 84 cubes",
                "tiles of 128 × 64, 128 units, 2 slabs of 64, 168 cubes",
            ],
        ),
        (
            "9.0",
            MULTIPROCESSORS,
            SHARED,
            &[
                "tiles of 128 × 256, 256 units, 4 slabs of 64, 132 cubes",
                "tiles of 128 × 128, 128 units, 3 slabs of 64, 264 cubes",
                "tiles of 128 × 128, 256 units, 4 slabs of 64, 132 cubes",
                "tiles of 128 × 64, 128 units, 4 slabs of 64, 264 cubes",
            ],
        ),
    ] {
        let request = request([49_152, 1536, 1536], false);
        let plans = ProductPlan::on_mma(request, multiprocessors, shared).unwrap();
        let got: Vec<_> = plans.iter().map(ToString::to_string).collect();
        assert_eq!(got[0], format!("mma, {}", expected[0]), "{name}");
        assert_eq!(got.len(), expected.len(), "{name}");
        for text in expected {
            assert!(got.contains(&format!("mma, {text}")), "{name}: {text}");
        }
    }
}

/// Pieces of 16 bytes are copied by a predicate where none is cut, in the numbers of either factor that are contiguous.
#[test]
fn pieces_are_whole_where_lengths_are_multiples_of_eight() {
    use Order::{Across, Depth};
    for (lengths, orders, expected) in [
        ([129, 64, 72], [Depth, Across], true),
        ([129, 64, 72], [Across, Across], false),
        ([136, 64, 72], [Across, Depth], true),
        ([136, 64, 71], [Depth, Across], false),
    ] {
        let request = ProductRequest {
            orders,
            ..request(lengths, false)
        };
        for plan in ProductPlan::on_mma(request, MULTIPROCESSORS, SHARED).unwrap() {
            let TierTile::Mma(tile) = plan.tile else {
                panic!("{plan}")
            };
            assert_eq!(tile.whole, expected, "{lengths:?} {orders:?}");
        }
    }
}

#[test]
fn mma_refuses_what_it_has_not() {
    let plain = request([128, 128, 128], false);
    let refused = |request| ProductPlan::on_mma(request, MULTIPROCESSORS, SHARED).unwrap_err();
    assert_eq!(
        refused(plain.with(Epilogue::Heads { dim: 64 })),
        "on mma.sync sums are the result, and become nothing else"
    );
    let by_heads = ProductRequest {
        by_heads: true,
        ..plain
    };
    assert_eq!(
        refused(by_heads),
        "on mma.sync a factor does not lie by heads"
    );
    assert_eq!(
        refused(request([64, 12, 64], false)),
        "the columns are not a multiple of 8"
    );
    assert_eq!(
        ProductPlan::on_mma(plain, 1, 16 << 10).unwrap_err(),
        "no tile fits the shared memory"
    );
}

/// Sums of exponentials are of whole runs, of an f32 result that is not in parts, and on wgmma.
#[test]
fn sums_of_exponentials_are_of_whole_runs() {
    let plain = ProductRequest {
        wide: true,
        ..request([1024, 4096, 1024], false)
    };
    let sums = |run: usize, request: ProductRequest| {
        let request = request.with(Epilogue::LogSums { run });
        let plans = ProductPlan::on_wgmma(request, MULTIPROCESSORS, SHARED);
        plans.map(|plans| plans[0].to_string())
    };
    assert_eq!(
        sums(16, plain).unwrap(),
        "wgmma, tiles of 128 × 256, 4 slabs of 64, as logarithms of sums over 16 columns, 128 cubes"
    );
    for (run, cols) in [(12, 4096), (4, 4096), (128, 4096), (64, 4064)] {
        assert_eq!(
            sums(run, ProductRequest { cols, ..plain }).unwrap_err(),
            "the columns are no runs of 8, 16, 32 or 64"
        );
    }
    for request in [
        ProductRequest {
            wide: false,
            ..plain
        },
        ProductRequest {
            parts: true,
            ..plain
        },
    ] {
        assert_eq!(
            sums(16, request).unwrap_err(),
            "sums of exponentials are of whole sums in f32"
        );
    }
    let of_mma = plain.with(Epilogue::LogSums { run: 16 });
    assert_eq!(
        ProductPlan::on_mma(of_mma, MULTIPROCESSORS, SHARED).unwrap_err(),
        "on mma.sync sums are the result, and become nothing else"
    );
}

/// The highest are of whole runs within a tile, of an f32 result, and on wgmma.
#[test]
fn the_highest_are_of_whole_runs() {
    let request = |cols: usize, run: usize| {
        let plain = ProductRequest {
            wide: true,
            batch: 4,
            ..request([2048, cols, 128], false)
        };
        plain.with(Epilogue::Maxima { run })
    };
    let plans = ProductPlan::on_wgmma(request(65_536, 128), MULTIPROCESSORS, SHARED).unwrap();
    assert_eq!(
        plans[0].to_string(),
        "wgmma, tiles of 128 × 256, 4 slabs of 64, as the highest of 128 columns, 132 cubes"
    );
    assert!(plans.iter().all(|plan| plan.tile_cols() >= 128));
    for (cols, run) in [(4096, 12), (4096, 256), (64, 128)] {
        assert_eq!(
            ProductPlan::on_wgmma(request(cols, run), MULTIPROCESSORS, SHARED).unwrap_err(),
            "the columns are no runs of 8, 16, 32, 64 or 128"
        );
    }
}

/// Rows choose in a tile that has all columns.
#[test]
fn choices_are_of_all_columns() {
    let choices = |cols: usize, most: usize| {
        let highest = Highest {
            most,
            parts: 2,
            step: 512,
        };
        let request = ProductRequest {
            wide: true,
            batch: 32,
            ..request([65_536, cols, 128], false)
        };
        let request = request.with(Epilogue::Highest(highest));
        let plans = ProductPlan::on_wgmma(request, MULTIPROCESSORS, SHARED);
        plans.map(|plans| plans[0].to_string())
    };
    for (cols, tile) in [(40, 64), (128, 128), (256, 256)] {
        let plan = choices(cols, 2).unwrap();
        let has_all = plan.starts_with(&format!("wgmma, tiles of 128 × {tile}, "));
        assert!(has_all && plan.contains("the 2 highest of a row"), "{plan}");
    }
    for (cols, most) in [(264, 2), (256, 9), (256, 0)] {
        let refused = "a row chooses up to 8 scores of up to 256 columns";
        assert_eq!(choices(cols, most).unwrap_err(), refused);
    }
}

/// Sums of weights over columns and diagonals are of the rows of one tile, whose sums leave registers room, and on wgmma.
#[test]
fn sums_over_columns_are_of_one_tile_of_rows() {
    let plain = ProductRequest {
        wide: true,
        batch: 32,
        ..request([128, 65_536, 128], false)
    };
    let sums = |request: ProductRequest| {
        let request = request.with(Epilogue::LineSums);
        let plans = ProductPlan::on_wgmma(request, MULTIPROCESSORS, SHARED);
        plans.map(|plans| plans[0].to_string())
    };
    assert_eq!(
        sums(plain).unwrap(),
        "wgmma, tiles of 128 × 128, 6 slabs of 64, as sums over columns and diagonals of weights, 132 cubes"
    );
    assert_eq!(
        sums(ProductRequest { rows: 129, ..plain }).unwrap_err(),
        "sums over columns are of the rows of one tile"
    );
    let narrow = ProductRequest {
        wide: false,
        ..plain
    };
    assert_eq!(
        sums(narrow).unwrap_err(),
        "sums over columns are of whole sums in f32"
    );
}

/// Every slab of the depth is in one part, no part is empty, and a cube has at least a tile.
#[test]
fn parts_cover_the_depth() {
    for depth in [1, 8, 64, 65, 511, 512, 4097, 12_288, 49_152, 100_000] {
        for lengths in [[8, 8, depth], [512, 1536, depth], [2048, 512, depth]] {
            let of_wgmma = ProductPlan::on_wgmma(request(lengths, true), 132, SHARED).unwrap();
            let of_mma = ProductPlan::on_mma(request(lengths, true), 132, SHARED).unwrap();
            for (plan, shared) in of_wgmma.iter().chain(&of_mma).map(|plan| match plan.tile {
                TierTile::Wgmma(tile) => (plan, tile.shared_bytes()),
                TierTile::Mma(tile) => (plan, tile.shared_bytes()),
            }) {
                let slabs = depth.div_ceil(SLAB);
                assert!((plan.parts - 1) * plan.part_slabs < slabs, "{plan}");
                assert!(plan.parts * plan.part_slabs >= slabs, "{plan}");
                assert!(shared <= SHARED, "{plan}");
                let [rows, cols, _] = lengths;
                let tiles = rows.div_ceil(ROWS) * cols.div_ceil(plan.tile.cols()) * plan.parts;
                assert!(plan.cubes > 0 && plan.cubes <= tiles.min(264), "{plan}");
            }
        }
    }
}

#[test]
fn what_the_kernel_does_not_take_is_said() {
    let refused = |request| ProductPlan::on_wgmma(request, MULTIPROCESSORS, SHARED).unwrap_err();
    assert_eq!(
        refused(request([64, 12, 64], false)),
        "the columns are not a multiple of 8"
    );
    assert_eq!(refused(request([64, 16, 0], false)), "a factor is empty");
    assert_eq!(
        refused(request([1 << 20, 1 << 16, 64], false)),
        "a length or the result has more numbers than the kernel counts in 32 bits"
    );
    assert_eq!(
        ProductPlan::on_wgmma(request([64, 16, 64], false), 132, 16 << 10).unwrap_err(),
        "no tile fits the shared memory"
    );
    // Without parts there are none, however deep the product is.
    assert_eq!(best(request([64, 64, 1 << 20], false)).parts(), 1);
}
