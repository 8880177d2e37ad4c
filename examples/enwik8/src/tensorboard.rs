//! TensorBoard's event files: the contents of `log.jsonl`, for `tensorboard --logdir`.
//!
//! An event file is a sequence of records, each of which is a protocol buffer `Event` of TensorFlow (`event.proto`, `summary.proto`).
//!
//! ```text
//! length: u64   masked CRC-32C of length: u32   event   masked CRC-32C of event: u32        (little-endian)
//! ```
//!
//! A record is written in one system call, so that a killed process leaves whole records except perhaps the last, which readers skip. A resumed run cuts
//! events later than its checkpoint from existing files, as it does with the log, and begins a new file, whose first event tells a running TensorBoard to
//! discard those steps, too.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use crc32c::crc32c;
use prost::Message;

use crate::files::entries;
use crate::log::Row;
use crate::memory::Resources;
use crate::recall::mean;

/// Prefix by which TensorBoard recognises event files.
const PREFIX: &str = "events.out.tfevents.";
/// Bytes of the length and its checksum, and of the checksum after the event.
const HEAD: usize = 8 + 4;
const TAIL: usize = 4;

/// Returns whether a file of a run folder is an event file.
pub fn is_event_file(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Event file that is appended to.
pub struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Begins a file for a run that has taken `step` steps, with log `rows`. Events of later steps are cut from the run's other files; if there are none, the
    /// new one begins with `rows`.
    pub fn create(folder: &Path, step: usize, rows: &[Row]) -> Result<Self> {
        let found = event_files(folder)?;
        found.iter().try_for_each(|path| cut(path, step))?;
        // Files are read in the order of their names.
        let newest = found.last().and_then(|path| seconds_of(path)).unwrap_or(0);
        let seconds = (now() as u64).max(newest);
        let name = format!("{PREFIX}{seconds:010}.{:04}", found.len());
        let path = folder.join(name);
        let file =
            File::create_new(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let mut events = Self { path, file };
        events.append(&Event {
            file_version: Some("brain.Event:2".to_owned()),
            ..Event::new(now(), 0)
        })?;
        if found.is_empty() {
            for (row, time) in rows.iter().zip(times(rows)) {
                events.append_row(row, time)?;
            }
        } else {
            events.append(&Event {
                session_log: Some(SessionLog { status: START }),
                ..Event::new(now(), step + 1)
            })?;
        }
        Ok(events)
    }

    /// Appends a row of the log.
    pub fn write(&mut self, row: &Row) -> Result<()> {
        self.append_row(row, now())
    }

    /// Appends the memory in use after `step` steps.
    pub fn write_memory(&mut self, step: usize, resources: &Resources) -> Result<()> {
        let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let known = [
            ("memory/process_peak_mib", resources.process_bytes),
            ("memory/device_reserved_mib", resources.device_bytes),
        ];
        let scalars: Vec<(&str, f64)> = (known.into_iter())
            .filter_map(|(tag, bytes)| Some((tag, mebibytes(bytes?))))
            .collect();
        match scalars.is_empty() {
            true => Ok(()),
            false => self.append(&Event::new(now(), step).scalars(&scalars)),
        }
    }

    fn append_row(&mut self, row: &Row, time: f64) -> Result<()> {
        self.append(&Event::new(time, row.step()).scalars(&scalars(row)))
    }

    fn append(&mut self, event: &Event) -> Result<()> {
        (self.file.write_all(&record(&event.encode_to_vec())))
            .with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// Returns the tags and values of a row.
fn scalars(row: &Row) -> Vec<(&'static str, f64)> {
    match row {
        Row::Train(of) => {
            let scalars = [
                ("bits_per_byte/train", of.bits_per_byte),
                ("learning_rate", of.learning_rate),
                ("grad_norm", of.grad_norm),
                ("speed/tokens_per_s", of.tokens_per_s),
                ("speed/step_ms", of.ms),
            ];
            let of_indexers = of.indexer_loss.map(|loss| ("indexer_loss", loss));
            scalars.into_iter().chain(of_indexers).collect()
        }
        Row::Validation(of) => vec![("bits_per_byte/validation", of.bits_per_byte)],
        Row::Final(of) => vec![("bits_per_byte/final", of.bits_per_byte)],
        Row::Selection { layers, .. } => vec![("selection/recall", mean(layers).recall)],
    }
}

/// Estimates when rows were written, assuming that the last one is from now and only steps took time: the log has durations only.
fn times(rows: &[Row]) -> Vec<f64> {
    let mut time = now();
    let mut times: Vec<f64> = (rows.iter().rev())
        .map(|row| {
            let written = time;
            if let Row::Train(of) = row {
                time -= of.ms / 1_000.0;
            }
            written
        })
        .collect();
    times.reverse();
    times
}

fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

/// Lists the run's event files, oldest first.
fn event_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = entries(folder)?;
    files.retain(|path| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(is_event_file)
    });
    files.sort();
    Ok(files)
}

fn seconds_of(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?.strip_prefix(PREFIX)?;
    name.split('.').next()?.parse().ok()
}

/// Cuts a file before its first event of a step after `step`, and before an incomplete record.
fn cut(path: &Path, step: usize) -> Result<()> {
    let cut = || -> std::io::Result<()> {
        let bytes = fs::read(path)?;
        let kept: usize = (records(&bytes))
            .take_while(|event| step_of(event).is_some_and(|found| found <= step as i64))
            .map(|event| HEAD + event.len() + TAIL)
            .sum();
        match kept < bytes.len() {
            true => OpenOptions::new()
                .write(true)
                .open(path)?
                .set_len(kept as u64),
            false => Ok(()),
        }
    };
    cut().with_context(|| format!("cannot shorten {}", path.display()))
}

/// Iterates over the events of whole records with correct checksums, up to the first invalid one.
fn records(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let (length, behind) = rest.split_first_chunk::<8>()?;
        let (checksum, behind) = behind.split_first_chunk::<4>()?;
        if masked_crc(length) != u32::from_le_bytes(*checksum) {
            return None;
        }
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let (event, behind) = behind.split_at_checked(length)?;
        let (checksum, behind) = behind.split_first_chunk::<4>()?;
        rest = behind;
        (masked_crc(event) == u32::from_le_bytes(*checksum)).then_some(event)
    })
}

fn step_of(event: &[u8]) -> Option<i64> {
    Some(Event::decode(event).ok()?.step)
}

/// Written fields of `event.proto`.
#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    session_log: Option<SessionLog>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// Value of `SessionLog`: events of this step and later ones read so far are void.
const START: i32 = 1;

impl Event {
    fn new(wall_time: f64, step: usize) -> Self {
        let step = step as i64;
        Self {
            wall_time,
            step,
            ..Self::default()
        }
    }

    fn scalars(self, scalars: &[(&str, f64)]) -> Self {
        let value = scalars.iter().map(|(tag, number)| Value {
            tag: (*tag).to_owned(),
            simple_value: Some(*number as f32),
        });
        let value = value.collect();
        Self {
            summary: Some(Summary { value }),
            ..self
        }
    }
}

fn record(event: &[u8]) -> Vec<u8> {
    let length = (event.len() as u64).to_le_bytes();
    let mut record = length.to_vec();
    record.extend(masked_crc(&length).to_le_bytes());
    record.extend(event);
    record.extend(masked_crc(event).to_le_bytes());
    record
}

/// Returns Castagnoli's CRC, rotated and offset by a constant as in record files, which may contain checksums themselves.
fn masked_crc(bytes: &[u8]) -> u32 {
    (crc32c(bytes).rotate_right(15)).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn train(step: usize) -> Row {
        Row::trained(step, 1.5)
    }

    /// Returns the steps of a file's events.
    fn steps(path: &Path) -> Vec<i64> {
        let bytes = fs::read(path).unwrap();
        records(&bytes)
            .map(|event| step_of(event).unwrap())
            .collect()
    }

    /// Bytes that the protocol buffers of `tensorboard` 2.21 write for the same event.
    #[test]
    fn events_are_those_of_tensorboards_own_classes() {
        let event = Event::new(1.5, 300).scalars(&[("loss", 2.5), ("lr", 0.001)]);
        let expected = "09000000000000f83f10ac022a180a0b0a046c6f737315000020400a090a\
            026c72156f12833a";
        let event = event.encode_to_vec();
        let hex: String = event.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, expected);
        assert_eq!(step_of(&event), Some(300));
        // Check value from CRC catalogues, masked.
        assert_eq!(masked_crc(b"123456789"), 0xc78a_b0e5);
    }

    #[test]
    fn every_prefix_of_a_file_is_readable() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = EventFile::create(folder.path(), 0, &[]).unwrap();
        (1..=3).for_each(|step| events.write(&train(step)).unwrap());
        let bytes = fs::read(&events.path).unwrap();
        let mut seen = Vec::new();
        for length in 0..=bytes.len() {
            let count = records(&bytes[..length]).count();
            assert!(seen.last().is_none_or(|&last| last <= count));
            seen.push(count);
        }
        assert_eq!(seen.last(), Some(&4));
        let mut flipped = bytes;
        flipped[20] ^= 1;
        assert_eq!(records(&flipped).count(), 0);
    }

    #[test]
    fn a_resumed_run_has_each_step_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut first = EventFile::create(folder.path(), 0, &[]).unwrap();
        (1..=5).for_each(|step| first.write(&train(step)).unwrap());
        first.file.write_all(b"half a record").unwrap();
        let mut second = EventFile::create(folder.path(), 3, &[train(1)]).unwrap();
        second.write(&train(4)).unwrap();
        assert_eq!(
            event_files(folder.path()).unwrap(),
            [&*first.path, &*second.path]
        );
        assert_eq!(steps(&first.path), [0, 1, 2, 3]);
        // Version, session start, and the row.
        assert_eq!(steps(&second.path), [0, 4, 4]);
        // Before its first row.
        EventFile::create(folder.path(), 2, &[]).unwrap();
        assert_eq!(steps(&first.path), [0, 1, 2]);
        assert_eq!(steps(&second.path), [0]);
    }
}
