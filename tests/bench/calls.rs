//! Times whole calls by the host, on the device that `BURN_SPARSE_DEVICE` names: what checks, plans, autodiff and fusion add to the
//! kernels, which `bench-kernels` times alone.

mod attention;
mod program;
mod queued;

use std::process::ExitCode;
use std::time::Instant;

use attention::run;
use burn::tensor::module::attention as attention_of_burn;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, Device, Tensor};
use burn_blocksparse::layout::TopKOptions;
use burn_blocksparse::{
    AccumulatedAttentionOptions, AttentionOptions, BlockSparseTensor, Pattern, SparseAttentionCall,
    WeightsMode, accumulated_attention,
};
use burn_blocksparse_tests::devices::devices;
use burn_sparse_select::top_k_blocks_on_device;
use program::{median, number};
use queued::{Ahead, shown};

const USAGE: &str = "usage: BURN_SPARSE_DEVICE=cuda bench-calls [DTYPE] [N] [REPEATS]

DTYPE    f32 (default), bf16 or f16
N        positions (default 4096)
REPEATS  how often each call is made; medians are printed (default 50)

With BURN_SPARSE_ACCELERATE=1 Burn's own attention runs on the kernels: the last rows.";

const HEADS: usize = 8;
const HEAD_DIM: usize = 64;
const BLOCK: usize = 32;
/// Different lengths in a row.
const LENGTHS: usize = 100;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let dtype = match args.first().map(String::as_str) {
        None | Some("f32") => Some(DType::F32),
        Some("bf16") => Some(DType::BF16),
        Some("f16") => Some(DType::F16),
        _ => None,
    };
    let (n, repeats) = (number(&args, 1, 4096), number(&args, 2, 50));
    let (Some(dtype), Some(n), Some(repeats), 0..=3) = (dtype, n, repeats, args.len()) else {
        eprintln!("{USAGE}");
        return ExitCode::FAILURE;
    };
    #[cfg(feature = "fusion")]
    if std::env::var_os("BURN_SPARSE_ACCELERATE").is_some() {
        burn_blocksparse::module::accelerate_attention().expect("nothing ran before");
    }
    for device in devices() {
        let bench = Bench {
            device,
            dtype,
            n,
            repeats,
        };
        let device = &bench.device;
        println!("{device:?}, {dtype:?}, [1, {HEADS}, {n}, {HEAD_DIM}]");
        println!("{:<44} {:>12} {:>12}", "", "returns", "is done");
        bench.calls();
        bench.device_layouts();
        bench.others();
        bench.lengths();
        bench.of_burn();
    }
    ExitCode::SUCCESS
}

struct Bench {
    device: Device,
    dtype: DType,
    n: usize,
    repeats: usize,
}

impl Bench {
    fn inputs(&self, n: usize, device: &Device) -> [Tensor<4>; 3] {
        attention::inputs([HEADS, HEADS, HEAD_DIM], n, (device, self.dtype))
    }

    fn sync(&self) {
        self.device.sync().expect("the device works");
    }

    /// Medians of the time until a call returns, and until the device has done it; the first calls compile.
    fn time<T>(&self, name: &str, mut call: impl FnMut() -> T) {
        for _ in 0..3 {
            drop(call());
            self.sync();
        }
        let times = (0..self.repeats).map(|_| {
            let start = Instant::now();
            let result = call();
            let returned = start.elapsed().as_secs_f64();
            self.sync();
            drop(result);
            (returned, start.elapsed().as_secs_f64())
        });
        let (returned, done): (Vec<_>, Vec<_>) = times.unzip();
        let [returned, done] = [returned, done].map(|times| shown(median(times)));
        println!("{name:<44} {returned:>12} {done:>12}");
    }

    /// The operation over one layout, called again and again.
    fn calls(&self) {
        let layout = Pattern::fixed(128, 32)
            .layout(HEADS, self.n, BLOCK)
            .expect("valid sizes");
        let [q, k, v] = self.inputs(self.n, &self.device);
        self.time("forward", || run(&q, &k, &v, &layout));
        let tracked = self.device.clone().autodiff();
        let [q, k, v] = self.inputs(self.n, &tracked).map(Tensor::require_grad);
        self.time("forward with autodiff", || run(&q, &k, &v, &layout));
        self.time("forward and backward", || {
            run(&q, &k, &v, &layout).backward()
        });
        self.time("forward and backward, weights stored", || {
            let options = AttentionOptions::default().weights(WeightsMode::Store);
            let call = SparseAttentionCall::new(q.clone(), k.clone(), v.clone(), &layout);
            let out = call.options(options).run().expect("shapes fit").out;
            out.backward()
        });
    }

    /// Layouts made of scores, one after the other: a plan for each.
    fn device_layouts(&self) {
        let [q, k, v] = self.inputs(self.n, &self.device);
        let options = TopKOptions::new(64, 16);
        let choose = || {
            top_k_blocks_on_device(q.clone(), k.clone(), options.clone()).expect("valid options")
        };
        self.time("top-k on the device", choose);
        self.time("top-k on the device, plans and forward", || {
            run(&q, &k, &v, &choose())
        });
        let layout = choose();
        self.time("forward over such a layout, again", || {
            run(&q, &k, &v, &layout)
        });
        let tracked = self.device.clone().autodiff();
        let [tq, tk, tv] = self.inputs(self.n, &tracked).map(Tensor::require_grad);
        self.time("top-k, plans, forward and backward", || {
            run(&tq, &tk, &tv, &choose()).backward()
        });
    }

    /// Sums of weights, and the operators on block-sparse tensors.
    fn others(&self) {
        let layout = Pattern::local(256)
            .layout(HEADS, self.n, 64)
            .expect("valid sizes");
        let [q, k, v] = self.inputs(self.n, &self.device);
        let (_, lse) = SparseAttentionCall::new(q.clone(), k.clone(), v.clone(), &layout)
            .run_with_lse()
            .expect("shapes fit");
        self.time("sums over columns and diagonals", || {
            let (q, k, lse) = (q.clone(), k.clone(), lse.clone());
            let options = AccumulatedAttentionOptions::default();
            accumulated_attention(q, k, lse, &layout, options).expect("shapes fit")
        });
        let nt = || BlockSparseTensor::nt(q.clone(), k.clone(), &layout).expect("shapes fit");
        self.time("nt", nt);
        let scores = nt();
        self.time("softmax", || {
            scores.clone().softmax(0.125).expect("a finite scale")
        });
        self.time("nn", || scores.clone().nn(v.clone()).expect("shapes fit"));
        self.time("tn", || scores.clone().tn(v.clone()).expect("shapes fit"));
    }

    /// Burn's own `attention`, causal.
    fn of_burn(&self) {
        let attend = |inputs: &[Tensor<4>; 3]| {
            let options = AttentionModuleOptions {
                scale: None,
                softcap: None,
                is_causal: true,
            };
            let [q, k, v] = inputs.clone();
            attention_of_burn(q, k, v, None, None, options).sum()
        };
        let ahead = Ahead::new(&self.device);
        for n in [self.n, 4 * self.n] {
            let inputs = self.inputs(n, &self.device);
            let name = format!("Burn's attention, causal, {n}");
            self.time(&name, || attend(&inputs));
            if let Some(ahead) = &ahead {
                let seconds = ahead.time(20, self.repeats.min(5), &mut || attend(&inputs));
                println!("{name}, one of 20 on the device: {:.3} ms", 1e3 * seconds);
            }
        }
        let tracked = self.device.clone().autodiff();
        let inputs = self.inputs(self.n, &tracked).map(Tensor::require_grad);
        self.time("Burn's attention, forward and backward", || {
            attend(&inputs).backward()
        });
        #[cfg(feature = "fusion")]
        println!("{}", burn_blocksparse::module::accelerated_attention());
    }

    /// A sequence of another length in each step, forward and backward, twice: kernels that a length has to compile show in the first round.
    fn lengths(&self) {
        let tracked = self.device.clone().autodiff();
        for round in ["first", "second"] {
            let mut times: Vec<f64> = (0..LENGTHS)
                .map(|step| {
                    let n = self.n + 37 * step;
                    let start = Instant::now();
                    let layout = Pattern::fixed(128, 32).layout(HEADS, n, BLOCK);
                    let layout = layout.expect("valid sizes");
                    let [q, k, v] = self.inputs(n, &tracked).map(Tensor::require_grad);
                    let gradients = run(&q, &k, &v, &layout).backward();
                    self.sync();
                    drop(gradients);
                    start.elapsed().as_secs_f64()
                })
                .collect();
            times.sort_by(f64::total_cmp);
            let middle = times[LENGTHS / 2];
            let slow = times.iter().filter(|&&time| time > 4.0 * middle).count();
            println!(
                "{LENGTHS} lengths, {round} round: median {}, longest {}, {slow} above four medians",
                shown(middle),
                shown(times[LENGTHS - 1]),
            );
        }
    }
}
