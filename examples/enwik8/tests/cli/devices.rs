//! Runs on several devices: replicas on the CPU, which add what several GPUs do.

use std::fs;
use std::path::Path;

use crate::support::*;

/// Six windows, which one, two and three devices share out equally; with dropout.
const SIX: [&str; 2] = ["--batch", "6"];

/// Arguments of a nano run, of which the flags in `more` are others. A choice by content has no pattern.
fn arguments(folder: &Folder, run: &str, more: &[&str]) -> Vec<String> {
    let chooses = more.contains(&"--selection");
    let is_other = |flag: &str| more.contains(&flag) || (chooses && flag == "--pattern");
    let mut arguments = vec!["train".to_owned(), "--run".to_owned(), folder.path(run)];
    arguments.extend(["--data".to_owned(), folder.data()]);
    let nano = nano();
    let kept = nano.chunks(2).filter(|pair| !is_other(pair[0])).flatten();
    arguments.extend(kept.chain(more).map(|&argument| argument.to_owned()));
    arguments
}

fn train(folder: &Folder, run: &str, more: &[&str]) -> String {
    let arguments = arguments(folder, run, more);
    succeed(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Loss and norm of each training step, and every other loss, in order.
fn numbers(folder: &Folder, run: &str) -> Vec<[f64; 2]> {
    let number = |row: &serde_json::Value, name: &str| row[name].as_f64().unwrap_or_default();
    (folder.log(run).iter())
        .map(|row| [number(row, "loss"), number(row, "grad_norm")])
        .collect()
}

/// The largest relative difference of two runs' numbers.
fn apart(a: &[[f64; 2]], b: &[[f64; 2]]) -> f64 {
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.fold(0.0, |most, (a, b)| {
        most.max((a - b).abs() / a.abs().max(1e-9))
    })
}

#[test]
fn several_devices_train_what_one_does() {
    let folder = Folder::new();
    let flags = [
        &SIX[..],
        &["--steps", "50", "--eval-every", "10", "--layers", "2"],
    ]
    .concat();
    let of = |run: &str, more: &[&str]| train(&folder, run, &[&flags[..], more].concat());
    of("one", &[]);
    let text = of("two", &["--devices", "cpu,cpu"]);
    let shown = "devices   flex, flex: 3 windows of a step each, gradients added by copies to flex and back";
    assert!(text.contains(shown), "{text}");
    of(
        "three",
        &["--devices", "flex,flex,flex", "--recompute", "segment:1"],
    );
    of("copied", &["--devices", "cpu", "--reduce", "copies"]);
    of("again", &["--devices", "cpu,cpu"]);
    let one = numbers(&folder, "one");
    assert_eq!(one.len(), 50 + 5 + 1);
    for run in ["two", "three"] {
        let apart = apart(&one, &numbers(&folder, run));
        println!("{run}: {apart:.1e} from one device over 50 steps");
        assert!(apart < 1e-4 && apart > 0.0, "{run}: {apart:.1e}");
    }
    // The same sums of the same numbers.
    for (run, same) in [("copied", "one"), ("again", "two")] {
        assert_eq!(numbers(&folder, run), numbers(&folder, same), "{run}");
        let [a, b] = [run, same].map(|run| state_of(&folder.checkpoint(run, 50)));
        assert!(a == b, "{run}: another model or optimizer");
    }
    let report = fs::read_to_string(Path::new(&folder.path("two")).join("report.md")).unwrap();
    assert!(report.contains("| device | flex, flex |"), "{report}");
}

/// Devices that have some positions of every window each.
#[test]
fn devices_share_windows() {
    let folder = Folder::new();
    let flags = words("--batch 2 --dropout 0 --steps 20 --layers 2 --checkpoint-every 10");
    let shared = |devices| ["--devices", devices, "--shard", "sequence"];
    train(&folder, "one", &flags);
    let text = train(&folder, "two", &[&flags[..], &shared("cpu,cpu")].concat());
    let shown = "devices   flex, flex: some positions of every window each, keys cross by the host, gradients added by copies";
    assert!(text.contains(shown), "{text}");
    let three = [&shared("cpu,cpu,cpu")[..], &["--recompute", "segment:1"]].concat();
    train(&folder, "three", &[&flags[..], &three].concat());
    let four = [&shared("cpu,cpu,cpu,cpu")[..], &["--share", "2"]].concat();
    let text = train(&folder, "four", &[&flags[..], &four].concat());
    let shown = ": some positions of 1 of 2 windows each, keys cross by the host";
    assert!(text.contains(shown), "{text}");
    train(&folder, "again", &[&flags[..], &shared("cpu,cpu")].concat());
    let one = numbers(&folder, "one");
    for run in ["two", "three", "four"] {
        let apart = apart(&one, &numbers(&folder, run));
        println!("{run}: {apart:.1e} from one device over 20 steps");
        assert!(apart < 1e-4 && apart > 0.0, "{run}: {apart:.1e}");
    }
    assert_eq!(numbers(&folder, "again"), numbers(&folder, "two"));
    let [a, b] = ["again", "two"].map(|run| state_of(&folder.checkpoint(run, 20)));
    assert!(a == b, "another model or optimizer");
    // A run goes on with another number of devices.
    fs::remove_file(folder.checkpoint("two", 20)).unwrap();
    folder.resume("two", &[]);
    assert!(apart(&one, &numbers(&folder, "two")) < 1e-4);
}

/// Other windows than one's own are another mask: dropout decides here whether positions count through the whole batch.
#[test]
fn dropout_is_that_of_the_whole_batch() {
    let folder = Folder::new();
    let flags = [&SIX[..], &["--steps", "8", "--dropout", "0.5"]].concat();
    train(&folder, "one", &flags);
    train(
        &folder,
        "three",
        &[&flags[..], &["--devices", "cpu,cpu,cpu"]].concat(),
    );
    let apart = apart(&numbers(&folder, "one"), &numbers(&folder, "three"));
    assert!(apart < 1e-5, "{apart:.1e}");
}

#[test]
fn a_run_goes_on_with_another_number_of_devices() {
    let folder = Folder::new();
    let flags = [&SIX[..], &["--steps", "20", "--checkpoint-every", "10"]].concat();
    let two = ["--devices", "cpu,cpu"];
    let three = ["--devices", "cpu,cpu,cpu"];
    train(&folder, "whole", &flags);
    for (run, before, after) in [
        ("from-two", &two[..], &[][..]),
        ("from-one", &[][..], &three[..]),
        ("on-two", &two[..], &two[..]),
    ] {
        train(&folder, run, &[&flags[..], before].concat());
        let whole = state_of(&folder.checkpoint(run, 20));
        fs::remove_file(folder.checkpoint(run, 20)).unwrap();
        let text = folder.resume(run, after);
        assert!(text.contains("step-00000010.ckpt"), "{text}");
        let apart = apart(&numbers(&folder, "whole"), &numbers(&folder, run));
        assert!(apart < 1e-4, "{run}: {apart:.1e}");
        if before == after {
            assert!(whole == state_of(&folder.checkpoint(run, 20)), "{run}");
        }
    }
}

/// Blocks that are pruned, and a choice that ends, on all devices.
#[test]
fn what_changes_a_model_changes_all_of_them() {
    let folder = Folder::new();
    let flags = words(
        "--batch 4 --steps 12 --ff-density 0.5 --ff-block 16 --ff-layout random --ff-prune \
         0.25 --ff-prune-from 3 --ff-prune-until 9 --ff-prune-every 3",
    );
    let text = train(&folder, "one", &flags);
    assert!(text.contains("keep 25.0 % of their blocks"), "{text}");
    train(
        &folder,
        "two",
        &[&flags[..], &["--devices", "cpu,cpu"]].concat(),
    );
    let pruned = apart(&numbers(&folder, "one"), &numbers(&folder, "two"));
    assert!(pruned < 1e-4, "{pruned:.1e}");

    let flags = words("--steps 8 --selection topk:8,2,1,0 --selection-until 4");
    for (run, devices) in [("chosen-one", "cpu"), ("chosen-two", "cpu,cpu")] {
        train(
            &folder,
            run,
            &[&flags[..], &["--devices", devices]].concat(),
        );
    }
    let chosen = apart(
        &numbers(&folder, "chosen-one"),
        &numbers(&folder, "chosen-two"),
    );
    assert!(chosen < 1e-4, "{chosen:.1e}");
}

#[test]
fn a_device_that_fails_ends_the_run_and_leaves_its_checkpoints() {
    let folder = Folder::new();
    let flags = [
        &SIX[..],
        &words("--steps 20 --checkpoint-every 5 --eval-every 50"),
        &["--devices", "cpu,cpu,cpu"],
    ]
    .concat();
    train(&folder, "whole", &flags);
    for (index, (fail, reason)) in [
        ("1,13,gradients,error", "asked to fail"),
        ("2,13,gradients,panic", "asked to panic"),
        ("0,13,gradients,panic", "asked to panic"),
        ("2,13,update,error", "asked to fail"),
        ("0,13,update,panic", "asked to panic"),
    ]
    .into_iter()
    .enumerate()
    {
        let run = format!("failed-{index}");
        let output = (enwik8().args(arguments(&folder, &run, &flags)))
            .env("ENWIK8_FAIL", fail)
            .output()
            .unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{fail}: {message}");
        let rank: usize = fail[..1].parse().unwrap();
        let expected = format!("error: device flex ({} of 3) failed: {reason}; ", rank + 1);
        assert_eq!(message.matches(&expected).count(), 1, "{fail}: {message}");
        assert!(!folder.checkpoint(&run, 15).exists());
        assert_eq!(folder.log(&run).len(), 12, "{fail}");
        // The last one before the failure is whole, and the run goes on as if nothing had been.
        let text = folder.resume(&run, &["--devices", "cpu,cpu,cpu"]);
        assert!(text.contains("step-00000010.ckpt"), "{text}");
        assert_eq!(numbers(&folder, &run), numbers(&folder, "whole"), "{fail}");
        let [a, b] = [run.as_str(), "whole"].map(|run| state_of(&folder.checkpoint(run, 20)));
        assert!(a == b, "{fail}: another model or optimizer");
    }
}

#[test]
fn what_several_devices_cannot_do_is_said_before_anything_is_written() {
    let folder = Folder::new();
    for row in rows(
        "
        1 | --devices= | --devices must name one device at least
        1 | --devices cpu, | --devices must name one device at least
        1 | --devices cpu,ndarray | of one kind, got flex and ndarray
        1 | --devices cpu,tpu | of one kind, got flex and tpu
        1 | --devices cpu,cpu,cpu | --batch must be a multiple of the 3 devices of --devices, got 2
        1 | --devices cpu,cpu --graph | --graph replays the steps of one device
        1 | --devices cpu,cpu --reduce nccl | --reduce nccl is of CUDA devices, got flex
        1 | --devices cpu,cpu --shard sequence --dropout 0.1 | --shard sequence is without dropout, got --dropout 0.1
        1 | --devices cpu,cpu --shard sequence --exchange nccl | --exchange nccl is of CUDA devices, got flex
        1 | --devices cpu,cpu --exchange host | --exchange and --share are of --shard sequence
        1 | --devices cpu,cpu,cpu --shard sequence --share 2 | --share must divide the 3 devices
        1 | --devices cpu --shard sequence | --shard sequence is of several devices
        2 | --shard sequence | --devices
        1 | --devices cpu,cpu --attention routing:16 | means that follow all bytes of a batch
        2 | --reduce copies | --devices
        2 | --devices cpu --device flex | --device
        ",
    ) {
        let [code, more, reason] = row[..] else {
            panic!("{row:?}");
        };
        let more = words(more);
        let arguments = arguments(&folder, "run", &more);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let message = fail(&arguments, code.parse().unwrap());
        assert!(message.contains(reason), "{more:?}: {message}");
        assert!(!Path::new(&folder.path("run")).exists(), "{more:?}");
    }
    if !cfg!(feature = "cuda") {
        let message = fail(
            &["train", "--devices", "0,1", "--run", &folder.path("run")],
            1,
        );
        assert!(message.contains("--features cuda"), "{message}");
    }
}
