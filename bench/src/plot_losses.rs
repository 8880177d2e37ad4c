//! Draws validation losses over training steps, one curve a seed and one colour a program, from a data file as
//! `docs/data/losses.json`.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
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
    let text =
        std::fs::read_to_string(&args.losses).with_context(|| args.losses.display().to_string())?;
    let losses: Losses =
        serde_json::from_str(&text).with_context(|| args.losses.display().to_string())?;
    ensure!(
        losses.curves.len() <= COLORS.len(),
        "curves must be at most {}, got {}",
        COLORS.len(),
        losses.curves.len()
    );
    let points = || {
        losses
            .curves
            .iter()
            .flat_map(|of| of.seeds.iter().flatten())
    };
    let last = points().map(|point| point.0).max();
    let last = last.context("curves must have at least one point")?;
    let bounds = points().fold((f64::MAX, f64::MIN), |(least, most), point| {
        (least.min(point.1), most.max(point.1))
    });
    blocksparse::font::register();
    let area = BitMapBackend::new(&args.picture, (900, 520)).into_drawing_area();
    area.fill(&WHITE)?;
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
    for (of, color) in losses.curves.iter().zip(COLORS) {
        for (index, seed) in of.seeds.iter().enumerate() {
            let line = LineSeries::new(seed.iter().copied(), color.stroke_width(2)).point_size(3);
            let series = chart.draw_series(line)?;
            if index == 0 {
                series.label(&of.name).legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2))
                });
            }
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
