//! A checkpoint of Hugging Face, in shards, against the logits of `transformers`' own model in f64 (`tests/data/tiny-llama/make.py`).

use std::fs;
use std::path::PathBuf;

use burn::module::{Initializer, Module, Param, ParamId};
use burn::tensor::{Device, Int, Shape, Tensor, TensorData};
use burn_sparse_transformer::llama::{Llama, LlamaConfig};
use burn_sparse_transformer::weights::{KeyMap, WeightsFile, save_safetensors};
use rstest::rstest;

use crate::support::Folder;

const SHAPE: [usize; 3] = [2, 40, 48];

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-llama")
}

fn golden(file: &str) -> Vec<[u8; 4]> {
    let bytes = fs::read(folder().join(file)).unwrap();
    bytes.as_chunks::<4>().0.to_vec()
}

fn load(map: &KeyMap) -> Llama {
    let json = fs::read_to_string(folder().join("config.json")).unwrap();
    let config = LlamaConfig::from_hugging_face(&json).unwrap();
    let model = config.with_block_size(8).init(&Device::flex());
    tiny_llama().load(&model, map).unwrap()
}

pub fn tiny_llama() -> WeightsFile {
    WeightsFile::open(folder()).unwrap()
}

pub fn largest_difference(model: &Llama) -> f32 {
    let [batch, seq, _] = SHAPE;
    let ids = golden("tokens.i32").into_iter().map(i32::from_le_bytes);
    let ids = TensorData::new(ids.collect(), [batch, seq]);
    let logits = golden("logits.f32").into_iter().map(f32::from_le_bytes);
    let got = model.forward(Tensor::<2, Int>::from_data(ids, &Device::flex()));
    assert_eq!(got.dims(), SHAPE);
    let got = got.into_data();
    let pairs = got.iter::<f32>().zip(logits);
    pairs.fold(0.0, |most, (got, expected)| {
        most.max((got - expected).abs())
    })
}

#[test]
fn a_sharded_checkpoint_gives_the_logits_of_transformers() {
    let difference = largest_difference(&load(&KeyMap::llama(4, 2, false)));
    assert!(difference < 1e-4, "{difference}");
}

/// A key map for another number of heads pairs other channels for rotation, which shows that the permutation matters.
#[test]
fn channels_of_a_head_have_to_be_known() {
    let difference = largest_difference(&load(&KeyMap::llama(2, 1, false)));
    assert!(difference > 0.1, "{difference}");
}

#[test]
fn a_saved_model_has_the_names_of_the_checkpoint() {
    let map = KeyMap::llama(4, 2, false);
    let scratch = Folder::new("llama-names");
    let path = scratch.path().join("model.safetensors");
    save_safetensors(&load(&map), &path, &map, false).unwrap();
    let [saved, given] = [path.as_path(), &folder()].map(|path| WeightsFile::open(path).unwrap());
    assert!(saved.names().eq(given.names()));
    for name in saved.names() {
        let [saved, given] = [&saved, &given].map(|file| file.tensor(name).unwrap().unwrap());
        saved.assert_eq(&given, true);
    }
}

/// Options of Qwen2, Qwen3 and models with biases.
#[rstest]
#[case(LlamaConfig::new(16, 4).with_qkv_bias(true), "self_attn.k_proj.bias")]
#[case(LlamaConfig::new(16, 4).with_qk_norm(true).with_head_dim(Some(6)), "self_attn.q_norm.weight")]
#[case(LlamaConfig::new(16, 4).with_output_bias(true), "self_attn.o_proj.bias")]
fn checkpoints_of_other_kinds_come_back(#[case] config: LlamaConfig, #[case] part: &str) {
    let config = config
        .with_n_kv_heads(Some(2))
        .with_vocab_size(11)
        .with_n_layers(2);
    let config = config.with_context(32).with_block_size(8);
    let device = Device::flex();
    let mut model = config.init(&device);
    // Distinct biases and gains instead of 0 and 1.
    for block in &mut model.layers {
        let attention = &mut block.attention;
        let [q, k] = [&mut attention.query, &mut attention.key];
        for layer in [q, k, &mut attention.output] {
            layer.bias = layer.bias.take().map(|bias| drawn(&bias.dims(), &device));
        }
        let norms = [&mut attention.query_norm, &mut attention.key_norm].into_iter();
        for norm in norms.flatten() {
            if let burn_sparse_transformer::HeadNorm::Rms(norm) = norm {
                norm.gamma = drawn(&norm.gamma.dims(), &device);
            }
        }
    }
    let map = KeyMap::llama(4, 2, true);
    let scratch = Folder::new(&format!("llama-{}", part.replace('.', "-")));
    let path = scratch.path().join("model.safetensors");
    save_safetensors(&model, &path, &map, false).unwrap();
    let file = WeightsFile::open(&path).unwrap();
    let name = format!("model.layers.1.{part}");
    let has = |name: &str| file.names().any(|found| found == name);
    assert!(has(&name) && !has("lm_head.weight"));
    let loaded = file.load(&config.init(&device), &map).unwrap();
    let tokens = Tensor::<2, Int>::from_data([[3, 1, 4, 1, 5, 9, 2, 6]], &device);
    let [expected, got] = [&model, &loaded].map(|model| model.forward(tokens.clone()).into_data());
    got.assert_eq(&expected, true);
}

fn drawn(dims: &[usize; 1], device: &Device) -> Param<Tensor<1>> {
    Initializer::Uniform { min: 0.5, max: 1.5 }.init(*dims, device)
}

#[derive(Module, Debug)]
struct Lazy {
    weight: Param<Tensor<2>>,
}

#[test]
fn values_that_are_loaded_over_are_not_drawn() {
    let device = Device::flex();
    let scratch = Folder::new("lazy");
    let path = scratch.path().join("lazy.safetensors");
    let weight = Tensor::from_data([[1.0, 2.0, 3.0]], &device);
    let saved = Lazy {
        weight: Param::from_tensor(weight),
    };
    save_safetensors(&saved, &path, &KeyMap::default(), false).unwrap();
    let (id, shape) = (ParamId::new(), Shape::new([1, 3]));
    let weight = Param::uninitialized(id, |_, _| panic!("it is drawn"), device, true, shape);
    let file = WeightsFile::open(&path).unwrap();
    let loaded = file.load(&Lazy { weight }, &KeyMap::default()).unwrap();
    let [loaded, saved] = [loaded, saved].map(|of| of.weight.val().into_data());
    loaded.assert_eq(&saved, true);
}

#[test]
fn shards_that_do_not_fit_are_named() {
    let index = "model.safetensors.index.json";
    let list = fs::read_to_string(folder().join(index)).unwrap();
    let shards: Vec<String> = ["1", "2"]
        .map(|n| format!("model-0000{n}-of-00002.safetensors"))
        .into();
    let open = |list: &str, files: &[String]| {
        let scratch = Folder::new("shards");
        fs::write(scratch.path().join(index), list).unwrap();
        for file in files {
            fs::copy(folder().join(file), scratch.path().join(file)).unwrap();
        }
        WeightsFile::open(scratch.path())
    };
    let renamed = list.replace("model.norm.weight", "model.other.weight");
    let outside = list.replace(&shards[0], "../a.safetensors");
    let swapped = list
        .replace(&shards[0], "x")
        .replace(&shards[1], &shards[0])
        .replace('x', &shards[1]);
    let empty = Folder::new("shards-empty");
    refused! {
        open(&list, &shards[..1]) => format!("…{}…", shards[1]);
        open(&renamed, &shards) => "…has no tensor model.other.weight…";
        open(&outside, &shards) => "…is no name of a safetensors file…";
        open("{", &shards) => "…EOF…";
        open(&swapped, &shards) => "…but listed in…";
        WeightsFile::open(empty.path()) => "…model.safetensors…";
    }
}
