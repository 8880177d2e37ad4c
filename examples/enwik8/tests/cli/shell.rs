//! The commands printed in the README and the docs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A command as printed on a page.
struct Printed {
    /// The page, and the command.
    text: String,
    /// Arguments without shell variables.
    arguments: Vec<String>,
    /// Whether it is in a code block, for copying: in sentences, values may be placeholders.
    in_block: bool,
}

/// Asserts that flags of the commands exist and that their values parse; returns the number of commands. Nothing runs: `--help` at the end is
/// handled after everything before it is parsed.
pub fn check(program: &str, executable: &str) -> usize {
    let commands = printed(program);
    for command in &commands {
        let output = Command::new(executable)
            .args(&command.arguments)
            .arg("--help")
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        let is_value = error.contains("invalid value") || error.contains("a value is required");
        // Files mentioned on a page do not exist here.
        let is_placeholder = is_value && (!command.in_block || error.contains("No such file"));
        assert!(
            output.status.success() || is_placeholder,
            "{}: {error}",
            command.text
        );
    }
    commands.len()
}

/// Returns the README, the docs, and those of the examples.
fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let docs = fs::read_dir(root.join("docs")).unwrap();
    let mut pages: Vec<PathBuf> = docs
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    for page in [
        "README.md",
        "examples/enwik8/data/README.md",
        "examples/llama/README.md",
    ] {
        pages.push(root.join(page));
    }
    pages
}

/// Returns the commands of a program, printed as `PROGRAM …` or as `cargo run … -p PROGRAM … -- …`.
fn printed(program: &str) -> Vec<Printed> {
    let mut found = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        let mut add = |line: &str, in_block| {
            let text = format!("{}: {line}", page.display());
            found.extend(arguments(program, line).map(|arguments| Printed {
                text,
                arguments,
                in_block,
            }));
        };
        let mut sentences = String::new();
        for (index, part) in text.split("```").enumerate() {
            let block = part.split_once('\n').filter(|_| index % 2 == 1);
            match block {
                None => sentences += part,
                Some(("sh" | "bash", lines)) => {
                    let lines = lines.replace("\\\n", " ");
                    lines.lines().for_each(|line| add(line, true));
                }
                Some(_) => {}
            }
        }
        let codes = sentences.split('`').skip(1).step_by(2);
        codes.for_each(|code| add(code, false));
    }
    found
}

/// Returns the arguments if a line is a command of the program.
fn arguments(program: &str, line: &str) -> Option<Vec<String>> {
    let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
    let command = match line.strip_prefix("cargo run ") {
        Some(run) => {
            let (cargo, command) = run.split_once(" -- ")?;
            let package = format!("-p {program} ");
            format!("{cargo} ").contains(&package).then_some(command)?
        }
        None => line.strip_prefix(program)?.strip_prefix(' ')?,
    };
    let mut arguments = words(command.split(" # ").next().unwrap_or_default());
    arguments.retain(|word| !word.starts_with('$'));
    (arguments.first()? != "help").then_some(arguments)
}

/// Splits a line with quotes like a shell.
pub fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for c in line.chars() {
        match c {
            _ if quote == Some(c) => quote = None,
            '\'' | '"' if quote.is_none() => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            _ if quote.is_none() && c.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    assert!(quote.is_none(), "{line}");
    words.extend(word);
    words
}
