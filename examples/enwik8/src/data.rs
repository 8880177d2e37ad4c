//! Bytes, their splits, and their order in training.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::TensorData;
use clap::ValueEnum;
use indicatif::HumanCount;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::images::format::{PictureSet, Pictures};
use crate::windows::Cut;

/// The first 1,000,000 bytes of enwik8; see `data/README.md` for authors and licence.
static SAMPLE: &[u8] = include_bytes!("../data/enwik8-1mb");

/// Length of the full enwik8.
const ENWIK8_BYTES: usize = 100_000_000;

/// Identity of a checkpoint's data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// File or folder; `None` for the embedded sample and for the synthetic set of images.
    pub path: Option<PathBuf>,
    pub bytes: usize,
    pub crc32: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// The first 90%.
    Train,
    /// The next 5%.
    Validation,
    /// The last 5%.
    Test,
}

impl Split {
    const ALL: [Self; 3] = [Split::Train, Split::Validation, Split::Test];

    pub fn name(self) -> &'static str {
        match self {
            Split::Train => "training",
            Split::Validation => "validation",
            Split::Test => "test",
        }
    }
}

pub struct Corpus {
    path: Option<PathBuf>,
    bytes: Vec<u8>,
    /// Training, validation and test.
    splits: [Range<usize>; 3],
    /// Format of the images, if `bytes` are records of images.
    pictures: Option<Pictures>,
}

impl Corpus {
    /// Reads the `path` of `--data`, or opens the embedded sample or, for images, the synthetic set.
    pub fn open(path: Option<&Path>, pictures: Option<Pictures>) -> Result<Self> {
        match path {
            Some(_) => Self::read(path, pictures).context("--data"),
            None => Self::read(path, pictures),
        }
    }

    fn read(path: Option<&Path>, pictures: Option<Pictures>) -> Result<Self> {
        if let Some(pictures) = pictures {
            let set = PictureSet::open(path, pictures)?;
            return Ok(Corpus {
                path: set.path,
                bytes: set.records,
                splits: set.splits,
                pictures: Some(pictures),
            });
        }
        let Some(path) = path else {
            return Ok(Corpus::text(None, SAMPLE.to_vec()));
        };
        ensure!(
            !path.is_dir(),
            "cannot read {}: it is a folder, not a file of raw bytes",
            path.display()
        );
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        ensure!(
            !bytes.is_empty(),
            "{} is empty: there is nothing to train on",
            path.display()
        );
        // An absolute path remains valid when a run is resumed from elsewhere.
        Ok(Corpus::text(Some(std::path::absolute(path)?), bytes))
    }

    fn text(path: Option<PathBuf>, bytes: Vec<u8>) -> Self {
        Corpus {
            path,
            splits: Split::ALL.map(|split| split_range(bytes.len(), split)),
            bytes,
            pictures: None,
        }
    }

    /// Reopens the data of a checkpoint, or what the user names instead.
    pub fn reopen(
        fingerprint: &Fingerprint,
        instead: Option<&Path>,
        pictures: Option<Pictures>,
    ) -> Result<Self> {
        match instead {
            Some(path) => Self::open(Some(path), pictures),
            None => Self::read(fingerprint.path.as_deref(), pictures),
        }
    }

    /// Describes the source of the bytes in one line.
    pub fn describe(&self) -> String {
        let path = self.path.as_ref().map(|path| path.display().to_string());
        let (source, unit, record) = match (self.pictures, path) {
            (Some(pictures), path) => {
                let (side, classes) = (pictures.side, pictures.classes);
                let path = path.unwrap_or("a synthetic set (--data DIR for CIFAR-10)".to_owned());
                let halved = if pictures.halved { ", halved" } else { "" };
                let source = format!(
                    "{path}: pictures of {side} × {side} pixels{halved}, {classes} classes"
                );
                (source, "pictures", pictures.record())
            }
            (None, path) => {
                let source = match path {
                    None => "the first 1,000,000 bytes of enwik8 (embedded; --data FILE for more)"
                        .to_owned(),
                    Some(path) if self.bytes.len() == ENWIK8_BYTES => {
                        format!("{path}: the full enwik8, by its length of 100,000,000 bytes")
                    }
                    Some(path) => format!("{path}: {} bytes", thousands(self.bytes.len())),
                };
                (source, "bytes", 1)
            }
        };
        let [train, validation, test] =
            Split::ALL.map(|split| thousands(self.split(split).len() / record));
        format!(
            "{source}\n          split into {train} / {validation} / {test} {unit} (train / validation / test)"
        )
    }

    /// Returns the identity of these bytes.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint {
            path: self.path.clone(),
            bytes: self.bytes.len(),
            crc32: crc32fast::hash(&self.bytes),
        }
    }

    /// Returns the entropy of single bytes, in bits: the best that a model without context can reach. Classes are not counted.
    pub fn order_0_entropy(&self) -> f64 {
        let record = self.pictures.map_or(usize::MAX, Pictures::record);
        let skipped = usize::from(self.pictures.is_some());
        order_0_entropy((self.bytes.chunks(record)).flat_map(|record| &record[skipped..]))
    }

    pub fn split(&self, split: Split) -> &[u8] {
        &self.bytes[self.splits[split as usize].clone()]
    }

    /// Returns the bytes of a split, which must hold at least one window.
    ///
    /// # Errors
    /// If the split has fewer than `context + 1` bytes; names the file and the way out.
    pub fn split_for(&self, split: Split, context: usize) -> Result<&[u8]> {
        let bytes = self.split(split);
        if bytes.len() > context {
            return Ok(bytes);
        }
        let name = match &self.path {
            Some(path) => path.display().to_string(),
            None => "the embedded sample".to_owned(),
        };
        ensure!(
            self.pictures.is_none(),
            "{name} has too few pictures: none is left for the {} split; use at least 20, or 25 beside a test_batch.bin",
            split.name()
        );
        bail!(
            "{name} is too short for a context of {context}: its {} bytes leave {} for the {} split, and a window \
             needs {}; use a longer file (at least {} bytes) or a smaller --context",
            thousands(self.bytes.len()),
            thousands(bytes.len()),
            split.name(),
            thousands(context + 1),
            // Smallest length whose 5% splits hold one window.
            thousands((context + 1) * 20),
        )
    }
}

fn split_range(bytes: usize, split: Split) -> Range<usize> {
    let twentieth = bytes / 20;
    let train = bytes - 2 * twentieth;
    match split {
        Split::Train => 0..train,
        Split::Validation => train..train + twentieth,
        Split::Test => train + twentieth..bytes,
    }
}

fn order_0_entropy<'a>(bytes: impl IntoIterator<Item = &'a u8>) -> f64 {
    let mut counts = [0u64; 256];
    for &byte in bytes {
        counts[usize::from(byte)] += 1;
    }
    let total = counts.iter().sum::<u64>() as f64;
    counts
        .iter()
        .filter(|&&count| count > 0)
        .map(|&count| count as f64 / total)
        .map(|p| -p * p.log2())
        .sum()
}

/// Position of training in its data, sufficient to continue with the next window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplerState {
    /// Number of completed epochs.
    pub epoch: usize,
    /// Number of windows of this epoch already used.
    pub used: usize,
    /// State of the generator before this epoch was shuffled.
    pub rng: ChaCha8Rng,
}

impl SamplerState {
    /// Returns the state of a new run.
    pub fn new(seed: u64) -> Self {
        SamplerState {
            epoch: 0,
            used: 0,
            rng: ChaCha8Rng::seed_from_u64(seed),
        }
    }
}

/// Training windows without replacement. Each epoch cuts the bytes from a random phase into windows of `context + 1` (successive windows share one byte), or
/// into images, and visits them in random order.
pub struct Sampler {
    bytes: usize,
    cut: Cut,
    state: SamplerState,
    order: Vec<usize>,
}

impl Sampler {
    /// Begins a run. `bytes` must exceed the context.
    pub fn new(bytes: usize, cut: Cut, seed: u64) -> Self {
        Sampler::resume(bytes, cut, SamplerState::new(seed))
    }

    /// Continues at `state`.
    pub fn resume(bytes: usize, cut: Cut, state: SamplerState) -> Self {
        let context = cut.context();
        assert!(
            bytes > context,
            "{bytes} bytes hold no window of {context} + 1"
        );
        let order = cut.shuffled(bytes, &mut state.rng.clone());
        Sampler {
            bytes,
            cut,
            state,
            order,
        }
    }

    /// Returns the state to store in a checkpoint.
    pub fn state(&self) -> &SamplerState {
        &self.state
    }

    /// Returns the next windows of these bytes: tokens and targets.
    pub fn batch(&mut self, bytes: &[u8], windows: usize) -> [TensorData; 2] {
        let starts: Vec<usize> = (0..windows).map(|_| self.next_start()).collect();
        self.cut.data(bytes, &starts)
    }

    /// Returns the beginning of the next window.
    fn next_start(&mut self) -> usize {
        if self.state.used == self.order.len() {
            self.cut.shuffled(self.bytes, &mut self.state.rng);
            self.state.epoch += 1;
            self.state.used = 0;
            self.order = self.cut.shuffled(self.bytes, &mut self.state.rng.clone());
        }
        self.state.used += 1;
        self.order[self.state.used - 1]
    }
}

/// Formats `1234567` as `1,234,567`.
pub fn thousands(number: usize) -> String {
    HumanCount(number as u64).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_full_enwik8_splits_as_customary() {
        let lengths = Split::ALL.map(|split| split_range(ENWIK8_BYTES, split));
        assert_eq!(
            lengths,
            [
                0..90_000_000,
                90_000_000..95_000_000,
                95_000_000..100_000_000
            ]
        );
    }

    #[test]
    fn splits_cover_any_length_once() {
        for bytes in [0, 1, 19, 20, 21, 1_000_003] {
            let [train, validation, test] = Split::ALL.map(|split| split_range(bytes, split));
            assert_eq!(
                (train.start, train.end, validation.end),
                (0, validation.start, test.start)
            );
            assert_eq!(test.end, bytes);
        }
    }

    #[test]
    fn the_sample_has_the_entropy_of_english_wiki_markup() {
        let corpus = Corpus::open(None, None).unwrap();
        assert_eq!(corpus.bytes.len(), 1_000_000);
        let entropy = corpus.order_0_entropy();
        assert!((5.0..5.2).contains(&entropy), "{entropy}");
    }

    #[test]
    fn entropy_of_known_distributions() {
        assert_eq!(order_0_entropy(b"aaaa"), 0.0);
        assert_eq!(order_0_entropy(b"abab"), 1.0);
        assert!((order_0_entropy(&(0..=255).collect::<Vec<u8>>()) - 8.0).abs() < 1e-12);
    }

    #[test]
    fn an_epoch_visits_every_window_once() {
        let (bytes, context) = (1_000, 32);
        let mut sampler = Sampler::new(bytes, Cut::from(context), 7);
        for epoch in 0..3 {
            let windows = sampler.order.len();
            let starts: HashSet<_> = (0..windows).map(|_| sampler.next_start()).collect();
            assert_eq!(sampler.state().epoch, epoch);
            assert_eq!(starts.len(), windows);
            assert!(starts.iter().all(|start| start + context < bytes));
            assert!(windows >= (bytes - context) / context);
            sampler.next_start();
            sampler.state.used = 0;
        }
    }

    #[test]
    fn a_stored_state_continues_the_same_order() {
        let mut sampler = Sampler::new(500, Cut::from(16), 3);
        for taken in 0..100 {
            let stored = serde_json::to_string(sampler.state()).unwrap();
            let mut resumed =
                Sampler::resume(500, Cut::from(16), serde_json::from_str(&stored).unwrap());
            let mut original = Sampler::resume(500, Cut::from(16), sampler.state().clone());
            let expected: Vec<_> = (0..80).map(|_| original.next_start()).collect();
            let actual: Vec<_> = (0..80).map(|_| resumed.next_start()).collect();
            assert_eq!(actual, expected, "after {taken} windows");
            sampler.next_start();
        }
    }

    #[test]
    fn the_smallest_corpus_still_gives_windows() {
        let mut sampler = Sampler::new(17, Cut::from(16), 0);
        assert_eq!([sampler.next_start(), sampler.next_start()], [0, 0]);
    }
}
