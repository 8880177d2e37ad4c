//! Layouts of weights: their counts, both orders of their blocks, and equal blocks for a seed everywhere.

use blocksparse::{WEIGHT_BLOCK_SIZES, WeightLayout, WeightPattern};
use proptest::prelude::*;
use rstest::rstest;

fn picture(layout: &WeightLayout) -> Vec<String> {
    format!("{layout:#}").lines().map(str::to_owned).collect()
}

/// A quarter of 8 × 12 blocks. These must never change, because a layout may be saved as its seed.
#[rstest]
#[case(WeightPattern::Dense, "dense(8×12 blocks of 16, 100.0 %)", &["############"; 8])]
#[case(WeightPattern::Random, "random(8×12 blocks of 16, 25.0 %, seed 7)", &[".....##...#.", "..#.#....#.#", "#..#........", ".......#.###", ".#....#.#.#.", "..#.#......#", ".........#..", "#......#..#."])]
#[case(WeightPattern::SmallWorld, "small-world(8×12 blocks of 16, 25.0 %, seed 7)", &["..........##", "###.........", ".###........", "...###......", "....###.....", "......###...", "#......###..", ".........###"])]
#[case(WeightPattern::BarabasiAlbert, "barabasi-albert(8×12 blocks of 16, 25.0 %, seed 7)", &["#.#.###.##.#", "#.........#.", "..##...#..#.", ".......#...#", "...#.#......", "........#...", ".#.......#..", ".#..#.#....."])]
#[case(WeightPattern::Banded, "banded(8×12 blocks of 16, 16.7 %)", &["##..........", ".##.........", "...##.......", "....##......", "......##....", ".......##...", ".........##.", "..........##"])]
fn pictures(#[case] pattern: WeightPattern, #[case] title: &str, #[case] rows: &[&str]) {
    let layout = pattern.layout([128, 192], 16, 0.25, 7).unwrap();
    let got = picture(&layout);
    assert_eq!(got[0], title);
    assert_eq!(got[1..], *rows, "{layout:#}");
}

#[test]
fn the_diagram_of_the_documentation() {
    let rows = ["##.#", ".#..", "..##"];
    let mask: Vec<bool> = rows
        .iter()
        .flat_map(|row| row.chars().map(|c| c == '#'))
        .collect();
    let layout = WeightLayout::from_mask([48, 64], 16, &mask).unwrap();
    assert_eq!(layout.output_offsets(), [0, 1, 3, 4, 6]);
    assert_eq!(layout.input_blocks(), [0, 0, 1, 2, 0, 2]);
    assert_eq!(layout.output_blocks(), [0, 1, 1, 2, 3, 3]);
    assert_eq!(layout.input_offsets(), [0, 3, 4, 6]);
    assert_eq!(layout.input_order(), [0, 1, 4, 2, 3, 5]);
    assert_eq!(layout.output_blocks_by_input(), [0, 1, 3, 1, 2, 3]);
    assert_eq!(layout.shape(), [6, 16, 16]);
    assert_eq!([layout.inputs(), layout.outputs()], [48, 64]);
    assert_eq!(picture(&layout)[1..], rows);
}

#[test]
fn cells_of_several_blocks() {
    let layout = WeightLayout::banded([16 * 90, 16 * 90], 16, 0).unwrap();
    let rows = picture(&layout);
    assert_eq!(rows.len(), 46);
    assert!(rows[1].starts_with("+.."), "{}", rows[1]);
    let dense = WeightLayout::dense([16 * 3, 16 * 190], 16).unwrap();
    assert_eq!(picture(&dense)[1..], ["#".repeat(64)]);
}

#[test]
fn the_largest_norms_are_kept() {
    let norms = [3.0, 1.0, 2.0, 2.0, f32::INFINITY, 0.0];
    let layout = |density| WeightLayout::by_magnitude([32, 48], 16, &norms, density).unwrap();
    // Of the two with norm 2 the first is kept.
    assert_eq!(picture(&layout(0.5))[1..], ["#.#", ".#."]);
    assert_eq!(picture(&layout(0.6))[1..], ["#.#", "##."]);
    assert_eq!(layout(1e-9).len(), 1);
    let expected = "magnitude(2×3 blocks of 16, 50.0 %)";
    assert_eq!(layout(0.5).to_string(), expected);
}

#[rstest]
#[case([0, 16], 16, 0.5, "inputs must be a positive multiple of the block, 16, got 0")]
#[case([16, 24], 16, 0.5, "outputs must be a positive multiple of the block, 16, got 24")]
#[case([16, 16], 8, 0.5, "block must be one of [16, 32, 64, 128], got 8")]
#[case([16, 16], 16, 0.0, "density must be above 0 and at most 1, got 0")]
#[case([16, 16], 16, f64::NAN, "density must be above 0 and at most 1, got NaN")]
#[case([16, 16], 16, 1.1, "density must be above 0 and at most 1, got 1.1")]
#[case([1 << 40, 1 << 40], 16, 0.5, "the weight must be cut into at most 67108864 blocks, got 68719476736 × 68719476736")]
fn errors(
    #[case] shape: [usize; 2],
    #[case] block: usize,
    #[case] density: f64,
    #[case] message: &str,
) {
    for pattern in WeightPattern::all().filter(|pattern| *pattern != WeightPattern::Dense) {
        refused! { pattern.layout(shape, block, density, 1) => message; }
    }
}

#[test]
fn errors_of_lists() {
    refused! {
        WeightLayout::from_mask([32, 32], 16, &[true; 3]) => "mask must be of 4 entries, 2 × 2 blocks, got 3";
        WeightLayout::by_magnitude([32, 16], 16, &[1.0; 3], 0.5) => "norms must be of 2 entries, 2 × 1 blocks, got 3";
        WeightLayout::by_magnitude([32, 16], 16, &[1.0, f32::NAN], 0.5) => "norms must be numbers, got NaN at 1";
        WeightLayout::small_world([32, 16], 16, 0.5, 1.5, 0) => "rewiring must be from 0 to 1, got 1.5";
    }
}

#[test]
fn notation() {
    for pattern in WeightPattern::all() {
        assert_eq!(
            pattern.to_string().parse::<WeightPattern>().unwrap(),
            pattern
        );
        let json = serde_json::to_string(&pattern).unwrap();
        assert_eq!(json, format!("\"{pattern}\""));
        let text = format!("{pattern}:0.5");
        assert_eq!(WeightPattern::with_density(&text).unwrap(), (pattern, 0.5));
    }
    refused! {
        WeightPattern::with_density("ring:0.5") => "cannot read 'ring' as a pattern: expected one of dense, random, small-world, barabasi-albert, banded, got ring";
        WeightPattern::with_density("random") => "cannot read 'random' as a pattern: expected NAME:DENSITY, such as random:0.25, got no colon";
        WeightPattern::with_density("random:some") => "cannot read 'random:some' as a pattern: expected NAME:DENSITY, such as random:0.25, got some";
        WeightPattern::with_density("random:0") => "density must be above 0 and at most 1, got 0";
    }
}

#[test]
fn small_worlds_begin_as_rings_and_end_as_random_graphs() {
    let layout = |rewiring| WeightLayout::small_world([512, 512], 16, 0.125, rewiring, 3).unwrap();
    let near = |layout: &WeightLayout| {
        let steps = |(i, o): (u32, u32)| (i + 32 - o).min(o + 32 - i).min(i.abs_diff(o));
        layout
            .kept_blocks()
            .filter(|&block| steps(block) <= 2)
            .count()
    };
    let ring = layout(0.0);
    assert_eq!((ring.len(), near(&ring)), (128, 128));
    // Each input block is adjacent to equally many output blocks.
    assert!(
        ring.input_offsets()
            .windows(2)
            .all(|pair| pair[1] - pair[0] == 4)
    );
    let few = near(&layout(0.1));
    assert!((105..125).contains(&few), "{few}");
    let random = near(&layout(1.0));
    assert!(random < 35, "{random}");
}

#[test]
fn few_inputs_meet_most_outputs_by_preferential_attachment() {
    let degrees = |layout: &WeightLayout| {
        let pairs = layout.input_offsets().windows(2);
        let mut degrees: Vec<u32> = pairs.map(|pair| pair[1] - pair[0]).collect();
        degrees.sort_unstable();
        degrees
    };
    let attached = degrees(&WeightLayout::barabasi_albert([1024, 4096], 16, 0.1, 5).unwrap());
    let random = degrees(&WeightLayout::random([1024, 4096], 16, 0.1, 5).unwrap());
    assert!(attached[63] > 2 * random[63], "{attached:?}, {random:?}");
}

#[test]
fn what_is_read_is_checked() {
    let layout = WeightLayout::random([48, 64], 16, 0.5, 1).unwrap();
    let json = serde_json::to_value(&layout).unwrap();
    let changed = |key: &str, value: serde_json::Value| {
        let mut json = json.clone();
        json[key] = value;
        serde_json::from_value::<WeightLayout>(json)
    };
    let offsets = "corrupt layout: output_offsets must rise from 0 to 6 in 5 entries";
    refused! {
        changed("output_offsets", [0, 1, 2, 6].as_slice().into()) => offsets;
        changed("output_offsets", [0, 3, 1, 5, 6].as_slice().into()) => offsets;
        changed("output_offsets", [0, 1, 2, 5, 7].as_slice().into()) => offsets;
        changed("version", 2.into()) => "corrupt layout: version must be 1, got 2";
        changed("block", 8.into()) => "block must be one of [16, 32, 64, 128], got 8";
        changed("outputs", (1u64 << 60).into()) => "the weight must be cut into at most 67108864 blocks, got 3 × 72057594037927936";
    }
    for inputs in [[0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 0, 9]] {
        refused! { changed("input_blocks", inputs.as_slice().into()) => "…must rise and be below 3…"; }
    }
}

#[test]
fn pictures_are_written() {
    let folder = tempfile::tempdir().unwrap();
    for shape in [[64, 4096], [4096, 64], [512, 512]] {
        let layout = WeightLayout::small_world(shape, 16, 0.25, 0.1, 1).unwrap();
        let path = folder.path().join("layout.png");
        layout.save_png(&path).unwrap();
        assert!(std::fs::read(&path).unwrap().starts_with(b"\x89PNG"));
        let path = folder.path().join("layout.svg");
        layout.save_svg(&path).unwrap();
        assert!(
            std::fs::read_to_string(&path)
                .unwrap()
                .contains("small-world")
        );
    }
    let layout = WeightLayout::dense([16, 16], 16).unwrap();
    refused! { layout.save_png(folder.path().join("none/layout.png")) => "cannot draw…"; }
}

fn layouts() -> impl Strategy<Value = WeightLayout> {
    let sides = (1usize..20, 1usize..20, 0usize..WEIGHT_BLOCK_SIZES.len());
    let pattern = prop::sample::select(WeightPattern::all().collect::<Vec<_>>());
    (sides, pattern, 0.001f64..=1.0, any::<u64>()).prop_map(
        |((ins, outs, block), pattern, density, seed)| {
            let block = WEIGHT_BLOCK_SIZES[block];
            let layout = pattern.layout([ins * block, outs * block], block, density, seed);
            layout.unwrap()
        },
    )
}

proptest! {
    /// Both orders list the same blocks, sorted, and lookups agree with them.
    #[test]
    fn both_orders_agree(layout in layouts()) {
        let (ins, outs) = (layout.in_blocks(), layout.out_blocks());
        let mut kept = Vec::new();
        for output in 0..outs {
            for index in layout.blocks_of_output(output) {
                kept.push((output, layout.input_blocks()[index] as usize));
                prop_assert_eq!(layout.output_blocks()[index] as usize, output);
            }
        }
        prop_assert!(kept.is_sorted_by(|a, b| a < b));
        prop_assert_eq!(kept.len(), layout.len());
        prop_assert!(!layout.is_empty());
        let mut by_input = Vec::new();
        for input in 0..ins {
            let ends = &layout.input_offsets()[input..input + 2];
            for place in ends[0] as usize..ends[1] as usize {
                let index = layout.input_order()[place] as usize;
                let output = layout.output_blocks_by_input()[place] as usize;
                prop_assert_eq!(kept[index], (output, input));
                by_input.push((input, output));
            }
        }
        prop_assert!(by_input.is_sorted_by(|a, b| a < b));
        prop_assert_eq!(by_input.len(), kept.len());
        for input in 0..ins + 1 {
            for output in 0..outs + 1 {
                let place = kept.iter().position(|block| *block == (output, input));
                prop_assert_eq!(layout.index_of(input, output), place);
                prop_assert_eq!(layout.contains(input, output), place.is_some());
            }
        }
        let mut mask = vec![false; ins * outs];
        for (input, output) in layout.kept_blocks() {
            mask[input as usize * outs + output as usize] = true;
        }
        let shape = [layout.inputs(), layout.outputs()];
        prop_assert_eq!(&WeightLayout::from_mask(shape, layout.block(), &mask).unwrap(), &layout);
        let json = serde_json::to_string(&layout).unwrap();
        let read: WeightLayout = serde_json::from_str(&json).unwrap();
        prop_assert_eq!(&read, &layout);
        prop_assert_eq!(read.to_string(), layout.to_string());
    }

    /// The number of blocks follows the density, and no row or column is empty if there are enough blocks.
    #[test]
    fn densities(ins in 1usize..20, outs in 1usize..20, density in 0.001f64..=1.0, seed: u64) {
        let shape = [ins * 16, outs * 16];
        let count = ((density * (ins * outs) as f64).round() as usize).max(1);
        let drawn = [WeightPattern::Random, WeightPattern::SmallWorld, WeightPattern::BarabasiAlbert];
        for pattern in drawn {
            let layout = pattern.layout(shape, 16, density, seed).unwrap();
            prop_assert_eq!(layout.len(), count);
            prop_assert_eq!(&pattern.layout(shape, 16, density, seed).unwrap(), &layout);
            prop_assert_eq!(layout.seed(), Some(seed));
        }
        let random = WeightLayout::random(shape, 16, density, seed).unwrap();
        let least = |offsets: &[u32]| offsets.windows(2).map(|p| p[1] - p[0]).min().unwrap();
        if count >= ins.max(outs) {
            prop_assert!(least(random.output_offsets()) > 0 && least(random.input_offsets()) > 0);
        }
        // No other bandwidth is closer.
        let banded = WeightLayout::banded_of_density(shape, 16, density).unwrap();
        for bandwidth in 0..ins + 1 {
            let other = WeightLayout::banded(shape, 16, bandwidth).unwrap();
            prop_assert!(other.len().abs_diff(count) >= banded.len().abs_diff(count));
            if bandwidth == 0 {
                prop_assert!(least(other.output_offsets()) > 0 && least(other.input_offsets()) > 0);
            }
        }
    }
}
