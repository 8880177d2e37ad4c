//! Image sets in CIFAR-10's binary format. In memory, the channels of a pixel are adjacent.
//!
//! A file is a sequence of records: a byte for the class, and the image's red, green and blue planes, row by row.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use super::synthetic;
use crate::files::entries;

/// Bytes of a pixel: red, green and blue.
pub const CHANNELS: usize = 3;
/// Value of `--data` for the set that the program generates.
pub const SYNTHETIC: &str = "synthetic";

/// Format of a run's images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pictures {
    /// Pixels of a row, and rows.
    pub side: usize,
    /// Number of classes, each of which has a start token.
    pub classes: usize,
    /// True if the data's images are twice as wide and high, and reduced to the means of four pixels.
    #[serde(default)]
    pub halved: bool,
}

impl Pictures {
    /// Returns the bytes of a row.
    pub fn row(self) -> usize {
        CHANNELS * self.side
    }

    /// Returns the bytes of an image, all of which are predicted.
    pub fn bytes(self) -> usize {
        self.side * self.row()
    }

    /// Returns the bytes of a record: one more than an image's, for the class.
    pub fn record(self) -> usize {
        1 + self.bytes()
    }

    /// Returns the number of bytes and start tokens.
    pub fn vocabulary(self) -> usize {
        256 + self.classes
    }

    /// Returns the token that an image of a class begins with.
    pub fn start_token(class: u8) -> u32 {
        256 + u32::from(class)
    }

    /// Returns the pixels of a row in files.
    fn side_in_files(self) -> usize {
        match self.halved {
            true => 2 * self.side,
            false => self.side,
        }
    }

    /// Returns the records of a file, with the channels last.
    fn read(self, bytes: &[u8], name: &str) -> Result<Vec<u8>> {
        let side = self.side_in_files();
        let record = 1 + CHANNELS * side * side;
        ensure!(
            !bytes.is_empty() && bytes.len().is_multiple_of(record),
            "{name} has {} bytes, which is no whole number of pictures: one of {side} × {side} pixels takes {record}, a byte for \
             the class and {CHANNELS} · {side}² for the pixels; --picture-size says how wide they are",
            bytes.len()
        );
        let mut held = Vec::with_capacity(bytes.len() / record * self.record());
        for (index, picture) in bytes.chunks(record).enumerate() {
            let (class, planes) = (picture[0], &picture[1..]);
            ensure!(
                usize::from(class) < self.classes,
                "picture {index} of {name} is of class {class}, but there are {} classes, from 0 on; --classes says how many",
                self.classes
            );
            held.push(class);
            let value = |channel: usize, y: usize, x: usize| {
                u16::from(planes[(channel * side + y) * side + x])
            };
            for y in 0..self.side {
                for x in 0..self.side {
                    held.extend((0..CHANNELS).map(|channel| match self.halved {
                        false => value(channel, y, x) as u8,
                        true => {
                            let [y, x] = [2 * y, 2 * x];
                            let four = value(channel, y, x)
                                + value(channel, y, x + 1)
                                + value(channel, y + 1, x)
                                + value(channel, y + 1, x + 1);
                            // Rounded.
                            ((four + 2) / 4) as u8
                        }
                    }));
                }
            }
        }
        Ok(held)
    }
}

/// All records of a set, and their splits for training, validation and test.
pub struct PictureSet {
    /// Path of the set; `None` if the program generated it.
    pub path: Option<PathBuf>,
    /// Records of [`Pictures::record`] bytes each.
    pub records: Vec<u8>,
    /// Splits, in bytes.
    pub splits: [Range<usize>; 3],
}

impl PictureSet {
    /// Reads a file, or a folder with CIFAR-10's files, or generates the synthetic set.
    ///
    /// A folder's `test_batch.bin` is the test split; the last 1/25 of its other images is the validation split, which leaves 48,000 of CIFAR-10's for
    /// training, as in the paper. Without such a file, and for a single file, 1/20 is for validation and 1/20 for test.
    pub fn open(path: Option<&Path>, pictures: Pictures) -> Result<Self> {
        let Some(path) = path.filter(|path| *path != Path::new(SYNTHETIC)) else {
            let bytes = synthetic::file(pictures.side_in_files());
            let records = pictures.read(&bytes, "the synthetic set")?;
            return Ok(Self::new(None, records, None, pictures));
        };
        // An absolute path remains valid when a run is resumed from elsewhere.
        let absolute = Some(std::path::absolute(path)?);
        let read = |path: &Path| -> Result<Vec<u8>> {
            let name = path.display().to_string();
            let bytes = fs::read(path).with_context(|| format!("cannot read {name}"))?;
            pictures.read(&bytes, &name)
        };
        if !path.is_dir() {
            return Ok(Self::new(absolute, read(path)?, None, pictures));
        }
        let (train, test) = batches(path)?;
        let mut records = Vec::new();
        for file in &train {
            records.extend(read(file)?);
        }
        let test = test.map(|file| read(&file)).transpose()?;
        Ok(Self::new(absolute, records, test, pictures))
    }

    fn new(
        path: Option<PathBuf>,
        mut records: Vec<u8>,
        test: Option<Vec<u8>>,
        pictures: Pictures,
    ) -> Self {
        let record = pictures.record();
        let count = records.len() / record;
        let (validation, held_out) = match &test {
            Some(_) => (count / 25, 0),
            None => (count / 20, count / 20),
        };
        records.extend(test.into_iter().flatten());
        let from = (count - validation - held_out) * record;
        let to = from + validation * record;
        Self {
            path,
            splits: [0..from, from..to, to..records.len()],
            records,
        }
    }
}

/// Lists the files of a folder with CIFAR-10, or of the subfolder that its archive creates.
fn batches(folder: &Path) -> Result<(Vec<PathBuf>, Option<PathBuf>)> {
    let unpacked = folder.join("cifar-10-batches-bin");
    for folder in [folder, &unpacked].into_iter().filter(|path| path.is_dir()) {
        let name = |path: &Path| path.file_name().unwrap_or_default().display().to_string();
        let is_batch = |path: &PathBuf| {
            let name = name(path);
            name.starts_with("data_batch") && name.ends_with(".bin")
        };
        let mut train = entries(folder)?;
        train.retain(is_batch);
        train.sort();
        let test = Some(folder.join("test_batch.bin")).filter(|path| path.exists());
        if !train.is_empty() {
            return Ok((train, test));
        }
    }
    bail!(
        "{} has no data_batch_*.bin: --data takes a folder with the binary version of CIFAR-10, a file of such pictures, or '{SYNTHETIC}'",
        folder.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Pictures = Pictures {
        side: 2,
        classes: 3,
        halved: false,
    };

    /// Returns a record whose bytes are all different.
    fn record(class: u8, first: u8) -> Vec<u8> {
        let planes = (0..12).map(|index| first + index);
        std::iter::once(class).chain(planes).collect()
    }

    #[test]
    fn planes_become_pixels() {
        let file = [record(2, 0), record(0, 100)].concat();
        let held = SMALL.read(&file, "x").unwrap();
        let pixels = [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11];
        assert_eq!(held[..13], [&[2][..], &pixels].concat());
        assert_eq!(
            held[13..],
            [&[0][..], &pixels.map(|byte| byte + 100)].concat()
        );
    }

    #[test]
    fn halves_are_means_of_four_pixels() {
        let half = Pictures {
            side: 1,
            halved: true,
            ..SMALL
        };
        let file = [&[1, 0, 1, 2, 4][..], &[10; 4], &[255, 255, 255, 254]].concat();
        assert_eq!(half.read(&file, "x").unwrap(), [1, 2, 10, 255]);
    }

    #[test]
    fn folders_are_read_in_order_and_split_as_the_paper_does() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("cifar-10-batches-bin");
        fs::create_dir(&inner).unwrap();
        for (name, count) in [
            ("data_batch_1.bin", 30u8),
            ("data_batch_2.bin", 20),
            ("test_batch.bin", 7),
        ] {
            let records: Vec<u8> = (0..count).flat_map(|index| record(0, index)).collect();
            fs::write(inner.join(name), records).unwrap();
        }
        fs::write(inner.join("batches.meta.txt"), "cat").unwrap();
        for path in [folder.path(), inner.as_path()] {
            let set = PictureSet::open(Some(path), SMALL).unwrap();
            let counts = set.splits.clone().map(|split| split.len() / 13);
            assert_eq!(counts, [48, 2, 7]);
            let first = |split: usize| set.records[set.splits[split].start + 1];
            assert_eq!([first(0), first(1), first(2)], [0, 18, 0]);
        }
        let file = inner.join("data_batch_2.bin");
        let set = PictureSet::open(Some(&file), SMALL).unwrap();
        assert_eq!(set.splits.map(|split| split.len() / 13), [18, 1, 1]);
        let empty = tempfile::tempdir().unwrap();
        let error = PictureSet::open(Some(empty.path()), SMALL).err().unwrap();
        assert!(error.to_string().contains("data_batch_*.bin"), "{error}");
    }

    #[test]
    fn the_synthetic_set_is_halved() {
        let pictures = Pictures {
            side: 8,
            classes: 10,
            halved: true,
        };
        let set = PictureSet::open(None, pictures).unwrap();
        let counts = set.splits.map(|split| split.len() / pictures.record());
        assert_eq!(counts, [1_800, 100, 100]);
    }
}
