//! The examples of the help texts, run as printed, except for paths and with small models; and the commands in the docs.

use std::fs;
use std::path::Path;

use crate::shell::{check, words};
use crate::support::*;

/// Flags that make a model small, unless an example sets them.
const SMALL: &str = "--layers 1 --heads 2 --d-model 16 --batch 2";

/// Flags that make its training short.
const SHORT: &str = "--steps 2 --warmup 1 --eval-windows 1";

/// Replacements of numbers that are too large for a test, and of file names.
const INSTEAD: &[(&str, &str)] = &[
    ("1_048_576", "256"),
    ("fixed:1024,32", "fixed:64,16"),
    ("2048", "256"),
    ("12160", "128"),
    ("100000", "300"),
    ("FILE", "enwik8"),
    ("enwik8-4mb", "enwik8"),
    ("model.pt", "exported/model.safetensors"),
    ("0,1,2,3", "cpu,cpu"),
];

/// Returns the examples of a help text: lines that begin with the program's name, joined with those after a `\`.
fn examples(help: &str) -> Vec<Vec<String>> {
    let mut found: Vec<String> = Vec::new();
    let mut goes_on = false;
    for line in help.lines() {
        // A description may follow after two spaces.
        let text = line.trim_start();
        let command = text.split("  ").next().unwrap_or_default();
        let part = command.trim_end_matches('\\').trim_end();
        match (goes_on, line.starts_with("  enwik8 ")) {
            (true, _) => {
                let last = found.last_mut().unwrap();
                *last = format!("{last} {part}");
            }
            (false, true) => found.push(part.to_owned()),
            (false, false) => continue,
        }
        goes_on = command.ends_with('\\');
    }
    found.iter().map(|command| words(command)).collect()
}

/// Returns an example's arguments in a form that can run here.
fn arguments(example: &[String], folder: &Path) -> Vec<String> {
    let known = |word: &String| {
        let instead = INSTEAD.iter().find(|(from, _)| from == word);
        instead.map_or(word.clone(), |(_, to)| (*to).to_owned())
    };
    let mut arguments: Vec<String> = example[1..].iter().map(known).collect();
    if let Some(at) = arguments.iter().position(|word| word == "--device") {
        arguments.drain(at..at + 2);
    }
    let command = arguments[0].clone();
    let has = |arguments: &[String], flag: &str| arguments.iter().any(|word| word == flag);
    let pictures = has(&arguments, "images") || has(&arguments, "cifar");
    let is_cifar = has(&arguments, "cifar");
    let resumes = has(&arguments, "--resume");
    let mut add = |flags: &str| {
        for flag in words(flags).chunks(2) {
            if !has(&arguments, &flag[0]) {
                arguments.extend_from_slice(flag);
            }
        }
    };
    match command.as_str() {
        "train" if resumes => {}
        "train" | "bench" | "import" if !has(example, "--like") => {
            add(SMALL);
            match (pictures, is_cifar) {
                (false, _) => add("--context 256 --data enwik8"),
                // The data's pictures have 32 × 32 pixels.
                (_, true) => add("--picture-size 16 --d-key 16 --d-ff 32 --halve"),
                (_, false) => add("--picture-size 6 --block 8"),
            }
            match command == "bench" {
                true => add("--iterations 1 --untimed 1"),
                false => add(SHORT),
            }
        }
        "sample" => add("--length 20"),
        "export" => add("--overwrite"),
        _ => {}
    }
    let after = |flag: &str| {
        let at = arguments.iter().position(|word| word == flag)?;
        Some(arguments[at + 1].clone())
    };
    let run = after("--run").or(after("--preset").map(|preset| format!("runs/{preset}")));
    let default = if pictures { "runs/shapes" } else { "runs/tiny" };
    let begins = ["train", "import"].contains(&command.as_str()) && !resumes;
    if begins && folder.join(run.as_deref().unwrap_or(default)).exists() {
        arguments.push("--overwrite".to_owned());
    }
    arguments
}

#[test]
fn every_example_of_the_help_runs() {
    let folder = Folder::new();
    let path = folder.path("");
    let folder_path = Path::new(&path);
    let text: Vec<u8> = (0..20_000u32)
        .map(|i| (i * i / 7 % 61 + i % 5) as u8 + 32)
        .collect();
    folder.file("enwik8", &text);
    folder.file("article.txt", &text[..100]);
    let pictures = folder_path.join("cifar-10-batches-bin");
    fs::create_dir(&pictures).unwrap();
    for (name, count) in [("data_batch_1.bin", 50_u8), ("test_batch.bin", 2)] {
        let records: Vec<u8> = (0..count)
            .flat_map(|index| std::iter::once(index % 10).chain([index; 3 * 32 * 32]))
            .collect();
        fs::write(pictures.join(name), records).unwrap();
    }
    let run_here = |arguments: &[String]| {
        let output = enwik8()
            .args(arguments)
            .current_dir(&path)
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr)
        );
    };
    // In the order in which they need one another's files; the program's own help is last.
    let commands = "train search-selection recall eval sample sample-images report bench draw patterns shards presets export import";
    let mut seen = 0;
    for command in commands.split(' ').chain([""]) {
        let help = match command {
            "" => succeed("--help"),
            command => succeed(format!("help {command}")),
        };
        if command == "import" {
            run_here(&words("export --checkpoint runs/dense --out dense"));
        }
        for example in examples(&help) {
            run_here(&arguments(&example, folder_path));
            seen += 1;
        }
    }
    assert!(seen > 50, "{seen} examples");
    // Checks that no command was left out.
    let help = succeed("--help");
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    for command in lines.map_while(|line| line.split_whitespace().next()) {
        let mut known = commands.split(' ').chain(["help"]);
        assert!(known.any(|known| known == command), "{command}");
    }
}

#[test]
fn commands_on_pages_have_flags_that_exist() {
    let commands = check("enwik8", env!("CARGO_BIN_EXE_enwik8"));
    assert!(commands > 80, "{commands} commands");
}
