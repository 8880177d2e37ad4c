//! Draws what attention to fewer keys costs: bits per byte more than with all keys against the share that is seen, a line for each method.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use blocksparse_bench::chart;
use clap::Parser;
use plotters::prelude::*;
use serde::Deserialize;

#[derive(Parser)]
#[command(about = "Draws the cost of attention to fewer keys, and of caches of a fixed size")]
struct Args {
    /// `{"context": .., "all": .., "keys": [..], "policies": {NAME: [bits per byte, ..]}}`, or the lines of `llama perplexity --json`, the first of all keys.
    results: PathBuf,
    /// The picture, a PNG.
    picture: PathBuf,
}

/// Of each method shares of keys and bits per byte more than with all keys.
type Lines = BTreeMap<String, Vec<(f64, f64)>>;

#[derive(Deserialize)]
struct Policies {
    context: f64,
    /// Bits per byte with all keys.
    all: f64,
    /// Keys that are kept, of each measurement.
    keys: Vec<f64>,
    policies: BTreeMap<String, Vec<f64>>,
}

impl Policies {
    fn lines(self) -> Lines {
        let shares: Vec<f64> = self.keys.iter().map(|keys| keys / self.context).collect();
        let more = |bits: f64| bits - self.all;
        let of = |(name, bits): (String, Vec<f64>)| {
            let points = shares.iter().copied().zip(bits.into_iter().map(more));
            (name, points.collect())
        };
        self.policies.into_iter().map(of).collect()
    }
}

/// A row of `llama perplexity`.
#[derive(Deserialize)]
struct Row {
    attention: String,
    cache: Option<String>,
    share: Option<f64>,
    bits_per_byte: f64,
}

impl Row {
    /// The method without its numbers.
    fn name(&self) -> String {
        let text = match &self.cache {
            Some(cache) if self.attention == "dense" => cache,
            _ => &self.attention,
        };
        let (name, numbers) = text.split_once(':').unwrap_or((text, ""));
        let options = numbers.split(',').filter(|part| {
            // What remains says how, not how much.
            part.starts_with(|c: char| c.is_ascii_alphabetic() || c == ' ')
                && !part.starts_with("ratio=")
        });
        let options: Vec<&str> = options.map(str::trim).collect();
        [&[name], options.as_slice()].concat().join(" ")
    }
}

fn rows(text: &str) -> Result<Lines> {
    let rows = text.lines().map(serde_json::from_str);
    let rows: Vec<Row> = rows.collect::<Result<_, _>>()?;
    let (all, rest) = rows.split_first().context("there is no row")?;
    let mut lines = Lines::new();
    for row in rest {
        if let Some(share) = row.share {
            let more = row.bits_per_byte - all.bits_per_byte;
            lines.entry(row.name()).or_default().push((share, more));
        }
    }
    Ok(lines)
}

/// What is above nothing, as a logarithm needs it, with the smallest share first.
fn lines(path: &Path) -> Result<Lines> {
    let text = chart::read_text(path)?;
    let found = match serde_json::from_str::<Policies>(&text) {
        Ok(policies) => policies.lines(),
        Err(_) => rows(&text).with_context(|| path.display().to_string())?,
    };
    let found = found.into_iter().map(|(name, mut points)| {
        points.retain(|(_, more)| *more > 0.0);
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        (name, points)
    });
    let found: Lines = found.filter(|(_, points)| !points.is_empty()).collect();
    ensure!(
        !found.is_empty(),
        "{}: nothing costs more than all keys",
        path.display()
    );
    Ok(found)
}

fn main() -> Result<()> {
    let args = Args::parse();
    let lines = lines(&args.results)?;
    let points = || lines.values().flatten();
    let (narrow, wide) = chart::bounds(points().map(|point| point.0));
    let (least, most) = chart::bounds(points().map(|point| point.1));
    let area = chart::picture(&args.picture, (760, 460))?;
    let mut chart = ChartBuilder::on(&area)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(
            (0.9 * narrow..1.1 * wide).log_scale(),
            (0.7 * least..1.5 * most).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_desc("keys that are seen, of all")
        .y_desc("bits per byte more")
        .x_label_formatter(&|x| format!("{:.0}%", x * 100.0))
        .y_label_formatter(&|y| ((y * 1e4).round() / 1e4).to_string())
        .label_style(("sans-serif", 15))
        .light_line_style(WHITE)
        .draw()?;
    for (index, (name, points)) in lines.iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        chart::line(&mut chart, points.iter().copied(), color, Some((name, 18)))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_method_are_a_line() {
        let row = |attention: &str, cache: &str, share: &str, bits: f64| {
            format!(
                r#"{{"attention":"{attention}","cache":{cache},"share":{share},"bits_per_byte":{bits}}}"#
            )
        };
        let text = [
            row("dense", "null", "1.0", 1.0),
            row("moba:32,7,first=1,local=2", "null", "0.1", 1.5),
            row("moba:32,17,first=1,local=2", "null", "0.25", 1.25),
            row("topk:32,ratio=0.25", "null", "0.25", 2.0),
            row("sparge:32,ratio=0.1,0.3", "null", "null", 2.0),
            row("dense", r#""snapkv:205,64,5, int8""#, "0.5", 1.75),
        ];
        let lines = rows(&text.join("\n")).unwrap();
        let expected = [
            ("moba first=1 local=2", vec![(0.1, 0.5), (0.25, 0.25)]),
            ("snapkv int8", vec![(0.5, 0.75)]),
            ("topk", vec![(0.25, 1.0)]),
        ];
        let expected = expected.map(|(name, points)| (name.to_owned(), points));
        assert_eq!(lines.into_iter().collect::<Vec<_>>(), expected);
    }
}
