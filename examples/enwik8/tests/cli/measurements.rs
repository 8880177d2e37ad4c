//! Pictures and measurements.

use std::fs;

use crate::support::*;

#[test]
fn shards_of_a_sequence_are_listed() {
    let text =
        succeed("shards --pattern fixed:128,32 --length 16384 --devices 2 --heads 2 --head-dim 64");
    let shown = [
        "2 pieces per device (zigzag)",
        // The last quarter needs the summaries of the 64 windows in the middle: 32 keys and values of 128 bytes for each of 2 heads.
        "4096 keys received",
        "1.0 MiB of bf16 keys and values received by one device at most",
    ];
    says_all(text, &shown);
    let message = fail("shards --length 100", 1);
    let expected = "seq_q must be a multiple of 32, block_size, got 100";
    says(message, expected);
}

#[test]
fn patterns_are_drawn() {
    let folder = Folder::new();
    let draw = "draw --pattern fixed:32,8 --seq 128 --block 8 --out";
    for (name, magic) in [("pattern.png", &b"\x89PNG"[..]), ("pattern.svg", b"<svg")] {
        let out = folder.path(name);
        let text = succeed(format!("{draw} {out}"));
        says_all(text, &["22.27% of the pairs", &out]);
        let picture = fs::read(&out).unwrap();
        let mut begins = picture.windows(magic.len()).take(200);
        assert!(begins.any(|bytes| bytes == magic));
    }
    let message = fail(format!("draw --out {}", folder.path("pattern.bmp")), 1);
    says(message, ".png or .svg");
}

#[test]
fn bench_compares_sparse_and_dense() {
    let text = succeed(format!("bench --iterations 1 {}", nano("")));
    says_all(&text, &["fixed(8, 2)", "dense causal"]);
    // A CPU has no device memory, and no peak was given.
    for column in ["device memory", "of peak", "queued"] {
        assert!(!text.contains(column), "{text}");
    }
}

#[test]
fn bench_writes_what_it_measured() {
    let folder = Folder::new();
    let file = folder.path("bench.json");
    let flags = "--iterations 1 --attention sparse --precision bf16 --peak-tflops 0.5 --json";
    let text = succeed(format!("bench {} {flags} {file}", nano("")));
    assert!(!text.contains("dense causal"), "{text}");
    let rows = json(&file);
    let [row] = rows.as_array().unwrap().as_slice() else {
        panic!("{rows}")
    };
    assert!(row["precision"] == "bf16" && row["batch"] == 2, "{row}");
    let number = |name: &str| row[name].as_f64().unwrap();
    let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-9, "{row}");
    let rate = number("model_tflop") / (number("ms") / 1e3);
    near(number("utilisation") * 0.5, rate);
    // 64 tokens, two operations per weight; two windows, 16 channels, four operations per pair and channel; three passes.
    let weights = 4.0 * 256.0 + 8.0 * 256.0 + 16.0 * 256.0;
    let pairs = 4.0 * 36.0 + 8.0 * 2.0 * (1.0 + 2.0 + 3.0);
    let forward = 64.0 * 2.0 * weights + 2.0 * 16.0 * 4.0 * pairs;
    near(number("model_tflop"), 3.0 * forward / 1e12);
    assert!(number("loss") > 0.0 && row["parts"]["gradients"].as_f64().unwrap() > 0.0);
    // CPUs do not report their memory; devices that do report all parts.
    let memory = &row["memory"];
    let has_memory = memory["parameters"].as_u64().is_some_and(|bytes| bytes > 0);
    assert!(memory.is_null() || has_memory, "{row}");
    for part in ["parameters", "transient"] {
        assert_eq!(text.contains(part), !memory.is_null(), "{text}");
    }
}
