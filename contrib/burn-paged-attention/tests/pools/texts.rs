//! Texts that a model reads from a pool in pieces, with its results for the whole texts.

use std::ops::Range;

use burn_paged_attention::pool::{KvSnapshot, KvUsage};

use crate::prelude::*;

pub const VOCAB: usize = 11;
pub const CONTEXT: usize = 128;
/// Seven pages of 16.
pub const SEQ: usize = 103;

/// Makes a configuration of layers with four heads and rotary positions.
pub fn config(pattern: Pattern, n_layers: usize, kv_heads: usize) -> SparseTransformerConfig {
    SparseTransformerConfig::new(32, 4, Factorization::from(pattern))
        .with_vocab_size(VOCAB)
        .with_context(CONTEXT)
        .with_n_layers(n_layers)
        .with_block_size(16)
        .with_n_kv_heads(Some(kv_heads))
        .with_attention(Some(
            BlockAttentionConfig::new().with_rope_theta(Some(1000.0)),
        ))
}

/// Returns tokens of one of the texts.
pub fn part(tokens: &Tensor<2, Int>, entry: usize, range: Range<usize>) -> Tensor<2, Int> {
    tokens.clone().slice([entry..entry + 1, range])
}

/// Returns tokens as a tensor.
pub fn ids(tokens: &[u32], device: &Device) -> Tensor<2, Int> {
    let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    Tensor::<1, Int>::from_ints(tokens.as_slice(), device).unsqueeze()
}

/// Texts, and the logits of the whole model.
pub struct Texts {
    pub tokens: Tensor<2, Int>,
    pub whole: Tensor<3>,
}

impl Texts {
    pub fn new(model: &SparseTransformer, tokens: Tensor<2, Int>) -> Self {
        let whole = model.try_forward(tokens.clone()).unwrap();
        Self { tokens, whole }
    }

    /// Makes `count` texts.
    pub fn some(model: &SparseTransformer, count: usize, len: usize, device: &Device) -> Self {
        Self::new(model, tokens(count, len, VOCAB, device))
    }

    /// Feeds each sequence its next tokens, and compares the logits with those of the whole.
    pub fn feed(
        &self,
        model: &impl PagedDecoder,
        pool: &mut KvPool,
        ids: &[SequenceId],
        counts: &[usize],
    ) {
        let seq = counts.iter().copied().max().unwrap();
        let first: Vec<usize> = ids.iter().map(|&id| pool.len(id).unwrap()).collect();
        let rows = counts.iter().enumerate().map(|(entry, &count)| {
            let own = part(&self.tokens, entry, first[entry]..first[entry] + count);
            match seq - count {
                0 => own,
                rest => {
                    let rest = Tensor::zeros([1, rest], &self.tokens.device());
                    Tensor::cat(vec![own, rest], 1)
                }
            }
        });
        let rows = Tensor::cat(rows.collect(), 0);
        let steps: Vec<KvStep> = (ids.iter().zip(counts))
            .map(|(&id, &count)| KvStep::new(id, count))
            .collect();
        let logits = model.try_forward_pool(rows, &steps, pool).unwrap();
        pool.verify().unwrap();
        for (entry, &count) in counts.iter().enumerate() {
            let got = logits.clone().narrow(0, entry, 1).narrow(1, 0, count);
            let expected = self.whole.clone().narrow(0, entry, 1);
            assert_close(got, expected.narrow(1, first[entry], count), 2e-4);
        }
    }

    /// Feeds one sequence up to `to`, `count` tokens at a time.
    pub fn read(
        &self,
        model: &impl PagedDecoder,
        pool: &mut KvPool,
        id: SequenceId,
        to: usize,
        count: usize,
    ) {
        while pool.len(id).unwrap() < to {
            let count = count.min(to - pool.len(id).unwrap());
            self.feed(model, pool, &[id], &[count]);
        }
    }

    /// Reads two texts from a pool: prompts of unequal lengths, several tokens at once, then single ones.
    pub fn one_by_one(&self, model: &SparseTransformer, config: &KvPoolConfig) {
        let mut pool = model.new_pool(config).unwrap();
        let ids = [(); 2].map(|_| pool.join().unwrap());
        let calls = [[40, 13], [5, 30], [1, 2]].into_iter();
        for counts in calls.chain(std::iter::repeat_n([1, 1], SEQ - 46)) {
            self.feed(model, &mut pool, &ids, &counts);
        }
        assert_eq!(ids.map(|id| pool.len(id).unwrap()), [SEQ, SEQ - 1]);
    }
}

/// Checks that rolled back, copied, saved and reused pages leave no trace. A sequence that has read everything rolls back to `back` tokens. Returns
/// the memory of a sequence, and its snapshot.
pub fn as_if_nothing_had_happened(
    model: &SparseTransformer,
    config: &KvPoolConfig,
    back: usize,
    device: &Device,
) -> (KvUsage, KvSnapshot) {
    let of_first = tokens(1, SEQ, VOCAB, device);
    let of_other = (of_first.clone() * 3 + 4).remainder_scalar(VOCAB as i32);
    // Another text after token 57, in the middle of a page and of a stride.
    let both = vec![part(&of_first, 0, 0..57), part(&of_other, 0, 57..SEQ)];
    let [first, other, mixed] =
        [of_first, of_other, Tensor::cat(both, 1)].map(|tokens| Texts::new(model, tokens));
    let (mut pool, a) = joined(model, config);
    first.read(model, &mut pool, a, 70, 23);
    let b = pool.fork(a).unwrap();
    // Both continue in a shared page, one of them after a rollback.
    pool.truncate(b, 57).unwrap();
    first.read(model, &mut pool, a, 90, 1);
    mixed.read(model, &mut pool, b, SEQ, 1);
    let c = pool.fork(a).unwrap();
    first.read(model, &mut pool, c, SEQ, 3);
    first.read(model, &mut pool, a, SEQ, 1);
    let saved = serde_json::to_string(&pool.save(b).unwrap()).unwrap();
    let saved: KvSnapshot = serde_json::from_str(&saved).unwrap();
    pool.leave(b).unwrap();
    pool.leave(c).unwrap();
    // Pages that other sequences had.
    let d = pool.join().unwrap();
    other.read(model, &mut pool, d, SEQ, 1);
    pool.truncate(a, back).unwrap();
    let e = pool.load(&saved).unwrap();
    pool.truncate(e, 80).unwrap();
    mixed.read(model, &mut pool, e, SEQ, 1);
    first.read(model, &mut pool, a, SEQ, 4);
    let usage = pool.usage(e).unwrap();
    // Another pool, which has never held the keys, and pages of another size.
    for config in [config.clone(), config.clone().with_page_size(16)] {
        let mut pool = model.new_pool(&config).unwrap();
        let f = pool.load(&saved).unwrap();
        pool.truncate(f, 90).unwrap();
        mixed.read(model, &mut pool, f, SEQ, 1);
    }
    (usage, saved)
}

/// Known prefixes have their summaries too. Returns the number of known tokens of 90.
pub fn known_beginnings(model: &SparseTransformer, config: KvPoolConfig, device: &Device) -> usize {
    let texts = Texts::some(model, 1, SEQ, device);
    let pool = &mut model.new_pool(&config.with_prefix_reuse()).unwrap();
    let text: Vec<u32> = texts.tokens.to_data().iter::<u32>().collect();
    let a = pool.join().unwrap();
    texts.read(model, pool, a, 90, 90);
    pool.remember(a, &text[..90]).unwrap();
    pool.leave(a).unwrap();
    let (b, known) = pool.join_with_prefix(&text).unwrap();
    texts.read(model, pool, b, SEQ, 1);
    known
}

/// Returns the logits of a text that is read token by token, and the memory of its sequence.
pub fn single_tokens(
    model: &SparseTransformer,
    config: &KvPoolConfig,
    tokens: &Tensor<2, Int>,
) -> (Tensor<3>, KvUsage) {
    let (mut pool, id) = joined(model, config);
    let rows = (0..tokens.dims()[1]).map(|at| {
        let token = part(tokens, 0, at..at + 1);
        let logits = model.try_forward_pool(token, &[KvStep::new(id, 1)], &mut pool);
        pool.verify().unwrap();
        logits.unwrap()
    });
    let rows = Tensor::cat(rows.collect(), 1);
    (rows, pool.usage(id).unwrap())
}
