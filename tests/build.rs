//! Makes a test of every ```` ```rust ```` block in the pages below, so that their code compiles and runs as it is printed; of
//! ```` ```rust,no_run ```` blocks, which need files, one that only compiles.

use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

const PAGES: [&str; 29] = [
    "README.md",
    "crates/blocksparse/README.md",
    "crates/burn-blocksparse/README.md",
    "crates/burn-fused-ops/README.md",
    "crates/burn-sparse-transformer/README.md",
    "docs/block-sparse-weights.md",
    "docs/choose-a-pattern.md",
    "docs/clusters-and-hashes.md",
    "docs/decoding.md",
    "docs/deepseek-sparse-attention.md",
    "docs/gallery.md",
    "docs/install-gpu.md",
    "docs/kv-cache-eviction.md",
    "docs/kv-cache-memory.md",
    "docs/kv-cache-selection.md",
    "docs/llama.md",
    "docs/minimax-sparse-attention.md",
    "docs/native-sparse-attention.md",
    "docs/own-selection.md",
    "docs/padding.md",
    "docs/playground.md",
    "docs/replayed-steps.md",
    "docs/selection.md",
    "docs/sequence-parallel.md",
    "docs/swap-burn-nn.md",
    "docs/training-ops.md",
    "docs/training.md",
    "docs/weights.md",
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
        for Block { line, runs, code } in rust_blocks(&text) {
            let code = match runs {
                true => code,
                false => format!("if false {{\n{code}}}\n"),
            };
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

/// A block of Rust, and the line it begins in.
struct Block {
    line: usize,
    runs: bool,
    code: String,
}

/// The blocks that are marked as Rust, or as Rust that is not to run, and nothing else.
fn rust_blocks(text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    for (index, line) in text.lines().enumerate() {
        match &mut open {
            None if line == "```rust" || line == "```rust,no_run" => {
                open = Some(Block {
                    line: index + 2,
                    runs: line == "```rust",
                    code: String::new(),
                });
            }
            None => {}
            Some(_) if line == "```" => blocks.extend(open.take()),
            Some(block) => {
                block.code.push_str(line);
                block.code.push('\n');
            }
        }
    }
    blocks
}
