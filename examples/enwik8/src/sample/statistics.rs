//! Speed of generation, and the size of its cache.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

/// Durations of reading and writing.
pub struct Times {
    prompt: Duration,
    pub steps: Vec<Duration>,
    /// Bytes of drafts, and those that were accepted.
    pub drafted: usize,
    pub accepted: usize,
}

impl Times {
    pub fn new(prompt: Duration) -> Self {
        Self {
            prompt,
            steps: Vec::new(),
            drafted: 0,
            accepted: 0,
        }
    }

    /// Returns the statistics for the given numbers of bytes read and written.
    pub fn statistics(
        mut self,
        read: usize,
        written: usize,
        steps: Option<String>,
        cache: CacheStatistics,
    ) -> Statistics {
        let seconds = self.steps.iter().sum::<Duration>().as_secs_f64();
        self.steps.sort_unstable();
        let rank = |share: f64| {
            let at = (self.steps.len() as f64 * share) as usize;
            let step = self.steps.get(at.min(self.steps.len().saturating_sub(1)));
            1e3 * step.map_or(0.0, Duration::as_secs_f64)
        };
        Statistics {
            prompt_bytes: read,
            prompt_seconds: self.prompt.as_secs_f64(),
            bytes: written,
            seconds,
            bytes_per_second: rate(written, seconds),
            step_ms_median: rank(0.5),
            step_ms_99th_percentile: rank(0.99),
            bytes_per_step: rate(written, self.steps.len() as f64),
            drafted_bytes: self.drafted,
            accepted_bytes: self.accepted,
            steps,
            cache,
        }
    }
}

fn rate(count: usize, of: f64) -> f64 {
    count as f64 / of.max(1e-9)
}

/// Statistics that `--stats` prints and `--json` writes.
#[derive(Clone, Debug, Serialize)]
pub struct Statistics {
    prompt_bytes: usize,
    prompt_seconds: f64,
    bytes: usize,
    seconds: f64,
    bytes_per_second: f64,
    step_ms_median: f64,
    step_ms_99th_percentile: f64,
    bytes_per_step: f64,
    drafted_bytes: usize,
    accepted_bytes: usize,
    /// How steps ran, if they were to be replayed.
    steps: Option<String>,
    cache: CacheStatistics,
}

/// Final size of the keys and values of all texts.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CacheStatistics {
    pub slots: usize,
    pub bytes: usize,
    /// Bytes of keys that later bytes can read.
    pub live_bytes: usize,
    /// Bytes that the keys of all positions would take.
    pub all_bytes: usize,
    /// Bytes of the scores that eviction uses.
    pub score_bytes: usize,
    /// Bytes that selections read to choose keys: bounds of pages, compressed keys, or an indexer's.
    pub summary_bytes: usize,
    /// Bytes of keys that the last bytes attended to, and of what branches or an indexer read to choose them.
    pub read_bytes: usize,
    /// Bytes of all pages, in use or not.
    pub pool_bytes: usize,
    /// Pages that several texts share, over all layers' patterns.
    pub shared_pages: usize,
}

impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (read, prompt) = (self.prompt_bytes, self.prompt_seconds);
        let per_second = rate(read, prompt);
        writeln!(
            f,
            "prompt: {read} bytes in {prompt:.2} s: {per_second:.1} bytes/s"
        )?;
        writeln!(
            f,
            "{} bytes in {:.1} s: {:.1} bytes/s, {:.2} ms a step (99th percentile {:.2})",
            self.bytes,
            self.seconds,
            self.bytes_per_second,
            self.step_ms_median,
            self.step_ms_99th_percentile,
        )?;
        if self.drafted_bytes > 0 {
            writeln!(
                f,
                "drafts: {} of {} bytes accepted, {:.2} bytes a step",
                self.accepted_bytes, self.drafted_bytes, self.bytes_per_step
            )?;
        }
        if let Some(steps) = &self.steps {
            writeln!(f, "{steps}")?;
        }
        let cache = &self.cache;
        writeln!(
            f,
            "cache: {} slots, {} bytes, of which {} are live; all keys would take {}; the pool has {}, {} pages are shared",
            cache.slots,
            cache.bytes,
            cache.live_bytes,
            cache.all_bytes,
            cache.pool_bytes,
            cache.shared_pages,
        )?;
        if cache.score_bytes > 0 {
            writeln!(f, "scores of keys: {} bytes", cache.score_bytes)?;
        }
        if cache.summary_bytes > 0 {
            let density = 100.0 * rate(cache.read_bytes, cache.live_bytes as f64);
            writeln!(
                f,
                "selection: {} bytes of summaries; the last bytes read {density:.1} % of the bytes of all live keys",
                cache.summary_bytes
            )?;
        }
        Ok(())
    }
}
