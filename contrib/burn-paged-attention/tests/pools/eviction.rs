//! Eviction in a pool: retained keys against a simulation on the host, and the keys that queries see.

use burn_paged_attention::pool::{EvictionBudget, EvictionScore, ScoreSmoothing};

use crate::pool::call;
use crate::prelude::*;

pub const SEQ: usize = 37;
pub const HEADS: usize = 4;
pub const WIDTH: usize = 16;

pub fn pool_config(sequences: usize, eviction: EvictionConfig) -> KvPoolConfig {
    KvPoolConfig::new(sequences, SEQ)
        .with_page_size(16)
        .with_chunk(20)
        .with_eviction(eviction)
}

pub fn attention(pattern: Pattern, kv_heads: usize) -> SparseMultiHeadAttentionConfig {
    SparseMultiHeadAttentionConfig::new(WIDTH, HEADS, pattern)
        .with_block_size(8)
        .with_n_kv_heads(Some(kv_heads))
}

/// Returns every policy, with a capacity of 9, and without slack unless stated.
pub fn policies() -> Vec<EvictionConfig> {
    let snapkv = |kind| EvictionConfig::snapkv_with(9, 3, 3, kind);
    let adaptive = EvictionBudget::Adaptive { alpha: 0.2 };
    let pyramid = EvictionBudget::Pyramid { beta: 4.0 };
    let all = vec![
        EvictionConfig::h2o(5, 4),
        EvictionConfig::h2o_mean(5, 4),
        EvictionConfig::h2o(5, 4).with_slack(6),
        EvictionConfig::tova(9),
        EvictionConfig::tova(9).with_slack(3),
        snapkv(ScoreSmoothing::Average),
        snapkv(ScoreSmoothing::Max).with_slack(5),
        EvictionConfig::key_norm(9),
        EvictionConfig::combined(EvictionScore::Sum, 2, 3, 4),
        EvictionConfig::combined(EvictionScore::KeyNorm, 2, 3, 4).with_slack(4),
        EvictionConfig::h2o(5, 4).with_budget(adaptive),
        (EvictionConfig::h2o_mean(5, 4).with_slack(2)).with_budget(adaptive),
        snapkv(ScoreSmoothing::Average).with_budget(adaptive),
        EvictionConfig::h2o(5, 4).with_budget(pyramid),
        EvictionConfig::tova(9).with_slack(2).with_budget(pyramid),
    ];
    let exact = |config: EvictionConfig| match config.slack {
        256 => config.with_slack(0),
        _ => config,
    };
    all.into_iter().map(exact).collect()
}

/// Scores and norms of a layer for one sequence, in f64.
struct Host {
    /// `[heads][positions][positions]`
    scores: Vec<Vec<Vec<f64>>>,
    /// `[kv_heads][positions]`
    norms: Vec<Vec<f64>>,
}

impl Host {
    fn new(mha: &SparseMultiHeadAttention, x: &Tensor<3>, kv_heads: usize) -> Self {
        let [_, len, width] = x.dims();
        let project = |linear: &Linear| -> Vec<f64> {
            let rows = linear.forward(x.clone().reshape([len, width]));
            let rows: Vec<f32> = rows.into_data().try_into_vec().unwrap();
            rows.into_iter().map(f64::from).collect()
        };
        let (q, k) = (project(&mha.query), project(&mha.key));
        let d = width / HEADS;
        let group = HEADS / kv_heads;
        let query = |h: usize, i: usize| &q[(i * HEADS + h) * d..][..d];
        let key = |h: usize, j: usize| &k[(j * kv_heads + h) * d..][..d];
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let scale = 1.0 / (d as f64).sqrt();
        let row = |h: usize, i: usize| {
            let scores = (0..len).map(|j| scale * dot(query(h, i), key(h / group, j)));
            scores.collect()
        };
        Self {
            scores: (0..HEADS)
                .map(|h| (0..len).map(|i| row(h, i)).collect())
                .collect(),
            norms: (0..kv_heads)
                .map(|h| (0..len).map(|j| dot(key(h, j), key(h, j)).sqrt()).collect())
                .collect(),
        }
    }

    /// Returns the attention of a head's query to some keys.
    fn attention(&self, head: usize, query: usize, keys: &[usize]) -> Vec<f64> {
        let scores = keys.iter().map(|&j| self.scores[head][query][j].exp());
        let scores: Vec<f64> = scores.collect();
        let total: f64 = scores.iter().sum();
        scores.into_iter().map(|score| score / total).collect()
    }
}

/// Retained keys of a layer for a sequence.
struct Simulation<'a> {
    host: &'a Host,
    config: EvictionConfig,
    /// Positions per KV head, and sums of attention.
    kept: Vec<Vec<usize>>,
    sums: Vec<Vec<f64>>,
    len: usize,
}

impl<'a> Simulation<'a> {
    fn new(host: &'a Host, config: EvictionConfig) -> Self {
        let heads = host.norms.len();
        Self {
            host,
            config,
            kept: vec![Vec::new(); heads],
            sums: vec![Vec::new(); heads],
            len: 0,
        }
    }

    fn group(&self) -> usize {
        HEADS / self.kept.len()
    }

    fn call(&mut self, tokens: usize) {
        let group = self.group();
        for query in self.len..self.len + tokens {
            for head in 0..self.kept.len() {
                self.kept[head].push(query);
                self.sums[head].push(0.0);
                for h in head * group..(head + 1) * group {
                    let p = self.host.attention(h, query, &self.kept[head]);
                    (self.sums[head].iter_mut().zip(p)).for_each(|(sum, p)| *sum += p);
                }
            }
        }
        self.len += tokens;
    }

    fn is_due(&self) -> bool {
        let stored: usize = self.kept.iter().map(Vec::len).sum();
        stored > (self.config.capacity() + self.config.slack) * self.kept.len()
    }

    fn evict(&mut self, capacity: usize) {
        let scores: Vec<Vec<f32>> = (0..self.kept.len()).map(|head| self.scores(head)).collect();
        let scores: Vec<&[f32]> = scores.iter().map(Vec::as_slice).collect();
        let chosen = self.config.choose(&scores, capacity).unwrap();
        for (head, places) in chosen.iter().enumerate() {
            self.kept[head] = places.iter().map(|&place| self.kept[head][place]).collect();
            self.sums[head] = places.iter().map(|&place| self.sums[head][place]).collect();
        }
    }

    fn scores(&self, head: usize) -> Vec<f32> {
        let kept = &self.kept[head];
        let group = self.group();
        let scores: Vec<f64> = match self.config.score {
            EvictionScore::Sum => self.sums[head].clone(),
            EvictionScore::Mean => (kept.iter().zip(&self.sums[head]))
                .map(|(&at, sum)| sum / (group * (self.len - at)) as f64)
                .collect(),
            EvictionScore::KeyNorm => kept.iter().map(|&at| -self.host.norms[head][at]).collect(),
            score => {
                let window = match score {
                    EvictionScore::Votes { window, .. } => window.min(self.len),
                    _ => 1,
                };
                // Among the stored keys, those up to each of the last queries.
                let mut votes = vec![0.0; kept.len()];
                for query in self.len - window..self.len {
                    let keys: Vec<usize> = kept.iter().copied().filter(|&at| at <= query).collect();
                    for h in head * group..(head + 1) * group {
                        let p = self.host.attention(h, query, &keys);
                        (votes.iter_mut().zip(p)).for_each(|(vote, p)| *vote += p);
                    }
                }
                let count = (group * window) as f64;
                votes.into_iter().map(|vote| vote / count).collect()
            }
        };
        scores.into_iter().map(|score| score as f32).collect()
    }
}

/// Token by token; a prompt and then tokens; and pieces of several tokens.
fn chunkings() -> [Vec<usize>; 3] {
    let mut prompt = vec![20];
    prompt.extend([1; SEQ - 20]);
    [vec![1; SEQ], prompt, vec![6, 1, 1, 9, 1, 12, 1, 1, 5]]
}

/// Feeds two sequences in calls with different numbers of tokens.
pub fn calls_of_two(
    mha: &SparseMultiHeadAttention,
    x: &Tensor<3>,
    pool: &mut KvPool,
    calls: &[[usize; 2]],
) -> [SequenceId; 2] {
    let ids = [pool.join().unwrap(), pool.join().unwrap()];
    for counts in calls {
        call(mha, x, pool, &ids, counts);
    }
    ids
}

#[rstest]
fn one_layer_keeps_what_the_simulation_keeps(#[values(1, 2, 4)] kv_heads: usize) {
    let device = Device::flex();
    let x = random([1, SEQ, WIDTH], &device);
    let mha = attention(Pattern::causal(), kv_heads);
    let mha = randomise(mha.try_init(&device).unwrap());
    let host = Host::new(&mha, &x, kv_heads);
    for config in policies() {
        for calls in chunkings() {
            println!("{config:?} {calls:?}");
            let mut pool = KvPool::for_attention(&mha, &pool_config(1, config)).unwrap();
            let id = pool.join().unwrap();
            let mut simulation = Simulation::new(&host, config);
            for &count in &calls {
                call(&mha, &x, &mut pool, &[id], &[count]);
                simulation.call(count);
                if simulation.is_due() {
                    let capacity = config.layer_capacities(1, simulation.len).unwrap();
                    simulation.evict(capacity[0]);
                }
                assert_eq!(pool.retained_positions(id, 0).unwrap(), simulation.kept);
            }
        }
    }
}

pub const VOCAB: usize = 13;

pub fn model(device: &Device) -> SparseTransformer {
    let rope = BlockAttentionConfig::new().with_rope_theta(Some(100.0));
    let config = SparseTransformerConfig::new(16, 4, Factorization::from(Pattern::causal()))
        .with_vocab_size(VOCAB)
        .with_context(SEQ)
        .with_n_layers(3)
        .with_n_kv_heads(Some(2))
        .with_attention(Some(rope))
        .with_block_size(8);
    randomise(config.try_init(device).unwrap())
}

pub fn part(tokens: &Tensor<2, Int>, first: usize, count: usize) -> Tensor<2, Int> {
    tokens.clone().narrow(1, first, count)
}

/// Continues a sequence with tokens of a text, from its present length.
pub fn go_on(
    model: &SparseTransformer,
    tokens: &Tensor<2, Int>,
    pool: &mut KvPool,
    id: SequenceId,
    calls: &[usize],
) -> Vec<Tensor<3>> {
    let mut logits = Vec::new();
    for &count in calls {
        let part = part(tokens, pool.len(id).unwrap(), count);
        let steps = [KvStep::new(id, count)];
        logits.push(model.try_forward_pool(part, &steps, pool).unwrap());
        pool.verify().unwrap();
    }
    logits
}

#[test]
fn with_room_for_all_keys_nothing_changes() {
    let device = Device::flex();
    let model = model(&device);
    let tokens = tokens(1, SEQ, VOCAB, &device);
    let whole = model.try_forward(tokens.clone()).unwrap();
    let large = |config: EvictionConfig| {
        let mut config = config.with_slack(3);
        config.heavy += SEQ;
        config
    };
    for config in policies().into_iter().map(large) {
        for calls in chunkings() {
            let config = pool_config(1, config);
            let (mut pool, id) = joined(&model, &config);
            let logits = go_on(&model, &tokens, &mut pool, id, &calls);
            assert_close(Tensor::cat(logits, 1), whole.clone(), 1e-4);
        }
    }
}
