//! Draws how much of a model's attention selections by content keep: a map of layers and heads for each metric.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;
use serde::Deserialize;

use crate::picture::{Area, picture, read_lines, write};

/// A line of the file: a selection, or none for every earlier byte.
#[derive(Deserialize)]
struct Found {
    selection: Option<String>,
    bits_per_byte: f64,
    heads: Vec<Vec<Head>>,
}

#[derive(Deserialize)]
struct Head {
    recall: f64,
    ratio: f64,
    density: f64,
}

/// A metric of a head and its name.
type Column = (&'static str, fn(&Head) -> f64);

const COLUMNS: [Column; 3] = [
    ("recall", |head| head.recall),
    ("ratio to the best choice", |head| head.ratio),
    ("density", |head| head.density),
];

/// Size of a cell, which is a head.
const WIDTH: i32 = 46;
const HEIGHT: i32 = 24;
const MARGIN: i32 = 56;

pub fn draw(path: &Path, data: &Path) -> Result<()> {
    let mut found: Vec<Found> =
        read_lines(data).context("not what `enwik8 recall --json` writes")?;
    found.retain(|of| of.selection.is_some());
    ensure!(!found.is_empty(), "{} has no choice", data.display());
    let layers = found.iter().map(|of| of.heads.len()).max();
    let heads = (found.iter().flat_map(|of| &of.heads)).map(Vec::len).max();
    let (layers, heads) = (layers.unwrap_or(0) as i32, heads.unwrap_or(0) as i32);
    let panel = (heads * WIDTH + MARGIN, layers * HEIGHT + MARGIN + 30);
    let size = (3 * panel.0 + 20, found.len() as i32 * panel.1 + 10);
    let area = picture(path, (size.0 as u32, size.1 as u32))?;
    for (of, row) in found.iter().zip(0..) {
        let top = row * panel.1;
        let selection = of.selection.as_deref().unwrap_or_default();
        let title = format!("{selection}: {:.4} bits per byte", of.bits_per_byte);
        write(&area, &title, (16, top + 18), 19, HPos::Left, BLACK)?;
        for ((name, number), column) in COLUMNS.into_iter().zip(0..) {
            let at = (column * panel.0 + 46, top + 42);
            map(&area, at, name, &of.heads, number)?;
        }
    }
    area.present()?;
    Ok(())
}

/// Draws layers downwards and heads to the right.
fn map(
    area: &Area<'_>,
    (left, top): (i32, i32),
    name: &str,
    layers: &[Vec<Head>],
    number: fn(&Head) -> f64,
) -> Result<()> {
    let centred = |text: String, at, ink| write(area, &text, at, 13, HPos::Center, ink);
    let name = format!("{name}, by layer and head");
    write(area, &name, (left, top), 15, HPos::Left, BLACK)?;
    for (layer, row) in layers.iter().zip(0..) {
        let y = top + 32 + row * HEIGHT;
        centred(row.to_string(), (left - 14, y + HEIGHT / 2), BLACK)?;
        for (head, column) in layer.iter().zip(0..) {
            let x = left + column * WIDTH;
            let value = number(head);
            let color = color(value);
            let cell = [(x, y), (x + WIDTH - 2, y + HEIGHT - 2)];
            area.draw(&Rectangle::new(cell, color.filled()))?;
            let ink = if brightness(color) > 140.0 {
                BLACK
            } else {
                WHITE
            };
            let middle = (x + WIDTH / 2 - 1, y + HEIGHT / 2 - 1);
            centred(format!("{value:.3}"), middle, ink)?;
        }
    }
    let heads = layers.iter().map(Vec::len).max().unwrap_or(0);
    for head in 0..heads as i32 {
        let x = left + head * WIDTH + WIDTH / 2;
        centred(head.to_string(), (x, top + 22), BLACK)?;
    }
    Ok(())
}

/// Maps 0 to dark blue, then over green to yellow at 1.
fn color(value: f64) -> RGBColor {
    ViridisRGB.get_color(if value.is_nan() { 0.0 } else { value })
}

fn brightness(RGBColor(r, g, b): RGBColor) -> f64 {
    0.299 * f64::from(r) + 0.587 * f64::from(g) + 0.114 * f64::from(b)
}
