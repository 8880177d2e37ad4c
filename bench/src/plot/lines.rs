//! The line charts: series and axis labels of each kind.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::chart::{Chart, Panel, Points, Series};
use crate::picture::{read_json, read_lines, read_text};

/// A measurement of random blocks by `bench-kernels --densities`.
#[derive(Deserialize)]
struct Timed {
    block: u64,
    density: f64,
    fwd_ms: f64,
    bwd_ms: f64,
}

/// Draws a line for each block size, and a line of time proportional to density through the densest point of the largest blocks.
pub fn density(path: &Path) -> Result<Chart> {
    let rows: BTreeMap<String, Timed> =
        read_json(path).context("not measured with --densities?")?;
    let panel = |y, ms: fn(&Timed) -> f64| {
        let points = rows.values().map(|row| (row.block, (row.density, ms(row))));
        let mut series = grouped(points, |block| format!("blocks of {block}"));
        let densest = series.last().and_then(|of| of.lines[0].last());
        let proportional = densest.map(|(density, ms)| Series {
            name: "proportional".to_owned(),
            faint: [0.01, 0.5].map(|x| (x, ms * x / density)).to_vec(),
            ..Series::default()
        });
        series.extend(proportional);
        Panel::new("density", y, series)
    };
    Ok(Chart {
        is_logarithmic: true,
        panels: vec![
            panel("ms forward", |row| row.fwd_ms),
            panel("ms backward", |row| row.bwd_ms),
        ],
        ..Chart::default()
    })
}

/// Loss curves of a program, one per seed: steps and bits per byte.
#[derive(Deserialize)]
struct Losses {
    title: String,
    curves: Vec<Series>,
}

pub fn losses(path: &Path) -> Result<Chart> {
    let Losses { title, curves } = read_json(path)?;
    Ok(Chart {
        title,
        panels: vec![Panel::new("step", "validation, bits per byte", curves)],
        ..Chart::default()
    })
}

/// A row of `llama perplexity`.
#[derive(Deserialize)]
struct Measured {
    attention: String,
    cache: Option<String>,
    share: Option<f64>,
    bits_per_byte: f64,
}

impl Measured {
    /// Returns the method without its numbers.
    fn name(&self) -> String {
        let text = match &self.cache {
            Some(cache) if self.attention == "dense" => cache,
            _ => &self.attention,
        };
        let Some((name, numbers)) = text.split_once(':') else {
            return text.clone();
        };
        let options = numbers.split(',').filter(|part| {
            // Keeps options that describe the method rather than an amount.
            part.starts_with(|c: char| c.is_ascii_alphabetic() || c == ' ')
                && !part.starts_with("ratio=")
        });
        [name]
            .into_iter()
            .chain(options.map(str::trim))
            .collect::<Vec<_>>()
            .join(" ")
    }
}

/// Plots for each method the rows that cost more than all keys, as a logarithmic axis requires.
pub fn quality(path: &Path) -> Result<Chart> {
    let rows: Vec<Measured> = read_lines(path)?;
    let (all, rest) = (rows.split_first())
        .with_context(|| format!("{} has no row of all keys", path.display()))?;
    let points = rest.iter().filter_map(|row| {
        let more = row.bits_per_byte - all.bits_per_byte;
        Some((row.name(), (row.share?, more))).filter(|_| more > 0.0)
    });
    let series = grouped(points, |name| name);
    let path = path.display();
    ensure!(
        !series.is_empty(),
        "{path}: nothing costs more than all keys"
    );
    let (x, y) = ("keys that are seen, of all", "bits per byte more");
    Ok(Chart {
        is_logarithmic: true,
        panels: vec![Panel::new(x, y, series)],
        ..Chart::default()
    })
}

pub fn runs(title: String, top: Option<f64>, runs: &[(String, PathBuf)]) -> Result<Chart> {
    let runs = runs.iter().map(|(name, path)| run(name, path));
    let runs: Vec<(Series, Series)> = runs.collect::<Result<_>>()?;
    let (by_steps, by_seconds) = runs.into_iter().unzip();
    Ok(Chart {
        title,
        top,
        panels: vec![
            Panel::new("optimizer steps", "bits per byte", by_steps),
            Panel::new("seconds of training", "bits per byte", by_seconds),
        ],
        ..Chart::default()
    })
}

/// Fields of a log line.
#[derive(Deserialize)]
struct Row {
    kind: String,
    step: f64,
    #[serde(default)]
    ms: f64,
    bits_per_byte: Option<f64>,
}

/// Returns the validation curve of a run with its running mean behind, over steps and over seconds.
fn run(name: &str, path: &Path) -> Result<(Series, Series)> {
    let path = match path.is_dir() {
        true => path.join("log.jsonl"),
        false => path.to_owned(),
    };
    let (mut training, mut validation, mut last) = (Vec::new(), Vec::new(), None);
    let mut seconds = 0.0;
    // A line that a killed process left incomplete is skipped.
    for row in (read_text(&path)?.lines()).filter_map(|line| serde_json::from_str::<Row>(line).ok())
    {
        if row.kind == "train" && !training.is_empty() {
            seconds += row.ms / 1000.0;
        }
        match (
            row.kind.as_str(),
            row.bits_per_byte.map(|bits| ([row.step, seconds], bits)),
        ) {
            ("train", Some(point)) => training.push(point),
            ("validation", Some(point)) => validation.push(point),
            ("final", Some(point)) => last = Some(point),
            _ => {}
        }
    }
    ensure!(
        !training.is_empty(),
        "{} has no steps of training",
        path.display()
    );
    let name = match last {
        None => name.to_owned(),
        Some((_, bits)) => format!("{name}: {bits:.3} in the end"),
    };
    let training = smoothed(&training);
    let over = |axis: usize| {
        let at = |&(xs, bits): &Point| (xs[axis], bits);
        Series {
            name: name.clone(),
            lines: vec![validation.iter().map(at).collect()],
            faint: training.iter().map(at).collect(),
            last: last.as_ref().map(at),
        }
    };
    Ok((over(0), over(1)))
}

/// A step with the seconds of training up to it, and bits per byte.
type Point = ([f64; 2], f64);

/// Returns running means over a fiftieth of the steps, at least 5. At most a thousand are kept, since more cannot be resolved.
fn smoothed(curve: &[Point]) -> Vec<Point> {
    let window = (curve.len() / 50).max(5);
    let means = (curve.iter().enumerate()).step_by(curve.len().div_ceil(1000));
    let mean = |(index, (xs, _)): (usize, &Point)| {
        let of = &curve[(index + 1).saturating_sub(window)..=index];
        (
            *xs,
            of.iter().map(|point| point.1).sum::<f64>() / of.len() as f64,
        )
    };
    means.map(mean).collect()
}

/// Returns a series for each key, from left to right.
fn grouped<K: Ord>(
    points: impl Iterator<Item = (K, (f64, f64))>,
    name: impl Fn(K) -> String,
) -> Vec<Series> {
    let mut lines: BTreeMap<K, Points> = BTreeMap::new();
    for (key, point) in points {
        lines.entry(key).or_default().push(point);
    }
    let series = lines.into_iter().map(|(key, mut line)| {
        line.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series {
            name: name(key),
            lines: vec![line],
            ..Series::default()
        }
    });
    series.collect()
}
