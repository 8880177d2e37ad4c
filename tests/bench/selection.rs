//! Times choices of keys by content, and attention over them, beside dense causal attention of the same shapes, on the device that
//! `BURN_SPARSE_DEVICE` names.

mod attention;
mod msa;
mod program;
mod queued;
mod single_keys;

use std::process::ExitCode;
use std::time::Instant;

use attention::run;
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_blocksparse::internal::DispatchMode;
use burn_blocksparse::layout::DeviceLayoutOptions;
use burn_blocksparse::{AttentionOptions, DeviceLayout, LayoutShape};
use burn_blocksparse_tests::devices::devices;
use burn_sparse_select::nsa::{Nsa, NsaBranches, NsaKeysValues, NsaOptions};
use burn_sparse_select::{
    EstimateInputs, Selection, attention_selected, selected_blocks_attention,
};
use program::{median, number};
use queued::{Ahead, causal, shown};
use serde_json::{Value, json};
use single_keys::DSA;

const USAGE: &str =
    "usage: BURN_SPARSE_DEVICE=cuda bench-selection [N,N,...] [REPEATS] [JSON] [ONLY]

N        positions (default 4096,16384,65536)
REPEATS  timed runs of each row; medians are printed (default 20)
JSON     also write the numbers to this file
ONLY     only rows whose names contain this, or one of its parts between |; nothing else runs where all begin with msa

BURN_SPARSE_BENCH_GB     memory of the device (default 80): what would need more is skipped, and said to be
BURN_SPARSE_BENCH_DRIFT  how much of a query of nsa is that of the one before, from 0 to below 1 (default 0)";

/// Heads of queries and keys, and their width, of the larger calls.
const WIDE: [usize; 3] = [32, 8, 128];

/// Heads of queries and keys of native sparse attention, and widths of keys and values: the paper's (Yuan et al., 2025, §4.1), and as wide keys as values.
const NSA_HEADS: [usize; 2] = [64, 4];
const NSA_DIMS: [[usize; 2]; 2] = [[128, 128], [192, 128]];

/// Calls of a run, for what takes less than this many seconds.
const CALLS: usize = 20;
const SHORT: f64 = 2e-3;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let lengths = match args.first() {
        None => Some(vec![4096, 16_384, 65_536]),
        Some(text) => text.split(',').map(|n| n.parse().ok()).collect(),
    };
    let (Some(lengths), Some(repeats), 0..=4) = (lengths, number(&args, 1, 20), args.len()) else {
        eprintln!("{USAGE}");
        return ExitCode::FAILURE;
    };
    let mut results = Vec::new();
    for device in devices() {
        println!("{device:?}, bf16, causal");
        println!(
            "{:<64} {:>10} {:>10} {:>10} {:>9}",
            "", "host", "both", "device", "of dense"
        );
        let mut bench = Bench {
            ahead: Ahead::new(&device),
            device,
            repeats,
            only: args.get(3).cloned().unwrap_or_default(),
            dense: f64::NAN,
            shape: Value::Null,
            results: &mut results,
        };
        // Others take long at lengths that it is for.
        if bench.only.split('|').all(|part| part.starts_with("msa")) {
            lengths.iter().for_each(|&n| bench.msa(n));
            continue;
        }
        for sizes in DSA {
            bench.dsa(sizes);
        }
        for &n in &lengths {
            bench.rules(n);
            bench.methods(n);
            bench.single_keys(n);
            for dims in NSA_DIMS {
                bench.nsa(n, dims);
            }
            bench.msa(n);
        }
    }
    if let Some(path) = args.get(2) {
        let text = serde_json::to_string_pretty(&results).expect("numbers");
        std::fs::write(path, text).expect("the file can be written");
    }
    ExitCode::SUCCESS
}

struct Bench<'a> {
    device: Device,
    ahead: Option<Ahead>,
    repeats: usize,
    /// What the names of rows contain: one of the parts between `|`.
    only: String,
    /// Seconds of dense attention, that others are compared with.
    dense: f64,
    shape: Value,
    results: &'a mut Vec<Value>,
}

impl Bench<'_> {
    fn inputs(&self, sizes: [usize; 3], n: usize) -> [Tensor<4>; 3] {
        attention::inputs(sizes, n, (&self.device, DType::BF16))
    }

    fn tracked(inputs: &[Tensor<4>; 3]) -> [Tensor<4>; 3] {
        inputs.clone().map(|x| x.autodiff().require_grad())
    }

    fn sync(&self) {
        self.device.sync().expect("the device works");
    }

    /// Medians of the seconds until a call returns, of those that one of several takes, and of those that the device has for it: of short calls where it never
    /// waits for the host, which starts them while the device has other work.
    fn time<T>(&mut self, name: &str, mut call: impl FnMut() -> T) -> f64 {
        if !self.only.split('|').any(|part| name.contains(part)) {
            return f64::NAN;
        }
        for _ in 0..2 {
            drop(call());
            self.sync();
        }
        let start = Instant::now();
        drop(call());
        self.sync();
        let calls = match start.elapsed().as_secs_f64() < SHORT {
            true => CALLS,
            false => 1,
        };
        let times = (0..self.repeats).map(|_| {
            let start = Instant::now();
            let result = call();
            let returned = start.elapsed().as_secs_f64();
            for _ in 1..calls {
                drop(call());
            }
            self.sync();
            let done = start.elapsed().as_secs_f64() / calls as f64;
            drop(result);
            (returned, done)
        });
        let (returned, done): (Vec<f64>, Vec<f64>) = times.unzip();
        let (returned, done) = (median(returned), median(done));
        let device = match &self.ahead {
            Some(ahead) if calls > 1 => ahead.time(calls, self.repeats, &mut call),
            _ => done,
        };
        self.row(name, Some([returned, done]), device);
        device
    }

    fn row(&mut self, name: &str, walls: Option<[f64; 2]>, device: f64) {
        // A difference of which a part was not asked for.
        if device.is_nan() {
            return;
        }
        let of = |at: usize| walls.map_or_else(String::new, |walls| shown(walls[at]));
        println!(
            "{name:<64} {:>10} {:>10} {:>10} {:>9.4}",
            of(0),
            of(1),
            shown(device),
            device / self.dense
        );
        self.results.push(json!({
            "shape": self.shape, "name": name, "host_s": walls.map(|walls| walls[0]),
            "both_s": walls.map(|walls| walls[1]), "device_s": device,
            "of_dense": device / self.dense,
        }));
    }

    fn heading(&mut self, [heads, kv_heads, dim]: [usize; 3], n: usize) {
        self.shape = json!([1, heads, kv_heads, n, dim]);
        println!("1 x {heads} / {kv_heads} x {n} x {dim}");
    }

    /// A rule over scores, and the plans made of what it keeps: attention over a new layout, without attention over a known one.
    fn rules(&mut self, n: usize) {
        let (heads, dim, block) = (32, 16, 128);
        self.heading([heads, heads, dim], n);
        let [q, k, v] = self.inputs([heads, heads, dim], n);
        let blocks = n / block;
        let uniform = Distribution::Default;
        let scores = Tensor::<4>::random([1, heads, blocks, blocks], uniform, &self.device);
        let shape = LayoutShape::square(heads, n, block);
        let options = DeviceLayoutOptions::new(shape).causal(true);
        for text in ["topk:128,16", "topk:128,p=0.2"] {
            let rule = text.parse::<Selection>().expect("a selection").rule();
            let layout = || {
                DeviceLayout::from_scores(scores.clone(), rule, options.clone()).expect("sizes fit")
            };
            let known = layout();
            self.dense = f64::NAN;
            let over = self.time("attention over known blocks", || run(&q, &k, &v, &known));
            let all = self.time("rule, plans and attention", || run(&q, &k, &v, &layout()));
            self.row(&format!("rule of {text} and plans"), None, all - over);
        }
    }

    /// Every method, at about a tenth of the pairs where its rule can say so.
    fn methods(&mut self, n: usize) {
        let [heads, ..] = WIDE;
        self.heading(WIDE, n);
        let inputs = self.inputs(WIDE, n);
        let [q, k, v] = inputs.clone();
        let causal = causal(heads, n);
        self.dense = f64::NAN;
        self.dense = self.time("dense", || run(&q, &k, &v, &causal));
        let forward = self.dense;
        let tracked = Self::tracked(&inputs);
        let dense_both = self.time("dense, forward and backward", || {
            let [q, k, v] = &tracked;
            run(q, k, v, &causal).sum().backward()
        });
        let call = EstimateInputs::new(q.clone(), k.clone());
        for text in [
            "topk:128,ratio=0.1",
            "sparge:128,ratio=0.1,0.1",
            "flexprefill:128,0.5",
            "flexprefill:128,0.5,0.1,1024",
            "xattention:128,16,ratio=0.1",
            "xattention:128,8,ratio=0.1",
            "minference:64,1000,200",
        ] {
            let selection: Selection = match text.parse() {
                Ok(selection) => selection,
                Err(error) => {
                    println!("{text}: {error}");
                    continue;
                }
            };
            let choose = || selection.choose(&call).expect("shapes fit").layout;
            self.dense = forward;
            let estimator = selection.estimator();
            let rows = call.grid(estimator.grid()).rows();
            self.time(&format!("{text}: estimate"), || {
                estimator.scores(&call, 0..rows).expect("shapes fit")
            });
            self.time(&format!("{text}: choice"), choose);
            self.time(&format!("{text}: choice and attention"), || {
                run(&q, &k, &v, &choose())
            });
        }
        for text in ["topk:128,ratio=0.1", "moba:512,3"] {
            let selection: Selection = text.parse().expect("a selection");
            if text.starts_with("moba") {
                self.dense = forward;
                self.time(&format!("{text}: choice"), || selection.query_lists(&call));
                self.time(&format!("{text}: choice and attention"), || {
                    selected(&q, &k, &v, &selection)
                });
            }
            self.dense = dense_both;
            self.time(&format!("{text}: forward and backward"), || {
                let [q, k, v] = &tracked;
                selected(q, k, v, &selection).sum().backward()
            });
        }
    }
}

impl Bench<'_> {
    /// Native sparse attention with the paper's numbers, beside dense attention of as many heads.
    fn nsa(&mut self, n: usize, [head_dim, value_dim]: [usize; 2]) {
        let [heads, kv_heads] = NSA_HEADS;
        self.heading([heads, kv_heads, head_dim], n);
        let name = |what: &str| format!("nsa, {head_dim} and {value_dim} wide: {what}");
        let options = (&self.device, DType::BF16);
        let normal = Distribution::Normal(0.0, 1.0);
        let random = |heads: usize, width: usize| -> Tensor<4> {
            Tensor::random([1, heads, n, width], normal, options)
        };
        let (q, k, v) = (
            drifting(random(heads, head_dim), drift()),
            random(kv_heads, head_dim),
            random(kv_heads, value_dim),
        );
        let gates = Tensor::<4>::random([1, heads, n, 3], Distribution::Default, options);
        let causal = causal(heads, n);
        let [nsa, packed] = [DispatchMode::Auto, DispatchMode::GroupByBlock].map(|mode| {
            let options = NsaOptions::default().dispatch_mode(mode);
            Nsa::new(options).expect("the paper's numbers")
        });
        let attend = |nsa: &Nsa, [q, k, v, gates]: [Tensor<4>; 4]| {
            let keys_values = NsaKeysValues::shared(k, v).compressed_by_means(nsa)?;
            nsa.attention(q, keys_values, gates)
        };
        let ways = [(&nsa, ""), (&packed, ", queries packed")];
        let inputs = [q.clone(), k.clone(), v.clone(), gates];
        if let Err(error) = attend(&nsa, inputs.clone()) {
            println!("{}: {error}", name("skipped"));
            return;
        }
        self.dense = f64::NAN;
        self.dense = self.time(&name("dense"), || run(&q, &k, &v, &causal));
        let keys_values = NsaKeysValues::shared(k.clone(), v.clone()).compressed_by_means(&nsa);
        let keys_values = keys_values.expect("shapes fit");
        // With what chooses as devices without its kernel have it, too: the choice alone is what is left without the attention to compressed blocks.
        let alone = self.time(&name("compressed blocks"), || {
            nsa.compressed_branch(q.clone(), &keys_values)
        });
        for (nsa, kind) in [
            (&nsa, ""),
            (&nsa.clone().without_importance_kernel(), ", without kernel"),
        ] {
            println!(
                "{:?}",
                nsa.explain(&q, &keys_values).map(|plan| plan.to_string())
            );
            let both = self.time(
                &name(&format!("compressed blocks and choice{kind}")),
                || nsa.query_lists(q.clone(), &keys_values),
            );
            self.row(&name(&format!("choice alone{kind}")), None, both - alone);
        }
        if let Some([k, v]) = &keys_values.compressed {
            let tracked = [&q, k, v].map(|x| x.clone().autodiff().require_grad());
            self.time(&name("compressed blocks, forward and backward"), || {
                let [q, k, v] = tracked.clone();
                let keys_values = NsaKeysValues {
                    compressed: Some([k, v]),
                    ..keys_values.clone()
                };
                let out = nsa.compressed_branch(q, &keys_values).expect("it ran");
                out.expect("the sequence is long").sum().backward()
            });
        }
        for (nsa, how) in ways {
            let name = name(&format!("forward{how}"));
            self.time(&name, || attend(nsa, inputs.clone()));
        }
        self.nsa_selected(n, [head_dim, value_dim], &nsa, &inputs);
        self.nsa_gates(n, [head_dim, value_dim], &inputs[3]);
        // Packed queries and their outputs, and the gradients of both; and some twenty tensors as large as the queries.
        let options = nsa.options();
        let chosen = options.keep - options.forced.first - options.forced.local;
        let numbers = heads * n * (head_dim + value_dim) * (2 * chosen + 10);
        let (needed, there) = (numbers as f64 * 2.0 / 1e9, memory());
        if needed > there {
            let what = name("forward and backward");
            println!("{what}: skipped, needs about {needed:.0} GB, and there are {there:.0}");
            return;
        }
        let tracked = inputs.map(|x| x.autodiff().require_grad());
        let [q, k, v, _] = &tracked;
        self.dense = f64::NAN;
        self.dense = self.time(&name("dense, forward and backward"), || {
            run(q, k, v, &causal).sum().backward()
        });
        for (nsa, how) in ways {
            let name = name(&format!("forward and backward{how}"));
            self.time(&name, || {
                let out = attend(nsa, tracked.clone()).expect("it ran before");
                out.sum().backward()
            });
        }
    }

    /// The sum of the branches alone, beside the same by Burn's operations.
    fn nsa_gates(&mut self, n: usize, [head_dim, value_dim]: [usize; 2], gates: &Tensor<4>) {
        let name = |what: &str| format!("nsa, {head_dim} and {value_dim} wide: gates, {what}");
        let normal = Distribution::Normal(0.0, 1.0);
        let shape = [1, NSA_HEADS[0], n, value_dim];
        let branches = [(); NsaBranches::COUNT]
            .map(|_| Tensor::<4>::random(shape, normal, (&self.device, DType::BF16)));
        type Branches = [Tensor<4>; NsaBranches::COUNT];
        let by_burn = |branches: Branches, gates: Tensor<4>| {
            let parts = branches.into_iter().enumerate();
            let parts = parts.map(|(at, out)| out * gates.clone().slice_dim(3, at..at + 1));
            parts.reduce(|a, b| a + b).expect("three")
        };
        let by_kernel = |[a, b, c]: Branches, gates: Tensor<4>| {
            let branches = NsaBranches::new(Some(a), b, Some(c));
            branches.gated(gates).expect("shapes fit")
        };
        type Gated<'a> = &'a dyn Fn(Branches, Tensor<4>) -> Tensor<4>;
        let ways: [(Gated<'_>, &str); 2] = [(&by_kernel, ""), (&by_burn, ", Burn's operations")];
        let tracked = branches.clone().map(|x| x.autodiff().require_grad());
        let by_tracked = gates.clone().autodiff().require_grad();
        let device = self.device.clone();
        for (gated, how) in ways {
            self.time(&name(&format!("forward{how}")), || {
                let out = gated(branches.clone(), gates.clone());
                // Fusion does not write what is dropped before it runs.
                device.sync().expect("the device works");
                out
            });
        }
        for (gated, how) in ways {
            self.time(&name(&format!("forward and backward{how}")), || {
                let out = gated(tracked.clone(), by_tracked.clone());
                out.sum().backward()
            });
        }
    }

    /// The selected branch alone, of a choice that is known: each query attends to its list, or queries are packed by block.
    fn nsa_selected(
        &mut self,
        n: usize,
        [head_dim, value_dim]: [usize; 2],
        nsa: &Nsa,
        [q, k, v, _]: &[Tensor<4>; 4],
    ) {
        let name = |what: &str| format!("nsa, {head_dim} and {value_dim} wide: selected {what}");
        let keys_values = NsaKeysValues::shared(k.clone(), v.clone()).compressed_by_means(nsa);
        let keys_values = keys_values.expect("shapes fit");
        let Ok(Some(lists)) = nsa.query_lists(q.clone(), &keys_values) else {
            return;
        };
        let near = nsa.forced_layout(q.dims(), n).expect("shapes fit");
        let options = |mode| AttentionOptions::default().dispatch_mode(mode);
        let plan = lists.explain(q, k, v, &near, &options(DispatchMode::Auto));
        println!("{}", plan.expect("shapes fit"));
        println!("overlap of lists {:.3}", lists.measure_group_reuse());
        let tracked = [q, k, v].map(|x| x.clone().autodiff().require_grad());
        for (mode, what) in [
            (DispatchMode::Auto, "query by query"),
            (DispatchMode::GroupByBlock, "packed"),
        ] {
            let attend = |[q, k, v]: [Tensor<4>; 3]| {
                selected_blocks_attention(q, k, v, &near, lists.clone(), options(mode))
                    .expect("shapes fit")
                    .0
            };
            self.time(&name(&format!("branch, {what}")), || {
                attend([q, k, v].map(Clone::clone))
            });
            self.time(
                &name(&format!("branch, {what}, forward and backward")),
                || attend(tracked.clone()).sum().backward(),
            );
        }
    }
}

/// Memory of the device in GB, as it is said to be.
fn memory() -> f64 {
    said("BURN_SPARSE_BENCH_GB", 80.0)
}

/// How much of a query of native sparse attention is that of the one before.
fn drift() -> f64 {
    said("BURN_SPARSE_BENCH_DRIFT", 0.0)
}

/// The number that an environment variable says, or what it is where it says none.
fn said(variable: &str, otherwise: f64) -> f64 {
    let text = std::env::var(variable).ok();
    text.and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// Of independent rows of variance 1 such rows that each is `kept` of the one before, and something of its own.
fn drifting(rows: Tensor<4>, kept: f64) -> Tensor<4> {
    let [batch, heads, n, width] = rows.dims();
    let options = (&rows.device(), rows.dtype());
    // Σ keptʲ zʲ = (1 + kept z) (1 + kept² z²) (1 + kept⁴ z⁴) …, where z is the row before.
    let mut rows = rows.mul_scalar((1.0 - kept * kept).sqrt());
    let (mut shift, mut weight) = (1, kept);
    while shift < n && weight > 1e-3 {
        let none = Tensor::<4>::zeros([batch, heads, shift, width], options);
        let before = Tensor::cat(vec![none, rows.clone().slice_dim(2, 0..n - shift)], 2);
        rows = rows + before.mul_scalar(weight);
        (shift, weight) = (2 * shift, weight * weight);
    }
    rows
}

fn selected(q: &Tensor<4>, k: &Tensor<4>, v: &Tensor<4>, selection: &Selection) -> Tensor<4> {
    let options = AttentionOptions::default();
    attention_selected(q.clone(), k.clone(), v.clone(), selection, options).expect("shapes fit")
}
