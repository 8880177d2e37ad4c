//! Atomic writes, and the contents of folders.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

/// Extension of incomplete files.
pub const TEMPORARY: &str = "partial";

/// [`write_atomically`] for all bytes of a file; errors name the file.
pub fn write_whole(path: &Path, bytes: impl AsRef<[u8]>) -> Result<()> {
    write_atomically(path, |file| file.write_all(bytes.as_ref()))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Writes a file under a temporary name in the same folder, syncs it, and renames it to `path`.
///
/// # Errors
/// Those of the file system; `path` is unchanged then.
pub fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let temporary = path.with_added_extension(TEMPORARY);
    let mut file = File::create(&temporary)?;
    write(&mut file)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    sync_folder(path)
}

/// Syncs the folder, if the system can, so that the new name survives a power cut.
#[cfg(unix)]
fn sync_folder(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => File::open(folder)?.sync_all(),
        _ => Ok(()),
    }
}

#[cfg(not(unix))]
fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Writes a value as JSON to the path of a flag.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

/// Lists the paths in a folder.
pub fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    fs::read_dir(folder)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
        .with_context(|| format!("cannot read {}", folder.display()))
}
