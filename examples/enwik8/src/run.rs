//! Run folder: `config.json`, `log.jsonl`, `resources.json`, event files, the report and its images, `step-*.ckpt` and `best.ckpt`.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::checkpoint::Checkpoint;
use crate::config::RunConfig;
use crate::files::{TEMPORARY, entries, write_whole};
use crate::progress::{program, warn};
use crate::tensorboard::is_event_file;

const CONFIG: &str = "config.json";
/// Log with a line for each step, validation and measurement.
pub const LOG: &str = "log.jsonl";
/// Plot of the loss over steps.
pub const PLOT: &str = "loss.png";
/// Name of [`PLOT`] until it is complete.
pub const UNFINISHED_PLOT: &str = "loss.partial.png";
/// Resources that the run takes.
pub const RESOURCES: &str = "resources.json";
/// Report of the run on one page.
pub const REPORT: &str = "report.md";
/// Plot of the loss over time.
pub const TIME_PLOT: &str = "loss-by-time.png";
/// Images that the model generates.
pub const SAMPLES: &str = "samples.png";
/// Plot of the recall of selections over steps.
pub const RECALL: &str = "recall.png";
const BEST: &str = "best.ckpt";
const LOCK: &str = "lock";

/// All files except checkpoints of steps and event files.
const FILES: [&str; 10] = [
    CONFIG,
    LOG,
    RESOURCES,
    PLOT,
    TIME_PLOT,
    RECALL,
    SAMPLES,
    REPORT,
    UNFINISHED_PLOT,
    BEST,
];

/// Number of regular checkpoints to keep, besides the best one.
const KEPT: usize = 2;

/// Run folder, locked against a second trainer.
pub struct RunFolder {
    path: PathBuf,
    /// Held until the process ends, however it ends.
    _lock: File,
}

impl RunFolder {
    /// Creates the folder of a new run.
    pub fn create(path: &Path, overwrite: bool) -> Result<Self> {
        ensure!(
            !path.is_file(),
            "{} is a file; --run names the folder of a run",
            path.display()
        );
        if !overwrite && holds_run(path) {
            bail!(
                "{0} already holds a run: continue it with --resume, replace it with --overwrite, \
                 or choose another folder with --run DIR",
                path.display()
            );
        }
        fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
        let folder = RunFolder::lock(path)?;
        remove(files_of_run(path)?)?;
        Ok(folder)
    }

    /// Opens the folder of a run to continue.
    pub fn open(path: &Path) -> Result<Self> {
        ensure!(
            holds_run(path),
            "nothing to resume: {} holds no run; leave --resume out to begin one",
            path.display()
        );
        let folder = RunFolder::lock(path)?;
        // Left over by a killed process.
        let files = files_of_run(path)?.into_iter();
        remove(files.filter(|path| is_unfinished(path)))?;
        Ok(folder)
    }

    fn lock(path: &Path) -> Result<Self> {
        let lock = File::create(path.join(LOCK))
            .with_context(|| format!("cannot write to {}", path.display()))?;
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => {
                bail!("another process is training in {}", path.display())
            }
            // Some file systems have no locks; training there is still possible.
            Err(TryLockError::Error(_)) | Ok(()) => {}
        }
        Ok(RunFolder {
            path: path.to_owned(),
            _lock: lock,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of one of its files, such as [`LOG`].
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Stores the configuration for people to read; checkpoints have their own copy.
    pub fn write_config(&self, config: &RunConfig) -> Result<()> {
        let text = serde_json::to_string_pretty(config)?;
        write_whole(&self.path.join(CONFIG), text)
    }

    /// Stores a checkpoint and removes those that are no longer needed.
    pub fn save(&self, checkpoint: &Checkpoint) -> Result<()> {
        let name = format!("step-{:08}.ckpt", checkpoint.header.step);
        checkpoint.write(&self.path.join(name))?;
        remove(step_checkpoints(&self.path)?.into_iter().skip(KEPT))
    }

    /// Stores the checkpoint with the best validation so far.
    pub fn save_best(&self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.write(&self.path.join(BEST))
    }
}

/// Returns the newest intact checkpoint of a run, with a warning for each damaged one.
///
/// # Errors
/// If none is usable, with the reason for each.
pub fn latest_checkpoint(folder: &Path) -> Result<(PathBuf, Checkpoint)> {
    let mut candidates = step_checkpoints(folder)?;
    candidates.push(folder.join(BEST));
    let mut reasons = Vec::new();
    for path in candidates.into_iter().filter(|path| path.exists()) {
        match Checkpoint::read(&path) {
            Ok(checkpoint) => {
                for reason in &reasons {
                    warn(format!("{reason}; falling back to {}", path.display()));
                }
                return Ok((path, checkpoint));
            }
            Err(error) => reasons.push(error.to_string()),
        }
    }
    match reasons.is_empty() {
        true => bail!(
            "{} has no checkpoint yet: its run was stopped before the first; begin again with --overwrite",
            folder.display()
        ),
        false => bail!(
            "{} has no usable checkpoint: {}",
            folder.display(),
            reasons.join("; ")
        ),
    }
}

/// Opens the checkpoint that a flag names: a file, or a run folder, whose best one is opened.
pub fn open_checkpoint(flag: &str, path: &Path) -> Result<(PathBuf, Checkpoint)> {
    if path.is_dir() {
        let best = path.join(BEST);
        return match best.exists() {
            true => Ok((best.clone(), Checkpoint::read(&best)?)),
            false if holds_run(path) => latest_checkpoint(path),
            false => bail!(
                "--{flag} {}: the folder holds no run; train one first, or give a file",
                path.display()
            ),
        };
    }
    ensure!(
        path.exists(),
        "--{flag} {}: there is no checkpoint; train a model first ({} train), or give another path",
        path.display(),
        program()
    );
    let checkpoint = Checkpoint::read(path).with_context(|| format!("--{flag}"))?;
    Ok((path.to_owned(), checkpoint))
}

/// Returns whether the folder has files of a run, which a new one would remove.
fn holds_run(folder: &Path) -> bool {
    let holds_file = [CONFIG, LOG, PLOT, BEST]
        .iter()
        .any(|name| folder.join(name).exists());
    holds_file || step_checkpoints(folder).is_ok_and(|found| !found.is_empty())
}

/// Lists `step-*.ckpt`, newest first.
fn step_checkpoints(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found: Vec<_> = entries(folder)?
        .into_iter()
        .filter_map(|path| Some((step_of(&path)?, path)))
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

fn step_of(path: &Path) -> Option<usize> {
    let name = path.file_name()?.to_str()?;
    name.strip_prefix("step-")?
        .strip_suffix(".ckpt")?
        .parse()
        .ok()
}

/// Lists every file that training writes, so that `--overwrite` removes only those.
fn files_of_run(folder: &Path) -> Result<Vec<PathBuf>> {
    let is_ours = |path: &PathBuf| {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let name = name.strip_suffix(&format!(".{TEMPORARY}")).unwrap_or(name);
        FILES.contains(&name) || is_event_file(name) || step_of(Path::new(name)).is_some()
    };
    Ok(entries(folder)?.into_iter().filter(is_ours).collect())
}

fn is_unfinished(path: &Path) -> bool {
    let temporary = path
        .extension()
        .is_some_and(|extension| extension == TEMPORARY);
    temporary || path.file_name().is_some_and(|name| name == UNFINISHED_PLOT)
}

fn remove(files: impl IntoIterator<Item = PathBuf>) -> Result<()> {
    files.into_iter().try_for_each(|path| {
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_left_of_a_run_is_kept() {
        for name in [CONFIG, LOG, PLOT, BEST, "step-00000500.ckpt"] {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join(name), "kept").unwrap();
            let error = RunFolder::create(folder.path(), false).err();
            let error = error.map_or(String::new(), |error| error.to_string());
            assert!(error.contains("already holds a run"), "{name}: {error}");
            assert!(folder.path().join(name).exists(), "{name}");
        }
    }

    #[test]
    fn one_trainer_per_folder() {
        let folder = tempfile::tempdir().unwrap();
        let _first = RunFolder::create(folder.path(), false).unwrap();
        let error = RunFolder::create(folder.path(), false)
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("another process"), "{error}");
    }
}
