//! Random attentions that read a sequence in pieces: a cache and a paged pool give the rows of one call over the whole sequence, whatever the
//! pattern, the options, the pieces and the retention. A seed is a case, and a failure prints its seed.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::RotaryEncodingConfig;
use burn_paged_attention::pool::{KvPool, KvPoolConfig, KvRetention, KvStep, SequenceId};
use burn_sparse_transformer::content::ContentAttention;
use burn_sparse_transformer::nsa::{Compression, NsaHeadsConfig};
use burn_sparse_transformer::{
    Pattern, QkNorm, SparseMhaCache, SparseMhaInput, SparseMultiHeadAttention,
    SparseMultiHeadAttentionConfig,
};

use crate::fuzz::attention::{SEED, assert_none, chance, failing_seeds, number, pattern, pick};
use crate::prelude::*;

/// Number of cases; `SEED` has the first seed, and the others follow.
const CASES: &str = "BURN_SPARSE_FUZZ_DECODING";

const DEFAULT_CASES: u64 = 40;

/// Positions by which a sequence may be rolled back.
const ROLLBACK: usize = 4;

/// Runs `BURN_SPARSE_FUZZ_DECODING` cases from `BURN_SPARSE_FUZZ_SEED` on; panics at the end if one failed.
pub fn pieces_are_rows_of_the_whole(devices: &[Device]) {
    let (first, count) = (number(SEED, 1), number(CASES, DEFAULT_CASES));
    let mut failed = Vec::new();
    for device in devices {
        failed.extend(failing_seeds(device, CASES, first, count, |seed, case| {
            check(seed, device, case)
        }));
        println!("{count} cases from seed {first} on {device:?}");
    }
    assert_none(&failed);
}

/// Checks one case, and describes it in `case` before anything runs.
fn check(seed: u64, device: &Device, case: &mut String) {
    let rng = &mut seeded(seed);
    let seq = rng.random_range(2..70);
    let config = attention(rng, seq);
    let batch = rng.random_range(1..=4);
    *case = format!("batch {batch}, seq {seq}, {config:?}");
    let mha = randomised(config.try_init(device).unwrap(), rng);
    let x = numbers(rng, [batch, seq, config.d_model], device);
    let other = numbers(rng, [1, seq, config.d_model], device);
    let whole = mha
        .try_forward(SparseMhaInput::self_attn(x.clone()))
        .unwrap();
    let whole = Rows {
        of: to_f64(read(whole.context)),
        seq,
        width: config.d_model,
        tolerance: tolerance(device),
    };
    by_cache(&mha, &x, &whole, rng);
    let rollback = if chance(rng, 2) { ROLLBACK } else { 0 };
    let chooses = config.content.is_some();
    let pool = pool_config(rng, seq, chooses).with_rollback(rollback);
    *case = format!("{case}, {pool:?}");
    let mut pool = KvPool::for_attention(&mha, &pool).unwrap();
    by_pool(&mha, [&x, &other], &whole, (&mut pool, rollback), rng);
}

/// Returns the tolerance of rows, relative to the largest: other lengths use other kernels, and on CUDA products of f32 round to tf32.
fn tolerance(device: &Device) -> f64 {
    match is_cuda(device) {
        true => 5e-3,
        false => 1e-5,
    }
}

fn attention(rng: &mut impl Rng, seq: usize) -> SparseMultiHeadAttentionConfig {
    let heads: usize = pick(rng, &[1, 2, 4, 8]);
    let groups: Vec<usize> = [1, 2, 4, 8]
        .into_iter()
        .filter(|&group| heads.is_multiple_of(group))
        .collect();
    let widths = [4, 8, 16, 32, 64, 128];
    let widths = &widths[..if heads > 2 { 3 } else { 6 }];
    let (key, value) = (pick(rng, widths), pick(rng, widths));
    let depth = rng.random_range(0..3);
    let pattern: Pattern = pattern(rng, heads, seq, depth).and_causal();
    let rope = RotaryEncodingConfig::new(seq, key);
    let norms = [QkNorm::Rms, QkNorm::Layer];
    if chance(rng, 5) {
        return SparseMultiHeadAttentionConfig::new(heads * value, heads, Pattern::causal())
            .with_content(Some(ContentAttention::Nsa(branches(rng))))
            .with_n_kv_heads(Some(heads / pick(rng, &groups)))
            .with_d_key((key != value).then_some(heads * key))
            .with_rope(chance(rng, 2).then_some(rope))
            .with_qk_norm(chance(rng, 2).then(|| pick(rng, &norms)));
    }
    SparseMultiHeadAttentionConfig::new(heads * value, heads, pattern)
        .with_block_size(pick(rng, &[8, 16, 32]))
        .with_n_kv_heads(Some(heads / pick(rng, &groups)))
        .with_d_key((key != value).then_some(heads * key))
        .with_rope(chance(rng, 2).then_some(rope))
        .with_qk_norm(chance(rng, 4).then(|| pick(rng, &norms)))
        .with_softcap(chance(rng, 4).then_some(3.0))
        .with_alibi(chance(rng, 5))
        .with_relative_reach(chance(rng, 5).then(|| rng.random_range(1..20)))
        .with_sinks(chance(rng, 4))
}

/// Returns native sparse attention that selects so few blocks that some are left out.
fn branches(rng: &mut impl Rng) -> NsaHeadsConfig {
    let stride: usize = pick(rng, &[1, 2, 4, 8, 16]);
    let (first, local) = (rng.random_range(0..2), rng.random_range(1..3));
    NsaHeadsConfig::new()
        .with_stride(stride)
        .with_block(stride * rng.random_range(1..5))
        .with_selected_block(16)
        .with_first(first)
        .with_local(local)
        .with_keep(first + local + rng.random_range(0..2))
        .with_window(pick(rng, &[0, 1, 7, 16, 33]))
        .with_compression(pick(rng, &[Compression::Mean, Compression::Mlp]))
        .with_shared_kv(chance(rng, 2))
}

fn pool_config(rng: &mut impl Rng, seq: usize, chooses: bool) -> KvPoolConfig {
    // Four sequences, and forks of them before they leave.
    let config = KvPoolConfig::new(9, seq)
        .with_page_size(if chooses {
            16
        } else {
            pick(rng, &[16, 32, 64])
        })
        .with_chunk(seq);
    match chance(rng, 2) {
        true => config.with_residency(KvRetention::All),
        false => config,
    }
}

/// Randomizes every parameter, including those initialized to 0.
fn randomised(mha: SparseMultiHeadAttention, rng: &mut ChaCha8Rng) -> SparseMultiHeadAttention {
    struct Randomise<'a>(&'a mut ChaCha8Rng);
    impl ModuleMapper for Randomise<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| numbers(self.0, tensor.dims(), &tensor.device()).mul_scalar(0.5))
        }
    }
    mha.map(&mut Randomise(rng))
}

/// Returns numbers between −1 and 1.
fn numbers<const D: usize>(rng: &mut impl Rng, shape: [usize; D], device: &Device) -> Tensor<D> {
    let numbers = (0..shape.iter().product()).map(|_| rng.random_range(-1.0..1.0));
    floats(&numbers.collect::<Vec<f32>>(), shape, device)
}

/// The rows of the whole call: `[batch][seq][width]`.
struct Rows {
    of: Vec<f64>,
    seq: usize,
    width: usize,
    tolerance: f64,
}

impl Rows {
    /// Checks that `rows`, `[1, count, width]`, are those of an entry from `first` on.
    fn expect(&self, what: &str, rows: Tensor<3>, entry: usize, first: usize) {
        let [_, count, _] = rows.dims();
        let start = (entry * self.seq + first) * self.width;
        let expected = &self.of[start..start + count * self.width];
        let what = format!("{what}, entry {entry}, {count} rows from {first}");
        assert_close(&what, read(rows), expected, self.tolerance);
    }
}

/// Feeds all entries together, in pieces.
fn by_cache(mha: &SparseMultiHeadAttention, x: &Tensor<3>, whole: &Rows, rng: &mut impl Rng) {
    let [batch, seq, _] = x.dims();
    let mut cache = SparseMhaCache::new();
    while cache.len() < seq {
        let first = cache.len();
        let count = piece(rng).min(seq - first);
        let input = SparseMhaInput::self_attn(x.clone().narrow(1, first, count));
        let rows = mha.try_forward_cache(input, &mut cache).unwrap().context;
        for entry in 0..batch {
            whole.expect("a cache", rows.clone().narrow(0, entry, 1), entry, first);
        }
    }
}

/// Returns the number of tokens of a call: mostly one.
fn piece(rng: &mut impl Rng) -> usize {
    match rng.random_range(0..4) {
        0 => rng.random_range(2..6),
        1 => rng.random_range(6..40),
        _ => 1,
    }
}

/// Feeds each entry in its own pieces, with rollbacks and forks that continue.
fn by_pool(
    mha: &SparseMultiHeadAttention,
    [x, other]: [&Tensor<3>; 2],
    whole: &Rows,
    (pool, rollback): (&mut KvPool, usize),
    rng: &mut impl Rng,
) {
    let [batch, seq, width] = x.dims();
    let mut ids: Vec<SequenceId> = (0..batch).map(|_| pool.join().unwrap()).collect();
    for _ in 0..40 {
        let first: Vec<usize> = ids.iter().map(|&id| pool.len(id).unwrap()).collect();
        let counts: Vec<usize> = (first.iter())
            .map(|first| if chance(rng, 4) { 0 } else { piece(rng) }.min(seq - first))
            .collect();
        let taken: Vec<usize> = (0..batch).filter(|&entry| counts[entry] > 0).collect();
        let Some(most) = taken.iter().map(|&entry| counts[entry]).max() else {
            continue;
        };
        let input = taken.iter().map(|&entry| {
            let rows = x.clone().narrow(0, entry, 1);
            let rows = rows.narrow(1, first[entry], counts[entry]);
            match most - counts[entry] {
                0 => rows,
                rest => Tensor::cat(
                    vec![rows, Tensor::full([1, rest, width], 7.0, &x.device())],
                    1,
                ),
            }
        });
        let input = Tensor::cat(input.collect(), 0);
        let steps: Vec<KvStep> = (taken.iter())
            .map(|&entry| KvStep::new(ids[entry], counts[entry]))
            .collect();
        let rows = pool.try_forward_attention(mha, input, &steps).unwrap();
        pool.verify().unwrap();
        for (place, &entry) in taken.iter().enumerate() {
            let rows = rows.clone().narrow(0, place, 1);
            let rows = rows.narrow(1, 0, counts[entry]);
            whole.expect("a pool", rows, entry, first[entry]);
        }
        let entry = rng.random_range(0..batch);
        let len = pool.len(ids[entry]).unwrap();
        let read_on = |pool: &mut KvPool, id: SequenceId, count: usize| {
            let rows = other.clone().narrow(1, len, count);
            pool.try_forward_attention(mha, rows, &[KvStep::new(id, count)])
                .unwrap();
        };
        if rollback == ROLLBACK && len + ROLLBACK <= seq && chance(rng, 2) {
            let count = rng.random_range(1..=ROLLBACK);
            read_on(pool, ids[entry], count);
            pool.truncate(ids[entry], len).unwrap();
        } else if pool.sequences().count() < 8 && chance(rng, 3) {
            let fork = pool.fork(ids[entry]).unwrap();
            if len < seq {
                read_on(pool, ids[entry], 1);
            }
            if chance(rng, 2) {
                pool.leave(ids[entry]).unwrap();
            }
            ids[entry] = fork;
        }
        pool.verify().unwrap();
    }
}
