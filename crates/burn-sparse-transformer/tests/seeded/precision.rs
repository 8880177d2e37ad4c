//! Mixed precision: bf16 is close to f32, and no stored tensor is bf16.
#![cfg(feature = "autodiff")]

use burn::module::ModuleVisitor;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};

use crate::common::*;

const VOCAB: usize = 7;
const SEQ: usize = 21;
/// Unit roundoff of bf16 with its eight bits of precision.
const ROUNDING: f64 = 1.0 / 256.0;

fn config(precision: Precision) -> SparseTransformerConfig {
    let patterns = vec![Pattern::fixed(8, 2), Pattern::merged_strided(8)];
    let factorization = Factorization::Interleaved(patterns);
    small([16, 2], factorization, [VOCAB, 24, 3])
        .with_embedding_width(Some(8))
        .with_init_scale(1.0)
        .with_precision(precision)
}

/// Returns one model in both precisions.
fn models(device: &Device) -> [SparseTransformer; 2] {
    let model = randomise(config(Precision::F32).init(device));
    let record = model.clone().into_record();
    let bf16 = config(Precision::Bf16).init(device);
    [model, bf16.load_record(record)]
}

fn data() -> (Tensor<2, Int>, Tensor<2, Int>) {
    let x = tokens(2, SEQ, VOCAB, &Device::flex());
    (x.clone(), x.flip([1]))
}

/// Returns ‖a − b‖ / ‖b‖ over all parameters' gradients, which must be f32.
fn distance(model: &SparseTransformer, a: &GradientsParams, b: &GradientsParams) -> f64 {
    struct Distance<'a>([&'a GradientsParams; 2], [f64; 2]);
    impl ModuleVisitor for Distance<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let [a, b] = self.0.map(|of| of.get::<D>(param.id).expect("a gradient"));
            assert_eq!([param.val().dtype(), a.dtype(), b.dtype()], [DType::F32; 3]);
            let squares = |t: Tensor<D>| t.square().sum().into_scalar::<f64>();
            self.1[0] += squares(a - b.clone());
            self.1[1] += squares(b);
        }
    }
    let mut visitor = Distance([a, b], [0.0; 2]);
    model.visit(&mut visitor);
    let [difference, size] = visitor.1;
    (difference / size).sqrt()
}

#[rstest]
fn gradients_follow_those_of_f32(#[values(false, true)] recompute: bool) {
    let (device, _guard) = seeded(Device::flex().autodiff(), 1);
    let [f32, bf16] = models(&device).map(|model| {
        let (x, y) = data();
        let (loss, gradients) = model.loss_and_gradients(x, y, 0, recompute).unwrap();
        assert_eq!(loss.dtype(), DType::F32);
        (model, loss.into_scalar::<f64>(), gradients)
    });
    let loss = (bf16.1 / f32.1 - 1.0).abs();
    assert!(loss < ROUNDING, "loss {} and {}", bf16.1, f32.1);
    let distance = distance(&f32.0, &bf16.2, &f32.2);
    let is_right = (1e-5..6.0 * ROUNDING).contains(&distance);
    assert!(is_right, "gradients {distance} apart: rounded, but not far");
}

/// Without tensor cores, equal to the last bit.
#[rstest]
fn tf32_is_f32_on_a_cpu(#[values(false, true)] recompute: bool) {
    let (device, _guard) = seeded(Device::flex().autodiff(), 6);
    let f32 = randomise(config(Precision::F32).init(&device));
    let tf32 = config(Precision::Tf32).init(&device);
    let tf32 = tf32.load_record(f32.clone().into_record());
    let [a, b] = [&f32, &tf32].map(|model| {
        let (x, y) = data();
        let (loss, gradients) = model.loss_and_gradients(x, y, 0, recompute).unwrap();
        (loss.into_scalar::<f64>(), gradients)
    });
    assert_eq!(a.0, b.0);
    assert_eq!(distance(&f32, &b.1, &a.1), 0.0);
}

/// Returns the loss of each step.
fn train(mut model: SparseTransformer, optimizer: &mut ModuleOptimizer, steps: usize) -> Vec<f64> {
    (0..steps)
        .map(|_| {
            let (x, y) = data();
            let (loss, gradients) = model.loss_and_gradients(x, y, 0, false).unwrap();
            model = optimizer.step(1e-2, model.clone(), gradients);
            loss.into_scalar::<f64>()
        })
        .collect()
}

#[test]
fn training_follows_that_of_f32_and_its_state_is_f32() {
    let (device, _guard) = seeded(Device::flex().autodiff(), 3);
    let [f32, bf16] = models(&device).map(|model| {
        let mut optimizer = AdamWConfig::new().init();
        let losses = train(model, &mut optimizer, 30);
        (losses, optimizer.into_bytes().unwrap().len())
    });
    for (step, (a, b)) in bf16.0.iter().zip(&f32.0).enumerate() {
        assert!((a - b).abs() < 0.05 * f32.0[0], "step {step}: {a} and {b}");
    }
    assert!(bf16.0[29] < 0.5 * bf16.0[0], "{:?}", bf16.0);
    // Random parameter ids have more or fewer digits.
    let bytes = bf16.1 as f64 / f32.1 as f64;
    assert!((bytes - 1.0).abs() < 0.02, "bytes of the moments: {bytes}");
}

#[test]
fn logits_are_f32_and_decoding_gives_those_of_the_whole() {
    let (device, _guard) = seeded(Device::flex(), 4);
    let [_, model] = models(&device);
    let (x, _) = data();
    let whole = model.forward(x.clone());
    assert_eq!(whole.dtype(), DType::F32);
    let mut cache = model.new_cache();
    let parts = in_pieces(&[5, 1, SEQ - 6], |first, count| {
        model.forward_cache(x.clone().narrow(1, first, count), &mut cache)
    });
    let size = whole.clone().abs().max().into_scalar::<f64>();
    let error = (parts - whole).abs().max().into_scalar::<f64>();
    assert!(error < 4.0 * ROUNDING * size, "{error} of {size}");
}

/// Thus a layer in mixed precision can replace one in f32.
#[test]
fn a_layer_returns_its_inputs_dtype() {
    let (device, _guard) = seeded(Device::flex(), 5);
    let mha = SparseMultiHeadAttentionConfig::new(16, 2, Pattern::local(4))
        .with_block_size(8)
        .with_precision(Precision::Bf16)
        .init(&device);
    let x = random([1, 9, 16], &device);
    for dtype in [DType::F32, DType::BF16] {
        let input = SparseMhaInput::self_attn(x.clone().cast(dtype));
        assert_eq!(mha.forward(input).context.dtype(), dtype);
    }
}
