//! Llama-style models: equality to loops in f64, decoding, and configurations of checkpoints.

use crate::common::{assert_close, randomise, tokens};
use burn::module::{Module, Param};
use burn::nn::{Linear, RmsNorm};
use burn::tensor::{Device, Tensor};
use burn_sparse_transformer::llama::{Llama, LlamaConfig};
use burn_sparse_transformer::{HeadNorm, Pattern, RopeScaling};
use rstest::rstest;

const VOCAB: usize = 13;
const SEQ: usize = 21;

fn config() -> LlamaConfig {
    LlamaConfig::new(16, 4)
        .with_n_kv_heads(Some(2))
        .with_vocab_size(VOCAB)
        .with_n_layers(2)
        .with_d_ff(Some(20))
        .with_context(32)
        .with_block_size(8)
}

/// As in Qwen3: heads are wider than their share of the stream.
fn wide() -> LlamaConfig {
    config()
        .with_head_dim(Some(6))
        .with_qk_norm(true)
        .with_tied_embedding(false)
        .with_rope_theta(1e6)
}

fn biased() -> LlamaConfig {
    config()
        .with_qkv_bias(true)
        .with_output_bias(true)
        .with_pattern(Pattern::streaming(7, 2))
}

fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

/// Rows of the same width.
type Rows = Vec<Vec<f64>>;

fn rows_of(tensor: Tensor<2>) -> Rows {
    let [_, width] = tensor.dims();
    let all = numbers(tensor);
    all.chunks(width).map(<[f64]>::to_vec).collect()
}

fn linear(layer: &Linear, x: &[f64]) -> Vec<f64> {
    let weight = rows_of(layer.weight.val());
    let bias = layer.bias.as_ref().map(|bias| numbers(bias.val()));
    (0..weight[0].len())
        .map(|out| {
            let product: f64 = x.iter().zip(&weight).map(|(x, row)| x * row[out]).sum();
            product + bias.as_ref().map_or(0.0, |bias| bias[out])
        })
        .collect()
}

fn rms(gamma: &Param<Tensor<1>>, epsilon: f64, x: &[f64]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let gamma = numbers(gamma.val());
    let scaled = x.iter().zip(gamma);
    scaled
        .map(|(x, gamma)| x / (mean + epsilon).sqrt() * gamma)
        .collect()
}

fn norm(norm: &RmsNorm, x: &[f64]) -> Vec<f64> {
    rms(&norm.gamma, norm.epsilon, x)
}

/// A head of a row, normalised and rotated.
fn placed(head: &[f64], own: &Option<HeadNorm>, at: usize, theta: f64) -> Vec<f64> {
    let mut head = match own {
        Some(HeadNorm::Rms(own)) => norm(own, head),
        Some(_) => panic!("an RMS norm"),
        None => head.to_vec(),
    };
    let width = head.len();
    for pair in 0..width / 2 {
        let angle = at as f64 * theta.powf(-2.0 * pair as f64 / width as f64);
        let (a, b) = (head[2 * pair], head[2 * pair + 1]);
        head[2 * pair] = a * angle.cos() - b * angle.sin();
        head[2 * pair + 1] = a * angle.sin() + b * angle.cos();
    }
    head
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Logits of a sequence, `[seq, vocab]`, in loops.
fn logits_in_f64(model: &Llama, config: &LlamaConfig, ids: &[usize]) -> Vec<f64> {
    let embed = rows_of(model.embed.weight.val());
    let mut x: Rows = ids.iter().map(|&id| embed[id].clone()).collect();
    let width = config.head_dim.unwrap_or(config.d_model / config.n_heads);
    let group = config.n_heads / config.n_kv_heads.unwrap_or(config.n_heads);
    let allowed = config.pattern.layout(1, ids.len(), 8).unwrap().to_dense(0);
    for block in &model.layers {
        let mha = &block.attention;
        let normed: Rows = x.iter().map(|x| norm(&block.attention_norm, x)).collect();
        let [q, k, v] = [&mha.query, &mha.key, &mha.value]
            .map(|layer| normed.iter().map(|x| linear(layer, x)).collect::<Rows>());
        let head = |row: &[f64], head: usize| row[head * width..(head + 1) * width].to_vec();
        for i in 0..ids.len() {
            let mut seen = Vec::new();
            for h in 0..config.n_heads {
                let query = placed(&head(&q[i], h), &mha.query_norm, i, config.rope_theta);
                let keys: Vec<usize> = (0..=i).filter(|&j| allowed[i][j]).collect();
                let weights: Vec<f64> = keys
                    .iter()
                    .map(|&j| {
                        let key = head(&k[j], h / group);
                        let key = placed(&key, &mha.key_norm, j, config.rope_theta);
                        let score: f64 = query.iter().zip(&key).map(|(q, k)| q * k).sum();
                        (score / (width as f64).sqrt()).exp()
                    })
                    .collect();
                let total: f64 = weights.iter().sum();
                let mut out = vec![0.0; width];
                for (weight, &j) in weights.iter().zip(&keys) {
                    let value = head(&v[j], h / group);
                    out.iter_mut()
                        .zip(value)
                        .for_each(|(out, v)| *out += weight / total * v);
                }
                seen.extend(out);
            }
            add(&mut x[i], &linear(&mha.output, &seen));
        }
        for x in &mut x {
            let normed = norm(&block.mlp_norm, x);
            let up = linear(&block.mlp.up, &normed);
            let gate = linear(&block.mlp.gate, &normed);
            let inner: Vec<f64> = gate
                .iter()
                .zip(up)
                .map(|(g, up)| g / (1.0 + (-g).exp()) * up)
                .collect();
            add(x, &linear(&block.mlp.down, &inner));
        }
    }
    x.iter()
        .flat_map(|x| {
            let normed = norm(&model.norm, x);
            match &model.head {
                Some(head) => linear(head, &normed),
                None => embed
                    .iter()
                    .map(|row| row.iter().zip(&normed).map(|(a, b)| a * b).sum())
                    .collect(),
            }
        })
        .collect()
}

#[rstest]
#[case(config())]
#[case(wide())]
#[case(biased())]
fn logits_equal_f64(#[case] config: LlamaConfig) {
    let device = Device::flex();
    let model = randomise(config.init(&device));
    let ids = tokens(2, SEQ, VOCAB, &device);
    let got = model.forward(ids.clone());
    for entry in 0..2 {
        let of_entry: Vec<usize> = (ids.clone().narrow(0, entry, 1).into_data().iter::<i64>())
            .map(|id| id as usize)
            .collect();
        let expected = logits_in_f64(&model, &config, &of_entry);
        let got = numbers(got.clone().narrow(0, entry, 1));
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(&expected) {
            assert!(
                (got - expected).abs() <= 1e-4 * (1.0 + expected.abs()),
                "{got} for {expected}"
            );
        }
    }
}

#[rstest]
#[case(config())]
#[case(wide())]
#[case(biased())]
#[case(config().with_selections(Some(vec!["quest:8,24".parse().unwrap()])))]
fn pieces_give_what_the_whole_gives(#[case] config: LlamaConfig) {
    let device = Device::flex();
    let model = randomise(config.init(&device));
    let ids = tokens(2, SEQ, VOCAB, &device);
    let whole = model.forward(ids.clone());
    let mut cache = model.new_cache();
    for (first, count) in [(0, 9), (9, 1), (10, 4), (14, 7)] {
        let piece = model.forward_cache(ids.clone().narrow(1, first, count), &mut cache);
        assert_close(piece, whole.clone().narrow(1, first, count), 1e-4);
    }
    assert_eq!(cache.position(), SEQ);
}

#[test]
fn a_refused_call_leaves_the_cache() {
    let device = Device::flex();
    let model = config().init(&device);
    let mut cache = model.new_cache();
    model.forward_cache(tokens(1, 30, VOCAB, &device), &mut cache);
    refused! { model.try_forward_cache(tokens(1, 3, VOCAB, &device), &mut cache) => "…below 32…"; }
    assert_eq!(cache.position(), 30);
    model.forward_cache(tokens(1, 2, VOCAB, &device), &mut cache);
}

#[test]
fn the_loss_is_that_of_the_logits_and_every_parameter_learns() {
    let device = Device::flex().autodiff();
    let model = randomise(wide().init(&device));
    let (ids, targets) = (
        tokens(2, SEQ, VOCAB, &device),
        tokens(2, SEQ, VOCAB, &device),
    );
    let loss = model.loss(ids.clone(), targets.clone());
    let logs = burn::tensor::activation::log_softmax(model.forward(ids), 2);
    let picked = logs.gather(2, targets.unsqueeze_dim(2));
    assert_close(loss.clone(), picked.mean().neg().unsqueeze(), 1e-5);
    let gradients = burn::optim::GradientsParams::from_grads(loss.backward(), &model);
    // Seven matrices, two norms and two head norms a layer; embedding, norm and head.
    assert_eq!(gradients.len(), 2 * 11 + 3);
    assert!(model.num_params() > 0);
}

const SMOL_LM2: &str = r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "hidden_act": "silu", "hidden_size": 576,
    "intermediate_size": 1536, "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 100000,
    "tie_word_embeddings": true, "vocab_size": 49152}"#;

const LLAMA_3_2: &str = r#"{"attention_bias": false, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0,
    "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
    "tie_word_embeddings": true, "vocab_size": 128256}"#;

const QWEN3: &str = r#"{"attention_bias": false, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
    "sliding_window": null, "tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 151936}"#;

#[test]
fn configurations_of_checkpoints_are_read() {
    let smol = LlamaConfig::from_hugging_face(SMOL_LM2).unwrap();
    assert_eq!(
        (smol.d_model, smol.n_heads, smol.n_kv_heads),
        (576, 9, Some(3))
    );
    assert_eq!(
        (smol.d_ff, smol.n_layers, smol.vocab_size),
        (Some(1536), 30, 49_152)
    );
    assert_eq!(
        (smol.context, smol.rope_theta, smol.rms_norm_eps),
        (8192, 1e5, 1e-5)
    );
    assert!(smol.tied_embedding && !smol.qk_norm && smol.rope_scaling.is_none());
    let llama = LlamaConfig::from_hugging_face(LLAMA_3_2).unwrap();
    let scaling = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    assert_eq!(
        (llama.head_dim, llama.rope_scaling),
        (Some(64), Some(scaling))
    );
    let qwen = LlamaConfig::from_hugging_face(QWEN3).unwrap();
    assert_eq!(
        (qwen.head_dim, qwen.qk_norm, qwen.pattern),
        (Some(128), true, Pattern::causal())
    );
    let edit = |from: &str, to: &str| LlamaConfig::from_hugging_face(&SMOL_LM2.replace(from, to));
    let sliding = edit(r#""rope_scaling": null"#, r#""sliding_window": 1024"#).unwrap();
    assert_eq!(sliding.pattern, Pattern::local(1024));
    let qwen2 = edit(r#""model_type": "llama""#, r#""model_type": "qwen2""#).unwrap();
    assert!(qwen2.qkv_bias && !qwen2.output_bias);
    for (from, to, message) in [
        (
            "\"llama\"",
            "\"gemma3\"",
            "model_type must be llama, mistral, qwen2 or qwen3, got gemma3",
        ),
        (
            "\"silu\"",
            "\"gelu\"",
            "hidden_act must be silu, got \"gelu\"",
        ),
        (
            "\"vocab_size\": 49152",
            "\"vocab\": 1",
            "vocab_size must be a whole number, got nothing",
        ),
        (
            "30,",
            "\"30\",",
            "num_hidden_layers must be a whole number, got \"30\"",
        ),
        (
            "null",
            "{\"rope_type\": \"dynamic\"}",
            "rope_type must be default, linear, llama3 or yarn, got dynamic",
        ),
    ] {
        assert_eq!(edit(from, to).unwrap_err().to_string(), message, "{to}");
    }
    assert!(LlamaConfig::from_hugging_face("{").is_err());
}
