//! Line charts with a legend in an empty area.

use std::ops::Range;
use std::path::Path;

use anyhow::{Result, ensure};
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;
use serde::Deserialize;

use crate::picture::{Area, picture, write};

pub type Points = Vec<(f64, f64)>;

/// Data with its own colour and name.
#[derive(Default, Deserialize)]
#[serde(default)]
pub struct Series {
    pub name: String,
    /// Lines with dots.
    pub lines: Vec<Points>,
    /// A line behind the others, which does not count for the upper limit of the axis.
    pub faint: Points,
    /// A point marked with a triangle.
    pub last: Option<(f64, f64)>,
}

/// A pair of axes and the data between them.
pub struct Panel {
    x: &'static str,
    y: &'static str,
    pub series: Vec<Series>,
}

#[derive(Default)]
pub struct Chart {
    pub title: String,
    /// True if both axes are logarithmic and the horizontal axis shows shares.
    pub is_logarithmic: bool,
    /// Upper limit of the vertical axis instead of the maximum of lines with dots.
    pub top: Option<f64>,
    /// Panels from left to right, with series of the same names.
    pub panels: Vec<Panel>,
}

const PANEL: (u32, u32) = (660, 460);
const TITLE: u32 = 34;
const ROW: i32 = 22;

const COLORS: [u32; 12] = [
    0x3c3c3c, 0x1f77b4, 0xe66e14, 0x2ca02c, 0x9467bd, 0xc8283c, 0x17b4be, 0xc8a014, 0xe377c2,
    0x8c564b, 0x96c83c, 0x143282,
];

fn colors() -> impl Iterator<Item = RGBColor> {
    let byte = |color: u32, at: u32| (color >> (8 * at)) as u8;
    COLORS
        .iter()
        .map(move |&of| RGBColor(byte(of, 2), byte(of, 1), byte(of, 0)))
}

impl Chart {
    pub fn draw(&self, path: &Path) -> Result<()> {
        let series = &self.panels[0].series;
        ensure!(
            (1..=COLORS.len()).contains(&series.len()),
            "lines must be of 1 to {} names, got {}",
            COLORS.len(),
            series.len()
        );
        let panels = self.panels.len();
        let width = PANEL.0 * panels as u32;
        let title = if self.title.is_empty() { 0 } else { TITLE };
        blocksparse::font::register();
        let mut legend = 0;
        for of in series {
            legend = legend.max(("sans-serif", 15).into_font().box_size(&of.name)?.0);
        }
        let area = picture(path, (width + legend + 60, PANEL.1 + title))?;
        write(&area, &self.title, (16, 20), 19, HPos::Left, BLACK)?;
        let (charts, names) = area.margin(title, 0, 0, 0).split_horizontally(width);
        for (area, panel) in charts.split_evenly((1, panels)).iter().zip(&self.panels) {
            let (x, y) = self.ranges(panel);
            match self.is_logarithmic {
                true => panel.draw(area, x.log_scale(), y.log_scale(), [share, short])?,
                false => {
                    let labels = [|x: &f64| format!("{x:.0}"), |y: &f64| format!("{y:.2}")];
                    panel.draw(area, x, y, labels)?
                }
            }
        }
        for ((of, color), row) in series.iter().zip(colors()).zip(1..) {
            let y = row * ROW;
            let stroke = color.stroke_width(3);
            names.draw(&PathElement::new([(8, y), (30, y)], stroke))?;
            write(&names, &of.name, (38, y), 15, HPos::Left, BLACK)?;
        }
        area.present()?;
        Ok(())
    }

    /// Returns the axis ranges: down to the minimum of all data, and up to the maximum of lines with dots.
    fn ranges(&self, panel: &Panel) -> (Range<f64>, Range<f64>) {
        let lines = || panel.series.iter().flat_map(|of| of.lines.iter().flatten());
        let all = || lines().chain(panel.series.iter().flat_map(|of| &of.faint));
        let (first, end) = bounds(all().map(|point| point.0));
        let (least, most) = bounds(all().map(|point| point.1));
        let (_, high) = bounds(lines().map(|point| point.1));
        let high = self.top.unwrap_or(if high > least { high } else { most });
        if self.is_logarithmic {
            return (0.9 * first..1.1 * end, 0.7 * least..1.5 * high);
        }
        let margin = 0.05 * (high - least).max(0.1);
        (0.0..end.max(1.0) * 1.01, least - margin..high + margin)
    }
}

impl Panel {
    pub fn new(x: &'static str, y: &'static str, series: Vec<Series>) -> Self {
        Panel { x, y, series }
    }

    fn draw<X, Y>(&self, area: &Area<'_>, x: X, y: Y, labels: [fn(&f64) -> String; 2]) -> Result<()>
    where
        X: AsRangedCoord<Value = f64>,
        Y: AsRangedCoord<Value = f64>,
        X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
        Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(x, y)?;
        chart
            .configure_mesh()
            .x_desc(self.x)
            .y_desc(self.y)
            .x_label_formatter(&labels[0])
            .y_label_formatter(&labels[1])
            .label_style(("sans-serif", 15))
            .axis_desc_style(("sans-serif", 17))
            .bold_line_style(RGBColor(226, 226, 226))
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (of, color) in self.series.iter().zip(colors()) {
            let faint = LineSeries::new(of.faint.iter().copied(), color.mix(0.35));
            chart.draw_series(faint)?;
            for line in &of.lines {
                let line = LineSeries::new(line.iter().copied(), color.stroke_width(2));
                chart.draw_series(line.point_size(3))?;
            }
            let last = of.last.map(|at| TriangleMarker::new(at, 8, color.filled()));
            chart.draw_series(last)?;
        }
        Ok(())
    }
}

/// Returns the minimum and the maximum.
fn bounds(numbers: impl Iterator<Item = f64>) -> (f64, f64) {
    numbers.fold((f64::MAX, f64::MIN), |(least, most), number| {
        (least.min(number), most.max(number))
    })
}

/// Returns the labels of 1, 2, 5, 10, 20, 50 and so on, and none for the lines between, which would not fit.
fn few(x: f64, label: String) -> String {
    let digit = x / 10f64.powf(x.log10().floor());
    let is_one = |of: f64| (of - digit).abs() < 0.01;
    match [1.0, 2.0, 5.0, 10.0].into_iter().any(is_one) {
        true => label,
        false => String::new(),
    }
}

fn share(x: &f64) -> String {
    few(*x, format!("{:.0}%", x * 100.0))
}

fn short(y: &f64) -> String {
    few(*y, ((y * 1e4).round() / 1e4).to_string())
}
