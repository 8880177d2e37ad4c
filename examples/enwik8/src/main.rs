//! Trains a byte-level language model with block-sparse attention on enwik8.
//!
//! Read [`train`] first; it is the whole of training, top-down.

mod arguments;
mod bench;
mod checkpoint;
mod config;
mod data;
mod device;
mod devices;
mod draw;
mod eval;
mod exit;
mod export;
mod files;
mod flags;
mod images;
mod import;
mod indexers;
mod kept;
mod limits;
mod log;
mod memory;
mod model;
mod notation;
mod overrides;
mod pattern;
mod plot;
mod plot_recall;
mod presets;
mod progress;
mod prune;
mod recall;
mod report;
mod run;
mod sample;
mod schedule;
mod search;
mod shards;
mod step;
mod table;
mod tensorboard;
mod train;
mod windows;

use std::io;
use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// A byte-level language model with block-sparse attention (Sparse Transformer, Child et al., 2019)
#[derive(Parser, Debug)]
#[command(
    version,
    after_help = "Start here:
  enwik8 train         train the preset `tiny` on an embedded sample of Wikipedia: minutes on a CPU
  enwik8 sample        generate text from it
  enwik8 eval          bits per byte on held-out text
  enwik8 report        the run on one page
  enwik8 bench         sparse against dense attention on this machine
  enwik8 presets       models and recipes, with time and memory
  enwik8 patterns      texts for --pattern, --attention, --selection and --cache
  enwik8 draw --pattern fixed:128,32 --out pattern.png
  enwik8 shards --pattern fixed:1024,32 --devices 2   keys that devices exchange
  enwik8 export --out exported   a record for a program of your own
  enwik8 import --weights model.pt --run runs/imported   weights of another program

From the repository: cargo run -p enwik8 -- train"
)]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand, Debug)]
enum Task {
    Train(train::TrainArgs),
    Eval(eval::EvalArgs),
    Recall(recall::RecallArgs),
    SearchSelection(search::SearchArgs),
    Report(report::ReportArgs),
    Sample(sample::SampleArgs),
    SampleImages(images::sample::SampleImagesArgs),
    Bench(bench::BenchArgs),
    Draw(draw::DrawArgs),
    Shards(shards::ShardsArgs),
    Patterns(notation::PatternsArgs),
    Presets(presets::list::PresetsArgs),
    Export(export::ExportArgs),
    Import(import::ImportArgs),
}

fn main() -> ExitCode {
    let mut cli = arguments::finished(Cli::command());
    let matches = cli.get_matches_mut();
    // Invalid arguments end the program with exit code 2.
    let arguments = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    match dispatch(&arguments.command) {
        Ok(code) => code,
        // The reader of the output has closed it (`| head`), which is not an error.
        Err(error) if is_broken_pipe(&error) => exit::at_once(0),
        Err(error) => {
            let command = matches.subcommand_name();
            let command = command.and_then(|name| cli.find_subcommand(name));
            eprintln!("error: {}", flags::text(&error, command));
            exit::at_once(1)
        }
    }
}

fn dispatch(task: &Task) -> Result<ExitCode> {
    let done = |()| ExitCode::SUCCESS;
    let listed = |text: String| {
        progress::say(text);
        Ok(ExitCode::SUCCESS)
    };
    match task {
        Task::Train(args) => train::run(args),
        Task::Eval(args) => eval::run(args).map(done),
        Task::Recall(args) => recall::run(args).map(done),
        Task::SearchSelection(args) => search::run(args).map(done),
        Task::Report(args) => report::run(args).map(done),
        Task::Sample(args) => sample::run(args).map(done),
        Task::SampleImages(args) => images::sample::run(args).map(done),
        Task::Bench(args) => bench::run(args).map(done),
        Task::Draw(args) => draw::run(args).map(done),
        Task::Shards(args) => shards::run(args).map(done),
        Task::Patterns(_) => listed(notation::list()),
        Task::Presets(_) => listed(presets::list::list()),
        Task::Export(args) => export::run(args).map(done),
        Task::Import(args) => import::run(args).map(done),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}
