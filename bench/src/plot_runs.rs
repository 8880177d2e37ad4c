//! Draws the training curves of several runs of `enwik8 train`, from the `log.jsonl` of their folders: bits per byte over steps, and over seconds of training.

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use blocksparse_bench::chart::{self, Area};
use clap::Parser;
use plotters::prelude::*;
use serde::Deserialize;

#[derive(Parser)]
#[command(
    about = "Draws the training curves of several runs, by steps and by seconds",
    after_help = "Example:
  plot-runs --title 'small, 2,048 bytes' curves.png dense=runs/dense moba:64,4=runs/moba

Solid lines with dots are validation, faint ones a running mean over the batches that were trained on. Seconds are those of the training steps alone: \
no validation, checkpoints or breaks, and of the second and later steps, as the first one compiles kernels."
)]
struct Args {
    /// Above the picture
    #[arg(long, default_value = "")]
    title: String,
    /// The largest bits per byte that are shown [default: those of validation, and a little more]
    #[arg(long)]
    top: Option<f64>,
    /// The picture, a PNG
    picture: PathBuf,
    /// Run folders, or their logs, each with the name that stands in the picture: NAME=PATH
    #[arg(required = true, value_parser = named)]
    runs: Vec<(String, PathBuf)>,
}

/// The last `=` is the one, as names may have some.
fn named(text: &str) -> Result<(String, PathBuf), String> {
    let (name, path) = text
        .rsplit_once('=')
        .ok_or_else(|| format!("expected NAME=PATH, got '{text}'"))?;
    Ok((name.to_owned(), path.into()))
}

/// What is read of a line of the log.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Row {
    Train {
        step: usize,
        bits_per_byte: f64,
        ms: f64,
    },
    Validation(Measured),
    Final(Measured),
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct Measured {
    step: usize,
    bits_per_byte: f64,
}

/// A point: a step, the seconds of training up to it, and bits per byte.
type Point = (f64, f64, f64);

struct Curves {
    name: String,
    training: Vec<Point>,
    validation: Vec<Point>,
    last: Option<Point>,
}

const COLORS: [RGBColor; 8] = [
    RGBColor(60, 60, 60),
    RGBColor(31, 119, 180),
    RGBColor(214, 96, 30),
    RGBColor(44, 160, 44),
    RGBColor(148, 103, 189),
    RGBColor(200, 40, 60),
    RGBColor(23, 170, 180),
    RGBColor(190, 150, 20),
];

const SIZE: (u32, u32) = (1400, 620);

/// More points than pixels show nothing more.
const MOST_POINTS: usize = 1000;

impl Measured {
    fn point(&self, seconds: f64) -> Point {
        (self.step as f64, seconds, self.bits_per_byte)
    }
}

impl Curves {
    fn read(name: &str, path: &Path) -> Result<Self> {
        let path = match path.is_dir() {
            true => path.join("log.jsonl"),
            false => path.to_owned(),
        };
        let text = chart::read_text(&path)?;
        // A line that a killed process left half written is none.
        let rows = text
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        let curves = Self::of(name, rows);
        ensure!(
            !curves.training.is_empty(),
            "{} has no steps of training",
            path.display()
        );
        Ok(curves)
    }

    fn of(name: &str, rows: impl Iterator<Item = Row>) -> Self {
        let mut curves = Self {
            name: name.to_owned(),
            training: Vec::new(),
            validation: Vec::new(),
            last: None,
        };
        let mut seconds = 0.0;
        for row in rows {
            match row {
                Row::Train {
                    step,
                    bits_per_byte,
                    ms,
                } => {
                    if !curves.training.is_empty() {
                        seconds += ms / 1000.0;
                    }
                    (curves.training).push((step as f64, seconds, bits_per_byte));
                }
                Row::Validation(of) => curves.validation.push(of.point(seconds)),
                Row::Final(of) => curves.last = Some(of.point(seconds)),
                Row::Other => {}
            }
        }
        curves.training = smoothed(&curves.training);
        curves
    }

    fn points(&self) -> impl Iterator<Item = &Point> {
        self.training.iter().chain(&self.validation)
    }
}

/// Means over a fiftieth of the steps, at least 5, thinned.
fn smoothed(curve: &[Point]) -> Vec<Point> {
    let window = (curve.len() / 50).max(5);
    let mut sum = 0.0;
    let mut means = Vec::with_capacity(curve.len());
    for (index, &(step, seconds, bits)) in curve.iter().enumerate() {
        sum += bits;
        if index >= window {
            sum -= curve[index - window].2;
        }
        means.push((step, seconds, sum / window.min(index + 1) as f64));
    }
    let every = means.len().div_ceil(MOST_POINTS).max(1);
    means.into_iter().step_by(every).collect()
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(
        args.runs.len() <= COLORS.len(),
        "runs must be at most {}, got {}",
        COLORS.len(),
        args.runs.len()
    );
    let runs = args.runs.iter();
    let runs = runs.map(|(name, path)| Curves::read(name, path));
    let runs = runs.collect::<Result<Vec<_>>>()?;
    draw(&args.picture, &args.title, &runs, args.top)
}

fn draw(picture: &Path, title: &str, runs: &[Curves], top: Option<f64>) -> Result<()> {
    let area = chart::picture(picture, SIZE)?;
    let area = match title {
        "" => area.clone(),
        title => area.titled(title, ("sans-serif", 24))?,
    };
    let bits = bits(runs, top);
    let [left, right] =
        <[_; 2]>::try_from(area.split_evenly((1, 2))).map_err(|_| anyhow::anyhow!("two areas"))?;
    panel(&left, "optimizer steps", runs, |of| of.0, bits.clone())?;
    panel(&right, "seconds of training", runs, |of| of.1, bits)?;
    area.present()?;
    Ok(())
}

/// What is shown: down to the best, and up to where validation began.
fn bits(runs: &[Curves], top: Option<f64>) -> Range<f64> {
    let (low, highest) = chart::bounds(runs.iter().flat_map(Curves::points).map(|of| of.2));
    let validation = runs.iter().flat_map(|run| &run.validation);
    let (_, high) = chart::bounds(validation.map(|of| of.2));
    let high = top.unwrap_or(if high > low { high } else { highest });
    let margin = 0.05 * (high - low).max(0.1);
    low - margin..high + margin
}

fn panel(
    area: &Area<'_>,
    unit: &str,
    runs: &[Curves],
    x: impl Fn(&Point) -> f64,
    bits: Range<f64>,
) -> Result<()> {
    let ends = runs.iter().flat_map(Curves::points).map(&x);
    let end = ends.fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .margin(16)
        .x_label_area_size(52)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..end * 1.01, bits)?;
    chart
        .configure_mesh()
        .x_desc(unit)
        .y_desc("bits per byte")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|bits| format!("{bits:.2}"))
        .label_style(("sans-serif", 16))
        .axis_desc_style(("sans-serif", 19))
        .bold_line_style(RGBColor(226, 226, 226))
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (run, color) in runs.iter().zip(COLORS) {
        let at = |points: &[Point]| -> Vec<(f64, f64)> {
            points.iter().map(|point| (x(point), point.2)).collect()
        };
        chart.draw_series(LineSeries::new(at(&run.training), color.mix(0.35)))?;
        let name = match run.last {
            None => run.name.clone(),
            Some(last) => format!("{}: {:.3} in the end", run.name, last.2),
        };
        let validation = at(&run.validation);
        chart::line(&mut chart, validation, color.to_rgba(), Some((&name, 20)))?;
        if let Some(last) = run.last {
            chart.draw_series([TriangleMarker::new((x(&last), last.2), 8, color.filled())])?;
        }
    }
    chart
        .configure_series_labels()
        .label_font(("sans-serif", 17))
        .background_style(WHITE.mix(0.9))
        .border_style(RGBColor(226, 226, 226))
        .margin(10)
        .legend_area_size(30)
        .position(SeriesLabelPosition::UpperRight)
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = r#"{"kind":"train","step":1,"loss":5.5,"bits_per_byte":8.0,"learning_rate":0.001,"grad_norm":1.0,"tokens_per_s":1.0,"ms":9000.0}
{"kind":"train","step":2,"loss":5.5,"bits_per_byte":7.0,"learning_rate":0.001,"grad_norm":1.0,"tokens_per_s":1.0,"ms":500.0}
{"kind":"selection","step":2,"layers":[]}
{"kind":"validation","step":2,"loss":4.0,"bits_per_byte":6.5,"bytes":10}
{"kind":"final","step":2,"loss":4.0,"bits_per_byte":6.4,"bytes":100}
{"kind":"tra"#;

    #[test]
    fn a_log_becomes_curves_and_a_picture() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("log.jsonl"), LOG).unwrap();
        let (name, path) = named(&format!("a=b={}", folder.path().display())).unwrap();
        assert_eq!(name, "a=b");
        let curves = Curves::read(&name, &path).unwrap();
        // The first step, with what it compiles, takes no time.
        assert_eq!(curves.training, [(1.0, 0.0, 8.0), (2.0, 0.5, 7.5)]);
        assert_eq!(curves.validation, [(2.0, 0.5, 6.5)]);
        assert_eq!(curves.last, Some((2.0, 0.5, 6.4)));
        let picture = folder.path().join("curves.png");
        draw(&picture, "two steps", &[curves], None).unwrap();
        assert!(std::fs::read(&picture).unwrap().starts_with(b"\x89PNG"));
        assert!(named("nothing").unwrap_err().contains("NAME=PATH"));
    }
}
