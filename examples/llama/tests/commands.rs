//! The commands, as they are typed, on the tiny checkpoint whose logits `transformers` computed.

#[path = "../../enwik8/tests/cli/shell.rs"]
mod shell;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
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

/// Of each token behind the first one.
fn golden_bits() -> Vec<f64> {
    let logits = numbers("logits.f32", f32::from_le_bytes);
    let tokens = numbers("tokens.i32", i32::from_le_bytes);
    let of = |row: usize| {
        let row_of = &logits[row * 48..(row + 1) * 48];
        let all: f64 = row_of.iter().map(|&logit| f64::from(logit).exp()).sum();
        all.log2() - f64::from(row_of[tokens[row + 1] as usize]) / std::f64::consts::LN_2
    };
    (0..39).map(of).collect()
}

/// The rows that a command also writes as JSON.
fn rows(folder: &TempDir, command: &str, more: &str) -> Vec<Value> {
    let path = folder.path().join("rows.json");
    let path = path.display().to_string();
    let mut more: Vec<&str> = more.split_whitespace().collect();
    let text = text(folder);
    more.extend(["--text", &text, "--json", &path]);
    let table = printed(folder, command, &more);
    let lines = fs::read_to_string(&path).unwrap();
    let rows: Vec<Value> = lines
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(table.lines().count(), 1 + rows.len());
    for (line, row) in table.lines().skip(1).zip(&rows) {
        let (attention, cache) = (row["attention"].as_str().unwrap(), row["cache"].as_str());
        let label = cache.map_or(attention.into(), |cache| format!("{attention}, {cache}"));
        assert!(line.starts_with(&format!("{label} ")), "{label}: {line}");
    }
    rows
}

fn bits_of(row: &Value) -> f64 {
    row["bits_per_byte"].as_f64().unwrap()
}

const WINDOW: &str = "--window 39 --windows 1";

#[test]
fn bits_through_caches_are_those_of_the_golden_logits() {
    let folder = checkpoint();
    let caches = "--prompt 13 --chunk 4 --cache all --cache reachable --cache h2o:20,20 --cache tova:9 --cache window:6,2 --slack 3";
    let found = rows(&folder, "perplexity", &format!("{WINDOW} {caches}"));
    let bits = &golden_bits()[13..];
    let expected = bits.iter().sum::<f64>() / bits.len() as f64;
    // Two keep all keys, and one would let some go if there were more.
    for row in &found[..3] {
        assert!(
            (bits_of(row) - expected).abs() < 1e-3,
            "{row} for {expected}"
        );
        assert_eq!(row["share"], 1.0, "{row}");
        assert_eq!(row["tokens"], 26);
    }
    for row in &found[3..] {
        assert!(
            (bits_of(row) - expected).abs() > 1e-3,
            "{row} for {expected}"
        );
        assert!(row["share"].as_f64().unwrap() < 0.6, "{row}");
    }
    let stores = "--prompt 13 --kv-dtype model --kv-dtype int8 --kv-dtype fp8";
    let found = rows(&folder, "perplexity", &format!("{WINDOW} {stores}"));
    for (row, cache) in found.iter().zip(["all", "all, int8", "all, fp8"]) {
        assert_eq!(row["cache"], cache);
        assert!(
            (bits_of(row) - expected).abs() < 0.02,
            "{row} for {expected}"
        );
    }
    assert_ne!(bits_of(&found[1]), bits_of(&found[0]));
}

/// A slack of three evicts where calls of four tokens end, as tokens one by one do.
#[test]
fn tokens_of_a_call_count_as_one_by_one() {
    let folder = checkpoint();
    let caches = "--cache snapkv:4,2,3 --cache h2o:2,2 --cache h2o-mean:2,2 --cache tova:4 --cache key-norm:4 --cache combined:1,1,2 --slack 3";
    // Two windows of one batch, and one by one.
    let window = "--window 19 --windows 2 --prompt 11";
    let [chunks, single] = ["--chunk 4", "--chunk 1 --batch 1"]
        .map(|how| rows(&folder, "perplexity", &format!("{window} {how} {caches}")));
    let full = rows(&folder, "perplexity", &format!("{window} --cache all"));
    for (chunks, single) in chunks.iter().zip(&single) {
        assert!(
            (bits_of(chunks) - bits_of(single)).abs() < 1e-5,
            "{chunks}, {single}"
        );
        assert!(
            (bits_of(chunks) - bits_of(&full[0])).abs() > 1e-5,
            "{chunks}"
        );
    }
}

/// Pages that heads choose by the mean of their scores, read token by token, give what the whole gives.
#[test]
fn pages_choose_as_the_whole() {
    let folder = checkpoint();
    let attention =
        "--attention dense --attention moba:16,1,share=mean --attention moba:16,2,share=sum";
    let command = format!("{WINDOW} {attention}");
    let whole = rows(&folder, "perplexity", &command);
    let pages = rows(
        &folder,
        "perplexity",
        &format!("{command} --prompt 1 --chunk 1 --cache all"),
    );
    for (whole, pages) in whole.iter().zip(&pages) {
        // The first token's bits are those of any attention.
        let rest = (39.0 * bits_of(whole) - golden_bits()[0]) / 38.0;
        assert!((rest - bits_of(pages)).abs() < 1e-4, "{whole}, {pages}");
        assert!(whole["attention"] == "dense" || pages["share"].as_f64().unwrap() < 1.0);
    }
    assert!((bits_of(&whole[0]) - bits_of(&whole[1])).abs() > 1e-3);
    let more = [
        "--raw",
        "--prompt",
        "HelloHelloHelloHelloHello",
        "--attention",
        "moba:16,1,share=mean",
    ];
    assert!(printed(&folder, "generate", &more).starts_with("HelloHello"));
    let message = refused(&folder, "generate", &[&more[..4], &["moba:16,1"]].concat());
    assert!(message.contains("share=mean"), "{message}");
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
    let bits: f64 = golden_bits().iter().sum();
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
    for (more, what) in [
        ("--cache h2o:3", "snapkv:C,M,F"),
        ("--cache tova:9 --attention local:8", "dense causal"),
        (
            "--cache all --slack 3",
            "--slack needs a --cache that evicts",
        ),
        ("--cache all --prompt 39", "--prompt must be from 1 to 38"),
        ("--cache all --chunk 0", "--chunk"),
    ] {
        let more: Vec<&str> = WINDOW.split(' ').chain(more.split(' ')).collect();
        let message = refused(
            &folder,
            "perplexity",
            &[&more[..], &["--text", &text]].concat(),
        );
        assert!(message.contains(what), "{message}");
    }
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
