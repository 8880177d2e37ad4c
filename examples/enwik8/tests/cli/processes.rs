//! Runs of several processes with a device each, on one machine.

use std::fs;
use std::net::TcpListener;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use crate::devices::{assert_near, numbers};
use crate::shell::words;
use crate::support::*;

/// Starts the processes of one command like `torchrun` does; some get another variable.
fn start(line: &str, count: usize, more: &[(usize, &str, &str)]) -> Vec<Child> {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port().to_string();
    drop(free);
    let process = |rank: usize| {
        let mut command = enwik8();
        command.args(words(line)).arg("--processes");
        command.env("RANK", rank.to_string());
        command.env("WORLD_SIZE", count.to_string());
        command.env("MASTER_ADDR", "127.0.0.1");
        command.env("MASTER_PORT", &port);
        for (_, name, value) in more.iter().filter(|(of, ..)| *of == rank) {
            command.env(name, value);
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    (0..count).map(process).collect()
}

fn ends(processes: Vec<Child>) -> Vec<Output> {
    let ends = processes.into_iter().map(Child::wait_with_output);
    ends.collect::<Result<_, _>>().unwrap()
}

/// Runs a command in several processes, all of which must succeed; returns the output of rank 0.
#[track_caller]
fn succeed_in(line: &str, count: usize) -> String {
    let outputs = ends(start(line, count, &[]));
    for (rank, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {output:?}");
        assert!(rank == 0 || output.stdout.is_empty(), "{output:?}");
    }
    String::from_utf8(outputs[0].stdout.clone()).unwrap()
}

/// Checks that a process ended with an error, and returns its one message.
#[track_caller]
fn message(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(text.matches("error: ").count(), 1, "{text}");
    text
}

/// With dropout; compared with replicas in one process, which sum the same numbers in the same order.
#[test]
fn processes_train_what_devices_do() {
    let folder = Folder::new();
    let flags = "--batch 6 --steps 20 --checkpoint-every 10 --layers 2";
    folder.train("one", flags);
    folder.train("threads", &format!("{flags} --devices cpu,cpu"));
    let text = succeed_in(&folder.nano("two", flags), 2);
    let shown = "devices   flex, rank 1: 3 windows of a step each, gradients added by copies to flex and back, between processes by TCP";
    says_all(
        &text,
        &[
            shown,
            "a step sends ",
            " bytes to other processes, and receives ",
        ],
    );
    succeed_in(&folder.nano("again", flags), 2);
    succeed_in(&folder.nano("three", flags), 3);
    assert!(assert_near(&folder, ["one", "two"], 1e-4) > 0.0);
    assert_near(&folder, ["one", "three"], 1e-4);
    for run in ["again", "threads"] {
        assert_eq!(numbers(&folder, run), numbers(&folder, "two"), "{run}");
        folder.assert_same_state([run, "two"], 20);
    }
    // Resumed with one process, with three, and with two.
    for (run, count) in [("again", 1), ("three", 3), ("two", 2)] {
        let line = format!("train --resume --run {}", folder.path(run));
        fs::remove_file(folder.checkpoint(run, 20)).unwrap();
        match count {
            1 => succeed(&line),
            _ => succeed_in(&line, count),
        };
        assert_near(&folder, ["one", run], 1e-4);
    }
    folder.assert_same_state(["threads", "two"], 20);
}

/// Groups of processes that share windows, one group or two.
#[test]
fn processes_share_windows() {
    let folder = Folder::new();
    let flags = "--batch 2 --dropout 0 --steps 10 --layers 2 --pattern fixed:8,2";
    let [shared, halves] = ["--shard sequence", "--shard sequence --share 2"];
    folder.train("one", flags);
    folder.train("threads", &format!("{flags} {shared} --devices cpu,cpu"));
    let text = succeed_in(&folder.nano("two", &format!("{flags} {shared}")), 2);
    let expected = "some positions of every window each, keys cross by the host and TCP";
    says(text, expected);
    succeed_in(&folder.nano("four", &format!("{flags} {halves}")), 4);
    assert_eq!(numbers(&folder, "two"), numbers(&folder, "threads"));
    folder.assert_same_state(["two", "threads"], 10);
    for run in ["two", "four"] {
        assert!(assert_near(&folder, ["one", run], 1e-4) > 0.0);
    }
}

/// Changes of a model reach every process.
#[test]
fn processes_prune_alike() {
    let folder = Folder::new();
    let flags = "--batch 4 --steps 8 --ff-density 0.5 --ff-block 16 --ff-layout random --ff-prune 0.25 --ff-prune-from 3 --ff-prune-until 6 --ff-prune-every 3";
    folder.train("threads", &format!("{flags} --devices cpu,cpu"));
    succeed_in(&folder.nano("two", flags), 2);
    folder.assert_same_state(["threads", "two"], 8);
}

/// A process that is killed, one that fails and one that panics, with and without others of the same sequences.
#[test]
fn a_lost_process_ends_the_others_and_is_named() {
    let folder = Folder::new();
    let endless = "--batch 6 --steps 100000 --checkpoint-every 5 --eval-every 1000000 --dropout 0";
    for (at, (more, count, lost)) in [
        ("", 2, 1),
        ("", 2, 0),
        ("--shard sequence", 3, 2),
        ("--shard sequence", 3, 0),
    ]
    .into_iter()
    .enumerate()
    {
        let run = &format!("killed-{at}");
        let line = folder.nano(run, &format!("{endless} {more}"));
        let mut processes = start(&line, count, &[]);
        wait_for(&folder.checkpoint(run, 5), &mut processes[0]);
        processes[lost].kill().unwrap();
        let began = Instant::now();
        let mut outputs = ends(processes);
        assert!(
            began.elapsed() < Duration::from_secs(30),
            "{:?}",
            began.elapsed()
        );
        outputs.remove(lost);
        for output in &outputs {
            let expected = format!(
                "error: rank {lost} is lost: its process is gone; checkpoints are as they were"
            );
            says(message(output), &expected);
        }
        // The last checkpoint is complete.
        if at == 0 {
            let steps = 5 * (folder.log(run).len() / 5 + 1);
            let text = folder.resume(run, &format!("--steps {steps}"));
            says(text, "resuming from");
        }
    }
    for (fail, reason) in [
        ("1,3,gradients,error", "asked to fail"),
        ("1,3,update,panic", "asked to panic"),
        ("0,3,update,error", "asked to fail"),
    ] {
        let line = folder.nano("failed", &format!("{endless} --overwrite"));
        let rank: usize = fail[..1].parse().unwrap();
        let outputs = ends(start(&line, 2, &[(rank, "ENWIK8_FAIL", fail)]));
        let own = format!("error: device flex ({} of 2) failed: {reason}; ", rank + 1);
        says(message(&outputs[rank]), &own);
        let others = format!("error: rank {rank} is lost: {reason}; ");
        says(message(&outputs[1 - rank]), &others);
    }
}

/// Whichever process gets the signal, rank 0 ends the run after a step.
#[cfg(unix)]
#[test]
fn any_process_can_be_asked_to_stop() {
    let folder = Folder::new();
    let line = folder.nano("run", "--batch 4 --steps 100000 --checkpoint-every 5");
    let mut processes = start(&line, 2, &[]);
    wait_for(&folder.checkpoint("run", 5), &mut processes[0]);
    let id = processes[1].id().to_string();
    let killed = std::process::Command::new("kill").arg(id).status().unwrap();
    assert!(killed.success());
    let outputs = ends(processes);
    let codes: Vec<_> = outputs.iter().map(|output| output.status.code()).collect();
    assert_eq!(codes, [Some(130), Some(0)], "{outputs:?}");
    let text = String::from_utf8_lossy(&outputs[0].stdout);
    says(text, "stopped after step");
}

/// Errors give the same message in all processes, and nothing is written.
#[test]
fn what_several_processes_cannot_do_is_said() {
    let folder = Folder::new();
    for row in rows(
        "
        --batch 3 | 2 | --batch must be a multiple of the 2 devices of --processes, got 3
        --graph | 2 | leave it out with --processes
        --reduce nccl | 2 | --reduce nccl is of processes of one host, whose LOCAL_WORLD_SIZE is WORLD_SIZE, 2
        --share 2 | 2 | --exchange and --share are of --shard sequence
        --shard sequence --share 2 | 3 | --share must divide the 3 processes, got 2
        ",
    ) {
        let line = folder.nano("run", row[0]);
        for output in ends(start(&line, row[1].parse().unwrap(), &[])) {
            says(message(&output), row[2]);
        }
        assert!(!folder.exists("run"), "{}", row[0]);
    }
    let line = folder.nano("run", "--processes");
    let alone = fail(&line, 1);
    let expected = "--processes: RANK must be a number, as torchrun and mpirun set it";
    says(alone, expected);
}
