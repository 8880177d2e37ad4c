//! Pictures and measurements.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::*;

#[test]
fn a_run_draws_its_loss() {
    let folder = Folder::new();
    folder.train("run", &["--steps", "10"]);
    let picture = fs::read(Path::new(&folder.path("run")).join("loss.png")).unwrap();
    assert!(picture.starts_with(b"\x89PNG"));
}

#[test]
fn shards_of_a_sequence_are_listed() {
    let text = succeed(&words(
        "shards --pattern fixed:128,32 --length 16384 --devices 2 --heads 2 --head-dim 64",
    ));
    says(&text, "2 pieces a device (zigzag)");
    // The last quarter needs the summaries of the 64 windows in the middle: of 2 heads 32 keys each, and values, of 128 bytes.
    says(&text, "4096 keys received");
    says(
        &text,
        "1.0 MiB of bf16 keys and values received by one device at most",
    );
    let message = fail(&words("shards --length 100"), 1);
    says(
        &message,
        "seq_q must be a multiple of 32, block_size, got 100",
    );
}

#[test]
fn patterns_are_drawn() {
    let folder = Folder::new();
    for (name, magic) in [("pattern.png", &b"\x89PNG"[..]), ("pattern.svg", b"<svg")] {
        let out = folder.path(name);
        let text = succeed(&words(&format!(
            "draw --pattern fixed:32,8 --seq 128 --block 8 --out {out}"
        )));
        says(&text, "22.27% of the pairs");
        says(&text, &out);
        let picture = fs::read(&out).unwrap();
        assert!(
            picture
                .windows(magic.len())
                .take(200)
                .any(|bytes| bytes == magic)
        );
    }
    let message = fail(&["draw", "--out", &folder.path("pattern.bmp")], 1);
    assert!(message.contains(".png or .svg"), "{message}");
}

#[test]
fn bench_compares_sparse_and_dense() {
    let text = succeed(&[&["bench", "--iterations", "1"][..], &nano()].concat());
    says(&text, "fixed(8, 2)");
    says(&text, "dense causal");
    // A CPU has no memory of its own, and no peak was given.
    for column in ["device memory", "of peak", "queued"] {
        assert!(!text.contains(column), "{text}");
    }
}

#[test]
fn bench_writes_what_it_measured() {
    let folder = Folder::new();
    let file = folder.path("bench.json");
    let flags = words("bench --iterations 1 --attention sparse --precision bf16");
    let output = ["--peak-tflops", "0.5", "--json", &file];
    let text = succeed(&[&flags[..], &nano(), &output].concat());
    assert!(!text.contains("dense causal"), "{text}");
    let rows: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let [row] = rows.as_array().unwrap().as_slice() else {
        panic!("{rows}")
    };
    assert_eq!(
        (&row["precision"], &row["batch"]),
        (&"bf16".into(), &2.into())
    );
    let number = |name: &str| row[name].as_f64().unwrap();
    let rate = number("model_tflop") / (number("ms") / 1e3);
    assert!(
        (number("utilisation") * 0.5 / rate - 1.0).abs() < 1e-9,
        "{row}"
    );
    // 64 tokens, two operations per weight; two windows, 16 channels, four operations per pair and channel; three passes.
    let weights = 4.0 * 256.0 + 8.0 * 256.0 + 16.0 * 256.0;
    let pairs = 4.0 * 36.0 + 8.0 * 2.0 * (1.0 + 2.0 + 3.0);
    let forward = 64.0 * 2.0 * weights + 2.0 * 16.0 * 4.0 * pairs;
    assert!(
        (number("model_tflop") / (3.0 * forward / 1e12) - 1.0).abs() < 1e-9,
        "{row}"
    );
    assert!(number("loss") > 0.0 && row["parts"]["gradients"].as_f64().unwrap() > 0.0);
    // CPUs do not report their memory; devices that do report all parts.
    let memory = &row["memory"];
    assert!(
        memory.is_null() || memory["parameters"].as_u64().unwrap() > 0,
        "{row}"
    );
    for part in ["parameters", "transient"] {
        assert_eq!(text.contains(part), !memory.is_null(), "{text}");
    }
}
