//! Makes a test of every ```` ```rust ```` block in the pages below, so that their code compiles and runs as it is printed.

use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

const PAGES: [&str; 3] = [
    "README.md",
    "docs/gallery.md",
    "docs/write-your-own-pattern.md",
];

fn main() {
    let mut tests = String::new();
    // As it is now, not as it was when this was compiled: build folders move.
    let here = env::var("CARGO_MANIFEST_DIR").expect("set by cargo");
    for page in PAGES {
        let path = Path::new(&here).join("..").join(page);
        println!("cargo::rerun-if-changed={}", path.display());
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{page}: {error}"));
        for (line, code) in rust_blocks(&text) {
            let name = page.trim_end_matches(".md").replace(['/', '-'], "_");
            write!(
                tests,
                "#[test]\nfn {}_line_{line}() -> Result<(), Box<dyn std::error::Error>> {{\n\
                 in_a_folder_of_its_own()?;\n{code}Ok(())\n}}\n",
                name.to_lowercase()
            )
            .expect("strings grow");
        }
    }
    println!("cargo::rerun-if-changed=build.rs");
    let out = env::var("OUT_DIR").expect("set by cargo");
    fs::write(Path::new(&out).join("pages.rs"), tests).expect("the output folder is writable");
}

/// The blocks that are marked as Rust and nothing else, with the line each begins in.
fn rust_blocks(text: &str) -> Vec<(usize, String)> {
    let mut blocks = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for (index, line) in text.lines().enumerate() {
        match &mut open {
            None if line == "```rust" => open = Some((index + 2, String::new())),
            None => {}
            Some(_) if line == "```" => blocks.extend(open.take()),
            Some((_, code)) => {
                code.push_str(line);
                code.push('\n');
            }
        }
    }
    blocks
}
