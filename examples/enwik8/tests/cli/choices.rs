//! Content-based selection of keys within a pattern, and its reports.

use std::fs;

use crate::support::*;

/// Blocks are selected among those of the pattern; training stores the selection and resumes bit for bit, and every command knows it.
#[test]
fn choices_within_a_pattern_train_and_resume_bit_for_bit() {
    let folder = Folder::new();
    // A window of three blocks of 8, of which each row of blocks selects two: its own and one more.
    let (pattern, choice) = ("--pattern local:16", "--selection topk:8,2,1,0");
    let length = "--steps 12 --lr 0.01";
    let flags = format!("{pattern} {choice} {length} --checkpoint-every 6 --recall-every 4");
    let text = folder.assert_resumes(|run| folder.train(run, &flags), 12);
    let expected = &["attention local(16),", "keys chosen by topk:8,2,1,0"];
    says_all(text, expected);

    // The model differs from those with either alone.
    let whole = model_of(&folder.checkpoint("whole", 12));
    for (run, flag) in [("pattern", pattern), ("choice", choice)] {
        folder.train(run, &format!("{length} {flag}"));
        assert!(model_of(&folder.checkpoint(run, 12)) != whole, "{run}");
    }

    let measured = folder.log_of("whole", "selection");
    assert_eq!(measured.len(), 3, "{measured:?}");
    // Rows of blocks see 1, 2, 3 and 3 blocks, and select 1, 2, 2 and 2.
    for row in &measured {
        let density = row["layers"][0]["density"].as_f64().unwrap();
        assert!((density - 7.0 / 9.0).abs() < 1e-9, "{row}");
    }
    let shown = [
        "`topk:8,2,1,0 within local:16`",
        "![recall by layer over steps](recall.png)",
        "| after step 12 | recall | ratio to the best choice | density |",
        "| layer 0 | 0.",
        " | 0.7778 |",
        "| mean | 0.",
    ];
    says_all(folder.text("whole/report.md"), &shown);
    let picture = folder.path("whole/recall.png");
    assert_png(&picture);
    // This run measured nothing.
    let report = folder.text("choice/report.md");
    assert!(!report.contains("Choice of keys"), "{report}");
    assert!(!folder.exists("choice/recall.png"));
    // It is redrawn from the log, and an overwritten run has none.
    fs::remove_file(&picture).unwrap();
    let path = folder.path("whole");
    succeed(format!("report --run {path}"));
    assert_png(&picture);

    let recall = format!("recall --checkpoint {path} --windows 2 --selection");
    let table = succeed(format!("{recall} topk:8,ratio=1 --selection topk:8,1"));
    let lines = table.lines().map(|line| line.split_whitespace().collect());
    let lines: Vec<Vec<&str>> = lines.collect();
    let row = |name: &str| {
        let found = lines.iter().find(|words| words.first() == Some(&name));
        found.unwrap_or_else(|| panic!("{name}: {table}")).clone()
    };
    assert_eq!(row("local:16")[1], row("topk:8,ratio=1")[1], "{table}");
    assert_eq!(row("topk:8,ratio=1")[2..], ["1.0000"; 3], "{table}");
    let message = fail(format!("{recall} moba:8,2"), 1);
    says(message, "must be the dense causal pattern, or dense");
    let text = succeed(format!("sample --checkpoint {path} --length 4"));
    says(text, "The ");

    folder.train("overwritten", &flags);
    folder.train("overwritten", &format!("--overwrite --steps 2 {pattern}"));
    assert!(!folder.exists("overwritten/recall.png"));
}
