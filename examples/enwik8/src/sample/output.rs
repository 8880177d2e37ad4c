//! Output of samples.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Raw bytes to a file, or text to the terminal as it is generated.
pub enum Output {
    File(io::BufWriter<File>, PathBuf),
    Terminal(Text),
}

impl Output {
    /// Opens a file, or without one the terminal.
    pub fn open(file: Option<&Path>) -> Result<Self> {
        Ok(match file {
            None => Output::Terminal(Text::default()),
            Some(path) => {
                let file = File::create(path)
                    .with_context(|| format!("cannot write {}", path.display()))?;
                Output::File(io::BufWriter::new(file), path.to_owned())
            }
        })
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Output::File(file, path) => {
                let written = file.write_all(bytes);
                written.with_context(|| format!("cannot write {}", path.display()))?;
            }
            Output::Terminal(text) => {
                let mut terminal = io::stdout().lock();
                terminal.write_all(text.push(bytes).as_bytes())?;
                terminal.flush()?;
            }
        }
        Ok(())
    }

    pub fn finish(self) -> Result<()> {
        match self {
            Output::File(mut file, path) => {
                let written = file.flush();
                written.with_context(|| format!("cannot write {}", path.display()))?;
            }
            Output::Terminal(mut text) => writeln!(io::stdout(), "{}", text.rest())?,
        }
        Ok(())
    }
}

/// Decodes bytes as UTF-8: characters as soon as they are complete, `�` for invalid bytes.
#[derive(Default)]
pub struct Text {
    pending: Vec<u8>,
}

impl Text {
    fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend(bytes);
        let last = self.pending.utf8_chunks().last();
        let last = last.map_or(&[][..], |chunk| chunk.invalid());
        let incomplete = match str::from_utf8(last) {
            // An error without a length is an incomplete character at the end.
            Err(error) if error.error_len().is_none() => last.len(),
            _ => 0,
        };
        let complete: Vec<u8> = self
            .pending
            .drain(..self.pending.len() - incomplete)
            .collect();
        String::from_utf8_lossy(&complete).into_owned()
    }

    fn rest(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_printed_once_they_are_whole() {
        let mut text = Text::default();
        let printed: Vec<String> = "aé€".bytes().map(|byte| text.push(&[byte])).collect();
        assert_eq!(printed, ["a", "", "é", "", "", "€"]);
        assert_eq!(text.push(&[b'x', 0xff, b'y', 0xe2]), "x\u{fffd}y");
        assert_eq!(text.rest(), "\u{fffd}");
    }
}
