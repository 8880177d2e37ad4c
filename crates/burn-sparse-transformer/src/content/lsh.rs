//! Attention within hash buckets (Kitaev et al., 2020).

use std::num::NonZeroUsize;

use burn::config::Config;
use burn::tensor::activation::softmax;
use burn::tensor::kind::Basic;
use burn::tensor::{DType, Int, Tensor};
use burn_blocksparse::Seed;
use burn_blocksparse::internal::{gather_rows, runs_kernels};
use burn_blocksparse::layout::PositionMask;
use burn_sparse_select::internal::{row_products, sort_by_bucket};
use serde::{Deserialize, Serialize};

use super::lsh_places::Placed;
use super::rotations::{KeptRotations, rotations};
use super::{in_dtype, unit, widened};
use crate::error::{Result, ensure, ensure_positive, ensure_shape, or_panics};
use burn_blocksparse::internal::arange;

const AXES: [&str; 4] = ["batch", "heads", "seq", "head_dim"];

/// Score of a masked pair. Finite, because not every shader supports infinities.
const NOTHING: f64 = -1e30;

/// lse of a token that sees only itself, so that any other round outweighs it (lucidrains' `TOKEN_SELF_ATTN_VALUE`).
const SELF_ALONE: f64 = -5e4;

/// Options of [`lsh_attention`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[must_use]
#[non_exhaustive]
pub struct LshOptions {
    /// Tokens of a chunk, and of a bucket on average.
    pub bucket: NonZeroUsize,
    /// True if tokens see earlier ones only.
    pub causal: bool,
    /// True if a pair found by several rounds counts once. Otherwise it counts once per round, as published.
    pub dedup: bool,
    /// True if tokens see only their own bucket. Otherwise chunks may cross buckets, as published.
    pub own_bucket: bool,
}

impl LshOptions {
    /// Returns causal options in which pairs count once per round and chunks cross buckets.
    pub fn new(bucket: NonZeroUsize) -> Self {
        Self {
            bucket,
            causal: true,
            dedup: false,
            own_bucket: false,
        }
    }

    blocksparse::setters! {
        /// Sets whether tokens see earlier ones only.
        causal: bool,
        /// Sets whether a pair found by several rounds counts once.
        dedup: bool,
        /// Sets whether tokens see only their own bucket.
        own_bucket: bool,
    }

    /// Returns the number of chunks of a sequence of `seq` tokens, filler included: an even number.
    fn chunks(&self, seq: usize) -> usize {
        seq.div_ceil(2 * self.bucket.get()) * 2
    }
}

/// Computes attention of each token to tokens that random rotations hash into the same bucket or an adjacent one (Kitaev et al., 2020, §2).
///
/// ```text
/// round r:  bucket = argmax [x R_r; −x R_r];  tokens sorted by bucket, and by position, in chunks of `bucket` tokens
///           each chunk sees itself and the one before, the first the last; of those a token sees the earlier ones, not itself
///           a token that would see nothing sees itself, with lse −5e4
/// keys = unit(x), scores = x · key / √head_dim;  out = Σ_r softmax_r(lse_r) · out_r
/// ```
///
/// Sequences are padded to a multiple of `2 · bucket` tokens with filler at the end that no token sees. What a token sees depends on the whole sequence,
/// because chunks are formed by sorting it: not prefix-stable.
///
/// On devices with kernels, all rounds are one call of [`SparseAttentionCall`](burn_blocksparse::SparseAttentionCall) over gathered rows, with a
/// [`DeviceLayout`](burn_blocksparse::DeviceLayout) by positions, and one merge. On CPUs, and with `dedup` and `own_bucket`, chunks are computed with Burn's
/// products and softmax: a tensor of `2 · bucket · seq` scores for each head and round is in memory, and with autodiff about five of them are stored for the
/// backward pass. Nothing is read back. Gradients do not flow through the hashes.
///
/// # Shapes
/// - `qk`: `[batch, heads, seq, head_dim]`, queries and, normalised to unit length, keys
/// - `value`: `[batch, heads, seq, value_dim]`
/// - `rotations`: `[rounds, head_dim, n_buckets / 2]`, without autodiff
/// - returns out `[batch, heads, seq, value_dim]` in the dtype of `value`, and lse `[batch, heads, seq]` over all rounds
///
/// # Errors
/// If shapes do not match, or one is empty.
pub fn lsh_attention(
    qk: Tensor<4>,
    value: Tensor<4>,
    rotations: Tensor<3>,
    options: LshOptions,
) -> Result<(Tensor<4>, Tensor<3>)> {
    ensure_shape("qk", qk.dims(), [None; 4], AXES)?;
    let [batch, heads, seq, head_dim] = qk.dims();
    let expected = [Some(batch), Some(heads), Some(seq), None];
    ensure_shape("value", value.dims(), expected, AXES)?;
    let axes = ["rounds", "head_dim", "n_buckets / 2"];
    let expected = [None, Some(head_dim), None];
    ensure_shape("rotations", rotations.dims(), expected, axes)?;
    let [rounds, _, half] = rotations.dims();
    ensure_positive("qk's elements", batch * heads * seq * head_dim)?;
    ensure_positive("rotations' elements", rounds * half)?;
    let dtype = value.dtype();
    let hashed = widened(qk.clone().without_autodiff());
    let rotations = in_dtype(rotations.without_autodiff(), hashed.dtype());
    let (buckets, count) = (hash(hashed, rotations), 2 * half);
    let key = in_dtype(unit(qk.clone()), dtype);
    let device = value.device();
    let rows = [in_dtype(qk, dtype), key, value];
    let counts_once = options.dedup && rounds > 1;
    if !counts_once && !options.own_bucket && runs_kernels(&device) {
        let rule = match options.causal {
            true => PositionMask::Before,
            false => PositionMask::Others,
        };
        let sizes = [options.chunks(seq), options.bucket.get()];
        let placed = Placed::new(buckets, count, sizes)?;
        return placed.attend(rows, rule, SELF_ALONE);
    }
    let rounds: Vec<Round> = (0..rounds)
        .map(|round| {
            let own = buckets.clone().slice_dim(2, round..round + 1);
            Round::new(own.squeeze_dim(2), count, options)
        })
        .collect::<Result<_, _>>()?;
    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    for (round, own) in rounds.iter().enumerate() {
        let found = own.found(&rounds, round, options);
        let (out, lse) = own.attend(rows.clone(), found)?;
        outs.push(out);
        lses.push(lse);
    }
    let (out, lse) = match outs.len() {
        1 => (outs.remove(0), lses.remove(0)),
        _ => merged(outs, lses),
    };
    Ok((out.cast(dtype), lse.reshape([batch, heads, seq])))
}

/// Most products of rows with rotations at a time, unless a single row has more.
const NUMBERS: usize = 1 << 25;

/// Hashes each row of `[batch, heads, seq, head_dim]` with the rotations `[rounds, head_dim, half]`: the index of the first maximum of `[x R; −x R]`,
/// `[batch, heads, rounds, seq]`, i32.
fn hash(x: Tensor<4>, rotations: Tensor<3>) -> Tensor<4, Int> {
    let [batch, heads, seq, dim] = x.dims();
    let [rounds, _, half] = rotations.dims();
    let rows = batch * heads * seq;
    let x = x.reshape([1, 1, rows, dim]);
    let columns = rotations
        .swap_dims(1, 2)
        .reshape([1, 1, rounds * half, dim]);
    let together = (NUMBERS / (rounds * half)).clamp(1, rows);
    let parts = (0..rows).step_by(together).map(|from| {
        let to = (from + together).min(rows);
        let products = row_products(columns.clone(), x.clone().slice_dim(2, from..to));
        let products = products.reshape([rounds, half, to - from]);
        let (max, of_max) = products.clone().max_dim_with_indices(1);
        let (min, of_min) = products.min_dim_with_indices(1);
        let is_negative = max.lower(min.neg());
        let bucket = of_max.mask_where(is_negative, of_min + half as i32);
        bucket.cast(DType::I32)
    });
    let buckets = Tensor::cat(parts.collect(), 2).reshape([rounds, batch, heads, seq]);
    buckets.permute([1, 2, 0, 3])
}

/// Merges the rounds' outputs `[batch, heads, seq, dim]` by their lse `[.., 1]`.
fn merged(outs: Vec<Tensor<4>>, lses: Vec<Tensor<4>>) -> (Tensor<4>, Tensor<4>) {
    let lse = Tensor::cat(lses, 3);
    let max = lse.clone().max_dim(3).detach();
    let total = (lse.clone() - max.clone().expand(lse.dims()))
        .exp()
        .sum_dim(3)
        .log()
        + max;
    let shares = softmax(lse, 3);
    let weighted = outs.into_iter().enumerate().map(|(round, out)| {
        let dims = out.dims();
        let share = shares.clone().slice_dim(3, round..round + 1);
        out * share.expand(dims)
    });
    let out = weighted.reduce(|a, b| a + b);
    (out.expect("at least one round"), total)
}

/// Result of a round: tokens sorted by bucket into slots, and the inverse.
struct Round {
    /// Position of the token in each slot, filler after all tokens: `[batch, heads, places]`.
    positions: Tensor<3, Int>,
    /// Token in each slot, −1 for filler.
    tokens: Tensor<3, Int>,
    /// Slot of each token: `[batch, heads, seq]`.
    places: Tensor<3, Int>,
    /// Bucket of each token: `[batch, heads, seq]`.
    buckets: Tensor<3, Int>,
    chunks: usize,
    bucket: usize,
}

/// Masks of the pairs of tiles, `[batch, heads, chunks, bucket, 2 · bucket]`.
struct Found {
    /// 1 if the key is seen, else 0.
    seen: Tensor<5, Int>,
    /// Number of rounds that find the pair, if pairs count once.
    times: Option<Tensor<5, Int>>,
}

impl Round {
    /// Sorts tokens by their buckets, `[batch, heads, seq]`, below `count`.
    fn new(buckets: Tensor<3, Int>, count: usize, options: LshOptions) -> Result<Self> {
        let [_, _, seq] = buckets.dims();
        let chunks = options.chunks(seq);
        let bucket = options.bucket.get();
        let [tokens, places] = sort_by_bucket(buckets.clone(), count, chunks * bucket)?;
        // The position of filler is its slot, which is after all tokens.
        let all = arange(chunks * bucket, &tokens.device()).reshape([1, 1, chunks * bucket]);
        let is_none = tokens.clone().lower_elem(0);
        let positions = tokens
            .clone()
            .mask_where(is_none, all.expand(tokens.dims()));
        Ok(Self {
            positions,
            tokens,
            places,
            buckets,
            chunks,
            bucket,
        })
    }

    /// Arranges slots as queries `[batch, heads, chunks, bucket, 1]` and as keys `[batch, heads, chunks, 1, 2 · bucket]`.
    fn tiles(&self, x: Tensor<3, Int>) -> [Tensor<5, Int>; 2] {
        let [batch, heads, _] = x.dims();
        let x = x.reshape([batch, heads, self.chunks, self.bucket]);
        let queries = x.clone().unsqueeze_dim(4);
        [queries, with_before(x).unsqueeze_dim(3)]
    }

    fn dims(&self) -> [usize; 5] {
        let [batch, heads, _] = self.positions.dims();
        [batch, heads, self.chunks, self.bucket, 2 * self.bucket]
    }

    /// Gathers a value per token into this round's slots, −1 for filler.
    fn at_places(&self, x: Tensor<3, Int>) -> Tensor<3, Int> {
        let none = self.tokens.clone().lower_elem(0);
        let x = x.gather(2, self.tokens.clone().clamp_min(0));
        x.mask_fill(none, -1)
    }

    /// Computes which pairs of this round's tiles are seen, and how many rounds find them.
    fn found(&self, rounds: &[Round], own: usize, options: LshOptions) -> Found {
        let dims = self.dims();
        let [query, key] = self.tiles(self.positions.clone()).map(|x| x.expand(dims));
        let [_, _, seq] = self.places.dims();
        let seen = match options.causal {
            true => key.lower(query),
            false => {
                let is_token = key.clone().lower_elem(seq as i32);
                is_token.bool_and(key.equal(query).bool_not())
            }
        };
        let same_bucket = |round: &Round| {
            let [query, key] = self.tiles(self.at_places(round.buckets.clone()));
            query.expand(dims).equal(key.expand(dims))
        };
        let seen = match options.own_bucket {
            true => seen.bool_and(same_bucket(self)),
            false => seen,
        };
        let seen = super::ones(seen);
        if !options.dedup || rounds.len() == 1 {
            return Found { seen, times: None };
        }
        let mut times = seen.ones_like();
        for (number, round) in rounds.iter().enumerate() {
            if number == own {
                continue;
            }
            let chunk = round.places.clone().div_scalar(self.bucket as i32);
            let [query, key] = self.tiles(self.at_places(chunk)).map(|x| x.expand(dims));
            let last = self.chunks as i32 - 1;
            let before = query.clone() - 1;
            let before = before.clone().mask_fill(before.lower_elem(0), last);
            let is_near = key.clone().equal(query).bool_or(key.equal(before));
            let found = match options.own_bucket {
                true => is_near.bool_and(same_bucket(round)),
                false => is_near,
            };
            times = times + super::ones(found);
        }
        Found {
            seen,
            times: Some(times),
        }
    }

    /// Attention of this round for queries, keys and values of one dtype: out `[batch, heads, seq, value_dim]` and lse `[batch, heads, seq, 1]`, in f32 or
    /// higher precision.
    fn attend(&self, rows: [Tensor<4>; 3], found: Found) -> Result<(Tensor<4>, Tensor<4>)> {
        let dims = self.dims();
        let [batch, heads, chunks, bucket, _] = dims;
        let [_, _, seq] = self.places.dims();
        let users = self.places.clone().reshape([batch, heads, seq, 1]);
        let [[.., head_dim], _, [.., value_dim]] = rows.each_ref().map(Tensor::dims);
        let in_chunks = |x: Tensor<4>| {
            let [.., width] = x.dims();
            let placed = gather_rows(x, self.tokens.clone(), users.clone());
            placed.map(|rows| rows.reshape([batch, heads, chunks, bucket, width]))
        };
        let [query, key, value] = rows;
        let [query, key, value] = [in_chunks(query)?, in_chunks(key)?, in_chunks(value)?];
        let key = with_before(key);
        let scores = widened(query.matmul(key.swap_dims(3, 4)));
        let scores = scores * (1.0 / (head_dim as f64).sqrt());
        let dtype = scores.dtype();
        let scores = match found.times {
            Some(times) => scores - times.float().cast(dtype).log(),
            None => scores,
        };
        let hidden = found.seen.clone().equal_elem(0);
        let empty = found.seen.sum_dim(4).equal_elem(0);
        let scores = scores.mask_fill(hidden.clone(), NOTHING);
        let max = scores.clone().max_dim(4).detach();
        let weights = (scores - max.clone().expand(dims)).exp();
        let weights = weights.mask_fill(hidden, 0.0);
        let sum = weights.clone().sum_dim(4).mask_fill(empty.clone(), 1.0);
        let lse = (max + sum.clone().log()).mask_fill(empty.clone(), SELF_ALONE);
        let weights = (weights / sum.expand(dims)).cast(value.dtype());
        let out = weights.matmul(with_before(value.clone()));
        let out = out.mask_where(empty.expand(value.dims()), value);
        let joined = Tensor::cat(vec![widened(out), lse], 4);
        let joined = joined.reshape([batch, heads, chunks * bucket, value_dim + 1]);
        let users = self.tokens.clone().unsqueeze_dim(3);
        let joined = gather_rows(joined, self.places.clone(), users)?;
        let out = joined.clone().slice_dim(3, 0..value_dim);
        Ok((out, joined.slice_dim(3, value_dim..value_dim + 1)))
    }
}

/// Prepends to each chunk the one before it, to the first the last: `[batch, heads, chunks, bucket, ..]` to `[batch, heads, chunks, 2 · bucket, ..]`.
fn with_before<const D: usize, K: Basic>(x: Tensor<D, K>) -> Tensor<D, K> {
    let chunks = x.dims()[2];
    let last = x.clone().slice_dim(2, chunks - 1..chunks);
    let before = Tensor::cat(vec![last, x.clone().slice_dim(2, 0..chunks - 1)], 2);
    Tensor::cat(vec![before, x], 3)
}

/// Configuration of [`LshHeads`].
#[derive(Config, Debug, PartialEq)]
#[must_use = "a configuration does nothing until `init`"]
pub struct LshHeadsConfig {
    /// Tokens of a chunk, and of a bucket on average.
    #[config(default = 64)]
    pub bucket: usize,
    /// Number of hashes.
    #[config(default = 8)]
    pub rounds: usize,
    /// Buckets of a hash, an even number. Default: one for each `bucket` tokens of a sequence, filler included.
    pub n_buckets: Option<usize>,
    /// True if tokens see earlier ones only.
    #[config(default = true)]
    pub causal: bool,
    /// True if a pair found by several rounds counts once.
    #[config(default = false)]
    pub dedup: bool,
    /// True if tokens see only their own bucket.
    #[config(default = false)]
    pub own_bucket: bool,
    /// Seed of the rotations outside of training, and in training if no other seed is given.
    #[config(default = 0)]
    pub seed: u64,
}

impl LshHeadsConfig {
    pub(crate) fn validate(&self) -> Result<()> {
        ensure_positive("bucket", self.bucket)?;
        ensure_positive("rounds", self.rounds)?;
        if let Some(buckets) = self.n_buckets {
            ensure! { buckets > 0 && buckets.is_multiple_of(2) && buckets <= 1 << 20 =>
            "n_buckets", "even, from 2 to 2²⁰: half of the buckets are opposite to the others", buckets; }
        }
        Ok(())
    }

    or_panics! {
        /// Creates the heads. They have no parameters.
        pub fn init(&self) -> LshHeads;

        /// # Errors
        /// If `bucket` or `rounds` is 0, or `n_buckets` is odd or 0.
        pub fn try_init {
            self.validate()?;
            let bucket = NonZeroUsize::new(self.bucket).expect("checked");
            Ok(LshHeads {
                options: LshOptions::new(bucket)
                    .causal(self.causal)
                    .dedup(self.dedup)
                    .own_bucket(self.own_bucket),
                rounds: self.rounds,
                n_buckets: self.n_buckets,
                seed: self.seed,
                rotations: KeptRotations::default(),
            })
        }
    }
}

/// Heads of the Reformer (Kitaev et al., 2020, §2): [`lsh_attention`] with rotations drawn from a seed.
#[derive(Clone, Debug)]
pub struct LshHeads {
    options: LshOptions,
    rounds: usize,
    n_buckets: Option<usize>,
    seed: u64,
    rotations: KeptRotations,
}

impl LshHeads {
    or_panics! {
        /// Computes attention of queries that are also keys, with rotations drawn from `seed`, or from the configuration's. All heads have the same
        /// rotations.
        ///
        /// # Shapes
        /// Those of [`lsh_attention`].
        pub fn forward(&self, qk: Tensor<4>, value: Tensor<4>, seed: Option<Seed>) -> Tensor<4>;

        /// # Errors
        /// Those of [`lsh_attention`]; also during a recording, in which rotations would be constant.
        pub fn try_forward {
            ensure_shape("qk", qk.dims(), [None; 4], AXES)?;
            let [_, _, seq, head_dim] = qk.dims();
            let buckets = self.n_buckets.unwrap_or(self.options.chunks(seq));
            let dtype = match qk.dtype() {
                DType::F64 => DType::F64,
                _ => DType::F32,
            };
            let shape = [self.rounds, head_dim, buckets / 2];
            let options = (&qk.device(), dtype);
            let rotations = match seed {
                Some(seed) => rotations(shape, seed, options)?,
                None => self.rotations.get(shape, self.seed, options)?,
            };
            Ok(lsh_attention(qk, value, rotations, self.options)?.0)
        }
    }

    /// Returns the number of pairs that one head computes for a sequence of `seq` tokens, masked ones included.
    pub fn pairs(&self, seq: usize) -> u64 {
        let bucket = self.options.bucket.get() as u64;
        let places = self.options.chunks(seq) as u64 * bucket;
        self.rounds as u64 * places * 2 * bucket
    }
}
