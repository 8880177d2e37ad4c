//! What a choice of keys by content keeps of a model's attention.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_sparse_transformer::{HeadSelections, Selection, SelectionQuality, SparseTransformer};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::config::RunConfig;
use crate::data::{Corpus, Split, thousands};
use crate::eval::Evaluator;
use crate::progress::{plain_bar, say, warn};
use crate::search::SelectionFile;
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
    #[arg(long, value_name = "TEXT", required_unless_present = "selection_file", long_help = arguments::selection_help(
        "A choice, e.g. topk:32,8; repeat to compare",
    ))]
    selection: Vec<Selection>,
    /// A choice for each head, as search-selection writes it; repeat to compare
    #[arg(long, value_name = "FILE")]
    selection_file: Vec<PathBuf>,
    /// Windows of the validation split for bits per byte
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = arguments::positive)]
    windows: usize,
    /// Also each layer and head
    #[arg(long)]
    heads: bool,
    /// One JSON object a line, in place of a table, or into FILE beside it (`plot-recall` draws it)
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    json: Option<Option<PathBuf>>,
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
    check_patterns(&path, config)?;
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
    let mut lines = Lines::new(args.json.as_ref())?;
    if lines.has_table() {
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
    for path in &args.selection_file {
        let heads = SelectionFile::read(path)?.heads();
        let heads = heads.with_context(|| format!("cannot read {}", path.display()))?;
        choices.push(Choice::ByHead(path.display().to_string(), heads));
    }
    for choice in &choices {
        let with = choice.switched_on(&model)?;
        let evaluator = Evaluator {
            model: &with,
            device: &device.device,
            cut,
            batch: config.recipe.batch,
        };
        let evaluation = evaluator.run(bytes, &plan, &plain_bar("evaluating"))?;
        // Of the model that sees everything: what the choice would have kept.
        let heads = choice.heads(&model, &bytes[..context], &device.device)?;
        let bits_per_byte = evaluation.bits_per_byte();
        print(args, &mut lines, choice.name(), bits_per_byte, &heads)?;
    }
    Ok(())
}

/// That a checkpoint's patterns are every earlier byte.
///
/// # Errors
/// If they are others.
pub fn check_patterns(path: &Path, config: &RunConfig) -> Result<()> {
    ensure!(
        config.model.patterns.iter().all(|text| text == "causal"),
        "{} has the pattern {}, and a choice by content is made from every earlier byte; train with --attention dense or --selection",
        path.display(),
        config.model.patterns.join(" / ")
    );
    Ok(())
}

/// A choice that is compared.
enum Choice {
    /// Every earlier byte.
    Every,
    /// One for all heads.
    Alike(Selection),
    /// One for each head of each layer, from a file.
    ByHead(String, Vec<HeadSelections>),
}

impl Choice {
    fn name(&self) -> Option<String> {
        match self {
            Self::Every => None,
            Self::Alike(selection) => Some(selection.to_string()),
            Self::ByHead(path, _) => Some(path.clone()),
        }
    }

    fn switched_on(&self, model: &SparseTransformer) -> Result<SparseTransformer> {
        let model = model.clone();
        Ok(match self {
            Self::Every => model,
            Self::Alike(selection) => model.with_selections(std::slice::from_ref(selection), 0)?,
            Self::ByHead(_, layers) => {
                model.with_head_selections(layers.iter().cloned().map(Some).collect())?
            }
        })
    }

    /// What it keeps of the attention of a model that sees everything, of each layer and head.
    fn heads(
        &self,
        model: &SparseTransformer,
        window: &[u8],
        device: &Device,
    ) -> Result<Vec<Vec<SelectionQuality>>> {
        let layers = match self {
            Self::Every => return Ok(Vec::new()),
            Self::Alike(selection) => return heads(model, Some(selection), window, device),
            Self::ByHead(_, layers) => layers,
        };
        let mut found: Vec<(Selection, Vec<Vec<SelectionQuality>>)> = Vec::new();
        let mut all = Vec::new();
        for (layer, of) in layers.iter().enumerate() {
            let mut own = Vec::new();
            for head in 0..model.blocks[layer].mha.n_heads() {
                // All blocks, for a head that leaves it to the pattern.
                let selection = match of.of(head) {
                    Some(selection) => selection.clone(),
                    None => "topk:32,ratio=1".parse()?,
                };
                if !found.iter().any(|(known, _)| *known == selection) {
                    let heads = heads(model, Some(&selection), window, device)?;
                    found.push((selection.clone(), heads));
                }
                let known = found.iter().find(|(known, _)| *known == selection);
                own.extend(known.map(|(_, heads)| heads[layer][head]));
            }
            all.push(own);
        }
        Ok(all)
    }
}

/// Where JSON goes.
enum Lines {
    Nowhere,
    Printed,
    Written(PathBuf, File),
}

impl Lines {
    fn new(json: Option<&Option<PathBuf>>) -> Result<Self> {
        Ok(match json {
            None => Self::Nowhere,
            Some(None) => Self::Printed,
            Some(Some(path)) => {
                let file = File::create(path);
                let file = file.with_context(|| format!("cannot write {}", path.display()))?;
                Self::Written(path.clone(), file)
            }
        })
    }

    /// Whether people are told, too.
    fn has_table(&self) -> bool {
        !matches!(self, Self::Printed)
    }

    fn write(&mut self, found: &Found) -> Result<()> {
        let line = || serde_json::to_string(found);
        match self {
            Self::Nowhere => {}
            Self::Printed => println!("{}", line()?),
            Self::Written(path, file) => writeln!(file, "{}", line()?)
                .with_context(|| format!("cannot write {}", path.display()))?,
        }
        Ok(())
    }
}

fn print(
    args: &RecallArgs,
    lines: &mut Lines,
    selection: Option<String>,
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
    lines.write(&Found {
        selection: selection.clone(),
        bits_per_byte,
        heads: heads
            .iter()
            .map(|heads| heads.iter().map(numbers).collect())
            .collect(),
        layers: layers.clone(),
    })?;
    if !lines.has_table() {
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
            selection,
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
