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
        let text = succeed(&[
            "eval",
            "--checkpoint",
            &run,
            "--split",
            split,
            "--min-context",
            min_context,
        ]);
        assert!(
            text.contains("bits per byte") && text.contains(bytes),
            "{text}"
        );
    }
    let message = fail(&["eval", "--checkpoint", &run, "--min-context", "32"], 1);
    assert!(
        message.contains("below the model's context of 32"),
        "{message}"
    );
    let message = fail(&["eval", "--checkpoint", &folder.path("none.ckpt")], 1);
    assert!(message.contains("none.ckpt"), "{message}");

    // Longer than the context, so that the window slides.
    let sample = [
        "sample",
        "--checkpoint",
        &run,
        "--prompt",
        "abc",
        "--length",
        "100",
        "--seed",
        "4",
    ];
    let text = succeed(&sample);
    assert!(text.starts_with("abc"), "{text}");
    assert_eq!(
        text,
        succeed(&sample),
        "the same seed writes the same bytes"
    );
    // Every way of choosing, to the end and up to a text that the model writes.
    let greedy = [
        "sample",
        "--checkpoint",
        &run,
        "--length",
        "60",
        "--temperature",
        "0",
    ];
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

/// What `docs/training.md` shows: a model from the files that `export` wrote.
fn load_exported(folder: &str) -> SparseTransformer {
    let folder = Path::new(folder);
    let config = SparseTransformerConfig::load(folder.join("model.json")).unwrap();
    let record = ModuleRecord::load(folder.join("model.bpk")).unwrap();
    let model = config.init(&Device::flex()).unwrap();
    model.try_load_record(record).unwrap()
}

/// Logits of every byte that follows one of `bytes`, `[bytes, 256]`.
fn logits(model: &SparseTransformer, bytes: &[u8]) -> Vec<f32> {
    let tokens: Vec<i32> = bytes.iter().map(|&byte| i32::from(byte)).collect();
    let tokens = TensorData::new(tokens, [1, bytes.len()]);
    let tokens = Tensor::<2, Int>::from_data(tokens, &Device::flex());
    let logits = model.forward(tokens).unwrap();
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
        .init(&Device::flex())
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
    assert!(
        message.contains("model.bpk exists") && message.contains("--overwrite"),
        "{message}"
    );
    succeed(&[&export[..], &["--overwrite"]].concat());
    // The folder is still that of a run.
    folder.resume("run", &["--steps", "3"]);

    folder.train("tree", &["--steps", "2", "--pattern", "tree:2&causal"]);
    let (run, out) = (folder.path("tree"), folder.path("out"));
    let message = fail(&["export", "--checkpoint", &run, "--out", &out], 1);
    assert!(
        message.contains("tree(2)") && message.contains("callback"),
        "{message}"
    );
    assert!(!Path::new(&out).exists());
}
