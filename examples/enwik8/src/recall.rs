//! `enwik8 recall`: share of a model's attention that selections keep.

use std::fs::File;
use std::io::{Write, stdout};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_sparse_transformer::{Selection, SelectionQuality, SparseTransformer};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::arguments::{self, ModelArgs};
use crate::data::{Corpus, Split, thousands};
use crate::eval::Evaluator;
use crate::progress::{plain_bar, say};
use crate::search::{self, HeadChoices};
use crate::{model, notation};

/// Compare content-based selections on a checkpoint
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 recall --checkpoint runs/dense --selection topk:32,8 --selection topk:32,p=0.9
  enwik8 recall --checkpoint runs/dense --selection topk:32,8 --heads

Candidates are the keys of the model's pattern; with --attention dense these are all earlier bytes. Bits per byte are those with the \
selection in all layers; recall, density and the ratio to the best selection of as many blocks are of one window.")]
pub struct RecallArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A selection, e.g. topk:32,8 (`enwik8 patterns` lists all); repeat to compare
    #[arg(long, value_name = "TEXT", required_unless_present = "selection_file", value_parser = notation::selection)]
    selection: Vec<Selection>,
    /// A selection for each head, from search-selection; repeat to compare
    #[arg(long, value_name = "FILE", value_parser = search::head_choices)]
    selection_file: Vec<HeadChoices>,
    /// Windows of the validation split for bits per byte
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = arguments::positive)]
    windows: usize,
    /// Also print each layer and head
    #[arg(long)]
    heads: bool,
    /// Print JSON lines instead of a table, or also write them to FILE (`plot recall` draws it)
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    json: Option<Option<PathBuf>>,
}

impl RecallArgs {
    /// Returns whether a table is printed.
    fn has_table(&self) -> bool {
        !matches!(self.json, Some(None))
    }
}

/// Results of a selection; without one, of everything that the pattern allows.
#[derive(Serialize)]
struct Found {
    selection: Option<String>,
    bits_per_byte: f64,
    /// Results of every head of every layer that chooses.
    heads: Vec<Vec<SelectionNumbers>>,
    layers: Vec<LayerRecall>,
}

/// Results of a head.
#[derive(Serialize)]
struct SelectionNumbers {
    recall: f64,
    first_percentile: f64,
    ratio: f64,
    density: f64,
}

pub fn run(args: &RecallArgs) -> Result<()> {
    let (device, path, checkpoint) = args.model.open()?;
    let config = &checkpoint.header.config;
    let context = config.model.context;
    ensure!(
        config.model.pictures.is_none(),
        "{} was trained on images, and recall measures windows of text",
        path.display()
    );
    let corpus = Corpus::reopen(&checkpoint.header.data, None, None)?;
    let bytes = corpus.split_for(Split::Validation, context)?;
    let model = model::restore(&checkpoint, &device.device)?;
    let model = model.with_selections(&[], 0)?;
    let mut lines = lines(args.json.as_ref())?;
    if args.has_table() {
        say(format!(
            "{}: step {}, context {context}, {} windows, on {}\n\n{:<28} {:>9} {:>8} {:>8} {:>8}",
            path.display(),
            thousands(checkpoint.header.step),
            args.windows,
            device.name,
            "choice",
            "bits/byte",
            "recall",
            "ratio",
            "density"
        ));
    }
    let cut = config.model.cut();
    let plan = cut.spread(bytes.len(), args.windows);
    let mut choices = vec![Choice::Every];
    choices.extend(args.selection.iter().cloned().map(Choice::Alike));
    choices.extend(args.selection_file.iter().cloned().map(Choice::ByHead));
    for choice in &choices {
        let with = choice.switched_on(&model)?;
        let evaluator = Evaluator {
            model: &with,
            device: &device.device,
            cut,
            batch: config.recipe.batch,
        };
        let evaluation = evaluator.run(bytes, &plan, &plain_bar("evaluating"))?;
        ensure!(
            evaluation.nats.is_finite(),
            "the loss of {} is not finite, got {}: its weights or its activations are not",
            path.display(),
            evaluation.nats
        );
        // Measured on the model that sees everything: what the selection would have kept.
        let heads = choice.heads(&model, &bytes[..context], &device.device)?;
        let bits_per_byte = evaluation.bits_per_byte();
        let everything = match config.model.sees_everything() {
            true => "every earlier byte".to_owned(),
            false => config.model.patterns.join(" / "),
        };
        let names = (choice.name(), everything.as_str());
        print(args, &mut lines, names, bits_per_byte, &heads)?;
    }
    Ok(())
}

/// Selection to compare.
enum Choice {
    /// Everything that the pattern allows.
    Every,
    /// One selection for all heads.
    Alike(Selection),
    /// One selection for each head of each layer, from a file.
    ByHead(HeadChoices),
}

impl Choice {
    fn name(&self) -> Option<String> {
        match self {
            Self::Every => None,
            Self::Alike(selection) => Some(selection.to_string()),
            Self::ByHead(choices) => Some(choices.path.display().to_string()),
        }
    }

    fn switched_on(&self, model: &SparseTransformer) -> Result<SparseTransformer> {
        let model = model.clone();
        Ok(match self {
            Self::Every => model,
            Self::Alike(selection) => model.with_selections(std::slice::from_ref(selection), 0)?,
            Self::ByHead(choices) => choices.switched_on(model)?,
        })
    }

    /// Measures the selection on the attention of a model that sees everything, per layer and head.
    fn heads(
        &self,
        model: &SparseTransformer,
        window: &[u8],
        device: &Device,
    ) -> Result<Vec<Vec<SelectionQuality>>> {
        match self {
            Self::Every => Ok(Vec::new()),
            Self::Alike(selection) => heads(model, Some(selection), window, device),
            Self::ByHead(choices) => {
                let tokens = tokens(window, device);
                Ok(model.head_selection_quality(tokens, &choices.layers)?)
            }
        }
    }
}

/// Destination of JSON, and its name in errors.
type Lines = Option<(Box<dyn Write>, String)>;

fn lines(json: Option<&Option<PathBuf>>) -> Result<Lines> {
    Ok(match json {
        None => None,
        Some(None) => Some((Box::new(stdout()), "the standard output".to_owned())),
        Some(Some(path)) => {
            let name = path.display().to_string();
            let file = File::create(path).with_context(|| format!("cannot write {name}"))?;
            Some((Box::new(file), name))
        }
    })
}

fn print(
    args: &RecallArgs,
    lines: &mut Lines,
    (selection, everything): (Option<String>, &str),
    bits_per_byte: f64,
    heads: &[Vec<SelectionQuality>],
) -> Result<()> {
    let numbers = |head: &SelectionQuality| SelectionNumbers {
        recall: head.recall,
        first_percentile: head.first_percentile,
        ratio: head.ratio(),
        density: head.density,
    };
    let of_heads = heads
        .iter()
        .map(|heads| heads.iter().map(numbers).collect());
    let found = Found {
        selection: selection.clone(),
        bits_per_byte,
        heads: of_heads.collect(),
        layers: by_layer(heads),
    };
    if let Some((to, name)) = lines {
        let line = serde_json::to_string(&found)?;
        writeln!(to, "{line}").with_context(|| format!("cannot write {name}"))?;
    }
    if !args.has_table() {
        return Ok(());
    }
    let mean = mean(&found.layers);
    let (recall, ratio, density) = (mean.recall, mean.ratio, mean.density);
    say(match selection {
        None => format!(
            "{everything:<28} {bits_per_byte:>9.4} {:>8} {:>8} {:>8}",
            1, 1, 1
        ),
        Some(selection) => format!(
            "{selection:<28} {bits_per_byte:>9.4} {recall:>8.4} {ratio:>8.4} {density:>8.4}"
        ),
    });
    for (layer, heads) in found.heads.iter().enumerate().filter(|_| args.heads) {
        for (head, of) in heads.iter().enumerate() {
            say(format!(
                "  layer {layer:>2}, head {head:>2} {:>21.4} {:>8.4} {:>8.4}  99 of 100 rows {:.4}",
                of.recall, of.ratio, of.density, of.first_percentile
            ));
        }
    }
    Ok(())
}

/// Means over the heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerRecall {
    pub layer: usize,
    /// Share of the attention on the selected keys.
    pub recall: f64,
    /// Recall relative to that of the best selection of as many keys.
    pub ratio: f64,
    /// Selected blocks as a share of the visible ones.
    pub density: f64,
}

/// Returns the mean of recall, ratio and density.
fn mean_of(layer: usize, shares: impl ExactSizeIterator<Item = [f64; 3]>) -> LayerRecall {
    let count = shares.len().max(1) as f64;
    let sums = shares.fold([0.0; 3], |sums, more| [0, 1, 2].map(|i| sums[i] + more[i]));
    let [recall, ratio, density] = sums.map(|sum| sum / count);
    LayerRecall {
        layer,
        recall,
        ratio,
        density,
    }
}

/// Returns the means of each layer with heads that choose.
fn by_layer(heads: &[Vec<SelectionQuality>]) -> Vec<LayerRecall> {
    let shares = |head: &SelectionQuality| [head.recall, head.ratio(), head.density];
    let layers = heads.iter().enumerate();
    layers
        .filter(|(_, heads)| !heads.is_empty())
        .map(|(layer, heads)| mean_of(layer, heads.iter().map(shares)))
        .collect()
}

/// Measures each layer's own selection on a window of bytes; layers without one are omitted.
pub fn measure(
    model: &SparseTransformer,
    window: &[u8],
    device: &Device,
) -> Result<Vec<LayerRecall>> {
    Ok(by_layer(&heads(model, None, window, device)?))
}

/// Measures `selection`, or each layer's own, per layer and head.
pub fn heads(
    model: &SparseTransformer,
    selection: Option<&Selection>,
    window: &[u8],
    device: &Device,
) -> Result<Vec<Vec<SelectionQuality>>> {
    Ok(model.selection_quality(tokens(window, device), selection)?)
}

/// Returns a window as a batch of one.
fn tokens(window: &[u8], device: &Device) -> Tensor<2, Int> {
    let tokens: Vec<i32> = window.iter().map(|&byte| i32::from(byte)).collect();
    let tokens = TensorData::new(tokens, [1, window.len()]);
    Tensor::from_data(tokens, device)
}

/// Returns the mean over layers, with the number of layers as `layer`.
pub fn mean(layers: &[LayerRecall]) -> LayerRecall {
    let shares = |layer: &LayerRecall| [layer.recall, layer.ratio, layer.density];
    mean_of(layers.len(), layers.iter().map(shares))
}

/// Formats all layers in one line.
pub fn summary(layers: &[LayerRecall]) -> String {
    let mean = mean(layers);
    let of_layers: Vec<String> = (layers.iter())
        .map(|layer| format!("{:.3}", layer.recall))
        .collect();
    format!(
        "recall {:.3} at density {:.3}, {:.3} of the best choice's; by layer {}",
        mean.recall,
        mean.density,
        mean.ratio,
        of_layers.join(" ")
    )
}
