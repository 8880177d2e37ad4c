//! `bench-rows`: times launches, copies, and the row kernels relative to them.

use burn_fused_ops::kernels::rows as fused_rows;
use burn_sparse_select::kernels::rows as select_rows;
use std::cell::RefCell;
use std::time::Instant;

use anyhow::Result;
use blocksparse::{Always, ElementDropout};
use blocksparse_bench::device::{self, contiguous, empty, sync};
use blocksparse_bench::numbers::{BF16, F32};
use blocksparse_bench::runner::{Timing, write_json};
use blocksparse_cubecl::rows;
use blocksparse_cubecl::rows::ActivationKind;
use burn_fused_ops::kernels::optim;
use burn_fused_ops::kernels::optim::{AdamWHyper, AdamWTensors, FlatTensor};
use burn_fused_ops::kernels::rows::{
    ActivationBackward, HeadsPart, NormBackward, NormBranch, NormGrad, NormOf, StreamGrad,
};
use burn_sparse_select::kernels::rows::GatedBackward;
use burn_sparse_select::kernels::selection::{
    CompressedInputs, CompressedPlan, CompressedShape, Wanted, compressed_attention_sums,
};
use clap::Parser;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde_json::{Value, json};

#[derive(Parser)]
#[command(
    about = "Times launches, copies and the row kernels on a device",
    version
)]
struct Args {
    /// Rows of the matrices; the paper's enwik8 model has 4 × 12,288.
    #[arg(long, default_value_t = 49_152)]
    rows: usize,
    #[command(flatten)]
    timing: Timing<25>,
    /// Width of the stream; the feed-forward network is four times as wide.
    #[arg(long, default_value_t = 512)]
    width: usize,
    /// Also write the numbers to this file.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// Only the kernels whose names contain this.
    #[arg(long, default_value = "")]
    only: String,
}

fn main() -> Result<()> {
    let bench = Bench {
        client: device::client()?,
        args: Args::parse(),
        results: RefCell::default(),
    };
    if bench.args.only.is_empty() && !bench.args.timing.enqueue_only {
        bench.launches()?;
        bench.streams()?;
    }
    bench.copies()?;
    bench.column_sums()?;
    bench.norms()?;
    bench.activations()?;
    bench.heads()?;
    bench.gates()?;
    bench.compressed()?;
    bench.weights()?;
    bench.optimizer()?;
    write_json(bench.args.json.as_deref(), &bench.results.into_inner())
}

/// Writes one number, so that the kernel is not empty.
#[cube(launch_unchecked)]
fn write_one(output: &mut [f32]) {
    if ABSOLUTE_POS == 0 {
        output[0] = 1.0;
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn copy<E: Float, N: Size>(
    input: &[Vector<E, N>],
    output: &mut [Vector<E, N>],
    vectors: usize,
    #[define(E)] _element: ElemType,
) {
    if ABSOLUTE_POS < vectors {
        output[ABSOLUTE_POS] = input[ABSOLUTE_POS];
    }
}

struct Bench {
    client: Client,
    args: Args,
    results: RefCell<Vec<Value>>,
}

impl Bench {
    /// Times a kernel that moves `bytes` bytes.
    fn moves<T, E: Into<anyhow::Error>>(
        &self,
        name: &str,
        bytes: usize,
        call: impl Fn() -> Result<T, E> + Sync,
    ) -> Result<()> {
        if !name.contains(&self.args.only) {
            return Ok(());
        }
        let call = || call().map(|_| ()).map_err(Into::into);
        let Some(seconds) = self.args.timing.seconds(&self.client, call)? else {
            return Ok(());
        };
        let (ms, rate) = (seconds * 1e3, bytes as f64 / seconds / 1e12);
        println!("{name:<56} {ms:>9.4} ms {rate:>7.2} TB/s");
        self.record(json!({"name": name, "ms": ms, "bytes": bytes, "tb_s": rate}));
        Ok(())
    }

    fn record(&self, result: Value) {
        self.results.borrow_mut().push(result);
    }

    fn buffer(&self, numbers: usize, element: ElemType) -> Handle {
        empty(&self.client, numbers, element)
    }

    fn buffers<const N: usize>(&self, numbers: usize, element: ElemType) -> [Handle; N] {
        [(); N].map(|()| self.buffer(numbers, element))
    }

    /// Times a launch on the host, and on the device in a sequence of launches.
    fn launches(&self) -> Result<()> {
        const MANY: u32 = 2_000;
        let output = self.client.empty(4);
        let launch = || {
            // SAFETY: the buffer holds the one number that is written.
            unsafe {
                let buffer = BufferArg::from_raw_parts(output.clone(), 1);
                write_one::launch_unchecked(
                    &self.client,
                    CubeCount::Static(1, 1, 1),
                    CubeDim::new_1d(32),
                    buffer,
                );
            }
        };
        launch();
        sync(&self.client)?;
        let began = Instant::now();
        (0..MANY).for_each(|_| launch());
        let queued = began.elapsed();
        sync(&self.client)?;
        let done = began.elapsed();
        let microseconds = |time: std::time::Duration| time.as_secs_f64() * 1e6 / f64::from(MANY);
        let (host, device) = (microseconds(queued), microseconds(done));
        println!("an empty launch: queued after {host:.2} us, done after {device:.2} us");
        self.record(json!({"name": "empty launch", "host_us": host, "device_us": device}));
        Ok(())
    }

    fn copies(&self) -> Result<()> {
        for mebibytes in [48, 96, 1024] {
            let bytes = mebibytes << 20;
            let [input, output] = [(); 2].map(|_| self.client.empty(bytes));
            for vector in [4, 8] {
                let client = &self.client;
                let name = format!("copy of {mebibytes} MiB, {vector} f32 a unit");
                self.moves(&name, 2 * bytes, || {
                    launch_copy(client, &input, &output, bytes, vector);
                    anyhow::Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// Times copies in several streams by the host's clock.
    fn streams(&self) -> Result<()> {
        const BYTES: usize = 96 << 20;
        const COPIES: usize = 100;
        // Compiles the kernel before anything is timed.
        let [input, output] = [(); 2].map(|_| self.client.empty(BYTES));
        launch_copy(&self.client, &input, &output, BYTES, 4);
        for streams in 1..=3 {
            sync(&self.client)?;
            let began = Instant::now();
            std::thread::scope(|scope| {
                for _ in 0..streams {
                    let client = self.client.clone();
                    scope.spawn(move || {
                        let [input, output] = [(); 2].map(|_| client.empty(BYTES));
                        for _ in 0..COPIES {
                            launch_copy(&client, &input, &output, BYTES, 4);
                        }
                        sync(&client).expect("the device works");
                    });
                }
            });
            let seconds = began.elapsed().as_secs_f64();
            let rate = (2 * BYTES * COPIES * streams) as f64 / seconds / 1e12;
            println!("copies of 96 MiB in {streams} streams: {rate:.2} TB/s together");
            self.record(json!({"name": format!("{streams} streams"), "tb_s": rate}));
        }
        Ok(())
    }

    fn column_sums(&self) -> Result<()> {
        let client = &self.client;
        for (rows, width, element) in [
            (self.args.rows, 512, F32),
            (self.args.rows, 512, BF16),
            (self.args.rows, 2048, BF16),
            (48, 512 * 2048, BF16),
            (48, 512 * 512, BF16),
        ] {
            let (input, output) = (self.buffer(rows * width, element), self.buffer(width, F32));
            let name = format!("column sums of [{rows}, {width}] {element}");
            self.moves(&name, rows * width * element.size(), || {
                let (from, to) = ((&input, element), (&output, F32));
                rows::column_sums(client, from, [rows, width], to)
            })?;
        }
        Ok(())
    }

    /// Times the selection of native sparse attention for 64 query heads and 4 KV heads. The bytes are those of queries, keys and results.
    fn compressed(&self) -> Result<()> {
        let (rows, heads, kv_heads, most) = (self.args.rows, 64, 4, 13);
        for (width, group) in [(128, 16), (192, 16), (64, 16), (128, 8), (128, 4), (128, 1)] {
            let shape = CompressedShape {
                batch: 1,
                heads: [kv_heads * group, kv_heads],
                seq: [rows, rows],
                width,
                blocks: [32, 16, 64],
            };
            let heads = heads / 16 * group;
            let plan = match CompressedPlan::new(&self.client, BF16, shape) {
                Ok(plan) => plan,
                Err(reason) => {
                    println!("choices of compressed blocks, {width} wide: {reason}");
                    continue;
                }
            };
            println!("{width} wide, groups of {group}: {plan}");
            let (entries, blocks) = (shape.entries(), shape.chosen_from());
            let inputs = CompressedInputs {
                q: contiguous(
                    self.buffer(heads * rows * width, BF16),
                    [1, heads, rows, width],
                ),
                k: self.buffer(kv_heads * entries * width, BF16),
                lse: self.buffer(heads * rows, F32),
            };
            // Attention sums of all queries would take a gigabyte.
            let some = rows - rows.min(4096)..rows;
            let forced = Always { first: 1, local: 2 };
            for (what, wanted, numbers) in [
                ("choices", Wanted::Choice { forced, most }, rows * most),
                (
                    "last 4,096 attention sums",
                    Wanted::AttentionSums(some.clone()),
                    some.len() * blocks,
                ),
            ] {
                let out = self.buffer(kv_heads * numbers, F32);
                let bytes =
                    heads * rows * width * 2 + kv_heads * (entries * width * 2 + numbers * 4);
                let client = &self.client;
                let name = format!("{what} of compressed blocks, {width} wide, groups of {group}");
                self.moves(&name, bytes, || {
                    compressed_attention_sums(client, &plan, &inputs, 0.1, &wanted, &out)
                })?;
            }
        }
        Ok(())
    }

    /// Times norms with the residual stream in f32 and everything else in bf16, with and without dropout.
    fn norms(&self) -> Result<()> {
        let (rows, width) = (self.args.rows, self.args.width);
        let (client, matrix) = (&self.client, rows * width);
        let [stream, sum] = self.buffers(matrix, F32);
        let [branch, normed, xhat, grad] = self.buffers(matrix, BF16);
        let [bias, gamma, beta] = self.buffers(width, F32);
        let rstd = self.buffer(rows, F32);
        for dropout in [None, Some(ElementDropout::new(0.1, 1, 0))] {
            let kind = if dropout.is_some() { ", dropout" } else { "" };
            let name = format!("residual norm{kind}");
            self.moves(&name, matrix * (4 + 2 + 4 + 2 + 2), || {
                let branch = NormBranch {
                    x: (&branch, BF16),
                    bias: Some((&bias, F32)),
                    dropout: dropout.as_ref(),
                    sum: &sum,
                };
                let norm = NormOf {
                    centered: true,
                    epsilon: 1e-5,
                    gamma: (&gamma, F32),
                    beta: Some((&beta, F32)),
                    normed: (&normed, BF16),
                    kept: Some([&xhat, &rstd]),
                };
                let (branch, norm) = (Some(branch), Some(norm));
                fused_rows::add_norm(client, (&stream, F32), [rows, width], branch, norm)
            })?;
            let name = format!("residual norm, backward{kind}");
            self.moves(&name, matrix * (4 + 2 + 2 + 4 + 2), || {
                let pass = NormBackward {
                    element: F32,
                    sum: Some(&sum),
                    norm: Some(NormGrad {
                        centered: true,
                        normed: (&normed, BF16),
                        xhat: &xhat,
                        rstd: &rstd,
                        gamma: (&gamma, F32),
                    }),
                    stream: StreamGrad::InPlace,
                    branch: Some((&grad, BF16)),
                    dropout: dropout.as_ref(),
                    sums: [true; 3],
                };
                fused_rows::residual_norm_backward(client, [rows, width], &pass)
            })?;
        }
        Ok(())
    }

    fn activations(&self) -> Result<()> {
        let (rows, width) = (self.args.rows, 4 * self.args.width);
        let (client, matrix) = (&self.client, rows * width);
        let [x, y] = self.buffers(matrix, BF16);
        let [bias, sums] = self.buffers(width, F32);
        for activation in [ActivationKind::GeluSigmoid, ActivationKind::GeluErf] {
            let bias = (&bias, F32);
            let name = format!("bias and {activation:?}");
            self.moves(&name, matrix * 4, || {
                let x = (&x, BF16);
                fused_rows::bias_activation(client, x, Some(bias), &y, [rows, width], activation)
            })?;
            for (again, what, bytes) in [(Some(&x), ", and again", 8), (None, "", 6)] {
                let name = format!("bias and {activation:?}, backward{what}");
                self.moves(&name, matrix * bytes, || {
                    let pass = ActivationBackward {
                        activation,
                        x: Some(&x),
                        bias: Some(bias),
                        dy: (&y, BF16),
                        dx: Some(&y),
                        y: again,
                        sums: Some((&sums, F32)),
                    };
                    fused_rows::bias_activation_backward(client, [rows, width], &pass)
                })?;
            }
        }
        Ok(())
    }

    /// Times sequences of a quarter of the rows, with heads of 64.
    fn heads(&self) -> Result<()> {
        let (rows, width) = (self.args.rows, self.args.width);
        let client = &self.client;
        let joined = self.buffer(rows * 3 * width, BF16);
        let split: [Handle; 3] = self.buffers(rows * width, BF16);
        let [bias, sums] = self.buffers(3 * width, F32);
        let part = HeadsPart {
            heads: width / 64,
            dim: 64,
        };
        let bytes = rows * 3 * width * 4;
        self.moves("heads of queries, keys, values, split", bytes, || {
            let parts = [0, 1, 2].map(|index| (part, &split[index]));
            let bias = Some((&bias, F32));
            fused_rows::split_heads(client, (&joined, BF16), bias, [rows, rows / 4], &parts)
        })?;
        self.moves("heads of queries, keys, values, joined", bytes, || {
            let parts = [0, 1, 2].map(|index| (part, Some(&split[index])));
            let sums = Some((&sums, F32));
            fused_rows::join_heads(client, &parts, [rows, rows / 4], (&joined, BF16), sums)
        })
    }

    /// Times the branches of native sparse attention, for 64 heads of 128 and one position per row, and copies of as many bytes.
    fn gates(&self) -> Result<()> {
        const HEADS: usize = 64;
        const WIDTH: usize = 128;
        let rows = HEADS * self.args.rows;
        let client = &self.client;
        let tensor = rows * WIDTH * 2;
        let [out, grad] = self.buffers(rows * WIDTH, BF16);
        let [branches, by_branches]: [[Handle; 3]; 2] =
            [(); 2].map(|_| self.buffers(rows * WIDTH, BF16));
        let [branches, by_branches] = [&branches, &by_branches].map(|of| of.each_ref().map(Some));
        for element in [BF16, F32] {
            let [gates, by_gates] = self.buffers(rows * 3, element);
            let of_gates = rows * 3 * element.size();
            let gates = (&gates, element);
            let name = format!("gates in {element}, three branches");
            let bytes = 4 * tensor + of_gates;
            self.moves(&name, bytes, || {
                let out = (&out, BF16);
                select_rows::gated_sum(client, &branches, gates, out, [rows, WIDTH])
            })?;
            self.equal_copy(&name, bytes)?;
            for (in_place, what) in [(false, "backward"), (true, "backward in place")] {
                let mut written = by_branches;
                if in_place {
                    written[2] = Some(&grad);
                }
                let bytes = 7 * tensor + 2 * of_gates;
                self.moves(&format!("{name}, {what}"), bytes, || {
                    let pass = GatedBackward {
                        grad: (&grad, BF16),
                        branches: &branches,
                        gates,
                        by_branches: &written,
                        by_gates: Some(&by_gates),
                    };
                    select_rows::gated_sum_backward(client, [rows, WIDTH], &pass)
                })?;
            }
            self.equal_copy(&format!("{name}, backward"), 7 * tensor + 2 * of_gates)?;
        }
        Ok(())
    }

    /// Times a copy that moves as many bytes as another kernel.
    fn equal_copy(&self, name: &str, moved: usize) -> Result<()> {
        let bytes = (moved / 2).next_multiple_of(16);
        let [input, output] = [(); 2].map(|_| self.client.empty(bytes));
        let client = &self.client;
        self.moves(&format!("{name}: a copy"), 2 * bytes, || {
            launch_copy(client, &input, &output, bytes, 4);
            anyhow::Ok(())
        })
    }

    /// Times the conversion of a layer's weights for its products.
    fn weights(&self) -> Result<()> {
        let width = self.args.width;
        let client = &self.client;
        let weights: [Handle; 3] = self.buffers(width * width, F32);
        let joined = self.buffer(3 * width * width, BF16);
        let bytes = 3 * width * width * 6;
        self.moves("weights of queries, keys, values, rounded", bytes, || {
            let matrices = weights.each_ref().map(|handle| fused_rows::BesideMatrix {
                handle,
                width,
                pitch: width,
            });
            fused_rows::rounded_beside(client, &matrices, F32, width, (&joined, BF16))
        })
    }

    /// Times the optimizer for the parameters of thirty layers: 94.4 million elements in 480 tensors at a width of 512.
    fn optimizer(&self) -> Result<()> {
        let width = self.args.width;
        let client = &self.client;
        let square = width * width;
        let layer = [
            vec![square; 4],
            vec![4 * square; 2],
            vec![width; 9],
            vec![4 * width],
        ]
        .concat();
        let flat = |elements: usize| FlatTensor::new(self.buffer(elements, F32), elements, F32);
        let tensors: Vec<AdamWTensors> = (layer.repeat(30).into_iter())
            .map(|elements| AdamWTensors {
                parameter: flat(elements),
                gradient: flat(elements),
                moments: [flat(elements), flat(elements)],
            })
            .collect();
        let gradients: Vec<FlatTensor> = tensors.iter().map(|x| x.gradient.clone()).collect();
        let numbers: usize = gradients.iter().map(|x| x.elements).sum();
        let control = client.create_from_slice(&[0u8; 32]);
        let [norm, factor] = self.buffers(1, F32);
        let count = gradients
            .iter()
            .map(|x| optim::partial_sums(x.elements))
            .sum();
        let sums = self.buffer(count, F32);
        let clip = || {
            optim::sum_of_squares(client, &gradients, (&sums, count), 0, F32)?;
            let (sums, made) = ((&sums, count), [&norm, &factor]);
            optim::clip_factor(client, sums, (&control, 3), made, F32)
        };
        let step = || {
            let betas = AdamWHyper {
                betas: [0.9, 0.999],
                epsilon: 1e-8,
                weight_decay: 0.01,
            };
            optim::adamw(client, &tensors, &control, Some(&factor), betas, F32)
        };
        self.moves("norm of all gradients", numbers * 4, clip)?;
        self.moves("AdamW of all parameters", numbers * 28, step)?;
        self.moves("both", numbers * 32, || {
            clip()?;
            step()
        })
    }
}

fn launch_copy(client: &Client, input: &Handle, output: &Handle, bytes: usize, vector: usize) {
    let vectors = bytes / 4 / vector;
    // SAFETY: each unit reads and writes one vector of buffers that hold `vectors` of them.
    unsafe {
        copy::launch_unchecked(
            client,
            CubeCount::Static(vectors.div_ceil(256) as u32, 1, 1),
            CubeDim::new_1d(256),
            AddressType::U32,
            vector,
            BufferArg::from_raw_parts(input.clone(), vectors),
            BufferArg::from_raw_parts(output.clone(), vectors),
            vectors,
            F32,
        );
    }
}
