//! The search for each head's choice of keys, and what its file is for.

use std::fs;

use serde_json::Value;

use crate::support::*;

/// Each head gets the candidate with the largest recall, of those that are sparse enough, and the file is read again.
pub fn heads_are_searched(folder: &Folder, checkpoint: &str) {
    let (heads, found) = (folder.path("heads.json"), folder.path("found.jsonl"));
    let candidates = words("--selection topk:8,ratio=1 --selection topk:8,2,1,0");
    let more = ["--selection", "topk:8,1,1,0"];
    let search = ["search-selection", "--checkpoint", checkpoint];
    let rest = ["--density", "0.71", "--out", &heads];
    let told = succeed(&[&search[..], &candidates, &more, &rest].concat());
    assert!(told.contains("topk:8,ratio=1"), "{told}");
    let file: Value = serde_json::from_str(&fs::read_to_string(&heads).unwrap()).unwrap();
    let texts: Vec<&str> = (file["layers"].as_array().unwrap().iter())
        .flat_map(|layer| layer.as_array().unwrap())
        .map(|head| head.as_str().unwrap())
        .collect();
    // Two blocks keep more than one, and all are too many.
    assert!(
        !texts.is_empty() && texts.iter().all(|text| *text == "topk:8,2,1,0"),
        "{file}"
    );

    let recall = ["recall", "--checkpoint", checkpoint, "--windows", "2"];
    let choices = ["--selection", "topk:8,2,1,0", "--selection-file", &heads];
    let table = succeed(&[&recall[..], &choices, &["--json", &found]].concat());
    assert!(table.contains("every earlier byte"), "{table}");
    let rows = fs::read_to_string(&found).unwrap();
    let rows: Vec<Value> = rows
        .lines()
        .map(|row| serde_json::from_str(row).unwrap())
        .collect();
    assert_eq!(rows.len(), 3, "{rows:?}");
    // Heads that all choose alike choose as one.
    let bits = |row: usize| rows[row]["bits_per_byte"].as_f64().unwrap();
    assert!((bits(1) - bits(2)).abs() < 1e-5, "{rows:?}");
    assert_eq!(rows[1]["heads"], rows[2]["heads"]);
}

/// Bits per byte that `eval` prints.
fn bits(folder: &Folder, run: &str, more: &[&str]) -> f64 {
    let path = folder.path(run);
    let text = succeed(&[&["eval", "--checkpoint", &path], more].concat());
    let line = text
        .lines()
        .find(|line| line.contains("bits per byte over"));
    let number = line.and_then(|line| line.split(' ').next());
    number.unwrap().parse().unwrap()
}

/// Training with a choice for each head is stored and resumed bit for bit, and the file serves evaluation and prompts of a model without one.
#[test]
fn a_file_of_heads_trains_evaluates_and_reads_prompts() {
    let folder = Folder::new();
    let file = |name: &str, heads: &str| folder.file(name, heads.as_bytes());
    let heads = file(
        "heads.json",
        r#"{"layers": [["topk:8,2,1,0", "pattern"]], "recall": [[0.5, 1]], "density": [[0.7, 1]]}"#,
    );
    let all = file(
        "all.json",
        r#"{"layers": [["topk:8,ratio=1", "topk:16,ratio=1"]]}"#,
    );
    let without_pattern: Vec<&str> = (nano().into_iter())
        .filter(|word| !["--pattern", "fixed:8,2"].contains(word))
        .collect();
    let train = |name: &str, more: &[&str]| {
        let (path, data) = (folder.path(name), folder.data());
        let run = ["train", "--run", &path, "--data", &data, "--steps", "12"];
        let flags = ["--checkpoint-every", "6", "--lr", "0.01"];
        succeed(&[&run[..], &without_pattern, &flags, more].concat())
    };
    let flags = ["--selection-file", &heads, "--recall-every", "6"];
    let text = train("whole", &flags);
    for shown in [
        "attention causal,",
        "keys of 1 head chosen by topk:8,2,1,0: later bytes take part in the choice",
        "keys of 1 head chosen by the pattern",
        "step 6/12  recall 0.",
    ] {
        assert!(text.contains(shown), "{shown}: {text}");
    }
    let report = fs::read_to_string(format!("{}/report.md", folder.path("whole"))).unwrap();
    says(&report, "heads by topk:8,2,1,0 in 1, the pattern in 1");
    let rows = folder.log("whole");
    let measured = rows.iter().find(|row| row["kind"] == "selection").unwrap();
    // Of the four blocks of each row's past two at most, in one of two heads.
    let density = measured["layers"][0]["density"].as_f64().unwrap();
    assert!((density - (0.7 + 1.0) / 2.0).abs() < 1e-9, "{measured}");
    // The file is not looked at again.
    train("parts", &flags);
    fs::remove_file(&heads).unwrap();
    fs::remove_file(folder.checkpoint("parts", 12)).unwrap();
    folder.resume("parts", &[]);
    folder.assert_same_model(["parts", "whole"], 12);
    assert_eq!(folder.losses("parts"), folder.losses("whole"));

    train("dense", &["--attention", "dense"]);
    assert!(model_of(&folder.checkpoint("dense", 12)) != model_of(&folder.checkpoint("whole", 12)));
    let dense = bits(&folder, "dense", &[]);
    assert_eq!(bits(&folder, "dense", &["--selection-file", &all]), dense);
    let sparse = file(
        "sparse.json",
        r#"{"layers": [["topk:8,1,1,0", "pattern"]]}"#,
    );
    assert_ne!(
        bits(&folder, "dense", &["--selection-file", &sparse]),
        dense
    );

    let path = folder.path("dense");
    let sample = |more: &[&str]| {
        let flags = [
            "--prompt",
            "abc def ghi jkl mno",
            "--length",
            "40",
            "--temperature",
            "0",
        ];
        succeed(&[&["sample", "--checkpoint", &path], &flags[..], more].concat())
    };
    // Longer than the context, so that a part is read again.
    let text = sample(&[]);
    assert_eq!(sample(&["--selection-file", &all]), text);
    assert!(sample(&["--selection-file", &sparse]).starts_with("abc def ghi jkl mno"));

    let other = file(
        "other.json",
        r#"{"layers": [["topk:8,2,1,0", "pattern"], ["pattern", "pattern"]]}"#,
    );
    let three = file(
        "three.json",
        r#"{"layers": [["topk:8,2,1,0", "pattern", "pattern"]]}"#,
    );
    let unknown = file("unknown.json", r#"{"layers": [["topk:8,2,1,0", "some"]]}"#);
    let (layers, head_count) = (
        "--selection-file must have 1 layers, as the model, got 2",
        "--selection-file must have 2 heads in layer 0, as the model, got 3",
    );
    let new = folder.path("new");
    let run: Vec<&str> = [&["train", "--run", &new][..], &without_pattern].concat();
    for command in [
        &run[..],
        &["eval", "--checkpoint", &path],
        &["sample", "--checkpoint", &path],
        &["recall", "--checkpoint", &path],
    ] {
        for (file, message) in [(&other, layers), (&three, head_count)] {
            let got = fail(&[command, &["--selection-file", file]].concat(), 1);
            assert!(got.contains(message), "{got}");
        }
        let got = fail(&[command, &["--selection-file", &unknown]].concat(), 2);
        says(&got, "layer 0: cannot read 'some' as a selection");
        let got = fail(
            &[command, &["--selection-file", &folder.data()]].concat(),
            2,
        );
        assert!(got.contains("is not what search-selection writes"), "{got}");
        let got = fail(&[command, &["--selection-file", &heads]].concat(), 2);
        says(&got, "cannot read ");
        says(&got, "heads.json");
    }
    for command in [&run[..], &["sample", "--checkpoint", &path]] {
        let both = ["--selection-file", &all, "--selection", "moba:8,2"];
        let got = fail(&[command, &both].concat(), 2);
        assert!(got.contains("cannot be used with"), "{got}");
    }
    let cache = format!("eval --checkpoint {path} --selection-file {all} --cache all");
    let cache = words(&cache);
    let got = fail(&cache, 1);
    says(&got, "--selection-file is of windows that are read at once");
    let whole = folder.path("whole");
    let resume = format!("train --resume --run {whole} --selection-file {sparse}");
    let resume = words(&resume);
    let got = fail(&resume, 1);
    says(&got, "--resume continues the run");
    says(&got, "but --selection-file ");
    assert!(!fs::exists(&new).unwrap());
}
