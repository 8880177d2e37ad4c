//! Attention over a list of blocks or of single keys per query, blocks together with a layout, against plain f64 loops.

use std::collections::BTreeSet;

use burn_blocksparse::internal::{DispatchMode, runs_kernels};
use burn_sparse_select::{
    SelectedBlocks, TokenIndices, selected_blocks_attention, token_sparse_attention,
};
use rand::seq::SliceRandom;

use crate::prelude::*;

/// Kind of list.
#[derive(Clone, Copy)]
enum Of {
    /// Blocks of a size; with `near`, each query also sees its own block.
    Blocks { block: usize, near: bool },
    /// Keys, in lists of `heads` heads.
    Keys { heads: usize, causal: bool },
}

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    of: Of,
    batch: usize,
    heads: [usize; 2],
    seq: [usize; 2],
    dims: [usize; 2],
    most: usize,
    /// Percentage of list entries that name a key, or a block if there is one.
    filled: u32,
    /// Whether kernels attend to the lists, on devices that have them.
    by_query: bool,
}

const OF_BLOCKS: Case = Case {
    name: "16 heads, two batch entries, ragged",
    of: Of::Blocks {
        block: 16,
        near: true,
    },
    batch: 2,
    heads: [32, 2],
    seq: [100, 100],
    dims: [64, 64],
    most: 5,
    filled: 80,
    by_query: true,
};

const OF_KEYS: Case = Case {
    of: Of::Keys {
        heads: 2,
        causal: true,
    },
    most: 37,
    ..OF_BLOCKS
};

/// Settings of lists of blocks that differ from [`OF_BLOCKS`].
const BLOCKS: &str = "
    16 heads, two batch entries, ragged     |
    128 wide                                | batch 1, heads 16 1, block 64, seq 330 330, most 4, dims 128 128
    192 and 128 wide                        | batch 1, heads 16 1, block 64, seq 330 330, most 4, dims 192 128
    64 and 128 wide                         | batch 1, heads 16 1, block 64, seq 330 330, most 4, dims 64 128
    192 and 64 wide                         | batch 1, heads 16 1, block 64, seq 330 330, most 4, dims 192 64
    fewer queries than keys                 | seq 70 133, block 32
    lists of one                            | most 1
    lists that are mostly empty             | most 9, filled 10
    lists that are all empty                | filled 0
    lists alone, and queries of no key      | alone
    blocks of 128                           | block 128, seq 300 300, batch 1, most 2
    32 heads                                | batch 1, heads 32 1
    48 heads                                | batch 1, heads 48 1, seq 90 90, dims 128 64
    64 heads, 128 wide                      | batch 1, heads 64 1, seq 90 90, dims 128 128
    128 heads                               | batch 1, heads 128 1, seq 80 80
    four heads                              | heads 8 2
    blocks of 8, whose queries are packed   | block 8, packed
    widths of 32                            | dims 32 32
";

/// Settings of lists of keys that differ from [`OF_KEYS`].
const KEYS: &str = "
    16 heads, two batch entries, ragged         |
    fewer queries than keys                     | seq 70 133
    more queries than keys                      | seq 90 41
    lists of one                                | most 1
    lists that are mostly empty                 | filled 5
    lists that are all empty                    | filled 0
    longer lists than there are keys            | most 300, filled 100
    one list for all heads, of later keys too   | lists 1, later
    four heads                                  | heads 8 2
    widths of 24 and 8, which no kernel takes   | heads 4 2, dims 24 8, packed
";

/// Other widths, each with its own kernel.
const WIDE: &str = "
    128 wide         | heads 16 1, lists 1, dims 128 128, batch 1, seq 170 170, most 70
    192 and 128 wide | heads 16 1, lists 1, dims 192 128, batch 1, seq 170 170, most 70
";

/// More heads.
const LARGE: &str = "
    64 heads, 128 wide | heads 64 1, lists 1, dims 128 128, batch 1, seq 170 170, most 70
    128 heads          | heads 128 1, lists 1, dims 64 64, batch 1, seq 80 80, most 70
";

/// Returns the cases of a table, with their indices.
fn cases(plain: Case, table: &'static str) -> Vec<(u64, Case)> {
    let case = |[name, rest]: [&'static str; 2]| Case { name, ..plain }.with(rest);
    (0..).zip(rows(table).into_iter().map(case)).collect()
}

/// Returns the cases with lists of blocks for a device. Without kernels the large ones are only slow.
fn of_blocks(device: &Device) -> Vec<(u64, Case)> {
    let size = |case: &Case| case.batch * case.heads[0] * case.seq[0] * case.dims[0];
    let fits = |(_, case): &(u64, Case)| is_cuda(device) || size(case) <= 2 * 32 * 100 * 64;
    cases(OF_BLOCKS, BLOCKS).into_iter().filter(fits).collect()
}

/// Returns a part of the cases, for checks that gain nothing from all: a third with `BURN_SPARSE_SHARD`, and a sixth on devices without kernels,
/// which only compare Burn's operations.
fn few_of_blocks(device: &Device) -> Vec<(u64, Case)> {
    let cases = of_blocks(device).into_iter();
    match runs_kernels(device) {
        true => some_of(cases, 3).collect(),
        false => cases.step_by(6).collect(),
    }
}

fn of_keys() -> Vec<(u64, Case)> {
    cases(OF_KEYS, KEYS)
}

/// A problem, and its lists `[batch, heads of lists, seq_q, most]`: of blocks before a query's own, or of keys in any order, including duplicates
/// and invisible ones.
struct Drawn {
    case: Case,
    problem: Problem,
    lists: Vec<i32>,
    /// Valid entries without duplicates.
    unique: Vec<i32>,
    /// Layout of the pairs that are seen besides listed blocks.
    near: BlockLayout,
}

impl Case {
    /// Applies settings to the case.
    fn with(mut self, rest: &'static str) -> Self {
        for (word, numbers) in settings(rest) {
            match (word, &mut self.of) {
                ("batch", _) => self.batch = one(numbers),
                ("heads", _) => self.heads = all(numbers),
                ("seq", _) => self.seq = all(numbers),
                ("dims", _) => self.dims = all(numbers),
                ("most", _) => self.most = one(numbers),
                ("filled", _) => self.filled = one(numbers),
                ("packed", _) => self.by_query = false,
                ("block", Of::Blocks { block, .. }) => *block = one(numbers),
                ("alone", Of::Blocks { near, .. }) => *near = false,
                ("lists", Of::Keys { heads, .. }) => *heads = one(numbers),
                ("later", Of::Keys { causal, .. }) => *causal = false,
                _ => panic!("{}: {word} is nothing to set", self.name),
            }
        }
        self
    }

    fn heads_of_lists(&self) -> usize {
        match self.of {
            Of::Blocks { .. } => self.heads[1],
            Of::Keys { heads, .. } => heads,
        }
    }

    /// Draws a list, and returns it with its valid entries.
    fn list(&self, row: usize, rng: &mut ChaCha8Rng) -> [Vec<i32>; 2] {
        let ([seq_q, seq_kv], most) = (self.seq, self.most);
        // Every seventh query has an empty list.
        let has_one = row % 7 != 3;
        match self.of {
            Of::Blocks { block, .. } => {
                let own = (row % seq_q + seq_kv - seq_q) / block;
                let mut seen = BTreeSet::new();
                let mut place = |_| {
                    let is_one = own > 0 && has_one && rng.random_range(0..100) < self.filled;
                    let named = rng.random_range(0..own.max(1));
                    match is_one && seen.insert(named) {
                        true => named as i32,
                        false => -1,
                    }
                };
                let list: Vec<i32> = (0..most).map(&mut place).collect();
                [list.clone(), list]
            }
            Of::Keys { causal, .. } => {
                let position = (row % seq_q) as i64 + seq_kv as i64 - seq_q as i64;
                let mut place = |_| match rng.random_range(0..100) < self.filled && has_one {
                    true => rng.random_range(-3..seq_kv as i32 + 3),
                    false => -1,
                };
                let mut list: Vec<i32> = (0..most).map(&mut place).collect();
                // Every ninth query lists all keys, if they fit.
                if row % 9 == 5 && self.filled > 0 && most >= seq_kv {
                    list[..seq_kv].copy_from_slice(&(0..seq_kv as i32).collect::<Vec<_>>());
                    list.shuffle(rng);
                }
                let is_seen = |key: i32| {
                    key >= 0 && key < seq_kv as i32 && !(causal && i64::from(key) > position)
                };
                let seen = list.iter().copied().filter(|&key| is_seen(key));
                let seen: BTreeSet<i32> = seen.collect();
                let mut seen: Vec<i32> = seen.into_iter().collect();
                seen.resize(most, -1);
                [list, seen]
            }
        }
    }

    fn draw(self, seed: u64, dtype: DType) -> Drawn {
        let ([heads, kv_heads], [seq_q, seq_kv], of_heads) =
            (self.heads, self.seq, self.heads_of_lists());
        let mut rng = seeded(seed);
        let (mut lists, mut unique) = (Vec::new(), Vec::new());
        for row in 0..self.batch * of_heads * seq_q {
            let [list, seen] = self.list(row, &mut rng);
            lists.extend(list);
            unique.extend(seen);
        }
        let (block, near) = match self.of {
            Of::Blocks { block, near } => (block, near),
            Of::Keys { .. } => (1, false),
        };
        // A lookup table of listed pairs is faster than search.
        let blocks = seq_kv.div_ceil(block);
        let mut seen = vec![false; self.batch * of_heads * seq_q * blocks];
        for (row, list) in unique.chunks(self.most).enumerate() {
            for named in named(list) {
                seen[row * blocks + named] = true;
            }
        }
        let sizes = Sizes::new([self.batch, heads, kv_heads], self.seq, self.dims);
        let mut problem = Problem::random(sizes, seed, move |batch, head, i, j| {
            let position = (i + seq_kv).wrapping_sub(seq_q);
            let list = batch * of_heads + head / (heads / of_heads);
            let is_near = near && j <= position && j / block == position / block;
            is_near || seen[(list * seq_q + i) * blocks + j / block]
        });
        problem.round_to(dtype);
        let pattern = match near {
            true => Pattern::chunked(block).and_causal(),
            false => Pattern::from_fn("nothing", |_, _, _| false),
        };
        let shape = LayoutShape::new(heads, self.seq, block.clamp(8, 128));
        Drawn {
            case: self,
            problem: problem.with_grad_lse(seed + 1),
            lists,
            unique,
            near: BlockLayout::new(&pattern, shape).unwrap(),
        }
    }
}

impl Drawn {
    fn tensor(&self, device: &Device) -> Tensor<4, Int> {
        let case = &self.case;
        let shape = [case.batch, case.heads_of_lists(), case.seq[0], case.most];
        ints(&self.lists, shape, &device.clone().without_autodiff())
    }

    fn blocks(&self, device: &Device) -> SelectedBlocks {
        let Of::Blocks { block, .. } = self.case.of else {
            panic!("{} is of keys", self.case.name);
        };
        SelectedBlocks::of_blocks(self.tensor(device), self.case.seq[1], block).unwrap()
    }

    fn keys(&self, device: &Device) -> TokenIndices {
        let (keys, seq_kv) = (self.tensor(device), self.case.seq[1]);
        match self.case.of {
            Of::Keys { causal: false, .. } => TokenIndices::new(keys, seq_kv, false).unwrap(),
            _ => SelectedBlocks::of_keys(keys, seq_kv).unwrap(),
        }
    }

    fn attend(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        options: &AttentionOptions,
    ) -> (Tensor<4>, Tensor<3>) {
        let (device, options) = (q.device(), options.clone());
        match self.case.of {
            Of::Blocks { .. } => {
                let lists = self.blocks(&device);
                selected_blocks_attention(q, k, v, &self.near, lists, options).unwrap()
            }
            Of::Keys { .. } => {
                token_sparse_attention(q, k, v, self.keys(&device), options).unwrap()
            }
        }
    }

    fn run(&self, device: &Device, dtype: DType, mode: DispatchMode) -> Results {
        let options = AttentionOptions::default().dispatch_mode(mode);
        let device = device.clone().autodiff();
        differentiated(&self.problem, &device, dtype, |q, k, v| {
            self.attend([q, k, v], &options)
        })
    }

    /// Returns the text of the plan, and whether kernels attend to the lists.
    fn plan(&self, device: &Device, dtype: DType, mode: DispatchMode) -> (String, bool) {
        let [q, k, v, _] = inputs(&self.problem, device, dtype);
        let options = AttentionOptions::default().dispatch_mode(mode);
        if let Of::Blocks { .. } = self.case.of {
            let lists = self.blocks(device);
            let plan = lists.explain(&q, &k, &v, &self.near, &options).unwrap();
            let text = plan.to_string();
            let is_listed = text.starts_with("listed");
            return (text, is_listed);
        }
        let plan = self.keys(device).explain(&q, &k, &v, &options).unwrap();
        let text = plan.to_string();
        assert_eq!(text.contains("listed"), plan.is_kernels(), "{text}");
        (text, plan.is_kernels())
    }

    fn what(&self, device: &Device, dtype: DType) -> String {
        format!("{}, {device:?}, {dtype:?}", self.case.name)
    }

    fn check(&self, device: &Device, dtype: DType, tolerance: f64) {
        let bound = match self.case.of {
            Of::Blocks { .. } => Near::Tensor(tolerance),
            // Without kernels, Burn's products compute it in tf32. The gradients of a query with one key are differences of equal numbers.
            Of::Keys { .. } => match product_tolerance(device, dtype, tolerance) > tolerance {
                true => Near::Terms(5e-3),
                false => Near::Terms(tolerance),
            },
        };
        let got = self.run(device, dtype, DispatchMode::Auto);
        let what = self.what(device, dtype);
        self.problem.solve().assert(&what, got, &[bound]);
    }

    /// Compares with f64 to half precision, and with packed queries or products with all keys.
    fn check_half(&self, device: &Device, dtype: DType) {
        self.check(device, dtype, half_tolerance(dtype));
        let packed = self.run(device, dtype, DispatchMode::GroupByBlock);
        let by_query = self.run(device, dtype, DispatchMode::Auto);
        let what = format!("{}, packed", self.what(device, dtype));
        assert_alike(&what, by_query, packed, 2.0 * half_tolerance(dtype));
    }
}

/// Out, lse and all gradients equal f64.
pub fn attention_with_lists_equals_f64(devices: &[Device]) {
    for (number, device) in devices.iter().enumerate() {
        // All devices without kernels run the same operations of Burn.
        let cases = match number == 0 || runs_kernels(device) {
            true => of_blocks(device),
            false => few_of_blocks(device),
        };
        for (index, case) in cases {
            let drawn = case.draw(9100 + 10 * index, DType::F32);
            for (dtype, tolerance) in exact_dtypes(device) {
                drawn.check(device, dtype, tolerance);
            }
        }
    }
}

/// Half precision, in which kernels support lists.
pub fn attention_with_lists_in_half_precision(devices: &[Device]) {
    for (device, dtype) in halves(devices) {
        for (index, case) in few_of_blocks(device) {
            let drawn = case.draw(9300 + 10 * index, dtype);
            drawn.check_half(device, dtype);
        }
    }
}

/// Two runs give equal bits, forward and backward.
pub fn attention_with_lists_gives_the_same_bits(devices: &[Device]) {
    for device in devices {
        let dtypes = half_dtypes(device).into_iter().chain([DType::F32]);
        same_bits(device, few_of_blocks(device), 9500, dtypes.collect());
    }
}

/// Like [`attention_with_lists_gives_the_same_bits`], for keys.
pub fn attention_with_keys_gives_the_same_bits(devices: &[Device]) {
    for device in devices {
        let halves = half_dtypes(device).into_iter().rev().take(1);
        let dtypes = halves.chain([DType::F32]).collect();
        same_bits(device, some_of(of_keys(), 3).collect(), 10_400, dtypes);
    }
}

fn same_bits(device: &Device, cases: Vec<(u64, Case)>, seed: u64, dtypes: Vec<DType>) {
    let mut ran = 0;
    for (_, case) in cases {
        for &dtype in &dtypes {
            let drawn = case.draw(seed, dtype);
            let run = || drawn.run(device, dtype, DispatchMode::Auto);
            assert_same_bits(&drawn.what(device, dtype), run(), run());
            ran += 1;
        }
    }
    assert_ran("attention with lists, twice", ran);
}

/// Plans tell whether kernels attend to lists, and why not.
pub fn attention_with_lists_plans(devices: &[Device]) {
    for device in devices {
        check_plans(device, &of_blocks(device));
    }
}

/// Like [`attention_with_lists_plans`], for keys.
pub fn attention_with_keys_plans(devices: &[Device]) {
    let others = [WIDE, LARGE].map(|table| cases(OF_KEYS, table)).concat();
    let all = [of_keys(), others].concat();
    devices.iter().for_each(|device| check_plans(device, &all));
}

fn check_plans(device: &Device, cases: &[(u64, Case)]) {
    for (_, case) in cases {
        for dtype in half_dtypes(device).into_iter().chain([DType::F32]) {
            let drawn = case.draw(9600, dtype);
            let (text, is_listed) = drawn.plan(device, dtype, DispatchMode::Auto);
            // Tiles of all pairs support other numbers of heads and widths.
            let in_tiles = text.contains("tiles of all pairs");
            let by_query = is_cuda(device) && (case.by_query || in_tiles) && dtype != DType::F32;
            let what = format!("{}: {text}", drawn.what(device, dtype));
            assert_eq!(is_listed, by_query, "{what}");
            let is_right = !drawn.plan(device, dtype, DispatchMode::GroupByBlock).1;
            assert!(is_right, "{what}");
        }
    }
}

/// Errors for wrong sizes, and for options that lists of blocks lack.
pub fn attention_with_lists_errors(devices: &[Device]) {
    let drawn = OF_BLOCKS.draw(9700, DType::F32);
    for device in devices {
        let [q, k, v, _] = inputs(&drawn.problem, device, DType::F32);
        let call = |lists: SelectedBlocks, options: AttentionOptions| {
            let x = (q.clone(), k.clone(), v.clone());
            selected_blocks_attention(x.0, x.1, x.2, &drawn.near, lists, options)
        };
        let inner = device.clone().without_autodiff();
        let wrong = |dims: [usize; 4]| {
            let blocks = Tensor::<4, Int>::zeros(dims, (&inner, DType::I32));
            let lists = SelectedBlocks::of_blocks(blocks, 100, 16).unwrap();
            call(lists, AttentionOptions::default())
        };
        let lists = drawn.blocks(device);
        let alibi = AttentionOptions::default().alibi(vec![0.5; 32]);
        refused! {
            wrong([1, 2, 100, 3]) => "…lists' batch…";
            wrong([2, 3, 100, 3]) => "…lists' heads…";
            wrong([2, 2, 99, 3]) => "…lists' queries…";
            lists.clone().with_group_reuse(1.5) => "…overlap must be from 0 to 1…";
            call(lists, alibi) => "…options.alibi…";
        }
    }
}

/// Errors for wrong sizes, and for options that lists of keys lack.
pub fn attention_with_keys_errors(devices: &[Device]) {
    let drawn = OF_KEYS.draw(10_700, DType::F32);
    for device in devices {
        let [q, k, v, _] = inputs(&drawn.problem, device, DType::F32);
        let call = |lists: TokenIndices, options: AttentionOptions| {
            let x = (q.clone(), k.clone(), v.clone());
            token_sparse_attention(x.0, x.1, x.2, lists, options)
        };
        let inner = device.clone().without_autodiff();
        let keys = |dims: [usize; 4]| Tensor::<4, Int>::zeros(dims, (&inner, DType::I32));
        let options = AttentionOptions::default;
        let wrong = |dims: [usize; 4], seq_kv| {
            let lists = SelectedBlocks::of_keys(keys(dims), seq_kv).unwrap();
            call(lists, options())
        };
        let own = || drawn.keys(device);
        refused! {
            wrong([1, 2, 100, 3], 100) => "…lists' batch…";
            wrong([2, 3, 100, 3], 100) => "…lists' heads…";
            wrong([2, 2, 99, 3], 100) => "…lists' queries…";
            wrong([2, 2, 100, 3], 90) => "…lists' seq_kv…";
            SelectedBlocks::of_keys(keys([2, 2, 100, 3]), 0) => "…seq_kv must be at least 1…";
            own().with_group_reuse(-0.1) => "…overlap must be from 0 to 1…";
            own().with_group_reuse(1.1) => "…overlap must be from 0 to 1…";
            own().with_group_reuse(f64::NAN) => "…overlap must be from 0 to 1…";
            call(own(), options().alibi(vec![0.5; 32])) => "…options.alibi…";
            call(own(), options().softcap(3.0)) => "…options.softcap…";
        }
    }
}

/// Lists keep their valid entries without duplicates.
pub fn key_lists_are_unique(devices: &[Device]) {
    for device in devices {
        // So many keys that a cube's bit set takes several passes.
        let long = OF_KEYS.with("batch 1, heads 1 1, lists 1, seq 40 70000, dims 1 1, most 700");
        // So short that a unit sorts a list.
        let short = long.with("most 32");
        for (index, case) in of_keys().into_iter().chain([(10, long), (11, short)]) {
            let drawn = case.draw(9800 + index, DType::F32);
            let got = read_ints(drawn.keys(device).keys().clone());
            assert!(got == drawn.unique, "{:?}, {device:?}", case.seq);
        }
    }
}

/// The overlap of adjacent lists equals that of sets.
pub fn key_lists_overlap(devices: &[Device]) {
    for device in devices {
        for (index, case) in of_keys() {
            let drawn = case.draw(9850 + index, DType::F32);
            let ([seq_q, seq_kv], most) = (case.seq, case.most);
            let (mut unions, mut sum) = (BTreeSet::new(), 0);
            for (row, list) in drawn.unique.chunks(most).enumerate() {
                // The group of eight that contains a query.
                let first = row - row % seq_q % 8;
                let group = first..first + 8;
                let chooses = |row: usize| {
                    let query = row % seq_q;
                    let seen = match case.of {
                        Of::Keys { causal: false, .. } => seq_kv,
                        _ => (query + 1 + seq_kv).saturating_sub(seq_q),
                    };
                    named(&drawn.unique[row * most..][..most]).len() < seen
                };
                if first % seq_q + 8 > seq_q || !group.into_iter().all(chooses) {
                    continue;
                }
                for key in named(list) {
                    unions.insert((first, key));
                    sum += 1;
                }
            }
            let expected = match sum {
                0 => 1.0,
                _ => (8.0 - 8.0 * unions.len() as f64 / f64::from(sum)) / 7.0,
            };
            let got = drawn.keys(device).measure_group_reuse();
            let what = format!("{}, {device:?}: {got}, not {expected}", case.name);
            assert!((got - expected).abs() < 1e-12, "{what}");
        }
    }
}

/// Out, lse and all gradients equal f64.
pub fn attention_with_keys_equals_f64(devices: &[Device]) {
    for (index, case) in of_keys() {
        let drawn = case.draw(9900 + 10 * index, DType::F32);
        for (device, dtype, tolerance) in exact(devices) {
            drawn.check(device, dtype, tolerance);
        }
    }
}

/// Half precision, in which kernels support lists.
pub fn attention_with_keys_in_half_precision(devices: &[Device]) {
    for (index, case) in some_of(of_keys(), 3) {
        for (device, dtype) in halves(devices) {
            let drawn = case.draw(10_000 + 10 * index, dtype);
            drawn.check_half(device, dtype);
        }
    }
}

fn in_one_half(devices: &[Device], table: &'static str, seed: u64) {
    // Without kernels for these sizes they run like all keys, which the small cases cover.
    for device in devices.iter().filter(|device| is_cuda(device)) {
        for (index, case) in cases(OF_KEYS, table) {
            for dtype in half_dtypes(device).into_iter().rev().take(1) {
                let drawn = case.draw(seed + index, dtype);
                drawn.check(device, dtype, half_tolerance(dtype));
            }
        }
    }
}

/// Other widths, on GPUs that have kernels for them.
pub fn attention_with_keys_of_other_widths(devices: &[Device]) {
    in_one_half(devices, WIDE, 10_200);
}

/// 64 and 128 heads that share a list, on GPUs that have kernels for them.
pub fn attention_with_keys_of_many_heads(devices: &[Device]) {
    in_one_half(devices, LARGE, 10_300);
}

fn places_of(pattern: &Pattern, heads: usize, seq: [usize; 2]) -> BlockLayout {
    BlockLayout::new(pattern, LayoutShape::new(heads, seq, 32)).unwrap()
}

/// Layouts of single keys: the pairs of a host layout, as lists.
pub fn layouts_of_keys_equal_f64(devices: &[Device]) {
    let small = OF_KEYS.with("heads 4 2, seq 70 133");
    let shared = small.with("lists 1, later, seq 90 41");
    for (index, case, pattern) in [(0, small, Pattern::causal()), (1, shared, Pattern::dense())] {
        let halves = halves(devices).map(|(device, dtype)| (device, dtype, half_tolerance(dtype)));
        for (device, dtype, tolerance) in exact(devices).chain(halves) {
            let drawn = case.draw(10_800 + index, dtype);
            let places = places_of(&pattern, case.heads[0], case.seq);
            let layout = drawn.keys(device).layout(&places).unwrap();
            let host = layout.to_host().unwrap();
            let pairs = (0..case.batch).map(|entry| host.to_dense_batch(entry, 0));
            let listed: usize = pairs.flatten().flatten().filter(|&seen| seen).count();
            let own = drawn.unique.chunks(case.most * case.seq[0]);
            let own = own.step_by(case.heads_of_lists()).flatten();
            let expected = own.filter(|&&key| key >= 0).count();
            assert_eq!(listed, expected, "{device:?}");
            let tracked = device.clone().autodiff();
            let got = differentiated(&drawn.problem, &tracked, dtype, |q, k, v| {
                attend_with_lse([&q, &k, &v], &layout, &AttentionOptions::default())
            });
            let what = format!("{}, {device:?}, {dtype:?}", host.name());
            let answer = drawn.problem.solve();
            answer.assert(&what, got, &[Near::Terms(tolerance)]);
        }
    }
    for device in devices {
        let lists = small.draw(10_810, DType::F32).keys(device);
        let places = |heads, seq| places_of(&Pattern::causal(), heads, seq);
        refused! {
            lists.layout(&places(3, [70, 133])) => "…lists' heads…";
            lists.layout(&places(4, [71, 133])) => "…lists' queries…";
            lists.layout(&places(4, [70, 134])) => "…lists' seq_kv…";
        }
    }
}
