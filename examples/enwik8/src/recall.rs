//! What a choice of keys by content keeps of a model's attention.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_sparse_transformer::{Selection, SelectionQuality, SparseTransformer};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::data::{Corpus, Split, thousands};
use crate::eval::Evaluator;
use crate::progress::{plain_bar, say, warn};
use crate::{arguments, device, model, run};

/// Compare choices of keys by content on a checkpoint
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 recall --checkpoint runs/dense --selection topk:32,8 --selection topk:32,p=0.9
  enwik8 recall --checkpoint runs/dense --selection topk:32,8 --heads

The model's pattern is every earlier byte, as --attention dense and --selection train it. Bits per byte are those with the choice switched on
in all layers; recall, density and the ratio to the best choice are of one window.")]
pub struct RecallArgs {
    /// A checkpoint file, or a run folder, whose best checkpoint is taken
    #[arg(long, value_name = "PATH", default_value = "runs/tiny")]
    checkpoint: PathBuf,
    /// A choice, e.g. topk:32,8; repeat to compare
    #[arg(long, value_name = "TEXT", required = true, long_help = arguments::selection_help(
        "A choice, e.g. topk:32,8; repeat to compare",
    ))]
    selection: Vec<Selection>,
    /// Windows of the validation split for bits per byte
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = arguments::positive)]
    windows: usize,
    /// Also each layer and head
    #[arg(long)]
    heads: bool,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
    /// flex, ndarray, wgpu, cuda or cuda:INDEX [default: the best that is compiled in]
    #[arg(long)]
    device: Option<String>,
}

/// What is found of a choice; none for every earlier byte.
#[derive(Serialize)]
struct Found {
    selection: Option<String>,
    bits_per_byte: f64,
    /// Of every layer that chooses, of every head.
    heads: Vec<Vec<SelectionNumbers>>,
    layers: Vec<LayerRecall>,
}

/// Of a head.
#[derive(Serialize)]
struct SelectionNumbers {
    recall: f64,
    first_percentile: f64,
    ratio: f64,
    density: f64,
}

/// Runs `enwik8 recall`.
///
/// # Errors
/// If the checkpoint cannot be read, or its patterns are other than every earlier byte.
pub fn run(args: &RecallArgs) -> Result<()> {
    let device = device::open(args.device.as_deref())?;
    let (path, checkpoint) = run::open_checkpoint(&args.checkpoint, warn)?;
    let config = &checkpoint.header.config;
    ensure!(
        config.model.patterns.iter().all(|text| text == "causal"),
        "{} has the pattern {}, and a choice by content is made from every earlier byte; train with --attention dense or --selection",
        path.display(),
        config.model.patterns.join(" / ")
    );
    let context = config.model.context;
    ensure!(
        config.model.pictures.is_none(),
        "{} was trained on pictures, and recall measures windows of text",
        path.display()
    );
    let corpus = Corpus::reopen(&checkpoint.header.data, None, None)?;
    let bytes = corpus.split_for(Split::Validation, context)?;
    let model = model::restore(&checkpoint, &device.device)?;
    let model = model.with_selections(&[], 0)?;
    if !args.json {
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
    let choices = std::iter::once(None).chain(args.selection.iter().map(Some));
    for selection in choices {
        let chosen: Vec<Selection> = selection.cloned().into_iter().collect();
        let with = model.clone().with_selections(&chosen, 0)?;
        let evaluator = Evaluator {
            model: &with,
            device: &device.device,
            cut,
            batch: config.recipe.batch,
        };
        let evaluation = evaluator.run(bytes, &plan, &plain_bar("evaluating"))?;
        // Of the model that sees everything: what the choice would have kept.
        let heads = match selection {
            Some(_) => heads(&model, selection, &bytes[..context], &device.device)?,
            None => Vec::new(),
        };
        print(args, selection, evaluation.bits_per_byte(), &heads)?;
    }
    Ok(())
}

fn print(
    args: &RecallArgs,
    selection: Option<&Selection>,
    bits_per_byte: f64,
    heads: &[Vec<SelectionQuality>],
) -> Result<()> {
    let layers = heads.iter().enumerate();
    let layers: Vec<LayerRecall> = layers
        .map(|(layer, heads)| LayerRecall::of(layer, heads))
        .collect();
    let numbers = |head: &SelectionQuality| SelectionNumbers {
        recall: head.recall,
        first_percentile: head.first_percentile,
        ratio: head.ratio(),
        density: head.density,
    };
    if args.json {
        let found = Found {
            selection: selection.map(ToString::to_string),
            bits_per_byte,
            heads: heads
                .iter()
                .map(|heads| heads.iter().map(numbers).collect())
                .collect(),
            layers,
        };
        println!("{}", serde_json::to_string(&found)?);
        return Ok(());
    }
    let mean = |of: fn(&LayerRecall) -> f64| {
        layers.iter().map(of).sum::<f64>() / layers.len().max(1) as f64
    };
    say(match selection {
        None => format!(
            "{:<28} {bits_per_byte:>9.4} {:>8} {:>8} {:>8}",
            "every earlier byte", 1, 1, 1
        ),
        Some(selection) => format!(
            "{:<28} {bits_per_byte:>9.4} {:>8.4} {:>8.4} {:>8.4}",
            selection.to_string(),
            mean(|layer| layer.recall),
            mean(|layer| layer.ratio),
            mean(|layer| layer.density)
        ),
    });
    for (layer, heads) in heads.iter().enumerate().filter(|_| args.heads) {
        for (head, found) in heads.iter().enumerate() {
            let SelectionNumbers {
                recall,
                first_percentile,
                ratio,
                density,
            } = numbers(found);
            say(format!(
                "  layer {layer:>2}, head {head:>2} {:>21.4} {ratio:>8.4} {density:>8.4}  99 of 100 rows {first_percentile:.4}",
                recall
            ));
        }
    }
    Ok(())
}

/// Means over the heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerRecall {
    /// The layer, from 0 on.
    pub layer: usize,
    /// The share of the attention that chosen keys have.
    pub recall: f64,
    /// The same, as a share of what the best choice of as many would have.
    pub ratio: f64,
    /// Chosen blocks as a share of those that are visible.
    pub density: f64,
}

impl LayerRecall {
    fn of(layer: usize, heads: &[SelectionQuality]) -> Self {
        let mean = |of: fn(&SelectionQuality) -> f64| {
            heads.iter().map(of).sum::<f64>() / heads.len() as f64
        };
        Self {
            layer,
            recall: mean(|head| head.recall),
            ratio: mean(SelectionQuality::ratio),
            density: mean(|head| head.density),
        }
    }
}

/// Measures over a window of bytes: `selection`, or each layer's own; layers without one are left out.
///
/// # Errors
/// If the selection does not serve the model, or the device gives nothing back.
pub fn measure(
    model: &SparseTransformer,
    selection: Option<&Selection>,
    window: &[u8],
    device: &Device,
) -> Result<Vec<LayerRecall>> {
    let heads = heads(model, selection, window, device)?;
    let chosen = heads
        .iter()
        .enumerate()
        .filter(|(_, heads)| !heads.is_empty());
    Ok(chosen
        .map(|(layer, heads)| LayerRecall::of(layer, heads))
        .collect())
}

/// [`measure`] of each layer and head.
///
/// # Errors
/// As [`measure`].
pub fn heads(
    model: &SparseTransformer,
    selection: Option<&Selection>,
    window: &[u8],
    device: &Device,
) -> Result<Vec<Vec<SelectionQuality>>> {
    let tokens: Vec<i32> = window.iter().map(|&byte| i32::from(byte)).collect();
    let tokens = TensorData::new(tokens, [1, window.len()]);
    let tokens = Tensor::<2, Int>::from_data(tokens, device);
    Ok(model.selection_quality(tokens, selection)?)
}

/// One line of all layers.
pub fn summary(layers: &[LayerRecall]) -> String {
    let mean = |of: fn(&LayerRecall) -> f64| {
        layers.iter().map(of).sum::<f64>() / layers.len().max(1) as f64
    };
    let of_layers: Vec<String> = (layers.iter())
        .map(|layer| format!("{:.3}", layer.recall))
        .collect();
    format!(
        "recall {:.3} at density {:.3}, {:.3} of the best choice's; by layer {}",
        mean(|layer| layer.recall),
        mean(|layer| layer.density),
        mean(|layer| layer.ratio),
        of_layers.join(" ")
    )
}
