//! Llama-style models: against f64 loops, decoding, and configurations of checkpoints.

use std::f64::consts::PI;

use burn::nn::RmsNorm;
use burn_sparse_transformer::RopeScaling;
use burn_sparse_transformer::llama::{Llama, LlamaConfig};

use crate::common::*;
use crate::golden::{attend, dot, numbers};

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

/// Heads wider than their share of the stream, like in Qwen3.
fn wide() -> LlamaConfig {
    config()
        .with_head_dim(Some(6))
        .with_qk_norm(true)
        .with_tied_embedding(false)
        .with_rope_theta(1e6)
}

/// Of three frequencies one is kept, one interpolated, and one divided.
fn stretched() -> LlamaConfig {
    wide()
        .with_rope_theta(100.0)
        .with_rope_scaling(Some(RopeScaling::Yarn {
            factor: 4.0,
            original_max_position_embeddings: 16,
            beta_fast: 2.0,
            beta_slow: 0.5,
            attention_factor: None,
        }))
}

fn as_llama_3() -> LlamaConfig {
    config()
        .with_rope_theta(10.0)
        .with_rope_scaling(Some(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 2.0,
            original_max_position_embeddings: 8,
        }))
}

fn biased() -> LlamaConfig {
    config()
        .with_qkv_bias(true)
        .with_output_bias(true)
        .with_pattern(Pattern::streaming(7, 2))
}

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

fn norm(norm: &RmsNorm, x: &[f64]) -> Vec<f64> {
    let mean = dot(x, x) / x.len() as f64;
    let scaled = x.iter().zip(numbers(norm.gamma.val()));
    scaled
        .map(|(x, gamma)| x / (mean + norm.epsilon).sqrt() * gamma)
        .collect()
}

/// Returns the frequency of a pair of channels, by the formulas of the papers.
fn frequency(config: &LlamaConfig, pair: usize, width: usize) -> f64 {
    let plain = config.rope_theta.powf(-2.0 * pair as f64 / width as f64);
    let part = |kept: f64, factor: f64| kept * plain + (1.0 - kept) * plain / factor;
    match config.rope_scaling {
        None => plain,
        Some(RopeScaling::Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: original,
        }) => {
            let wavelength = 2.0 * PI / plain;
            let ratio = original as f64 / wavelength;
            if ratio < low {
                plain / factor
            } else if ratio > high {
                plain
            } else {
                part((ratio - low) / (high - low), factor)
            }
        }
        Some(RopeScaling::Yarn {
            factor,
            original_max_position_embeddings: original,
            beta_fast,
            beta_slow,
            ..
        }) => {
            let at = |turns: f64| {
                let ratio = original as f64 / (2.0 * PI * turns);
                width as f64 * ratio.ln() / (2.0 * config.rope_theta.ln())
            };
            let (low, high) = (at(beta_fast).floor().max(0.0), at(beta_slow).ceil());
            let ramp = (pair as f64 - low) / (high.min(width as f64 - 1.0) - low);
            part(1.0 - ramp.clamp(0.0, 1.0), factor)
        }
        _ => panic!("not in these cases"),
    }
}

/// Returns a head of a row, normalized and rotated.
fn placed(head: &[f64], own: &Option<HeadNorm>, at: usize, config: &LlamaConfig) -> Vec<f64> {
    let mut head = match own {
        Some(HeadNorm::Rms(own)) => norm(own, head),
        Some(_) => panic!("an RMS norm"),
        None => head.to_vec(),
    };
    let width = head.len();
    for pair in 0..width / 2 {
        let angle = at as f64 * frequency(config, pair, width);
        let (a, b) = (head[2 * pair], head[2 * pair + 1]);
        head[2 * pair] = a * angle.cos() - b * angle.sin();
        head[2 * pair + 1] = a * angle.sin() + b * angle.cos();
    }
    head
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Computes the logits of a sequence, `[seq, vocab]`, in loops.
fn logits_in_f64(model: &Llama, config: &LlamaConfig, ids: &[usize]) -> Vec<f64> {
    let embed = rows_of(model.embed.weight.val());
    let mut x: Rows = ids.iter().map(|&id| embed[id].clone()).collect();
    let width = config.head_dim.unwrap_or(config.d_model / config.n_heads);
    let scale = match config.rope_scaling {
        Some(RopeScaling::Yarn { factor, .. }) => (0.1 * factor.ln() + 1.0).powi(2),
        _ => 1.0,
    } / (width as f64).sqrt();
    let group = config.n_heads / config.n_kv_heads.unwrap_or(config.n_heads);
    let allowed = config.pattern.layout(1, ids.len(), 8).unwrap().to_dense(0);
    for block in &model.layers {
        let mha = &block.attention;
        let normed: Rows = x.iter().map(|x| norm(&block.attention_norm, x)).collect();
        let [q, k, v] = [&mha.query, &mha.key, &mha.value]
            .map(|layer| normed.iter().map(|x| linear(layer, x)).collect::<Rows>());
        let part = |head: usize| head * width..(head + 1) * width;
        for i in 0..ids.len() {
            let mut seen = Vec::new();
            for h in 0..config.n_heads {
                let query = placed(&q[i][part(h)], &mha.query_norm, i, config);
                let shared = part(h / group);
                let keys = (0..=i).filter(|&j| allowed[i][j]).map(|j| {
                    let key = placed(&k[j][shared.clone()], &mha.key_norm, j, config);
                    (dot(&query, &key) * scale, &v[j][shared.clone()])
                });
                let (out, _) = attend(&keys.collect::<Vec<_>>());
                seen.extend(out);
            }
            add(&mut x[i], &linear(&mha.output, &seen));
        }
        for x in &mut x {
            let normed = norm(&block.mlp_norm, x);
            let up = linear(&block.mlp.up, &normed);
            let gate = linear(&block.mlp.gate, &normed);
            let inner = gate
                .iter()
                .zip(up)
                .map(|(g, up)| g / (1.0 + (-g).exp()) * up);
            add(x, &linear(&block.mlp.down, &inner.collect::<Vec<_>>()));
        }
    }
    x.iter()
        .flat_map(|x| {
            let normed = norm(&model.norm, x);
            match &model.head {
                Some(head) => linear(head, &normed),
                None => embed.iter().map(|row| dot(row, &normed)).collect(),
            }
        })
        .collect()
}

#[rstest]
#[case(config())]
#[case(wide())]
#[case(biased())]
#[case(stretched())]
#[case(as_llama_3())]
fn logits_equal_f64(#[case] config: LlamaConfig) {
    let device = Device::flex();
    let model = randomise(config.init(&device));
    let ids = tokens(2, SEQ, VOCAB, &device);
    let got = model.forward(ids.clone());
    for entry in 0..2 {
        let of_entry = ids.clone().narrow(0, entry, 1).into_data();
        let of_entry: Vec<usize> = of_entry.iter::<i64>().map(|id| id as usize).collect();
        let expected = logits_in_f64(&model, &config, &of_entry);
        let expected = TensorData::new(expected, [1, SEQ, VOCAB]).convert::<f32>();
        let expected = Tensor::from_data(expected, &device);
        assert_close(got.clone().narrow(0, entry, 1), expected, 1e-4);
    }
}

#[rstest]
#[case(config())]
#[case(wide())]
#[case(biased())]
#[case(stretched())]
#[case(config().with_selections(Some(vec!["quest:8,24".parse().unwrap()])))]
fn pieces_give_what_the_whole_gives(#[case] config: LlamaConfig) {
    let device = Device::flex();
    let model = randomise(config.init(&device));
    let ids = tokens(2, SEQ, VOCAB, &device);
    let whole = model.forward(ids.clone());
    let mut cache = model.new_cache();
    let pieces = in_pieces(&[9, 1, 4, 7], |first, count| {
        model.forward_cache(ids.clone().narrow(1, first, count), &mut cache)
    });
    assert_close(pieces, whole, 1e-4);
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
    let [ids, targets] = [(); 2].map(|()| tokens(2, SEQ, VOCAB, &device));
    let loss = model.loss(ids.clone(), targets.clone());
    let logs = burn::tensor::activation::log_softmax(model.forward(ids), 2);
    let picked = logs.gather(2, targets.unsqueeze_dim(2));
    assert_close(loss.clone(), picked.mean().neg().unsqueeze(), 1e-5);
    let gradients = burn::optim::GradientsParams::from_grads(loss.backward(), &model);
    // Seven matrices, two norms and two head norms per layer; embedding, norm and head.
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
    let heads = (smol.d_model, smol.n_heads, smol.n_kv_heads);
    assert_eq!(heads, (576, 9, Some(3)));
    let layers = (smol.d_ff, smol.n_layers, smol.vocab_size);
    assert_eq!(layers, (Some(1536), 30, 49_152));
    let positions = (smol.context, smol.rope_theta, smol.rms_norm_eps);
    assert_eq!(positions, (8192, 1e5, 1e-5));
    assert!(smol.tied_embedding && !smol.qk_norm && smol.rope_scaling.is_none());
    let llama = LlamaConfig::from_hugging_face(LLAMA_3_2).unwrap();
    let scaling = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    let got = (llama.head_dim, llama.rope_scaling);
    assert_eq!(got, (Some(64), Some(scaling)));
    let qwen = LlamaConfig::from_hugging_face(QWEN3).unwrap();
    let got = (qwen.head_dim, qwen.qk_norm, qwen.pattern);
    assert_eq!(got, (Some(128), true, Pattern::causal()));
    let edit = |from: &str, to: &str| LlamaConfig::from_hugging_face(&SMOL_LM2.replace(from, to));
    let of = |kind: &str, more: &str| {
        let json = SMOL_LM2.replace("\"llama\"", &format!("\"{kind}\""));
        LlamaConfig::from_hugging_face(&json.replace(r#""rope_scaling": null"#, more))
    };
    let window = r#""sliding_window": 1024"#;
    let on = format!(r#"{window}, "use_sliding_window": true"#);
    let from = |layers| format!(r#"{on}, "max_window_layers": {layers}"#);
    let types = format!(r#"{window}, "layer_types": ["full_attention", "full_attention"]"#);
    for (kind, more, expected) in [
        ("llama", window, Pattern::causal()),
        ("mistral", window, Pattern::local(1024)),
        ("mistral", r#""sliding_window": null"#, Pattern::causal()),
        ("mistral", r#""other": null"#, Pattern::local(4096)),
        ("mistral", &types, Pattern::causal()),
        ("qwen2", window, Pattern::causal()),
        ("qwen3", &from(30), Pattern::causal()),
        ("qwen3", &from(0), Pattern::local(1024)),
    ] {
        assert_eq!(of(kind, more).unwrap().pattern, expected, "{kind} {more}");
    }
    for (kind, [qkv, output]) in [
        ("llama", [true, true]),
        ("qwen3", [true, true]),
        ("qwen2", [true, false]),
        ("mistral", [false, false]),
    ] {
        let json = SMOL_LM2.replace("\"attention_bias\": false", "\"attention_bias\": true");
        let json = json.replace("\"llama\"", &format!("\"{kind}\""));
        let config = LlamaConfig::from_hugging_face(&json).unwrap();
        let got = [config.qkv_bias, config.output_bias];
        assert_eq!(got, [qkv, output], "{kind}");
    }
    refused! { of("qwen2", &on) => "…in all 30 layers or in none, got a window in 2"; }
    assert_eq!(of("qwen3", window).unwrap().head_dim, Some(128));
    let yarn = r#""rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}"#;
    let yarn = of("qwen2", yarn).unwrap();
    assert_eq!(yarn.context, 32_768);
    // Configurations saved without the paper's numbers get them as defaults.
    let text = r#"{"yarn": {"factor": 4.0, "original_max_position_embeddings": 8192, "attention_factor": null}}"#;
    assert_eq!(yarn.rope_scaling, Some(serde_json::from_str(text).unwrap()));
    let without_bias = |more| {
        let json = SMOL_LM2.replace(r#""attention_bias": false, "#, "");
        LlamaConfig::from_hugging_face(&json.replace(r#""rope_scaling": null"#, more))
    };
    refused! {
        without_bias(r#""partial_rotary_factor": 0.5"#) => "partial_rotary_factor must be 1: rotations of whole heads, got 0.5";
        without_bias(r#""attention_bias": "no""#) => "attention_bias must be true or false, got \"no\"";
        without_bias(r#""rope_scaling": {"type": "yarn", "factor": 4, "mscale": 0.7}"#) => "mscale must be nothing: attention_factor says it, got 0.7";
        without_bias(r#""rope_scaling": {"type": "yarn", "factor": 4, "truncate": false}"#) => "truncate must be true, got false";
        without_bias(r#""rope_scaling": {"type": 3}"#) => "type must be a text, got 3";
    }
    let qwen2 = edit(r#""model_type": "llama""#, r#""model_type": "qwen2""#).unwrap();
    assert!(qwen2.qkv_bias && !qwen2.output_bias);
    refused! {
        edit("\"llama\"", "\"gemma3\"") => "model_type must be llama, mistral, qwen2 or qwen3, got gemma3";
        edit("\"silu\"", "\"gelu\"") => "hidden_act must be silu, got \"gelu\"";
        edit("\"vocab_size\": 49152", "\"vocab\": 1") => "vocab_size must be a whole number, got nothing";
        edit("30,", "\"30\",") => "num_hidden_layers must be a whole number, got \"30\"";
        edit("null", "{\"rope_type\": \"dynamic\"}") => "rope_type must be default, linear, llama3 or yarn, got dynamic";
        LlamaConfig::from_hugging_face("{") => "config.json must be a JSON object…";
    }
}

#[test]
fn layers_of_an_own_model_have_the_whole_table() {
    let device = Device::flex();
    let config = |context| {
        SparseMultiHeadAttentionConfig::new(16, 2, Pattern::causal())
            .with_rope(Some(burn::nn::RotaryEncodingConfig::new(context, 8)))
    };
    let layers = config(24).init_many(3, &device);
    let alone = config(24).init(&device).rope.unwrap().freq_complex;
    for layer in layers {
        assert_close(layer.rope.unwrap().freq_complex, alone.clone(), 0.0);
    }
    let wrong = config(24).with_head_dim(Some(8)).with_d_key(Some(16));
    refused! { wrong.try_init_many(2, &device) => "d_key must be none with head_dim, got some"; }
}
