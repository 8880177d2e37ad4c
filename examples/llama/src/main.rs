//! Llama-style checkpoints with sparse attention: answers, bits per byte, needles and times, dense next to sparse.

mod attention;
mod bench;
mod cache;
mod checkpoint;
mod device;
mod generate;
mod gguf_tokenizer;
mod needle;
mod perplexity;
mod pooled;
mod progress;
mod rows;
mod text;
mod windows;

use std::io::Write;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Llama, Mistral, Qwen and SmolLM2 with sparse attention
#[derive(Parser, Debug)]
#[command(
    version,
    after_help = "Start here:
  llama generate MODEL --prompt 'What is the capital of France?'
  llama perplexity MODEL --text book.txt --attention dense --attention streaming:512,4 \\
    --attention topk:32,ratio=0.25
  llama perplexity MODEL --text book.txt --cache all --cache snapkv:205 --cache window:200,4 \\
    --slack 31
  llama needle MODEL --text book.txt --tokens 4000 --attention dense \\
    --attention moba:32,16,first=1,local=2
  llama bench MODEL --prompts 2048,8192 --attention dense --attention streaming:1024,4

MODEL is a folder of Hugging Face or a .gguf file."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Generate(generate::GenerateArgs),
    Perplexity(perplexity::PerplexityArgs),
    Needle(needle::NeedleArgs),
    Bench(bench::BenchArgs),
}

fn main() {
    if let Err(error) = run() {
        let _ = std::io::stdout().flush();
        eprintln!("Error: {error:?}");
        // Exits at once: at a normal exit the CUDA driver crashes while a device thread still loads weights.
        signal_hook::low_level::exit(1);
    }
}

fn run() -> Result<()> {
    match Cli::parse().command {
        Command::Generate(args) => generate::run(&args),
        Command::Perplexity(args) => perplexity::run(&args),
        Command::Needle(args) => needle::run(&args),
        Command::Bench(args) => bench::run(&args),
    }
}
