//! MiniMax sparse attention: the layer, the loss of its index branch, and decoding.

use burn_sparse_transformer::msa::MsaHeadsConfig;

use crate::common::*;
use crate::decoding::assert_layer_decodes;
use crate::whole_layers::model;

/// Four query heads; an index of width 6, of which four channels are rotated.
fn config(keep: usize, kv_heads: usize) -> SparseMultiHeadAttentionConfig {
    let heads = MsaHeadsConfig::new()
        .with_block(8)
        .with_keep(keep)
        .with_index_dim(6)
        .with_rope_dim(Some(4));
    SparseMultiHeadAttentionConfig::new(16, 4, Pattern::causal())
        .with_n_kv_heads(Some(kv_heads))
        .with_content(Some(ContentAttention::Msa(heads)))
        .with_rope(Some(RotaryEncodingConfig::new(64, 4)))
        .with_block_size(8)
}

fn layer(keep: usize, kv_heads: usize, device: &Device) -> SparseMultiHeadAttention {
    randomise(config(keep, kv_heads).init(device))
}

/// With capacity for all blocks it equals dense causal attention, like in the stages before selection; with fewer it does not.
#[test]
fn with_all_blocks_it_is_dense() {
    let device = Device::flex();
    let x = random([2, 45, 16], &device);
    let layer = layer(2, 2, &device);
    let all = config(6, 2).init(&device);
    let all = all.load_record(layer.clone().into_record());
    let dense = layer.clone().with_dsa_stage(DsaStage::Dense).unwrap();
    let dense = attend(&dense, x.clone()).unwrap();
    assert_close(attend(&all, x.clone()).unwrap(), dense.clone(), 1e-5);
    let difference = apart(attend(&layer, x).unwrap(), dense);
    assert!(difference > 1e-3, "{difference}");
}

/// With groups of four, two and one heads.
#[test]
fn decoding_gives_what_the_whole_gives() {
    let device = Device::flex();
    for kv_heads in [1, 2, 4] {
        let x = random([2, 45, 16], &device);
        assert_layer_decodes(&layer(3, kv_heads, &device), &x);
    }
}

#[cfg(feature = "autodiff")]
#[test]
fn each_loss_reaches_its_own_parameters() {
    let device = Device::flex().autodiff();
    crate::whole_layers::assert_own_losses(&layer(2, 2, &device), 40, &device);
}

#[test]
fn operations_are_of_two_blocks() {
    let sparse = model("msa:8,2,8", 48, &Device::flex());
    // One block, and two from the second on.
    let pairs = 36 + (8 * 8 * 5) + 5 * 36;
    let scores = 2 * 2 * 8 * (48 * 49 / 2);
    let flops = sparse.attention_flops(48).unwrap();
    assert_eq!(flops, 2 * (2 * 4 * pairs * (4 + 4) + scores));
}

#[test]
fn configurations_of_none_say_why() {
    let with = |heads| {
        SparseMultiHeadAttentionConfig::new(16, 4, Pattern::causal())
            .with_content(Some(ContentAttention::Msa(heads)))
            .try_init(&Device::flex())
    };
    let heads = || MsaHeadsConfig::new().with_block(8).with_index_dim(6);
    refused! {
        with(heads().with_block(12)) => "…block must be 8, 16…";
        with(heads().with_keep(0)) => "…keep must be at least 1…";
        with(heads().with_index_dim(0)) => "index_dim must be at least 1, got 0";
        with(heads().with_rope_dim(Some(8))) => "rope_dim must be an even number, at most 6, the width of an index head, got 8";
    }
}
