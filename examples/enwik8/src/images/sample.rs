//! `enwik8 sample-images`: generates several images at once.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use burn_paged_attention::generate::Sampling;
use burn_paged_attention::pool::{GraphDecoder, KvPoolConfig, KvRetention, KvStep, PagedDecoder};
use burn_sparse_transformer::SparseTransformer;
use clap::Args;

use super::format::Pictures;
use super::grid;
use crate::arguments::{self, ModelArgs};
use crate::data::thousands;
use crate::model;
use crate::progress::{clock, plain_bar, say};

/// Generate images from a checkpoint
#[derive(Args, Debug)]
#[command(mut_arg("checkpoint", |path| path.default_value("runs/shapes")), after_help = "Examples:
  enwik8 sample-images
  enwik8 sample-images --class 3 --count 16 --out crosses.png
  enwik8 sample-images --checkpoint runs/cifar --temperature 1 --device cuda --graph")]
pub struct SampleImagesArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Output: FILE.png
    #[arg(long, value_name = "FILE", default_value = "samples.png")]
    out: PathBuf,
    /// Number of images, generated at once
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = arguments::at_once)]
    count: usize,
    /// Class of the images; repeat for several in turn [default: all]
    #[arg(long, value_name = "CLASS")]
    class: Vec<u8>,
    /// 0 takes the likeliest bytes, 1 samples from the model
    #[arg(long, default_value_t = TEMPERATURE, value_parser = arguments::at_least_zero)]
    temperature: f64,
    /// Consider the likeliest bytes whose probabilities add up to P
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = arguments::share)]
    top_p: f64,
    /// Seed of the sampling
    #[arg(long, default_value_t = 1, value_parser = arguments::seed)]
    seed: u64,
    /// Pixels in the file per pixel of an image [default: about 128 per image]
    #[arg(long, value_name = "N", value_parser = arguments::positive)]
    zoom: Option<usize>,
    /// Capture a step in a CUDA graph and replay it: the same images with less work of the host
    #[arg(long)]
    graph: bool,
}

/// Slightly sharper than the model's own distribution.
pub const TEMPERATURE: f64 = 0.94;

pub fn run(args: &SampleImagesArgs) -> Result<()> {
    let is_png = args
        .out
        .extension()
        .is_some_and(|extension| extension == "png");
    ensure!(is_png, "--out must end in .png, got {}", args.out.display());
    let (device, path, checkpoint) = args.model.open()?;
    let config = &checkpoint.header.config.model;
    let Some(pictures) = config.pictures else {
        bail!("{} was trained on text: use enwik8 sample", path.display());
    };
    for &class in &args.class {
        ensure!(
            usize::from(class) < pictures.classes,
            "--class must be below {}, the number of classes of {}, got {class}",
            pictures.classes,
            path.display()
        );
    }
    model::check_cached(config)?;
    let zoom = args.zoom.unwrap_or_else(|| zoom(pictures));
    let columns = columns(args.count);
    let side = grid::side(pictures, columns, zoom);
    ensure!(
        side <= grid::MOST_PIXELS,
        "--zoom must keep {} pictures within {} pixels a side, got {zoom}, which makes {side}",
        args.count,
        grid::MOST_PIXELS
    );
    let model = model::without_selections(model::restore(&checkpoint, &device.device)?)?;
    let classes = classes(&args.class, args.count, pictures);
    let sampling = Sampling::default()
        .temperature(args.temperature)
        .top_p(args.top_p)
        .seed(args.seed);
    let began = Instant::now();
    let drawn = draw(model, pictures, &classes, &sampling, args.graph)?;
    grid::save(&args.out, pictures, &drawn, columns, zoom)?;
    say(format!(
        "{}: step {}; {} pictures of {} bytes in {}; wrote {}",
        path.display(),
        thousands(checkpoint.header.step),
        args.count,
        thousands(pictures.bytes()),
        clock(began.elapsed()),
        args.out.display()
    ));
    Ok(())
}

/// Returns the wanted classes in turn, or all.
pub fn classes(wanted: &[u8], count: usize, pictures: Pictures) -> Vec<u8> {
    let all: Vec<u8> = match wanted {
        [] => (0..pictures.classes.min(256))
            .map(|class| class as u8)
            .collect(),
        wanted => wanted.to_vec(),
    };
    all.into_iter().cycle().take(count).collect()
}

/// Returns the columns of a roughly square grid.
pub fn columns(count: usize) -> usize {
    (1..).find(|side| side * side >= count).unwrap_or(1)
}

/// Returns the zoom that makes an image about 128 pixels wide.
pub fn zoom(pictures: Pictures) -> usize {
    (128 / pictures.side).max(1)
}

/// Generates an image of each class, all at once, and returns their bytes, channels last.
pub fn draw(
    model: SparseTransformer,
    pictures: Pictures,
    classes: &[u8],
    sampling: &Sampling,
    graph: bool,
) -> Result<Vec<Vec<u8>>> {
    let length = pictures.bytes();
    let config = KvPoolConfig::for_lengths(classes.iter().map(|_| length))
        .with_residency(KvRetention::Reachable);
    let pool = model.new_pool(&config)?;
    let mut decoder = GraphDecoder::new(model, pool)?.recording(graph);
    let steps = (classes.iter())
        .map(|_| Ok(KvStep::new(decoder.pool_mut().join()?, 1)))
        .collect::<Result<Vec<_>>>()?;
    let mut tokens: Vec<u32> = classes
        .iter()
        .map(|&class| Pictures::start_token(class))
        .collect();
    let mut drawn = vec![Vec::with_capacity(length); classes.len()];
    let bar = plain_bar("drawing");
    bar.set_length(length as u64);
    for at in 0..length {
        let rows = model::rows(decoder.next_logits(&tokens, &steps)?)?;
        for (index, logits) in rows.iter().enumerate() {
            // Start tokens occur only at the beginning.
            let next = sampling.choose(&logits[..256], |_| false, [index, at]);
            let byte = next.context("the model's logits are not finite")?;
            drawn[index].push(byte as u8);
            tokens[index] = byte;
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(drawn)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_are_square_and_classes_in_turn() {
        assert_eq!([1, 2, 4, 5, 9, 16].map(columns), [1, 2, 2, 3, 3, 4]);
        let pictures = Pictures {
            side: 16,
            classes: 3,
            halved: false,
        };
        assert_eq!(classes(&[], 4, pictures), [0, 1, 2, 0]);
        assert_eq!(classes(&[2, 0], 3, pictures), [2, 0, 2]);
    }
}
