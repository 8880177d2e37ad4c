//! Processes of the program, and folders for them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::shell::words;

/// A model that trains hundreds of steps a second.
const NANO: &str = "--layers 1 --heads 2 --d-model 16 --context 32 --block 8 --pattern fixed:8,2 --batch 2 --warmup 5 --eval-windows 2 --dropout 0.1";

/// Returns the nano flags and `more`, which override flags of the same name; with a selection there is no pattern.
pub fn nano(more: &str) -> String {
    let chooses = more.contains("--selection") || more.contains("--attention dense");
    let is_own = |flag: &&str| {
        let name = flag.split(' ').next();
        let mut others = more.split(' ').map(|word| word.strip_prefix("--"));
        !(others.any(|other| other == name) || chooses && name == Some("pattern"))
    };
    let own = NANO.split("--").skip(1).filter(is_own);
    own.map(|flag| format!("--{} ", flag.trim()))
        .collect::<String>()
        + more
}

/// Splits lines into parts separated by ` | `.
pub fn rows(text: &str) -> impl Iterator<Item = Vec<&str>> {
    let lines = text.trim().lines();
    lines.map(|line| line.split(" | ").map(str::trim).collect())
}

pub fn enwik8() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_enwik8"));
    command.stdin(Stdio::null()).env("RUST_BACKTRACE", "1");
    command
}

/// Runs a command line.
pub fn run(line: impl AsRef<str>) -> Output {
    enwik8().args(words(line.as_ref())).output().unwrap()
}

/// Runs a command that must succeed, and returns its standard output.
pub fn succeed(line: impl AsRef<str>) -> String {
    succeed_and_tell(line)[0].clone()
}

/// Runs a command that must succeed, and returns its standard output and error.
pub fn succeed_and_tell(line: impl AsRef<str>) -> [String; 2] {
    let line = line.as_ref();
    let output = run(line);
    assert!(output.status.success(), "{line}: {output:?}");
    [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap())
}

/// Runs a command that must fail with `code`, and returns its one message.
pub fn fail(line: impl AsRef<str>, code: i32) -> String {
    let line = line.as_ref();
    let output = run(line);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{line}: {message}");
    assert_eq!(message.matches("error: ").count(), 1, "{message}");
    let is_right = !message.contains("panicked") && !message.contains("backtrace");
    assert!(is_right, "{message}");
    message
}

/// Checks that a text contains some words.
#[track_caller]
pub fn says(text: impl AsRef<str>, words: &str) {
    let text = text.as_ref();
    assert!(text.contains(words), "no '{words}': {text}");
}

#[track_caller]
pub fn says_all(text: impl AsRef<str>, parts: &[&str]) {
    parts.iter().for_each(|part| says(&text, part));
}

/// Returns the number that `eval` prints.
pub fn bits(text: &str) -> f64 {
    let mut lines = text.lines().filter(|line| line.contains("bits per "));
    let number = lines.find_map(|line| line.split(' ').next()?.parse().ok());
    number.unwrap_or_else(|| panic!("{text}"))
}

pub fn json(path: impl AsRef<Path>) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

pub fn json_lines(text: &str) -> Vec<Value> {
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    lines.collect()
}

pub fn assert_png(path: &str) {
    assert!(fs::read(path).unwrap().starts_with(b"\x89PNG"), "{path}");
}

pub struct Folder(TempDir);

impl Folder {
    pub fn new() -> Self {
        Folder(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    pub fn exists(&self, name: &str) -> bool {
        self.0.path().join(name).exists()
    }

    pub fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        fs::write(self.path(name), bytes).unwrap();
        self.path(name)
    }

    pub fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    /// Writes a few thousand bytes with some structure.
    pub fn data(&self) -> String {
        let bytes: Vec<u8> = (0..4_000u32)
            .map(|i| (i * i / 7 % 61 + i % 5) as u8 + 32)
            .collect();
        self.file("data", bytes)
    }

    /// Returns the command of a nano run in folder `run`.
    pub fn nano(&self, run: &str, more: &str) -> String {
        let (path, data) = (self.path(run), self.data());
        format!("train --run {path} --data {data} {}", nano(more))
    }

    pub fn train(&self, run: &str, more: &str) -> String {
        succeed(self.nano(run, more))
    }

    pub fn resume(&self, run: &str, more: &str) -> String {
        succeed(format!("train --resume --run {} {more}", self.path(run)))
    }

    /// Checks that a run in `parts`, resumed without its last checkpoint, equals the run `whole` in one go; returns the output of the latter.
    #[track_caller]
    pub fn assert_resumes(&self, train: impl Fn(&str) -> String, step: usize) -> String {
        let text = train("whole");
        train("parts");
        fs::remove_file(self.checkpoint("parts", step)).unwrap();
        self.resume("parts", "");
        self.assert_same_model(["parts", "whole"], step);
        assert_eq!(self.losses("parts"), self.losses("whole"));
        text
    }

    pub fn log(&self, run: &str) -> Vec<Value> {
        json_lines(&self.text(&format!("{run}/log.jsonl")))
    }

    /// Returns the log lines of a kind.
    pub fn log_of(&self, run: &str, kind: &str) -> Vec<Value> {
        let rows = self.log(run).into_iter();
        rows.filter(|row| row["kind"] == kind).collect()
    }

    /// Returns kind, step and loss, if any, of each log line.
    pub fn losses(&self, run: &str) -> Vec<(String, u64, f64)> {
        let row = |row: &Value| {
            let (kind, step) = (row["kind"].as_str(), row["step"].as_u64());
            let loss = row["loss"].as_f64().unwrap_or_default();
            (kind.unwrap().to_owned(), step.unwrap(), loss)
        };
        self.log(run).iter().map(row).collect()
    }

    pub fn checkpoint(&self, run: &str, step: usize) -> PathBuf {
        Path::new(&self.path(run)).join(format!("step-{step:08}.ckpt"))
    }

    /// Checks that two runs have the same model after `step` steps.
    #[track_caller]
    pub fn assert_same_model(&self, runs: [&str; 2], step: usize) {
        let [a, b] = runs.map(|run| self.checkpoint(run, step));
        assert_same_model(&a, &b);
    }

    /// Checks that two runs have the same model and optimizer after `step` steps.
    #[track_caller]
    pub fn assert_same_state(&self, runs: [&str; 2], step: usize) {
        let [a, b] = runs.map(|run| state_of(&self.checkpoint(run, step)));
        assert!(a == b, "{runs:?}: another model or optimizer");
    }
}

/// Returns the model's and the optimizer's bytes in a checkpoint: they follow the preamble and the header, and the second and third length are their
/// sizes.
pub fn state_of(checkpoint: &Path) -> [Vec<u8>; 2] {
    let bytes = fs::read(checkpoint).unwrap();
    let length = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let (_, rest) = bytes.split_at(36 + length(12));
    let (model, optimizer) = rest.split_at(length(20));
    assert_eq!(optimizer.len(), length(28));
    [model.to_vec(), optimizer.to_vec()]
}

pub fn model_of(checkpoint: &Path) -> Vec<u8> {
    let [model, _] = state_of(checkpoint);
    model
}

/// Compares without printing either model.
#[track_caller]
pub fn assert_same_model(a: &Path, b: &Path) {
    assert!(
        model_of(a) == model_of(b),
        "{} and {} hold different models",
        a.display(),
        b.display()
    );
}

/// Returns all files below a folder.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap();
    let below = entries.map(|entry| entry.unwrap().path());
    below
        .flat_map(|path| match path.is_dir() {
            true => files(&path),
            false => vec![path],
        })
        .collect()
}

/// Starts a command, and discards its output.
pub fn spawn(line: &str) -> Child {
    let mut command = enwik8();
    command.args(words(line)).stdout(Stdio::null());
    command.spawn().unwrap()
}

pub fn wait_for(path: &Path, child: &mut Child) {
    let began = Instant::now();
    while !path.exists() {
        let ended = child.try_wait().unwrap();
        assert!(ended.is_none(), "training ended too early");
        let is_late = began.elapsed() > Duration::from_secs(60);
        assert!(!is_late, "{} never came", path.display());
        std::thread::sleep(Duration::from_millis(2));
    }
}
