//! What is done with a trained model.

use std::f64::consts::LN_2;
use std::fs;
use std::path::Path;

use burn::config::Config;
use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::{Bytes, Device, Int, Tensor, TensorData};
use burn_blocksparse::Pattern;
use burn_sparse_transformer::{Factorization, SparseTransformer, SparseTransformerConfig};

use crate::support::*;

#[test]
fn a_checkpoint_is_evaluated_and_sampled() {
    let folder = Folder::new();
    let trained = folder.train("run", &["--steps", "30", "--lr", "0.01"]);
    assert!(trained.contains("whole validation split"), "{trained}");
    let run = folder.path("run");

    for (split, min_context, bytes) in [
        ("validation", "0", "199 bytes"),
        ("test", "24", "199 bytes"),
    ] {
        let text = succeed(&words(&format!(
            "eval --checkpoint {run} --split {split} --min-context {min_context}"
        )));
        says(&text, "bits per byte");
        says(&text, bytes);
    }
    let message = fail(&["eval", "--checkpoint", &run, "--min-context", "32"], 1);
    says(&message, "below the model's context of 32");
    let message = fail(&["eval", "--checkpoint", &folder.path("none.ckpt")], 1);
    assert!(message.contains("none.ckpt"), "{message}");

    // Longer than the context, so that the window slides.
    let sample = format!("sample --checkpoint {run} --prompt abc --length 100 --seed 4");
    let sample = words(&sample);
    let text = succeed(&sample);
    assert!(text.starts_with("abc"), "{text}");
    assert_eq!(
        text,
        succeed(&sample),
        "the same seed writes the same bytes"
    );
    // Every way of choosing, to the end and up to a text that the model writes.
    let greedy = format!("sample --checkpoint {run} --length 60 --temperature 0");
    let greedy = words(&greedy);
    let whole = succeed(&greedy);
    for flags in [["--top-p", "0.01"], ["--min-p", "1"], ["--top-k", "1"]] {
        let mut sample = greedy[..5].to_vec();
        sample.extend(flags);
        assert_eq!(succeed(&sample), whole, "{flags:?}");
    }
    let other = [&greedy[..], &["--repetition", "5"]].concat();
    assert_ne!(succeed(&other), whole);
    let text: Vec<char> = whole.trim_end().chars().collect();
    let stop: String = text[text.len() / 2..text.len() / 2 + 2].iter().collect();
    let stopped = succeed(&[&greedy[..], &["--stop", &stop, "--stats"]].concat());
    let written = whole.strip_prefix("The ").unwrap();
    let before = &written[..written.find(&stop).unwrap()];
    assert_eq!(stopped.trim_end_matches('\n'), format!("The {before}"));
    let file = folder.path("sample.bin");
    let silent = succeed(
        &[
            &sample[..],
            &["--output", &file, "--top-k", "5", "--temperature", "0.5"],
        ]
        .concat(),
    );
    assert!(silent.is_empty());
    assert_eq!(fs::read(&file).unwrap().len(), 103);
}

/// Several texts at once, each of which is what it is alone; caches that keep more or less of what no later byte reads.
#[test]
fn several_samples_and_their_cache() {
    let folder = Folder::new();
    folder.train("run", &["--steps", "5", "--lr", "0.01"]);
    let path = folder.path("run");
    let greedy = format!("sample --checkpoint {path} --length 45 --temperature 0");
    let greedy = words(&greedy);
    let with = |flags: &[&str]| succeed(&[&greedy[..], flags].concat());
    let short = with(&["--prompt", "a"]);
    let long = with(&["--prompt", "abc def ghi jkl mno"]);
    let both = with(&["--prompt", "a", "--prompt", "abc def ghi jkl mno"]);
    assert_eq!(both, format!("--- 1 ---\n{short}--- 2 ---\n{long}"));
    let twice = with(&["--prompt", "a", "--batch", "2"]);
    assert_eq!(twice, format!("--- 1 ---\n{short}--- 2 ---\n{short}"));
    let file = folder.file("prompt", b"abc def ghi jkl mno");
    assert_eq!(with(&["--prompt-file", &file]), long);
    for flags in [
        ["--cache", "all"],
        ["--cache", "reachable"],
        ["--cache", "window:64"],
        ["--page-size", "16"],
        ["--kv-dtype", "f32"],
        ["--max-time", "1000"],
        ["--speculate", "1"],
        ["--speculate", "7"],
    ] {
        let flags = [&["--prompt", "abc def ghi jkl mno"], &flags[..]].concat();
        assert_eq!(with(&flags), long, "{flags:?}");
    }
    let text = with(&words("--prompt abc --cache window:4,1 --kv-dtype f16"));
    assert!(text.starts_with("abc"));
    // With room for all keys nothing is evicted.
    let prompt = ["--prompt", "abc def ghi jkl mno"];
    let evicting =
        words("h2o:20,44 h2o-mean:20,44 tova:64 snapkv:64,8,3 key-norm:64 combined:4,20,40");
    // Whose patterns are not causal in every head cannot evict.
    let got = fail(&[&greedy[..], &["--cache", "tova:9"]].concat(), 1);
    says(
        &got,
        "--cache tova:9 needs the dense causal pattern in every head; this model uses fixed(8, 2)",
    );
    folder.train("causal", &["--steps", "5", "--pattern", "causal"]);
    let causal = folder.path("causal");
    let causal = [&["sample", "--checkpoint", &causal], &greedy[3..]].concat();
    let all = succeed(&[&causal[..], &prompt].concat());
    for cache in evicting {
        let flags = [&causal[..], &prompt, &["--cache", cache]].concat();
        assert_eq!(succeed(&flags), all, "{cache}");
        // Drafts that are taken back leave nothing behind, where the last six keys are kept.
        if !["tova:64", "key-norm:64"].contains(&cache) {
            let drafts = [&flags[..], &["--speculate", "6"]].concat();
            assert_eq!(succeed(&drafts), all, "{cache}");
        }
    }
    // Texts of unequal lengths are what they are alone, evicted or not.
    for flags in [
        &["--cache", "h2o:20,8"][..],
        &["--cache", "h2o:8,4", "--slack", "2"],
        &["--cache", "snapkv:12,4,3", "--slack", "2"],
        &["--cache", "combined:2,4,6", "--slack", "2"],
    ] {
        let of = |prompts: &[&str]| succeed(&[&causal[..], prompts, flags].concat());
        let texts = [of(&["--prompt", "a"]), of(&prompt)];
        let both = of(&["--prompt", "a", prompt[0], prompt[1]]);
        let [short, long] = texts;
        assert_eq!(
            both,
            format!("--- 1 ---\n{short}--- 2 ---\n{long}"),
            "{flags:?}"
        );
    }
    for flags in [
        &["--cache", "h2o:4,4"][..],
        &["--cache", "h2o-mean:4,4", "--budget", "adaptive:0.2"],
        &["--cache", "tova:8", "--budget", "uniform"],
        &["--cache", "snapkv:8,4,3", "--budget", "pyramid:20"],
        &["--cache", "key-norm:8"],
        &["--cache", "combined:2,2,4"],
    ] {
        let flags = [&causal[..], &prompt, flags, &["--slack", "2", "--stats"]].concat();
        let output = run(&flags);
        let stats = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{stats}");
        assert!(output.stdout.starts_with(prompt[1].as_bytes()));
        // At most ten of the 32 keys of 16 numbers and their values, of one layer.
        let live = stats
            .split("of which ")
            .nth(1)
            .and_then(|rest| rest.split(' ').next());
        let live: usize = live.unwrap().parse().unwrap();
        assert!(live <= 10 * 2 * 16 * 4, "{stats}");
    }
    let window = ["--cache", "window:6,2", "--positions", "in-cache"];
    let text = succeed(&[&causal[..], &prompt, &window].concat());
    assert!(text.starts_with(prompt[1]), "{text}");
    for row in rows(
        "
        2 | --cache tova:x | must be tova:C, with whole
        1 | --positions in-cache | --positions must be Original, because the residency is no Window
        2 | --cache tova:1 | capacity must be at least 2
        1 | --selection topk:16,2 | --selection topk:16,2: what a byte chooses depends on later ones
        2 | --cache tova:9 --budget pyramid:1 | BETA above 1
        2 | --cache tova:9 --budget some | pyramid:BETA
        1 | --slack 3 | --slack needs a --cache that evicts keys
        ",
    ) {
        let [code, flags, message] = row[..] else {
            panic!("{row:?}");
        };
        let got = fail(
            &[&causal[..], &words(flags)].concat(),
            code.parse().unwrap(),
        );
        assert!(got.contains(message), "{got}");
    }
    let eval = |flags: &[&str]| {
        let run = folder.path("causal");
        succeed(&[&["eval", "--checkpoint", &run, "--windows", "3"], flags].concat())
    };
    let bits = |text: &str| -> f64 {
        let line = text.lines().find(|line| line.contains("bits per byte"));
        let number = line.unwrap().split(' ').next();
        number.unwrap().parse().unwrap()
    };
    let whole = bits(&eval(&[]));
    for cache in ["all", "tova:64"] {
        let text = eval(&["--cache", cache, "--chunk", "5"]);
        assert!((bits(&text) - whole).abs() < 2e-4, "{text} {whole}");
    }
    for dtype in ["int8", "fp8"] {
        let text = eval(&["--kv-dtype", dtype, "--chunk", "5"]);
        assert!((bits(&text) - whole).abs() < 0.01, "{text} {whole}");
    }
    let text = eval(&["--cache", "h2o:3,3", "--slack", "0", "--chunk", "1"]);
    assert!(
        bits(&text) < 9.0 && text.contains("the cache of a window takes"),
        "{text}"
    );

    for dtype in ["int8", "fp8"] {
        let text = with(&["--prompt", "abc", "--kv-dtype", dtype]);
        assert!(text.starts_with("abc"), "{text}");
    }
    let text = with(&["--max-time", "0.000001"]);
    assert!(text.trim_end().len() <= 5, "{text}");

    let output = run(&[&greedy[..], &["--prompt", "a", "--batch", "2", "--stats"]].concat());
    let stats = String::from_utf8(output.stderr).unwrap();
    assert!(stats.contains("prompt: 2 bytes in"), "{stats}");
    says(&stats, "90 bytes in");
    says(&stats, "bytes/s");
    says(&stats, " slots, ");
    says(&stats, "all keys would take");

    // On CPUs steps run one by one, over the end of the context, too.
    let output = run(&[&greedy[..], &["--graph", "--stats"]].concat());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), with(&[]));
    let stats = String::from_utf8(output.stderr).unwrap();
    assert!(stats.contains("runs steps one by one: "), "{stats}");

    // Drafts over the end of the context, of two texts.
    let json = folder.path("stats.json");
    let drafts = format!("--prompt a --batch 2 --speculate 6 --stats --json {json}");
    let drafts = words(&drafts);
    let output = run(&[&greedy[..], &drafts].concat());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), twice);
    let stats = String::from_utf8(output.stderr).unwrap();
    says(&stats, "drafts: ");
    says(&stats, "bytes a step");
    let json: serde_json::Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(
        (&json["prompt_bytes"], &json["bytes"]),
        (&2.into(), &90.into())
    );
    assert!(json["cache"]["slots"].as_u64() > Some(0), "{json}");
    assert!(json["accepted_bytes"].as_u64() <= json["drafted_bytes"].as_u64());
    let both = fail(&[&greedy[..], &["--graph", "--speculate", "6"]].concat(), 2);
    assert!(both.contains("cannot be used with"), "{both}");

    for (flags, code, message) in [
        (["--cache", "some"], 2, "there is no policy 'some'"),
        (["--cache", "window:0,1"], 2, "with W at least 1"),
        (["--page-size", "20"], 2, "must be 16, 32, 64 or 128"),
        (
            ["--kv-dtype", "f8"],
            2,
            "possible values: model, f32, f16, bf16, int8, fp8",
        ),
        (["--batch", "0"], 2, "must be a whole number, at least 1"),
        (["--max-time", "0"], 2, "must be a number above 0"),
        (["--prompt-file", "/none/such"], 1, "cannot read /none/such"),
    ] {
        let got = fail(&[&greedy[..], &flags].concat(), code);
        assert!(got.contains(message), "{got}");
    }
    let two = ["--batch", "2", "--output", "x"];
    let got = fail(&[&greedy[..], &two].concat(), 1);
    assert!(got.contains("--output takes one sample, not 2"), "{got}");
}

/// What `docs/training.md` shows: a model from the files that `export` wrote.
fn load_exported(folder: &str) -> SparseTransformer {
    let folder = Path::new(folder);
    let config = SparseTransformerConfig::load(folder.join("model.json")).unwrap();
    let record = ModuleRecord::load(folder.join("model.bpk")).unwrap();
    let model = config.try_init(&Device::flex()).unwrap();
    model.try_load_record(record).unwrap()
}

/// Logits of every byte that follows one of `bytes`, `[bytes, 256]`.
fn logits(model: &SparseTransformer, bytes: &[u8]) -> Vec<f32> {
    let tokens: Vec<i32> = bytes.iter().map(|&byte| i32::from(byte)).collect();
    let tokens = TensorData::new(tokens, [1, bytes.len()]);
    let tokens = Tensor::<2, Int>::from_data(tokens, &Device::flex());
    let logits = model.try_forward(tokens).unwrap();
    logits.try_into_vec_as().unwrap()
}

#[test]
fn an_exported_model_loads_in_a_program_of_its_own() {
    let folder = Folder::new();
    folder.train("run", &["--steps", "30", "--lr", "0.01"]);
    let (run, out) = (folder.path("run"), folder.path("exported"));
    let text = succeed(&["export", "--run", &run, "--out", &out]);
    assert!(text.contains("best.ckpt: step 30"), "{text}");
    let exported = load_exported(&out);

    // The checkpoint's own record, in a model that is configured here.
    let fixed = Factorization::Merged(vec![Pattern::fixed(8, 2)]);
    let [record, _] = state_of(&Path::new(&run).join("best.ckpt"));
    let trained = SparseTransformerConfig::new(16, 2, fixed)
        .with_vocab_size(256)
        .with_context(32)
        .with_n_layers(1)
        .with_embedding_width(Some(8))
        .with_block_size(8)
        .try_init(&Device::flex())
        .unwrap()
        .load_record(ModuleRecord::from_bytes(Bytes::from_bytes_vec(record)).unwrap());
    let data = fs::read(folder.data()).unwrap();
    let window = &data[100..132];
    assert!(logits(&exported, window) == logits(&trained, window));

    // The last 200 bytes are the test split, which eval cuts into windows of 32 predictions, the last one at its end.
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
    let eval = succeed(&["eval", "--checkpoint", &run, "--split", "test"]);
    let expected: f64 = eval
        .lines()
        .last()
        .unwrap()
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    assert!((bits / 199.0 - expected).abs() < 1e-4, "{bits} {eval}");
}

#[test]
fn exports_destroy_nothing_and_say_what_they_cannot_hold() {
    let folder = Folder::new();
    folder.train("run", &["--steps", "2"]);
    let run = folder.path("run");
    let export = ["export", "--checkpoint", &run, "--out", &run];
    succeed(&export);
    let message = fail(&export, 1);
    says(&message, "model.bpk exists");
    says(&message, "--overwrite");
    succeed(&[&export[..], &["--overwrite"]].concat());
    // The folder is still that of a run.
    folder.resume("run", &["--steps", "3"]);

    folder.train("tree", &["--steps", "2", "--pattern", "tree:2&causal"]);
    let (run, out) = (folder.path("tree"), folder.path("out"));
    let message = fail(&["export", "--checkpoint", &run, "--out", &out], 1);
    says(&message, "tree(2)");
    says(&message, "callback");
    assert!(!Path::new(&out).exists());
}

/// Bytes choose pages of a cache, in a model whose layers see every earlier byte.
pub fn chosen_pages_are_sampled_from(checkpoint: &str) {
    let flags = ["--prompt", "abc def ghi jkl mno", "--length", "45"];
    let greedy = ["--temperature", "0", "--cache", "all"];
    let sample = ["sample", "--checkpoint", checkpoint];
    let sample = [&sample[..], &flags, &greedy].concat();
    let all = succeed(&sample);
    // Three pages are all of the context's.
    let quest = ["--selection", "quest:16,48"];
    assert_eq!(succeed(&[&sample[..], &quest].concat()), all);
    // Of keys in eight bits, too.
    let eight = ["--kv-dtype", "int8"];
    let all = succeed(&[&sample[..], &eight].concat());
    assert_eq!(succeed(&[&sample[..], &eight, &quest].concat()), all);
    let moba = ["--selection", "moba:16,1", "--stats"];
    let output = run(&[&sample[..], &moba].concat());
    let stats = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{stats}");
    assert!(stats.contains("; the last bytes read "), "{stats}");
    let pages = ["--page-size", "32"];
    let got = fail(&[&sample[..], &quest, &pages].concat(), 1);
    let message = "--page-size must be 16, the page of quest, got 32";
    assert!(got.contains(message), "{got}");
}
