//! `bench-decode`: attention of few queries over pages, at the shapes of decoding: times, and equality to loops in f64.

mod decode_keys;
mod decode_quest;
mod decode_verify;

use anyhow::{Context, Result, anyhow, ensure};
use blocksparse::Quantization;
use burn_paged_attention::internal::kernels::AppendShape;
use burn_paged_attention::internal::kernels::PagedBuffers;
use burn_paged_attention::internal::kernels::PagedPlan;
use burn_paged_attention::internal::kernels::PagedShape;
use burn_paged_attention::internal::kernels::append_quantized;
use burn_paged_attention::internal::kernels::append_rows;
use burn_paged_attention::internal::kernels::paged_attention;
use clap::Parser;
use cubecl::client::{Client, Graph};
use cubecl::future::block_on;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

#[derive(Parser)]
#[command(
    about = "Times attention over pages, or compares it with loops in f64",
    version
)]
struct Args {
    /// Timed runs; the median is reported.
    #[arg(long, default_value_t = 200)]
    repeats: usize,
    /// Calls of a run of the second column, which has the time of a call among others.
    #[arg(long, default_value_t = 20)]
    in_a_row: usize,
    /// Slots of a page.
    #[arg(long, value_delimiter = ',', default_values_t = [32, 64])]
    page: Vec<usize>,
    /// How keys and values are stored: as the queries, or in eight bits a number.
    #[arg(long, default_value = "model", value_parser = ["model", "int8", "fp8"])]
    kv_dtype: String,
    /// Join the shares of a walk in a launch of its own, on tensor cores too.
    #[arg(long)]
    two_launches: bool,
    /// Compare results with loops in f64 and run twice, instead of timing.
    #[arg(long)]
    verify: bool,
    /// Of so many parts of what is to be compared, only this one.
    #[arg(long, default_value_t = 0, requires = "verify")]
    shard: usize,
    /// Parts of what is to be compared.
    #[arg(long, default_value_t = 1, requires = "verify")]
    of: usize,
    /// Only the shapes whose names contain this.
    #[arg(long, default_value = "")]
    only: String,
    /// Also write the numbers to this file.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// Launch every kernel once and wait for nothing: for looking at what is compiled.
    #[arg(long)]
    enqueue_only: bool,
}

impl Args {
    fn quantization(&self) -> Option<Quantization> {
        match self.kv_dtype.as_str() {
            "int8" => Some(Quantization::Int8),
            "fp8" => Some(Quantization::Fp8E4m3),
            _ => None,
        }
    }
}

const BF16: ElemType = ElemType::Float(FloatKind::BF16);

/// The bandwidth of an H200.
const BANDWIDTH: f64 = 4.8;

/// A shape to be timed: bf16, all tokens live.
struct Shape {
    name: &'static str,
    heads: usize,
    kv_heads: usize,
    width: usize,
    /// New tokens of a sequence.
    rows: usize,
    /// Slots of each sequence in region one and two, and the first slot of the second.
    lengths: Vec<[usize; 3]>,
    /// Microseconds: at most, and hoped for.
    bars: Option<[f64; 2]>,
}

impl Shape {
    fn equal(
        name: &'static str,
        batch: usize,
        length: usize,
        rows: usize,
        bars: Option<[f64; 2]>,
    ) -> Self {
        Self {
            name,
            heads: 32,
            kv_heads: 8,
            width: 128,
            rows,
            lengths: vec![[length, 0, 0]; batch],
            bars,
        }
    }
}

fn shapes() -> Vec<Shape> {
    let mixed = [
        65_536, 16_384, 8192, 8192, 8192, 4096, 4096, 4096, 2048, 2048, 2048, 2048, 1024, 1024,
        1024, 1024,
    ];
    vec![
        Shape::equal("B 32 x 4K", 32, 4096, 1, Some([145.0, 122.0])),
        Shape::equal("B 8 x 32K", 8, 32_768, 1, Some([275.0, 240.0])),
        Shape::equal("B 1 x 32K", 1, 32_768, 1, Some([44.0, 37.0])),
        Shape::equal("B 1 x 4K", 1, 4096, 1, Some([11.0, 9.0])),
        Shape::equal("B 1 x 1K", 1, 1024, 1, Some([8.0, 6.0])),
        Shape {
            lengths: vec![[64, 4096, 13]],
            ..Shape::equal("streaming(4096, 64)", 1, 0, 1, None)
        },
        Shape::equal("B 1 x 4,160", 1, 4160, 1, None),
        Shape {
            heads: 8,
            kv_heads: 8,
            width: 64,
            lengths: vec![[3072, 128, 0]],
            ..Shape::equal("fixed(128, 32) at 12,288", 1, 0, 1, Some([10.0, 7.0]))
        },
        Shape::equal("B 16 x 8K", 16, 8192, 1, None),
        Shape {
            lengths: mixed.iter().map(|length| [*length, 0, 0]).collect(),
            ..Shape::equal("B 16 x 1K to 64K, as many", 16, 0, 1, None)
        },
        Shape::equal("B 32 x 4K, 4 tokens", 32, 4096, 4, None),
        Shape::equal("B 1 x 4K, 4 tokens", 1, 4096, 4, None),
        // What 32 sequences share, read for each of them and once for all.
        Shape::equal("B 32 x 32K", 32, 32_768, 1, None),
        Shape::equal("B 1 x 32K, 32 queries", 1, 32_768, 32, None),
        Shape {
            heads: 64,
            ..Shape::equal("B 8 x 32K, 64/8 heads", 8, 32_768, 1, None)
        },
        Shape {
            heads: 8,
            ..Shape::equal("B 32 x 4K, 8/8 heads", 32, 4096, 1, None)
        },
    ]
}

struct Bench {
    client: Client,
    args: Args,
    results: Vec<Value>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let client = device()?.client();
    let mut bench = Bench {
        client,
        args,
        results: Vec::new(),
    };
    match bench.args.verify {
        true => bench.verify()?,
        false => bench.times()?,
    }
    if let Some(path) = &bench.args.json {
        let text = serde_json::to_string_pretty(&bench.results)?;
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

fn device() -> Result<cubecl::Device> {
    #[cfg(feature = "cuda")]
    return Ok(cubecl::Device::Cuda(Default::default()));
    #[cfg(all(feature = "wgpu", not(feature = "cuda")))]
    return Ok(cubecl::Device::Wgpu(Default::default()));
    #[cfg(not(any(feature = "cuda", feature = "wgpu")))]
    anyhow::bail!("built without a device: use --features cuda or --features wgpu");
}

/// Numbers from −1 to 1 that look random.
#[cube(launch_unchecked, address_type = "dynamic")]
fn fill<E: Float>(output: &mut [E], count: usize, seed: u32, #[define(E)] _element: ElemType) {
    if ABSOLUTE_POS < count {
        let mut x = seed + ABSOLUTE_POS as u32;
        x *= 2_654_435_761u32;
        x ^= x >> 15u32;
        x *= 2_246_822_519u32;
        x ^= x >> 13u32;
        output[ABSOLUTE_POS] = E::cast_from((x % 2048u32) as f32 / 1024.0 - 1.0);
    }
}

/// Words of which only some bits are set.
#[cube(launch_unchecked, address_type = "dynamic")]
fn fill_words(output: &mut [u32], count: usize, seed: u32, bits: u32) {
    if ABSOLUTE_POS < count {
        let mut x = seed + ABSOLUTE_POS as u32;
        x *= 2_654_435_761u32;
        x ^= x >> 15u32;
        x *= 2_246_822_519u32;
        x ^= x >> 13u32;
        output[ABSOLUTE_POS] = x & bits;
    }
}

/// A call with its tensors on the device.
struct Call {
    client: Client,
    shape: PagedShape,
    plan: PagedPlan,
    q: Handle,
    keys: Handle,
    values: Handle,
    scales: Option<[Handle; 2]>,
    table: Handle,
    spans: Handle,
    visibility: Option<[Handle; 3]>,
    selected: Option<Handle>,
    out: Handle,
    lse: Handle,
    counters: Option<Handle>,
    scale: f64,
    softcap: Option<f64>,
}

impl Call {
    fn run(&self) -> Result<()> {
        let visibility = self.visibility.as_ref();
        let buffers = PagedBuffers {
            q: &self.q,
            keys: &self.keys,
            values: &self.values,
            scales: self.scales.as_ref().map(|scales| scales.each_ref()),
            table: &self.table,
            spans: &self.spans,
            visibility: visibility.map(|[a, b, c]| [a, b, c]),
            selected: self.selected.as_ref(),
            sinks: None,
            counters: self.counters.as_ref(),
            out: &self.out,
            lse: &self.lse,
        };
        paged_attention(&self.client, &self.plan, &buffers, self.scale, self.softcap)?;
        Ok(())
    }

    fn read(&self) -> Result<[Vec<u8>; 2]> {
        let read = |handle: &Handle| -> Result<Vec<u8>> {
            let bytes = self.client.read_one(handle.clone());
            Ok(bytes.map_err(|error| anyhow!("{error:?}"))?.to_vec())
        };
        Ok([read(&self.out)?, read(&self.lse)?])
    }
}

fn bytes_of(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// A table of pages in random order, and the spans: of each sequence region one, then region two.
fn tables(lengths: &[[usize; 3]], page: usize, seed: u64) -> (Vec<i32>, Vec<i32>, usize, usize) {
    let pages_of = |[permanent, timed, start]: &[usize; 3]| {
        permanent.div_ceil(page) + (start + timed).div_ceil(page)
    };
    let entries = lengths.iter().map(pages_of).max().unwrap_or(0);
    let count: usize = lengths.iter().map(pages_of).sum();
    let mut order: Vec<i32> = (0..count as i32).collect();
    order.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
    let mut order = order.into_iter();
    let (mut table, mut spans) = (Vec::new(), Vec::new());
    for length in lengths {
        let own = order.by_ref().take(pages_of(length));
        let first = table.len();
        table.extend(own);
        table.resize(first + entries, -1);
        let [permanent, timed, start] = *length;
        let numbers = [permanent, permanent.div_ceil(page), start, timed];
        spans.extend(numbers.map(|x| x as i32));
    }
    (table, spans, entries, count)
}

impl Bench {
    fn filled(&self, count: usize, element: ElemType, seed: u32) -> Handle {
        let handle = self.client.empty(count * element.size());
        let cubes = count.div_ceil(256) as u32;
        let address = AddressType::U64;
        // SAFETY: a unit writes its number of as many.
        unsafe {
            fill::launch_unchecked(
                &self.client,
                CubeCount::Static(cubes.min(65_535), cubes.div_ceil(65_535), 1),
                CubeDim::new_1d(256),
                address,
                BufferArg::from_raw_parts(handle.clone(), count),
                count,
                seed,
                element,
            );
        }
        handle
    }

    /// Random words of four numbers each, none of which is NaN.
    fn words(&self, count: usize, quantization: Quantization, seed: u32) -> Handle {
        let handle = self.client.empty(count * 4);
        let cubes = count.div_ceil(256) as u32;
        let bits = match quantization {
            Quantization::Int8 => u32::MAX,
            _ => 0xbfbf_bfbf,
        };
        // SAFETY: a unit writes its word of as many.
        unsafe {
            fill_words::launch_unchecked(
                &self.client,
                CubeCount::Static(cubes.min(65_535), cubes.div_ceil(65_535), 1),
                CubeDim::new_1d(256),
                AddressType::U64,
                BufferArg::from_raw_parts(handle.clone(), count),
                count,
                seed,
                bits,
            );
        }
        handle
    }

    /// Keys or values as they are stored.
    fn stored(&self, count: usize, seed: u32) -> Handle {
        match self.args.quantization() {
            None => self.filled(count, BF16, seed),
            Some(quantization) => self.words(count / 4, quantization, seed),
        }
    }

    fn scales(&self, slots: usize) -> Handle {
        let bytes: Vec<u8> = std::iter::repeat_n(0.01f32.to_le_bytes(), slots)
            .flatten()
            .collect();
        self.client.create_from_slice(&bytes)
    }

    fn zeros(&self, count: usize) -> Handle {
        self.client.create_from_slice(&vec![0; 4 * count])
    }

    fn call(&self, shape: &Shape, page: usize) -> Result<Call> {
        let (table, spans, entries, count) = tables(&shape.lengths, page, 1);
        let batch = shape.lengths.len();
        let Shape {
            heads,
            kv_heads,
            width,
            rows,
            ..
        } = *shape;
        let pages = count * kv_heads;
        let mut shape = PagedShape::new(
            [batch, heads, kv_heads, rows],
            [1, entries],
            [pages, page],
            [width; 2],
            BF16,
        );
        shape.quantization = self.args.quantization();
        shape.counters = !self.args.two_launches;
        let plan = PagedPlan::new(&self.client, shape)?;
        let counters = (shape.counters).then(|| self.zeros(batch * heads * rows));
        Ok(Call {
            client: self.client.clone(),
            shape,
            plan,
            q: self.filled(batch * heads * rows * width, BF16, 1),
            keys: self.stored(pages * page * width, 2),
            values: self.stored(pages * page * width, 3),
            scales: (shape.quantization).map(|_| [(); 2].map(|()| self.scales(pages * page))),
            table: self.client.create_from_slice(&bytes_of(&table)),
            spans: self.client.create_from_slice(&bytes_of(&spans)),
            visibility: None,
            selected: None,
            counters,
            out: self.client.empty(batch * heads * rows * width * 2),
            lse: self.client.empty(batch * heads * rows * 4),
            scale: 1.0 / (width as f64).sqrt(),
            softcap: None,
        })
    }

    fn times(&mut self) -> Result<()> {
        println!(
            "{:<28} {:>4} {:>9} {:>9} {:>9} {:>6} {:>6}  {:>13}",
            "shape", "page", "us", "in a row", "replayed", "TB/s", "of 4.8", "bar, goal"
        );
        for shape in shapes() {
            if !shape.name.contains(&self.args.only) {
                continue;
            }
            for page in self.args.page.clone() {
                self.time(&shape, page)?;
            }
        }
        self.append()?;
        self.quest()?;
        self.keys()
    }

    fn time(&mut self, shape: &Shape, page: usize) -> Result<()> {
        let call = self.call(shape, page)?;
        let slots: usize = shape.lengths.iter().map(|x| x[0] + x[1]).sum();
        let bytes = match self.args.quantization() {
            None => slots * shape.kv_heads * shape.width * 2 * 2,
            Some(_) => slots * shape.kv_heads * (shape.width * 2 + 8),
        };
        let Some([one, many, replayed]) = self.medians(|| call.run().is_ok())? else {
            return Ok(());
        };
        let rate = bytes as f64 / replayed / 1e6;
        let bars = shape.bars.map_or(String::new(), |[bar, goal]| {
            format!("{bar:>6.0}, {goal:>5.0}")
        });
        println!(
            "{:<28} {page:>4} {one:>9.2} {many:>9.2} {replayed:>9.2} {rate:>6.2} {:>5.0}%  {bars:>13}",
            shape.name,
            100.0 * rate / BANDWIDTH
        );
        self.results.push(json!({
            "name": shape.name, "page": page, "us": one, "us_in_a_row": many, "us_replayed": replayed, "bytes": bytes, "tb_s": rate,
            "share": rate / BANDWIDTH, "bars": shape.bars, "plan": call.plan.to_string(),
        }));
        Ok(())
    }

    /// Medians by the device's clock in microseconds: of a call alone, of one among others, and of one among others that are replayed, for which the host
    /// does nothing. Not a number where the device records nothing.
    fn medians(&self, run: impl Fn() -> bool + Send + Sync) -> Result<Option<[f64; 3]>> {
        if self.args.enqueue_only {
            run();
            self.client.flush().map_err(|error| anyhow!("{error}"))?;
            return Ok(None);
        }
        for _ in 0..5 {
            ensure!(run(), "the call cannot be launched");
        }
        let count = self.args.in_a_row;
        let many = || (0..count).all(|_| run());
        let one = self.median(&run)?;
        let in_a_row = self.median(many)? / count as f64;
        let replayed = match self.recorded(many)? {
            // SAFETY: what was recorded reads and writes the call's tensors, which live here, and buffers that the recording keeps; this thread alone
            // uses them.
            Some(graph) => self.median(|| unsafe { graph.replay() }.is_ok())? / count as f64,
            None => f64::NAN,
        };
        Ok(Some([one, in_a_row, replayed]))
    }

    fn median(&self, run: impl Fn() -> bool + Send + Sync) -> Result<f64> {
        let mut times = Vec::new();
        for _ in 0..self.args.repeats {
            let (ran, profile) = (self.client)
                .profile(&run, "decode")
                .map_err(|error| anyhow!("{error:?}"))?;
            ensure!(ran, "the call cannot be launched");
            let span = block_on(profile.resolve()).context("the device measured no time")?;
            times.push(span.duration().as_secs_f64() * 1e6);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    /// What a device records of a run, or nothing if it cannot.
    fn recorded(&self, run: impl Fn() -> bool) -> Result<Option<Graph>> {
        let failed = |error| anyhow!("{error:?}");
        if self.client.graph_prepare().is_err() {
            return Ok(None);
        }
        ensure!(run(), "the call cannot be launched");
        block_on(self.client.sync()).map_err(failed)?;
        self.client.start_capture().map_err(failed)?;
        let ran = run();
        let graph = self.client.stop_capture().map_err(failed)?;
        ensure!(ran, "the call cannot be recorded");
        Ok(Some(graph))
    }

    /// Rows of 32 sequences written into pages.
    fn append(&mut self) -> Result<()> {
        let name = "append, B 32";
        if !name.contains(&self.args.only) {
            return Ok(());
        }
        let (batch, kv_heads, page, width, pages) = (32, 8, 32, 128, 8192);
        let shape = AppendShape::new([batch, kv_heads, 1, 1], [pages, page], [width; 2], BF16);
        let [keys, values] = [1, 2].map(|seed| self.stored(pages * page * width, seed));
        let scales = [(); 2].map(|()| self.scales(pages * page));
        let quantization = self.args.quantization();
        let [k, v] = [3, 4].map(|seed| self.filled(batch * kv_heads * width, BF16, seed));
        let slots: Vec<i32> = (0..batch as i32).map(|entry| entry * 33 + 5).collect();
        let slots = self.client.create_from_slice(&bytes_of(&slots));
        let client = self.client.clone();
        let run = || {
            let result = match quantization {
                None => append_rows(&client, &shape, [&k, &v], &slots, [&keys, &values]),
                Some(quantization) => {
                    let pages = [&keys, &values, &scales[0], &scales[1]];
                    append_quantized(&client, &shape, quantization, [&k, &v], &slots, pages)
                }
            };
            result.is_ok()
        };
        let Some([one, many, replayed]) = self.medians(run)? else {
            return Ok(());
        };
        println!("{name:<28} {page:>4} {one:>9.2} {many:>9.2} {replayed:>9.2}");
        self.results.push(json!({
            "name": name, "page": page, "us": one, "us_in_a_row": many, "us_replayed": replayed,
        }));
        Ok(())
    }
}
