//! A workload on the device: its tensors, its two passes, and their measurement.

use std::time::Instant;

use anyhow::{Result, ensure};
use blocksparse::{BlockLayout, Dropout, ProductPrecision};
use blocksparse_bench::device::{self, read_floats, upload};
use blocksparse_bench::device_time::{Times, times};
use blocksparse_bench::numbers::{Dtype, F32, nearly_normal};
use blocksparse_cubecl as kernels;
use blocksparse_cubecl::{
    AttentionPlan, BiasView, Gradients, OutputGrads, Request, ScoreKind, ScoreOptions, TableView,
    TensorView, TierLimit,
};
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::server::Handle;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::workload::Workload;
use crate::{Args, stress};

/// A workload with its options.
#[derive(Clone, Copy)]
pub struct Case<'a> {
    pub client: &'a Client,
    pub workload: &'a Workload,
    pub args: &'a Args,
}

/// A case with its tensors on the device.
pub struct Problem<'a> {
    case: Case<'a>,
    request: Request,
    layout: BlockLayout,
    q: TensorView,
    k: TensorView,
    v: TensorView,
    grad_out: TensorView,
    options: ScoreOptions,
}

impl Case<'_> {
    /// Returns the request of the workload.
    pub fn request(self) -> Request {
        let Self { workload, args, .. } = self;
        let score = ScoreKind {
            softcap: args.softcap.is_some(),
            alibi: args.alibi,
            dropout: args.dropout.is_some(),
            seeds: false,
            bias: args.bias.is_some(),
            relative: args.relative.is_some(),
            threshold: args.softmax_threshold.is_some(),
        };
        Request::new(
            [workload.batch, workload.kv_heads],
            [workload.head_dim, workload.value_dim],
            args.dtype.element(),
        )
        .with_score(score)
        .with_scale(self.scale())
        .with_precision(match (args.tf32, args.fp8) {
            (true, _) => ProductPrecision::Tf32,
            (_, true) => ProductPrecision::Fp8,
            _ => ProductPrecision::Full,
        })
        .with_max_scores(args.max_scores)
    }

    fn scale(self) -> f64 {
        let usual = 1.0 / (self.workload.head_dim as f64).sqrt();
        self.args.scale.unwrap_or(usual)
    }

    /// Creates a random tensor `[batch, heads, n, dim]`.
    fn random_input(self, heads: usize, dim: usize, rng: &mut ChaCha8Rng) -> TensorView {
        let &Workload { batch, n, .. } = self.workload;
        let shape = [batch, heads, n, dim];
        let strides = match self.args.permuted {
            true => {
                let row = dim + 8;
                [row, batch * row, heads * batch * row, 1]
            }
            false => [heads * n * dim, n * dim, dim, 1],
        };
        let reach = shape.iter().zip(strides);
        let reach: usize = reach.map(|(length, stride)| (length - 1) * stride).sum();
        let numbers = nearly_normal(reach + 1, rng);
        TensorView {
            handle: upload(self.client, &numbers, self.args.dtype.element()),
            shape,
            strides,
        }
    }

    /// Creates the options of scores from the arguments, with random tensors.
    fn score_options(self, rng: &mut ChaCha8Rng) -> ScoreOptions {
        let (client, workload, args) = (self.client, self.workload, self.args);
        let heads = workload.heads;
        let mut options = ScoreOptions::new(self.scale());
        options.softcap = args.softcap;
        options.threshold = args.softmax_threshold;
        options.slopes = (args.alibi)
            .then(|| (1..=heads).map(|head| 2f64.powf(-8.0 * head as f64 / heads as f64)))
            .map(|slopes| slopes.collect());
        options.dropout = args.dropout.map(|probability| Dropout::new(probability, 1));
        let mut random = |shape: &[usize], element| {
            let numbers = nearly_normal(shape.iter().product(), rng);
            upload(client, &numbers, element)
        };
        options.bias = args.bias.map(|bias| {
            let shape = bias.of(workload);
            BiasView {
                handle: random(&shape, args.dtype.element()),
                shape,
            }
        });
        options.relative = args.relative_shape(workload).map(|shape| TableView {
            handle: random(&shape, F32),
            shape,
        });
        options
    }
}

impl<'a> Problem<'a> {
    pub fn new(case: Case<'a>, layout: BlockLayout) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut input = |heads, dim| case.random_input(heads, dim, &mut rng);
        let &Workload {
            heads,
            kv_heads,
            head_dim,
            value_dim,
            ..
        } = case.workload;
        let (q, k) = (input(heads, head_dim), input(kv_heads, head_dim));
        let (v, grad_out) = (input(kv_heads, value_dim), input(heads, value_dim));
        Self {
            case,
            request: case.request(),
            layout,
            q,
            k,
            v,
            grad_out,
            options: case.score_options(&mut rng),
        }
    }

    pub fn forward(&self, plan: &AttentionPlan, outputs: &Outputs) -> Result<()> {
        let inputs = [&self.q, &self.k, &self.v];
        let (client, layout, handles) = (self.case.client, &self.layout, outputs.handles());
        kernels::forward(client, plan, layout, inputs, handles, &self.options)?;
        Ok(())
    }

    pub fn backward(&self, plan: &AttentionPlan, outputs: &Outputs) -> Result<()> {
        let inputs = [&self.q, &self.k, &self.v];
        let by = OutputGrads {
            out: &self.grad_out,
            lse: None,
        };
        let (client, layout, saved) = (self.case.client, &self.layout, outputs.handles());
        let (made, options) = (&outputs.gradients, &self.options);
        kernels::backward(client, plan, layout, inputs, saved, by, made, options)?;
        Ok(())
    }

    /// Compares all results with those of both mainloops of the `simt` tier, and with those of a second run.
    pub fn verify(&self, plan: &AttentionPlan) -> Result<()> {
        let Case {
            client,
            workload,
            args,
        } = self.case;
        let results = |plan: &AttentionPlan| {
            let outputs = Outputs::new(self.case);
            self.forward(plan, &outputs)?;
            if !args.forward_only {
                self.backward(plan, &outputs)?;
            }
            outputs.read(client, args.dtype.element())
        };
        let (ours, again) = (results(plan)?, results(plan)?);
        let limit = TierLimit::SimtUnfused;
        let simt = AttentionPlan::with_limit(client, &self.layout, self.request, limit)?;
        let simt = results(&simt)?;
        print!("{:<30}", workload.label());
        // Both round the outputs; the tested tier also rounds weights and sums in another order.
        let Args { tf32, fp8, .. } = *args;
        let most = match args.dtype {
            _ if fp8 => 8e-2,
            Dtype::F32 if tf32 => 2e-3,
            Dtype::F32 => 1e-5,
            Dtype::F16 => 2e-3,
            Dtype::Bf16 => 1e-2,
        };
        let mut good = true;
        let compared = |name: &str| !args.forward_only || ["out", "lse", "max"].contains(&name);
        for ((name, ours), (_, simt)) in ours.iter().zip(&simt) {
            if !compared(name) {
                continue;
            }
            let difference = relative_difference(ours, simt);
            print!("  {name} {difference:.1e}");
            let exact = (*name == "lse" || *name == "max") && !tf32 && !fp8;
            good &= difference < if exact { 1e-5 } else { most };
        }
        let same = (ours.iter().zip(&again))
            .all(|((_, a), (_, b))| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()));
        let bits = ["OTHER BITS THE SECOND TIME", "same bits twice"][usize::from(same)];
        print!("  {bits}");
        println!("  {}", if good && same { "ok" } else { "FAILED" });
        Ok(())
    }

    /// Runs the backward pass `passes` times and compares the hashes of dQ, dK and dV with those of the first.
    pub fn stress(&self, plan: &AttentionPlan, outputs: &Outputs, passes: usize) -> Result<Value> {
        let Case {
            client,
            workload,
            args,
        } = self.case;
        self.forward(plan, outputs)?;
        let element = args.dtype.element().size();
        let rows = |heads| workload.batch * heads * workload.n;
        let Workload {
            head_dim,
            value_dim,
            ..
        } = *workload;
        let q_words = rows(workload.heads) * head_dim * element / 4;
        let kv_words = rows(workload.kv_heads) * (head_dim + value_dim) * element / 4;
        let mut first = None;
        let mut others = 0;
        for _ in 0..passes {
            self.backward(plan, outputs)?;
            let hashes = [
                stress::hash(client, &outputs.gradients.q, q_words),
                stress::hash(client, &outputs.gradients.kv, kv_words),
            ];
            others += usize::from(*first.get_or_insert(hashes) != hashes);
        }
        let [dq, dkv] = first.unwrap_or_default();
        println!(
            "{:<30}  {passes} backward passes, {others} with other bits; dq {dq:016x}, dk and dv {dkv:016x}",
            workload.label()
        );
        ensure!(others == 0, "{others} of {passes} passes gave other bits");
        Ok(Value::Null)
    }

    /// Times both passes, prints a row and returns its numbers.
    pub fn time(&self, plan: &AttentionPlan, outputs: &Outputs) -> Result<Value> {
        let (
            layout,
            Case {
                client,
                workload,
                args,
            },
        ) = (&self.layout, self.case);
        let entries = workload.batch as f64 / layout.batch().unwrap_or(1) as f64;
        let pairs = layout.allowed_pairs() as f64 * entries;
        let flops = 2.0 * (workload.head_dim + workload.value_dim) as f64 * pairs;
        let (forward, host_us) =
            measure(client, args.timing.repeats, || self.forward(plan, outputs))?;
        let [forward_ms, forward_p10, forward_p90] = milliseconds(forward);
        let teraflops = |ms: f64, factor: f64| factor * flops / ms / 1e9;
        let mut result = json!({
            "fwd_ms": forward_ms, "fwd_ms_p10": forward_p10, "fwd_ms_p90": forward_p90,
            "fwd_tf": teraflops(forward_ms, 1.0), "host_us": host_us,
            "density": layout.density(), "flops_fwd": flops,
            "block": workload.block,
        });
        print!(
            "{:<30} {:>8.4} {forward_ms:>10.3} {:>8.1}",
            workload.label(),
            layout.density(),
            teraflops(forward_ms, 1.0)
        );
        if args.forward_only {
            println!(" {:>10} {:>8} {host_us:>9.1}", "", "");
            return Ok(result);
        }
        let (backward, _) = measure(client, args.timing.repeats, || self.backward(plan, outputs))?;
        let [backward_ms, backward_p10, backward_p90] = milliseconds(backward);
        println!(
            " {backward_ms:>10.3} {:>8.1} {host_us:>9.1}",
            teraflops(backward_ms, 2.5)
        );
        result["bwd_ms"] = json!(backward_ms);
        result["bwd_ms_p10"] = json!(backward_p10);
        result["bwd_ms_p90"] = json!(backward_p90);
        result["bwd_tf"] = json!(teraflops(backward_ms, 2.5));
        Ok(result)
    }
}

/// Outputs of both passes, initially NaN.
pub struct Outputs {
    out: Handle,
    lse: Handle,
    max_scores: Option<Handle>,
    gradients: Gradients,
}

impl Outputs {
    fn handles(&self) -> kernels::Outputs<'_> {
        kernels::Outputs::new(&self.out, &self.lse).with_max_scores(self.max_scores.as_ref())
    }

    pub fn new(case: Case) -> Self {
        let (client, workload, args) = (case.client, case.workload, case.args);
        let queries = workload.batch * workload.heads * workload.n;
        let keys = workload.batch * workload.kv_heads * workload.n;
        let (head_dim, value_dim) = (workload.head_dim, workload.value_dim);
        // NaN in all types.
        let buffer = |bytes: usize| match args.verify {
            true => client.create_from_slice(&vec![0xff; bytes]),
            false => client.empty(bytes),
        };
        let element = args.dtype.element().size();
        let v_offset = keys * head_dim;
        let bias_shape =
            (args.bias.filter(|_| args.verify || args.bias_gradient)).map(|bias| bias.of(workload));
        let table_shape = args.relative_shape(workload).filter(|_| args.verify);
        let mut gradients = Gradients::new(
            buffer(queries * head_dim * element),
            buffer((v_offset + keys * value_dim) * element),
            v_offset,
        );
        gradients.bias = bias_shape.map(|shape| {
            let elements: usize = shape.iter().product();
            client.create_from_slice(&vec![0; elements * 4])
        });
        gradients.relative = table_shape.map(|shape| buffer(shape.iter().product::<usize>() * 4));
        Self {
            out: buffer(queries * value_dim * element),
            lse: buffer(queries * 4),
            max_scores: args.max_scores.then(|| buffer(queries * 4)),
            gradients,
        }
    }

    fn read(&self, client: &Client, element: ElemType) -> Result<Vec<(&'static str, Vec<f32>)>> {
        let mut dk = read_floats(client, &self.gradients.kv, element)?;
        let dv = dk.split_off(self.gradients.v_offset);
        let mut results = Vec::new();
        let mut add = |name, handle: Option<&Handle>, element| -> Result<()> {
            if let Some(handle) = handle {
                results.push((name, read_floats(client, handle, element)?));
            }
            Ok(())
        };
        add("out", Some(&self.out), element)?;
        add("lse", Some(&self.lse), F32)?;
        add("dq", Some(&self.gradients.q), element)?;
        add("max", self.max_scores.as_ref(), F32)?;
        add("dbias", self.gradients.bias.as_ref(), F32)?;
        add("drelative", self.gradients.relative.as_ref(), F32)?;
        results.splice(3..3, [("dk", dk), ("dv", dv)]);
        Ok(results)
    }
}

/// Returns times on the device in seconds, and the median of the microseconds that the host takes to enqueue a call.
fn measure(
    client: &Client,
    repeats: usize,
    call: impl Fn() -> Result<()> + Sync,
) -> Result<(Times, f64)> {
    // Compiles, and builds and uploads plans.
    call()?;
    call()?;
    device::sync(client)?;
    let host = (0..repeats).map(|_| {
        let start = Instant::now();
        call()?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    });
    let host = Times::of(host.collect::<Result<_>>()?);
    device::sync(client)?;
    Ok((times(client, repeats, call)?, host.median))
}

/// Returns the median and both percentiles in milliseconds.
fn milliseconds(times: Times) -> [f64; 3] {
    [times.median, times.p10, times.p90].map(|seconds| seconds * 1e3)
}

/// Returns `‖a − b‖ / ‖b‖`, or NaN if an element is NaN. Infinities, the lse of empty rows, must be equal.
fn relative_difference(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let pairs = || a.iter().zip(b).filter(|(a, b)| a.is_finite() || a != b);
    let difference: f64 = pairs().map(|(a, b)| square(a - b)).sum();
    (difference / pairs().map(|(_, &b)| square(b)).sum::<f64>()).sqrt()
}
