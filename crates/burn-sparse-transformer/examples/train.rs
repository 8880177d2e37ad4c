//! Trains a byte-level language model with Burn's AdamW on a text that is built in, and prints its loss in bits per byte.
//!
//! ```sh
//! cargo run -p burn-sparse-transformer --example train
//! ```

use std::error::Error;
use std::f32::consts::LN_2;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor};
use burn_sparse_transformer::{Factorization, Pattern, SparseTransformerConfig};

/// Any bytes do; `std::fs::read` reads a file of yours.
const TEXT: &[u8] = include_bytes!("../src/lib.rs");
const CONTEXT: usize = 128;
const BATCH: usize = 8;
const STEPS: usize = 150;

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::flex().autodiff();
    device.seed(1);
    // Each byte sees those of its own row of 32 and the last 8 of every earlier row: Child et al. (2019).
    let fixed = Factorization::from(Pattern::fixed(32, 8));
    let mut model = SparseTransformerConfig::new(64, 4, fixed) // width, heads
        .with_vocab_size(256)
        .with_context(CONTEXT)
        .with_n_layers(1)
        .with_block_size(16)
        .with_init_scale(1.0) // weights of standard deviation 1 / √width; the default is the paper's 0.125
        .init(&device);
    println!("{} parameters, {} bytes", model.num_params(), TEXT.len());

    let mut optimizer = AdamWConfig::new().init();
    let mut mean = 8.0_f32; // of the last steps; at first all 256 bytes are equally likely
    for step in 0..STEPS {
        // Windows that begin anywhere; the target of a byte is the byte after it.
        let windows = (0..BATCH).map(|entry| {
            let start = (step * BATCH + entry) * 7919 % (TEXT.len() - CONTEXT);
            &TEXT[start..=start + CONTEXT]
        });
        let bytes: Vec<i32> = windows.flatten().map(|&byte| byte.into()).collect();
        let windows = Tensor::<1, Int>::from_ints(&bytes[..], &device);
        let windows = windows.reshape([BATCH, CONTEXT + 1]);
        let tokens = windows.clone().narrow(1, 0, CONTEXT);
        let targets = windows.narrow(1, 1, CONTEXT);

        let loss = model.loss(tokens, targets);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let learning_rate = 5e-3 * ((step + 1) as f64 / 10.0).min(1.0); // warm-up
        model = optimizer.step(learning_rate, model, gradients);

        let bits = loss.into_scalar::<f32>() / LN_2;
        assert!(step > 0 || (bits - mean).abs() < 1e-3);
        mean += 0.2 * (bits - mean);
        if step % 10 == 9 {
            println!("step {:>3}: {mean:.3} bits per byte", step + 1);
        }
    }
    // The frequencies of the bytes alone give 5.1 bits.
    assert!(mean < 4.0, "{mean} bits per byte");
    Ok(())
}

#[test]
fn it_runs() {
    main().unwrap();
}
