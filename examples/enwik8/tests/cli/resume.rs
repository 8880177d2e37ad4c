//! Runs that end early and are resumed.

use std::fs;
use std::path::Path;

use crate::support::*;

/// Runs in parts equal those in one go.
#[test]
fn a_resumed_run_equals_an_uninterrupted_one() {
    let folder = Folder::new();
    let flags = "--steps 20 --checkpoint-every 10 --eval-every 5";
    folder.assert_resumes(|run| folder.train(run, flags), 20);
    says(folder.resume("parts", ""), "nothing to do");
    // A leftover of a run that was killed while writing.
    let partial = (folder.checkpoint("parts", 25)).with_extension("ckpt.partial");
    fs::write(&partial, "half").unwrap();
    says(folder.resume("parts", "--steps 25"), "step-00000020.ckpt");
    assert!(folder.checkpoint("parts", 25).exists() && !partial.exists());
}

#[test]
fn block_sparse_weights_are_pruned_and_resume_bit_for_bit() {
    let folder = Folder::new();
    let sparse = "--ff-density 0.5 --ff-block 16 --ff-layout random --ff-prune 0.25 --ff-prune-from 3 --ff-prune-until 15 --ff-prune-every 4";
    let flags = format!("--steps 20 --checkpoint-every 10 {sparse}");
    let text = folder.assert_resumes(|run| folder.train(run, &flags), 20);
    let shown = [
        "ff        block-sparse weights: random, 50 % of the blocks of 16",
        "step 15/20  feed-forward weights keep 25.0 % of their blocks: ",
    ];
    says_all(text, &shown);
}

#[test]
fn a_choice_of_keys_is_measured_and_resumes_bit_for_bit() {
    let folder = Folder::new();
    let choice = "--selection topk:8,2,1,0 --selection-until 8 --recall-every 4";
    let flags = format!("--steps 12 --checkpoint-every 6 {choice}");
    let text = folder.assert_resumes(|run| folder.train(run, &flags), 12);
    let shown = [
        "keys chosen by topk:8,2,1,0: later bytes influence the choice",
        "step 4/12  recall 0.",
        "step 8/12  from here on layers see all that their pattern keeps",
    ];
    says_all(text, &shown);
    let measured = folder.log_of("whole", "selection");
    // At step 8 there is no selection any more.
    assert_eq!(measured.len(), 1, "{measured:?}");
    let layer = &measured[0]["layers"][0];
    // At most two of the four blocks of each row's past.
    assert_eq!(layer["density"], 0.7, "{layer}");
    let [recall, ratio] = ["recall", "ratio"].map(|name| layer[name].as_f64().unwrap());
    assert!(recall > 0.3 && recall < 1.0, "{layer}");
    assert!(ratio > 0.8 && ratio <= 1.0, "{layer}");

    let path = folder.path("whole");
    let recall = format!("recall --checkpoint {path} --windows 2 --json");
    let line = format!("{recall} --selection topk:8,ratio=1 --selection topk:8,1");
    let table = succeed(line);
    let rows = json_lines(&table);
    assert_eq!(rows.len(), 3, "{table}");
    let bits = |row: usize| rows[row]["bits_per_byte"].as_f64().unwrap();
    assert!((bits(0) - bits(1)).abs() < 1e-5, "{table}");
    assert!((bits(0) - bits(2)).abs() > 1e-5, "{table}");
    crate::search::heads_are_searched(&folder, &path);
    let line = format!("sample --checkpoint {path} --prompt 'The ' --length 4");
    let text = succeed(line);
    says(text, "The ");
    crate::checkpoints::chosen_pages_are_sampled_from(&path);
}

#[test]
fn mixed_precision_follows_f32_and_resumes_bit_for_bit() {
    let folder = Folder::new();
    let flags = "--steps 20 --checkpoint-every 10";
    let bf16 = format!("{flags} --precision bf16");
    folder.train("f32", flags);
    // The second half used the first half's moments.
    let text = folder.assert_resumes(|run| folder.train(run, &bf16), 20);
    says(text, "context 32, bf16");
    let path = folder.path("parts");
    let message = fail(format!("train --resume --run {path} --precision f32"), 1);
    says(message, "with --precision bf16, but --precision f32");
    let lengths = |run| state_of(&folder.checkpoint(run, 20)).map(|bytes| bytes.len());
    // Ids of parameters are random, so the sizes of their encodings differ slightly.
    for (bf16, f32) in lengths("whole").into_iter().zip(lengths("f32")) {
        let is_right = bf16.abs_diff(f32) * 50 < f32;
        assert!(
            is_right,
            "weights and moments are f32: {bf16} and {f32} bytes"
        );
    }
    assert_ne!(folder.losses("whole"), folder.losses("f32"));
    for (bf16, f32) in folder.losses("whole").iter().zip(folder.losses("f32")) {
        assert!((bf16.2 / f32.2 - 1.0).abs() < 5e-3, "{bf16:?} {f32:?}");
    }

    for precision in ["f32", "tf32", "bf16"] {
        let text = succeed(format!("eval --checkpoint {path} --precision {precision}"));
        says(text, "bits per byte");
    }
    let line = format!("sample --checkpoint {path} --length 5 --precision f32");
    succeed(line);
}

#[test]
fn recomputed_blocks_train_the_same_model() {
    let folder = Folder::new();
    // A single block would be the last segment, which is not recomputed.
    let train = |run: &str, flags: &str| folder.train(run, &format!("--layers 3 {flags}"));
    let losses = |run: &str| -> Vec<f64> {
        let losses = folder.losses(run).into_iter();
        let steps = losses.filter(|row| row.0 == "train");
        steps.map(|row| row.2).collect()
    };
    train("stored", "--steps 3");
    // Resuming may change the way.
    let ways = [
        "",
        "segment:2",
        "mlp",
        "block+attention",
        "segment:2+attention",
    ];
    for (index, way) in ways.into_iter().enumerate() {
        let run = format!("run-{index}");
        train(&run, &format!("--steps 2 --recompute {way}"));
        let after = match index % 2 {
            0 => "segment:2",
            _ => "block+attention",
        };
        folder.resume(&run, &format!("--steps 3 --recompute {after}"));
        assert_eq!(losses("stored"), losses(&run), "{way}");
    }
    for (way, message) in [
        ("segment:0", "segment:N with N from 1 on"),
        ("mlp+attention", "and +attention"),
    ] {
        says(fail(format!("train --recompute {way}"), 2), message);
    }
}

#[test]
#[cfg(unix)]
fn signals_write_a_checkpoint() {
    // A signal may arrive twice in a moment, at the process and at its group.
    for signals in [&["-INT"][..], &["-TERM", "-TERM"]] {
        let folder = Folder::new();
        let flags = "--steps 100000 --checkpoint-every 30 --eval-every 1000";
        let mut child = spawn(&folder.nano("run", flags));
        wait_for(&folder.checkpoint("run", 30), &mut child);
        for signal in signals {
            let mut kill = std::process::Command::new("kill");
            kill.args([signal, child.id().to_string().as_str()]);
            assert!(kill.status().unwrap().success());
        }
        assert_eq!(child.wait().unwrap().code(), Some(130));
        let step = folder.losses("run").last().unwrap().1 as usize;
        assert!(folder.checkpoint("run", step).exists(), "no step is lost");
    }
}

/// Returns the checkpoints of a run.
fn checkpoints(run: &str) -> impl Iterator<Item = std::path::PathBuf> {
    let is_one = |path: &std::path::PathBuf| path.extension().is_some_and(|end| end == "ckpt");
    files(Path::new(run)).into_iter().filter(is_one)
}

#[test]
fn damaged_checkpoints_are_noticed_and_the_previous_one_is_used() {
    let folder = Folder::new();
    folder.train("run", "--steps 20 --checkpoint-every 10 --eval-every 100");
    let newest = folder.checkpoint("run", 20);
    let good = fs::read(&newest).unwrap();
    let reference = folder.file("good", &good);
    let path = newest.to_str().unwrap();
    let run = folder.path("run");

    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 0x10;
    for (bad, word) in [
        (flipped.as_slice(), "corrupted"),
        (&good[..good.len() - 7], "truncated"),
    ] {
        fs::write(&newest, bad).unwrap();
        for command in ["eval", "sample"] {
            let message = fail(format!("{command} --checkpoint {path}"), 1);
            says_all(message, &[word, path]);
        }
        let [_, warning] = succeed_and_tell(format!("train --resume --run {run}"));
        says_all(warning, &[word, "falling back"]);
        assert_same_model(&newest, Path::new(&reference));
    }

    for path in checkpoints(&run) {
        fs::write(path, b"garbage").unwrap();
    }
    let message = fail(format!("train --resume --run {run}"), 1);
    says(message, "no usable checkpoint");
}

#[test]
fn runs_are_never_overwritten_unasked() {
    let folder = Folder::new();
    folder.train("run", "--steps 2");
    let before = model_of(&folder.checkpoint("run", 2));
    let train = folder.nano("run", "--steps 3");
    says_all(fail(&train, 1), &["--resume", "--overwrite"]);
    assert!(model_of(&folder.checkpoint("run", 2)) == before);
    let mine = folder.file("run/mine.txt", "kept");
    succeed(format!("{train} --overwrite"));
    assert!(Path::new(&mine).exists(), "other files stay");
    assert!(!folder.checkpoint("run", 2).exists() && folder.checkpoint("run", 3).exists());
}

#[test]
fn resume_says_what_is_wrong() {
    let folder = Folder::new();
    let (none, run) = (folder.path("none"), folder.path("run"));
    let resume = |run: &str| format!("train --resume --run {run}");
    says(fail(resume(&none), 1), "nothing to resume");

    folder.train("run", "--steps 2");
    let message = fail(format!("{} --layers 3", resume(&run)), 1);
    says_all(message, &["layers 1", "layers 3"]);
    let other = folder.file("other", [b'z'; 4_000]);
    let message = fail(format!("{} --data {other}", resume(&run)), 1);
    says(message, "data are not those of the run");

    for path in checkpoints(&run) {
        fs::remove_file(path).unwrap();
    }
    says(fail(resume(&run), 1), "no checkpoint yet");
}

/// Returns the lines of a log without times, which differ between runs.
fn timeless(folder: &Folder, run: &str) -> Vec<String> {
    let without_times = |mut row: serde_json::Value| {
        let fields = row.as_object_mut().unwrap();
        fields.retain(|name, _| name != "ms" && name != "tokens_per_s");
        row.to_string()
    };
    folder.log(run).into_iter().map(without_times).collect()
}

/// The process may end between its last checkpoint and the evaluation of the whole validation split, or while it writes that line.
#[test]
fn a_run_killed_before_its_final_evaluation_is_finished() {
    let folder = Folder::new();
    folder.train("run", "--steps 4");
    let whole = folder.text("run/log.jsonl");
    let (before, last) = whole.trim_end().rsplit_once('\n').unwrap();
    says(last, "\"final\"");
    for left in [format!("{before}\n"), format!("{before}\n{}", &last[..30])] {
        folder.file("run/log.jsonl", left);
        fs::remove_file(folder.path("run/loss.png")).unwrap();
        says(folder.resume("run", ""), "whole validation split");
        assert_eq!(folder.text("run/log.jsonl"), whole);
        assert!(folder.exists("run/loss.png"));
    }
    says(folder.resume("run", ""), "nothing to do");
}

/// A run that is declared complete where it was stopped gets the validation of a last step.
#[test]
fn a_run_may_end_where_it_was_stopped() {
    let folder = Folder::new();
    folder.train("run", "--steps 20 --checkpoint-every 10 --eval-every 1000");
    fs::remove_file(folder.checkpoint("run", 20)).unwrap();
    folder.resume("run", "--steps 10");
    let kinds: Vec<_> = folder.losses("run").into_iter().skip(9).collect();
    let kinds: Vec<_> = kinds.iter().map(|row| (row.0.as_str(), row.1)).collect();
    assert_eq!(kinds, [("train", 10), ("validation", 10), ("final", 10)]);
}

/// Every step ends with a checkpoint, a validation or both, so the process often dies in one of them.
#[test]
fn a_run_killed_at_any_moment_loses_nothing() {
    let folder = Folder::new();
    let flags = "--steps 60 --checkpoint-every 2 --eval-every 3";
    folder.train("whole", flags);
    let mut command = folder.nano("killed", flags);
    let mut kills = 0;
    for moment in 0..12 {
        let mut child = spawn(&command);
        if moment == 0 {
            wait_for(&folder.checkpoint("killed", 2), &mut child);
        }
        std::thread::sleep(std::time::Duration::from_millis(150 + 37 * moment));
        kills += usize::from(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        command = format!("train --resume --run {}", folder.path("killed"));
    }
    assert!(kills > 0, "the run was never killed");
    folder.resume("killed", "");
    folder.assert_same_model(["killed", "whole"], 60);
    assert_eq!(timeless(&folder, "killed"), timeless(&folder, "whole"));
    for file in files(Path::new(&folder.path("killed"))) {
        let name = file.file_name().unwrap().to_str().unwrap();
        assert!(!name.contains("partial"), "{name}");
    }
}

/// JSON has no such number, so the line would be lost.
#[test]
fn a_validation_that_is_not_finite_is_an_error() {
    let folder = Folder::new();
    let message = fail(folder.nano("run", "--steps 1 --lr 1e300"), 1);
    says(message, "validation loss is no longer finite");
}
