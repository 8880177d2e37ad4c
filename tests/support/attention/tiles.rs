//! Kernel paths for certain shapes only: cubes that split a tile of keys or the steps of a long tile, and values narrower than keys.

use burn_blocksparse::layout::BlockMask;

use crate::prelude::*;

/// A call whose out and gradients are compared.
struct Tiles {
    name: &'static str,
    layout: BlockLayout,
    problem: Problem,
    /// Text in the plan if it is of the `hopper` tier.
    says: &'static str,
}

impl Tiles {
    /// Makes a call over a pattern, in blocks of 16.
    fn of(name: &'static str, pattern: Pattern, sizes: Sizes, says: &'static str) -> Self {
        let layout = pattern.layout(sizes.heads, sizes.seq_q, 16).unwrap();
        let attends = move |_, head, i, j| pattern.attends(head, i as i64, j as i64);
        Self {
            name,
            layout,
            problem: Problem::random(sizes, 31, attends),
            says,
        }
    }

    fn with_dropout(mut self) -> Self {
        self.problem.dropout = Some(Dropout::new(0.25, 5));
        self
    }

    /// Compares on all devices, in half precision or else in f32; two runs give equal bits.
    fn check(mut self, devices: &[Device]) {
        for device in devices {
            let dtype = half_or_f32(device);
            self.problem.round_to(dtype);
            let answer = self.problem.solve();
            let what = format!("{}, {device:?}, {dtype:?}", self.name);
            let [q, k, v, _] = inputs(&self.problem, device, dtype);
            let plan = plan_of([&q, &k, &v], &self.layout, &self.problem.asked());
            let on_hopper = plan.contains("forward  hopper");
            assert!(!on_hopper || plan.contains(self.says), "{what}: {plan}");
            let device = device.clone().autodiff();
            let run = || run(&self.problem, &self.layout, &device, dtype);
            let got = run();
            assert_same_bits(&format!("{what}, twice"), &got, &run());
            answer.assert(&what, got, &[Near::Rows(dtype)]);
        }
    }
}

const SHARED: &str = "the queries of a tile shared by";

/// Returns sizes with eight query heads on one KV head.
fn grouped(seq_q: usize, seq_kv: usize, [head_dim, value_dim]: [usize; 2]) -> Sizes {
    Sizes::new([1, 8, 1], [seq_q, seq_kv], [head_dim, value_dim])
}

/// Few keys and many queries, like compressed blocks: cubes split the query heads of a tile, and their sums are added.
pub fn shared_tiles_equal_f64(devices: &[Device]) {
    let sizes = Sizes {
        heads: 4,
        ..grouped(1000, 240, [128; 2])
    };
    let sees = |query: usize, key: usize| key * 4 + 31 <= query;
    let shape = LayoutShape::new(1, [sizes.seq_q, sizes.seq_kv], 128);
    let layout = BlockLayout::from_block_fn("staircase", shape, |_, row, column| {
        let (first, key) = (row * 128, column * 128);
        let mask = BlockMask::from_fn(128, |i, j| sees(first + i, key + j));
        sees(first + 127, key).then_some(mask)
    });
    let layout = layout.unwrap().of_first_head(sizes.heads).unwrap();
    let problem = Problem::random(sizes, 30, move |_, _, i, j| sees(i, j));
    let call = Tiles {
        name: "a staircase",
        layout,
        problem,
        says: SHARED,
    };
    call.check(devices);
}

/// Like [`shared_tiles_equal_f64`], in two parts by residue class, of which the second adds to the gradients of the first; and with dropout, whose
/// factor applies to each cube's part.
pub fn shared_tiles_of_other_kinds(devices: &[Device]) {
    let sizes = grouped(256, 256, [128; 2]);
    Tiles::of("strided", Pattern::strided(16), sizes, SHARED).check(devices);
    let sizes = grouped(200, 200, [72; 2]);
    let call = Tiles::of("dropout", Pattern::causal(), sizes, SHARED);
    call.with_dropout().check(devices);
}

const LONG: &str = "the longest tile of a head shared by";

/// Keys that all queries see, besides near ones, like the first block of native sparse attention: cubes split the steps of their tile, in the loops
/// over columns and, if such tokens also see all keys, over rows.
pub fn long_tiles_equal_f64(devices: &[Device]) {
    let sizes = Sizes {
        heads: 4,
        ..grouped(637, 637, [128; 2])
    };
    let near = Pattern::chunked_window(64, 1, 0);
    let seen = Pattern::union([near, Pattern::global_keys(0..64)]).and_causal();
    let layout = seen.layout(4, 637, 64).unwrap();
    let call = Tiles::of("a first block", seen, sizes, LONG);
    Tiles { layout, ..call }.with_dropout().check(devices);
    // One kernel for rows, and another one for columns of wide heads.
    let sizes = grouped(500, 500, [192, 128]);
    let global = Pattern::union([Pattern::local(16), Pattern::global(0..16)]);
    Tiles::of("global tokens", global, sizes, LONG).check(devices);
}

/// Values narrower than keys.
pub fn narrower_values_equal_f64(devices: &[Device]) {
    let says = "dQ       hopper";
    let sizes = grouped(300, 300, [192, 128]);
    Tiles::of("192 and 128 wide", Pattern::causal(), sizes, says).check(devices);
    // In two parts: the second accumulates onto the first, and has tiles that cubes split.
    let sizes = grouped(512, 512, [128, 72]);
    let strided = Pattern::merged_strided(2);
    Tiles::of("128 and 72 wide", strided, sizes, "the steps of").check(devices);
}
