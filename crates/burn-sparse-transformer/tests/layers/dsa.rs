//! DeepSeek sparse attention: the layer, what its indexer learns by, and decoding.

use burn::nn::RotaryEncodingConfig;
use burn::tensor::activation::softmax;
use burn::tensor::{Device, Int, Tensor};
use burn_sparse_transformer::{DsaAttention, DsaAttentionConfig, DsaCache};

use crate::common::{assert_close, random, randomise};

/// Four heads of queries on two of keys; three index heads of width 6, of which four channels are rotated.
fn config(keep: usize) -> DsaAttentionConfig {
    DsaAttentionConfig::new(16, 4)
        .with_n_kv_heads(Some(2))
        .with_keep(keep)
        .with_index_heads(3)
        .with_index_dim(6)
        .with_rope(Some(RotaryEncodingConfig::new(64, 4)))
        .with_index_rope(Some(RotaryEncodingConfig::new(64, 4)))
}

fn layer(keep: usize, near: usize, device: &Device) -> DsaAttention {
    randomise(config(keep).with_near(near).init(device).unwrap())
}

/// With room for all keys it is dense causal attention, whatever the indexer.
#[test]
fn with_all_keys_it_is_dense() {
    let device = Device::flex();
    let layer = layer(50, 0, &device);
    let x = random([2, 21, 16], &device);
    let got = layer.forward(x.clone()).unwrap();
    let heads = |part: Tensor<3>, heads: usize| part.reshape([2, 21, heads, 4]).swap_dims(1, 2);
    let rope = layer.rope.as_ref().unwrap();
    let q = rope.forward(heads(layer.query.forward(x.clone()), 4));
    let twice = |x: Tensor<4>| {
        let x = x.reshape([2, 2, 1, 21, 4]).expand([2, 2, 2, 21, 4]);
        x.reshape([2, 4, 21, 4])
    };
    let k = twice(rope.forward(heads(layer.key.forward(x.clone()), 2)));
    let v = twice(heads(layer.value.forward(x), 2));
    let scores = q.matmul(k.swap_dims(2, 3)) / 2.0;
    let rows = Tensor::<1, Int>::arange(0..21, &device);
    let ahead = rows.clone().reshape([1, 21]).expand([21, 21]);
    let ahead = ahead.greater(rows.reshape([21, 1]).expand([21, 21]));
    let ahead = ahead.reshape([1, 1, 21, 21]).expand([2, 4, 21, 21]);
    let weights = softmax(scores.mask_fill(ahead, -1e30), 3);
    let seen = weights.matmul(v).swap_dims(1, 2).reshape([2, 21, 16]);
    assert_close(got, layer.output.forward(seen), 1e-5);
}

/// Token by token, and in pieces, with what came before in the cache.
#[test]
fn decoding_gives_what_the_whole_gives() {
    let device = Device::flex();
    for near in [0, 3] {
        let layer = layer(5, near, &device);
        let x = random([2, 24, 16], &device);
        let whole = layer.forward(x.clone()).unwrap();
        for pieces in [vec![1; 24], vec![10, 1, 1, 5, 7]] {
            let mut cache = DsaCache::new();
            assert!(cache.is_empty());
            let mut rows = Vec::new();
            for count in pieces {
                let piece = x.clone().narrow(1, cache.len(), count);
                rows.push(layer.forward_cache(piece, &mut cache).unwrap());
            }
            assert_close(Tensor::cat(rows, 1), whole.clone(), 1e-5);
            // What is taken back is forgotten.
            cache.truncate(11);
            let again = layer.forward_cache(x.clone().narrow(1, 11, 4), &mut cache);
            assert_close(again.unwrap(), whole.clone().narrow(1, 11, 4), 1e-5);
            let other = random([1, 1, 16], &device);
            let error = layer.forward_cache(other, &mut cache).unwrap_err();
            assert!(error.to_string().contains("batch"), "{error}");
            assert_eq!(cache.len(), 15);
        }
    }
}

/// Later tokens change nothing before them, and fewer keys change something.
#[test]
fn it_is_prefix_stable() {
    let device = Device::flex();
    let layer = layer(5, 0, &device);
    let x = random([1, 30, 16], &device);
    let before = layer.forward(x.clone()).unwrap();
    let other = Tensor::cat(
        vec![x.clone().narrow(1, 0, 20), random([1, 10, 16], &device)],
        1,
    );
    let after = layer.forward(other).unwrap();
    assert_close(
        after.narrow(1, 0, 20),
        before.clone().narrow(1, 0, 20),
        1e-5,
    );
    let all = randomise(config(30).init(&device).unwrap());
    let dense = all.forward(x).unwrap();
    let difference = (dense - before).abs().max().into_scalar::<f32>();
    assert!(difference > 1e-3, "{difference}");
}

/// The indexer learns by its own loss alone, and nothing else learns by that.
#[cfg(feature = "autodiff")]
#[test]
fn each_loss_reaches_its_own_parameters() {
    let device = Device::flex().autodiff();
    let layer = layer(5, 1, &device);
    let x = random([2, 24, 16], &device).require_grad();
    let (out, loss) = layer.forward_with_loss(x.clone()).unwrap();
    let of_model = out.powi_scalar(2).sum().backward();
    assert!(layer.key.weight.val().grad(&of_model).is_some());
    assert!(x.grad(&of_model).is_some());
    assert!(layer.indexer.key.weight.val().grad(&of_model).is_none());
    let all = layer.warm_up_loss(x.clone()).unwrap();
    for loss in [loss, all] {
        assert!(loss.clone().into_scalar::<f32>() > 0.0);
        let of_indexer = loss.backward();
        for part in [
            &layer.indexer.query,
            &layer.indexer.key,
            &layer.indexer.weights,
        ] {
            let grad = part.weight.val().grad(&of_indexer).unwrap();
            assert!(grad.abs().max().into_scalar::<f32>() > 1e-5);
        }
        assert!(layer.key.weight.val().grad(&of_indexer).is_none());
        assert!(layer.query.weight.val().grad(&of_indexer).is_none());
        assert!(x.grad(&of_indexer).is_none());
    }
}

#[test]
fn configurations_of_none_say_why() {
    let device = Device::flex();
    let error = |config: DsaAttentionConfig| config.init(&device).unwrap_err().to_string();
    assert!(error(config(0)).contains("keep must be at least 1"));
    assert!(error(config(4).with_near(5)).contains("near must be at most keep"));
    assert!(error(config(4).with_index_heads(0)).contains("index_heads"));
    assert!(error(config(4).with_n_kv_heads(Some(3))).contains("n_heads"));
    let wide = Some(RotaryEncodingConfig::new(64, 8));
    assert!(error(config(4).with_index_rope(wide)).contains("index_rope.d_model"));
    let x = random([1, 65, 16], &device);
    let error = layer(4, 0, &device).forward(x).unwrap_err().to_string();
    assert!(error.contains("rope.max_sequence_length"), "{error}");
}
