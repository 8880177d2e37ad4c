//! Times of calls by a device's own clock.

use anyhow::{Context, Result, anyhow};
use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::prelude::*;

/// Calls of which no time is taken: they compile kernels, and make and upload plans.
const WARM_UP: usize = 2;

/// Bytes that are written before each call: more than any cache has, and some 80 microseconds of a large GPU.
const AHEAD_BYTES: u64 = 256 << 20;

/// Units of a cube, and cubes of a row of them, of what writes those.
const UNITS: u32 = 256;
const CUBES: u32 = 256;

#[derive(Clone, Copy)]
pub struct Times {
    pub median: f64,
    /// The tenth and the ninetieth percentile.
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

/// Times a call that launches kernels. The device has other work while a call is queued, so that it never waits for the host, and that work leaves nothing of the
/// call's in its cache: as Triton's `do_bench` times other libraries' calls.
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
        // SAFETY: units write below the buffer's length.
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

/// The median of [`times`].
pub fn median(client: &Client, repeats: usize, run: impl Fn() -> Result<()> + Sync) -> Result<f64> {
    Ok(times(client, repeats, run)?.median)
}

/// The median of calls that come to an idle device, and have their way to it in their time.
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
