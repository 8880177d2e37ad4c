//! A checkpoint of Hugging Face, in shards, beside the logits of `transformers`' own model in f64 (`tests/data/tiny-llama/make.py`).

use std::fs;
use std::path::PathBuf;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_sparse_transformer::llama::{Llama, LlamaConfig};
use burn_sparse_transformer::weights::{KeyMap, WeightsFile};

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
    let ids: Vec<i32> = golden("tokens.i32")
        .into_iter()
        .map(i32::from_le_bytes)
        .collect();
    let ids = TensorData::new(ids, [batch, seq]);
    let logits: Vec<f32> = golden("logits.f32")
        .into_iter()
        .map(f32::from_le_bytes)
        .collect();
    let got = model.forward(Tensor::<2, Int>::from_data(ids, &Device::flex()));
    assert_eq!(got.dims(), SHAPE);
    let got = got.into_data();
    let pairs = got.iter::<f32>().zip(logits);
    pairs
        .map(|(got, expected)| (got - expected).abs())
        .fold(0.0, f32::max)
}

#[test]
fn a_sharded_checkpoint_gives_the_logits_of_transformers() {
    let difference = largest_difference(&load(&KeyMap::llama(4, 2, false)));
    assert!(difference < 1e-4, "{difference}");
}

/// A map that says of another number of heads which channels turn together shows that the permutation counts.
#[test]
fn channels_of_a_head_have_to_be_known() {
    let difference = largest_difference(&load(&KeyMap::llama(2, 1, false)));
    assert!(difference > 0.1, "{difference}");
}
