//! Plans of products on described devices.

use crate::kernels::linear::plan::*;

/// Values of an H200.
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
        ([49_152, 1536, 512], false, "256, 4 slabs of 64, 132 cubes"),
        ([49_152, 512, 512], false, "256, 4 slabs of 64, 132 cubes"),
        ([8192, 8192, 8192], false, "256, 4 slabs of 64, 132 cubes"),
        (
            [512, 2048, 49_152],
            true,
            "256, 4 slabs of 64, 128 cubes, the depth in 4 parts",
        ),
        (
            [512, 512, 49_152],
            true,
            "128, 7 slabs of 64, 128 cubes, the depth in 8 parts",
        ),
        ([1, 8, 8], false, "64, 8 slabs of 64, 1 cubes"),
    ] {
        let plan = best(request(lengths, parts)).to_string();
        let expected = format!("wgmma, tiles of 128 × {expected}");
        assert_eq!(plan, expected, "{lengths:?}");
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

/// Copies are predicated if no piece is cut, in the contiguous dimension of both factors.
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

/// Log-sums and maxima need whole runs, maxima within a tile; top-k choices need all columns in one tile; line sums need the rows of one tile and registers
/// for the sums. All need an f32 result without parts, and wgmma.
#[test]
fn what_becomes_of_sums_is_planned_or_refused() {
    let wide = |batch: usize, lengths: [usize; 3]| ProductRequest {
        batch,
        wide: true,
        ..request(lengths, false)
    };
    let sums =
        |cols: usize, run: usize| wide(1, [1024, cols, 1024]).with(Epilogue::LogSums { run });
    let maxima =
        |cols: usize, run: usize| wide(4, [2048, cols, 128]).with(Epilogue::Maxima { run });
    let choices = |cols: usize, most: usize| {
        let (parts, step) = (2, 512);
        let highest = Highest { most, parts, step };
        wide(32, [65_536, cols, 128]).with(Epilogue::Highest(highest))
    };
    let lines = |rows: usize| wide(32, [rows, 65_536, 128]).with(Epilogue::LineSums);
    let in_half = |request: ProductRequest| ProductRequest {
        wide: false,
        ..request
    };
    let in_parts = ProductRequest {
        parts: true,
        ..sums(4096, 16)
    };
    let no_runs = "the columns are no runs of 8, 16, 32 or 64";
    let no_longer_runs = "the columns are no runs of 8, 16, 32, 64 or 128";
    let no_sums = "sums of exponentials are of whole sums in f32";
    let no_choice = "a row chooses up to 8 scores of up to 256 columns";
    let one_tile = "sums over columns are of the rows of one tile";
    let whole_sums = "sums over columns are of whole sums in f32";
    for (request, expected) in [
        (
            sums(4096, 16),
            Ok("256, 4 slabs of 64, as logarithms of sums over 16 columns, 128"),
        ),
        (sums(4096, 12), Err(no_runs)),
        (sums(4096, 4), Err(no_runs)),
        (sums(4096, 128), Err(no_runs)),
        (sums(4064, 64), Err(no_runs)),
        (in_half(sums(4096, 16)), Err(no_sums)),
        (in_parts, Err(no_sums)),
        (
            maxima(65_536, 128),
            Ok("256, 4 slabs of 64, as the highest of 128 columns, 132"),
        ),
        (maxima(4096, 12), Err(no_longer_runs)),
        (maxima(4096, 256), Err(no_longer_runs)),
        (maxima(64, 128), Err(no_longer_runs)),
        (
            choices(40, 2),
            Ok("64, 8 slabs of 64, as the 2 highest of a row, 132"),
        ),
        (
            choices(128, 2),
            Ok("128, 7 slabs of 64, as the 2 highest of a row, 132"),
        ),
        (
            choices(256, 2),
            Ok("256, 4 slabs of 64, as the 2 highest of a row, 132"),
        ),
        (choices(264, 2), Err(no_choice)),
        (choices(256, 9), Err(no_choice)),
        (choices(256, 0), Err(no_choice)),
        (
            lines(128),
            Ok("128, 6 slabs of 64, as sums over columns and diagonals of weights, 132"),
        ),
        (lines(129), Err(one_tile)),
        (in_half(lines(128)), Err(whole_sums)),
    ] {
        let plans = ProductPlan::on_wgmma(request, MULTIPROCESSORS, SHARED);
        let text = plans.as_ref().map(|plans| plans[0].to_string());
        let expected = expected.map(|text| format!("wgmma, tiles of 128 × {text} cubes"));
        assert_eq!(text.map_err(|why| *why), expected, "{request:?}");
        if let (Epilogue::Maxima { run }, Ok(plans)) = (request.epilogue, plans) {
            assert!(plans.iter().all(|plan| plan.tile_cols() >= run));
        }
        assert_eq!(
            ProductPlan::on_mma(request, MULTIPROCESSORS, SHARED).unwrap_err(),
            "on mma.sync sums are the result, and become nothing else"
        );
    }
}

/// Every slab of the depth is in one part, no part is empty, and a cube has at least one tile.
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
fn what_the_kernels_do_not_take_is_said() {
    type Plans = fn(ProductRequest, usize, usize) -> Result<Vec<ProductPlan>, &'static str>;
    let (wgmma, mma): (Plans, Plans) = (ProductPlan::on_wgmma, ProductPlan::on_mma);
    let by_heads = ProductRequest {
        by_heads: true,
        ..request([128, 128, 128], false)
    };
    let odd = request([64, 12, 64], false);
    let large = request([1 << 20, 1 << 16, 64], false);
    let (small, empty) = (request([64, 16, 64], false), request([64, 16, 0], false));
    let no_eights = "the columns are not a multiple of 8";
    let too_many = "a length or the result has more numbers than the kernel counts in 32 bits";
    for (plans, request, shared, expected) in [
        (
            mma,
            by_heads,
            SHARED,
            "on mma.sync a factor does not lie by heads",
        ),
        (mma, odd, SHARED, no_eights),
        (wgmma, odd, SHARED, no_eights),
        (wgmma, empty, SHARED, "a factor is empty"),
        (wgmma, large, SHARED, too_many),
        (mma, small, 16 << 10, "no tile fits the shared memory"),
        (wgmma, small, 16 << 10, "no tile fits the shared memory"),
    ] {
        let refused = plans(request, MULTIPROCESSORS, shared).unwrap_err();
        assert_eq!(refused, expected);
    }
    // A request without parts gets none, however deep the product is.
    assert_eq!(best(request([64, 64, 1 << 20], false)).parts(), 1);
}
