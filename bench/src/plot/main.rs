//! Draws the pictures of the docs from measurements of programs. Each kind is a line chart, a bar chart or a map of heads.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Parser};

mod bars;
mod chart;
mod heads;
mod lines;
mod picture;

#[derive(Parser)]
#[command(about = "Draws the pictures of the docs")]
enum Plot {
    /// Speed of every workload over dense attention by cuDNN, e.g. of docs/data/results.json
    Results(Files),
    /// Time of random blocks against their density: what `bench-kernels --densities --json FILE` wrote
    Density(Files),
    /// Validation losses of programs, a line for each seed, e.g. of docs/data/losses.json
    Losses(Files),
    /// Cost of attention to fewer keys: the lines of `llama perplexity --json FILE`, the first of all keys
    Quality(Files),
    /// Recall, its ratio to the best choice, and density, by layer and head: what `enwik8 recall --json FILE` wrote
    Recall(Files),
    /// Training curves of several runs of `enwik8 train`, by steps and by seconds
    ///
    /// Solid lines with dots are validation, faint ones a running mean over the batches that were trained on. Seconds are those of the training steps
    /// alone: no validation, checkpoints or breaks, and of the second and later steps, as the first one compiles kernels.
    Runs(Runs),
}

#[derive(Args)]
struct Files {
    data: PathBuf,
    /// A PNG
    picture: PathBuf,
}

#[derive(Args)]
struct Runs {
    /// Above the picture
    #[arg(long, default_value = "")]
    title: String,
    /// The largest bits per byte that are shown [default: those of validation, and a little more]
    #[arg(long)]
    top: Option<f64>,
    /// Run folders, or their logs, each with the name that stands in the picture
    #[arg(required = true, value_name = "NAME=PATH", value_parser = named)]
    runs: Vec<(String, PathBuf)>,
    /// A PNG
    picture: PathBuf,
}

/// Splits at the last `=`, since names may contain some.
fn named(text: &str) -> Result<(String, PathBuf), String> {
    let (name, path) = text
        .rsplit_once('=')
        .ok_or_else(|| format!("expected NAME=PATH, got '{text}'"))?;
    Ok((name.to_owned(), path.into()))
}

fn main() -> Result<()> {
    Plot::parse().draw()
}

impl Plot {
    fn draw(self) -> Result<()> {
        match self {
            Plot::Results(Files { data, picture }) => bars::draw(&picture, &data),
            Plot::Density(Files { data, picture }) => lines::density(&data)?.draw(&picture),
            Plot::Losses(Files { data, picture }) => lines::losses(&data)?.draw(&picture),
            Plot::Quality(Files { data, picture }) => lines::quality(&data)?.draw(&picture),
            Plot::Recall(Files { data, picture }) => heads::draw(&picture, &data),
            Plot::Runs(of) => lines::runs(of.title, of.top, &of.runs)?.draw(&of.picture),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const DENSITIES: &str = r#"{"a":{"block":16,"density":0.5,"fwd_ms":1.1,"bwd_ms":3.4},
"b":{"block":16,"density":0.01,"fwd_ms":0.18,"bwd_ms":0.475}}"#;
    const LOG: &str = r#"{"kind":"train","step":1,"bits_per_byte":8.0,"ms":9000.0}
{"kind":"train","step":2,"bits_per_byte":7.0,"ms":500.0}
{"kind":"selection","step":2,"layers":[]}
{"kind":"validation","step":2,"loss":4.0,"bits_per_byte":6.5,"bytes":10}
{"kind":"final","step":2,"loss":4.0,"bits_per_byte":6.4,"bytes":100}
{"kind":"tra"#;
    const EVERY: &str = r#"{"selection":null,"bits_per_byte":2.0,"heads":[],"layers":[]}"#;
    const CHOSEN: &str = r#"{"selection":"topk:8,2","bits_per_byte":2.5,"heads":[[{"recall":0.5,"first_percentile":0.1,"ratio":0.9,"density":0.25},{"recall":1.0,"first_percentile":1.0,"ratio":1.0,"density":1.0}]],"layers":[]}"#;

    /// Checks that each kind gives a picture, or an error about the data.
    #[test]
    fn each_kind_becomes_a_picture_or_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let (data, picture) = (folder.path().join("log.jsonl"), folder.path().join("a.png"));
        let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/data");
        let of_docs = |name: &str| fs::read_to_string(format!("{docs}/{name}.json")).unwrap();
        let run = format!("a=b={}", folder.path().display());
        let file = data.to_str().unwrap();
        let rows = [
            ("results", file, of_docs("results"), None),
            ("density", file, DENSITIES.to_owned(), None),
            (
                "density",
                file,
                r#"{"a":{"block":16}}"#.to_owned(),
                Some("missing field `density`"),
            ),
            ("losses", file, of_docs("losses"), None),
            ("quality", file, of_docs("eviction"), None),
            ("quality", file, of_docs("llama-attention"), None),
            ("quality", file, String::new(), Some("no row")),
            ("recall", file, format!("{EVERY}\n{CHOSEN}\n"), None),
            ("recall", file, EVERY.to_owned(), Some("has no choice")),
            ("runs", &run, LOG.to_owned(), None),
            (
                "runs",
                &run,
                String::new(),
                Some("has no steps of training"),
            ),
            ("runs", file, LOG.to_owned(), Some("expected NAME=PATH")),
        ];
        for (kind, from, text, expected) in rows {
            let _ = fs::remove_file(&picture);
            fs::write(&data, text).unwrap();
            let plot = Plot::try_parse_from(["plot", kind, from, picture.to_str().unwrap()]);
            let drawn = plot.map_err(Into::into).and_then(Plot::draw);
            match (drawn, expected) {
                (Ok(()), None) => assert!(fs::read(&picture).unwrap().starts_with(b"\x89PNG")),
                (Err(error), Some(part)) => {
                    assert!(format!("{error:#}").contains(part), "{error:#}")
                }
                (drawn, _) => panic!("{kind}: {drawn:?}, expected {expected:?}"),
            }
        }
    }

    #[test]
    fn a_log_becomes_curves() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("log.jsonl"), LOG).unwrap();
        let runs = [named(&format!("a=b={}", folder.path().display())).unwrap()];
        let chart = lines::runs(String::new(), None, &runs).unwrap();
        let [steps, seconds] = [0, 1].map(|at| &chart.panels[at].series[0]);
        assert_eq!(steps.name, "a=b: 6.400 in the end");
        assert_eq!(steps.faint, [(1.0, 8.0), (2.0, 7.5)]);
        // The first step, which includes compilation, counts as zero time.
        assert_eq!(seconds.faint, [(0.0, 8.0), (0.5, 7.5)]);
        assert_eq!(seconds.lines, [[(0.5, 6.5)]]);
        assert_eq!(seconds.last, Some((0.5, 6.4)));
    }

    #[test]
    fn rows_of_a_method_are_a_line() {
        let row = |attention: &str, cache: &str, share: &str, bits: f64| {
            format!(
                r#"{{"attention":"{attention}","cache":{cache},"share":{share},"bits_per_byte":{bits}}}"#
            )
        };
        let text = [
            row("dense", "null", "1.0", 1.0),
            row("moba:32,7,first=1,local=2", "null", "0.1", 1.5),
            row("moba:32,17,first=1,local=2", "null", "0.25", 1.25),
            row("topk:32,ratio=0.25", "null", "0.25", 2.0),
            row("sparge:32,ratio=0.1,0.3", "null", "null", 2.0),
            row("dense", r#""snapkv:205,64,5, int8""#, "0.5", 1.75),
            row("dense", r#""window:9""#, "0.5", 0.75),
        ];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.json");
        fs::write(&path, text.join("\n")).unwrap();
        let chart = lines::quality(&path).unwrap();
        let series = chart.panels[0].series.iter();
        let expected = [
            ("moba first=1 local=2", vec![(0.1, 0.5), (0.25, 0.25)]),
            ("snapkv int8", vec![(0.5, 0.75)]),
            ("topk", vec![(0.25, 1.0)]),
        ];
        let found: Vec<_> = series
            .map(|of| (of.name.as_str(), of.lines[0].clone()))
            .collect();
        assert_eq!(found, expected);
    }
}
