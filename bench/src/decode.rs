//! `bench-decode`: times attention of few queries over pages, at the shapes of decoding.

mod decode_keys;
mod decode_quest;

use anyhow::{Result, anyhow};
use blocksparse::Quantization;
use blocksparse_bench::device::{self, empty, sync, upload, upload_ints};
use blocksparse_bench::device_time::alone;
use blocksparse_bench::numbers::{BF16, F32};
use blocksparse_bench::runner::{Timing, write_json};
use blocksparse_cubecl::KernelError;
use burn_paged_attention::internal::kernels::{
    AppendShape, PagedBuffers, PagedPlan, PagedShape, append_quantized, append_rows,
    paged_attention,
};
use clap::Parser;
use cubecl::client::{Client, Graph};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

#[derive(Parser)]
#[command(about = "Times attention over pages", version)]
struct Args {
    #[command(flatten)]
    timing: Timing<200>,
    /// Calls of a run of the second column, which has the time of a call among others.
    #[arg(long, default_value_t = 20)]
    in_a_row: usize,
    /// Slots of a page.
    #[arg(long, value_delimiter = ',', default_values_t = [32, 64])]
    page: Vec<usize>,
    /// How keys and values are stored: as the queries, or in eight bits a number.
    #[arg(long, default_value = "model", value_parser = ["model", "int8", "fp8"])]
    kv_dtype: String,
    /// Join the shares of a page list in a launch of its own, on tensor cores too.
    #[arg(long)]
    two_launches: bool,
    /// Only the shapes whose names contain this.
    #[arg(long, default_value = "")]
    only: String,
    /// Also write the numbers to this file.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
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

/// Bandwidth of an H200 in TB/s.
const BANDWIDTH: f64 = 4.8;

/// A shape to time: bf16, all tokens live.
struct Shape {
    name: &'static str,
    heads: usize,
    kv_heads: usize,
    width: usize,
    /// Number of new tokens per sequence.
    rows: usize,
    /// Number of slots of each sequence in regions one and two, and the first slot of region two.
    lengths: Vec<[usize; 3]>,
    /// Microseconds: the upper bound and the goal.
    bars: Option<[f64; 2]>,
}

/// Query heads and KV heads of most shapes.
const HEADS: [usize; 2] = [32, 8];

impl Shape {
    /// Creates a shape of equally long sequences with `rows` new tokens each.
    fn equal(
        name: &'static str,
        [batch, length, rows]: [usize; 3],
        [heads, kv_heads]: [usize; 2],
        bars: Option<[f64; 2]>,
    ) -> Self {
        Self {
            name,
            heads,
            kv_heads,
            width: 128,
            rows,
            lengths: vec![[length, 0, 0]; batch],
            bars,
        }
    }

    fn with_lengths(self, lengths: impl IntoIterator<Item = [usize; 3]>) -> Self {
        Self {
            lengths: lengths.into_iter().collect(),
            ..self
        }
    }
}

fn shapes() -> Vec<Shape> {
    let equal = Shape::equal;
    let of_one = |name, heads, bars| equal(name, [1, 0, 1], heads, bars);
    let mixed = [
        65_536, 16_384, 8192, 8192, 8192, 4096, 4096, 4096, 2048, 2048, 2048, 2048, 1024, 1024,
        1024, 1024,
    ];
    vec![
        equal("B 32 x 4K", [32, 4096, 1], HEADS, Some([145.0, 122.0])),
        equal("B 8 x 32K", [8, 32_768, 1], HEADS, Some([275.0, 240.0])),
        equal("B 1 x 32K", [1, 32_768, 1], HEADS, Some([44.0, 37.0])),
        equal("B 1 x 4K", [1, 4096, 1], HEADS, Some([11.0, 9.0])),
        equal("B 1 x 1K", [1, 1024, 1], HEADS, Some([8.0, 6.0])),
        of_one("streaming(4096, 64)", HEADS, None).with_lengths([[64, 4096, 13]]),
        equal("B 1 x 4,160", [1, 4160, 1], HEADS, None),
        Shape {
            width: 64,
            ..of_one("fixed(128, 32) at 12,288", [8, 8], Some([10.0, 7.0]))
                .with_lengths([[3072, 128, 0]])
        },
        equal("B 16 x 8K", [16, 8192, 1], HEADS, None),
        of_one("B 16 x 1K to 64K, as many", HEADS, None)
            .with_lengths(mixed.map(|length| [length, 0, 0])),
        equal("B 32 x 4K, 4 tokens", [32, 4096, 4], HEADS, None),
        equal("B 1 x 4K, 4 tokens", [1, 4096, 4], HEADS, None),
        // A prefix that 32 sequences share, read once per sequence or once for all.
        equal("B 32 x 32K", [32, 32_768, 1], HEADS, None),
        equal("B 1 x 32K, 32 queries", [1, 32_768, 32], HEADS, None),
        equal("B 8 x 32K, 64/8 heads", [8, 32_768, 1], [64, 8], None),
        equal("B 32 x 4K, 8/8 heads", [32, 4096, 1], [8, 8], None),
    ]
}

/// A named part of a computation that is timed.
type Part<'a> = (
    &'static str,
    &'a (dyn Fn() -> Result<(), KernelError> + Sync),
);

struct Bench {
    client: Client,
    args: Args,
    results: Vec<Value>,
}

fn main() -> Result<()> {
    let mut bench = Bench {
        args: Args::parse(),
        client: device::client()?,
        results: Vec::new(),
    };
    bench.times()?;
    write_json(bench.args.json.as_deref(), &bench.results)
}

/// Returns pseudo-random bits.
#[cube]
fn scrambled(seed: u32) -> u32 {
    let mut x = seed + ABSOLUTE_POS as u32;
    x *= 2_654_435_761u32;
    x ^= x >> 15u32;
    x *= 2_246_822_519u32;
    x ^= x >> 13u32;
    x
}

/// Fills with pseudo-random numbers from −1 to 1.
#[cube(launch_unchecked, address_type = "dynamic")]
fn fill<E: Float>(output: &mut [E], count: usize, seed: u32, #[define(E)] _element: ElemType) {
    if ABSOLUTE_POS < count {
        output[ABSOLUTE_POS] = E::cast_from((scrambled(seed) % 2048u32) as f32 / 1024.0 - 1.0);
    }
}

/// Fills with pseudo-random words, restricted to some bits.
#[cube(launch_unchecked, address_type = "dynamic")]
fn fill_words(output: &mut [u32], count: usize, seed: u32, bits: u32) {
    if ABSOLUTE_POS < count {
        output[ABSOLUTE_POS] = scrambled(seed) & bits;
    }
}

/// Returns a cube count with one unit per element.
fn cubes(count: usize) -> CubeCount {
    let cubes = count.div_ceil(256) as u32;
    CubeCount::Static(cubes.min(65_535), cubes.div_ceil(65_535), 1)
}

/// A call with its tensors on the device, which clones share.
#[derive(Clone)]
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
    selected: Option<Handle>,
    out: Handle,
    lse: Handle,
    counters: Option<Handle>,
}

impl Call {
    fn run(&self) -> Result<(), KernelError> {
        let buffers = PagedBuffers {
            q: &self.q,
            keys: &self.keys,
            values: &self.values,
            scales: self.scales.as_ref().map(|scales| scales.each_ref()),
            table: &self.table,
            spans: &self.spans,
            visibility: None,
            selected: self.selected.as_ref(),
            sinks: None,
            counters: self.counters.as_ref(),
            out: &self.out,
            lse: &self.lse,
        };
        let scale = 1.0 / (self.shape.widths[0] as f64).sqrt();
        paged_attention(&self.client, &self.plan, &buffers, scale, None)
    }
}

/// Returns a page table in random order and the spans: for each sequence region one, then region two.
fn tables(lengths: &[[usize; 3]], page: usize) -> (Vec<i32>, Vec<i32>, usize, usize) {
    let pages_of = |[permanent, timed, start]: &[usize; 3]| {
        permanent.div_ceil(page) + (start + timed).div_ceil(page)
    };
    let entries = lengths.iter().map(pages_of).max().unwrap_or(0);
    let count: usize = lengths.iter().map(pages_of).sum();
    let mut order: Vec<i32> = (0..count as i32).collect();
    order.shuffle(&mut ChaCha8Rng::seed_from_u64(1));
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
        // SAFETY: each unit writes at most its own element of `count`.
        unsafe {
            fill::launch_unchecked(
                &self.client,
                cubes(count),
                CubeDim::new_1d(256),
                AddressType::U64,
                BufferArg::from_raw_parts(handle.clone(), count),
                count,
                seed,
                element,
            );
        }
        handle
    }

    /// Returns random words of four elements each, none of which is NaN.
    fn words(&self, count: usize, quantization: Quantization, seed: u32) -> Handle {
        let handle = self.client.empty(count * 4);
        let bits = match quantization {
            Quantization::Int8 => u32::MAX,
            _ => 0xbfbf_bfbf,
        };
        // SAFETY: each unit writes at most its own word of `count`.
        unsafe {
            fill_words::launch_unchecked(
                &self.client,
                cubes(count),
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

    /// Returns keys or values in their storage format.
    fn stored(&self, count: usize, seed: u32) -> Handle {
        match self.args.quantization() {
            None => self.filled(count, BF16, seed),
            Some(quantization) => self.words(count / 4, quantization, seed),
        }
    }

    fn scales(&self, slots: usize) -> Handle {
        upload(&self.client, &vec![0.01; slots], F32)
    }

    fn call(&self, shape: &Shape, page: usize) -> Result<Call> {
        let (table, spans, entries, count) = tables(&shape.lengths, page);
        let batch = shape.lengths.len();
        let (heads, kv_heads) = (shape.heads, shape.kv_heads);
        let (width, rows) = (shape.width, shape.rows);
        let pages = count * kv_heads;
        let (of, entries, widths) = ([batch, heads, kv_heads, rows], [1, entries], [width; 2]);
        let mut shape = PagedShape::new(of, entries, [pages, page], widths, BF16);
        shape.quantization = self.args.quantization();
        shape.counters = !self.args.two_launches;
        let (queries, client) = (batch * heads * rows, &self.client);
        let [keys, values] = [2, 3].map(|seed| self.stored(pages * page * width, seed));
        let zeros = || upload_ints(client, &vec![0; queries]);
        Ok(Call {
            client: client.clone(),
            plan: PagedPlan::new(client, shape)?,
            q: self.filled(queries * width, BF16, 1),
            keys,
            values,
            scales: (shape.quantization).map(|_| [(); 2].map(|()| self.scales(pages * page))),
            table: upload_ints(client, &table),
            spans: upload_ints(client, &spans),
            selected: None,
            counters: shape.counters.then(zeros),
            out: empty(client, queries * width, BF16),
            lse: empty(client, queries, F32),
            shape,
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
        let Some([one, many, replayed]) = self.medians(|| Ok(call.run()?))? else {
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

    /// Returns medians by the device's clock in microseconds: of a single call, of a call among others, and of a call among replayed ones, for which the host
    /// does nothing. The last is NaN if the device cannot record.
    fn medians(&self, run: impl Fn() -> Result<()> + Sync) -> Result<Option<[f64; 3]>> {
        let (client, timing) = (&self.client, &self.args.timing);
        if timing.launched(client, &run)? {
            return Ok(None);
        }
        (0..5).try_for_each(|_| run())?;
        let count = self.args.in_a_row;
        let many = || (0..count).try_for_each(|_| run());
        let one = alone(client, timing.repeats, &run)?;
        let in_a_row = alone(client, timing.repeats, many)? / count as f64;
        let replayed = match self.recorded(many)? {
            Some(graph) => {
                // SAFETY: the recording reads and writes the call's tensors, which live here, and buffers that the recording keeps. Only this thread uses
                // them.
                let replay = || unsafe { graph.replay() }.map_err(|error| anyhow!("{error:?}"));
                alone(client, timing.repeats, replay)? / count as f64
            }
            None => f64::NAN,
        };
        Ok(Some([one, in_a_row, replayed].map(|seconds| seconds * 1e6)))
    }

    /// Records a run on the device, or returns `None` if it cannot record.
    fn recorded(&self, run: impl Fn() -> Result<()>) -> Result<Option<Graph>> {
        let failed = |error| anyhow!("{error:?}");
        if self.client.graph_prepare().is_err() {
            return Ok(None);
        }
        run()?;
        sync(&self.client)?;
        self.client.start_capture().map_err(failed)?;
        let ran = run();
        let graph = self.client.stop_capture().map_err(failed)?;
        ran?;
        Ok(Some(graph))
    }

    /// Prints a row of medians and stores it.
    fn row(&mut self, label: &str, mut row: Value, page: usize, [one, many, replayed]: [f64; 3]) {
        println!("{label:<28} {page:>4} {one:>9.2} {many:>9.2} {replayed:>9.2}");
        row["page"] = json!(page);
        row["us"] = json!(one);
        row["us_in_a_row"] = json!(many);
        row["us_replayed"] = json!(replayed);
        self.results.push(row);
    }

    /// Times the parts of a selection and prints the speedup. The first part is attention to everything, and the last is everything that replaces it.
    fn parts(&mut self, name: &str, page: usize, parts: &[Part<'_>], bars: &str) -> Result<()> {
        let mut times = Vec::new();
        for (part, run) in parts {
            let Some(medians) = self.medians(|| Ok(run()?))? else {
                continue;
            };
            self.row(
                &format!("  {part}"),
                json!({ "name": name, "part": part }),
                page,
                medians,
            );
            times.push(medians);
        }
        let (Some(all), Some(some)) = (times.first(), times.last()) else {
            return Ok(());
        };
        // Without recordings, the time of a call among others is used.
        let of = if all[2].is_finite() { 2 } else { 1 };
        let ratio = all[of] / some[of];
        let what = parts[0].0.replace("attention to", "as fast as");
        println!("  {what:<26} {ratio:>34.2} x{bars}");
        self.results
            .push(json!({ "name": name, "page": page, "ratio": ratio }));
        Ok(())
    }

    /// Times writing rows of 32 sequences into pages.
    fn append(&mut self) -> Result<()> {
        let name = "append, B 32";
        if !name.contains(&self.args.only) {
            return Ok(());
        }
        let (batch, kv_heads, page, width, pages) = (32, 8, 32, 128, 8192);
        let shape = AppendShape {
            batch,
            kv_heads,
            tables: 1,
            rows: 1,
            page,
            pages,
            widths: [width; 2],
            dtype: BF16,
        };
        let [keys, values] = [1, 2].map(|seed| self.stored(pages * page * width, seed));
        let scales = [(); 2].map(|()| self.scales(pages * page));
        let quantization = self.args.quantization();
        let [k, v] = [3, 4].map(|seed| self.filled(batch * kv_heads * width, BF16, seed));
        let slots: Vec<i32> = (0..batch as i32).map(|entry| entry * 33 + 5).collect();
        let slots = upload_ints(&self.client, &slots);
        let client = self.client.clone();
        let run = || {
            match quantization {
                None => append_rows(&client, &shape, [&k, &v], &slots, [&keys, &values])?,
                Some(quantization) => {
                    let pages = [&keys, &values, &scales[0], &scales[1]];
                    append_quantized(&client, &shape, quantization, [&k, &v], &slots, pages)?
                }
            }
            Ok(())
        };
        if let Some(medians) = self.medians(run)? {
            self.row(name, json!({ "name": name }), page, medians);
        }
        Ok(())
    }
}
