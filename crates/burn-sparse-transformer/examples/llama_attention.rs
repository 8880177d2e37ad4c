//! Keeps your own Llama-style attention (projections, rotary embeddings, grouped-query attention, a growing KV cache) and replaces the
//! lines from `repeat_kv` to `softmax · v` with `SparseAttention`. Decoding token by token gives what the whole sequence gives.
//!
//! ```sh
//! cargo run -p burn-sparse-transformer --example llama_attention
//! ```

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, RotaryEncoding, RotaryEncodingConfig};
use burn::tensor::{Device, Distribution, Tensor};
use burn_sparse_transformer::{Pattern, SparseAttention, SparseAttentionConfig};

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const D_MODEL: usize = HEADS * HEAD_DIM;

#[derive(Module, Debug)]
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    rope: RotaryEncoding,
    attention: SparseAttention, // no parameters
}

impl Attention {
    /// New tokens `[batch, seq, d_model]`, which come after the keys and values in the cache: `[batch, kv_heads, seq, head_dim]`.
    fn forward(&self, x: Tensor<3>, cache: &mut Option<[Tensor<4>; 2]>) -> Tensor<3> {
        let [batch, seq, _] = x.dims();
        let split = |x: Tensor<3>, heads| x.reshape([batch, seq, heads, HEAD_DIM]).swap_dims(1, 2);
        let start = cache.as_ref().map_or(0, |[k, _]| k.dims()[2]);
        let q = split(self.q_proj.forward(x.clone()), HEADS);
        let k = split(self.k_proj.forward(x.clone()), KV_HEADS);
        let v = split(self.v_proj.forward(x), KV_HEADS);
        let [q, k] = [q, k].map(|x| self.rope.apply(x, start));
        let [k, v] = match cache.take() {
            None => [k, v],
            Some([ks, vs]) => [(ks, k), (vs, v)].map(|(old, new)| Tensor::cat(vec![old, new], 2)),
        };
        *cache = Some([k.clone(), v.clone()]);
        // Queries are the last of the keys' positions, and 4 heads of queries share a head of keys.
        let heads = self.attention.forward(q, k, v).swap_dims(1, 2);
        self.o_proj.forward(heads.reshape([batch, seq, D_MODEL]))
    }
}

fn main() {
    let device = Device::flex();
    let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(&device);
    let attention = Attention {
        q_proj: linear(D_MODEL, HEADS * HEAD_DIM),
        k_proj: linear(D_MODEL, KV_HEADS * HEAD_DIM),
        v_proj: linear(D_MODEL, KV_HEADS * HEAD_DIM),
        o_proj: linear(HEADS * HEAD_DIM, D_MODEL),
        rope: RotaryEncodingConfig::new(1024, HEAD_DIM).init(&device),
        // A sliding window as in Mistral, and the first 4 keys (attention sinks).
        attention: SparseAttentionConfig::new(Pattern::streaming(64, 4)).init(&device),
    };
    let x = Tensor::<3>::random([2, 200, D_MODEL], Distribution::Default, &device);
    let whole = attention.forward(x.clone(), &mut None);
    // A prompt of 180 tokens, and then one token at a time.
    let mut cache = None;
    let mut parts = vec![attention.forward(x.clone().narrow(1, 0, 180), &mut cache)];
    for token in 180..200 {
        parts.push(attention.forward(x.clone().narrow(1, token, 1), &mut cache));
    }
    let difference: f32 = (Tensor::cat(parts, 1) - whole).abs().max().into_scalar();
    println!("{attention}\ntoken by token, largest difference: {difference:.1e}");
    assert!(difference < 1e-5);
}

#[test]
fn it_runs() {
    main();
}
