//! `enwik8 draw`: draws a pattern.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use burn_blocksparse::Pattern;
use clap::Args;

use crate::data::thousands;
use crate::progress::say;
use crate::{arguments, notation};

/// Longest sequence, in blocks, whose layout is printed as text.
const PRINTED_BLOCKS: usize = 96;

/// Draw an attention pattern
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 draw --pattern fixed:128,32
  enwik8 draw --pattern local:64+strided:64 --seq 512 --block 16 --out strided.svg")]
pub struct DrawArgs {
    /// E.g. fixed:128,32 or local:64+strided:64 (`enwik8 patterns` lists all)
    #[arg(long, value_name = "PATTERN", default_value = "fixed:128,32", value_parser = notation::pattern)]
    pattern: Pattern,
    /// Length of the sequence
    #[arg(long, default_value_t = 512, value_parser = arguments::positive)]
    seq: usize,
    /// Block size: 8, 16, 32, 64 or 128
    #[arg(long, default_value_t = 32, value_parser = arguments::positive)]
    block: usize,
    /// Attention heads, which may differ, as in fixed:128,32,4
    #[arg(long, default_value_t = 1, value_parser = arguments::positive)]
    heads: usize,
    /// Picture to write: FILE.png or FILE.svg
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub fn run(args: &DrawArgs) -> Result<()> {
    let pattern = &args.pattern;
    let layout = pattern.layout(args.heads, args.seq, args.block)?;
    match layout.q_blocks().max(layout.kv_blocks()) <= PRINTED_BLOCKS {
        true => say(&layout),
        // The drawing of a long sequence is wider than any terminal.
        false => say(format!(
            "{pattern}: {} of {} pairs allowed ({:.2}%), {} blocks of {} kept ({:.2}%)",
            thousands(usize::try_from(layout.allowed_pairs()).unwrap_or(usize::MAX)),
            thousands(args.heads.saturating_mul(args.seq).saturating_mul(args.seq)),
            layout.density() * 100.0,
            thousands(layout.blocks()),
            layout.block_size(),
            layout.block_density() * 100.0,
        )),
    }
    if let Some(path) = &args.out {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("png") => layout.save_png(path),
            Some("svg") => layout.save_svg(path),
            _ => bail!("--out must end in .png or .svg, got {}", path.display()),
        }
        .with_context(|| format!("cannot draw {}", path.display()))?;
        say(format!("wrote {}", path.display()));
    }
    Ok(())
}
