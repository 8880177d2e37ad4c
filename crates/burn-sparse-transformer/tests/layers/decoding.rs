//! Token by token from a cache is what all rows at once are, whatever the pattern.

use burn::nn::RotaryEncodingConfig;
use burn::tensor::{Device, Tensor};
use burn_sparse_transformer::{
    Pattern, SparseMhaCache, SparseMhaInput, SparseMultiHeadAttentionConfig,
};

use crate::common::{assert_close, random, randomise};

/// Not a multiple of the block size.
const SEQ: usize = 21;

/// Every kind of pattern, those that see later positions made causal; and what combines them.
const PATTERNS: &[&str] = &[
    "causal",
    "dense & causal",
    "local:5",
    "strided:4",
    "merged-strided:4",
    "fixed:8,2",
    "fixed:8,2,2",
    "prefix:5 & causal",
    "streaming:4,3",
    "window:6 & causal",
    "window:3,2 & causal",
    "chunked:6,1,0 & causal",
    "global:2,9 & causal",
    "global-keys:2,9 & causal",
    "longformer:3,1,2 & causal",
    "bigbird:8,3,1,7 & causal",
    "random-blocks:8,3,1,7 & causal",
    "deepspeed-fixed:8,2,2 & causal",
    "deepspeed-variable:24,8,4 & causal",
    "vertical:1,6",
    "slash:0,3,8",
    "documents:0,9 & causal",
    "packed:0,9(fixed:4,1)",
    "tree:2 & causal",
    "local:3 + strided:5",
    "local:3 / strided:5",
];

#[test]
fn rows_from_a_cache_are_those_of_the_whole_for_every_pattern() {
    for form in Pattern::NOTATION {
        let name = form.split([':', '[']).next().unwrap();
        let known = PATTERNS.iter().any(|text| text.starts_with(name));
        assert!(known, "{form} is missing");
    }
    let device = Device::flex();
    let x = random([2, SEQ, 16], &device);
    for text in PATTERNS {
        let pattern: Pattern = text.parse().unwrap();
        assert!(pattern.is_causal(), "{text}");
        let mha = SparseMultiHeadAttentionConfig::new(16, 2, pattern)
            .with_block_size(8)
            .with_n_kv_heads(Some(1))
            .with_rope(Some(RotaryEncodingConfig::new(SEQ, 8)));
        let mha = randomise(mha.init(&device).unwrap());
        let whole = mha.forward(SparseMhaInput::self_attn(x.clone())).unwrap();
        let mut cache = SparseMhaCache::new();
        let rows = (0..SEQ).map(|token| {
            let token = SparseMhaInput::self_attn(x.clone().narrow(1, token, 1));
            mha.forward_cache(token, &mut cache).unwrap().context
        });
        let rows = Tensor::cat(rows.collect(), 1);
        println!("{text}");
        assert_close(rows, whole.context, 1e-5);
    }
}
