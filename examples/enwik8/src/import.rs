//! `enwik8 import`: turns another program's weights into a run, to evaluate, sample and train it further.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use burn::module::Module;
use burn_sparse_transformer::weights::{KeyMap, WeightsFile};
use clap::Args;

use crate::checkpoint::{Checkpoint, Header};
use crate::config::RunConfig;
use crate::data::{Corpus, Split, thousands};
use crate::overrides::Overrides;
use crate::presets::Preset;
use crate::progress::{program, say};
use crate::run::{self, RunFolder};
use crate::{device, model};

/// Begin a run with weights from a safetensors, PyTorch or Burn file
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 import --weights model.pt --preset tiny --run runs/imported
  enwik8 import --weights exported/model.safetensors --like runs/tiny --run runs/imported
  enwik8 import --weights dense/model.bpk --attention dsa:32,8,4,16 --indexer-warmup 200 \\
    --run runs/dsa
  enwik8 import --weights dense/model.bpk --attention dsa:32,8,4,16,blocks=4x16 --run runs/blocks
  enwik8 eval --checkpoint runs/imported
  enwik8 train --resume --run runs/imported

FILE.safetensors, .pt, .pth or .bin (a state dict of PyTorch) has the names that export --format safetensors writes and \
docs/weights.md lists; FILE.bpk those of Burn. A file that does not fit is refused, and the message names each tensor. With \
--attention dsa or msa the file of a dense model also fits: its indexers begin anew.")]
pub struct ImportArgs {
    /// File with the weights
    #[arg(long, value_name = "FILE")]
    weights: PathBuf,
    /// Key of the state dict in a PyTorch file, such as `model` [default: the whole file]
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Folder of the run
    #[arg(long, value_name = "DIR", visible_alias = "checkpoint")]
    run: PathBuf,
    /// Replace the run in the folder
    #[arg(long)]
    overwrite: bool,
    /// A checkpoint or a run folder with the same model, recipe and data, in place of --preset and the flags of a model
    #[arg(long, value_name = "PATH", conflicts_with_all = ["preset", "data"])]
    like: Option<PathBuf>,
    /// Model and recipe [default: tiny]
    #[arg(long, value_enum)]
    preset: Option<Preset>,
    /// A file of raw bytes to train on [default: the embedded sample]
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    #[command(flatten)]
    overrides: Overrides,
}

pub fn run(args: &ImportArgs) -> Result<()> {
    let (config, corpus) = match &args.like {
        Some(path) => {
            let (_, like) = run::open_checkpoint("like", path)?;
            let config = like.header.config.resumed(None, &args.overrides)?;
            let pictures = config.model.pictures;
            (config, Corpus::reopen(&like.header.data, None, pictures)?)
        }
        None => {
            let preset = args.preset.unwrap_or(Preset::Tiny);
            let config = RunConfig::new(preset, &args.overrides)?;
            let pictures = config.model.pictures;
            (config, Corpus::open(args.data.as_deref(), pictures)?)
        }
    };
    // As at the beginning of a run: data that is too short now is too short to train on.
    corpus.split_for(Split::Validation, config.model.context)?;
    corpus.split_for(Split::Train, config.model.context)?;
    let file = open(&args.weights, args.key.as_deref())?;
    // A Burn record has Burn's names and forms.
    let map = match ends_in(&args.weights, &["bpk", "burnpack"]) {
        true => KeyMap::default(),
        false => KeyMap::pytorch(),
    };
    let named = device::open(None)?;
    config.check_weights(&named)?;
    let device = named.device;
    let model = model::new(&config.model, config.recipe.seed, &device)?;
    let map = match config.dsa_stage(0) {
        // A dense model has no indexers: they are initialised anew.
        Some(_) => map.without_indexers(),
        None => map,
    };
    let model = file.load(&model, &map)?;
    let parameters = model.num_params();
    let header = Header::new(config.clone(), corpus.fingerprint());
    let checkpoint = Checkpoint::new(header, model, &model::optimizer(&config.recipe))?;
    // Nothing is written until all input is checked.
    let folder = RunFolder::create(&args.run, args.overwrite)?;
    folder.write_config(&config)?;
    folder.save(&checkpoint)?;
    say(format!(
        "{}: {} parameters in {}; train them further with: {} train --resume --run {2}",
        args.weights.display(),
        thousands(parameters),
        args.run.display(),
        program()
    ));
    Ok(())
}

fn open(path: &Path, key: Option<&str>) -> Result<WeightsFile> {
    let Some(key) = key else {
        return Ok(WeightsFile::open(path)?);
    };
    ensure!(
        ends_in(path, &["pt", "pth", "bin"]),
        "--key is for files of PyTorch (.pt, .pth, .bin), and {} is none",
        path.display()
    );
    Ok(WeightsFile::open_pytorch(path, key)?)
}

fn ends_in(path: &Path, endings: &[&str]) -> bool {
    let ending = path.extension();
    endings.iter().any(|known| ending == Some(known.as_ref()))
}
