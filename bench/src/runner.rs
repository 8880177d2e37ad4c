//! Runs calls of programs: timed, only launched, or compared by several processes, and stores the numbers.

use std::fmt::Display;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use clap::Args;
use cubecl::client::Client;
use serde::Serialize;

use crate::device::flush;
use crate::device_time::median;

#[derive(Clone, Args)]
pub struct Timing<const REPEATS: usize> {
    /// Timed runs; the median is reported.
    #[arg(long, default_value_t = REPEATS)]
    pub repeats: usize,
    /// Launch every kernel once and wait for nothing: for looking at what is compiled.
    #[arg(long)]
    pub enqueue_only: bool,
}

impl<const REPEATS: usize> Timing<REPEATS> {
    /// Returns the median of a call's seconds by the device's clock, or `None` if it is only launched.
    pub fn seconds(
        &self,
        client: &Client,
        run: impl Fn() -> Result<()> + Sync,
    ) -> Result<Option<f64>> {
        match self.launched(client, &run)? {
            true => Ok(None),
            false => median(client, self.repeats, run).map(Some),
        }
    }

    /// Launches a call if nothing else is requested. Returns whether that is so.
    pub fn launched(&self, client: &Client, run: impl Fn() -> Result<()>) -> Result<bool> {
        if self.enqueue_only {
            run()?;
            flush(client)?;
        }
        Ok(self.enqueue_only)
    }
}

#[derive(Clone, Copy, Args)]
pub struct Shard {
    /// Of so many parts of what is to be compared, only this one.
    #[arg(long, default_value_t = 0, requires = "verify")]
    pub shard: usize,
    /// Parts of what is to be compared: kernels of a call take up to minutes to compile, and processes share them.
    #[arg(long, default_value_t = 1, requires = "verify")]
    pub of: usize,
}

/// Counts comparisons and failures, by shard.
pub struct Tally {
    shard: Shard,
    /// Number of calls so far, in all shards.
    pub number: usize,
    compared: usize,
    failed: usize,
}

impl Tally {
    pub fn new(shard: Shard) -> Result<Self> {
        ensure!(
            shard.shard < shard.of,
            "--shard is {}, of {} parts numbered from 0",
            shard.shard,
            shard.of
        );
        Ok(Self {
            shard,
            number: 0,
            compared: 0,
            failed: 0,
        })
    }

    /// Returns whether the call with this number, in any numbering, belongs to the shard.
    pub fn has(&self, number: usize) -> bool {
        number % self.shard.of == self.shard.shard
    }

    /// Returns whether the next call belongs to the shard.
    pub fn has_next(&mut self) -> bool {
        self.number += 1;
        self.has(self.number)
    }

    /// Compares the results of a call, or only launches it, and counts it.
    pub fn compare<const N: usize>(
        &mut self,
        (client, timing): (&Client, &Timing<N>),
        name: impl Display,
        run: impl Fn() -> Result<()>,
        check: impl FnOnce() -> Result<()>,
    ) {
        let launched = timing.launched(client, run);
        let found = launched.and_then(|is_all| if is_all { Ok(()) } else { check() });
        self.count(name, found);
    }

    /// Counts a call, and prints its error if there is one.
    pub fn count(&mut self, name: impl Display, found: Result<()>) {
        self.compared += 1;
        if let Err(error) = found {
            self.failed += 1;
            println!("{name}: {error}");
        }
    }

    pub fn finish(&self, what: &str) -> Result<()> {
        let Self {
            compared, failed, ..
        } = self;
        println!("{compared} {what}, {failed} failed");
        ensure!(*failed == 0, "{failed} {what} are wrong");
        Ok(())
    }
}

pub fn write_json(path: Option<&Path>, results: &impl Serialize) -> Result<()> {
    let Some(path) = path else {
        return Ok(());
    };
    let text = serde_json::to_string_pretty(results)?;
    std::fs::write(path, text).with_context(|| path.display().to_string())
}
