//! Graph capture of decoding: steps of a model on a pool.

use burn_paged_attention::pool::{
    EvictionBudget, EvictionConfig, EvictionScore, GraphDecoder, KvDtype, KvPool, KvPoolConfig,
    KvStep, PagedDecoder, ScoreSmoothing, SequenceId,
};
use burn_sparse_transformer::{
    BlockAttentionConfig, Factorization, Pattern, SparseTransformer, SparseTransformerConfig,
};

use crate::prelude::*;

const VOCAB: usize = 11;
const CONTEXT: usize = 96;

fn model(pattern: Pattern, device: &Device) -> SparseTransformer {
    model_with(pattern, &[], device)
}

/// Makes a model with selections, without sinks.
fn model_with(pattern: Pattern, selections: &[&str], device: &Device) -> SparseTransformer {
    let config = config(pattern, selections, device);
    config.try_init(device).unwrap()
}

fn config(pattern: Pattern, selections: &[&str], device: &Device) -> SparseTransformerConfig {
    device.seed(7);
    let chosen = selections.iter().map(|text| text.parse().unwrap());
    let attention = BlockAttentionConfig::new().with_rope_theta(Some(1000.0));
    SparseTransformerConfig::new(32, 4, Factorization::from(pattern))
        .with_vocab_size(VOCAB)
        .with_context(CONTEXT)
        .with_n_layers(2)
        .with_block_size(8)
        .with_n_kv_heads(Some(2))
        .with_init_scale(1.0)
        .with_attention(Some(attention.with_sinks(selections.is_empty())))
        .with_selections((!selections.is_empty()).then(|| chosen.collect()))
}

/// Equal bits as launch by launch: while a batch continues, when it changes, after a fork, a rollback and several tokens at once.
pub fn replayed_decoding_equals_plain_decoding(devices: &[Device]) {
    for device in devices {
        // An element that rounds the other way in eight bits differs by half a hundredth.
        let rows = [
            (Pattern::fixed(16, 4), KvDtype::Model, 2e-5),
            (Pattern::local(20), KvDtype::Model, 2e-5),
            (Pattern::causal(), KvDtype::Model, 2e-5),
            (Pattern::fixed(16, 4), KvDtype::Int8, 1e-2),
        ];
        for (pattern, dtype, tolerance) in some_of(rows, 2) {
            let what = format!("{pattern}, {dtype:?} on {device:?}");
            let model = model(pattern, device);
            replayed_equals_plain(&what, model, dtype, tolerance, device);
        }
    }
}

/// With page selection; 96 tokens have six pages.
pub fn replayed_decoding_chooses_pages(devices: &[Device]) {
    let model = |text: &str, device: &Device| model_with(Pattern::causal(), &[text], device);
    replayed_equals_plain_of_either_dtype(&["quest:16,48,1"], 2, model, devices);
}

/// With an indexer that selects 12 single keys, or three blocks of 16.
pub fn replayed_decoding_chooses_keys(devices: &[Device]) {
    let texts = ["dsa:12,3,2,8", "msa:16,3,8"];
    replayed_equals_plain_of_either_dtype(&texts, 2, model_with_content, devices);
}

/// With three branches: one of six blocks of 16 is selected, and a compressed block of 8 ends every 4 tokens of each sequence.
pub fn replayed_decoding_sees_three_branches(devices: &[Device]) {
    let texts = ["nsa:8,4,16,3,20", "nsa:8,4,16,4,20,mlp,shared"];
    replayed_equals_plain_of_either_dtype(&texts, 4, model_with_content, devices);
}

fn model_with_content(content: &str, device: &Device) -> SparseTransformer {
    let attention = BlockAttentionConfig::new().with_rope_theta(Some(1000.0));
    config(Pattern::causal(), &[], device)
        .with_attention(Some(attention))
        .with_content(Some(content.parse().unwrap()))
        .try_init(device)
        .unwrap()
}

/// Compares replays with plain decoding for `texts`; in a sharded run for one in `one_in`.
fn replayed_equals_plain_of_either_dtype(
    texts: &[&str],
    one_in: usize,
    model: impl Fn(&str, &Device) -> SparseTransformer,
    devices: &[Device],
) {
    for device in devices {
        let rows = texts.iter().flat_map(|text| {
            [(KvDtype::Model, 2e-5), (KvDtype::Int8, 1e-2)].map(|of_pool| (text, of_pool))
        });
        for (text, (dtype, tolerance)) in some_of(rows, one_in) {
            let what = format!("{text}, {dtype:?} on {device:?}");
            replayed_equals_plain(&what, model(text, device), dtype, tolerance, device);
        }
    }
}

fn replayed_equals_plain(
    what: &str,
    model: SparseTransformer,
    dtype: KvDtype,
    tolerance: f32,
    device: &Device,
) {
    let config = KvPoolConfig::new(3, CONTEXT).with_page_size(16);
    let config = config.with_dtype(dtype);
    let mut pair = Pair::new(model, &config, tolerance, device);
    let [a, b] = [(); 2].map(|()| pair.join());
    pair.step(&[(a, 5)], 0);
    pair.step(&[(b, 19)], 1);
    // Crosses page boundaries, with different lengths.
    for seed in 0..20 {
        pair.step(&[(a, 1), (b, 1)], seed);
    }
    let c = pair.both(|pool| pool.fork(a).unwrap());
    for seed in 0..6 {
        pair.step(&[c, b, a].map(|id| (id, 1)), seed);
    }
    pair.both(|pool| pool.leave(b).unwrap());
    pair.step(&[(a, 3)], 4);
    for seed in 0..8 {
        pair.step(&[(c, 1)], seed);
    }
    pair.end(what);
}

/// A decoder that replays if possible, and a pool without capture.
struct Pair<'a> {
    decoder: GraphDecoder<SparseTransformer>,
    plain: KvPool,
    tolerance: f32,
    device: &'a Device,
    recorded: usize,
}

impl<'a> Pair<'a> {
    fn new(
        model: SparseTransformer,
        config: &KvPoolConfig,
        tolerance: f32,
        device: &'a Device,
    ) -> Self {
        let [plain, pool] = [(); 2].map(|()| model.new_pool(config).unwrap());
        Self {
            decoder: GraphDecoder::new(model, pool).unwrap(),
            plain,
            tolerance,
            device,
            recorded: 0,
        }
    }

    /// Makes the same call on both pools, and compares the results.
    fn both<T: PartialEq + std::fmt::Debug>(&mut self, mut f: impl FnMut(&mut KvPool) -> T) -> T {
        let plain = f(&mut self.plain);
        assert_eq!(f(&mut self.decoder.pool_mut()), plain);
        plain
    }

    fn join(&mut self) -> SequenceId {
        self.both(|pool| pool.join().unwrap())
    }

    /// Feeds these numbers of tokens to sequences, and compares the logits after each.
    fn step(&mut self, counts: &[(SequenceId, usize)], seed: usize) {
        let steps = counts.iter().map(|&(id, count)| KvStep::new(id, count));
        let steps: Vec<KvStep> = steps.collect();
        let seq = counts.iter().map(|(_, count)| *count).max().unwrap();
        let shape = [steps.len(), seq];
        let tokens = (0..steps.len() * seq).map(|i| ((i * 5 + seed * 3) % VOCAB) as u32);
        let tokens: Vec<u32> = tokens.collect();
        let data: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        let data = Tensor::<2, Int>::from_data(TensorData::new(data, shape), self.device);
        let model = self.decoder.model();
        let expected = model
            .try_forward_pool(data, &steps, &mut self.plain)
            .unwrap();
        let got = self.decoder.all_logits(&tokens, &steps).unwrap();
        for (row, (_, count)) in counts.iter().enumerate() {
            let of = |x: &Tensor<3>| x.clone().narrow(0, row, 1).narrow(1, 0, *count).into_data();
            let tolerance = burn::tensor::Tolerance::absolute(self.tolerance);
            of(&got).assert_approx_eq::<f32>(&of(&expected), tolerance);
        }
        let decoder = &self.decoder;
        self.recorded += usize::from(decoder.is_recorded());
        assert!(!decoder.is_recorded() || decoder.fallback_reason().is_none());
    }

    fn end(self, what: &str) {
        self.decoder.pool().verify().unwrap();
        for id in self.plain.sequences() {
            assert_eq!(self.decoder.pool().len(id), self.plain.len(id), "{what}");
        }
        eprintln!("{what}: {} steps of a recording", self.recorded);
    }
}

/// With eviction, for every policy: both pools retain the same keys, of sequences that join, fork and leave while others continue.
pub fn replayed_decoding_evicts(devices: &[Device]) {
    let policies = [
        EvictionConfig::h2o(8, 4),
        EvictionConfig::h2o_mean(8, 4),
        EvictionConfig::tova(12),
        EvictionConfig::snapkv_with(12, 5, 3, ScoreSmoothing::Average),
        EvictionConfig::key_norm(12),
        EvictionConfig::combined(EvictionScore::Sum, 2, 4, 6),
        EvictionConfig::h2o(8, 4).with_budget(EvictionBudget::Adaptive { alpha: 0.2 }),
        EvictionConfig::tova(12).with_budget(EvictionBudget::Pyramid { beta: 4.0 }),
    ];
    for device in devices {
        for (policy, drafts) in some_of(policies.into_iter().zip([0, 2].into_iter().cycle()), 3) {
            let mut policy = policy.with_slack(5);
            policy.recent = policy.recent.max(drafts);
            let what = format!("{policy:?}, {drafts} drafts on {device:?}");
            let config = KvPoolConfig::new(2, CONTEXT)
                .with_page_size(16)
                .with_chunk(19)
                .with_eviction(policy)
                .with_rollback(drafts);
            let model = model(Pattern::causal(), device);
            let mut pair = Pair::new(model, &config, 2e-5, device);
            let [a, b] = [(); 2].map(|()| pair.join());
            pair.step(&[(a, 5)], 0);
            pair.step(&[(b, 19)], 1);
            for seed in 0..14 {
                pair.step(&[(a, 1 + drafts), (b, 1)], seed);
                if drafts > 0 {
                    let back = pair.plain.len(a).unwrap() - seed % (drafts + 1);
                    pair.both(|pool| pool.truncate(a, back).unwrap());
                }
            }
            // More sequences than there are seats.
            let c = pair.both(|pool| pool.fork(a).unwrap());
            for seed in 0..6 {
                pair.step(&[c, b, a].map(|id| (id, 1)), seed);
            }
            pair.both(|pool| pool.leave(b).unwrap());
            for seed in 0..8 {
                pair.step(&[(c, 1)], seed);
            }
            for layer in 0..2 {
                pair.both(|pool| [a, c].map(|id| pool.retained_positions(id, layer).unwrap()));
            }
            pair.end(&what);
        }
    }
}

/// Several tokens at once, fewer for some sequences, of which some are rolled back.
pub fn replayed_decoding_checks_drafts(devices: &[Device]) {
    for device in devices {
        let patterns = [Pattern::causal(), Pattern::local(20), Pattern::fixed(16, 4)];
        for pattern in some_of(patterns, 2) {
            let config = KvPoolConfig::new(2, CONTEXT)
                .with_page_size(16)
                .with_chunk(4)
                .with_rollback(3);
            let what = format!("{pattern}, drafts on {device:?}");
            let mut pair = Pair::new(model(pattern, device), &config, 2e-5, device);
            let [a, b] = [(); 2].map(|()| pair.join());
            pair.step(&[(a, 5)], 0);
            pair.step(&[(b, 19)], 1);
            for seed in 0..20 {
                pair.step(&[(a, 4), (b, 1 + seed % 4)], seed);
                let [to_a, to_b] = [(a, 1 + seed % 3), (b, seed % 4 / 2)].map(|(id, back)| {
                    let to = pair.plain.len(id).unwrap() - back;
                    pair.both(|pool| pool.truncate(id, to).unwrap());
                    to
                });
                assert!(to_a < CONTEXT && to_b < CONTEXT);
            }
            for seed in 0..6 {
                pair.step(&[(a, 1), (b, 1)], seed);
            }
            pair.end(&what);
        }
    }
}

/// Forks whose common first pages are read once for all of them.
pub fn replayed_decoding_shares_prefixes(devices: &[Device]) {
    for device in devices {
        let config = KvPoolConfig::new(3, CONTEXT)
            .with_page_size(16)
            .with_cascade(16)
            .with_rollback(2);
        let model = model(Pattern::causal(), device);
        let mut pair = Pair::new(model, &config, 2e-5, device);
        let a = pair.join();
        pair.step(&[(a, 37)], 0);
        let [b, c] = [(); 2].map(|()| pair.both(|pool| pool.fork(a).unwrap()));
        for seed in 0..8 {
            pair.step(&[a, b, c].map(|id| (id, 1)), seed);
        }
        for seed in 0..6 {
            pair.step(&[(a, 2), (b, 1), (c, 3)], seed);
        }
        pair.end(&format!("shared pages on {device:?}"));
    }
}

/// Steps that cannot be captured run all the same, and the reason is reported.
pub fn replayed_decoding_says_what_runs_one_by_one(devices: &[Device]) {
    for device in devices {
        let config = KvPoolConfig::new(1, CONTEXT)
            .with_page_size(16)
            .with_chunk(9);
        let evicting = config.clone().with_eviction(EvictionConfig::h2o(8, 4));
        let evicting = evicting.with_dtype(KvDtype::Int8);
        let (strided, causal) = (
            model(Pattern::strided(4), device),
            model(Pattern::causal(), device),
        );
        let chooses = model_with(Pattern::causal(), &["quest:16,48,1"], device);
        for (model, config, reason) in [
            (strided, &config, "the keys of a query are gathered"),
            (chooses, &config, "several tokens of a sequence choose keys"),
            (
                causal,
                &evicting,
                "attention to keys in eight bits is summed up",
            ),
        ] {
            let mut pair = Pair::new(model, config, 1e-2, device);
            let id = pair.join();
            for (seed, count) in [9, 2, 2].into_iter().enumerate() {
                pair.step(&[(id, count)], seed);
            }
            assert_eq!(pair.decoder.fallback_reason(), Some(reason));
            pair.end(reason);
        }
    }
}

/// A failed step changes nothing, and the next one succeeds.
pub fn replayed_decoding_survives_errors(devices: &[Device]) {
    for device in devices {
        let model = model(Pattern::causal(), device);
        let pool = model.new_pool(&KvPoolConfig::new(1, CONTEXT)).unwrap();
        let mut decoder = GraphDecoder::new(model, pool).unwrap();
        let id = decoder.pool_mut().join().unwrap();
        let one = [KvStep::new(id, 1)];
        for token in 0..CONTEXT as u32 {
            refused! { decoder.next_logits(&[1, 2, 3], &[one[0]; 2]) => "tokens must be rows for 2 sequences, got 3"; }
            decoder.next_logits(&[token % 11], &one).unwrap();
        }
        let full = decoder.next_logits(&[1], &one).unwrap_err().to_string();
        assert!(full.contains("context"), "{full}");
        assert_eq!(decoder.pool().len(id).unwrap(), CONTEXT);
        decoder.pool_mut().truncate(id, CONTEXT - 1).unwrap();
        decoder.next_logits(&[1], &one).unwrap();
    }
}

/// On devices that report reserved memory, sequences take no more than earlier ones did at the same length: buffers are reused, whether a step has
/// one token, or three of which two are rolled back. Longer sequences gather more, in larger buffers, so equal lengths are compared.
pub fn decoding_reserves_nothing_more(devices: &[Device]) {
    const STEPS: usize = CONTEXT / 2;
    for device in devices {
        let reserved = || {
            let usage = device.memory_pool_usage();
            usage.map_or(0, |usage| usage.bytes_reserved)
        };
        let model = model(Pattern::fixed(16, 4), device);
        let config = KvPoolConfig::new(2, CONTEXT)
            .with_page_size(16)
            .with_chunk(3)
            .with_rollback(2);
        let mut pool = model.new_pool(&config).unwrap();
        let mut most = [0; 2];
        for most in &mut most {
            let ids = [(); 2].map(|()| pool.join().unwrap());
            for seed in 0..STEPS {
                let count = if seed % 3 == 2 { 3 } else { 1 };
                let tokens = (0..2 * count).map(|i| ((i * 5 + seed * 3) % VOCAB) as i32);
                let tokens = TensorData::new(tokens.collect::<Vec<i32>>(), [2, count]);
                let tokens = Tensor::<2, Int>::from_data(tokens, device);
                let steps = ids.map(|id| KvStep::new(id, count));
                let logits = model.try_forward_pool(tokens, &steps, &mut pool).unwrap();
                assert!(!logits.sum().into_scalar::<f32>().is_nan());
                for id in ids {
                    let len = pool.len(id).unwrap();
                    pool.truncate(id, len - (count - 1)).unwrap();
                }
                *most = reserved().max(*most);
            }
            for id in ids {
                assert_eq!(pool.len(id).unwrap(), STEPS);
                pool.leave(id).unwrap();
            }
        }
        assert!(most[1] <= most[0], "{device:?}: {most:?} bytes");
    }
}
