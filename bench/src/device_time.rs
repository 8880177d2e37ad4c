//! Times of calls by a device's own clock.

use anyhow::{Context, Result, anyhow};
use cubecl::client::Client;
use cubecl::future::block_on;

/// The median time of a call that launches kernels, in seconds, after two calls that are not timed.
pub fn median(client: &Client, repeats: usize, run: impl Fn() -> Result<()> + Sync) -> Result<f64> {
    for _ in 0..2 {
        run()?;
    }
    block_on(client.sync()).map_err(|error| anyhow!("{error:?}"))?;
    let mut times = Vec::new();
    for _ in 0..repeats {
        let (_, profile) = client
            .profile(|| run().is_ok(), "call")
            .map_err(|error| anyhow!("{error:?}"))?;
        let span = block_on(profile.resolve()).context("the device measured no time")?;
        times.push(span.duration().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
