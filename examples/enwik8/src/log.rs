//! `log.jsonl`: one JSON object per line, for people and plots.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::files::write_atomically;
use crate::recall::LayerRecall;
use crate::tensorboard::EventFile;

/// Line of the log. `loss` is in nats per byte, `bits_per_byte` the same in bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Row {
    /// One optimizer step.
    Train(Trained),
    /// Validation over a fixed set of windows.
    Validation(Validated),
    /// Recall of a selection over one validation window.
    Selection {
        step: usize,
        /// Layers that choose.
        layers: Vec<LayerRecall>,
    },
    /// Validation over the whole split, at the end of the run.
    Final(Validated),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trained {
    /// Number of steps taken, this one included.
    pub step: usize,
    /// Mean cross-entropy of the batch, before the step.
    pub loss: f64,
    pub bits_per_byte: f64,
    /// Learning rate of the step.
    pub learning_rate: f64,
    /// Global norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Indexers' loss, if there are any: the mean over layers of the divergence between their scores and the attention, in nats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub indexer_loss: Option<f64>,
    /// Bytes trained on per second.
    pub tokens_per_s: f64,
    pub ms: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Validated {
    pub step: usize,
    pub loss: f64,
    pub bits_per_byte: f64,
    /// Number of predicted bytes.
    pub bytes: usize,
}

impl Row {
    /// Returns the number of steps taken when it was written.
    pub fn step(&self) -> usize {
        match self {
            Row::Train(of) => of.step,
            Row::Validation(of) | Row::Final(of) => of.step,
            Row::Selection { step, .. } => *step,
        }
    }
}

#[cfg(test)]
impl Row {
    /// Returns a step of half a second for tests.
    pub fn trained(step: usize, bits_per_byte: f64) -> Self {
        Row::Train(Trained {
            step,
            bits_per_byte,
            ms: 500.0,
            ..Trained::default()
        })
    }

    pub fn validated(step: usize, bits_per_byte: f64) -> Self {
        Row::Validation(Validated {
            step,
            bits_per_byte,
            ..Validated::default()
        })
    }
}

pub struct Log {
    path: PathBuf,
    file: File,
    /// TensorBoard's copy of the log.
    events: Option<EventFile>,
}

impl Log {
    /// Opens the log of a run that has taken `step` steps. Drops lines of later steps, which a killed process may have left after its last checkpoint: they
    /// will be written again.
    pub fn open(path: &Path, step: usize) -> Result<Self> {
        // Lines are copied verbatim, not serialised again.
        let kept: Vec<u8> = whole_lines(path)?
            .into_iter()
            .filter(|(_, row)| row.step() <= step)
            .flat_map(|(line, _)| line)
            .collect();
        write_atomically(path, |file| file.write_all(&kept))
            .and_then(|()| OpenOptions::new().append(true).open(path))
            .map(|file| Log {
                path: path.to_owned(),
                file,
                events: None,
            })
            .with_context(|| format!("cannot write {}", path.display()))
    }

    pub fn write(&mut self, row: &Row) -> Result<()> {
        write_row(&mut self.file, row)
            .with_context(|| format!("cannot write {}", self.path.display()))?;
        self.events
            .iter_mut()
            .try_for_each(|events| events.write(row))
    }

    /// Writes all further lines to an event file, too.
    pub fn write_events(&mut self, events: EventFile) {
        self.events = Some(events);
    }

    pub fn events(&mut self) -> Option<&mut EventFile> {
        self.events.as_mut()
    }

    /// Waits until all lines are on disk. A checkpoint must not be on disk before the lines up to its step: a run resumed from it does not write them again.
    pub fn sync(&self) -> Result<()> {
        (self.file.sync_data()).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// Writes a line in one system call, so that a killed process leaves whole lines except perhaps the last.
fn write_row(file: &mut File, row: &Row) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(row)?;
    line.push(b'\n');
    file.write_all(&line)
}

/// Reads all whole lines of a log; none if the file does not exist.
pub fn read(path: &Path) -> Result<Vec<Row>> {
    Ok(whole_lines(path)?.into_iter().map(|(_, row)| row).collect())
}

/// [`read`], with the text of each line, which ends with a line feed.
fn whole_lines(path: &Path) -> Result<Vec<(Vec<u8>, Row)>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut lines = Vec::new();
    for line in BufReader::new(file).split(b'\n') {
        let mut line = line.with_context(|| format!("cannot read {}", path.display()))?;
        // Only a line cut short by a crash does not parse.
        if let Ok(row) = serde_json::from_slice::<Row>(&line) {
            line.push(b'\n');
            lines.push((line, row));
        }
    }
    Ok(lines)
}
