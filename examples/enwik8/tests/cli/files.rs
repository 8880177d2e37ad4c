//! Files that are written: their modes, and errors that name them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::*;

/// All files below a folder.
#[cfg(unix)]
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(files(&path)),
            false => found.push(path),
        }
    }
    found
}

/// Whatever writes a file: it has the mode that the umask gives.
#[cfg(unix)]
#[test]
fn every_file_has_the_mode_of_the_umask() {
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    let folder = Folder::new();
    let out = folder.path("out");
    fs::create_dir(&out).unwrap();
    let path = |name: &str| format!("{out}/{name}");
    let run = |arguments: &[&str]| {
        let program = env!("CARGO_BIN_EXE_enwik8");
        let output = Command::new("sh")
            .args(["-c", "umask 027; exec \"$0\" \"$@\"", program])
            .args(arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    };
    let (data, run_folder) = (folder.data(), path("run"));
    let train = ["train", "--run", &run_folder, "--data", &data];
    let short = ["--steps", "2", "--tensorboard", "--attention", "dense"];
    let model: Vec<&str> = (nano().into_iter())
        .filter(|word| !["--pattern", "fixed:8,2"].contains(word))
        .collect();
    run(&[&train[..], &short, &model].concat());
    let of_run = ["--checkpoint", &run_folder];
    for format in ["burnpack", "safetensors"] {
        let exported = path(format);
        let export = ["export", "--out", &exported, "--format", format];
        run(&[&export[..], &of_run].concat());
    }
    run(&["draw", "--out", &path("pattern.png")]);
    run(&["draw", "--out", &path("pattern.svg")]);
    let [sample, json] = ["sample.bin", "sample.json"].map(path);
    let flags = format!("sample --length 5 --output {sample} --json {json}");
    let flags = words(&flags);
    run(&[&flags[..], &of_run].concat());
    let heads = path("heads.json");
    let flags = format!("search-selection --selection topk:8,2 --out {heads}");
    let flags = words(&flags);
    run(&[&flags[..], &of_run].concat());
    let recall = path("recall.jsonl");
    let flags = ["recall", "--selection", "topk:8,2", "--json", &recall];
    run(&[&flags[..], &["--windows", "2"], &of_run].concat());
    let imported = path("imported");
    let weights = path("safetensors/model.safetensors");
    run(&words(&format!(
        "import --weights {weights} --like {run_folder} --run {imported}"
    )));
    let written = files(Path::new(&out));
    assert!(written.len() > 15, "{written:?}");
    for file in written {
        let mode = fs::metadata(&file).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o640, "{}: {mode:o}", file.display());
    }
}

/// A full disk, whichever file it is that does not fit.
#[cfg(target_os = "linux")]
#[test]
fn a_file_that_cannot_be_written_is_named() {
    let folder = Folder::new();
    folder.train("run", &["--steps", "2"]);
    let run = folder.path("run");
    let full = |name: &str| {
        let path = folder.path(name);
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        path
    };
    let of_run = ["--checkpoint", &run];
    let sample = ["sample", "--length", "5"];
    let [bytes, json, lines, heads, png, svg] =
        ["a.bin", "a.json", "a.jsonl", "b.json", "a.png", "a.svg"].map(full);
    let choice = ["--selection", "topk:8,2"];
    for (arguments, path) in [
        (
            [&sample[..], &["--output", &bytes], &of_run].concat(),
            &bytes,
        ),
        ([&sample[..], &["--json", &json], &of_run].concat(), &json),
        (
            [&["recall", "--json", &lines][..], &choice, &of_run].concat(),
            &lines,
        ),
        (
            [&["search-selection", "--out", &heads][..], &choice, &of_run].concat(),
            &heads,
        ),
        (vec!["draw", "--out", &png], &png),
        (vec!["draw", "--out", &svg], &svg),
        (
            [
                &["bench", "--iterations", "1", "--json", &json][..],
                &nano(),
            ]
            .concat(),
            &json,
        ),
    ] {
        let output = crate::support::run(&arguments);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {message}");
        assert!(message.contains(path.as_str()), "{arguments:?}: {message}");
    }
}

/// Damaged weights are an error of whatever measures them, and not a number to print.
#[test]
fn weights_that_are_no_numbers_are_refused() {
    let folder = Folder::new();
    let dense = ["--steps", "2", "--attention", "dense"];
    let (data, run) = (folder.data(), folder.path("run"));
    let model: Vec<&str> = (nano().into_iter())
        .filter(|word| !["--pattern", "fixed:8,2"].contains(word))
        .collect();
    succeed(
        &[
            &["train", "--run", &run, "--data", &data][..],
            &dense,
            &model,
        ]
        .concat(),
    );
    let exported = folder.path("exported");
    let export = ["export", "--out", &exported, "--format", "safetensors"];
    succeed(&[&export[..], &["--checkpoint", &run]].concat());
    let weights = format!("{exported}/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for number in bytes[8 + header..].chunks_exact_mut(4) {
        number.copy_from_slice(&f32::NAN.to_le_bytes());
    }
    fs::write(&weights, bytes).unwrap();
    let damaged = folder.path("damaged");
    succeed(&words(&format!(
        "import --weights {weights} --like {run} --run {damaged}"
    )));
    let of_run = ["--checkpoint", &damaged];
    for arguments in [
        &["eval"][..],
        &["eval", "--windows", "2"],
        &["eval", "--cache", "all"],
        &["recall", "--selection", "topk:8,2"],
    ] {
        let message = fail(&[arguments, &of_run].concat(), 1);
        let is_named = message.contains("is not finite, got NaN") && message.contains("damaged");
        assert!(is_named, "{arguments:?}: {message}");
    }
    let message = fail(&[&["sample"][..], &of_run].concat(), 1);
    assert!(message.contains("not finite"), "{message}");
}
