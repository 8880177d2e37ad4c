//! Runs on several devices: replicas on the CPU, which sum like several GPUs do.

use std::fs;

use crate::support::*;

/// Returns loss and norm of each training step, and every other loss, in order.
pub fn numbers(folder: &Folder, run: &str) -> Vec<[f64; 2]> {
    let number = |row: &serde_json::Value, name: &str| row[name].as_f64().unwrap_or_default();
    (folder.log(run).iter())
        .map(|row| [number(row, "loss"), number(row, "grad_norm")])
        .collect()
}

/// Checks that the largest relative difference of two runs' numbers is below a bound, and returns it.
#[track_caller]
pub fn assert_near(folder: &Folder, runs: [&str; 2], most: f64) -> f64 {
    let [a, b] = runs.map(|run| numbers(folder, run));
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    let apart = pairs.fold(0.0, |most: f64, (a, b)| {
        most.max((a - b).abs() / a.abs().max(1e-9))
    });
    println!("{runs:?}: {apart:.1e} apart");
    assert!(apart < most, "{runs:?}: {apart:.1e}");
    apart
}

/// Six windows, divided evenly among one, two and three devices; with dropout, whose masks depend on positions in the whole batch.
#[test]
fn several_devices_train_what_one_does() {
    let folder = Folder::new();
    let of = |run: &str, more: &str| {
        let flags = "--batch 6 --steps 50 --eval-every 10 --checkpoint-every 25 --layers 2";
        folder.train(run, &format!("{flags} {more}"))
    };
    of("one", "");
    let (two, three) = ("--devices cpu,cpu", "--devices flex,flex,flex");
    let text = of("two", two);
    says(
        text,
        "devices   flex, flex: 3 windows of a step each, gradients added by copies to flex and back",
    );
    of("three", &format!("{three} --recompute segment:1"));
    of("copied", "--devices cpu --reduce copies");
    of("again", two);
    assert_eq!(numbers(&folder, "one").len(), 50 + 5 + 1);
    for run in ["two", "three"] {
        assert!(assert_near(&folder, ["one", run], 1e-4) > 0.0);
    }
    // The same sums in the same order.
    for (run, same) in [("copied", "one"), ("again", "two")] {
        assert_eq!(numbers(&folder, run), numbers(&folder, same), "{run}");
        folder.assert_same_state([run, same], 50);
    }
    says(folder.text("two/report.md"), "| device | flex, flex |");
    // Runs continue on another number of devices, or on as many, bit for bit.
    for (run, devices) in [("three", ""), ("copied", three), ("again", two)] {
        fs::remove_file(folder.checkpoint(run, 50)).unwrap();
        says(folder.resume(run, devices), "step-00000025.ckpt");
        assert_near(&folder, ["one", run], 1e-4);
    }
    folder.assert_same_state(["again", "two"], 50);
}

/// Devices that each have some positions of every window.
#[test]
fn devices_share_windows() {
    let folder = Folder::new();
    let train = |run: &str, more: &str| {
        let flags = "--batch 2 --dropout 0 --steps 20 --layers 2 --checkpoint-every 10";
        folder.train(run, &format!("{flags} {more}"))
    };
    train("one", "");
    let two = "--devices cpu,cpu --shard sequence";
    let shown = "devices   flex, flex: some positions of every window each, keys cross by the host, gradients added by copies";
    says(train("two", two), shown);
    let three = "--devices cpu,cpu,cpu --shard sequence --recompute segment:1";
    train("three", three);
    let four = train(
        "four",
        "--devices cpu,cpu,cpu,cpu --shard sequence --share 2",
    );
    let shown = ": some positions of 1 of 2 windows each, keys cross by the host";
    says(four, shown);
    train("again", two);
    for run in ["two", "three", "four"] {
        assert!(assert_near(&folder, ["one", run], 1e-4) > 0.0);
    }
    assert_eq!(numbers(&folder, "again"), numbers(&folder, "two"));
    folder.assert_same_state(["again", "two"], 20);
    // A run continues on another number of devices.
    fs::remove_file(folder.checkpoint("two", 20)).unwrap();
    folder.resume("two", "");
    assert_near(&folder, ["one", "two"], 1e-4);
}

/// Pruned blocks, and a selection that ends, on all devices.
#[test]
fn what_changes_a_model_changes_all_of_them() {
    let folder = Folder::new();
    let pruned = "--batch 4 --steps 12 --ff-density 0.5 --ff-block 16 --ff-layout random --ff-prune 0.25 --ff-prune-from 3 --ff-prune-until 9 --ff-prune-every 3";
    let chosen = "--steps 8 --selection topk:8,2,1,0 --selection-until 4";
    for (flags, runs) in [
        (pruned, ["one", "two"]),
        (chosen, ["chosen-one", "chosen-two"]),
    ] {
        let text = folder.train(runs[0], &format!("{flags} --devices cpu"));
        if flags == pruned {
            says(text, "keep 25.0 % of their blocks");
        }
        folder.train(runs[1], &format!("{flags} --devices cpu,cpu"));
        assert_near(&folder, runs, 1e-4);
    }
}

#[test]
fn a_device_that_fails_ends_the_run_and_leaves_its_checkpoints() {
    let folder = Folder::new();
    let three = "--devices cpu,cpu,cpu";
    let flags = format!("--batch 6 --steps 20 --checkpoint-every 5 --eval-every 50 {three}");
    folder.train("whole", &flags);
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
        let run = &format!("failed-{index}");
        let output = (enwik8().args(crate::shell::words(&folder.nano(run, &flags))))
            .env("ENWIK8_FAIL", fail)
            .output()
            .unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{fail}: {message}");
        let rank: usize = fail[..1].parse().unwrap();
        let expected = format!("error: device flex ({} of 3) failed: {reason}; ", rank + 1);
        assert_eq!(message.matches(&expected).count(), 1, "{fail}: {message}");
        assert!(!folder.checkpoint(run, 15).exists());
        assert_eq!(folder.log(run).len(), 12, "{fail}");
        // The last one before the failure is complete, and the run continues as if there had been no failure.
        says(folder.resume(run, three), "step-00000010.ckpt");
        assert_eq!(numbers(&folder, run), numbers(&folder, "whole"), "{fail}");
        folder.assert_same_state([run, "whole"], 20);
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
        1 | --devices cpu,cpu,cpu --shard sequence --share 1 --batch 4 --dropout 0 | --batch must be a multiple of the 3 sets of devices that share sequences, got 4
        1 | --devices 0,cuda:1,wgpu | of one kind, got cuda:0 and wgpu
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
        says(fail(folder.nano("run", more), code.parse().unwrap()), reason);
        assert!(!folder.exists("run"), "{more}");
    }
    if !cfg!(feature = "cuda") {
        let run = folder.path("run");
        let message = fail(format!("train --devices 0,1 --run {run}"), 1);
        says(message, "--features cuda");
    }
}
