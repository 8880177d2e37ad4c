//! Draws the main table of `docs/benchmarks.md`: the speedup of each workload over dense attention by cuDNN, forward and backward, here and with FlexAttention.

use std::path::Path;

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;
use serde::Deserialize;

use crate::picture::{Area, picture, read_json, write};

#[derive(Deserialize)]
struct Results {
    title: String,
    workloads: Vec<Workload>,
}

#[derive(Deserialize)]
struct Workload {
    name: String,
    forward: Times,
    backward: Times,
}

/// Milliseconds. FlexAttention does not compile every pattern.
#[derive(Deserialize)]
struct Times {
    ours: f64,
    cudnn: f64,
    flex: Option<f64>,
}

const WIDTH: i32 = 1200;
const TOP: i32 = 76;
const ROW: i32 = 54;
const BAR: i32 = 19;
/// Space for the workloads' names, left of the first panel.
const NAMES: i32 = 290;
const PANEL: i32 = (WIDTH - NAMES) / 2;
/// Length of the longest bar, with space for its label.
const LONGEST: i32 = PANEL - 150;

const OURS: RGBColor = RGBColor(31, 119, 180);
const FLEX: RGBColor = RGBColor(255, 127, 14);

pub fn draw(path: &Path, data: &Path) -> Result<()> {
    let Results { title, workloads } = read_json(data)?;
    let height = TOP + ROW * workloads.len() as i32 + 12;
    let area = picture(path, (WIDTH as u32, height as u32))?;
    let black = |text: &str, at, size, side| write(&area, text, at, size, side, BLACK);
    black(&title, (16, 20), 19, HPos::Left)?;
    for (x, color, label) in [(16, OURS, "this library"), (136, FLEX, "FlexAttention")] {
        area.draw(&Rectangle::new([(x, 46), (x + 14, 60)], color.filled()))?;
        black(label, (x + 20, 53), 15, HPos::Left)?;
    }
    for (workload, row) in workloads.iter().zip(0..) {
        let middle = TOP + ROW * row + ROW / 2;
        black(&workload.name, (NAMES - 14, middle), 16, HPos::Right)?;
    }
    let forward: Vec<&Times> = workloads.iter().map(|row| &row.forward).collect();
    let backward: Vec<&Times> = workloads.iter().map(|row| &row.backward).collect();
    panel(&area, "forward", NAMES, &forward)?;
    panel(&area, "backward", NAMES + PANEL, &backward)?;
    area.present()?;
    Ok(())
}

fn panel(area: &Area<'_>, title: &str, left: i32, rows: &[&Times]) -> Result<()> {
    let black = |text: &str, at, size| write(area, text, at, size, HPos::Left, BLACK);
    let speeds = |row: &Times| [Some(row.ours), row.flex].map(|time| time.map(|ms| row.cudnn / ms));
    let fastest = rows.iter().flat_map(|row| speeds(row)).flatten();
    let fastest = fastest.fold(1.0, f64::max);
    let place = |speed: f64| left + (speed / fastest * f64::from(LONGEST)).round() as i32;
    black(title, (left, 53), 18)?;
    black("(line: dense cuDNN = 1)", (left + 96, 54), 14)?;
    for (row, index) in rows.iter().zip(0..) {
        let top = TOP + ROW * index + (ROW - 2 * BAR) / 2;
        for (y, time, color) in [(top, Some(row.ours), OURS), (top + BAR, row.flex, FLEX)] {
            let (end, label) = match time {
                Some(time) => {
                    let speed = row.cudnn / time;
                    let bar = [(left, y + 1), (place(speed), y + BAR - 1)];
                    area.draw(&Rectangle::new(bar, color.filled()))?;
                    (place(speed.max(1.0)), format!("{speed:.1}×   {time} ms"))
                }
                None => (place(1.0), "does not compile".into()),
            };
            black(&label, (end + 6, y + BAR / 2), 14)?;
        }
    }
    let bottom = TOP + ROW * rows.len() as i32;
    for (x, width) in [(left, 1), (place(1.0), 2)] {
        let stroke = BLACK.mix(0.6).stroke_width(width);
        area.draw(&PathElement::new([(x, TOP), (x, bottom)], stroke))?;
    }
    Ok(())
}
