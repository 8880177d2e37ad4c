//! Files of weights, and numerical comparison.

use std::path::{Path, PathBuf};

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_sparse_transformer::weights::WeightsFile;
use burn_sparse_transformer::{Factorization, Pattern, SparseTransformer, SparseTransformerConfig};

pub fn path(name: &str) -> PathBuf {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/weights");
    PathBuf::from(folder).join(name)
}

pub fn open(name: &str) -> WeightsFile {
    WeightsFile::open(path(name)).unwrap()
}

/// A file of this process that is removed at the end.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let folder = std::env::temp_dir();
        Self(folder.join(format!("weights-{}-{name}", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A test that failed before the file existed has reported that itself.
        std::fs::remove_file(&self.0).ok();
    }
}

/// A folder of this process that is removed at the end.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let folder = Scratch::new(name).0.clone();
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

fn data(file: &WeightsFile, name: &str) -> TensorData {
    file.tensor(name).unwrap().unwrap()
}

pub fn floats(file: &WeightsFile, name: &str) -> Vec<f32> {
    data(file, name).try_to_vec().unwrap()
}

/// `[batch, seq]`
pub fn ints(file: &WeightsFile, name: &str) -> Tensor<2, Int> {
    Tensor::from_data(data(file, name), &Device::flex())
}

pub fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.try_into_vec_as().unwrap()
}

/// Asserts that numbers differ by no more than 1e-4.
pub fn assert_close(got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len());
    let errors = got.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let (worst, error) = errors
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .unwrap();
    assert!(
        error <= 1e-4,
        "number {worst} is {}, not {}",
        got[worst],
        expected[worst]
    );
    let is_right = expected.iter().any(|x| x.abs() > 0.5);
    assert!(is_right, "too small to compare");
}

/// Makes the model of `own.json`, with another vocabulary.
pub fn own_model(vocab_size: usize) -> SparseTransformer {
    let patterns = vec![Pattern::local(6), Pattern::fixed(8, 2)];
    SparseTransformerConfig::new(8, 2, Factorization::Merged(patterns))
        .with_vocab_size(vocab_size)
        .with_context(24)
        .with_n_layers(2)
        .with_embedding_width(Some(8))
        .with_d_ff(Some(16))
        .with_block_size(8)
        .init(&Device::flex())
}
