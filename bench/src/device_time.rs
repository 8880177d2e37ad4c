//! Times calls by the device's own clock.

use anyhow::{Context, Result, anyhow};
use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::prelude::*;

/// Number of untimed calls, which compile kernels and build and upload plans.
const WARM_UP: usize = 2;

/// Bytes that are written before each call: more than any cache holds, and about 80 microseconds on a large GPU.
const AHEAD_BYTES: u64 = 256 << 20;

/// Units of a cube and cubes per grid row of the kernel that writes them.
const UNITS: u32 = 256;
const CUBES: u32 = 256;

#[derive(Clone, Copy)]
pub struct Times {
    pub median: f64,
    /// Tenth and ninetieth percentile.
    pub p10: f64,
    pub p90: f64,
}

impl Times {
    pub fn of(mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        let [median, p10, p90] = [5, 1, 9].map(|tenths| seconds[seconds.len() * tenths / 10]);
        Self { median, p10, p90 }
    }
}

/// Times a call that launches kernels. The device has other work while the call is queued, so that it never waits for the host, and that work evicts the
/// call's data from the cache. Triton's `do_bench` times calls of other libraries in the same way.
pub fn times(
    client: &Client,
    repeats: usize,
    run: impl Fn() -> Result<()> + Sync,
) -> Result<Times> {
    for _ in 0..WARM_UP {
        run()?;
    }
    let bytes = AHEAD_BYTES.min(client.properties().memory.max_page_size) as usize;
    let (words, ahead) = (bytes / 4, client.empty(bytes));
    let work = || {
        // SAFETY: units write only within the buffer.
        unsafe {
            fill::launch_unchecked(
                client,
                CubeCount::Static(CUBES, (words as u32).div_ceil(CUBES * UNITS), 1),
                CubeDim::new_1d(UNITS),
                BufferArg::from_raw_parts(ahead.clone(), words),
                words as u32,
            );
        }
    };
    profiled(client, repeats, work, run)
}

/// Returns the median of [`times`].
pub fn median(client: &Client, repeats: usize, run: impl Fn() -> Result<()> + Sync) -> Result<f64> {
    Ok(times(client, repeats, run)?.median)
}

/// Returns the median of calls to an idle device, including the launch latency.
pub fn alone(client: &Client, repeats: usize, run: impl Fn() -> Result<()> + Sync) -> Result<f64> {
    Ok(profiled(client, repeats, || {}, run)?.median)
}

fn profiled(
    client: &Client,
    repeats: usize,
    before: impl Fn(),
    run: impl Fn() -> Result<()> + Sync,
) -> Result<Times> {
    let call = |_| -> Result<f64> {
        before();
        let (ran, profile) = client
            .profile(&run, "call")
            .map_err(|error| anyhow!("{error:?}"))?;
        ran?;
        let span = block_on(profile.resolve()).context("the device measured no time")?;
        Ok(span.duration().as_secs_f64())
    };
    let seconds = (0..repeats).map(call);
    Ok(Times::of(seconds.collect::<Result<_>>()?))
}

#[cube(launch_unchecked)]
fn fill(output: &mut [f32], words: u32) {
    if (ABSOLUTE_POS as u32) < words {
        output[ABSOLUTE_POS] = 1.0;
    }
}
