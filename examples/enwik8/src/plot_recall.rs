//! `recall.png`: recall of selections in each layer over steps, from the log.

use std::path::Path;

use anyhow::Result;
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::data::thousands;
use crate::log::Row;
use crate::plot::{GRID, REFERENCE, written_whole};
use crate::recall::LayerRecall;

/// Size of the image, which stacks one panel per quantity.
const SIZE: (u32, u32) = (1200, 1240);

/// Quantity of a layer.
type Of = fn(&LayerRecall) -> f64;

/// Panels, from top to bottom.
const PANELS: [(&str, Of); 3] = [
    ("recall: share of the attention on selected keys", |of| {
        of.recall
    }),
    ("ratio: recall over that of the best choice", |of| of.ratio),
    ("density: selected share of the visible blocks", |of| {
        of.density
    }),
];

/// Most layers in the legend; of more, only some are named.
const NAMED: usize = 8;

/// Draws the measurements of `rows` to `path`; does nothing if there are none.
pub fn draw(path: &Path, title: &str, rows: &[Row]) -> Result<()> {
    match curves(rows, |layer| layer.recall).is_empty() {
        true => Ok(()),
        false => written_whole(path, |unfinished| panels(unfinished, title, rows)),
    }
}

/// Layer, and its values by step.
type LayerCurve = (usize, Vec<(f64, f64)>);

/// Returns the curve of each measured layer.
fn curves(rows: &[Row], of: Of) -> Vec<LayerCurve> {
    let mut curves: Vec<LayerCurve> = Vec::new();
    for row in rows {
        let Row::Selection { step, layers } = row else {
            continue;
        };
        for layer in layers {
            let point = (*step as f64, of(layer));
            match curves.iter_mut().find(|(known, _)| *known == layer.layer) {
                Some((_, curve)) => curve.push(point),
                None => curves.push((layer.layer, vec![point])),
            }
        }
    }
    curves
}

fn panels(path: &Path, title: &str, rows: &[Row]) -> Result<(), Box<dyn std::error::Error>> {
    let area = BitMapBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let below = area.margin(14, 0, 0, 0).titled(title, ("sans-serif", 28))?;
    for (at, (panel, (name, of))) in below.split_evenly((3, 1)).iter().zip(PANELS).enumerate() {
        draw_panel(panel, name, &curves(rows, of), at == 0)?;
    }
    area.present()?;
    Ok(())
}

/// Returns a colour between the first layer's and the last one's.
fn color(layer: usize, layers: usize) -> RGBColor {
    let ends = [RGBColor(49, 104, 176), RGBColor(214, 96, 30)];
    DerivedColorMap::new(&ends).get_color(layer as f64 / (layers.max(2) - 1) as f64)
}

fn draw_panel(
    area: &DrawingArea<BitMapBackend, Shift>,
    name: &str,
    curves: &[LayerCurve],
    has_legend: bool,
) -> Result<(), Box<dyn std::error::Error>> {
    let steps = curves
        .iter()
        .flat_map(|(_, curve)| curve)
        .map(|point| point.0);
    let end = steps.fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(48)
        .y_label_area_size(72)
        // Shares from 0 to 1, with a margin so that lines at the ends are visible.
        .build_cartesian_2d(0.0..end * 1.02, 0.0..1.03f64)?;
    chart
        .configure_mesh()
        .x_desc("optimizer steps")
        .y_desc(name)
        .x_label_formatter(&|&step| thousands(step.round() as usize))
        .y_label_formatter(&|share| format!("{share:.1}"))
        .label_style(("sans-serif", 16))
        .axis_desc_style(("sans-serif", 18))
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .draw()?;
    chart.draw_series(LineSeries::new([(0.0, 1.0), (end, 1.0)], REFERENCE))?;
    let layers = 1 + curves.iter().map(|(layer, _)| *layer).max().unwrap_or(0);
    let every = layers.div_ceil(NAMED);
    for (layer, curve) in curves {
        let style = color(*layer, layers).stroke_width(2);
        let line = LineSeries::new(curve.iter().copied(), style).point_size(3);
        let drawn = chart.draw_series(line)?;
        if has_legend && (layer % every == 0 || layer + 1 == layers) {
            drawn
                .label(format!("layer {layer}"))
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], style));
        }
    }
    if has_legend {
        chart
            .configure_series_labels()
            .label_font(("sans-serif", 16))
            .background_style(WHITE.mix(0.9))
            .border_style(GRID)
            .legend_area_size(36)
            .position(SeriesLabelPosition::LowerRight)
            .draw()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(layers: usize) -> Vec<Row> {
        let measured = |step: usize| Row::Selection {
            step,
            layers: (0..layers)
                .map(|layer| LayerRecall {
                    layer: layer + 1,
                    recall: 0.5 + 0.4 * layer as f64 / layers as f64,
                    ratio: 0.9,
                    density: 1.0 / step as f64,
                })
                .collect(),
        };
        let other = Row::validated(15, 1.5);
        vec![measured(10), other, measured(20), measured(30)]
    }

    #[test]
    fn each_layer_has_a_curve_of_its_own() {
        let found = curves(&rows(2), |layer| layer.recall);
        let curve = |recall| vec![(10.0, recall), (20.0, recall), (30.0, recall)];
        assert_eq!(found, [(1, curve(0.5)), (2, curve(0.7))]);
        let densities = curves(&rows(1), |layer| layer.density);
        assert_eq!(
            densities,
            [(1, vec![(10.0, 0.1), (20.0, 0.05), (30.0, 1.0 / 30.0)])]
        );
    }

    #[test]
    fn a_picture_is_whole_and_nothing_else_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("recall.png");
        for layers in [1, 30] {
            draw(&path, "enwik8 tiny", &rows(layers)).unwrap();
            assert!(std::fs::read(&path).unwrap().starts_with(b"\x89PNG"));
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
