//! The commands as typed, on the tiny checkpoint whose logits `transformers` computed.

#[path = "../../enwik8/tests/cli/shell.rs"]
mod shell;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

const LETTERS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuv";

fn data() -> PathBuf {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates");
    crates.join("burn-sparse-transformer/tests/data/tiny-llama")
}

/// Copies the checkpoint, with a tokenizer of letters.
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

/// Runs a command on the checkpoint, with flags as typed.
fn llama(folder: &TempDir, line: &str) -> Output {
    let (command, flags) = line.split_once(' ').unwrap();
    let mut llama = Command::new(env!("CARGO_BIN_EXE_llama"));
    llama.arg(command).arg(folder.path());
    llama.args(["--block-size", "8"]).args(shell::words(flags));
    llama.output().unwrap()
}

fn printed(folder: &TempDir, line: impl AsRef<str>) -> String {
    let output = llama(folder, line.as_ref());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn assert_refused(folder: &TempDir, line: impl AsRef<str>, message: &str) {
    let output = llama(folder, line.as_ref());
    assert!(!output.status.success());
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains(message), "{error}");
}

/// Writes the letters of the golden tokens' first row to a file of the folder.
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

/// Returns the bits of each token after the first one.
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

/// Returns the rows of `perplexity`, which are also written as JSON.
fn rows(folder: &TempDir, more: &str) -> Vec<Value> {
    let path = folder.path().join("rows.json");
    let (text, json) = (text(folder), path.display());
    let table = printed(
        folder,
        format!("perplexity --text {text} --json {json} {more}"),
    );
    let lines = fs::read_to_string(&path).unwrap();
    let rows: Vec<Value> = (lines.lines())
        .map(|line| serde_json::from_str(line).unwrap())
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

/// Returns the distance of a row's bits from a number.
fn apart(row: &Value, from: f64) -> f64 {
    let apart = (bits_of(row) - from).abs();
    println!("{row}: {apart} from {from}");
    apart
}

const WINDOW: &str = "--window 39 --windows 1";

#[test]
fn bits_through_caches_are_those_of_the_golden_logits() {
    let folder = checkpoint();
    let caches = "--prompt 13 --chunk 4 --cache all --cache reachable --cache h2o:20,20 --cache tova:9 --cache window:6,2 --slack 3";
    let found = rows(&folder, &format!("{WINDOW} {caches}"));
    let bits = &golden_bits()[13..];
    let expected = bits.iter().sum::<f64>() / bits.len() as f64;
    // Two keep all keys, and the third has capacity for all.
    for row in &found[..3] {
        assert!(apart(row, expected) < 1e-3);
        assert_eq!(row["share"], 1.0, "{row}");
        assert_eq!(row["tokens"], 26);
    }
    for row in &found[3..] {
        assert!(apart(row, expected) > 1e-3);
        assert!(row["share"].as_f64().unwrap() < 0.6, "{row}");
    }
    let stores = "--prompt 13 --kv-dtype model --kv-dtype int8 --kv-dtype fp8";
    let found = rows(&folder, &format!("{WINDOW} {stores}"));
    for (row, cache) in found.iter().zip(["all", "all, int8", "all, fp8"]) {
        assert_eq!(row["cache"], cache);
        assert!(apart(row, expected) < 0.02);
    }
    assert_ne!(bits_of(&found[1]), bits_of(&found[0]));
}

/// A slack of three evicts at the ends of calls of four tokens, like with single tokens.
#[test]
fn tokens_of_a_call_count_as_one_by_one() {
    let folder = checkpoint();
    let caches = "--cache snapkv:4,2,3 --cache h2o:2,2 --cache h2o-mean:2,2 --cache tova:4 --cache key-norm:4 --cache combined:1,1,2 --slack 3";
    // Two windows in one batch, and one by one.
    let window = "--window 19 --windows 2 --prompt 11";
    let [chunks, single] = ["--chunk 4", "--chunk 1 --batch 1"]
        .map(|how| rows(&folder, &format!("{window} {how} {caches}")));
    let full = rows(&folder, &format!("{window} --cache all"));
    for (chunks, single) in chunks.iter().zip(&single) {
        assert!(apart(chunks, bits_of(single)) < 1e-5);
        assert!(apart(chunks, bits_of(&full[0])) > 1e-5);
    }
}

/// Pages selected by the mean of the heads' scores, token by token, give the result of the whole.
#[test]
fn pages_choose_as_the_whole() {
    let folder = checkpoint();
    let attention =
        "--attention dense --attention moba:16,1,share=mean --attention moba:16,2,share=sum";
    let command = format!("{WINDOW} {attention}");
    let whole = rows(&folder, &command);
    let pages = format!("{command} --prompt 1 --chunk 1 --cache all");
    let pages = rows(&folder, &pages);
    for (whole, pages) in whole.iter().zip(&pages) {
        // The first token's bits do not depend on the attention.
        let rest = (39.0 * bits_of(whole) - golden_bits()[0]) / 38.0;
        assert!(apart(pages, rest) < 1e-4, "{whole}");
        assert!(whole["attention"] == "dense" || pages["share"].as_f64().unwrap() < 1.0);
    }
    assert!(apart(&whole[0], bits_of(&whole[1])) > 1e-3);
    let generate = "generate --raw --prompt HelloHelloHelloHelloHello --attention moba:16,1";
    let written = printed(&folder, format!("{generate},share=mean"));
    assert!(written.starts_with("HelloHello"));
    assert_refused(&folder, generate, "share=mean");
}

#[test]
fn bits_are_those_of_the_golden_logits() {
    let folder = checkpoint();
    let attention = "--attention dense --attention local:8";
    let found = rows(&folder, &format!("{WINDOW} {attention}"));
    let expected = golden_bits().iter().sum::<f64>() / 39.0;
    assert!(apart(&found[0], expected) < 1e-3);
    assert_eq!(found[0]["share"], 1.0);
    // A letter is a byte; a window changes attention.
    assert_eq!(found[0]["bits_per_token"], found[0]["bits_per_byte"]);
    assert!(apart(&found[1], expected) > 1e-3);
}

#[test]
fn texts_are_written_from_prompts() {
    let folder = checkpoint();
    let generate = "generate --raw --prompt Hello --max-new 12";
    let with = |more: &str| printed(&folder, format!("{generate} {more}"));
    let written = with("");
    assert!(written.starts_with("Hello"), "{written}");
    assert_eq!(with(""), written);
    assert_ne!(with("--temperature 2 --top-k 9 --seed 3"), written);
    with("--kv-dtype int8 --attention quest:16,48");
    // Selections that later tokens would influence apply to prompts only.
    assert!(with("--attention topk:8,2").starts_with("Hello"));
    let message = "no chat template: say --raw";
    assert_refused(&folder, "generate --prompt Hello", message);
}

#[test]
fn times_are_measured() {
    let folder = checkpoint();
    let bench =
        "bench --prompts 16,32 --steps 2 --repeats 1 --attention dense --attention topk:8,2";
    let printed_lines = printed(&folder, bench);
    // This device captures nothing, and each row of decoding says so.
    let (reasons, rows): (Vec<&str>, Vec<&str>) =
        (printed_lines.lines()).partition(|line| line.starts_with("  one by one: "));
    assert_eq!([rows.len(), reasons.len()], [6, 4], "{printed_lines}");
    let shards = [1, 2].map(|shard| format!("model-0000{shard}-of-00002.safetensors"));
    for shard in &shards {
        fs::remove_file(folder.path().join(shard)).unwrap();
    }
    printed(&folder, format!("{bench} --random"));
    assert_refused(&folder, bench, &shards[0]);
}

#[test]
fn mistakes_are_explained() {
    let folder = checkpoint();
    let perplexity = format!("perplexity --text {}", text(&folder));
    assert_refused(&folder, &perplexity, "--text has 40 tokens");
    for (more, what) in [
        ("--attention locl:8", "--attention"),
        ("--attention locl:8", "locl"),
        ("--cache h2o:3", "snapkv:C,M,F"),
        ("--cache tova:9 --attention local:8", "dense causal"),
        (
            "--cache all --slack 3",
            "--slack needs a --cache that evicts",
        ),
        ("--cache all --prompt 39", "--prompt must be from 1 to 38"),
        ("--cache all --chunk 0", "--chunk"),
    ] {
        assert_refused(&folder, format!("{perplexity} {WINDOW} {more}"), what);
    }
    assert_refused(
        &folder,
        "generate --raw --device tpu",
        "--device must be flex",
    );
    fs::remove_file(folder.path().join("config.json")).unwrap();
    assert_refused(&folder, "generate --raw", "config.json");
}

#[test]
fn commands_on_pages_have_flags_that_exist() {
    let commands = shell::check("llama", env!("CARGO_BIN_EXE_llama"));
    assert!(commands > 5, "{commands} commands");
}
