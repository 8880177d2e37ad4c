//! Attention over a layout and, beside it, over lists that queries have of their own, against the same in plain f64 loops.

use std::collections::BTreeSet;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_blocksparse::internal::DispatchMode;
use burn_blocksparse::internal::runs_kernels;
use burn_blocksparse::{AttentionOptions, BlockLayout, LayoutShape, Pattern};
use burn_sparse_select::SelectedBlocks;
use burn_sparse_select::selected_blocks_attention;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::attention::inputs;
use crate::cases::some_of;
use crate::compare::{assert_close, to_f64};
use crate::devices::{assert_ran, exact_dtypes, half_dtypes};
use crate::options::half_tolerance;
use crate::reference::{Problem, Sizes};
use crate::selected_problem::differentiated;

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    batch: usize,
    heads: [usize; 2],
    seq: [usize; 2],
    dims: [usize; 2],
    block: usize,
    most: usize,
    /// Of a hundred places of lists, those that name a block if there is one.
    filled: u32,
    /// Whether queries see their own block beside their lists.
    near: bool,
    /// Whether kernels walk the lists, where a device has them.
    walked: bool,
}

const CASE: Case = Case {
    name: "16 heads, two batch entries, ragged",
    batch: 2,
    heads: [32, 2],
    seq: [100, 100],
    dims: [64, 64],
    block: 16,
    most: 5,
    filled: 80,
    near: true,
    walked: true,
};

fn cases() -> Vec<Case> {
    let wide = |name, dims| Case {
        name,
        dims,
        batch: 1,
        heads: [16, 1],
        block: 64,
        seq: [330, 330],
        most: 4,
        ..CASE
    };
    vec![
        CASE,
        wide("128 wide", [128, 128]),
        wide("192 and 128 wide", [192, 128]),
        wide("64 and 128 wide", [64, 128]),
        wide("192 and 64 wide", [192, 64]),
        Case {
            name: "fewer queries than keys",
            seq: [70, 133],
            block: 32,
            ..CASE
        },
        Case {
            name: "lists of one",
            most: 1,
            ..CASE
        },
        Case {
            name: "lists that are mostly empty",
            most: 9,
            filled: 10,
            ..CASE
        },
        Case {
            name: "lists that are all empty",
            filled: 0,
            ..CASE
        },
        Case {
            name: "lists alone, and queries of no key",
            near: false,
            ..CASE
        },
        Case {
            name: "blocks of 128",
            block: 128,
            seq: [300, 300],
            batch: 1,
            most: 2,
            ..CASE
        },
        Case {
            name: "32 heads",
            batch: 1,
            heads: [32, 1],
            ..CASE
        },
        Case {
            name: "48 heads",
            batch: 1,
            heads: [48, 1],
            seq: [90, 90],
            dims: [128, 64],
            ..CASE
        },
        Case {
            name: "64 heads, 128 wide",
            batch: 1,
            heads: [64, 1],
            seq: [90, 90],
            dims: [128, 128],
            ..CASE
        },
        Case {
            name: "128 heads",
            batch: 1,
            heads: [128, 1],
            seq: [80, 80],
            ..CASE
        },
        Case {
            name: "four heads, whose queries are packed",
            heads: [8, 2],
            walked: false,
            ..CASE
        },
        Case {
            name: "blocks of 8, whose queries are packed",
            block: 8,
            walked: false,
            ..CASE
        },
        Case {
            name: "widths of 32, whose queries are packed",
            dims: [32, 32],
            walked: false,
            ..CASE
        },
    ]
}

/// Those of a device. Without kernels for them the large ones are only slow.
fn cases_on(device: &Device) -> Vec<(u64, Case)> {
    let is_cuda = format!("{device:?}").contains("Cuda");
    let numbered = (0..).zip(cases());
    let is_small =
        |case: &Case| case.batch * case.heads[0] * case.seq[0] * case.dims[0] <= 2 * 32 * 100 * 64;
    numbered
        .filter(|(_, case)| is_cuda || is_small(case))
        .collect()
}

/// A problem, and its lists `[batch, kv_heads, seq_q, most]`.
struct Drawn {
    case: Case,
    problem: Problem,
    lists: Vec<i32>,
    near: BlockLayout,
}

impl Case {
    fn draw(self, seed: u64, dtype: DType) -> Drawn {
        let Case {
            batch,
            heads: [heads, kv_heads],
            seq: [seq_q, seq_kv],
            dims: [head_dim, value_dim],
            block,
            most,
            filled,
            ..
        } = self;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut lists = Vec::new();
        for row in 0..batch * kv_heads * seq_q {
            // Every seventh query has no list.
            let own = (row % seq_q + seq_kv - seq_q) / block;
            let mut seen = BTreeSet::new();
            for _ in 0..most {
                let is_one = own > 0 && row % 7 != 3 && rng.random_range(0..100) < filled;
                let named = rng.random_range(0..own.max(1));
                lists.push(match is_one && seen.insert(named) {
                    true => named as i32,
                    false => -1,
                });
            }
        }
        let sizes = Sizes {
            batch,
            heads,
            kv_heads,
            seq_q,
            seq_kv,
            head_dim,
            value_dim,
        };
        let of_pair = lists.clone();
        let mut problem = Problem::random(sizes, seed, move |batch, head, i, j| {
            let position = i + seq_kv - seq_q;
            let list = batch * kv_heads + head / (heads / kv_heads);
            let list = &of_pair[(list * seq_q + i) * most..][..most];
            let is_near = self.near && j <= position && j / block == position / block;
            is_near || list.contains(&((j / block) as i32))
        });
        problem.round_to(dtype);
        let problem = problem.with_grad_lse(seed + 1);
        let pattern = match self.near {
            true => Pattern::chunked(block).and_causal(),
            false => Pattern::from_fn("nothing", |_, _, _| false),
        };
        let shape = LayoutShape {
            heads,
            seq_q,
            seq_kv,
            block_size: block.min(128),
        };
        let near = BlockLayout::new(&pattern, shape);
        Drawn {
            case: self,
            problem,
            lists,
            near: near.unwrap(),
        }
    }
}

impl Drawn {
    fn lists(&self, device: &Device) -> SelectedBlocks {
        let Case {
            batch,
            heads: [_, kv_heads],
            seq: [seq_q, seq_kv],
            block,
            most,
            ..
        } = self.case;
        let data = TensorData::new(self.lists.clone(), [batch, kv_heads, seq_q, most]);
        let device = device.clone().without_autodiff();
        let blocks = Tensor::<4, Int>::from_data(data, (&device, DType::I32));
        SelectedBlocks::of_blocks(blocks, seq_kv, block).unwrap()
    }

    fn run(
        &self,
        device: &Device,
        dtype: DType,
        walk: DispatchMode,
    ) -> [(&'static str, TensorData); 5] {
        let device = device.clone().autodiff();
        let options = AttentionOptions::default().dispatch_mode(walk);
        differentiated(&self.problem, &device, dtype, |q, k, v| {
            let lists = self.lists(&device);
            selected_blocks_attention(q, k, v, &self.near, lists, options.clone()).unwrap()
        })
    }

    fn check(&self, device: &Device, dtype: DType, tolerance: f64) {
        let answer = self.problem.solve();
        for (name, got) in self.run(device, dtype, DispatchMode::Auto) {
            let what = format!("{}, {device:?}, {dtype:?}: {name}", self.case.name);
            assert_close(&what, got, answer.result(name).values, tolerance);
        }
    }
}

/// Cases for checks that say nothing new of many: a third with `BURN_SPARSE_SHARD`, and a sixth on devices without kernels, where Burn's operations
/// alone are compared.
fn few_on(device: &Device) -> Vec<(u64, Case)> {
    let cases = cases_on(device).into_iter();
    match runs_kernels(device) {
        true => some_of(cases, 3).collect(),
        false => cases.step_by(6).collect(),
    }
}

/// Out, lse and all gradients.
pub fn attention_with_lists_equals_f64(devices: &[Device]) {
    for (number, device) in devices.iter().enumerate() {
        // Further devices without kernels run the same operations of Burn's.
        let cases = match number == 0 || runs_kernels(device) {
            true => cases_on(device),
            false => few_on(device),
        };
        for (index, case) in cases {
            let drawn = case.draw(9100 + 10 * index, DType::F32);
            for (dtype, tolerance) in exact_dtypes(device) {
                drawn.check(device, dtype, tolerance);
            }
        }
    }
}

/// The same in half precision, of which kernels walk lists; and as near to what packed queries give.
pub fn attention_with_lists_in_half_precision(devices: &[Device]) {
    for device in devices {
        for (index, case) in few_on(device) {
            for dtype in half_dtypes(device) {
                let drawn = case.draw(9300 + 10 * index, dtype);
                drawn.check(device, dtype, half_tolerance(dtype));
                let packed = drawn.run(device, dtype, DispatchMode::GroupByBlock);
                let walked = drawn.run(device, dtype, DispatchMode::Auto);
                for ((name, walked), (_, packed)) in walked.into_iter().zip(packed) {
                    let what = format!("{}, {device:?}, {dtype:?}: {name}, packed", case.name);
                    let tolerance = 2.0 * half_tolerance(dtype);
                    assert_close(&what, walked, &to_f64(packed), tolerance);
                }
            }
        }
    }
}

/// Twice the same bits, forward and backward.
pub fn attention_with_lists_gives_the_same_bits(devices: &[Device]) {
    let mut ran = 0;
    for device in devices {
        for (_, case) in few_on(device) {
            let halves = half_dtypes(device).into_iter();
            for dtype in halves.chain([DType::F32]) {
                let drawn = case.draw(9500, dtype);
                let [first, second] = [(); 2].map(|_| drawn.run(device, dtype, DispatchMode::Auto));
                assert!(
                    first == second,
                    "{}, {device:?}, {dtype:?}: other bits",
                    case.name
                );
                ran += 1;
            }
        }
    }
    assert_ran("attention_with_lists_gives_the_same_bits", ran);
}

/// Plans say whether lists are walked, and why not.
pub fn attention_with_lists_plans(devices: &[Device]) {
    for device in devices {
        for (_, case) in cases_on(device) {
            let is_cuda = format!("{device:?}").contains("Cuda");
            let halves = half_dtypes(device).into_iter();
            for dtype in halves.chain([DType::F32]) {
                let drawn = case.draw(9600, dtype);
                let [q, k, v, _] = inputs(&drawn.problem, device, dtype);
                let lists = drawn.lists(device);
                let plan = |walk| {
                    let options = AttentionOptions::default().dispatch_mode(walk);
                    let plan = lists.explain(&q, &k, &v, &drawn.near, &options);
                    plan.unwrap().to_string()
                };
                let text = plan(DispatchMode::Auto);
                let what = format!("{}, {device:?}, {dtype:?}: {text}", case.name);
                let walked = is_cuda && case.walked && dtype != DType::F32;
                assert_eq!(text.starts_with("listed"), walked, "{what}");
                let packed = plan(DispatchMode::GroupByBlock);
                assert!(!packed.starts_with("listed"), "{what}");
            }
        }
    }
}

/// Wrong sizes, and options that do not follow queries.
pub fn attention_with_lists_errors(devices: &[Device]) {
    let drawn = CASE.draw(9700, DType::F32);
    for device in devices {
        let [q, k, v, _] = inputs(&drawn.problem, device, DType::F32);
        let lists = drawn.lists(device);
        let call = |lists: SelectedBlocks, options: AttentionOptions| {
            let x = (q.clone(), k.clone(), v.clone());
            let result = selected_blocks_attention(x.0, x.1, x.2, &drawn.near, lists, options);
            result.unwrap_err().to_string()
        };
        let other = |dims: [usize; 4]| {
            let device = device.clone().without_autodiff();
            let blocks = Tensor::<4, Int>::zeros(dims, (&device, DType::I32));
            call(
                SelectedBlocks::of_blocks(blocks, 100, 16).unwrap(),
                AttentionOptions::default(),
            )
        };
        assert!(other([1, 2, 100, 3]).contains("lists' batch"));
        assert!(other([2, 3, 100, 3]).contains("lists' heads"));
        assert!(other([2, 2, 99, 3]).contains("lists' queries"));
        let wrong = lists.clone().with_group_reuse(1.5).unwrap_err();
        assert!(wrong.to_string().contains("overlap must be from 0 to 1"));
        let alibi = AttentionOptions::default().alibi(vec![0.5; 32]);
        assert!(call(lists, alibi).contains("options.alibi"));
    }
}
