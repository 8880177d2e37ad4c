//! The commands, as they are typed, on the tiny checkpoint whose logits `transformers` computed.

#[path = "../../enwik8/tests/cli/shell.rs"]
mod shell;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::json;
use tempfile::TempDir;

/// The letters of the vocabulary.
const LETTERS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuv";

fn data() -> PathBuf {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates");
    crates.join("burn-sparse-transformer/tests/data/tiny-llama")
}

/// The checkpoint with a tokenizer of letters.
fn checkpoint() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in fs::read_dir(data()).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let vocab: serde_json::Map<_, _> = (LETTERS.chars().enumerate())
        .map(|(id, letter)| (letter.to_string(), id.into()))
        .collect();
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": false},
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "A"},
    });
    let path = folder.path().join("tokenizer.json");
    fs::write(path, tokenizer.to_string()).unwrap();
    folder
}

fn numbers<T>(file: &str, read: fn([u8; 4]) -> T) -> Vec<T> {
    let bytes = fs::read(data().join(file)).unwrap();
    bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|&bytes| read(bytes))
        .collect()
}

fn llama(folder: &TempDir, command: &str, more: &[&str]) -> Output {
    let mut llama = Command::new(env!("CARGO_BIN_EXE_llama"));
    llama
        .arg(command)
        .arg(folder.path())
        .args(["--block-size", "8"]);
    llama.args(more).output().unwrap()
}

fn printed(folder: &TempDir, command: &str, more: &[&str]) -> String {
    let output = llama(folder, command, more);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8(output.stdout).unwrap()
}

fn refused(folder: &TempDir, command: &str, more: &[&str]) -> String {
    let output = llama(folder, command, more);
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

/// The letters of the golden tokens' first row, in a file of the folder.
fn text(folder: &TempDir) -> String {
    let letters: Vec<char> = LETTERS.chars().collect();
    let tokens = numbers("tokens.i32", i32::from_le_bytes);
    let text: String = tokens[..40]
        .iter()
        .map(|&id| letters[id as usize])
        .collect();
    let path = folder.path().join("text.txt");
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn bits_are_those_of_the_golden_logits() {
    let folder = checkpoint();
    let text = text(&folder);
    let more = [
        "--text",
        &text,
        "--window",
        "39",
        "--windows",
        "1",
        "--attention",
        "dense",
        "--attention",
        "local:8",
    ];
    let table = printed(&folder, "perplexity", &more);
    let logits = numbers("logits.f32", f32::from_le_bytes);
    let tokens = numbers("tokens.i32", i32::from_le_bytes);
    let bits: f64 = (0..39)
        .map(|row| {
            let row_of = &logits[row * 48..(row + 1) * 48];
            let all: f64 = row_of.iter().map(|&logit| f64::from(logit).exp()).sum();
            all.log2() - f64::from(row_of[tokens[row + 1] as usize]) / std::f64::consts::LN_2
        })
        .sum();
    let rows: Vec<Vec<&str>> = table
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows[1][..2], ["dense", "100.0%"], "{table}");
    let measured: f64 = rows[1][2].parse().unwrap();
    assert!(
        (measured - bits / 39.0).abs() < 1e-3,
        "{measured} for {}",
        bits / 39.0
    );
    // A letter is a byte; a window is another attention.
    assert_eq!(rows[1][2], rows[1][3]);
    assert_eq!(rows[2][0], "local:8");
    assert!(rows[2][2] != rows[1][2], "{table}");
}

#[test]
fn texts_are_written_from_prompts() {
    let folder = checkpoint();
    let more = ["--raw", "--prompt", "Hello", "--max-new", "12"];
    let written = printed(&folder, "generate", &more);
    assert!(written.starts_with("Hello"), "{written}");
    assert_eq!(printed(&folder, "generate", &more), written);
    let sampled = [
        &more[..],
        &["--temperature", "2", "--top-k", "9", "--seed", "3"],
    ]
    .concat();
    assert_ne!(printed(&folder, "generate", &sampled), written);
    printed(
        &folder,
        "generate",
        &[
            &more[..],
            &["--kv-dtype", "int8", "--attention", "quest:16,48"],
        ]
        .concat(),
    );
    // Prompts alone are read by what later tokens would change.
    let chosen = [&more[..], &["--attention", "topk:8,2"]].concat();
    assert!(printed(&folder, "generate", &chosen).starts_with("Hello"));
    let message = refused(&folder, "generate", &["--prompt", "Hello"]);
    assert!(message.contains("no chat template: say --raw"), "{message}");
}

#[test]
fn times_are_measured() {
    let folder = checkpoint();
    let more = [
        "--prompts",
        "16,32",
        "--steps",
        "2",
        "--repeats",
        "1",
        "--attention",
        "dense",
        "--attention",
        "topk:8,2",
    ];
    assert_eq!(printed(&folder, "bench", &more).lines().count(), 6);
    for shard in ["1", "2"] {
        fs::remove_file(
            folder
                .path()
                .join(format!("model-0000{shard}-of-00002.safetensors")),
        )
        .unwrap();
    }
    printed(&folder, "bench", &[&more[..], &["--random"]].concat());
    let message = refused(&folder, "bench", &more);
    assert!(
        message.contains("model-00001-of-00002.safetensors"),
        "{message}"
    );
}

#[test]
fn mistakes_are_explained() {
    let folder = checkpoint();
    let text = text(&folder);
    let message = refused(
        &folder,
        "perplexity",
        &["--text", &text, "--attention", "locl:8"],
    );
    assert!(
        message.contains("--attention") && message.contains("locl"),
        "{message}"
    );
    let message = refused(&folder, "perplexity", &["--text", &text]);
    assert!(message.contains("--text has 40 tokens"), "{message}");
    let message = refused(&folder, "generate", &["--raw", "--device", "tpu"]);
    assert!(message.contains("--device must be flex"), "{message}");
    fs::remove_file(folder.path().join("config.json")).unwrap();
    let message = refused(&folder, "generate", &["--raw"]);
    assert!(message.contains("config.json"), "{message}");
}

#[test]
fn commands_on_pages_have_flags_that_exist() {
    let commands = shell::check("llama", env!("CARGO_BIN_EXE_llama"));
    assert!(commands > 5, "{commands} commands");
}
