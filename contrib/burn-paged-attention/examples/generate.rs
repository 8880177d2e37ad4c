//! Writes text from prompts with `generate`, which decodes all of them in one batch from a paged KV cache. The model learns one
//! sentence first, so that one can see whether the text is right.
//!
//! ```sh
//! cargo run -p burn-paged-attention --example generate
//! ```

use std::error::Error;
use std::ops::ControlFlow;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor};
use burn_paged_attention::generate::{FinishReason, GenerateOptions, Sampling, generate};
use burn_sparse_transformer::{
    BlockAttentionConfig, Factorization, Pattern, SparseTransformer, SparseTransformerConfig,
};

const SENTENCE: &str = "The quick brown fox jumps over the lazy dog. ";
const CONTEXT: usize = 128;

fn main() -> Result<(), Box<dyn Error>> {
    let model = trained(&Device::flex());
    let tokens = |text: &str| text.bytes().map(u32::from).collect::<Vec<u32>>();
    let prompts = ["The quick", "fox jumps over", "the lazy"];
    // Temperature 0 takes the likeliest byte. A text ends before the full stop, or after 60 bytes.
    let options = GenerateOptions::default()
        .max_new(60)
        .sampling(Sampling::default().temperature(0.0))
        .stop([tokens(".")]);
    let mut texts = prompts.map(str::to_owned);
    let outputs = generate(&model, &prompts.map(tokens), &options, &mut |step| {
        // Called for each token as soon as it is drawn; a `Break` would end its text.
        texts[step.prompt].push(char::from(step.token as u8));
        ControlFlow::Continue(())
    })?;
    for (text, output) in texts.iter().zip(outputs) {
        println!("{text}  ({:?})", output.reason);
        assert!(SENTENCE.ends_with(&format!("{text}. ")));
        assert_eq!(output.reason, FinishReason::Stop);
    }
    Ok(())
}

/// A model that knows the sentence by heart.
fn trained(device: &Device) -> SparseTransformer {
    let device = device.clone().autodiff();
    device.seed(1);
    let local = Factorization::from(Pattern::local(16));
    let mut model = SparseTransformerConfig::new(32, 2, local)
        .with_vocab_size(256)
        .with_context(CONTEXT)
        .with_n_layers(1)
        .with_block_size(16)
        .with_attention(Some(BlockAttentionConfig::new().with_rope_theta(Some(1e4))))
        .with_position_embedding(Some(false)) // the rotations say where a byte is
        .init(&device);
    let text = SENTENCE.repeat(CONTEXT);
    let windows = (0..4).flat_map(|entry| text.bytes().skip(entry * 11).take(CONTEXT + 1));
    let bytes: Vec<i32> = windows.map(i32::from).collect();
    let windows = Tensor::<1, Int>::from_ints(&bytes[..], &device).reshape([4, CONTEXT + 1]);
    let mut optimizer = AdamWConfig::new().init();
    for _ in 0..100 {
        let tokens = windows.clone().narrow(1, 0, CONTEXT);
        let loss = model.loss(tokens, windows.clone().narrow(1, 1, CONTEXT));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
    }
    model.valid() // without autodiff
}

#[test]
fn it_runs() {
    main().unwrap();
}
