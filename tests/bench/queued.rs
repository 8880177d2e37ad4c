//! Times of calls that the device never waits for.

use std::time::Instant;

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_blocksparse::internal::runs_kernels;
use burn_blocksparse::{BlockLayout, Pattern, sparse_attention};

use crate::program::median;

/// Positions of what the device does before, and how often: some ten milliseconds of a GPU, in which a host starts hundreds of launches.
const POSITIONS: usize = 32_768;
const TIMES: usize = 4;

/// Work that a device has while calls are started, so that none of them is late.
pub struct Ahead {
    device: Device,
    inputs: [Tensor<4>; 3],
    layout: BlockLayout,
}

impl Ahead {
    /// `None` where a device has no queue.
    pub fn new(device: &Device) -> Option<Self> {
        let options = (device, DType::BF16);
        runs_kernels(device).then(|| Self {
            device: device.clone(),
            inputs: [(); 3]
                .map(|()| Tensor::random([1, 8, POSITIONS, 64], Distribution::Default, options)),
            layout: causal(8, POSITIONS),
        })
    }

    fn work(&self) {
        for _ in 0..TIMES {
            let [q, k, v] = self.inputs.clone();
            let out = sparse_attention(q, k, v, &self.layout);
            drop(out.expect("shapes fit"));
        }
    }

    fn done(&self, start: Instant) -> f64 {
        self.device.sync().expect("the device works");
        start.elapsed().as_secs_f64()
    }

    /// Medians of the seconds of one of `calls` calls behind the work, without the work's.
    pub fn time<T>(&self, calls: usize, repeats: usize, call: &mut impl FnMut() -> T) -> f64 {
        let (mut alone, mut both) = (Vec::new(), Vec::new());
        for number in 0..=repeats {
            let start = Instant::now();
            self.work();
            let of_work = self.done(start);
            let start = Instant::now();
            self.work();
            (0..calls).for_each(|_| drop(call()));
            let of_both = self.done(start);
            // The first compiles.
            if number > 0 {
                alone.push(of_work);
                both.push(of_both);
            }
        }
        (median(both) - median(alone)) / calls as f64
    }
}

/// Every earlier key, in blocks of 128.
pub fn causal(heads: usize, n: usize) -> BlockLayout {
    let layout = Pattern::causal().layout(heads, n, 128);
    layout.expect("valid sizes")
}

/// Seconds in the unit that suits them.
pub fn shown(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 1e-3 => format!("{:.1} µs", seconds * 1e6),
        seconds if seconds < 1.0 => format!("{:.2} ms", seconds * 1e3),
        seconds => format!("{seconds:.2} s"),
    }
}
