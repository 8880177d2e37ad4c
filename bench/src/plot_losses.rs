//! Draws validation losses over training steps, one curve a seed and one colour a program, from a data file as
//! `docs/data/losses.json`.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use blocksparse_bench::chart;
use clap::Parser;
use plotters::prelude::*;
use serde::Deserialize;

#[derive(Parser)]
#[command(about = "Draws the validation losses of several seeds and programs over the steps")]
struct Args {
    /// The losses, for example docs/data/losses.json.
    losses: PathBuf,
    /// The picture, a PNG.
    picture: PathBuf,
}

#[derive(Deserialize)]
struct Losses {
    title: String,
    curves: Vec<Curves>,
}

/// The runs of one program.
#[derive(Deserialize)]
struct Curves {
    name: String,
    /// For each seed (step, bits per byte).
    seeds: Vec<Vec<(u32, f64)>>,
}

const COLORS: [RGBColor; 4] = [
    RGBColor(255, 127, 14),
    RGBColor(31, 119, 180),
    RGBColor(44, 160, 44),
    RGBColor(148, 103, 189),
];

fn main() -> Result<()> {
    let args = Args::parse();
    let losses: Losses = chart::read_json(&args.losses)?;
    ensure!(
        losses.curves.len() <= COLORS.len(),
        "curves must be at most {}, got {}",
        COLORS.len(),
        losses.curves.len()
    );
    let curves = losses.curves.iter();
    let points = || curves.clone().flat_map(|of| of.seeds.iter().flatten());
    let last = points().map(|point| point.0).max();
    let last = last.context("curves must have at least one point")?;
    let bounds = chart::bounds(points().map(|point| point.1));
    let area = chart::picture(&args.picture, (900, 520))?;
    let mut chart = ChartBuilder::on(&area)
        .caption(&losses.title, ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(48)
        .build_cartesian_2d(0..last, bounds.0 - 0.1..bounds.1 + 0.1)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc("validation, bits per byte")
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (of, color) in curves.clone().zip(COLORS) {
        for (index, seed) in of.seeds.iter().enumerate() {
            let name = (index == 0).then_some((of.name.as_str(), 18));
            chart::line(&mut chart, seed.iter().copied(), color.to_rgba(), name)?;
        }
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.4))
        .draw()?;
    area.present()?;
    Ok(())
}
