//! Uses of a trained model.

use std::f64::consts::LN_2;
use std::fs;
use std::path::Path;

use burn::config::Config;
use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::{Bytes, Device, Int, Tensor, TensorData};
use burn_blocksparse::Pattern;
use burn_sparse_transformer::{Factorization, SparseTransformer, SparseTransformerConfig};

use crate::shell::words;
use crate::support::*;

#[test]
fn a_checkpoint_is_evaluated_and_sampled() {
    let folder = Folder::new();
    let trained = folder.train("run", "--steps 30 --lr 0.01");
    says(trained, "whole validation split");
    let run = folder.path("run");

    let eval = format!("eval --checkpoint {run}");
    for flags in [
        "--split validation --min-context 0",
        "--split test --min-context 24",
    ] {
        let text = succeed(format!("{eval} {flags}"));
        says_all(text, &["bits per byte", "199 bytes"]);
    }
    let message = fail(format!("{eval} --min-context 32"), 1);
    says(message, "below the model's context of 32");
    let none = folder.path("none.ckpt");
    says(fail(format!("eval --checkpoint {none}"), 1), "none.ckpt");

    // Longer than the context, so that the window slides.
    let sample = format!("sample --checkpoint {run} --prompt abc --length 100 --seed 4");
    let text = succeed(&sample);
    assert!(text.starts_with("abc"), "{text}");
    let expected = succeed(&sample);
    assert_eq!(text, expected, "the same seed writes the same bytes");
    // Every way of sampling, to the end and up to a text that the model writes.
    let plain = format!("sample --checkpoint {run} --length 60");
    let greedy = format!("{plain} --temperature 0");
    let whole = succeed(&greedy);
    for flags in ["--top-p 0.01", "--min-p 1", "--top-k 1"] {
        assert_eq!(succeed(format!("{plain} {flags}")), whole, "{flags}");
    }
    assert_ne!(succeed(format!("{greedy} --repetition 5")), whole);
    let text: Vec<char> = whole.trim_end().chars().collect();
    let stop: String = text[text.len() / 2..text.len() / 2 + 2].iter().collect();
    let stopped = run_with(&greedy, &["--stop", &stop, "--stats"]);
    let written = whole.strip_prefix("The ").unwrap();
    let before = &written[..written.find(&stop).unwrap()];
    assert_eq!(stopped.trim_end_matches('\n'), format!("The {before}"));
    let file = folder.path("sample.bin");
    let line = format!("{sample} --output {file} --top-k 5 --temperature 0.5");
    let silent = succeed(line);
    assert!(silent.is_empty());
    assert_eq!(fs::read(&file).unwrap().len(), 103);
}

/// Runs a command with further arguments that may contain any characters.
fn run_with(line: &str, more: &[&str]) -> String {
    let output = enwik8().args(words(line)).args(more).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

const PROMPT: &str = "abc def ghi jkl mno";

/// Formats several texts like `sample` prints them.
fn listed(texts: [&str; 2]) -> String {
    let [first, second] = texts;
    format!("--- 1 ---\n{first}--- 2 ---\n{second}")
}

/// Several texts at once, each equal to the text alone, with several caches and outputs.
#[test]
fn several_samples_and_their_cache() {
    let folder = Folder::new();
    folder.train("run", "--steps 5 --lr 0.01");
    let path = folder.path("run");
    let greedy = format!("sample --checkpoint {path} --length 45 --temperature 0");
    let with = |flags: &str| succeed(format!("{greedy} {flags}"));
    let short = with("--prompt a");
    let long = with(&format!("--prompt '{PROMPT}'"));
    let both = with(&format!("--prompt a --prompt '{PROMPT}'"));
    assert_eq!(both, listed([&short, &long]));
    let twice = with("--prompt a --batch 2");
    assert_eq!(twice, listed([&short, &short]));
    let file = folder.file("prompt", PROMPT);
    assert_eq!(with(&format!("--prompt-file {file}")), long);
    for flags in [
        "--cache all",
        "--cache reachable",
        "--cache window:64",
        "--page-size 16",
        "--kv-dtype f32",
        "--max-time 1000",
        "--speculate 1",
        "--speculate 7",
    ] {
        let got = with(&format!("--prompt '{PROMPT}' {flags}"));
        assert_eq!(got, long, "{flags}");
    }
    for flags in [
        "--cache window:4,1 --kv-dtype f16",
        "--kv-dtype int8",
        "--kv-dtype fp8",
    ] {
        let text = with(&format!("--prompt abc {flags}"));
        assert!(text.starts_with("abc"), "{text}");
    }
    let text = with("--max-time 0.000001");
    assert!(text.trim_end().len() <= 5, "{text}");

    let [_, stats] = succeed_and_tell(format!("{greedy} --prompt a --batch 2 --stats"));
    let shown = [
        "prompt: 2 bytes in",
        "90 bytes in",
        "bytes/s",
        " slots, ",
        "all keys would take",
    ];
    says_all(stats, &shown);

    // On CPUs steps run launch by launch, also beyond the end of the context.
    let [text, stats] = succeed_and_tell(format!("{greedy} --graph --stats"));
    assert_eq!(text, with(""));
    says(stats, "runs steps one by one: ");
    assert_eq!(with("--graph --speculate 6"), text);

    // Drafts beyond the end of the context, for two texts.
    let drafts = "--prompt a --batch 2 --speculate 6 --stats --json";
    let file = folder.path("stats.json");
    let [text, stats] = succeed_and_tell(format!("{greedy} {drafts} {file}"));
    assert_eq!(text, twice);
    says_all(stats, &["drafts: ", "bytes a step"]);
    let json = json(&file);
    assert!(json["prompt_bytes"] == 2 && json["bytes"] == 90, "{json}");
    assert!(json["cache"]["slots"].as_u64() > Some(0), "{json}");
    assert!(json["accepted_bytes"].as_u64() <= json["drafted_bytes"].as_u64());

    for row in rows(
        "
        2 | --cache some | there is no policy 'some'
        2 | --cache window:0,1 | with W at least 1
        2 | --page-size 20 | must be 16, 32, 64 or 128
        2 | --kv-dtype f8 | possible values: model, f32, f16, bf16, int8, fp8
        2 | --batch 0 | must be a whole number, at least 1
        2 | --max-time 0 | must be a number above 0
        1 | --prompt-file /none/such | cannot read /none/such
        1 | --batch 2 --output x | --output takes one sample, not 2
        1 | --cache tova:9 | --cache tova:9 needs the dense causal pattern in every head; this model uses fixed(8, 2)
        ",
    ) {
        says(fail(format!("{greedy} {}", row[1]), row[0].parse().unwrap()), row[2]);
    }
}

/// Caches that evict, for a model in which every byte sees all earlier ones.
#[test]
fn caches_that_evict_are_sampled_from_and_evaluated() {
    let folder = Folder::new();
    folder.train("run", "--steps 5 --pattern causal");
    let path = folder.path("run");
    let greedy = format!("sample --checkpoint {path} --length 45 --temperature 0");
    let prompt = format!("--prompt '{PROMPT}'");
    let all = succeed(format!("{greedy} {prompt}"));
    // With capacity for all keys nothing is evicted.
    for cache in
        words("h2o:20,44 h2o-mean:20,44 tova:64 snapkv:64,8,3 key-norm:64 combined:4,20,40")
    {
        let sample = format!("{greedy} {prompt} --cache {cache}");
        assert_eq!(succeed(&sample), all, "{cache}");
        // Rejected drafts leave no trace if the last six keys are always retained.
        if !["tova:64", "key-norm:64"].contains(&cache.as_str()) {
            assert_eq!(succeed(format!("{sample} --speculate 6")), all, "{cache}");
        }
    }
    // Texts of unequal lengths equal those alone, with and without eviction.
    for flags in [
        "--cache h2o:20,8",
        "--cache h2o:8,4 --slack 2",
        "--cache snapkv:12,4,3 --slack 2",
        "--cache combined:2,4,6 --slack 2",
    ] {
        let of = |prompts: &str| succeed(format!("{greedy} {prompts} {flags}"));
        let both = of(&format!("--prompt a {prompt}"));
        assert_eq!(both, listed([&of("--prompt a"), &of(&prompt)]), "{flags}");
    }
    for flags in [
        "--cache h2o:4,4",
        "--cache h2o-mean:4,4 --budget adaptive:0.2",
        "--cache tova:8 --budget uniform",
        "--cache snapkv:8,4,3 --budget pyramid:20",
        "--cache key-norm:8",
        "--cache combined:2,2,4",
    ] {
        let [text, stats] =
            succeed_and_tell(format!("{greedy} {prompt} {flags} --slack 2 --stats"));
        assert!(text.starts_with(PROMPT));
        // At most ten of the 32 keys of 16 elements and their values, in one layer.
        let (_, live) = stats.split_once("of which ").unwrap();
        let live: usize = live.split(' ').next().unwrap().parse().unwrap();
        assert!(live <= 10 * 2 * 16 * 4, "{stats}");
    }
    let window = "--cache window:6,2 --positions in-cache";
    let text = succeed(format!("{greedy} {prompt} {window}"));
    assert!(text.starts_with(PROMPT), "{text}");
    for row in rows(
        "
        2 | --cache tova:x | must be tova:C, with whole
        1 | --positions in-cache | --positions must be Original, because the residency is no Window
        2 | --cache tova:1 | capacity must be at least 2
        1 | --selection topk:16,2 | --selection topk:16,2: later bytes influence the choice
        2 | --cache tova:9 --budget pyramid:1 | BETA above 1
        2 | --cache tova:9 --budget some | pyramid:BETA
        1 | --slack 3 | --slack needs a --cache that evicts keys
        ",
    ) {
        let message = fail(format!("{greedy} {}", row[1]), row[0].parse().unwrap());
        says(message, row[2]);
    }
    let eval = |flags: &str| succeed(format!("eval --checkpoint {path} --windows 3 {flags}"));
    let whole = bits(&eval(""));
    for (flags, most) in [
        ("--cache all --chunk 5", 2e-4),
        ("--cache tova:64 --chunk 5", 2e-4),
        ("--kv-dtype int8 --chunk 5", 0.01),
        ("--kv-dtype fp8 --chunk 5", 0.01),
    ] {
        let text = eval(flags);
        let is_near = (bits(&text) - whole).abs() < most;
        assert!(is_near, "{flags}: {text} {whole}");
    }
    let text = eval("--cache h2o:3,3 --slack 0 --chunk 1");
    assert!(bits(&text) < 9.0, "{text}");
    says(text, "the cache of a window takes");
}

/// The example in `docs/training.md`: loads a model from the files of `export`.
fn load_exported(folder: &str) -> SparseTransformer {
    let folder = Path::new(folder);
    let config = SparseTransformerConfig::load(folder.join("model.json")).unwrap();
    let record = ModuleRecord::load(folder.join("model.bpk")).unwrap();
    let model = config.init(&Device::flex());
    model.try_load_record(record).unwrap()
}

/// Returns the logits after each of `bytes`, `[bytes, 256]`.
fn logits(model: &SparseTransformer, bytes: &[u8]) -> Vec<f32> {
    let tokens: Vec<i32> = bytes.iter().map(|&byte| i32::from(byte)).collect();
    let tokens = TensorData::new(tokens, [1, bytes.len()]);
    let tokens = Tensor::<2, Int>::from_data(tokens, &Device::flex());
    let logits = model.forward(tokens);
    logits.try_into_vec_as().unwrap()
}

#[test]
fn an_exported_model_loads_in_a_program_of_its_own() {
    let folder = Folder::new();
    folder.train("run", "--steps 30 --lr 0.01");
    let (run, out) = (folder.path("run"), folder.path("exported"));
    let text = succeed(format!("export --run {run} --out {out}"));
    says(text, "best.ckpt: step 30");
    let exported = load_exported(&out);

    // The checkpoint's own record, in a model configured here.
    let fixed = Factorization::Merged(vec![Pattern::fixed(8, 2)]);
    let [record, _] = state_of(&Path::new(&run).join("best.ckpt"));
    let trained = SparseTransformerConfig::new(16, 2, fixed)
        .with_vocab_size(256)
        .with_context(32)
        .with_n_layers(1)
        .with_embedding_width(Some(8))
        .with_block_size(8)
        .init(&Device::flex())
        .load_record(ModuleRecord::from_bytes(Bytes::from_bytes_vec(record)).unwrap());
    let data = fs::read(folder.data()).unwrap();
    let window = &data[100..132];
    assert!(logits(&exported, window) == logits(&trained, window));

    // The last 200 bytes are the test split, which eval cuts into windows of 32 predictions; the last window is aligned to its end.
    let test = &data[3_800..];
    let (mut predicted, mut bits) = (0, 0.0);
    while predicted < 199 {
        let start = predicted.min(199 - 32);
        let logits = logits(&exported, &test[start..start + 32]);
        for (row, target) in logits
            .chunks(256)
            .zip(&test[start + 1..])
            .skip(predicted - start)
        {
            let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
            bits += (sum.ln() - f64::from(row[usize::from(*target)])) / LN_2;
        }
        predicted = start + 32;
    }
    let eval = succeed(format!("eval --checkpoint {run} --split test"));
    let is_near = (bits / 199.0 - self::bits(&eval)).abs() < 1e-4;
    assert!(is_near, "{bits} {eval}");
}

#[test]
fn exports_destroy_nothing_and_say_what_they_cannot_hold() {
    let folder = Folder::new();
    folder.train("run", "--steps 2");
    let run = folder.path("run");
    let export = format!("export --checkpoint {run} --out {run}");
    succeed(&export);
    says_all(fail(&export, 1), &["model.bpk exists", "--overwrite"]);
    succeed(format!("{export} --overwrite"));
    // The folder remains that of a run.
    folder.resume("run", "--steps 3");

    folder.train("tree", "--steps 2 --pattern tree:2&causal");
    let (run, out) = (folder.path("tree"), folder.path("out"));
    let message = fail(format!("export --checkpoint {run} --out {out}"), 1);
    says_all(message, &["tree(2)", "callback"]);
    assert!(!folder.exists("out"));
}

/// Page selection in a cache, with a model whose layers see every earlier byte.
pub fn chosen_pages_are_sampled_from(checkpoint: &str) {
    let greedy = "--length 45 --temperature 0 --cache all";
    let sample = format!("sample --checkpoint {checkpoint} --prompt '{PROMPT}' {greedy}");
    // Three pages are the whole context; also with 8-bit keys.
    let quest = "--selection quest:16,48";
    for dtype in ["", "--kv-dtype int8"] {
        let all = succeed(format!("{sample} {dtype}"));
        assert_eq!(succeed(format!("{sample} {dtype} {quest}")), all);
    }
    let [_, stats] = succeed_and_tell(format!("{sample} --selection moba:16,1 --stats"));
    says(stats, "; the last bytes read ");
    let message = fail(format!("{sample} {quest} --page-size 32"), 1);
    let expected = "--page-size must be 16, the page of quest:16,48, got 32";
    says(message, expected);
}
