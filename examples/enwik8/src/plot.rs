//! `loss.png` and `loss-by-time.png`: bits per byte over steps and over time, from the log.

use std::fs;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use burn_blocksparse::internal::font;
use plotters::prelude::*;

use crate::data::thousands;
use crate::log::Row;
use crate::run::UNFINISHED_PLOT;

const SIZE: (u32, u32) = (1200, 720);
/// Most points of a curve: there are not more pixels.
const MAX_POINTS: usize = 2_000;

const TRAIN_RAW: RGBColor = RGBColor(190, 207, 228);
const TRAIN: RGBColor = RGBColor(49, 104, 176);
const VALIDATION: RGBColor = RGBColor(214, 96, 30);
/// Colour of reference lines.
pub const REFERENCE: RGBColor = RGBColor(90, 90, 90);
/// Colour of the grid.
pub const GRID: RGBColor = RGBColor(226, 226, 226);

type Curve = Vec<(f64, f64)>;

/// Horizontal axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    Steps,
    /// Time of the steps, in a suitable unit; validation and checkpoints are not counted.
    Time,
}

/// Labels of a plot.
pub struct Frame<'a> {
    /// Title above the plot.
    pub title: &'a str,
    /// Unit of the vertical axis, such as `bits per byte`.
    pub unit: &'a str,
    /// Order-0 entropy of the data as a reference, if the data are available.
    pub entropy: Option<f64>,
    /// Horizontal axis.
    pub axis: Axis,
}

/// Draws the curves of `rows` to `path`.
pub fn draw(path: &Path, frame: &Frame, rows: &[Row]) -> Result<()> {
    let curves = Curves::of(rows, frame.axis);
    if curves.raw.is_empty() {
        return Ok(());
    }
    written_whole(path, |unfinished| curves.draw(unfinished, frame))
}

/// Draws atomically, since files are rewritten during training: `path` has either the new image or the old one.
pub fn written_whole(
    path: &Path,
    draw: impl FnOnce(&Path) -> Result<(), Box<dyn std::error::Error>>,
) -> Result<()> {
    font::register();
    let unfinished = path.with_file_name(UNFINISHED_PLOT);
    draw(&unfinished)
        .map_err(|error| anyhow!("{error}"))
        .and_then(|()| Ok(fs::rename(&unfinished, path)?))
        .with_context(|| format!("cannot draw {}", path.display()))
}

struct Curves {
    raw: Curve,
    smooth: Curve,
    validation: Curve,
    last: Option<(f64, f64)>,
    /// Label of the horizontal axis.
    axis: String,
}

impl Curves {
    fn of(rows: &[Row], axis: Axis) -> Self {
        let (unit, name) = time_unit(rows);
        let mut time = 0.0;
        let mut raw = Curve::new();
        let mut validation = Curve::new();
        let mut last = None;
        for row in rows {
            if let Row::Train(of) = row {
                time += of.ms / 1_000.0;
            }
            let x = match axis {
                Axis::Steps => row.step() as f64,
                Axis::Time => time / unit,
            };
            match row {
                Row::Train(of) => raw.push((x, of.bits_per_byte)),
                Row::Validation(of) => validation.push((x, of.bits_per_byte)),
                Row::Final(of) => last = Some((x, of.bits_per_byte)),
                Row::Selection { .. } => {}
            }
        }
        let smooth = thin(&smoothed(&raw));
        Curves {
            raw: thin(&raw),
            smooth,
            validation,
            last,
            axis: match axis {
                Axis::Steps => "optimizer steps".to_owned(),
                Axis::Time => format!("{name} of training"),
            },
        }
    }

    fn draw(&self, path: &Path, frame: &Frame) -> Result<(), Box<dyn std::error::Error>> {
        let area = BitMapBackend::new(path, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let (xs, bits) = (self.xs(), self.bits(frame.entropy));
        let mut chart = ChartBuilder::on(&area)
            .caption(frame.title, ("sans-serif", 28))
            .margin(20)
            .x_label_area_size(60)
            .y_label_area_size(72)
            .build_cartesian_2d(xs.clone(), bits)?;
        let decimals = if xs.end < 20.0 { 1 } else { 0 };
        chart
            .configure_mesh()
            .x_desc(&self.axis)
            .y_desc(frame.unit)
            .x_label_formatter(&|&x| match frame.axis {
                Axis::Steps => thousands(x.round() as usize),
                Axis::Time => format!("{x:.decimals$}"),
            })
            .y_label_formatter(&|bits| format!("{bits:.1}"))
            .label_style(("sans-serif", 18))
            .axis_desc_style(("sans-serif", 22))
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .draw()?;

        chart.draw_series(LineSeries::new(self.raw.iter().copied(), TRAIN_RAW))?;
        chart
            .draw_series(LineSeries::new(
                self.smooth.iter().copied(),
                TRAIN.stroke_width(3),
            ))?
            .label("training (running mean)")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 24, y)], TRAIN.stroke_width(3)));
        if let Some(entropy) = frame.entropy {
            let style = REFERENCE.stroke_width(2);
            let line = [(xs.start, entropy), (xs.end, entropy)];
            chart
                .draw_series(DashedLineSeries::new(line, 8, 6, style))?
                .label(format!("order-0 entropy of the data: {entropy:.2}"))
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], style));
        }
        if !self.validation.is_empty() {
            chart
                .draw_series(
                    LineSeries::new(self.validation.iter().copied(), VALIDATION.stroke_width(3))
                        .point_size(4),
                )?
                .label("validation")
                .legend(|(x, y)| {
                    PathElement::new([(x, y), (x + 24, y)], VALIDATION.stroke_width(3))
                });
        }
        if let Some(last) = self.last {
            chart
                .draw_series([TriangleMarker::new(last, 10, VALIDATION.filled())])?
                .label(format!("whole validation split: {:.3}", last.1))
                .legend(|(x, y)| TriangleMarker::new((x + 12, y), 8, VALIDATION.filled()));
        }
        chart
            .configure_series_labels()
            .label_font(("sans-serif", 20))
            .background_style(WHITE.mix(0.9))
            .border_style(GRID)
            .margin(12)
            .legend_area_size(36)
            .position(SeriesLabelPosition::UpperRight)
            .draw()?;
        area.present()?;
        Ok(())
    }

    fn xs(&self) -> Range<f64> {
        let end = self.raw.last().map_or(1.0, |point| point.0);
        // A margin for the last marker and its label.
        0.0..end.max(1e-3) * 1.01
    }

    fn bits(&self, entropy: Option<f64>) -> Range<f64> {
        let curves = self.raw.iter().chain(&self.validation);
        let shown = || curves.clone().map(|point| point.1).chain(entropy);
        let low = shown().fold(f64::INFINITY, f64::min);
        let high = shown().fold(f64::NEG_INFINITY, f64::max);
        (low - 0.3).max(0.0)..(high + 0.3)
    }
}

/// Returns the seconds of the unit that a run's time is shown in, and its name.
fn time_unit(rows: &[Row]) -> (f64, &'static str) {
    let ms = rows.iter().map(|row| match row {
        Row::Train(of) => of.ms,
        _ => 0.0,
    });
    match ms.sum::<f64>() / 1_000.0 {
        ..120.0 => (1.0, "seconds"),
        ..7_200.0 => (60.0, "minutes"),
        _ => (3_600.0, "hours"),
    }
}

/// Returns the moving average over a fiftieth of the run, at least 5 points.
fn smoothed(curve: &[(f64, f64)]) -> Curve {
    let window = (curve.len() / 50).max(5);
    let mut sum = 0.0;
    (0..curve.len())
        .map(|index| {
            sum += curve[index].1;
            if index >= window {
                sum -= curve[index - window].1;
            }
            (curve[index].0, sum / window.min(index + 1) as f64)
        })
        .collect()
}

fn thin(curve: &[(f64, f64)]) -> Curve {
    let step = curve.len().div_ceil(MAX_POINTS).max(1);
    curve.iter().copied().step_by(step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::Validated;

    fn rows(count: usize) -> Vec<Row> {
        let mut rows = Vec::new();
        for step in 1..=count {
            let bits_per_byte =
                2.2 + 5.8 * (-(step as f64) / 200.0).exp() + 0.1 * (step as f64 * 1.7).sin();
            rows.push(Row::trained(step, bits_per_byte));
            if step % 100 == 0 {
                rows.push(Row::validated(step, bits_per_byte + 0.2));
            }
        }
        rows.push(Row::Final(Validated {
            step: count,
            bits_per_byte: 2.4,
            ..Validated::default()
        }));
        rows
    }

    #[test]
    fn time_is_that_of_the_steps_so_far() {
        let rows = rows(1_000);
        let curves = Curves::of(&rows, Axis::Time);
        // 500 s in minutes.
        assert_eq!(curves.axis, "minutes of training");
        assert_eq!(curves.raw[119].0, 1.0);
        assert!((curves.validation[0].0 - 100.0 / 120.0).abs() < 1e-9);
        assert_eq!(Curves::of(&rows, Axis::Steps).validation[0].0, 100.0);
    }

    #[test]
    fn nothing_to_draw_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loss.png");
        let frame = Frame {
            title: "enwik8 tiny",
            unit: "bits per byte",
            entropy: Some(5.0),
            axis: Axis::Steps,
        };
        draw(&path, &frame, &[]).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn the_running_mean_is_a_mean() {
        let curve: Curve = (0..20).map(|x| (f64::from(x), f64::from(x))).collect();
        let smooth = smoothed(&curve);
        assert_eq!(smooth[0].1, 0.0);
        assert_eq!(smooth[19].1, (15..20).map(f64::from).sum::<f64>() / 5.0);
    }
}
