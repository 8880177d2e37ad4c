//! Sizes beyond any memory, and invalid values: an error that names the flag, before anything is written.

use crate::support::*;

/// Returns the flags of a command that take a value, from its help.
fn flags(command: &str) -> Vec<String> {
    let help = succeed(format!("help {command}"));
    let flags = help.lines().filter_map(|line| {
        let (flag, rest) = line.trim_start().strip_prefix("--")?.split_once(' ')?;
        rest.starts_with(['<', '[']).then(|| flag.to_owned())
    });
    let flags: Vec<String> = flags.collect();
    assert!(flags.len() > 5, "{command}: {help}");
    flags
}

/// Returns the exit code and message of a command, which must not crash.
fn code(line: &str) -> (i32, String) {
    let output = run(line);
    let message = String::from_utf8(output.stderr).unwrap();
    let code = output.status.code();
    let is_sound = matches!(code, Some(0..=2)) && !message.contains("panicked");
    assert!(is_sound, "{line}: {code:?} {message}");
    (code.unwrap(), message)
}

/// Values that are invalid for every flag, and the largest numbers, are refused by name without a crash, and leave nothing behind.
#[test]
fn every_flag_of_training_is_named_with_a_bad_value() {
    let folder = Folder::new();
    let run = folder.path("run");
    // A file where the run's folder should be, and data long enough for the default context.
    let file = folder.file("file", "x");
    let bytes: Vec<u8> = (0..40_000u32).map(|i| (i * i % 61) as u8 + 32).collect();
    let data = folder.file("data", bytes);
    // Flags whose large values are harmless, or that are not sizes.
    let harmless = "seed steps warmup selection-until eval-every checkpoint-every log-every eval-windows lr weight-decay epsilon clip init-scale commitment softmax-threshold peak-tflops run";
    let flags = flags("train");
    assert!(flags.len() > 55, "{flags:?}");
    for flag in flags {
        // Neither a file, nor a device, nor a number.
        let mut values = vec!["/nowhere/?"];
        if !harmless.split(' ').any(|harmless| harmless == flag) {
            values.extend(["1000000000000", "1073741824", "99999999999999999999999"]);
        }
        for value in values {
            let line = match flag.as_str() {
                "run" => format!("train --run {file}"),
                "data" => format!("train --run {run} --data {value}"),
                _ => format!("train --run {run} --data {data} --{flag} {value}"),
            };
            let (code, message) = code(&line);
            assert!(code > 0, "{line}");
            says(message, &format!("--{flag}"));
            assert!(!folder.exists("run"), "{line}");
        }
    }
    for row in rows(
        "
        --batch 1000000000000 | '1000000000000' for '--batch | at most 1073741824
        --batch 1_000_000_000 | --batch 1000000000, --context 256 | GiB
        --steps 1000000000000 | '1000000000000' for '--steps | at most 1073741824
        --epochs 1e300 | --epochs must be at most | 1e300
        --context 1073741824 --batch 1024 | --context 1073741824 | 16384.0 GiB that any device has
        --layers 1000000000 | --layers 1000000000, --d-model 128 | GiB
        --d-ff 1000000000 | --d-model 128, --d-ff 1000000000 | GiB
        --task images --picture-size 1000000 | --batch 4, --picture-size 1000000 | GiB
        ",
    ) {
        let (_, message) = code(&format!("train --run {run} {}", row[0]));
        says_all(message, &row[1..]);
        assert!(!folder.exists("run"), "{row:?}");
    }
}

/// Counts of the other commands.
#[test]
fn sizes_of_other_commands_have_limits() {
    let folder = Folder::new();
    folder.train("run", "--steps 2 --attention dense");
    let run = folder.path("run");
    let of_run = format!("--checkpoint {run}");
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
        // The columns are limited, because all of them are visited.
        "draw --pattern dense --seq N",
        "draw --heads N",
        "draw --block N",
    ] {
        for (value, is_huge) in [("1000000000000", true), ("1073741824", false)] {
            let flags = flags.replace('N', value);
            let line = match flags.split(' ').next() {
                Some("draw") => flags,
                Some("sample") => format!("{flags} {of_run} --length 5"),
                _ => format!("{flags} {of_run}"),
            };
            let (code, message) = code(&line);
            assert!(!is_huge || code == 2, "{line}: {message}");
        }
    }
    // Numbers of a cache policy come from the user.
    for row in rows(
        "
        tova:0 | 'tova:0' for '--cache
        tova:0 | its capacity must be at least 2
        snapkv:8,9 | its window must be below the capacity of 9 keys
        snapkv:8,4,2 | its pool must be an odd number
        h2o:0,8 | 'h2o:0,8' for '--cache
        ",
    ) {
        let message = fail(format!("sample --cache {} {of_run}", row[0]), 2);
        says(message, row[1]);
    }
    for budget in ["pyramid:1", "adaptive:2", "adaptive:-1"] {
        let line = format!("sample --cache tova:8 --budget {budget} {of_run}");
        says(fail(line, 2), "for '--budget");
    }
    let slack = "sample --cache tova:1073741824 --slack 1073741824";
    says(fail(format!("{slack} {of_run}"), 1), "--cache and --slack");
    // An empty prompt file is an error that names the file.
    let empty = folder.file("empty.txt", "");
    let message = fail(format!("sample --prompt-file {empty} {of_run}"), 1);
    says(message, &format!("--prompt-file {empty} must not be empty"));
    let message = fail(format!("sample --prompt '' {of_run}"), 1);
    says(message, "--prompt must not be empty");
    let text = succeed(format!("report --checkpoint {run}/best.ckpt"));
    says(text, "report.md");
}
