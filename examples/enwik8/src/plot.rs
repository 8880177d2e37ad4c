//! `loss.png`: bits per byte over steps, drawn from the log.

use std::fs;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use burn_blocksparse::font;
use plotters::prelude::*;

use crate::data::thousands;
use crate::log::Row;
use crate::run::UNFINISHED_PLOT;

const SIZE: (u32, u32) = (1200, 720);
/// More points than pixels show nothing more.
const MAX_POINTS: usize = 2_000;

const TRAIN_RAW: RGBColor = RGBColor(190, 207, 228);
const TRAIN: RGBColor = RGBColor(49, 104, 176);
const VALIDATION: RGBColor = RGBColor(214, 96, 30);
const REFERENCE: RGBColor = RGBColor(90, 90, 90);
const GRID: RGBColor = RGBColor(226, 226, 226);

type Curve = Vec<(f64, f64)>;

/// Draws the curves of `rows` to `path`, with the data's order-0 entropy for comparison.
///
/// # Errors
/// If the picture cannot be written.
pub fn draw(path: &Path, title: &str, rows: &[Row], entropy: f64) -> Result<()> {
    let curves = Curves::of(rows);
    if curves.raw.is_empty() {
        return Ok(());
    }
    font::register();
    // A whole picture or the old one: this file is rewritten during training.
    let unfinished = path.with_file_name(UNFINISHED_PLOT);
    curves
        .draw(&unfinished, title, entropy)
        .map_err(|error| anyhow!("{error}"))
        .and_then(|()| Ok(fs::rename(&unfinished, path)?))
        .with_context(|| format!("cannot draw {}", path.display()))
}

struct Curves {
    raw: Curve,
    smooth: Curve,
    validation: Curve,
    last: Option<(f64, f64)>,
}

impl Curves {
    fn of(rows: &[Row]) -> Self {
        let mut raw = Curve::new();
        let mut validation = Curve::new();
        let mut last = None;
        for row in rows {
            match *row {
                Row::Train {
                    step,
                    bits_per_byte,
                    ..
                } => raw.push((step as f64, bits_per_byte)),
                Row::Validation {
                    step,
                    bits_per_byte,
                    ..
                } => validation.push((step as f64, bits_per_byte)),
                Row::Final {
                    step,
                    bits_per_byte,
                    ..
                } => last = Some((step as f64, bits_per_byte)),
                Row::Selection { .. } => {}
            }
        }
        let smooth = thin(&smoothed(&raw));
        Curves {
            raw: thin(&raw),
            smooth,
            validation,
            last,
        }
    }

    fn draw(
        &self,
        path: &Path,
        title: &str,
        entropy: f64,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let area = BitMapBackend::new(path, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let (steps, bits) = (self.steps(), self.bits(entropy));
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 28))
            .margin(20)
            .x_label_area_size(60)
            .y_label_area_size(72)
            .build_cartesian_2d(steps.clone(), bits)?;
        chart
            .configure_mesh()
            .x_desc("optimizer steps")
            .y_desc("bits per byte")
            .x_label_formatter(&|step| thousands(step.round() as usize))
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
        chart
            .draw_series(DashedLineSeries::new(
                [(steps.start, entropy), (steps.end, entropy)],
                8,
                6,
                REFERENCE.stroke_width(2),
            ))?
            .label(format!("order-0 entropy of the data: {entropy:.2}"))
            .legend(|(x, y)| PathElement::new([(x, y), (x + 24, y)], REFERENCE.stroke_width(2)));
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

    fn steps(&self) -> Range<f64> {
        let end = self.raw.last().map_or(1.0, |point| point.0);
        // A little more, for the last marker and its label.
        0.0..end.max(1.0) * 1.01
    }

    fn bits(&self, entropy: f64) -> Range<f64> {
        let shown = || self.raw.iter().chain(&self.validation).map(|point| point.1);
        let low = shown().fold(entropy, f64::min);
        let high = shown().fold(entropy, f64::max);
        (low - 0.3).max(0.0)..(high + 0.3)
    }
}

/// Mean over a window that grows with the run: a fiftieth of it, at least 5 points.
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

    fn rows(count: usize) -> Vec<Row> {
        let mut rows = Vec::new();
        for step in 1..=count {
            let bits_per_byte =
                2.2 + 5.8 * (-(step as f64) / 200.0).exp() + 0.1 * (step as f64 * 1.7).sin();
            let loss = bits_per_byte * std::f64::consts::LN_2;
            rows.push(Row::Train {
                step,
                loss,
                bits_per_byte,
                learning_rate: 1e-3,
                grad_norm: 1.0,
                tokens_per_s: 1.0,
                ms: 1.0,
            });
            if step % 100 == 0 {
                rows.push(Row::Validation {
                    step,
                    loss,
                    bits_per_byte: bits_per_byte + 0.2,
                    bytes: 1,
                });
            }
        }
        rows.push(Row::Final {
            step: count,
            loss: 1.7,
            bits_per_byte: 2.4,
            bytes: 1,
        });
        rows
    }

    #[test]
    fn draws_a_png_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loss.png");
        draw(&path, "enwik8 tiny", &rows(1_000), 5.06).unwrap();
        assert!(fs::read(&path).unwrap().starts_with(b"\x89PNG"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn nothing_to_draw_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loss.png");
        draw(&path, "empty", &[], 5.0).unwrap();
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
