//! The search for each head's choice of keys.

use std::fs;

use serde_json::Value;

use crate::support::*;

/// Each head gets the candidate with the largest recall, of those that are sparse enough, and the file is read again.
pub fn heads_are_searched(folder: &Folder, checkpoint: &str) {
    let (heads, found) = (folder.path("heads.json"), folder.path("found.jsonl"));
    let candidates = [
        "--selection",
        "topk:8,ratio=1",
        "--selection",
        "topk:8,2,1,0",
    ];
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
