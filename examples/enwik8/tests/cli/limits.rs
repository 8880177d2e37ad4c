//! Sizes that nothing has room for, and values that no flag takes: an error that names the flag, before anything is written.

use std::path::Path;

use crate::support::*;

/// The flags of a command that take a value, as its help lists them.
fn flags(command: &str) -> Vec<String> {
    let help = succeed(&["help", command]);
    let flags = help.lines().filter_map(|line| {
        let (flag, rest) = line.trim_start().strip_prefix("--")?.split_once(' ')?;
        rest.starts_with(['<', '[']).then(|| flag.to_owned())
    });
    let flags: Vec<String> = flags.collect();
    assert!(flags.len() > 5, "{command}: {help}");
    flags
}

/// With a value that no flag can have, whatever its kind.
#[test]
fn every_flag_of_training_is_named_with_a_bad_value() {
    let folder = Folder::new();
    let run = folder.path("run");
    let file = folder.file("file", b"x");
    let flags = flags("train");
    assert!(flags.len() > 55, "{flags:?}");
    for flag in flags {
        let value = match flag.as_str() {
            // Where a run cannot be.
            "run" => &file,
            // Neither a file, nor a device, nor a number.
            _ => "/nowhere/?",
        };
        let named = format!("--{flag}");
        let mut arguments = vec!["train", &named, value];
        if flag != "run" {
            arguments.extend(["--run", &run]);
        }
        let output = crate::support::run(&arguments);
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        assert!(
            message.contains(&named) && !message.contains("panicked"),
            "{arguments:?}: {message}"
        );
        assert!(!Path::new(&run).exists(), "{arguments:?}");
    }
}

/// With the largest numbers there are: refused, or as good as a smaller one; never a crash, and nothing is left behind by what is refused.
#[test]
fn every_size_has_a_limit() {
    let folder = Folder::new();
    let run = folder.path("run");
    // Long enough for the default context.
    let bytes: Vec<u8> = (0..40_000u32).map(|i| (i * i % 61) as u8 + 32).collect();
    let data = folder.file("data", &bytes);
    for flag in flags("train") {
        // Of which large ones are harmless, or which are no sizes.
        let harmless = words(
            "seed steps warmup selection-until eval-every checkpoint-every log-every eval-windows \
         lr weight-decay epsilon clip init-scale commitment peak-tflops run",
        );
        if harmless.contains(&flag.as_str()) {
            continue;
        }
        let named = format!("--{flag}");
        for value in ["1000000000000", "1073741824", "99999999999999999999999"] {
            let arguments = ["train", "--run", &run, &named, value];
            let data = match flag == "data" {
                true => &[][..],
                false => &["--data", &data],
            };
            let output = crate::support::run(&[&arguments[..], data].concat());
            let message = String::from_utf8(output.stderr).unwrap();
            let code = output.status.code();
            assert!(
                matches!(code, Some(1 | 2)) && message.contains(&named),
                "{arguments:?}: {code:?} {message}"
            );
            assert!(!Path::new(&run).exists(), "{arguments:?}");
        }
    }
    for (flags, words) in [
        (
            &["--batch", "1000000000000"][..],
            &["'1000000000000' for '--batch", "at most 1073741824"][..],
        ),
        (
            &["--batch", "1_000_000_000"],
            &["--batch 1000000000, --context 256", "GiB"],
        ),
        (
            &["--steps", "1000000000000"],
            &["'1000000000000' for '--steps", "at most 1073741824"],
        ),
        (
            &["--epochs", "1e300"],
            &["--epochs must be at most", "1e300"],
        ),
        (
            &["--layers", "1000000000"],
            &["--layers 1000000000, --d-model 128", "GiB"],
        ),
        (
            &["--d-ff", "1000000000"],
            &["--d-model 128, --d-ff 1000000000", "GiB"],
        ),
        (
            &["--task", "images", "--picture-size", "1000000"],
            &["--batch 4, --picture-size 1000000", "GiB"],
        ),
    ] {
        let output = crate::support::run(&[&["train", "--run", &run][..], flags].concat());
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
        assert!(!Path::new(&run).exists(), "{flags:?}");
    }
}

/// The other commands have counts, too.
#[test]
fn sizes_of_other_commands_have_limits() {
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
    let huge = "1000000000000";
    let most = "1073741824";
    let of_run = ["--checkpoint", &run];
    for flags in [
        "sample --batch N",
        "sample --cache window:N",
        "sample --cache h2o:N,N",
        "sample --cache tova:N",
        "sample --cache tova:8 --slack N",
        "sample --speculate N",
        "eval --batch N",
        "eval --windows N",
        "eval --min-context N",
        "eval --cache tova:N",
        "eval --cache all --chunk N",
        "recall --selection topk:8,2 --windows N",
        "sample-images --count N",
        "sample-images --zoom N",
        "draw --seq N",
        "draw --heads N",
        "draw --block N",
    ] {
        for value in [huge, most] {
            let words = flags.replace('N', value);
            let mut arguments: Vec<&str> = words.split(' ').collect();
            if arguments[0] != "draw" {
                arguments.extend(of_run);
            }
            if arguments[0] == "sample" {
                arguments.extend(["--length", "5"]);
            }
            let output = crate::support::run(&arguments);
            let message = String::from_utf8(output.stderr).unwrap();
            let code = output.status.code();
            assert!(
                matches!(code, Some(0..=2)) && !message.contains("panicked"),
                "{arguments:?}: {code:?} {message}"
            );
            if value == huge {
                assert_eq!(code, Some(2), "{arguments:?}: {message}");
            }
        }
    }
    // The numbers of a policy are the user's.
    for (cache, words) in [
        ("tova:0", "'tova:0' for '--cache"),
        ("tova:0", "its capacity must be at least 2"),
        (
            "snapkv:8,9",
            "its window must be below the capacity of 9 keys",
        ),
        ("snapkv:8,4,2", "its pool must be an odd number"),
        ("h2o:0,8", "'h2o:0,8' for '--cache"),
    ] {
        let message = fail(&[&["sample", "--cache", cache][..], &of_run].concat(), 2);
        assert!(message.contains(words), "{cache}: {message}");
    }
    for budget in ["pyramid:1", "adaptive:2", "adaptive:-1"] {
        let flags = ["sample", "--cache", "tova:8", "--budget", budget];
        let message = fail(&[&flags[..], &of_run].concat(), 2);
        assert!(message.contains("for '--budget"), "{message}");
    }
    let slack = words("sample --cache tova:1073741824 --slack 1073741824");
    let message = fail(&[&slack[..], &of_run].concat(), 1);
    assert!(message.contains("--cache and --slack"), "{message}");
    // An empty file of a prompt is the file's.
    let empty = folder.file("empty.txt", b"");
    let message = fail(
        &[&["sample", "--prompt-file", &empty][..], &of_run].concat(),
        1,
    );
    says(
        &message,
        &format!("--prompt-file {empty} must not be empty"),
    );
    let message = fail(&[&["sample", "--prompt", ""][..], &of_run].concat(), 1);
    assert!(message.contains("--prompt must not be empty"), "{message}");
    // Either name of a run does.
    for command in ["eval", "report"] {
        for flag in ["--run", "--checkpoint"] {
            succeed(&[command, flag, &run]);
        }
    }
    let best = format!("{run}/best.ckpt");
    assert!(succeed(&["report", "--checkpoint", &best]).contains("report.md"));
}
