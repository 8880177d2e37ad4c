//! Reading and drawing code that all kinds share.

use std::path::Path;

use anyhow::{Context, Result};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde::de::DeserializeOwned;

pub type Area<'a> = DrawingArea<BitMapBackend<'a>, Shift>;

pub fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    serde_json::from_str(&read_text(path)?).with_context(|| path.display().to_string())
}

/// Reads an object from each line.
pub fn read_lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let text = read_text(path)?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    (lines.map(serde_json::from_str).collect::<Result<_, _>>())
        .with_context(|| path.display().to_string())
}

/// Creates a white PNG.
pub fn picture(path: &Path, size: (u32, u32)) -> Result<Area<'_>> {
    blocksparse::font::register();
    let area = BitMapBackend::new(path, size).into_drawing_area();
    area.fill(&WHITE)?;
    Ok(area)
}

/// Writes text of a given size, vertically centered at a position.
pub fn write(
    area: &Area<'_>,
    text: &str,
    at: (i32, i32),
    size: i32,
    side: HPos,
    color: RGBColor,
) -> Result<()> {
    let style = ("sans-serif", size).into_text_style(area).color(&color);
    let style = style.pos(Pos::new(side, VPos::Center));
    area.draw(&Text::new(text, at, style))?;
    Ok(())
}
