//! Choices of keys by content within a pattern, and what a run says of them.

use std::fs;

use serde_json::Value;

use crate::support::*;

/// Blocks are chosen from those that the pattern keeps, which training stores and resumes bit for bit, and every command knows.
#[test]
fn choices_within_a_pattern_train_and_resume_bit_for_bit() {
    let folder = Folder::new();
    // A window of three blocks of 8, of which each row of blocks takes two: the own one and one more.
    let pattern = ["--pattern", "local:16", "--selection", "topk:8,2,1,0"];
    let flags = ["--steps", "12", "--checkpoint-every", "6"];
    let more = ["--recall-every", "4", "--lr", "0.01"];
    let flags = [&pattern[..], &flags, &more].concat();
    let without_pattern: Vec<&str> = (nano().into_iter())
        .filter(|word| !["--pattern", "fixed:8,2"].contains(word))
        .collect();
    let train = |name: &str, flags: &[&str]| {
        let (path, data) = (folder.path(name), folder.data());
        let run = ["train", "--run", &path, "--data", &data];
        succeed(&[&run[..], &without_pattern, flags].concat())
    };
    let text = train("whole", &flags);
    says(&text, "attention local(16),");
    says(&text, "keys chosen by topk:8,2,1,0");
    train("parts", &flags);
    fs::remove_file(folder.checkpoint("parts", 12)).unwrap();
    folder.resume("parts", &[]);
    let whole = folder.checkpoint("whole", 12);
    assert_same_model(&folder.checkpoint("parts", 12), &whole);
    assert_eq!(folder.losses("parts"), folder.losses("whole"));

    // Another model than that of either alone.
    let plain = ["--steps", "12", "--lr", "0.01"];
    train(
        "pattern",
        &[&plain[..], &["--pattern", "local:16"]].concat(),
    );
    train(
        "choice",
        &[&plain[..], &["--selection", "topk:8,2,1,0"]].concat(),
    );
    for other in ["pattern", "choice"] {
        let other = folder.checkpoint(other, 12);
        assert!(model_of(&other) != model_of(&whole), "{other:?}");
    }

    let measured: Vec<Value> = (folder.log("whole").into_iter())
        .filter(|row| row["kind"] == "selection")
        .collect();
    assert_eq!(measured.len(), 3, "{measured:?}");
    // Rows of blocks see 1, 2, 3 and 3 blocks, and take 1, 2, 2 and 2.
    for row in &measured {
        let density = row["layers"][0]["density"].as_f64().unwrap();
        assert!((density - 7.0 / 9.0).abs() < 1e-9, "{row}");
    }
    let path = folder.path("whole");
    let report = fs::read_to_string(format!("{path}/report.md")).unwrap();
    for shown in [
        "`topk:8,2,1,0 within local:16`",
        "![recall by layer over steps](recall.png)",
        "| after step 12 | recall | ratio to the best choice | density |",
        "| layer 0 | 0.",
        " | 0.7778 |",
        "| mean | 0.",
    ] {
        assert!(report.contains(shown), "{shown}: {report}");
    }
    let picture = fs::read(format!("{path}/recall.png")).unwrap();
    assert!(picture.starts_with(b"\x89PNG"));
    // Nothing was measured there.
    let other = folder.path("choice");
    let report = fs::read_to_string(format!("{other}/report.md")).unwrap();
    assert!(!report.contains("Choice of keys"), "{report}");
    assert!(!fs::exists(format!("{other}/recall.png")).unwrap());
    // It is drawn again of the log, and an overwritten run leaves none.
    fs::remove_file(format!("{path}/recall.png")).unwrap();
    succeed(&["report", "--run", &path]);
    assert!(fs::exists(format!("{path}/recall.png")).unwrap());

    let recall = ["recall", "--checkpoint", &path, "--windows", "2"];
    let all = ["--selection", "topk:8,ratio=1", "--selection", "topk:8,1"];
    let table = succeed(&[&recall[..], &all].concat());
    let lines: Vec<Vec<&str>> = table
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    let row = |name: &str| {
        let found = lines.iter().find(|words| words.first() == Some(&name));
        found.unwrap_or_else(|| panic!("{name}: {table}")).clone()
    };
    assert_eq!(row("local:16")[1], row("topk:8,ratio=1")[1], "{table}");
    assert_eq!(row("topk:8,ratio=1")[2..], ["1.0000"; 3], "{table}");
    let message = fail(&[&recall[..], &["--selection", "moba:8,2"]].concat(), 1);
    says(&message, "must be the dense causal pattern, or dense");
    let sample = ["sample", "--checkpoint", &path, "--length", "4"];
    assert!(succeed(&sample).contains("The "));

    train("overwritten", &flags);
    let run = ["--overwrite", "--steps", "2", "--pattern", "local:16"];
    train("overwritten", &run);
    let left = folder.path("overwritten");
    assert!(!fs::exists(format!("{left}/recall.png")).unwrap());
}

/// Without a pattern a choice is made from every earlier byte, and with `--attention sparse` within the preset's.
#[test]
fn the_presets_pattern_is_chosen_within_on_demand() {
    let folder = Folder::new();
    let small = words("--layers 1 --d-model 16 --heads 2 --context 64");
    let (data, more) = (folder.data(), ["--steps", "1", "--eval-windows", "1"]);
    for (run, flags, patterns) in [
        ("free", &[][..], "causal"),
        ("within", &["--attention", "sparse"], "fixed:32,8"),
    ] {
        let path = folder.path(run);
        let begin = format!("train --run {path} --data {data} --selection topk:8,3");
        let begin = words(&begin);
        succeed(&[&begin[..], &small, &more, flags].concat());
        let config = fs::read_to_string(format!("{path}/config.json")).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        assert_eq!(config["model"]["patterns"][0], patterns);
        assert_eq!(config["model"]["selections"][0], "topk:8,3");
    }
}
