//! Draws a weight layout: inputs downwards, outputs to the right.

use plotters::coord::Shift;
use plotters::prelude::*;

use super::WeightLayout;
use crate::LayoutError;
use crate::layout::draw::{draw_cells, draw_error, saves_pictures, text};
use crate::layout::font;

/// Maximum number of cells per side.
const MAX_CELLS: usize = 256;
/// Longer side of the panel, and the space for its title and its axes.
const PANEL: u32 = 560;
const TITLE: u32 = 48;
const AXES: u32 = 64;

saves_pictures!(WeightLayout);

impl WeightLayout {
    /// Returns a size wide enough for the title, with the height given by the weight's shape.
    fn picture_size(&self) -> (u32, u32) {
        let (rows, columns) = (self.in_blocks() as f64, self.out_blocks() as f64);
        let side = |blocks: f64| (f64::from(PANEL) * blocks / rows.max(columns)).ceil() as u32;
        let width = side(columns).max(PANEL * 3 / 4);
        (width + AXES, side(rows).max(PANEL / 8) + AXES + TITLE)
    }

    fn draw<DB: DrawingBackend>(&self, area: &DrawingArea<DB, Shift>) -> Result<(), String> {
        font::register();
        area.fill(&WHITE).map_err(text)?;
        let (title, panel) = area.split_vertically(TITLE);
        let style = ("sans-serif", 18).into_font().color(&BLACK);
        title
            .draw(&Text::new(self.to_string(), (16, 16), style))
            .map_err(text)?;
        let cell = self.in_blocks().max(self.out_blocks()).div_ceil(MAX_CELLS);
        let sides = [("input", self.inputs()), ("output", self.outputs())];
        let mut builder = ChartBuilder::on(&panel);
        draw_cells(&mut builder, sides, cell * self.block(), self.shades(cell))?;
        area.present().map_err(text)
    }
}
