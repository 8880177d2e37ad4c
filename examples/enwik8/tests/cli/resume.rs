//! Runs that end early and go on.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::*;

#[test]
fn a_resumed_run_equals_an_uninterrupted_one() {
    let folder = Folder::new();
    let flags = words("--steps 20 --checkpoint-every 10 --eval-every 5");
    folder.train("whole", &flags);
    folder.train("parts", &flags);
    // What a run leaves that was stopped after step 10, and killed while it was writing something.
    fs::remove_file(folder.checkpoint("parts", 20)).unwrap();
    fs::write(
        folder
            .checkpoint("parts", 20)
            .with_extension("ckpt.partial"),
        "half",
    )
    .unwrap();
    let text = folder.resume("parts", &[]);
    assert!(text.contains("step-00000010.ckpt"), "{text}");
    folder.assert_same_model(["parts", "whole"], 20);
    assert!(
        !folder
            .checkpoint("parts", 20)
            .with_extension("ckpt.partial")
            .exists()
    );

    assert_eq!(
        folder.losses("parts"),
        folder.losses("whole"),
        "the log has each step once, with the same loss"
    );

    let again = folder.resume("parts", &[]);
    assert!(again.contains("nothing to do"), "{again}");
    let longer = folder.resume("parts", &["--steps", "25"]);
    assert!(
        longer.contains("step-00000020.ckpt") && folder.checkpoint("parts", 25).exists(),
        "{longer}"
    );
}

#[test]
fn block_sparse_weights_are_shown_and_resume_bit_for_bit() {
    let shown = "ff        block-sparse weights: random, 50 % of the blocks of 16";
    weights_resume_bit_for_bit(&[], shown);
}

#[test]
fn pruned_weights_resume_bit_for_bit() {
    let pruning = words("--ff-prune 0.25 --ff-prune-from 3 --ff-prune-until 15 --ff-prune-every 4");
    let shown = "step 15/20  feed-forward weights keep 25.0 % of their blocks: ";
    weights_resume_bit_for_bit(&pruning, shown);
}

#[test]
fn a_choice_of_keys_is_measured_and_resumes_bit_for_bit() {
    let folder = Folder::new();
    let without_pattern: Vec<&str> = (nano().into_iter())
        .filter(|word| !["--pattern", "fixed:8,2"].contains(word))
        .collect();
    let flags = words(
        "--steps 12 --checkpoint-every 6 --selection topk:8,2,1,0 --selection-until 8 \
         --recall-every 4",
    );
    let train = |name: &str| {
        let (path, data) = (folder.path(name), folder.data());
        let run = ["train", "--run", &path, "--data", &data];
        succeed(&[&run[..], &without_pattern, &flags].concat())
    };
    let text = train("whole");
    for shown in [
        "keys chosen by topk:8,2,1,0: later bytes take part in the choice",
        "step 4/12  recall 0.",
        "step 8/12  from here on layers see all that their pattern keeps",
    ] {
        assert!(text.contains(shown), "{shown}: {text}");
    }
    let measured: Vec<Value> = (folder.log("whole").into_iter())
        .filter(|row| row["kind"] == "selection")
        .collect();
    // At step 8 there is no choice any more.
    assert_eq!(measured.len(), 1, "{measured:?}");
    let layer = &measured[0]["layers"][0];
    // Of the four blocks of each row's past, two at most.
    assert_eq!(layer["density"], 0.7, "{layer}");
    let (recall, ratio) = (
        layer["recall"].as_f64().unwrap(),
        layer["ratio"].as_f64().unwrap(),
    );
    assert!(
        recall > 0.3 && recall < 1.0 && ratio > 0.8 && ratio <= 1.0,
        "{layer}"
    );

    train("parts");
    fs::remove_file(folder.checkpoint("parts", 12)).unwrap();
    folder.resume("parts", &[]);
    folder.assert_same_model(["parts", "whole"], 12);
    assert_eq!(folder.losses("parts"), folder.losses("whole"));

    let path = folder.path("whole");
    let table = succeed(&words(&format!(
        "recall --checkpoint {path} --windows 2 --json --selection topk:8,ratio=1 --selection \
         topk:8,1"
    )));
    let rows: Vec<Value> = table
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(rows.len(), 3, "{table}");
    let bits = |row: usize| rows[row]["bits_per_byte"].as_f64().unwrap();
    assert!((bits(0) - bits(1)).abs() < 1e-5, "{table}");
    assert!((bits(0) - bits(2)).abs() > 1e-5, "{table}");
    crate::search::heads_are_searched(&folder, &path);
    let text = succeed(&[
        "sample",
        "--checkpoint",
        &path,
        "--prompt",
        "The ",
        "--length",
        "4",
    ]);
    assert!(text.contains("The "), "{text}");
    crate::checkpoints::chosen_pages_are_sampled_from(&path);
}

fn weights_resume_bit_for_bit(pruning: &[&str], shown: &str) {
    let folder = Folder::new();
    let length = ["--steps", "20", "--checkpoint-every", "10"];
    let sparse = words("--ff-density 0.5 --ff-block 16 --ff-layout random");
    let flags = [&length[..], &sparse, pruning].concat();
    let text = folder.train("whole", &flags);
    assert!(text.contains(shown), "{text}");
    folder.train("parts", &flags);
    fs::remove_file(folder.checkpoint("parts", 20)).unwrap();
    let path = folder.path("parts");
    let arguments = ["train", "--resume", "--run", &path, "--ff-density", "0.25"];
    let message = fail(&arguments, 1);
    assert!(message.contains("but --ff-density makes that"), "{message}");
    folder.resume("parts", &[]);
    folder.assert_same_model(["parts", "whole"], 20);
    assert_eq!(folder.losses("parts"), folder.losses("whole"));
}

#[test]
fn mixed_precision_follows_f32_and_resumes_bit_for_bit() {
    let folder = Folder::new();
    let flags = ["--steps", "20", "--checkpoint-every", "10"];
    let bf16 = [&flags[..], &["--precision", "bf16"]].concat();
    folder.train("f32", &flags);
    let text = folder.train("whole", &bf16);
    assert!(text.contains("context 32, bf16"), "{text}");
    folder.train("parts", &bf16);
    fs::remove_file(folder.checkpoint("parts", 20)).unwrap();
    let path = folder.path("parts");
    let message = fail(
        &["train", "--resume", "--run", &path, "--precision", "f32"],
        1,
    );
    says(&message, "with --precision bf16, but --precision f32");
    folder.resume("parts", &[]);

    // The second half used the first half's moments.
    folder.assert_same_model(["parts", "whole"], 20);
    assert_eq!(folder.losses("parts"), folder.losses("whole"));
    let lengths = |run| state_of(&folder.checkpoint(run, 20)).map(|bytes| bytes.len());
    // Ids of parameters are random, and so is what they take: a little.
    for (bf16, f32) in lengths("whole").into_iter().zip(lengths("f32")) {
        assert!(
            bf16.abs_diff(f32) * 50 < f32,
            "weights and moments are f32: {bf16} and {f32} bytes"
        );
    }
    assert_ne!(folder.losses("whole"), folder.losses("f32"));
    for (bf16, f32) in folder.losses("whole").iter().zip(folder.losses("f32")) {
        assert!((bf16.2 / f32.2 - 1.0).abs() < 5e-3, "{bf16:?} {f32:?}");
    }

    let eval = |precision| succeed(&["eval", "--checkpoint", &path, "--precision", precision]);
    for precision in ["f32", "tf32", "bf16"] {
        assert!(eval(precision).contains("bits per byte"));
    }
    succeed(&words(&format!(
        "sample --checkpoint {path} --length 5 --precision f32"
    )));
}

#[test]
fn recomputed_blocks_train_the_same_model() {
    let folder = Folder::new();
    // One block would be the last segment, which runs once.
    let train = |run: &str, flags: &[&str]| {
        let mut arguments = folder.nano(run, flags);
        let layers = arguments.iter().position(|flag| flag == "--layers");
        arguments[layers.unwrap() + 1] = "3".to_owned();
        succeed(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    };
    let steps = |run: &str| -> Vec<f64> {
        let losses = folder.losses(run).into_iter();
        let steps = losses.filter(|row| row.0 == "train");
        steps.map(|row| row.2).collect()
    };
    train("stored", &["--steps", "3"]);
    // The old way of saying it, and each new one; resuming may change it.
    let ways = [
        "",
        "true",
        "block",
        "segment:2",
        "mlp",
        "none",
        "false",
        "block+attention",
        "segment:2+attention",
    ];
    for (index, way) in ways.into_iter().enumerate() {
        let run = format!("run-{index}");
        let mut flags = vec!["--steps", "2", "--recompute"];
        flags.extend([way].into_iter().filter(|way| !way.is_empty()));
        train(&run, &flags);
        let after = match index % 2 {
            0 => "segment:2",
            _ => "block+attention",
        };
        folder.resume(&run, &["--steps", "3", "--recompute", after]);
        assert_eq!(steps("stored"), steps(&run), "{way}");
    }
    let message = fail(&["train", "--recompute", "segment:0"], 2);
    assert!(message.contains("segment:N with N from 1 on"), "{message}");
    let message = fail(&["train", "--recompute", "mlp+attention"], 2);
    assert!(message.contains("and +attention"), "{message}");
}

#[test]
fn a_killed_run_resumes_to_the_same_model() {
    let folder = Folder::new();
    let flags = words("--steps 300 --checkpoint-every 20 --eval-every 1000");
    folder.train("whole", &flags);
    let mut child = enwik8()
        .args(folder.nano("killed", &flags))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_for(&folder.checkpoint("killed", 40), &mut child);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(
        !folder.checkpoint("killed", 300).exists(),
        "the run was killed too late to show anything"
    );
    folder.resume("killed", &[]);
    folder.assert_same_model(["killed", "whole"], 300);
}

#[test]
#[cfg(unix)]
fn signals_write_a_checkpoint() {
    // One that others send may come twice in a moment, to the process and to its group.
    for (run, signals) in [("int", &["-INT"][..]), ("term", &["-TERM", "-TERM"])] {
        stopped_by(run, signals);
    }
}

#[cfg(unix)]
fn stopped_by(run: &str, signals: &[&str]) {
    let folder = Folder::new();
    let flags = words("--steps 100000 --checkpoint-every 30 --eval-every 1000");
    let mut child = enwik8()
        .args(folder.nano(run, &flags))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_for(&folder.checkpoint(run, 30), &mut child);
    for signal in signals {
        let signalled = Command::new("kill")
            .args([signal, child.id().to_string().as_str()])
            .status()
            .unwrap();
        assert!(signalled.success());
    }
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let step = folder.losses(run).last().unwrap().1 as usize;
    assert!(folder.checkpoint(run, step).exists(), "no step is lost");
}

#[test]
fn damaged_checkpoints_are_noticed_and_the_previous_one_is_used() {
    let folder = Folder::new();
    folder.train(
        "run",
        &words("--steps 20 --checkpoint-every 10 --eval-every 100"),
    );
    let newest = folder.checkpoint("run", 20);
    let good = fs::read(&newest).unwrap();
    let reference = folder.file("good", &good);
    let path = newest.to_str().unwrap();

    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 0x10;
    for (bad, word) in [
        (flipped.as_slice(), "corrupted"),
        (&good[..good.len() - 7], "truncated"),
    ] {
        fs::write(&newest, bad).unwrap();
        for command in ["eval", "sample"] {
            let message = fail(&[command, "--checkpoint", path], 1);
            says(&message, word);
            says(&message, path);
        }
        let output = run(&["train", "--resume", "--run", &folder.path("run")]);
        let warning = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{warning}");
        says(&warning, word);
        says(&warning, "falling back");
        assert_same_model(&newest, Path::new(&reference));
    }

    for entry in fs::read_dir(folder.path("run")).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "ckpt")
        {
            fs::write(path, b"garbage").unwrap();
        }
    }
    let message = fail(&["train", "--resume", "--run", &folder.path("run")], 1);
    assert!(message.contains("no usable checkpoint"), "{message}");
}

#[test]
fn runs_are_never_overwritten_unasked() {
    let folder = Folder::new();
    folder.train("run", &["--steps", "2"]);
    let before = model_of(&folder.checkpoint("run", 2));
    let arguments = folder.nano("run", &["--steps", "3"]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let message = fail(&arguments, 1);
    says(&message, "--resume");
    says(&message, "--overwrite");
    assert!(model_of(&folder.checkpoint("run", 2)) == before);
    succeed(&[&arguments[..], &["--overwrite"]].concat());
    assert!(!folder.checkpoint("run", 2).exists() && folder.checkpoint("run", 3).exists());
}

#[test]
fn resume_says_what_is_wrong() {
    let folder = Folder::new();
    let message = fail(&["train", "--resume", "--run", &folder.path("none")], 1);
    assert!(message.contains("nothing to resume"), "{message}");

    folder.train("run", &["--steps", "2"]);
    let run = folder.path("run");
    let message = fail(&["train", "--resume", "--run", &run, "--layers", "3"], 1);
    says(&message, "layers 1");
    says(&message, "layers 3");
    let other = folder.file("other", &[b'z'; 4_000]);
    let message = fail(&["train", "--resume", "--run", &run, "--data", &other], 1);
    says(&message, "data are not those of the run");

    for entry in fs::read_dir(&run).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "ckpt")
        {
            fs::remove_file(path).unwrap();
        }
    }
    let message = fail(&["train", "--resume", "--run", &run], 1);
    assert!(message.contains("no checkpoint yet"), "{message}");
}

/// The lines of a log, without what differs between two runs: times.
fn timeless(folder: &Folder, run: &str) -> Vec<String> {
    let without_times = |mut row: serde_json::Value| {
        let fields = row.as_object_mut().unwrap();
        fields.retain(|name, _| name != "ms" && name != "tokens_per_s");
        row.to_string()
    };
    folder.log(run).into_iter().map(without_times).collect()
}

#[test]
fn lines_of_the_log_are_kept_as_they_were_written() {
    let folder = Folder::new();
    let flags = ["--steps", "40", "--checkpoint-every", "20"];
    folder.train("run", &flags);
    let log = Path::new(&folder.path("run")).join("log.jsonl");
    let written = fs::read_to_string(&log).unwrap();
    folder.resume("run", &["--steps", "41"]);
    let resumed = fs::read_to_string(&log).unwrap();
    assert!(resumed.starts_with(&written), "{written}\n{resumed}");
}

/// The process may end between its last checkpoint and the evaluation of the whole validation split, or while it writes
/// the line about that.
#[test]
fn a_run_killed_before_its_final_evaluation_is_finished() {
    let folder = Folder::new();
    folder.train("run", &["--steps", "4"]);
    let [log, plot] =
        ["log.jsonl", "loss.png"].map(|name| Path::new(&folder.path("run")).join(name));
    let whole = fs::read_to_string(&log).unwrap();
    let (before, last) = whole.trim_end().rsplit_once('\n').unwrap();
    assert!(last.contains("\"final\""), "{last}");
    for left in [format!("{before}\n"), format!("{before}\n{}", &last[..30])] {
        fs::write(&log, left).unwrap();
        fs::remove_file(&plot).unwrap();
        let text = folder.resume("run", &[]);
        assert!(text.contains("whole validation split"), "{text}");
        assert_eq!(fs::read_to_string(&log).unwrap(), whole);
        assert!(plot.exists());
    }
    let again = folder.resume("run", &[]);
    assert!(again.contains("nothing to do"), "{again}");
}

/// A run that is declared complete where it was stopped gets the validation that follows a last step.
#[test]
fn a_run_may_end_where_it_was_stopped() {
    let folder = Folder::new();
    let flags = ["--checkpoint-every", "10", "--eval-every", "1000"];
    folder.train("run", &[&["--steps", "20"], &flags[..]].concat());
    fs::remove_file(folder.checkpoint("run", 20)).unwrap();
    folder.resume("run", &["--steps", "10"]);
    let kinds: Vec<_> = folder.losses("run").into_iter().skip(9).collect();
    let kinds: Vec<_> = kinds.iter().map(|row| (row.0.as_str(), row.1)).collect();
    assert_eq!(kinds, [("train", 10), ("validation", 10), ("final", 10)]);
}

/// Every step ends with a checkpoint, a validation or both, so that the process dies in one of them more often than not.
#[test]
fn a_run_killed_at_any_moment_loses_nothing() {
    let folder = Folder::new();
    let flags = words("--steps 60 --checkpoint-every 2 --eval-every 3");
    folder.train("whole", &flags);
    let mut arguments = folder.nano("killed", &flags);
    let mut kills = 0;
    for moment in 0..12 {
        let mut child = enwik8()
            .args(&arguments)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        if moment == 0 {
            wait_for(&folder.checkpoint("killed", 2), &mut child);
        }
        std::thread::sleep(std::time::Duration::from_millis(150 + 37 * moment));
        kills += usize::from(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        arguments = vec![
            "train".into(),
            "--resume".into(),
            "--run".into(),
            folder.path("killed"),
        ];
    }
    assert!(kills > 0, "the run was never killed");
    folder.resume("killed", &[]);
    folder.assert_same_model(["killed", "whole"], 60);
    assert_eq!(timeless(&folder, "killed"), timeless(&folder, "whole"));
    for entry in fs::read_dir(folder.path("killed")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(!name.contains("partial"), "{name}");
    }
}

/// JSON has no number for it, so its line would be lost.
#[test]
fn a_validation_that_is_not_finite_is_an_error() {
    let folder = Folder::new();
    let arguments = folder.nano("run", &["--steps", "1", "--lr", "1e300"]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let message = fail(&arguments, 1);
    says(&message, "validation loss is no longer finite");
}
