//! `enwik8 shards`: keys that devices exchange if they share a sequence.

use anyhow::Result;
use burn_blocksparse::{Pattern, ShardPlan};
use clap::Args;

use crate::progress::say;
use crate::{arguments, notation};

/// Show which keys devices exchange if they share a sequence
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 shards --pattern fixed:1024,32 --length 1048576 --devices 2
  enwik8 shards --pattern local:4096 --length 8388608 --devices 64 --block 128")]
pub struct ShardsArgs {
    /// E.g. fixed:128,32 or local:64+strided:64 (`enwik8 patterns` lists all)
    #[arg(long, value_name = "PATTERN", default_value = "fixed:1024,32", value_parser = notation::pattern)]
    pattern: Pattern,
    /// Length of the sequence
    #[arg(long, default_value_t = 1 << 20, value_parser = arguments::positive)]
    length: usize,
    /// Devices that share it
    #[arg(long, default_value_t = 2, value_parser = arguments::positive)]
    devices: usize,
    /// Pieces of the sequence per device [default: the cheapest number]
    #[arg(long, value_parser = arguments::positive)]
    pieces: Option<usize>,
    /// Block size: 8, 16, 32, 64 or 128
    #[arg(long, default_value_t = 32, value_parser = arguments::positive)]
    block: usize,
    /// Attention heads
    #[arg(long, default_value_t = 8, value_parser = arguments::positive)]
    heads: usize,
    /// KV heads [default: --heads]
    #[arg(long, value_parser = arguments::positive)]
    kv_heads: Option<usize>,
    /// head_dim
    #[arg(long, default_value_t = 64, value_parser = arguments::positive)]
    head_dim: usize,
}

pub fn run(args: &ShardsArgs) -> Result<()> {
    let layout = args.pattern.layout(args.heads, args.length, args.block)?;
    let (kv_heads, devices) = (args.kv_heads.unwrap_or(args.heads), args.devices);
    let plan = match args.pieces {
        None => ShardPlan::new(&layout, kv_heads, devices)?,
        Some(pieces) => ShardPlan::with_pieces(&layout, kv_heads, devices, pieces)?,
    };
    let bytes = |device| plan.bytes(device, args.head_dim, 2);
    let most = (0..devices).map(bytes).max().unwrap_or_default();
    say(format!(
        "{plan}\n{:.1} MiB of bf16 keys and values received by one device at most in each layer, and as many gradients back",
        most as f64 / f64::from(1 << 20),
    ));
    Ok(())
}
