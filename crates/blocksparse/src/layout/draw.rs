//! Draws a layout: one panel per distinct head pattern, queries downwards, keys to the right.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::{BlockLayout, font};
use crate::LayoutError;

/// Longest sequence that is drawn position by position. Longer ones are drawn in cells of blocks.
const MAX_POSITIONS: usize = 512;
/// Maximum number of cells per side for longer sequences.
const MAX_CELLS: usize = 256;
/// Maximum number of panels. The caption names the rest.
const MAX_PANELS: usize = 8;
/// Side of a panel among several, and of a single one.
const PANEL: u32 = 420;
const SINGLE_PANEL: u32 = 560;
/// Height of the caption below the title.
const CAPTION: u32 = 40;
/// Maximum characters of a title on one line in large letters, and on each of two lines in small letters.
const LARGE: usize = 50;
const SMALL: usize = 68;

/// Implements `save_png` and `save_svg` for a type with `picture_size` and `draw`.
macro_rules! saves_pictures {
    ($layout:ty) => {
        impl $layout {
            /// Draws the layout into a PNG file.
            ///
            /// # Errors
            /// [`LayoutError::Draw`] if the file cannot be written.
            pub fn save_png(&self, path: impl AsRef<std::path::Path>) -> Result<(), LayoutError> {
                let path = path.as_ref();
                let area = BitMapBackend::new(path, self.picture_size()).into_drawing_area();
                self.draw(&area).map_err(|reason| draw_error(path, reason))
            }

            /// Draws the layout into an SVG file.
            ///
            /// # Errors
            /// [`LayoutError::Draw`] if the file cannot be written.
            pub fn save_svg(&self, path: impl AsRef<std::path::Path>) -> Result<(), LayoutError> {
                let path = path.as_ref();
                let area = SVGBackend::new(path, self.picture_size()).into_drawing_area();
                self.draw(&area).map_err(|reason| draw_error(path, reason))
            }
        }
    };
}
pub(crate) use saves_pictures;

saves_pictures!(BlockLayout);

impl BlockLayout {
    fn panels(&self) -> usize {
        self.num_patterns().min(MAX_PANELS)
    }

    fn grid(&self) -> (usize, usize) {
        let columns = self.panels().min(4);
        (self.panels().div_ceil(columns), columns)
    }

    fn picture_size(&self) -> (u32, u32) {
        let (rows, columns) = self.grid();
        let side = if columns == 1 { SINGLE_PANEL } else { PANEL };
        let height = rows as u32 * side + CAPTION + self.title().height();
        (columns as u32 * side, height)
    }

    fn title(&self) -> Title {
        Title::new(self.name())
    }

    fn draw<DB: DrawingBackend>(&self, area: &DrawingArea<DB, Shift>) -> Result<(), String> {
        font::register();
        area.fill(&WHITE).map_err(text)?;
        let title = self.title();
        let (caption, panels) = area.split_vertically(CAPTION + title.height());
        let style = |size: u32| ("sans-serif", size).into_font().color(&BLACK);
        for (line, words) in title.lines.iter().enumerate() {
            let place = (16, 10 + (line as u32 * title.line_height()) as i32);
            let words = Text::new(words.clone(), place, style(title.size));
            caption.draw(&words).map_err(text)?;
        }
        let facts = format!(
            "{}, {} × {} in blocks of {}: {:.2}% of the pairs",
            self.counted_heads(),
            self.seq_q(),
            self.seq_kv(),
            self.block_size(),
            100.0 * self.density(),
        );
        caption
            .draw(&Text::new(
                facts,
                (16, 14 + title.height() as i32),
                style(16),
            ))
            .map_err(text)?;
        let (rows, columns) = self.grid();
        let cells = panels.split_evenly((rows, columns));
        for (pattern, panel) in (0..self.panels()).zip(&cells) {
            self.draw_panel(pattern, panel)?;
        }
        area.present().map_err(text)
    }

    fn draw_panel<DB: DrawingBackend>(
        &self,
        pattern: usize,
        panel: &DrawingArea<DB, Shift>,
    ) -> Result<(), String> {
        let longest = self.seq_q().max(self.seq_kv());
        let cell = match longest <= MAX_POSITIONS {
            true => 1,
            false => self.block_size() * (longest.div_ceil(self.block_size())).div_ceil(MAX_CELLS),
        };
        let mut builder = ChartBuilder::on(panel);
        if self.num_patterns() > 1 {
            builder.caption(shorten(&self.users(pattern), 40), ("sans-serif", 15));
        }
        let sides = [
            ("query position", self.seq_q()),
            ("key position", self.seq_kv()),
        ];
        draw_cells(&mut builder, sides, cell, self.shades(pattern, cell))
    }
}

/// Draws shaded cells of `cell` items a side, with the label and length of the vertical and the horizontal axis.
pub(crate) fn draw_cells<DB: DrawingBackend>(
    builder: &mut ChartBuilder<DB>,
    [(down, height), (right, width)]: [(&str, usize); 2],
    cell: usize,
    shades: Vec<Vec<f64>>,
) -> Result<(), String> {
    let mut chart = builder
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(52)
        .build_cartesian_2d(0..width, height..0)
        .map_err(text)?;
    chart
        .configure_mesh()
        .disable_mesh()
        .x_labels(5)
        .y_labels(5)
        .x_desc(right)
        .y_desc(down)
        .draw()
        .map_err(text)?;
    for (row, shades) in shades.into_iter().enumerate() {
        let bottom = ((row + 1) * cell).min(height);
        let stretches = equal_stretches(&shades).into_iter();
        let rectangles = stretches.map(|(from, to, shade)| {
            let corners = [(from * cell, row * cell), ((to * cell).min(width), bottom)];
            Rectangle::new(corners, color(shade).filled())
        });
        chart.draw_series(rectangles).map_err(text)?;
    }
    Ok(())
}

/// Returns `(from, to, shade)` for each stretch of equal, non-empty cells.
fn equal_stretches(row: &[f64]) -> Vec<(usize, usize, f64)> {
    let mut stretches: Vec<(usize, usize, f64)> = Vec::new();
    for (index, &shade) in row.iter().enumerate().filter(|(_, shade)| **shade > 0.0) {
        match stretches.last_mut() {
            Some(last) if last.1 == index && last.2 == shade => last.1 += 1,
            _ => stretches.push((index, index + 1, shade)),
        }
    }
    stretches
}

/// Interpolates from pale to dark blue by the computed share of a cell's pairs.
fn color(shade: f64) -> RGBColor {
    let mix = |from: f64, to: f64| (from + (to - from) * shade) as u8;
    RGBColor(mix(205.0, 22.0), mix(222.0, 72.0), mix(244.0, 140.0))
}

/// A layout's name above its picture: in large letters if it is short, otherwise in small letters on up to two lines.
struct Title {
    lines: Vec<String>,
    size: u32,
}

impl Title {
    fn new(name: &str) -> Self {
        if name.chars().count() <= LARGE {
            return Self {
                lines: vec![name.to_owned()],
                size: 22,
            };
        }
        let end = name.char_indices().nth(SMALL).map_or(name.len(), |c| c.0);
        // Breaks after the last comma of the first line, if there is one.
        let end = match name[..end].rfind(", ") {
            _ if end == name.len() => end,
            Some(comma) => comma + 2,
            None => end,
        };
        let (first, rest) = name.split_at(end);
        let mut lines = vec![first.trim_end().to_owned()];
        if !rest.is_empty() {
            lines.push(shorten(rest, SMALL));
        }
        Self { lines, size: 15 }
    }

    fn line_height(&self) -> u32 {
        self.size + 4
    }

    fn height(&self) -> u32 {
        self.lines.len() as u32 * self.line_height()
    }
}

fn shorten(words: &str, length: usize) -> String {
    match words.chars().count() > length {
        true => words.chars().take(length - 1).chain(['…']).collect(),
        false => words.to_string(),
    }
}

pub(crate) fn text(error: impl ToString) -> String {
    error.to_string()
}

pub(crate) fn draw_error(path: &Path, reason: String) -> LayoutError {
    LayoutError::Draw {
        path: path.display().to_string(),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case("fixed(128, 32)", &["fixed(128, 32)"])]
    #[case(
        "union(chunked(8, before = 1, after = 1), global(0..8, 120..128), random_blocks(8, 16, 2, seed = 0))",
        &[
            "union(chunked(8, before = 1, after = 1), global(0..8, 120..128),",
            "random_blocks(8, 16, 2, seed = 0))",
        ]
    )]
    #[case(&"λ".repeat(60), &[&*"λ".repeat(60)])]
    #[case(&"λ".repeat(200), &[&*"λ".repeat(68), &*("λ".repeat(67) + "…")])]
    fn titles(#[case] name: &str, #[case] lines: &[&str]) {
        assert_eq!(Title::new(name).lines, lines);
    }
}
