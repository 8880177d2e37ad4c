//! `enwik8 search-selection`: finds for each head the selection with the largest recall (MInference: Jiang et al., 2024, §3), and writes the file for
//! `--selection-file`.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use burn_sparse_transformer::{HeadSelections, Selection, SelectionQuality, SparseTransformer};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::arguments::{self, ModelArgs};
use crate::data::{Corpus, Split};
use crate::progress::say;
use crate::{files, model, notation, recall};

/// Find the selection with the largest recall for each head
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 search-selection --checkpoint runs/dense --density 0.5 --out heads.json \\
    --selection topk:16,4 --selection topk:16,1,3,1 \\
    --selection minference:16,16,16,sinks=4,window=16
  enwik8 recall --checkpoint runs/dense --selection-file heads.json

One window of the training split is measured. Each head gets the candidate with the largest recall among those with at most --density of the \
visible blocks, or the sparsest if there is none. Candidates should cost about the same. topk:BLOCK,1,LOCAL,FIRST is a window with sinks, whatever the content.")]
pub struct SearchArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A candidate, e.g. topk:64,8 (`enwik8 patterns` lists all); repeat for more
    #[arg(long, value_name = "TEXT", required = true, value_parser = notation::selection)]
    selection: Vec<Selection>,
    /// Largest share of visible blocks that a head may select
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, value_parser = arguments::share)]
    density: f64,
    /// File to write: a selection per layer and head
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

/// Contents of `--selection-file`: a selection for each layer and head; `pattern` is everything that the layer's pattern allows.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct SelectionFile {
    /// Text of the selection, by layer and head.
    layers: Vec<Vec<String>>,
    /// Recall at the time of the search.
    #[serde(default)]
    recall: Vec<Vec<f64>>,
    /// Selected blocks as a share of the visible ones.
    #[serde(default)]
    density: Vec<Vec<f64>>,
}

/// `--selection-file`: the selection of each head of each layer, and the file's path.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadChoices {
    pub path: PathBuf,
    /// Selections of each layer.
    pub layers: Vec<HeadSelections>,
}

impl HeadChoices {
    /// Applies these selections to the model's layers.
    pub fn switched_on(&self, model: SparseTransformer) -> Result<SparseTransformer> {
        let mha = &model.blocks[0].mha;
        check_heads(&self.layers, model.blocks.len(), mha.n_heads())?;
        let layers = self.layers.iter().cloned().map(Some).collect();
        (model.with_head_selections(layers))
            .with_context(|| format!("--selection-file {}", self.path.display()))
    }
}

/// Parses the value of `--selection-file`.
pub fn head_choices(text: &str) -> Result<HeadChoices, String> {
    let path = PathBuf::from(text);
    let read = || -> Result<Vec<HeadSelections>> {
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let file: SelectionFile = serde_json::from_str(&text)
            .with_context(|| format!("{} is not what search-selection writes", path.display()))?;
        let layers = file.layers.iter().enumerate().map(|(layer, heads)| {
            let heads = heads.join(" / ").parse();
            heads.with_context(|| format!("layer {layer}"))
        });
        layers.collect()
    };
    let layers = read().map_err(|error| format!("{error:#}"))?;
    Ok(HeadChoices { path, layers })
}

/// Checks that there are selections for this number of layers and heads.
pub fn check_heads(choices: &[HeadSelections], layers: usize, heads: usize) -> Result<()> {
    let got = choices.len();
    ensure!(
        got == layers,
        "--selection-file must have {layers} layers, as the model, got {got}"
    );
    for (layer, of) in choices.iter().enumerate() {
        let got = of.len();
        ensure!(
            got == heads,
            "--selection-file must have {heads} heads in layer {layer}, as the model, got {got}"
        );
    }
    Ok(())
}

pub fn run(args: &SearchArgs) -> Result<()> {
    let (device, _, checkpoint) = args.model.open()?;
    let config = &checkpoint.header.config;
    let context = config.model.context;
    let corpus = Corpus::reopen(&checkpoint.header.data, None, None)?;
    let bytes = corpus.split_for(Split::Train, context)?;
    let model = model::restore(&checkpoint, &device.device)?;
    let model = model.with_selections(&[], 0)?;
    let mut found: Vec<(String, Vec<Vec<SelectionQuality>>)> = Vec::new();
    for selection in &args.selection {
        let heads = recall::heads(&model, Some(selection), &bytes[..context], &device.device)?;
        found.push((selection.to_string(), heads));
    }
    let file = best(&found, args.density);
    for (text, _) in &found {
        let heads = file.layers.iter().flatten().filter(|of| *of == text);
        say(format!("{text:<36} {:>4} heads", heads.count()));
    }
    let numbers = |of: &[Vec<f64>]| {
        let all: Vec<f64> = of.iter().flatten().copied().collect();
        all.iter().sum::<f64>() / all.len().max(1) as f64
    };
    say(format!(
        "recall {:.4} at density {:.4}, mean over heads",
        numbers(&file.recall),
        numbers(&file.density)
    ));
    files::write_json(&args.out, &file)
}

/// Returns for each head the candidate with the largest recall among those that are sparse enough, the earlier one on ties; the sparsest if none is.
fn best(found: &[(String, Vec<Vec<SelectionQuality>>)], density: f64) -> SelectionFile {
    let mut file = SelectionFile::default();
    let layers = found.first().map_or(0, |(_, heads)| heads.len());
    for layer in 0..layers {
        let best = (0..found[0].1[layer].len()).filter_map(|head| {
            // `max_by` returns the last maximum: reversed, that is the earliest.
            let all = || {
                let candidates = found.iter().rev();
                candidates.map(|(text, heads)| (text, heads[layer][head]))
            };
            // Tolerance for the rounding of a density's sum.
            let fitting = all().filter(|(_, of)| of.density <= density + 1e-9);
            let fitting = fitting.max_by(|(_, a), (_, b)| a.recall.total_cmp(&b.recall));
            let sparsest = || all().max_by(|(_, a), (_, b)| b.density.total_cmp(&a.density));
            fitting.or_else(sparsest)
        });
        let best: Vec<(&String, SelectionQuality)> = best.collect();
        let texts = best.iter().map(|(text, _)| (*text).clone());
        file.layers.push(texts.collect());
        let recalls = best.iter().map(|(_, of)| of.recall);
        file.recall.push(recalls.collect());
        let densities = best.iter().map(|(_, of)| of.density);
        file.density.push(densities.collect());
    }
    file
}
