//! A model outside of the layers' crate, a small Llama, on pools.

use burn::nn::{Embedding, EmbeddingConfig, RmsNorm, RmsNormConfig, SwiGlu, SwiGluConfig};
use burn_paged_attention::pool::GraphDecoder;
use burn_sparse_transformer::decoder::{Attend, Decoder, Positions};
use burn_sparse_transformer::llama::LlamaConfig;

use crate::prelude::*;
use crate::texts::{Texts, ids};

const WIDTH: usize = 32;
const LAYERS: usize = 3;
const VOCAB: usize = 23;
const SEQ: usize = 40;

#[derive(Module, Debug)]
struct Layer {
    attn_norm: RmsNorm,
    attn: SparseMultiHeadAttention,
    ffn_norm: RmsNorm,
    gate_up: SwiGlu,
    down: Linear,
}

#[derive(Module, Debug)]
struct Llama {
    embed: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    /// Index of a layer that fails.
    broken: Option<usize>,
}

impl Llama {
    fn new(pattern: &str, selection: Option<&str>, device: &Device) -> Self {
        let norm = || RmsNormConfig::new(WIDTH).init(device);
        let attention = SparseMultiHeadAttentionConfig::new(WIDTH, 4, pattern.parse().unwrap())
            .with_block_size(8)
            .with_n_kv_heads(Some(2))
            .with_rope(Some(RotaryEncodingConfig::new(2 * SEQ, WIDTH / 4)))
            .with_selection(selection.map(|text| text.parse().unwrap()));
        let layer = || Layer {
            attn_norm: norm(),
            attn: attention.init(device),
            ffn_norm: norm(),
            gate_up: SwiGluConfig::new(WIDTH, 2 * WIDTH).init(device),
            down: LinearConfig::new(2 * WIDTH, WIDTH).init(device),
        };
        randomise(Self {
            embed: EmbeddingConfig::new(VOCAB, WIDTH).init(device),
            layers: (0..LAYERS).map(|_| layer()).collect(),
            norm: norm(),
            broken: None,
        })
    }

    fn dense(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let attend = &mut |_, attn: &SparseMultiHeadAttention, x| attn.forward_heads(x);
        let hidden = self.hidden(tokens, &Positions::From(0), attend).unwrap();
        self.logits(hidden).unwrap()
    }
}

impl Decoder for Llama {
    fn attentions(&self) -> Vec<&SparseMultiHeadAttention> {
        self.layers.iter().map(|layer| &layer.attn).collect()
    }

    fn hidden(
        &self,
        tokens: Tensor<2, Int>,
        _: &Positions,
        attend: &mut Attend,
    ) -> Result<Tensor<3>, TransformerError> {
        let mut x = self.embed.forward(tokens);
        for (at, layer) in self.layers.iter().enumerate() {
            if self.broken == Some(at) {
                return Err(TransformerError::argument("layer", "whole", "a broken one"));
            }
            let heads = attend(at, &layer.attn, layer.attn_norm.forward(x.clone()))?;
            x = x + layer.attn.output_projection(heads)?;
            let inner = layer.gate_up.forward(layer.ffn_norm.forward(x.clone()));
            x = x + layer.down.forward(inner);
        }
        Ok(self.norm.forward(x))
    }

    fn logits(&self, hidden: Tensor<3>) -> Result<Tensor<3>, TransformerError> {
        Ok(hidden.matmul(self.embed.weight.val().transpose().unsqueeze()))
    }

    fn vocab_size(&self) -> usize {
        VOCAB
    }
}

#[test]
fn rows_from_caches_and_pools_are_those_of_the_whole() {
    for device in devices() {
        let _guard = seed(&device, 5);
        for (pattern, selection) in [
            ("causal", None),
            ("local:9", None),
            ("causal", Some("quest:16,48,share=mean")),
        ] {
            let model = Llama::new(pattern, selection, &device);
            let tokens = tokens(1, SEQ, VOCAB, &device);
            let whole = model.dense(tokens.clone());
            let texts = Texts { tokens, whole };
            let mut caches = vec![SparseMhaCache::new(); LAYERS];
            let (mut pool, id) = joined(&model, &KvPoolConfig::new(1, SEQ).with_page_size(16));
            for (first, count) in [(0, 19), (19, 1), (20, 3), (23, 1), (24, 16)] {
                let part = texts.tokens.clone().narrow(1, first, count);
                let attend = &mut |layer: usize, attn: &SparseMultiHeadAttention, x| {
                    attn.forward_heads_cache(x, &mut caches[layer])
                };
                let hidden = model.hidden(part, &Positions::From(first), attend);
                let cached = model.logits(hidden.unwrap()).unwrap();
                assert_close(cached, texts.whole.clone().narrow(1, first, count), 2e-4);
                texts.feed(&model, &mut pool, &[id], &[count]);
            }
        }
    }
}

/// The crate's own Llama, whose heads are wider than their share of the stream.
#[test]
fn the_llama_of_the_layers_decodes_from_pages() {
    let (device, _guard) = seeded(Device::flex(), 9);
    let config = LlamaConfig::new(WIDTH, 4)
        .with_n_kv_heads(Some(2))
        .with_head_dim(Some(12))
        .with_qk_norm(true)
        .with_vocab_size(VOCAB)
        .with_n_layers(2)
        .with_context(SEQ)
        .with_block_size(8);
    let model = randomise(config.init(&device));
    let tokens = tokens(1, SEQ, VOCAB, &device);
    let whole = model.forward(tokens.clone());
    let texts = Texts { tokens, whole };
    let (mut pool, id) = joined(&model, &KvPoolConfig::new(1, SEQ).with_page_size(16));
    for count in [19, 1, 3, 17] {
        texts.feed(&model, &mut pool, &[id], &[count]);
    }
}

#[test]
fn recorded_steps_are_those_of_the_pool() {
    let (device, _guard) = seeded(Device::flex(), 6);
    let model = Llama::new("causal", None, &device);
    let config = KvPoolConfig::new(1, SEQ).with_page_size(16);
    let [mut plain, pool] = [(); 2].map(|()| model.new_pool(&config).unwrap());
    let id = plain.join().unwrap();
    let mut decoder = GraphDecoder::new(model.clone(), pool).unwrap();
    let same = decoder.pool_mut().join().unwrap();
    for token in [[1, 2, 3].as_slice(), &[4], &[5], &[6], &[7], &[8]] {
        let ids = ids(token, &device);
        let steps = |id| [KvStep::new(id, token.len())];
        let expected = model.next_logits(ids, &steps(id), &mut plain).unwrap();
        let got = decoder.next_logits(token, &steps(same)).unwrap();
        got.into_data().assert_eq(&expected.into_data(), true);
    }
}

#[test]
fn texts_are_what_the_whole_would_write() {
    let (device, _guard) = seeded(Device::flex(), 7);
    let model = Llama::new("causal", None, &device);
    let prompts = [vec![3, 1, 4, 1, 5], vec![9, 2]];
    let greedy = GenerateOptions::default()
        .max_new(12)
        .sampling(Sampling::default().temperature(0.0));
    let write = |options| -> Vec<Vec<u32>> {
        let go_on = &mut |_| ControlFlow::Continue(());
        let texts = generate(&model, &prompts, &options, go_on).unwrap();
        texts.into_iter().map(|text| text.tokens).collect()
    };
    let texts = write(greedy.clone());
    for (prompt, text) in prompts.iter().zip(&texts) {
        let mut all = prompt.clone();
        for &token in text {
            let last = model.dense(ids(&all, &device)).narrow(1, all.len() - 1, 1);
            let best = last.argmax(2).into_data().iter::<i64>().next();
            assert_eq!(best, Some(i64::from(token)));
            all.push(token);
        }
    }
    assert_eq!(write(greedy.clone().drafts(PromptLookup::new(4))), texts);
    for options in [
        greedy.clone().kv_dtype(KvDtype::Int8),
        greedy.eviction(EvictionConfig::h2o(4, 4)),
    ] {
        assert!(write(options).iter().all(|text| text.len() == 12));
    }
}

/// If a layer fails, the work of earlier layers is undone.
#[test]
fn a_step_is_of_all_layers_or_of_none() {
    let (device, _guard) = seeded(Device::flex(), 8);
    let model = Llama::new("causal", None, &device);
    let tokens = tokens(1, 8, VOCAB, &device);
    let whole = model.dense(tokens.clone());
    let texts = Texts { tokens, whole };
    let (mut pool, id) = joined(&model, &KvPoolConfig::new(1, SEQ).with_page_size(16));
    let part = |first| texts.tokens.clone().narrow(1, first, 4);
    let steps = [KvStep::new(id, 4)];
    let broken = Llama {
        broken: Some(2),
        ..model.clone()
    };
    for first in [0, 4] {
        refused! { broken.try_forward_pool(part(first), &steps, &mut pool) => "layer must be whole, got a broken one"; }
        assert_eq!(pool.len(id).unwrap(), first);
        pool.verify().unwrap();
        texts.feed(&model, &mut pool, &[id], &[4]);
    }
}

#[test]
fn choices_that_later_tokens_take_part_in_are_refused() {
    let device = Device::flex();
    let pool = |config: SparseMultiHeadAttentionConfig| {
        let mha = config.with_block_size(8).init(&device);
        KvPool::for_attention(&mha, &KvPoolConfig::new(1, 32))
    };
    let config = |pattern| SparseMultiHeadAttentionConfig::new(32, 4, pattern);
    let selected = config(Pattern::causal()).with_selection(Some("topk:8,2".parse().unwrap()));
    let routing = config(Pattern::local(5)).with_content(Some("routing:8,6".parse().unwrap()));
    refused! {
        pool(selected) => "selection must be prefix stable with a cache…";
        pool(routing.with_local_heads(Some(1))) => "content must be none with…";
    }
}
