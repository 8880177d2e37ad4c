//! Sums in fp8 (E4M3: 4 bits of exponent and 3 of fraction; OCP 8-bit floating point, 2023), which has twice the matmul throughput. A cube's keys are in
//! registers, as left operands; one unit loads columns by TMA, some steps ahead.

// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use cubecl_cpp::cuda::ptx::tensor_map_address;

use crate::kernels::indexer::pairs::{
    Ending, Epilogue, KeyBytes, PairInputs, PairSizes, PairSum, Sizes,
};
use crate::kernels::indexer::rounding::pack_queries;
use crate::kernels::indexer::warpgroups::heads::{
    HeadSums, Keys, Totals, no_totals, own_key, totals_of, write_two,
};
use crate::kernels::indexer::warpgroups::order::{Order, StepOrder, Work, is_seen, run_from};
use crate::kernels::indexer::warpgroups::{COLUMNS, GROUP_KEYS, UNITS, WARPS, WIDTH, share, takes};
use blocksparse_cubecl::arch::ptx::val;
use blocksparse_cubecl::arch::sm90::*;
use blocksparse_cubecl::arch::tma::registers;
use blocksparse_cubecl::prelude::*;

/// Number of stages, and number of steps that columns are loaded ahead. Some warps may still read an earlier stage.
const STAGES: usize = 8;
const AHEAD: usize = 6;
/// Number of columns of one wgmma: a unit adds the results of one while another runs.
const HALF: usize = COLUMNS / 2;
/// Number of words of a row.
const WORDS: usize = WIDTH / 4;
/// Words of a unit's keys: 16 rows of 32 bytes take four.
type OwnKeys = Const<16>;

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ByteSums {
    of: HeadSums,
    /// True to include keys after a query's position.
    all: bool,
}

impl ByteSums {
    /// Returns the parameters of a sum in fp8, if warpgroups serve it.
    pub fn new(client: &Client, sizes: &PairSizes, sum: &PairSum) -> Option<Self> {
        let PairSum::Scores { all, .. } = sum else {
            return None;
        };
        let of = HeadSums {
            heads: sizes.heads[0],
            is_weights: false,
        };
        let found = Self { of, all: *all };
        takes(client, sizes, found.shared_bytes()).then_some(found)
    }

    /// Returns the parameters of the heads of half of the columns.
    fn of_half(&self) -> HeadSums {
        HeadSums {
            heads: self.of.heads.min(HALF),
            ..self.of
        }
    }

    /// Returns the bytes of a step's columns, and of their `of_rows` entries.
    fn step_bytes(&self) -> [usize; 2] {
        [COLUMNS * WIDTH, COLUMNS * 4]
    }

    fn of_rows(&self) -> usize {
        STAGES * self.step_bytes()[0]
    }

    /// Returns the offset of the stages' full barriers; the empty barriers follow.
    fn full(&self) -> usize {
        self.of_rows() + STAGES * self.step_bytes()[1]
    }

    fn empty(&self) -> usize {
        self.full() + STAGES * 8
    }

    fn shared_bytes(&self) -> usize {
        self.empty() + STAGES * 8
    }
}

/// Computes [`pair_sums`](crate::kernels::indexer::pair_sums) from the results of [`pack_queries`] and
/// [`pack_keys`](crate::kernels::indexer::rounding::pack_keys).
#[cube(launch_unchecked, address_type = "dynamic")]
fn sum_bytes<N: Size>(
    q: &TensorMap<u32, Tiled>,
    k: &[u32],
    of_rows: &[f32],
    of_keys: &[f32],
    out: &mut [f32],
    s: Sizes,
    order: StepOrder,
    ending: Ending,
    #[comptime] t: ByteSums,
) {
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    if UNIT_POS_X == 0 {
        ring_init(
            base + comptime!(t.full() as u32),
            base + comptime!(t.empty() as u32),
            STAGES,
            comptime!(WARPS as u32),
        );
    }
    sync_cube();
    let mut next = CUBE_POS * order.share;
    let last = (next + order.share).min(s.batch * order.steps);
    let mut before = 0u32.runtime();
    while next < last {
        let run = run_from(next, last, &order, &s, comptime!(t.of.queries()), t.all);
        let steps = run.steps;
        let work = Work {
            run,
            before,
            q: tensor_map_address(q),
            of_rows: global_address::<f32>(of_rows),
            base,
            warp,
            lane,
        };
        mainloop::<N>(k, of_keys, out, &work, &s, &ending, t);
        before += steps as u32;
        next += steps;
    }
}

/// Computes the sums of a run.
#[cube]
fn mainloop<N: Size>(
    k: &[u32],
    of_keys: &[f32],
    out: &mut [f32],
    work: &Work,
    s: &Sizes,
    ending: &Ending,
    #[comptime] t: ByteSums,
) {
    let (base, warp, lane) = (work.base, work.warp, work.lane);
    let steps = work.run.steps;
    let is_loader = warp == 0 && lane == 0;
    if is_loader {
        for at in 0..steps.min(AHEAD) {
            load_step(at, work, s, t);
        }
    }
    let group_column = work.run.column0 + (warp / 4) as usize * GROUP_KEYS;
    let warp_column = group_column + (warp % 4 * 16) as usize;
    let mut own = Vector::<u32, OwnKeys>::zeroed();
    #[unroll]
    for i in 0..16usize {
        let row = lane as usize / 4 + comptime!(i % 2 * 8);
        // Entries of keys after the last are not written.
        let column = (warp_column + row).min(s.columns - 1);
        let word = comptime!(i / 4 * 8 + i / 2 % 2 * 4) + lane as usize % 4;
        own.insert(i, k[(work.run.entry * s.seq_kv + column) * WORDS + word]);
    }
    let own_column = own_key(warp_column, lane).min(s.columns - 1);
    let keys = Keys {
        entry: work.run.entry,
        first: warp_column,
        lane,
        scale: of_keys[work.run.entry * s.seq_kv + own_column],
    };
    let full = base + comptime!(t.full() as u32);
    let empty = base + comptime!(t.empty() as u32);
    for at in 0..steps {
        let step = work.before + at as u32;
        if is_loader && at + AHEAD < steps {
            load_step(at + AHEAD, work, s, t);
        }
        sync_warp();
        barrier_wait(full + slot(step) * 8, phase(step));
        let row = work.run.first + at * comptime!(t.of.queries());
        if is_seen(group_column, row, s, comptime!(t.of.queries()), t.all) {
            let stage = stage_of(base, step, t);
            let half = comptime!((HALF * WIDTH) as u32 >> 4);
            let one = byte_product::<OwnKeys, N>(own, stage.columns);
            let other = byte_product::<OwnKeys, N>(own, stage.columns + half);
            let one = wait::<N>(one, 1usize, comptime!(HALF / 2));
            let first = add_half::<N>(&one, &stage, 0usize, out, row, &keys, s, ending, t);
            let other = wait::<N>(other, 0usize, comptime!(HALF / 2));
            let second = add_half::<N>(&other, &stage, 1usize, out, row, &keys, s, ending, t);
            if comptime!(t.of.queries() == 2) {
                write_two(first, second, out, row, &keys, s, ending, true, t.of);
            } else if comptime!(t.of.queries() == 1) {
                let both = first.with(&second);
                write_two(both, no_totals(), out, row, &keys, s, ending, false, t.of);
            }
        }
        sync_warp();
        if lane == 0 {
            barrier_arrive(empty + slot(step) * 8);
        }
    }
}

/// Returns the stage of a step.
#[cube]
fn slot(step: u32) -> u32 {
    step % comptime!(STAGES as u32)
}

/// Returns the phase of a stage's barriers.
#[cube]
fn phase(step: u32) -> u32 {
    step / comptime!(STAGES as u32) % 2
}

/// A stage in shared memory.
#[derive(CubeType, Clone, Copy)]
struct Stage {
    /// Lower word of the descriptor of its columns.
    columns: u32,
    /// Address of the `of_rows` entries of the unit's two columns of the first group of eight.
    pair: u32,
}

#[cube]
fn stage_of(base: u32, step: u32, #[comptime] t: ByteSums) -> Stage {
    let [bytes, row_bytes] = comptime!(t.step_bytes());
    let pair = comptime!(t.of_rows() as u32) + unit() % 4 * 8;
    Stage {
        columns: swizzled(base + slot(step) * comptime!(bytes as u32)),
        pair: base + pair + slot(step) * comptime!(row_bytes as u32),
    }
}

/// Sums the heads of a half of a step. Returns the totals of its only query, or of half of the query's heads; with several queries it writes their sums. The
/// step's queries start at `row`.
#[cube]
fn add_half<N: Size>(
    products: &Vector<f32, N>,
    stage: &Stage,
    #[comptime] half: usize,
    out: &mut [f32],
    row: usize,
    keys: &Keys,
    s: &Sizes,
    ending: &Ending,
    #[comptime] t: ByteSums,
) -> Totals {
    let pair = stage.pair + comptime!((half * HALF * 4) as u32);
    let queries = comptime!(t.of.queries() / 2);
    if comptime!(queries <= 1) {
        // A half may hold only half of the heads.
        totals_of::<N>(products, pair, 0usize, ending, comptime!(t.of_half()))
    } else {
        #[unroll]
        for two in 0..comptime!(queries / 2) {
            let query = comptime!(2 * two);
            let first = totals_of::<N>(products, pair, query, ending, t.of);
            let second = totals_of::<N>(products, pair, comptime!(query + 1), ending, t.of);
            let row = row + comptime!(half * queries + query);
            write_two(first, second, out, row, keys, s, ending, true, t.of);
        }
        no_totals()
    }
}

/// Loads the columns of a step, after all warps have released its stage.
#[cube]
fn load_step(at: usize, work: &Work, s: &Sizes, #[comptime] t: ByteSums) {
    let step = work.before + at as u32;
    let stage = slot(step);
    let bar = work.base + comptime!(t.full() as u32) + stage * 8;
    let empty = bar + comptime!((t.empty() - t.full()) as u32);
    let [bytes, row_bytes] = comptime!(t.step_bytes());
    barrier_wait(empty, 1 - phase(step));
    barrier_expect(bar, comptime!(bytes + row_bytes));
    let row = work.run.entry * s.rows + work.run.first + at * comptime!(t.of.queries());
    let place = row * comptime!(t.of.heads);
    load_line(
        work.q,
        work.base + stage * comptime!(bytes as u32),
        bar,
        0u32.runtime(),
        place as u32,
    );
    bulk_load(
        work.base + comptime!(t.of_rows() as u32) + stage * comptime!(row_bytes as u32),
        work.of_rows + place as u64 * 4,
        bar,
        row_bytes,
    );
}

/// Launches the sums.
pub(crate) fn launch_bytes(
    client: &Client,
    sizes: &PairSizes,
    inputs: &PairInputs,
    keys: &KeyBytes,
    epilogue: Epilogue,
    out: &Handle,
    t: ByteSums,
) -> Result<(), KernelError> {
    let order = Order::new(sizes, t.of.queries(), t.all);
    let steps = sizes.batch * order.steps();
    let share = share(client, steps);
    let cubes = spread(client, steps.div_ceil(share) as u64)?;
    let rows = sizes.batch * sizes.rows[1] * sizes.heads[0];
    let (bytes, of_rows) = pack_queries(client, sizes, inputs, COLUMNS)?;
    let boxes = TiledArgs {
        tile_size: [COLUMNS, WORDS].into(),
    };
    // SAFETY: the buffer of bytes has `rows` rows.
    let map = unsafe { TensorArg::from_raw_parts(bytes, [WORDS, 1].into(), [rows, WORDS].into()) };
    let map = TensorMapArg::new(boxes, map, ElemType::UInt(UIntKind::U32))
        .with_swizzle(TensorMapSwizzle::B128);
    let [q, k] = sizes.inputs();
    let address = address_of(client, q.max(k).max(sizes.elements()).max(2 * steps))?;
    // SAFETY: TMA copies existing rows of queries, zeros after them, and scales of rows, whose buffer is padded by the rows of a step; a unit reads existing
    // keys, and writes its own entries of existing rows and columns. The buffers have the lengths that `buffer` gets.
    unsafe {
        sum_bytes::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            address,
            HALF / 2,
            map,
            buffer(&keys.numbers, k / 4),
            buffer(&of_rows, rows + COLUMNS),
            buffer(&keys.scales, k / WIDTH),
            buffer(out, sizes.elements()),
            sizes.launch(),
            order.launch(share),
            epilogue.ending(false),
            t,
        );
    }
    Ok(())
}

/// Depth of one fp8 wgmma.
const BYTE_DEPTH: usize = 32;

/// Upper word of descriptors of rows of 128 bytes with the 128-byte swizzle. It is a constant, so steps of a matmul only add to the lower word.
const SWIZZLED: u32 = (1 << 30) | 64;

/// Returns the PTX of `a · bᵀ`: `a` in registers, `b` in shared memory in rows of 128 bytes. The first step overwrites the output.
fn product_text(cols: usize, depth: usize) -> String {
    let (out, words) = (registers(0, cols / 2), cols / 2);
    let mut text = format!(
        "{{ .reg .b32 l, h; .reg .b64 b; mov.b32 h, {SWIZZLED}; wgmma.fence.sync.aligned; "
    );
    for k in 0..depth / BYTE_DEPTH {
        text += &format!(
            "add.u32 l, $2, {}; mov.b64 b, {{l, h}}; \
             wgmma.mma_async.sync.aligned.m64n{cols}k{BYTE_DEPTH}.f32.e4m3.e4m3 {{{out}}}, {{{}}}, b, {}, 1, 1; ",
            (k * BYTE_DEPTH) >> 4,
            registers(words + 4 * k, 4),
            usize::from(k > 0),
        );
    }
    text + "wgmma.commit_group.sync.aligned; }"
}

/// Starts `a · bᵀ` `[64, 2 · S]`, whose rows have four times as many bytes as `a` has words. [`wait`](blocksparse_cubecl::arch::sm90::wait) must run before the
/// result is read.
#[cube]
pub(crate) fn byte_product<P: Size, S: Size>(a: Vector<u32, P>, b: u32) -> Vector<f32, S> {
    let out: Vector<f32, S>;
    let width = S::value();
    let words = P::value();
    let cols = comptime!(width * 2);
    let depth = comptime!(words * 8);
    gpu_asm!("{body} /* {d} {a} {b} */",
        body = const product_text(cols, depth),
        d = out(_) out, a = in(_) val::<Vector<u32, P>>(a), b = in(_) val::<u32>(b));
    out
}

/// Returns the lower word of the descriptor of a right operand in rows of 128 bytes.
#[cube]
pub(crate) fn swizzled(address: u32) -> u32 {
    address >> 4u32 | comptime!(1u32 << 16)
}

/// Copies bytes from global to shared memory, a multiple of 16.
#[cube]
pub(crate) fn bulk_load(target: u32, source: u64, bar: u32, #[comptime] bytes: usize) {
    gpu_asm!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{t}], [{s}], {n}, [{b}];",
        t = in(_) val::<u32>(target), s = in(_) val::<u64>(source), n = const bytes, b = in(_) val::<u32>(bar));
}
