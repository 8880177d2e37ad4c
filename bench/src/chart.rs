//! Pictures: what all plots read and draw.

use std::path::Path;

use anyhow::{Context, Result};
use plotters::coord::Shift;
use plotters::coord::ranged1d::Ranged;
use plotters::prelude::*;
use serde::de::DeserializeOwned;

pub type Area<'a> = DrawingArea<BitMapBackend<'a>, Shift>;
pub type Chart<'a, 'b, X, Y> = ChartContext<'a, BitMapBackend<'b>, Cartesian2d<X, Y>>;

pub fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    serde_json::from_str(&read_text(path)?).with_context(|| path.display().to_string())
}

/// A white picture, a PNG.
pub fn picture(path: &Path, size: (u32, u32)) -> Result<Area<'_>> {
    blocksparse::font::register();
    let area = BitMapBackend::new(path, size).into_drawing_area();
    area.fill(&WHITE)?;
    Ok(area)
}

/// The least and the most.
pub fn bounds(numbers: impl Iterator<Item = f64>) -> (f64, f64) {
    numbers.fold((f64::MAX, f64::MIN), |(least, most), number| {
        (least.min(number), most.max(number))
    })
}

/// A line with dots, and its name if it has one, with so much of the line before it.
pub fn line<'a, X, Y>(
    chart: &mut Chart<'a, '_, X, Y>,
    points: impl IntoIterator<Item = (X::ValueType, Y::ValueType)>,
    color: RGBAColor,
    name: Option<(&str, i32)>,
) -> Result<()>
where
    X: Ranged<ValueType: Clone + 'static>,
    Y: Ranged<ValueType: Clone + 'static>,
{
    let line = LineSeries::new(points, color.stroke_width(2)).point_size(3);
    let series = chart.draw_series(line)?;
    if let Some((name, length)) = name {
        series.label(name).legend(move |(x, y)| {
            PathElement::new([(x, y), (x + length, y)], color.stroke_width(2))
        });
    }
    Ok(())
}
