//! Draws what `bench-kernels --densities --json FILE` measured: time against density, forward and backward, for each block size.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Result, anyhow};
use blocksparse_bench::chart::{self, Area, bounds};
use clap::Parser;
use plotters::prelude::*;
use serde_json::{Map, Value};

#[derive(Parser)]
#[command(about = "Draws the time of random blocks against their density")]
struct Args {
    /// What `bench-kernels --densities --json` wrote.
    results: PathBuf,
    /// The picture, a PNG.
    picture: PathBuf,
}

/// Density and milliseconds, by falling density.
type Line = Vec<(f64, f64)>;

fn main() -> Result<()> {
    let args = Args::parse();
    let results: Map<String, Value> = chart::read_json(&args.results)?;
    let area = chart::picture(&args.picture, (1000, 440))?;
    let halves = area.split_evenly((1, 2));
    let passes = [("forward", "fwd_ms"), ("backward", "bwd_ms")];
    for (half, (title, key)) in halves.iter().zip(passes) {
        let mut lines: BTreeMap<u64, Line> = BTreeMap::new();
        for (name, row) in &results {
            let number = |key: &str| {
                let number = row[key].as_f64();
                number.ok_or_else(|| anyhow!("{name} has no {key}: not measured with --densities?"))
            };
            let line = lines.entry(number("block")? as u64).or_default();
            line.push((number("density")?, number(key)?));
        }
        for line in lines.values_mut() {
            line.sort_by(|a, b| b.0.total_cmp(&a.0));
        }
        draw(half, title, &lines)?;
    }
    area.present()?;
    Ok(())
}

/// The label of 1, 2, 5, 10, 20, 50 and so on; none for the lines between.
fn few(x: f64, label: String) -> String {
    let digit = x / 10f64.powf(x.log10().floor());
    let is_one = |of: f64| (of - digit).abs() < 0.01;
    match [1.0, 2.0, 5.0, 10.0].into_iter().any(is_one) {
        true => label,
        false => String::new(),
    }
}

fn draw(area: &Area<'_>, title: &str, lines: &BTreeMap<u64, Line>) -> Result<()> {
    let (least, most) = bounds(lines.values().flatten().map(|(_, ms)| *ms));
    let (least, most) = (least * 0.4, most * 1.4);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 22))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d((0.008..0.6f64).log_scale(), (least..most).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("density")
        .y_desc("ms")
        .x_label_formatter(&|x| few(*x, format!("{:.0}%", x * 100.0)))
        .y_label_formatter(&|ms| {
            let text = match *ms {
                ms if ms < 1.0 => format!("{ms:.2}"),
                ms => format!("{ms:.1}"),
            };
            few(*ms, text)
        })
        .label_style(("sans-serif", 15))
        .light_line_style(WHITE)
        .draw()?;
    // Time proportional to density, through the densest point of the widest blocks.
    if let Some(&(density, ms)) = lines.values().last().and_then(|line| line.first()) {
        let proportional = [0.01, 0.5].map(|x| (x, ms * x / density));
        chart
            .draw_series(LineSeries::new(proportional, BLACK.mix(0.35)))?
            .label("proportional")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], BLACK.mix(0.35)));
    }
    for (index, (block, line)) in lines.iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        let name = format!("blocks of {block}");
        chart::line(&mut chart, line.clone(), color, Some((&name, 18)))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .label_font(("sans-serif", 15))
        .draw()?;
    Ok(())
}
