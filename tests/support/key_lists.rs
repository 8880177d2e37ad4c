//! Attention over lists of single keys, against the same in plain f64 loops.

use std::collections::BTreeSet;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_blocksparse::internal::DispatchMode;
use burn_blocksparse::{AttentionOptions, BlockLayout, LayoutShape, Pattern, SparseAttentionCall};
use burn_sparse_select::SelectedBlocks;
use burn_sparse_select::TokenIndices;
use burn_sparse_select::token_sparse_attention;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::attention::inputs;
use crate::cases::some_of;
use crate::compare::{assert_close, assert_close_to, assert_slope, to_f64};
use crate::devices::{assert_ran, exact_dtypes, half_dtypes, supports};
use crate::linear::product_tolerance;
use crate::options::half_tolerance;
use crate::reference::{Expected, Problem, Sizes};
use crate::selected_problem::differentiated;

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    batch: usize,
    heads: [usize; 2],
    /// Heads that have lists: those of keys, or 1.
    lists: usize,
    seq: [usize; 2],
    dims: [usize; 2],
    most: usize,
    /// Of a hundred numbers of lists, those that name a key.
    filled: u32,
    causal: bool,
    /// Whether kernels walk the lists, where a device has them.
    walked: bool,
}

const CASE: Case = Case {
    name: "16 heads, two batch entries, ragged",
    batch: 2,
    heads: [32, 2],
    lists: 2,
    seq: [100, 100],
    dims: [64, 64],
    most: 37,
    filled: 80,
    causal: true,
    walked: true,
};

fn cases() -> Vec<Case> {
    vec![
        CASE,
        Case {
            name: "fewer queries than keys",
            seq: [70, 133],
            ..CASE
        },
        Case {
            name: "more queries than keys",
            seq: [90, 41],
            ..CASE
        },
        Case {
            name: "lists of one",
            most: 1,
            ..CASE
        },
        Case {
            name: "lists that are mostly empty",
            filled: 5,
            ..CASE
        },
        Case {
            name: "lists that are all empty",
            filled: 0,
            ..CASE
        },
        Case {
            name: "longer lists than there are keys",
            most: 300,
            filled: 100,
            ..CASE
        },
        Case {
            name: "one list for all heads, of later keys too",
            lists: 1,
            causal: false,
            ..CASE
        },
        Case {
            name: "four heads",
            heads: [8, 2],
            ..CASE
        },
        Case {
            name: "widths of 24 and 8, which no kernel takes",
            heads: [4, 2],
            dims: [24, 8],
            walked: false,
            ..CASE
        },
    ]
}

/// Of other widths, and of more heads: each is a kernel of its own.
fn wide_cases() -> Vec<Case> {
    let case = |name, heads, dims| Case {
        name,
        heads: [heads, 1],
        lists: 1,
        dims,
        batch: 1,
        seq: [170, 170],
        most: 70,
        ..CASE
    };
    vec![
        case("128 wide", 16, [128, 128]),
        case("192 and 128 wide", 16, [192, 128]),
    ]
}

fn large_cases() -> Vec<Case> {
    let [wide, _] = [0, 1].map(|at| wide_cases()[at]);
    vec![
        Case {
            name: "64 heads, 128 wide",
            heads: [64, 1],
            ..wide
        },
        Case {
            name: "128 heads",
            heads: [128, 1],
            dims: [64, 64],
            seq: [80, 80],
            ..wide
        },
    ]
}

/// A problem, and its lists `[batch, lists, seq_q, most]`, in any order, with keys that come twice and keys that are not seen.
struct Drawn {
    case: Case,
    problem: Problem,
    lists: Vec<i32>,
    /// What remains of them.
    unique: Vec<i32>,
}

impl Case {
    fn draw(self, seed: u64, dtype: DType) -> Drawn {
        let Case {
            batch,
            heads: [heads, kv_heads],
            lists: of_heads,
            seq: [seq_q, seq_kv],
            dims: [head_dim, value_dim],
            most,
            filled,
            causal,
            ..
        } = self;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (mut lists, mut unique) = (Vec::new(), Vec::new());
        for row in 0..batch * of_heads * seq_q {
            let position = (row % seq_q) as i64 + seq_kv as i64 - seq_q as i64;
            // Every seventh query has no list, and every ninth all keys, if they have room.
            let mut list: Vec<i32> = (0..most)
                .map(
                    |_| match rng.random_range(0..100) < filled && row % 7 != 3 {
                        true => rng.random_range(-3..seq_kv as i32 + 3),
                        false => -1,
                    },
                )
                .collect();
            if row % 9 == 5 && filled > 0 && most >= seq_kv {
                list[..seq_kv].copy_from_slice(&(0..seq_kv as i32).collect::<Vec<_>>());
                list.shuffle(&mut rng);
            }
            let is_seen = |key: i32| {
                key >= 0 && key < seq_kv as i32 && !(causal && i64::from(key) > position)
            };
            let seen: BTreeSet<i32> = list.iter().copied().filter(|&key| is_seen(key)).collect();
            let mut seen: Vec<i32> = seen.into_iter().collect();
            seen.resize(most, -1);
            lists.extend(list);
            unique.extend(seen);
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
        // Pairs are looked up, not searched for.
        let mut seen = vec![false; batch * of_heads * seq_q * seq_kv];
        for (row, list) in unique.chunks(most).enumerate() {
            for &key in list.iter().filter(|&&key| key >= 0) {
                seen[row * seq_kv + key as usize] = true;
            }
        }
        let mut problem = Problem::random(sizes, seed, move |batch, head, i, j| {
            let list = batch * of_heads + head / (heads / of_heads);
            seen[(list * seq_q + i) * seq_kv + j]
        });
        problem.round_to(dtype);
        Drawn {
            case: self,
            problem: problem.with_grad_lse(seed + 1),
            lists,
            unique,
        }
    }
}

impl Drawn {
    fn lists(&self, device: &Device) -> TokenIndices {
        let Case {
            batch,
            lists,
            seq: [seq_q, seq_kv],
            most,
            causal,
            ..
        } = self.case;
        let data = TensorData::new(self.lists.clone(), [batch, lists, seq_q, most]);
        let device = device.clone().without_autodiff();
        let keys = Tensor::<4, Int>::from_data(data, (&device, DType::I32));
        match causal {
            true => SelectedBlocks::of_keys(keys, seq_kv).unwrap(),
            false => TokenIndices::new(keys, seq_kv, false).unwrap(),
        }
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
            token_sparse_attention(q, k, v, self.lists(&device), options.clone()).unwrap()
        })
    }

    fn check(&self, device: &Device, dtype: DType, tolerance: f64) {
        let answer = self.problem.solve();
        // What no kernel takes is made of Burn's products.
        let tolerance = match product_tolerance(device, dtype, tolerance) > tolerance {
            true => 5e-3,
            false => tolerance,
        };
        for (name, got) in self.run(device, dtype, DispatchMode::Auto) {
            let what = format!("{}, {device:?}, {dtype:?}: {name}", self.case.name);
            // A query of one key has gradients that are differences of equal numbers.
            let Expected { values, terms, .. } = answer.result(name);
            assert_close_to(terms, &what, got, values, tolerance);
        }
    }
}

/// What is left of lists.
pub fn key_lists_are_unique(devices: &[Device]) {
    for device in devices {
        // The last has keys in several parts of a cube's bits.
        let long = Case {
            name: "70,000 keys",
            batch: 1,
            heads: [1, 1],
            lists: 1,
            seq: [40, 70_000],
            dims: [1, 1],
            most: 700,
            ..CASE
        };
        for (index, case) in (0..).zip(cases().into_iter().chain([long])) {
            let drawn = case.draw(9800 + index, DType::F32);
            let got = drawn.lists(device).keys().clone().into_data();
            let got: Vec<i32> = got.iter().collect();
            assert!(got == drawn.unique, "{}, {device:?}", case.name);
        }
    }
}

/// The keys that neighbours have in common are those of sets.
pub fn key_lists_overlap(devices: &[Device]) {
    for device in devices {
        for (index, case) in (0..).zip(cases()) {
            let drawn = case.draw(9850 + index, DType::F32);
            let ([seq_q, seq_kv], most) = (case.seq, case.most);
            let (mut unions, mut sum) = (BTreeSet::new(), 0);
            for (row, list) in drawn.unique.chunks(most).enumerate() {
                // The eight that a query is one of.
                let first = row - row % seq_q % 8;
                let group = first..first + 8;
                let chooses = |row: usize| {
                    let query = row % seq_q;
                    let seen = if case.causal {
                        (query + 1 + seq_kv).saturating_sub(seq_q)
                    } else {
                        seq_kv
                    };
                    let list = &drawn.unique[row * most..][..most];
                    list.iter().filter(|&&key| key >= 0).count() < seen
                };
                if first % seq_q + 8 > seq_q || !group.into_iter().all(chooses) {
                    continue;
                }
                for &key in list.iter().filter(|&&key| key >= 0) {
                    unions.insert((first, key));
                    sum += 1;
                }
            }
            let expected = match sum {
                0 => 1.0,
                _ => (8.0 - 8.0 * unions.len() as f64 / f64::from(sum)) / 7.0,
            };
            let got = drawn.lists(device).measure_group_reuse();
            let what = format!("{}, {device:?}: {got}, not {expected}", case.name);
            assert!((got - expected).abs() < 1e-12, "{what}");
        }
    }
}

/// Out, lse and all gradients.
pub fn attention_with_keys_equals_f64(devices: &[Device]) {
    for device in devices {
        for (index, case) in (0..).zip(cases()) {
            let drawn = case.draw(9900 + 10 * index, DType::F32);
            for (dtype, tolerance) in exact_dtypes(device) {
                drawn.check(device, dtype, tolerance);
            }
        }
    }
}

/// The same in half precision, of which kernels walk lists; and as near to products with all keys.
pub fn attention_with_keys_in_half_precision(devices: &[Device]) {
    for device in devices {
        for (index, case) in some_of((0..).zip(cases()), 3) {
            for dtype in half_dtypes(device) {
                let drawn = case.draw(10_000 + 10 * index, dtype);
                drawn.check(device, dtype, half_tolerance(dtype));
                let all = drawn.run(device, dtype, DispatchMode::GroupByBlock);
                let walked = drawn.run(device, dtype, DispatchMode::Auto);
                for ((name, walked), (_, all)) in walked.into_iter().zip(all) {
                    let what = format!("{}, {device:?}, {dtype:?}: {name}, all", case.name);
                    let tolerance = 2.0 * half_tolerance(dtype);
                    assert_close(&what, walked, &to_f64(all), tolerance);
                }
            }
        }
    }
}

fn in_one_half(devices: &[Device], cases: &[Case], seed: u64) {
    for device in devices {
        // Where they only run as all keys do the small cases say as much.
        if !format!("{device:?}").contains("Cuda") {
            continue;
        }
        for (index, case) in (0..).zip(cases) {
            for dtype in half_dtypes(device).into_iter().rev().take(1) {
                let drawn = case.draw(seed + index, dtype);
                drawn.check(device, dtype, half_tolerance(dtype));
            }
        }
    }
}

/// Other widths, on GPUs that have kernels for them.
pub fn attention_with_keys_of_other_widths(devices: &[Device]) {
    in_one_half(devices, &wide_cases(), 10_200);
}

/// 64 and 128 heads that share a list, likewise.
pub fn attention_with_keys_of_many_heads(devices: &[Device]) {
    in_one_half(devices, &large_cases(), 10_300);
}

/// Twice the same bits, forward and backward.
pub fn attention_with_keys_gives_the_same_bits(devices: &[Device]) {
    let mut ran = 0;
    for device in devices {
        for case in some_of(cases(), 3) {
            let halves = half_dtypes(device).into_iter().rev().take(1);
            for dtype in halves.chain([DType::F32]) {
                let drawn = case.draw(10_400, dtype);
                let [first, second] = [(); 2].map(|_| drawn.run(device, dtype, DispatchMode::Auto));
                let what = format!("{}, {device:?}, {dtype:?}: other bits", case.name);
                assert!(first == second, "{what}");
                ran += 1;
            }
        }
    }
    assert_ran("attention_with_keys_gives_the_same_bits", ran);
}

pub fn attention_with_keys_equals_finite_differences(devices: &[Device]) {
    let case = Case {
        batch: 1,
        heads: [4, 2],
        seq: [19, 23],
        dims: [5, 3],
        most: 9,
        ..CASE
    };
    for device in devices.iter().filter(|device| supports(device, DType::F64)) {
        let mut drawn = case.draw(10_500, DType::F32);
        let results = drawn.run(device, DType::F64, DispatchMode::Auto);
        for (which, (name, grad)) in results.into_iter().skip(2).enumerate() {
            let grad = to_f64(grad);
            for index in (0..grad.len()).step_by(17) {
                let mut loss = |step: f64| {
                    let problem = &mut drawn.problem;
                    let values = [&mut problem.q, &mut problem.k, &mut problem.v];
                    values.into_iter().nth(which).unwrap()[index] += step;
                    let [q, k, v, grad_out] = inputs(&drawn.problem, device, DType::F64);
                    let options = AttentionOptions::default();
                    let result = token_sparse_attention(q, k, v, drawn.lists(device), options);
                    let (out, lse) = result.unwrap();
                    let shape = TensorData::new(drawn.problem.grad_lse.clone(), lse.dims());
                    let grad_lse = Tensor::<3>::from_data(shape, (device, DType::F64));
                    // A query without keys has the lse −∞, of which the loss has nothing.
                    let there = lse.clone().is_finite();
                    let lse = (lse * grad_lse).mask_fill(there.bool_not(), 0.0);
                    ((out * grad_out).sum() + lse.sum()).into_scalar::<f64>()
                };
                let what = format!("{device:?}, {name} at {index}");
                assert_slope(&what, &mut loss, grad[index]);
            }
        }
    }
}

fn places_of(pattern: &Pattern, heads: usize, [seq_q, seq_kv]: [usize; 2]) -> BlockLayout {
    let shape = LayoutShape {
        heads,
        seq_q,
        seq_kv,
        block_size: 32,
    };
    BlockLayout::new(pattern, shape).unwrap()
}

/// Layouts of single keys: the pairs of a layout on the host that are listed.
pub fn layouts_of_keys_equal_f64(devices: &[Device]) {
    let small = Case {
        heads: [4, 2],
        seq: [70, 133],
        ..CASE
    };
    let shared = Case {
        lists: 1,
        causal: false,
        seq: [90, 41],
        ..small
    };
    for device in devices {
        for (index, case) in (0..).zip([small, shared]) {
            let halves = half_dtypes(device).into_iter();
            let halves = halves.map(|dtype| (dtype, half_tolerance(dtype)));
            for (dtype, tolerance) in exact_dtypes(device).into_iter().chain(halves) {
                let drawn = case.draw(10_800 + index, dtype);
                let pattern = match case.causal {
                    true => Pattern::causal(),
                    false => Pattern::dense(),
                };
                let places = places_of(&pattern, case.heads[0], case.seq);
                let layout = drawn.lists(device).layout(&places).unwrap();
                let host = layout.to_host().unwrap();
                let pairs = (0..case.batch).map(|entry| host.to_dense_batch(entry, 0));
                let listed: usize = pairs.flatten().flatten().filter(|&seen| seen).count();
                let own = drawn
                    .unique
                    .chunks(case.most * case.seq[0])
                    .step_by(case.lists);
                let expected: usize = own.flatten().filter(|&&key| key >= 0).count();
                assert_eq!(listed, expected, "{device:?}");
                let got = differentiated(
                    &drawn.problem,
                    &device.clone().autodiff(),
                    dtype,
                    |q, k, v| {
                        SparseAttentionCall::new(q, k, v, &layout)
                            .run_with_lse()
                            .unwrap()
                    },
                );
                let answer = drawn.problem.solve();
                for (name, got) in got {
                    let what = format!("{}, {device:?}, {dtype:?}: {name}", host.name());
                    let Expected { values, terms, .. } = answer.result(name);
                    assert_close_to(terms, &what, got, values, tolerance);
                }
            }
        }
        let lists = small.draw(10_810, DType::F32).lists(device);
        let places = |heads, seq| places_of(&Pattern::causal(), heads, seq);
        for (argument, places) in [
            ("lists' heads", places(3, [70, 133])),
            ("lists' queries", places(4, [71, 133])),
            ("lists' seq_kv", places(4, [70, 134])),
        ] {
            let error = lists.layout(&places).unwrap_err();
            assert!(error.to_string().contains(argument), "{error}");
        }
    }
}

/// Plans say whether lists are walked, and why not.
pub fn attention_with_keys_plans(devices: &[Device]) {
    for device in devices {
        let others = wide_cases().into_iter().chain(large_cases());
        for case in cases().into_iter().chain(others) {
            let is_cuda = format!("{device:?}").contains("Cuda");
            let halves = half_dtypes(device).into_iter();
            for dtype in halves.chain([DType::F32]) {
                let drawn = case.draw(10_600, dtype);
                let [q, k, v, _] = inputs(&drawn.problem, device, dtype);
                let lists = drawn.lists(device);
                let plan = |walk| {
                    let options = AttentionOptions::default().dispatch_mode(walk);
                    lists.explain(&q, &k, &v, &options).unwrap()
                };
                let auto = plan(DispatchMode::Auto);
                // Tiles take other numbers of heads and widths.
                let in_tiles = auto.to_string().contains("tiles of all pairs");
                let walked = is_cuda && (case.walked || in_tiles) && dtype != DType::F32;
                let what = format!("{}, {device:?}, {dtype:?}: {auto}", case.name);
                assert_eq!(auto.is_kernels(), walked, "{what}");
                assert_eq!(auto.to_string().contains("listed"), walked, "{what}");
                assert!(!plan(DispatchMode::GroupByBlock).is_kernels(), "{what}");
            }
        }
    }
}

/// Wrong sizes, and options that lists of keys have not.
pub fn attention_with_keys_errors(devices: &[Device]) {
    let drawn = CASE.draw(10_700, DType::F32);
    for device in devices {
        let [q, k, v, _] = inputs(&drawn.problem, device, DType::F32);
        let call = |lists: TokenIndices, options: AttentionOptions| {
            let x = (q.clone(), k.clone(), v.clone());
            let result = token_sparse_attention(x.0, x.1, x.2, lists, options);
            result.unwrap_err().to_string()
        };
        let inner = device.clone().without_autodiff();
        let keys = |dims: [usize; 4]| Tensor::<4, Int>::zeros(dims, (&inner, DType::I32));
        let other = |dims: [usize; 4], seq_kv: usize| {
            let lists = SelectedBlocks::of_keys(keys(dims), seq_kv).unwrap();
            call(lists, AttentionOptions::default())
        };
        assert!(other([1, 2, 100, 3], 100).contains("lists' batch"));
        assert!(other([2, 3, 100, 3], 100).contains("lists' heads"));
        assert!(other([2, 2, 99, 3], 100).contains("lists' queries"));
        assert!(other([2, 2, 100, 3], 90).contains("lists' seq_kv"));
        let error = SelectedBlocks::of_keys(keys([2, 2, 100, 3]), 0).unwrap_err();
        assert!(error.to_string().contains("seq_kv must be at least 1"));
        for wrong in [-0.1, 1.1, f64::NAN] {
            let error = drawn.lists(device).with_group_reuse(wrong);
            assert!(
                error
                    .unwrap_err()
                    .to_string()
                    .contains("overlap must be from 0 to 1")
            );
        }
        let options = AttentionOptions::default;
        for (name, options) in [
            ("options.alibi", options().alibi(vec![0.5; 32])),
            ("options.softcap", options().softcap(3.0)),
        ] {
            let error = call(drawn.lists(device), options);
            assert!(error.contains(name), "{error}");
        }
    }
}
