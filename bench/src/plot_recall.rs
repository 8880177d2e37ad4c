//! Draws what choices of keys by content keep of a model's attention, of each layer and head, from the file of `enwik8 recall --json FILE`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use blocksparse_bench::chart::{self, Area};
use clap::Parser;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde::Deserialize;

#[derive(Parser)]
#[command(
    about = "Draws recall, its ratio to the best choice, and density, of each layer and head"
)]
struct Args {
    /// What `enwik8 recall --json FILE` wrote
    found: PathBuf,
    /// The picture, a PNG
    picture: PathBuf,
}

/// A line: a choice, or none for every earlier byte.
#[derive(Deserialize)]
struct Found {
    selection: Option<String>,
    bits_per_byte: f64,
    heads: Vec<Vec<Head>>,
}

#[derive(Clone, Copy, Deserialize)]
struct Head {
    recall: f64,
    ratio: f64,
    density: f64,
}

/// A number of a head, and its name.
type Column = (&'static str, fn(&Head) -> f64);

/// What is drawn of a head, a column each.
const COLUMNS: [Column; 3] = [
    ("recall", |head| head.recall),
    ("ratio to the best choice", |head| head.ratio),
    ("density", |head| head.density),
];

const CELL: (u32, u32) = (46, 24);
const MARGIN: u32 = 56;

fn main() -> Result<()> {
    let args = Args::parse();
    draw(&args.picture, &read(&args.found)?)
}

fn read(path: &Path) -> Result<Vec<Found>> {
    let text = chart::read_text(path)?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let found = lines.map(serde_json::from_str::<Found>);
    let found: Vec<Found> = (found.collect::<Result<_, _>>()).with_context(|| {
        format!(
            "{} is not what `enwik8 recall --json` writes",
            path.display()
        )
    })?;
    ensure!(
        found.iter().any(|of| of.selection.is_some()),
        "{} has no choice",
        path.display()
    );
    Ok(found)
}

fn draw(picture: &Path, found: &[Found]) -> Result<()> {
    let chosen: Vec<&Found> = found.iter().filter(|of| of.selection.is_some()).collect();
    let most = |of: &dyn Fn(&Found) -> usize| chosen.iter().map(|found| of(found)).max();
    let layers = most(&|found| found.heads.len()).unwrap_or(0) as u32;
    let heads = most(&|found| found.heads.iter().map(Vec::len).max().unwrap_or(0)).unwrap_or(0);
    let panel = (heads as u32 * CELL.0 + MARGIN, layers * CELL.1 + MARGIN);
    let size = (3 * panel.0 + 20, chosen.len() as u32 * (panel.1 + 30) + 10);
    let area = chart::picture(picture, size)?;
    for (row, found) in chosen.iter().enumerate() {
        let top = row as i32 * (panel.1 as i32 + 30) + 8;
        let title = format!(
            "{}: {:.4} bits per byte",
            found.selection.as_deref().unwrap_or_default(),
            found.bits_per_byte
        );
        area.draw(&Text::new(title, (16, top), ("sans-serif", 19)))?;
        for (column, (name, number)) in COLUMNS.iter().enumerate() {
            let at = (column as i32 * panel.0 as i32 + 10, top + 26);
            map(&area, at, name, &found.heads, number)?;
        }
    }
    area.present()?;
    Ok(())
}

/// Layers downwards, heads to the right.
fn map(
    area: &Area<'_>,
    (left, top): (i32, i32),
    name: &str,
    layers: &[Vec<Head>],
    number: &fn(&Head) -> f64,
) -> Result<()> {
    let small = ("sans-serif", 13).into_font();
    let (left, first) = (left + 36, top + 40);
    let (width, height) = (CELL.0 as i32, CELL.1 as i32);
    let centred = Pos::new(HPos::Center, VPos::Center);
    let label = |text: String, at: (i32, i32), color: RGBColor| {
        let style = TextStyle::from(small.clone()).pos(centred).color(&color);
        area.draw(&Text::new(text, at, style))
    };
    area.draw(&Text::new(
        format!("{name}, by layer and head"),
        (left, top),
        ("sans-serif", 15),
    ))?;
    for (layer, heads) in layers.iter().enumerate() {
        let y = first + layer as i32 * height;
        label(layer.to_string(), (left - 14, y + height / 2), BLACK)?;
        for (head, found) in heads.iter().enumerate() {
            let x = left + head as i32 * width;
            let value = number(found);
            let color = color(value);
            area.draw(&Rectangle::new(
                [(x, y), (x + width - 2, y + height - 2)],
                color.filled(),
            ))?;
            let ink = match brightness(color) > 140.0 {
                true => BLACK,
                false => WHITE,
            };
            label(
                format!("{value:.3}"),
                (x + width / 2 - 1, y + height / 2 - 1),
                ink,
            )?;
        }
    }
    let most = layers.iter().map(Vec::len).max().unwrap_or(0);
    for head in 0..most {
        let x = left + head as i32 * width + width / 2;
        label(head.to_string(), (x, first - 10), BLACK)?;
    }
    Ok(())
}

/// From dark blue, 0, over green to yellow, 1.
fn color(value: f64) -> RGBColor {
    ViridisRGB.get_color(if value.is_nan() { 0.0 } else { value })
}

fn brightness(RGBColor(r, g, b): RGBColor) -> f64 {
    0.299 * f64::from(r) + 0.587 * f64::from(g) + 0.114 * f64::from(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUND: &str = r#"{"selection":null,"bits_per_byte":2.0,"heads":[],"layers":[]}
{"selection":"topk:8,2","bits_per_byte":2.5,"heads":[[{"recall":0.5,"first_percentile":0.1,"ratio":0.9,"density":0.25},{"recall":1.0,"first_percentile":1.0,"ratio":1.0,"density":1.0}]],"layers":[]}
"#;

    #[test]
    fn what_is_found_becomes_a_picture() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("found.jsonl");
        std::fs::write(&path, FOUND).unwrap();
        let found = read(&path).unwrap();
        assert_eq!(found[1].heads[0].len(), 2);
        let picture = folder.path().join("recall.png");
        draw(&picture, &found).unwrap();
        assert!(std::fs::read(&picture).unwrap().starts_with(b"\x89PNG"));
        std::fs::write(&path, FOUND.lines().next().unwrap()).unwrap();
        let error = read(&path).err().unwrap().to_string();
        assert!(error.ends_with("has no choice"), "{error}");
    }

    #[test]
    fn colors_run_from_dark_to_light() {
        let light: Vec<f64> = (0..=10)
            .map(|n| brightness(color(f64::from(n) / 10.0)))
            .collect();
        assert!(light.windows(2).all(|pair| pair[0] < pair[1]), "{light:?}");
    }
}
