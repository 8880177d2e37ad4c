//! Reports of a run, for people and for TensorBoard.

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::*;

/// Returns the event files of a run, in TensorBoard's order.
fn event_files(folder: &Folder, run: &str) -> Vec<PathBuf> {
    let mut files = files(Path::new(&folder.path(run)));
    files.retain(|path| path.to_str().unwrap().contains("tfevents"));
    files.sort();
    files
}

/// Returns the steps of a file's events with a tag, in order, parsed from record lengths and the second field of each event.
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
    let flags = "--checkpoint-every 8 --eval-every 4";
    folder.train("run", &format!("--steps 16 --tensorboard {flags}"));
    let [first] = &event_files(&folder, "run")[..] else {
        panic!("one event file");
    };
    let to = |last: u64| (1..=last).collect::<Vec<_>>();
    assert_eq!(steps_with(first, "bits_per_byte/train"), to(16));
    assert_eq!(steps_with(first, "grad_norm"), to(16));
    let validations = steps_with(first, "bits_per_byte/validation");
    assert_eq!(validations, [4, 8, 12, 16]);
    assert_eq!(steps_with(first, "bits_per_byte/final"), [16]);

    // As if killed between the two checkpoints, in the middle of a record.
    fs::remove_file(folder.checkpoint("run", 16)).unwrap();
    let mut bytes = fs::read(first).unwrap();
    bytes.truncate(bytes.len() - 7);
    fs::write(first, bytes).unwrap();
    let text = folder.resume("run", "--steps 12 --tensorboard");
    says(text, "step-00000008.ckpt");
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

    // A run without event files that gets them later has its whole history in them.
    for file in event_files(&folder, "run") {
        fs::remove_file(file).unwrap();
    }
    folder.resume("run", "--steps 13 --tensorboard");
    let [only] = &event_files(&folder, "run")[..] else {
        panic!("one event file");
    };
    assert_eq!(steps_with(only, "bits_per_byte/train"), to(13));
}

#[test]
fn a_run_ends_with_a_report_and_old_runs_get_one() {
    let folder = Folder::new();
    let text = folder.train("run", "--steps 6 --eval-every 2 --peak-tflops 0.5");
    says(text, &folder.path("run/report.md"));
    let parts = [
        "| best validation | ",
        "| whole validation split | ",
        "| length | 6 steps, 384 bytes |",
        "| order-0 entropy of the data | ",
        " % of 0.5 |",
        "![bits per byte over steps](loss.png)",
        "![bits per byte over time](loss-by-time.png)",
        "| 6 | ",
        "the model writes",
    ];
    says_all(folder.text("run/report.md"), &parts);
    for picture in ["run/loss.png", "run/loss-by-time.png"] {
        assert_png(&folder.path(picture));
    }

    // Like a folder from an older version, and without its data.
    for name in ["report.md", "loss-by-time.png", "resources.json"] {
        fs::remove_file(folder.path(&format!("run/{name}"))).unwrap();
    }
    fs::remove_file(folder.path("data")).unwrap();
    let run = folder.path("run");
    let [_, warning] = succeed_and_tell(format!("report --run {run}"));
    says(warning, "prompts and the entropy of the data are left out");
    let report = folder.text("run/report.md");
    says(&report, "the model writes");
    let is_right = !report.contains("order-0") && !report.contains("peak memory");
    assert!(is_right, "{report}");
    assert!(folder.exists("run/loss-by-time.png"));

    let message = fail(format!("report --run {}", folder.path("none")), 1);
    says(message, "/none: there is no checkpoint");
}
