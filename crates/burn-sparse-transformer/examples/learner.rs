//! Trains a byte-level language model by Burn's `Learner`, which loads batches, validates, measures and saves checkpoints.
//!
//! ```sh
//! cargo run -p burn-sparse-transformer --example learner
//! ```

use std::error::Error;
use std::f32::consts::LN_2;
use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::optim::{AdamWConfig, lr_scheduler::constant::ConstantLr};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor};
use burn::train::metric::{LossMetric, PerplexityMetric};
use burn::train::{
    InferenceStep, Learner, SequenceOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_sparse_transformer::{Factorization, Pattern, SparseTransformer, SparseTransformerConfig};

const CONTEXT: usize = 64;

/// Windows of bytes, `[batch, CONTEXT + 1]`: the target of a byte is the byte after it.
struct Bytes;

impl Batcher<Vec<u8>, Tensor<2, Int>> for Bytes {
    fn batch(&self, windows: Vec<Vec<u8>>, device: &Device) -> Tensor<2, Int> {
        let bytes: Vec<i32> = windows.iter().flatten().map(|&byte| byte.into()).collect();
        Tensor::<1, Int>::from_ints(&bytes[..], device).reshape([windows.len(), CONTEXT + 1])
    }
}

/// A type of your own, since `TrainStep` and the model are of other crates.
#[derive(Module, Debug)]
struct ByteModel {
    inner: SparseTransformer,
}

impl InferenceStep for ByteModel {
    type Input = Tensor<2, Int>;
    type Output = SequenceOutput;

    fn step(&self, windows: Self::Input) -> SequenceOutput {
        let tokens = windows.clone().narrow(1, 0, CONTEXT);
        let targets = windows.narrow(1, 1, CONTEXT);
        let logits = self.inner.forward(tokens);
        let of_targets = log_softmax(logits.clone(), 2).gather(2, targets.clone().unsqueeze_dim(2));
        SequenceOutput::new(-of_targets.mean(), logits, None, targets)
    }
}

impl TrainStep for ByteModel {
    type Input = Tensor<2, Int>;
    type Output = SequenceOutput;

    fn step(&self, windows: Self::Input) -> TrainOutput<SequenceOutput> {
        let output = InferenceStep::step(self, windows);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

/// Batches of windows that begin every `stride` bytes.
fn batches(text: &[u8], stride: usize, device: &Device) -> Arc<dyn DataLoader<Tensor<2, Int>>> {
    let windows = text.windows(CONTEXT + 1).step_by(stride);
    let windows = InMemDataset::new(windows.map(<[u8]>::to_vec).collect());
    DataLoaderBuilder::new(Bytes)
        .batch_size(16)
        .shuffle(1)
        .set_device(device.clone()) // otherwise validation is on Burn's default device
        .build(windows)
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::flex().autodiff();
    device.seed(1);
    // Each byte sees those of its own row of 16 and the last 4 of every earlier row: Child et al. (2019).
    let fixed = Factorization::from(Pattern::fixed(16, 4));
    let model = SparseTransformerConfig::new(64, 4, fixed) // width, heads
        .with_vocab_size(256)
        .with_context(CONTEXT)
        .with_n_layers(1)
        .with_block_size(16)
        .with_init_scale(1.0)
        .init(&device);

    // Any bytes do; `std::fs::read` reads a file of yours.
    let (text, valid) = include_bytes!("../src/transformer.rs").split_at(20_000);
    let train = batches(text, 16, &device);
    let valid = batches(valid, CONTEXT, &device);
    let folder = std::env::temp_dir().join(format!("learner-{}", std::process::id()));
    let model = ByteModel { inner: model };
    let learner = Learner::new(model, AdamWConfig::new().init(), ConstantLr::new(5e-3));
    let result = SupervisedTraining::new(&folder, train, valid.clone())
        .metrics((LossMetric::new(), PerplexityMetric::new()))
        .num_epochs(4)
        .summary()
        .launch(learner);

    let batch = valid.iter().next().ok_or("no batch")??;
    let loss: f32 = InferenceStep::step(&result.model, batch).loss.into_scalar();
    let bits = loss / LN_2;
    println!("{bits:.3} bits per byte of a validation batch; the logs are in {folder:?}");
    // The frequencies of the bytes alone give 4.5 bits.
    assert!(bits < 4.0, "{bits} bits per byte");
    Ok(())
}

#[test]
fn it_runs() {
    main().unwrap();
}
