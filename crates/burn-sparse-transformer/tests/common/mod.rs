//! Code and imports that the test binaries share. Each binary uses a part of it.
#![allow(dead_code, unused_imports)]

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::ModuleMapper;
use burn::tensor::{Distribution, Tolerance};

pub use burn::module::{Module, Param};
pub use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig};
pub use burn::nn::transformer::TransformerEncoderConfig;
pub use burn::nn::{Linear, LinearConfig, RotaryEncodingConfig};
pub use burn::tensor::activation::softmax;
pub use burn::tensor::{Bool, DType, Device, FloatDType, Int, Tensor, TensorData};
pub use burn_sparse_transformer::content::ContentAttention;
pub use burn_sparse_transformer::dsa::DsaStage;
pub use burn_sparse_transformer::longformer::{LongformerAttention, LongformerAttentionConfig};
pub use burn_sparse_transformer::{
    BlockAttentionConfig, Factorization, HeadNorm, Pattern, Precision, QkNorm, Recompute,
    SparseMhaCache, SparseMhaInput, SparseMultiHeadAttention, SparseMultiHeadAttentionConfig,
    SparseTransformer, SparseTransformerBlockConfig, SparseTransformerConfig,
    SparseTransformerEncoder, TransformerError,
};
pub use rstest::rstest;

/// A backend has one random number generator for the whole process: tests that depend on its numbers hold this lock, and so do all other tests of
/// their binary.
static GENERATOR: Mutex<()> = Mutex::new(());

/// Seeds the generator and keeps other tests from using it.
pub fn seed(device: &Device, seed: u64) -> MutexGuard<'static, ()> {
    let guard = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    device.seed(seed);
    guard
}

/// Returns a device whose generator is seeded and kept from other tests.
pub fn seeded(device: Device, number: u64) -> (Device, MutexGuard<'static, ()>) {
    let guard = seed(&device, number);
    (device, guard)
}

/// Every kind of pattern, made causal where necessary, and their combinations.
pub const PATTERNS: &[&str] = &[
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

/// Returns the CPU backends that are compiled in, or the one that `BURN_SPARSE_DEVICE` names.
pub fn devices() -> Vec<Device> {
    let found = [
        ("flex", Device::flex()),
        // It sums in other orders.
        #[cfg(feature = "ndarray")]
        #[allow(deprecated)]
        ("ndarray", Device::ndarray()),
    ];
    let wanted = std::env::var("BURN_SPARSE_DEVICE").ok();
    let is_wanted = |name: &str| wanted.as_ref().is_none_or(|wanted| wanted == name);
    let found = found.into_iter().filter(|(name, _)| is_wanted(name));
    let devices: Vec<Device> = found.map(|(_, device)| device).collect();
    assert!(!devices.is_empty(), "{wanted:?} is no CPU backend here");
    devices
}

pub fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// Returns token ids `[batch, seq]` without an obvious order.
pub fn tokens(batch: usize, seq: usize, vocab: usize, device: &Device) -> Tensor<2, Int> {
    let ids = (0..batch * seq).map(|i| ((i * i * 31 + i * 17 + 5) % 1009 % vocab) as i64);
    let ids: Vec<i64> = ids.collect();
    Tensor::from_data(TensorData::new(ids, [batch, seq]), device)
}

/// Draws every parameter from `N(0, 0.3)`: gains and biases take effect, and the output matrix is not 0.
pub fn randomise<M: Module>(module: M) -> M {
    struct Randomise;
    impl ModuleMapper for Randomise {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| {
                let values = tensor.random_like(Distribution::Normal(0.0, 0.3));
                match values.is_autodiff() {
                    true => values.require_grad(),
                    false => values,
                }
            })
        }
    }
    module.map(&mut Randomise)
}

/// Makes the configuration of a model with `[d_model, heads]` and `[vocab, context, layers]`, in blocks of 8.
pub fn small(
    [d_model, heads]: [usize; 2],
    factorization: impl Into<Factorization>,
    [vocab, context, layers]: [usize; 3],
) -> SparseTransformerConfig {
    SparseTransformerConfig::new(d_model, heads, factorization.into())
        .with_vocab_size(vocab)
        .with_context(context)
        .with_n_layers(layers)
        .with_block_size(8)
}

/// Asserts equality up to `tolerance`, absolute and relative.
pub fn assert_close<const D: usize>(a: Tensor<D>, b: Tensor<D>, tolerance: f32) {
    let tolerance = Tolerance::absolute(tolerance).set_relative(tolerance);
    a.into_data()
        .assert_approx_eq::<f32>(&b.into_data(), tolerance);
}

/// Computes self-attention of a sequence.
pub fn attend(mha: &SparseMultiHeadAttention, x: Tensor<3>) -> Result<Tensor<3>, TransformerError> {
    let output = mha.try_forward(SparseMhaInput::self_attn(x))?;
    Ok(output.context)
}

/// Computes self-attention of new positions after those of a cache.
pub fn attend_cache(
    mha: &SparseMultiHeadAttention,
    x: Tensor<3>,
    cache: &mut SparseMhaCache,
) -> Result<Tensor<3>, TransformerError> {
    let output = mha.try_forward_cache(SparseMhaInput::self_attn(x), cache)?;
    Ok(output.context)
}

/// Reshapes `[batch, seq, heads · width]` to `[batch, heads, seq, width]`.
pub fn split_heads(x: Tensor<3>, heads: usize) -> Tensor<4> {
    let [batch, seq, width] = x.dims();
    let x = x.reshape([batch, seq, heads, width / heads]);
    x.swap_dims(1, 2)
}

/// Inverts [`split_heads`].
pub fn merge_heads(x: Tensor<4>) -> Tensor<3> {
    let [batch, heads, seq, width] = x.dims();
    x.swap_dims(1, 2).reshape([batch, seq, heads * width])
}

/// Computes attention in dense operations; returns the heads' outputs and the weights. Heads may share keys; `added` is added to the scores,
/// and a sink is one more key without a value.
pub fn dense_attention(
    [q, k, v]: [Tensor<4>; 3],
    scale: f64,
    softcap: Option<f64>,
    added: Tensor<4>,
    sinks: Option<Tensor<1>>,
) -> [Tensor<4>; 2] {
    let ([batch, heads, seq_q, _], [_, kv_heads, seq_kv, _]) = (q.dims(), k.dims());
    let of_heads = |x: Tensor<4>| {
        let [.., width] = x.dims();
        let x = x.unsqueeze_dim::<5>(2);
        let x = x.expand([batch, kv_heads, heads / kv_heads, seq_kv, width]);
        x.reshape([batch, heads, seq_kv, width])
    };
    let scores = q.matmul(of_heads(k).transpose()) * scale;
    let mut scores = match softcap {
        Some(cap) => (scores / cap).tanh() * cap + added,
        None => scores + added,
    };
    if let Some(sinks) = sinks {
        let sinks = sinks.reshape([1, heads, 1, 1]);
        scores = Tensor::cat(vec![scores, sinks.expand([batch, heads, seq_q, 1])], 3);
    }
    let weights = softmax(scores, 3).narrow(3, 0, seq_kv);
    [weights.clone().matmul(of_heads(v)), weights]
}

/// Returns `[1, heads, seq_q, seq_kv]` with 0 where a head's query sees a key, and −∞ elsewhere.
pub fn hidden(
    [heads, seq_q, seq_kv]: [usize; 3],
    device: &Device,
    sees: impl Fn(usize, usize, usize) -> bool,
) -> Tensor<4> {
    let number = |at: usize| match sees(at / seq_kv / seq_q, at / seq_kv % seq_q, at % seq_kv) {
        true => 0.0,
        false => f32::NEG_INFINITY,
    };
    let numbers: Vec<f32> = (0..heads * seq_q * seq_kv).map(number).collect();
    Tensor::from_data(TensorData::new(numbers, [1, heads, seq_q, seq_kv]), device)
}

/// Returns the largest absolute difference of two tensors.
pub fn apart<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> f32 {
    (a - b).abs().max().into_scalar()
}

/// Runs pieces of a sequence with their first positions and lengths, and concatenates the rows.
pub fn in_pieces(counts: &[usize], mut run: impl FnMut(usize, usize) -> Tensor<3>) -> Tensor<3> {
    let mut first = 0;
    let rows = counts.iter().map(|&count| {
        first += count;
        run(first - count, count)
    });
    Tensor::cat(rows.collect(), 1)
}

/// Checks that successive pieces of a sequence in a new cache give the results of the whole.
#[track_caller]
pub fn assert_pieces(
    mha: &SparseMultiHeadAttention,
    (x, cache): (&Tensor<3>, &mut SparseMhaCache),
    pieces: &[usize],
    tolerance: f32,
) {
    let whole = attend(mha, x.clone()).unwrap();
    let rows = in_pieces(pieces, |first, count| {
        attend_cache(mha, x.clone().narrow(1, first, count), cache).unwrap()
    });
    assert_eq!(cache.len(), x.dims()[1]);
    assert_close(rows, whole, tolerance);
}

/// The gradient of each parameter that has one, by the parameter's path.
#[cfg(feature = "autodiff")]
pub type Gradients = std::collections::BTreeMap<String, Vec<f32>>;

/// Returns the gradients of a module whose parameters all have one.
#[cfg(feature = "autodiff")]
pub fn all_gradients_of<M: Module>(
    module: &M,
    gradients: &burn::optim::GradientsParams,
) -> Gradients {
    let found = gradients_of(module, gradients);
    let numbers: usize = found.values().map(Vec::len).sum();
    let expected = module.num_params();
    assert_eq!(numbers, expected, "all parameters have a gradient");
    found
}

#[cfg(feature = "autodiff")]
pub fn gradients_of<M: Module>(module: &M, gradients: &burn::optim::GradientsParams) -> Gradients {
    struct Found<'a> {
        gradients: &'a burn::optim::GradientsParams,
        path: Vec<String>,
        found: Gradients,
    }
    impl burn::module::ModuleVisitor for Found<'_> {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.path.push(name.into());
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.gradients.get::<D>(param.id) {
                let numbers = gradient.into_data().try_to_vec::<f32>().unwrap();
                self.found.insert(self.path.join("."), numbers);
            }
        }
    }
    let mut visitor = Found {
        gradients,
        path: Vec::new(),
        found: Gradients::new(),
    };
    module.visit(&mut visitor);
    visitor.found
}

/// Returns the largest absolute value.
pub fn largest<'a>(numbers: impl IntoIterator<Item = &'a f32>) -> f32 {
    numbers.into_iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// Checks that `rounded` differs from `exact`, by less than a share of its norm.
#[track_caller]
pub fn assert_rounded<const D: usize>(rounded: Tensor<D>, exact: Tensor<D>, most: f32) {
    let norm = |x: Tensor<D>| x.powi_scalar(2).sum().sqrt().into_scalar::<f32>();
    let error = norm(rounded - exact.clone()) / norm(exact);
    assert!(error > 0.0 && error < most, "{error}");
}
