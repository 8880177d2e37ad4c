//! Files that appear when they are whole, and what folders hold.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

/// Extension of files that are not complete yet.
pub const TEMPORARY: &str = "partial";

/// [`write_atomically`] of all bytes of a file, with an error that names it.
pub fn write_whole(path: &Path, bytes: impl AsRef<[u8]>) -> Result<()> {
    write_atomically(path, |file| file.write_all(bytes.as_ref()))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Writes a file under a temporary name in the same folder, syncs it, and renames it to `path`.
///
/// # Errors
/// Those of the file system; `path` is then as it was.
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

/// Makes the new name itself survive a power cut, where the system can.
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

/// Writes a value as JSON where a flag says.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

/// The paths in a folder.
pub fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    fs::read_dir(folder)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
        .with_context(|| format!("cannot read {}", folder.display()))
}
