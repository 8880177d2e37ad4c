//! Processes of the program, and folders for them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// A model that trains hundreds of steps a second.
pub fn nano() -> Vec<&'static str> {
    words(
        "--layers 1 --heads 2 --d-model 16 --context 32 --block 8 --pattern fixed:8,2 --batch 2 \
         --warmup 5 --eval-windows 2 --dropout 0.1",
    )
}

/// The words of a command line.
pub fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

pub fn enwik8() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_enwik8"));
    command.stdin(Stdio::null()).env("RUST_BACKTRACE", "1");
    command
}

pub fn run(arguments: &[&str]) -> Output {
    enwik8().args(arguments).output().unwrap()
}

/// Runs a command that must succeed; its standard output.
pub fn succeed(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a command that must fail with `code`; its one message.
pub fn fail(arguments: &[&str], code: i32) -> String {
    let output = run(arguments);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
    assert_eq!(message.matches("error: ").count(), 1, "{message}");
    assert!(
        !message.contains("panicked") && !message.contains("backtrace"),
        "{message}"
    );
    message
}

/// That a text has some words.
#[track_caller]
pub fn says(text: &str, words: &str) {
    assert!(text.contains(words), "{text}");
}

pub struct Folder(TempDir);

impl Folder {
    pub fn new() -> Self {
        Folder(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    pub fn file(&self, name: &str, bytes: &[u8]) -> String {
        fs::write(self.path(name), bytes).unwrap();
        self.path(name)
    }

    /// A few thousand bytes with some structure.
    pub fn data(&self) -> String {
        let bytes: Vec<u8> = (0..4_000u32)
            .map(|i| (i * i / 7 % 61 + i % 5) as u8 + 32)
            .collect();
        self.file("data", &bytes)
    }

    /// Arguments of a nano run in folder `run`.
    pub fn nano(&self, run: &str, more: &[&str]) -> Vec<String> {
        let mut arguments = vec!["train".to_owned(), "--run".to_owned(), self.path(run)];
        arguments.extend(["--data".to_owned(), self.data()]);
        arguments.extend(
            nano()
                .iter()
                .chain(more)
                .map(|&argument| argument.to_owned()),
        );
        arguments
    }

    pub fn train(&self, run: &str, more: &[&str]) -> String {
        let arguments = self.nano(run, more);
        succeed(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    pub fn resume(&self, run: &str, more: &[&str]) -> String {
        let path = self.path(run);
        succeed(&[&["train", "--resume", "--run", &path], more].concat())
    }

    pub fn log(&self, run: &str) -> Vec<Value> {
        let log = fs::read_to_string(Path::new(&self.path(run)).join("log.jsonl")).unwrap();
        log.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    /// Kind, step and loss, if it has one, of each log line.
    pub fn losses(&self, run: &str) -> Vec<(String, u64, f64)> {
        let row = |row: &Value| {
            let kind = row["kind"].as_str().unwrap().to_owned();
            (
                kind,
                row["step"].as_u64().unwrap(),
                row["loss"].as_f64().unwrap_or_default(),
            )
        };
        self.log(run).iter().map(row).collect()
    }

    pub fn checkpoint(&self, run: &str, step: usize) -> PathBuf {
        Path::new(&self.path(run)).join(format!("step-{step:08}.ckpt"))
    }

    /// That two runs have the same model after so many steps.
    #[track_caller]
    pub fn assert_same_model(&self, runs: [&str; 2], step: usize) {
        let [a, b] = runs.map(|run| self.checkpoint(run, step));
        assert_same_model(&a, &b);
    }
}

/// The model's and the optimizer's bytes in a checkpoint: after the preamble and the header, as long as the second
/// and the third length say.
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

/// Without printing either model.
pub fn assert_same_model(a: &Path, b: &Path) {
    assert!(
        model_of(a) == model_of(b),
        "{} and {} hold different models",
        a.display(),
        b.display()
    );
}

pub fn wait_for(path: &Path, child: &mut Child) {
    let began = Instant::now();
    while !path.exists() {
        assert!(
            child.try_wait().unwrap().is_none(),
            "training ended too early"
        );
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{} never came",
            path.display()
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}
