//! What the tests share. Each binary uses a part of it.
#![allow(dead_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData, Tolerance};
use burn_sparse_transformer::{
    Factorization, SparseMhaCache, SparseMhaInput, SparseMultiHeadAttention,
    SparseTransformerConfig, TransformerError,
};

/// A backend has one random number generator for the whole process: tests that depend on what is drawn
/// hold this, and so do all others of their binary.
static GENERATOR: Mutex<()> = Mutex::new(());

/// Seeds the generator and keeps other tests from using it.
pub fn seed(device: &Device, seed: u64) -> MutexGuard<'static, ()> {
    let guard = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    device.seed(seed);
    guard
}

/// Every kind of pattern, those that see later positions made causal; and what combines them.
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

/// The CPU backends that are compiled in, or that which `BURN_SPARSE_DEVICE` names.
pub fn devices() -> Vec<Device> {
    let found = [
        ("flex", Device::flex()),
        // It has other orders of sums.
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

/// Token ids `[batch, seq]` without an obvious order.
pub fn tokens(batch: usize, seq: usize, vocab: usize, device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i64> = (0..batch * seq)
        .map(|i| ((i * i * 31 + i * 17 + 5) % 1009 % vocab) as i64)
        .collect();
    Tensor::from_data(TensorData::new(ids, [batch, seq]), device)
}

/// Every parameter from `N(0, 0.3)`: gains and biases matter, and the output matrix is not 0.
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

/// A model of `[d_model, heads]`, for `[vocab, context, layers]`, in blocks of 8.
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

/// Equal up to `tolerance`, absolute and relative.
pub fn assert_close<const D: usize>(a: Tensor<D>, b: Tensor<D>, tolerance: f32) {
    let tolerance = Tolerance::absolute(tolerance).set_relative(tolerance);
    a.into_data()
        .assert_approx_eq::<f32>(&b.into_data(), tolerance);
}

/// Self-attention of a sequence.
pub fn attend(mha: &SparseMultiHeadAttention, x: Tensor<3>) -> Result<Tensor<3>, TransformerError> {
    let output = mha.try_forward(SparseMhaInput::self_attn(x))?;
    Ok(output.context)
}

/// The same of new positions after those of a cache.
pub fn attend_cache(
    mha: &SparseMultiHeadAttention,
    x: Tensor<3>,
    cache: &mut SparseMhaCache,
) -> Result<Tensor<3>, TransformerError> {
    let output = mha.try_forward_cache(SparseMhaInput::self_attn(x), cache)?;
    Ok(output.context)
}

/// The largest difference of two tensors' numbers.
pub fn apart<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> f32 {
    (a - b).abs().max().into_scalar()
}

/// That pieces of a sequence, one after the other in a new cache, give what the whole gives.
#[track_caller]
pub fn assert_pieces(
    mha: &SparseMultiHeadAttention,
    (x, cache): (&Tensor<3>, &mut SparseMhaCache),
    pieces: &[usize],
    tolerance: f32,
) {
    let whole = attend(mha, x.clone()).unwrap();
    let rows = pieces.iter().map(|&count| {
        let piece = x.clone().narrow(1, cache.len(), count);
        attend_cache(mha, piece, cache).unwrap()
    });
    let rows = Tensor::cat(rows.collect(), 1);
    assert_eq!(cache.len(), x.dims()[1]);
    assert_close(rows, whole, tolerance);
}

/// The gradient of each parameter that has one, by the parameter's path.
#[cfg(feature = "autodiff")]
pub type Gradients = std::collections::BTreeMap<String, Vec<f32>>;

/// Those of a module whose parameters all have one.
#[cfg(feature = "autodiff")]
pub fn all_gradients_of<M: Module>(
    module: &M,
    gradients: &burn::optim::GradientsParams,
) -> Gradients {
    let found = gradients_of(module, gradients);
    let numbers: usize = found.values().map(Vec::len).sum();
    assert_eq!(
        numbers,
        module.num_params(),
        "all parameters have a gradient"
    );
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

/// The largest of some numbers, without signs.
pub fn largest<'a>(numbers: impl IntoIterator<Item = &'a f32>) -> f32 {
    numbers.into_iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// That `rounded` is not `exact`, and nearer than a share of it.
#[track_caller]
pub fn assert_rounded<const D: usize>(rounded: Tensor<D>, exact: Tensor<D>, most: f32) {
    let norm = |x: Tensor<D>| x.powi_scalar(2).sum().sqrt().into_scalar::<f32>();
    let error = norm(rounded - exact.clone()) / norm(exact);
    assert!(error > 0.0 && error < most, "{error}");
}
