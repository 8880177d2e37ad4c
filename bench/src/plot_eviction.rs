//! Draws what caches that evict keys cost: bits per byte more than with all keys against the share that is kept, a line for each policy.

use std::path::PathBuf;

use anyhow::Result;
use blocksparse_bench::chart;
use clap::Parser;
use plotters::prelude::*;
use serde::Deserialize;

#[derive(Parser)]
#[command(about = "Draws the cost of caches of a fixed size")]
struct Args {
    /// `{"context": .., "all": .., "keys": [..], "policies": {NAME: [bits per byte, ..]}}`
    results: PathBuf,
    /// The picture, a PNG.
    picture: PathBuf,
}

#[derive(Deserialize)]
struct Results {
    context: f64,
    /// Bits per byte with all keys.
    all: f64,
    /// Keys that are kept, of each measurement.
    keys: Vec<f64>,
    policies: std::collections::BTreeMap<String, Vec<f64>>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let results: Results = chart::read_json(&args.results)?;
    let area = chart::picture(&args.picture, (760, 460))?;
    let share = |keys: &f64| keys / results.context;
    let mut chart = ChartBuilder::on(&area)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d((0.045..0.55f64).log_scale(), (0.0005..1.0f64).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("keys that are kept, of the context")
        .y_desc("bits per byte more")
        .x_label_formatter(&|x| format!("{:.0}%", x * 100.0))
        .label_style(("sans-serif", 15))
        .light_line_style(WHITE)
        .draw()?;
    for (index, (policy, bits)) in results.policies.iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        let line: Vec<(f64, f64)> = (results.keys.iter().map(share))
            .zip(bits.iter().map(|bits| bits - results.all))
            .filter(|(_, more)| *more > 0.0)
            .collect();
        chart::line(&mut chart, line, color, Some((policy, 18)))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerLeft)
        .background_style(WHITE.mix(0.8))
        .label_font(("sans-serif", 15))
        .draw()?;
    area.present()?;
    Ok(())
}
