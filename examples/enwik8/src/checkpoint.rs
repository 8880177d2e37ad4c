//! One file per checkpoint: everything a run needs to continue bit for bit.
//!
//! ```text
//! "BSTRAIN1"  crc32: u32   header, model, optimizer lengths: 3 × u64   header (JSON)  model  optimizer
//! ```
//! Integers are little-endian; the checksum covers everything after it. Model and optimizer are Burn records. They preserve every bit of the weights and of
//! Adam's moments and step counts, and the parameter ids that connect the two. The header has the rest: step, data order, random generator, configuration.
//!
//! A checkpoint appears under its name only when it is complete and on disk: it is written to a temporary file in the same folder, synced and renamed. A
//! process killed at any moment leaves the previous checkpoints intact.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use burn::module::Module;
use burn_fused_ops::optim::FusedAdamW;
use burn_sparse_transformer::SparseTransformer;
use serde::{Deserialize, Serialize};

use crate::config::RunConfig;
use crate::data::{Fingerprint, SamplerState};
use crate::files::write_atomically;

const MAGIC: &[u8; 8] = b"BSTRAIN1";
/// Bytes of magic, checksum and three lengths.
const PREAMBLE: usize = 8 + 4 + 3 * 8;

/// Metadata of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Version of the program that wrote it.
    pub program: String,
    pub config: RunConfig,
    pub data: Fingerprint,
    /// Number of optimizer steps taken.
    pub step: usize,
    /// Position in the training data.
    pub sampler: SamplerState,
    /// Best validation so far.
    pub best: Option<Best>,
}

impl Header {
    /// Returns the header of a new run.
    pub fn new(config: RunConfig, data: Fingerprint) -> Self {
        Self {
            program: env!("CARGO_PKG_VERSION").to_owned(),
            sampler: SamplerState::new(config.recipe.seed),
            config,
            data,
            step: 0,
            best: None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Number of steps taken when it was measured.
    pub step: usize,
    pub bits_per_byte: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// Metadata.
    pub header: Header,
    /// Burn's module record.
    pub model: Vec<u8>,
    /// Burn's optimizer record.
    pub optimizer: Vec<u8>,
}

impl Checkpoint {
    /// Creates a checkpoint of a model and its optimizer in their present state.
    pub fn new(header: Header, model: SparseTransformer, optimizer: &FusedAdamW) -> Result<Self> {
        let model = model.into_record().into_bytes();
        let step = header.step;
        let stored = || -> Result<_> {
            let model = model.map_err(|error| anyhow!("{error}"))?;
            Ok((model.to_vec(), optimizer.to_bytes()?.to_vec()))
        };
        let stored = stored().with_context(|| format!("cannot store the state of step {step}"));
        let (model, optimizer) = stored?;
        Ok(Self {
            header,
            model,
            optimizer,
        })
    }

    /// Writes the checkpoint atomically: `path` never contains a part of it.
    pub fn write(&self, path: &Path) -> Result<()> {
        let header = serde_json::to_vec(&self.header)?;
        let sections: [&[u8]; 3] = [&header, &self.model, &self.optimizer];
        let lengths = sections
            .map(|section| (section.len() as u64).to_le_bytes())
            .concat();
        let mut checksum = crc32fast::Hasher::new();
        checksum.update(&lengths);
        for section in sections {
            checksum.update(section);
        }

        write_atomically(path, |file| {
            file.write_all(MAGIC)?;
            file.write_all(&checksum.clone().finalize().to_le_bytes())?;
            file.write_all(&lengths)?;
            sections
                .iter()
                .try_for_each(|section| file.write_all(section))
        })
        .map_err(|error| anyhow!("{}: {error}", path.display()))
    }

    /// Reads a checkpoint. The error says whether a file is unreadable, foreign, truncated, corrupted or of another version.
    pub fn read(of: &Path) -> Result<Self> {
        let path = of.display();
        let bytes = fs::read(of).map_err(|error| anyhow!("{path}: {error}"))?;
        ensure!(
            bytes.starts_with(MAGIC) || MAGIC.starts_with(&bytes),
            "{path} is not a checkpoint of this program"
        );
        let check_length = |expected: u64| {
            let found = bytes.len();
            ensure!(
                found as u64 >= expected,
                "{path} is truncated: {found} bytes instead of {expected}"
            );
            Ok(())
        };
        check_length(PREAMBLE as u64)?;
        let lengths = bytes[12..PREAMBLE].as_chunks().0.iter();
        let lengths: Vec<u64> = lengths.map(|&length| u64::from_le_bytes(length)).collect();
        let sum = |sum: u64, length: &u64| sum.saturating_add(*length);
        check_length(lengths.iter().fold(PREAMBLE as u64, sum))?;
        let expected = bytes[8..]
            .first_chunk()
            .map(|&bytes| u32::from_le_bytes(bytes));
        let expected = expected.unwrap_or_default();
        let found = crc32fast::hash(&bytes[12..]);
        ensure!(
            expected == found,
            "{path} is corrupted: its checksum is {found:08x}, but {expected:08x} was written"
        );

        // The lengths sum to at most the file's, so they fit usize.
        let (header, rest) = bytes[PREAMBLE..].split_at(lengths[0] as usize);
        let (model, optimizer) = rest.split_at(lengths[1] as usize);
        let header = serde_json::from_slice(header).map_err(|error| {
            anyhow!("{path} was written by another version of this program: {error}")
        })?;
        Ok(Checkpoint {
            header,
            model: model.to_vec(),
            optimizer: optimizer.to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Sampler;
    use crate::presets::{Length, Preset};
    use crate::windows::Cut;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn checkpoint() -> Checkpoint {
        Checkpoint {
            header: Header {
                program: "0".to_owned(),
                config: RunConfig::read(Preset::Tiny, "").unwrap(),
                data: Fingerprint {
                    path: None,
                    bytes: 100,
                    crc32: 1,
                },
                step: 3,
                sampler: Sampler::new(100, Cut::from(10), 1).state().clone(),
                best: Some(Best {
                    step: 2,
                    bits_per_byte: 4.5,
                }),
            },
            model: (0..200).collect(),
            optimizer: vec![9; 77],
        }
    }

    /// Returns a folder, a checkpoint file in it, and its bytes.
    fn written() -> (tempfile::TempDir, std::path::PathBuf, Vec<u8>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.ckpt");
        checkpoint().write(&path).unwrap();
        let bytes = fs::read(&path).unwrap();
        (folder, path, bytes)
    }

    #[test]
    fn round_trip() {
        let (folder, path, _) = written();
        assert_eq!(Checkpoint::read(&path).unwrap(), checkpoint());
        let files = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(files, 1, "no temporary file is left");
        let failed = write_atomically(&path, |file| {
            file.write_all(b"half")?;
            Err(std::io::Error::other("disk full"))
        });
        assert!(failed.is_err());
        assert_eq!(Checkpoint::read(&path).unwrap(), checkpoint());
    }

    #[test]
    fn every_bit_of_every_float_is_kept() {
        let (_folder, path, _) = written();
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        let mut float = || rng.random::<f64>() * 10f64.powi(rng.random_range(-12..12));
        for _ in 0..100 {
            let mut checkpoint = checkpoint();
            let Header { config, best, .. } = &mut checkpoint.header;
            config.recipe.length = Length::Epochs(float());
            config.recipe.learning_rate = float();
            config.model.init_scale = float();
            *best = Some(Best {
                step: 2,
                bits_per_byte: float(),
            });
            checkpoint.write(&path).unwrap();
            assert_eq!(Checkpoint::read(&path).unwrap().header, checkpoint.header);
        }
    }

    #[test]
    fn every_truncation_and_every_flipped_byte_is_noticed() {
        let (_folder, path, good) = written();
        let assert_says = |bytes: &[u8], what: &str, words: &[&str]| {
            fs::write(&path, bytes).unwrap();
            let error = Checkpoint::read(&path).unwrap_err().to_string();
            let says = words.iter().any(|word| error.contains(word));
            assert!(says, "{what}: {error}");
        };
        for length in 0..good.len() {
            assert_says(&good[..length], &length.to_string(), &["is truncated"]);
        }
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            let words: &[&str] = match at {
                0..8 => &["is not a checkpoint"],
                // A length that grew looks like a truncated file.
                12..PREAMBLE => &["is corrupted", "is truncated"],
                _ => &["is corrupted"],
            };
            assert_says(&bad, &format!("byte {at}"), words);
        }
        assert_says(b"hello", "text", &["is not a checkpoint"]);
        let missing = Checkpoint::read(Path::new("missing")).unwrap_err();
        assert!(missing.to_string().starts_with("missing: "), "{missing}");
    }
}
