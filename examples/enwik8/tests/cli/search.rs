//! The search for each head's selection of keys, and uses of its file.

use std::fs;

use crate::support::*;

/// Each head gets the sparse enough candidate with the largest recall, and the file is read back.
pub fn heads_are_searched(folder: &Folder, checkpoint: &str) {
    let (heads, found) = (folder.path("heads.json"), folder.path("found.jsonl"));
    let candidates = "--selection topk:8,ratio=1 --selection topk:8,2,1,0 --selection topk:8,1,1,0";
    let search = format!("search-selection --checkpoint {checkpoint} {candidates}");
    let told = succeed(format!("{search} --density 0.71 --out {heads}"));
    says(told, "topk:8,ratio=1");
    let file = json(&heads);
    let layers = file["layers"].as_array().unwrap().iter();
    let mut texts = layers
        .flat_map(|layer| layer.as_array().unwrap())
        .peekable();
    // Two blocks have a higher recall than one, and all blocks are not sparse enough.
    assert!(texts.peek().is_some(), "{file}");
    assert!(texts.all(|text| *text == "topk:8,2,1,0"), "{file}");

    let recall = format!("recall --checkpoint {checkpoint} --windows 2");
    let choices = format!("--selection topk:8,2,1,0 --selection-file {heads}");
    let table = succeed(format!("{recall} {choices} --json {found}"));
    says(table, "every earlier byte");
    let rows = json_lines(&folder.text("found.jsonl"));
    assert_eq!(rows.len(), 3, "{rows:?}");
    // Per-head selections that are all equal give the result of a common one.
    let bits = |row: usize| rows[row]["bits_per_byte"].as_f64().unwrap();
    assert!((bits(1) - bits(2)).abs() < 1e-5, "{rows:?}");
    assert_eq!(rows[1]["heads"], rows[2]["heads"]);
}

/// Training with per-head selections is stored and resumed bit for bit, and the file works for evaluation and prompts of a model without selections.
#[test]
fn a_file_of_heads_trains_evaluates_and_reads_prompts() {
    let folder = Folder::new();
    let file = |name: &str, layers: &str| folder.file(name, format!(r#"{{"layers": {layers}}}"#));
    let heads = file(
        "heads.json",
        r#"[["topk:8,2,1,0", "pattern"]], "recall": [[0.5, 1]], "density": [[0.7, 1]]"#,
    );
    let all = file("all.json", r#"[["topk:8,ratio=1", "topk:16,ratio=1"]]"#);
    let length = "--steps 12 --checkpoint-every 6 --lr 0.01";
    let flags = format!("{length} --selection-file {heads} --recall-every 6");
    let text = folder.assert_resumes(|run| folder.train(run, &flags), 12);
    let shown = [
        "attention causal,",
        "keys of 1 head chosen by topk:8,2,1,0: later bytes influence the choice",
        "keys of 1 head chosen by the pattern",
        "step 6/12  recall 0.",
    ];
    says_all(text, &shown);
    let report = folder.text("whole/report.md");
    says(report, "heads by topk:8,2,1,0 in 1, the pattern in 1");
    let measured = &folder.log_of("whole", "selection")[0];
    // At most two of the four blocks of each row's past, in one of two heads.
    let density = measured["layers"][0]["density"].as_f64().unwrap();
    assert!((density - (0.7 + 1.0) / 2.0).abs() < 1e-9, "{measured}");
    // The file is not needed any more.
    fs::remove_file(&heads).unwrap();
    folder.resume("whole", "--steps 13");

    folder.train("dense", &format!("{length} --attention dense"));
    assert!(model_of(&folder.checkpoint("dense", 12)) != model_of(&folder.checkpoint("whole", 12)));
    let path = folder.path("dense");
    let eval = |more: String| bits(&succeed(format!("eval --checkpoint {path} {more}")));
    let dense = eval(String::new());
    assert_eq!(eval(format!("--selection-file {all}")), dense);
    let sparse = file("sparse.json", r#"[["topk:8,1,1,0", "pattern"]]"#);
    assert_ne!(eval(format!("--selection-file {sparse}")), dense);

    // Longer than the context, so that a part is read again.
    let sample = format!(
        "sample --checkpoint {path} --prompt 'abc def ghi jkl mno' --length 40 --temperature 0"
    );
    let text = succeed(&sample);
    assert_eq!(succeed(format!("{sample} --selection-file {all}")), text);
    let chosen = succeed(format!("{sample} --selection-file {sparse}"));
    assert!(chosen.starts_with("abc def ghi jkl mno"));

    let pattern = r#"["pattern", "pattern"]"#;
    file("other.json", &format!("[{pattern}, {pattern}]"));
    file("three.json", r#"[["topk:8,2,1,0", "pattern", "pattern"]]"#);
    file("unknown.json", r#"[["topk:8,2,1,0", "some"]]"#);
    folder.data();
    let new = folder.path("new");
    let train = format!("train --run {new} {}", nano("--selection-file"));
    let sample = format!("sample --checkpoint {path} --selection-file");
    for command in [
        &train,
        &format!("eval --checkpoint {path} --selection-file"),
        &sample,
        &format!("recall --checkpoint {path} --selection-file"),
    ] {
        for row in rows(
            "
            other.json | 1 | --selection-file must have 1 layers, as the model, got 2
            three.json | 1 | --selection-file must have 2 heads in layer 0, as the model, got 3
            unknown.json | 2 | layer 0: cannot read 'some' as a selection
            data | 2 | is not what search-selection writes
            heads.json | 2 | cannot read  | heads.json
            ",
        ) {
            let line = format!("{command} {}", folder.path(row[0]));
            says_all(fail(line, row[1].parse().unwrap()), &row[2..]);
        }
    }
    for command in [&train, &sample] {
        let both = fail(format!("{command} {all} --selection moba:8,2"), 2);
        says(both, "cannot be used with");
    }
    let cache = format!("eval --checkpoint {path} --selection-file {all} --cache all");
    let message = "--selection-file is of windows that are read at once";
    says(fail(cache, 1), message);
    let whole = folder.path("whole");
    let resume = format!("train --resume --run {whole} --selection-file {sparse}");
    let message = fail(resume, 1);
    let expected = &["--resume continues the run", "but --selection-file "];
    says_all(message, expected);
    assert!(!folder.exists("new"));
}
