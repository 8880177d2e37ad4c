//! `SparseAttention`: against Burn's dense attention in f64, in pieces, and shared state of its clones.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::config::Config;
use burn::module::ModuleDisplay;
use burn::tensor::{Distribution, Tolerance};
use burn_blocksparse::AttentionTensors;
use burn_sparse_transformer::{SparseAttention, SparseAttentionConfig};

use crate::common::*;

const HEADS: usize = 4;
const DIM: usize = 8;

fn config(pattern: Pattern) -> SparseAttentionConfig {
    SparseAttentionConfig::new(pattern).with_block_size(8)
}

fn normal(batch: usize, heads: usize, seq: usize, device: &Device) -> Tensor<4> {
    let shape = [batch, heads, seq, DIM];
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), (device, DType::F64))
}

/// Computes dense attention under the pattern's mask.
fn dense(
    pattern: &Pattern,
    qkv: [Tensor<4>; 3],
    scale: Option<f64>,
    softcap: Option<f64>,
) -> Tensor<4> {
    let ([_, heads, seq_q, _], [_, _, seq_kv, _]) = (qkv[0].dims(), qkv[1].dims());
    let unseen = hidden(
        [heads, seq_q, seq_kv],
        &qkv[0].device(),
        |head, row, key| pattern.attends(head, (row + seq_kv - seq_q) as i64, key as i64),
    );
    let scale = scale.unwrap_or(1.0 / (DIM as f64).sqrt());
    let [out, _] = dense_attention(qkv, scale, softcap, unseen.cast(DType::F64), None);
    out
}

fn assert_f64(got: Tensor<4>, expected: Tensor<4>) {
    assert_eq!(got.dtype(), DType::F64);
    got.into_data()
        .assert_approx_eq::<f64>(&expected.into_data(), Tolerance::absolute(1e-12));
}

#[rstest]
fn equals_dense_attention(
    #[values(
        "dense",
        "causal",
        "streaming:5,2",
        "fixed:8,2",
        "local:4 / causal",
        "window:6"
    )]
    pattern: &str,
    #[values([HEADS, 37, 37], [2, 37, 37], [1, 5, 37], [2, 1, 37], [1, 1, 1])] sizes: [usize; 3],
    #[values((None, None), (Some(0.3), Some(2.0)))] options: (Option<f64>, Option<f64>),
) {
    let ([kv_heads, seq_q, seq_kv], (scale, softcap)) = (sizes, options);
    let device = Device::flex();
    let pattern: Pattern = pattern.parse().unwrap();
    let q = normal(2, HEADS, seq_q, &device);
    let [k, v] = [(); 2].map(|_| normal(2, kv_heads, seq_kv, &device));
    let attention = config(pattern.clone())
        .with_scale(scale)
        .with_softcap(softcap)
        .init(&device);
    let got = attention.forward(q.clone(), k.clone(), v.clone());
    assert_f64(got, dense(&pattern, [q, k, v], scale, softcap));
}

/// A prompt, a chunk of one and then single tokens see the same as in the whole sequence.
#[rstest]
fn a_growing_cache_equals_the_whole(
    #[values(
        "causal",
        "streaming:5,2",
        "fixed:8,2",
        "local:4 / causal",
        "strided:6"
    )]
    pattern: &str,
    #[values(HEADS, 2, 1)] kv_heads: usize,
) {
    let device = Device::flex();
    let pattern: Pattern = pattern.parse().unwrap();
    let attention = config(pattern.clone()).init(&device);
    let total = 45;
    let q = normal(2, HEADS, total, &device);
    let [k, v] = [(); 2].map(|_| normal(2, kv_heads, total, &device));
    let all = [q.clone(), k.clone(), v.clone()];
    let whole = dense(&pattern, all, None, None);
    let mut end = 0;
    for new in [13, 5].into_iter().chain([1; 27]) {
        let start = end;
        end += new;
        let [k, v] = [&k, &v].map(|x| x.clone().narrow(2, 0, end));
        let got = attention.forward(q.clone().narrow(2, start, new), k, v);
        assert_f64(got, whole.clone().narrow(2, start, new));
    }
    assert_eq!(end, total);
}

#[test]
fn alibi_and_sinks_are_those_of_the_call() {
    let device = Device::flex();
    let pattern = Pattern::causal();
    let [q, k, v] = [(); 3].map(|_| normal(1, HEADS, 20, &device));
    let attention = config(pattern.clone()).with_alibi(true).init(&device);
    let bias: Vec<f64> = (0..HEADS * 400)
        .map(|at| {
            let slope = burn_blocksparse::alibi_slopes(HEADS)[at / 400];
            -slope * (at / 20 % 20).abs_diff(at % 20) as f64
        })
        .collect();
    let shape = (&device, DType::F64);
    let bias = Tensor::<4>::from_data(TensorData::new(bias, [1, HEADS, 20, 20]), shape);
    let plain = config(pattern.clone()).init(&device);
    let tensors = AttentionTensors::default().bias(bias);
    let expected = plain.forward_with(q.clone(), k.clone(), v.clone(), tensors);
    assert_f64(attention.forward(q.clone(), k.clone(), v.clone()), expected);

    // A sink takes its share of each row, with value 0.
    let sinks = Tensor::<1>::zeros([HEADS], shape);
    let layout = plain.layout(HEADS, 20, 20).unwrap();
    let call = burn_blocksparse::SparseAttentionCall::new(q.clone(), k.clone(), v.clone(), &layout);
    let (out, lse) = call.run_with_lse().unwrap();
    let share = lse.clone().exp() / (lse.exp() + 1.0);
    let tensors = AttentionTensors::default().sinks(sinks);
    let got = plain.forward_with(q, k, v, tensors);
    assert_f64(got, out * share.unsqueeze_dim(3));
}

/// Layouts are built once for all clones, and the cache is bounded.
#[test]
fn clones_share_layouts() {
    let built = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&built);
    let pattern = Pattern::from_fn("counted", move |_, i, j| {
        // Counts the first pair of each head of each layout.
        seen.fetch_add(usize::from((i, j) == (0, 0)), Ordering::Relaxed);
        j <= i
    });
    let device = Device::flex();
    let attention = config(pattern).init(&device);
    let forward = |attention: &SparseAttention, heads, seq| {
        let [q, k, v] = [(); 3].map(|_| normal(1, heads, seq, &device));
        let before = built.load(Ordering::Relaxed);
        attention.forward(q, k, v);
        built.load(Ordering::Relaxed) > before
    };
    let clone = attention.clone();
    assert!(forward(&attention, 2, 16));
    assert!(!forward(&attention, 2, 16));
    assert!(!forward(&clone, 2, 16));
    assert!(forward(&clone, 3, 16), "other heads, another layout");
    assert!(!forward(&attention, 3, 16));
    // The module for evaluation shares them too.
    assert!(!forward(&attention.clone().train().valid(), 2, 16));
    for seq in 17..25 {
        assert!(forward(&clone, 2, seq));
    }
    assert!(forward(&attention, 2, 16), "eight other layouts came since");
    attention.keep_layouts(9);
    assert!(forward(&clone, 2, 30));
    assert!(!forward(&clone, 2, 18), "nine are kept now");
}

#[track_caller]
fn assert_panics(expected: &str, call: impl FnOnce()) {
    let panicked = catch_unwind(AssertUnwindSafe(call)).unwrap_err();
    assert_eq!(*panicked.downcast::<String>().unwrap(), expected);
}

#[test]
fn forward_panics_with_the_text_of_the_error() {
    let device = Device::flex();
    let attention = config("local:4 / causal".parse().unwrap()).init(&device);
    let of = |heads, seq| normal(2, heads, seq, &device);
    for [q, k, v] in [
        // Heads that match neither the pattern nor the keys.
        [of(3, 16), of(3, 16), of(3, 16)],
        [of(4, 16), of(3, 16), of(3, 16)],
        [of(4, 16), of(4, 16), of(4, 12)],
        [of(4, 16), of(4, 16), of(4, 16).cast(DType::F32)],
        [of(4, 16), normal(1, 4, 16, &device), of(4, 16)],
    ] {
        let error = attention.try_forward(q.clone(), k.clone(), v.clone());
        let error = error.unwrap_err().to_string();
        assert!(error.contains(" must be "), "{error}");
        assert_panics(&error, || drop(attention.forward(q, k, v)));
    }
}

#[rstest]
#[case(config(Pattern::causal()).with_block_size(9), "block_size must be 8, 16, 32, 64 or 128, got 9")]
#[case(config(Pattern::causal()).with_dropout(1.0), "dropout must be at least 0 and below 1, got 1")]
#[case(config(Pattern::causal()).with_scale(Some(1e60)), "scale must be finite, as f32, got 1000000000000000000000000000000000000000000000000000000000000")]
#[case(config(Pattern::causal()).with_softcap(Some(0.0)), "softcap must be positive and finite, got 0")]
#[case(
    config(Pattern::fixed(8, 3)),
    "fixed(8, 3): stride must be a multiple of columns = 3, got 8"
)]
fn init_panics_with_the_text_of_the_error(
    #[case] config: SparseAttentionConfig,
    #[case] expected: &str,
) {
    let device = Device::flex();
    let error = config.try_init(&device).unwrap_err().to_string();
    assert!(error.ends_with(expected), "{error}");
    assert_panics(&error, || drop(config.init(&device)));
}

/// Like burn-nn's modules: drops on autodiff devices, unless the module is frozen for evaluation; each call has a new mask.
#[test]
fn drops_weights_while_training() {
    let device = Device::flex();
    let attention = config(Pattern::causal()).with_dropout(0.5).init(&device);
    let plain = config(Pattern::causal()).init(&device);
    let x = normal(1, HEADS, 32, &device);
    let run = |attention: &SparseAttention, x: &Tensor<4>| {
        let out = attention.forward(x.clone(), x.clone(), x.clone());
        match out.is_autodiff() {
            true => out.inner().into_data(),
            false => out.into_data(),
        }
    };
    let expected = run(&plain, &x);
    assert_eq!(run(&attention, &x), expected);
    let trained = x.clone().autodiff();
    let first = run(&attention, &trained);
    assert_ne!(first, expected);
    assert_ne!(run(&attention, &trained), first);
    assert_eq!(run(&plain, &trained), expected);
}

#[test]
fn is_a_module_and_a_configuration() {
    let device = Device::flex();
    let config = config("streaming:5,2".parse().unwrap())
        .with_softcap(Some(30.0))
        .with_precision(Precision::Tf32);
    let file = std::env::temp_dir().join("burn-sparse-attention-config.json");
    config.save(&file).unwrap();
    let loaded = SparseAttentionConfig::load(&file).unwrap();
    assert_eq!(loaded.to_string(), config.to_string());
    let attention = loaded.init(&device);
    assert_eq!(attention.num_params(), 0);
    assert_eq!(attention.block_size(), 8);
    let text = attention.format(Default::default());
    assert!(text.contains("streaming(5, sink = 2)"), "{text}");
}
