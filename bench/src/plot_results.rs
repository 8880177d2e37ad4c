//! Draws the main table of `docs/benchmarks.md` from its data file: how many times as fast as dense attention by cuDNN each
//! workload runs, forward and backward, here and with FlexAttention.

use std::path::PathBuf;

use anyhow::Result;
use blocksparse_bench::chart::{self, Area};
use clap::Parser;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde::Deserialize;

#[derive(Parser)]
#[command(about = "Draws the speed of every workload over dense attention by cuDNN")]
struct Args {
    /// The times, for example docs/data/results.json.
    results: PathBuf,
    /// The picture, a PNG.
    picture: PathBuf,
}

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

/// Milliseconds; FlexAttention does not compile every pattern.
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
/// Room for the workloads' names, left of the first panel.
const NAMES: i32 = 290;
const PANEL: i32 = (WIDTH - NAMES) / 2;
/// The longest bar, so that its label still fits behind it.
const LONGEST: i32 = PANEL - 150;

const OURS: RGBColor = RGBColor(31, 119, 180);
const FLEX: RGBColor = RGBColor(255, 127, 14);

type Choice = fn(&Workload) -> &Times;

fn main() -> Result<()> {
    let args = Args::parse();
    let results: Results = chart::read_json(&args.results)?;
    let height = TOP + ROW * results.workloads.len() as i32 + 12;
    let area = chart::picture(&args.picture, (WIDTH as u32, height as u32))?;
    write(&area, &results.title, (16, 20), 19, HPos::Left)?;
    legend(&area)?;
    for (index, workload) in results.workloads.iter().enumerate() {
        let middle = TOP + ROW * index as i32 + ROW / 2;
        write(&area, &workload.name, (NAMES - 14, middle), 16, HPos::Right)?;
    }
    let panels: [(&str, Choice); 2] = [
        ("forward", |row| &row.forward),
        ("backward", |row| &row.backward),
    ];
    for (index, (title, times)) in panels.into_iter().enumerate() {
        panel(&area, title, NAMES + PANEL * index as i32, &results, times)?;
    }
    area.present()?;
    Ok(())
}

fn legend(area: &Area<'_>) -> Result<()> {
    for (x, color, label) in [(16, OURS, "this library"), (136, FLEX, "FlexAttention")] {
        area.draw(&Rectangle::new([(x, 46), (x + 14, 60)], color.filled()))?;
        write(area, label, (x + 20, 53), 15, HPos::Left)?;
    }
    Ok(())
}

fn panel(area: &Area<'_>, title: &str, left: i32, results: &Results, times: Choice) -> Result<()> {
    let fastest = results.workloads.iter().map(times).fold(1.0, |most, row| {
        let least = row.flex.map_or(row.ours, |flex| flex.min(row.ours));
        f64::max(most, row.cudnn / least)
    });
    let place = |speed: f64| left + (speed / fastest * f64::from(LONGEST)).round() as i32;
    write(area, title, (left, 53), 18, HPos::Left)?;
    write(
        area,
        "(line: dense cuDNN = 1)",
        (left + 96, 54),
        14,
        HPos::Left,
    )?;
    for (index, workload) in results.workloads.iter().enumerate() {
        let row = times(workload);
        let top = TOP + ROW * index as i32 + (ROW - 2 * BAR) / 2;
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
            write(area, &label, (end + 6, y + BAR / 2), 14, HPos::Left)?;
        }
    }
    let bottom = TOP + ROW * results.workloads.len() as i32;
    for (x, width) in [(left, 1), (place(1.0), 2)] {
        area.draw(&PathElement::new(
            [(x, TOP), (x, bottom)],
            BLACK.mix(0.6).stroke_width(width),
        ))?;
    }
    Ok(())
}

fn write(area: &Area<'_>, text: &str, at: (i32, i32), size: i32, side: HPos) -> Result<()> {
    let style = ("sans-serif", size)
        .into_text_style(area)
        .color(&BLACK)
        .pos(Pos::new(side, VPos::Center));
    area.draw(&Text::new(text.to_owned(), at, style))?;
    Ok(())
}
