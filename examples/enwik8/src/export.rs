//! `enwik8 export`: a trained model as files that a program of one's own loads with `burn-sparse-transformer`.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::checkpoint::write_atomically;
use crate::data::thousands;
use crate::progress::{say, warn};
use crate::{model, pattern, run};

/// Burn's record of the parameters.
const RECORD: &str = "model.bpk";
/// The `SparseTransformerConfig`. Not `config.json`, which a run's folder has already.
const CONFIG: &str = "model.json";

/// Write a checkpoint's model as a Burn record and its configuration
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 export --out exported
  enwik8 export --checkpoint runs/paper/best.ckpt --out exported

DIR/model.bpk is a Burn record of the parameters, all f32, DIR/model.json the SparseTransformerConfig; docs/training.md
shows the program that loads them.")]
pub struct ExportArgs {
    /// A checkpoint file, or a run folder, whose best checkpoint is taken
    #[arg(
        long,
        value_name = "PATH",
        default_value = "runs/tiny",
        visible_alias = "run"
    )]
    checkpoint: PathBuf,
    /// Folder for the two files
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Replace the files if they are there
    #[arg(long)]
    overwrite: bool,
}

/// Runs `enwik8 export`.
pub fn run(args: &ExportArgs) -> Result<()> {
    let (path, checkpoint) = run::open_checkpoint(&args.checkpoint, warn)?;
    let config = model::transformer(&checkpoint.header.config.model)?;
    for found in config.factorization.patterns() {
        ensure!(
            !pattern::has_callback(found),
            "{} cannot be exported: its pattern {found} has a callback, which no file can hold",
            path.display()
        );
    }
    let [record, config_file] = [RECORD, CONFIG].map(|name| args.out.join(name));
    for file in [&record, &config_file] {
        ensure!(
            args.overwrite || !file.exists(),
            "{} exists: replace it with --overwrite, or choose another folder",
            file.display()
        );
    }
    fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot create {}", args.out.display()))?;
    // A checkpoint holds the record as Burn writes it.
    write(&record, &checkpoint.model)?;
    write(&config_file, &serde_json::to_vec_pretty(&config)?)?;
    say(format!(
        "{}: step {}; wrote {} and {}",
        path.display(),
        thousands(checkpoint.header.step),
        record.display(),
        config_file.display()
    ));
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    write_atomically(path, |file| file.write_all(bytes))
        .with_context(|| format!("cannot write {}", path.display()))
}
