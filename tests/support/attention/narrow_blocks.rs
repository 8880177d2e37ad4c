//! Random narrow blocks so dense that a tile sees nearly everything: coarse steps, on devices that have them.

use burn_blocksparse::layout::BlockMask;

use crate::prelude::*;

/// Pairs of random blocks.
#[derive(Clone, Copy)]
struct Blocks {
    size: usize,
    /// Percentage of kept blocks.
    percent: u64,
    /// Percentage of these that lack every seventh diagonal.
    striped: u64,
    causal: bool,
}

impl Blocks {
    /// Returns a pseudorandom number below 100 for a block of a head.
    fn draw(head: usize, row: usize, col: usize, salt: u64) -> u64 {
        let mut x = (head as u64) << 40 | (row as u64) << 20 | col as u64;
        x = (x ^ salt << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (x ^ x >> 32) % 100
    }

    fn keeps(&self, head: usize, row: usize, col: usize) -> bool {
        let drawn = Self::draw(head, row, col, 1) < self.percent;
        match self.causal {
            true => row == col || (col < row && drawn),
            // Some queries see nothing.
            false => row % 23 != 5 && drawn,
        }
    }

    /// Returns whether query i sees key j.
    fn allows(&self, head: usize, i: usize, j: usize) -> bool {
        let (row, col) = (i / self.size, j / self.size);
        let striped = Self::draw(head, row, col, 2) < self.striped;
        self.keeps(head, row, col)
            && (!self.causal || j <= i)
            && !(striped && (i + j).is_multiple_of(7))
    }

    fn layout(self, shape: LayoutShape) -> BlockLayout {
        let b = self.size;
        BlockLayout::from_block_fn("random narrow blocks", shape, |head, row, col| {
            let mask = |r, c| self.allows(head, row * b + r, col * b + c);
            self.keeps(head, row, col)
                .then(|| BlockMask::from_fn(b, mask))
        })
        .unwrap()
    }
}

fn check(
    what: &str,
    blocks: Blocks,
    sizes: Sizes,
    dtype: DType,
    devices: &[Device],
    change: impl Fn(Problem) -> Problem,
) -> usize {
    let mut ran = 0;
    let seq = [sizes.seq_q, sizes.seq_kv];
    let layout = blocks.layout(LayoutShape::new(sizes.heads, seq, blocks.size));
    let problem = Problem::random(sizes, 77, move |_, head, i, j| blocks.allows(head, i, j));
    let mut problem = change(problem.with_grad_lse(78));
    problem.round_to(dtype);
    for device in with(devices, dtype) {
        let [q, k, v, _] = inputs(&problem, device, dtype);
        let lines = plan_of([&q, &k, &v], &layout, &problem.asked());
        println!("{what}\n{lines}");
        for pass in ["forward", "backward"] {
            let on = format!("{pass:<8} hopper");
            let coarse = lines.lines().filter(|line| line.contains(&on));
            for line in coarse {
                let bits = format!("with bits of {}-wide blocks", blocks.size);
                assert!(line.contains(&bits), "{what}: {line}");
            }
        }
        let call = Call::new(what, &problem, layout.clone());
        call.check_dtype(device, dtype, half_tolerance(dtype));
        ran += 1;
    }
    ran
}

/// Different heads, two of which share keys; causal, with a partial last step. Few heads have tiles of fewer rows.
pub fn narrow_blocks_in_half_precision(devices: &[Device]) {
    let blocks = Blocks {
        size: 16,
        percent: 50,
        striped: 0,
        causal: true,
    };
    let many = Sizes::new([1, 8, 4], [2171, 2171], [128, 128]);
    let few = Sizes {
        heads: 2,
        kv_heads: 2,
        ..many
    };
    let mut ran = 0;
    for (what, sizes) in [("tall tiles", many), ("tiles of few rows", few)] {
        ran += check(what, blocks, sizes, DType::BF16, devices, |problem| problem);
    }
    assert_ran("narrow blocks", ran);
}

/// Masked blocks anywhere, more keys than queries, some queries without keys, with a softcap, ALiBi and dropout.
pub fn narrow_blocks_with_options(devices: &[Device]) {
    let blocks = Blocks {
        size: 32,
        percent: 85,
        striped: 2,
        causal: false,
    };
    let sizes = Sizes::new([2, 8, 8], [2107, 2235], [64, 64]);
    let options = |problem: Problem| {
        (problem.options(None, Some(5.0)))
            .with_slopes((1..=8).map(|head| 0.01 * f64::from(head)).collect())
            .with_dropout(Dropout::new(0.25, 3))
    };
    let what = "narrow blocks with options";
    let ran = check(what, blocks, sizes, DType::F16, devices, options);
    assert_ran(what, ran);
}
