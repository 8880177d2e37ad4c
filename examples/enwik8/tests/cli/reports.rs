//! What a run leaves for people and for TensorBoard.

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::*;

/// The event files of a run, in TensorBoard's order.
fn event_files(folder: &Folder, run: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder.path(run)).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.to_str().unwrap().contains("tfevents"));
    files.sort();
    files
}

/// The steps of a file's events that have a tag, in order: lengths, and the second field of each event.
fn steps_with(path: &Path, tag: &str) -> Vec<u64> {
    let bytes = fs::read(path).unwrap();
    let (mut at, mut steps) = (0, Vec::new());
    while at < bytes.len() {
        let length = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        let event = &bytes[at + 12..at + 12 + length];
        at += 12 + length + 4;
        if event.windows(tag.len()).any(|part| part == tag.as_bytes()) {
            assert_eq!(event[9], 2 << 3);
            let low = u64::from(event[10] & 0x7f);
            let high = if event[10] < 0x80 { 0 } else { event[11] };
            steps.push(low + (u64::from(high) << 7));
        }
    }
    assert_eq!(at, bytes.len());
    steps
}

#[test]
fn tensorboard_has_each_step_once_after_a_resume() {
    let folder = Folder::new();
    let flags = ["--checkpoint-every", "8", "--eval-every", "4"];
    folder.train(
        "run",
        &[&["--steps", "16", "--tensorboard"], &flags[..]].concat(),
    );
    let [first] = &event_files(&folder, "run")[..] else {
        panic!("one event file");
    };
    let to = |last: u64| (1..=last).collect::<Vec<_>>();
    assert_eq!(steps_with(first, "bits_per_byte/train"), to(16));
    assert_eq!(steps_with(first, "grad_norm"), to(16));
    assert_eq!(
        steps_with(first, "bits_per_byte/validation"),
        [4, 8, 12, 16]
    );
    assert_eq!(steps_with(first, "bits_per_byte/final"), [16]);

    // As if it was killed between the two checkpoints, in the middle of a record.
    fs::remove_file(folder.checkpoint("run", 16)).unwrap();
    let mut bytes = fs::read(first).unwrap();
    bytes.truncate(bytes.len() - 7);
    fs::write(first, bytes).unwrap();
    let text = folder.resume("run", &["--steps", "12", "--tensorboard"]);
    assert!(text.contains("step-00000008.ckpt"), "{text}");
    let all = |tag: &str| -> Vec<u64> {
        let files = event_files(&folder, "run");
        assert_eq!(files.len(), 2);
        files
            .iter()
            .flat_map(|file| steps_with(file, tag))
            .collect()
    };
    assert_eq!(all("bits_per_byte/train"), to(12));
    assert_eq!(all("bits_per_byte/validation"), [4, 8, 12]);
    assert_eq!(all("bits_per_byte/final"), [12]);
    if cfg!(target_os = "linux") {
        assert!(all("memory/process_peak_mib").contains(&12));
    }

    // A run without event files that gets them later has its whole past in them.
    for file in event_files(&folder, "run") {
        fs::remove_file(file).unwrap();
    }
    folder.resume("run", &["--steps", "13", "--tensorboard"]);
    let [only] = &event_files(&folder, "run")[..] else {
        panic!("one event file");
    };
    assert_eq!(steps_with(only, "bits_per_byte/train"), to(13));
}

#[test]
fn a_run_ends_with_a_report_and_old_runs_get_one() {
    let folder = Folder::new();
    let text = folder.train(
        "run",
        &["--steps", "6", "--eval-every", "2", "--peak-tflops", "0.5"],
    );
    let run = folder.path("run");
    let file = |name: &str| Path::new(&run).join(name);
    assert!(text.contains(file("report.md").to_str().unwrap()), "{text}");
    let report = fs::read_to_string(file("report.md")).unwrap();
    for part in [
        "| best validation | ",
        "| whole validation split | ",
        "| length | 6 steps, 384 bytes |",
        "| order-0 entropy of the data | ",
        " % of 0.5 |",
        "![bits per byte over steps](loss.png)",
        "![bits per byte over time](loss-by-time.png)",
        "| 6 | ",
        "the model writes",
    ] {
        assert!(report.contains(part), "{part}: {report}");
    }
    for picture in ["loss.png", "loss-by-time.png"] {
        assert!(fs::read(file(picture)).unwrap().starts_with(b"\x89PNG"));
    }

    // As an older version left it, and with its data gone.
    for name in ["report.md", "loss-by-time.png", "resources.json"] {
        fs::remove_file(file(name)).unwrap();
    }
    fs::remove_file(folder.path("data")).unwrap();
    let output = enwik8().args(["report", "--run", &run]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let warning = String::from_utf8(output.stderr).unwrap();
    says(&warning, "prompts and the entropy of the data are left out");
    let report = fs::read_to_string(file("report.md")).unwrap();
    assert!(
        report.contains("the model writes") && !report.contains("order-0"),
        "{report}"
    );
    assert!(!report.contains("peak memory") && file("loss-by-time.png").exists());

    let message = fail(&["report", "--run", &folder.path("none")], 1);
    assert!(
        message.contains("/none: there is no checkpoint"),
        "{message}"
    );
}
