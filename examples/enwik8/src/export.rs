//! `enwik8 export`: writes a trained model to files that other programs load with `burn-sparse-transformer`.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use burn_sparse_transformer::weights::{KeyMap, save_safetensors};
use clap::{Args, ValueEnum};

use crate::arguments::ModelArgs;
use crate::data::thousands;
use crate::files::write_whole;
use crate::progress::{say, warn};
use crate::{model, pattern};

/// File of the `SparseTransformerConfig`. Not `config.json`, which run folders already have.
const CONFIG: &str = "model.json";

/// What the parameters are written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// model.bpk: a record that Burn's modules load
    Burnpack,
    /// model.safetensors, in PyTorch's conventions
    Safetensors,
}

impl Format {
    fn file(self) -> &'static str {
        match self {
            Self::Burnpack => "model.bpk",
            Self::Safetensors => "model.safetensors",
        }
    }
}

/// Write a checkpoint's model and its configuration for other programs
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 export --out exported
  enwik8 export --checkpoint runs/paper/best.ckpt --out exported
  enwik8 export --out exported --format safetensors

DIR/model.bpk is a Burn record of the parameters, all f32, DIR/model.json the SparseTransformerConfig; docs/training.md \
shows the program that loads them. DIR/model.safetensors has PyTorch's conventions: docs/weights.md has the names, and \
examples/enwik8/pytorch/sparse_transformer.py the model.")]
pub struct ExportArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Folder for the two files
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Format of the parameters
    #[arg(long, value_enum, default_value = "burnpack")]
    format: Format,
    /// Replace existing files
    #[arg(long)]
    overwrite: bool,
}

pub fn run(args: &ExportArgs) -> Result<()> {
    let (device, path, checkpoint) = args.model.open()?;
    let config = model::transformer(&checkpoint.header.config.model)?;
    for found in config.factorization.patterns() {
        ensure!(
            !pattern::has_callback(found),
            "{} cannot be exported: its pattern {found} has a callback, which no file can hold",
            path.display()
        );
    }
    let [weights, config_file] = [args.format.file(), CONFIG].map(|name| args.out.join(name));
    for file in [&weights, &config_file] {
        ensure!(
            args.overwrite || !file.exists(),
            "{} exists: replace it with --overwrite, or choose another folder",
            file.display()
        );
    }
    fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot create {}", args.out.display()))?;
    let header = &checkpoint.header;
    if let Some(note) = header.config.stage_note(header.step) {
        warn(format!("{note}; in what is written they do"));
    }
    match args.format {
        // A checkpoint holds the record in Burn's format.
        Format::Burnpack => write_whole(&weights, &checkpoint.model)?,
        Format::Safetensors => {
            let model = model::restore(&checkpoint, &device.device)?;
            save_safetensors(&model, &weights, &KeyMap::pytorch(), args.overwrite)?;
        }
    }
    write_whole(&config_file, &serde_json::to_vec_pretty(&config)?)?;
    say(format!(
        "{}: step {}; wrote {} and {}",
        path.display(),
        thousands(checkpoint.header.step),
        weights.display(),
        config_file.display()
    ));
    Ok(())
}
