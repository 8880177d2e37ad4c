//! Lower bounds of a run's memory, so that sizes that fit no machine are an error before anything is allocated.

use std::fmt::Display;

use anyhow::{Result, anyhow, ensure};
use burn_sparse_transformer::{Precision, Recompute};

use crate::arguments::MOST;
use crate::config::RunConfig;
use crate::device::NamedDevice;
use crate::memory::machine_bytes;
use crate::presets::{Length, ModelConfig};

/// Limit for devices that do not report their memory: 16 TiB, more than any has.
const MOST_BYTES: f64 = (1_u64 << 44) as f64;

/// Bytes per parameter: weight, gradient and AdamW's two moments in f32.
const TRAINED: f64 = 16.0;

/// Available memory.
struct Room {
    bytes: f64,
    whose: &'static str,
}

impl Room {
    /// Returns the memory of a device: a CPU has the machine's.
    fn of(device: Option<&NamedDevice>) -> Self {
        let is_cpu = device.is_some_and(NamedDevice::is_cpu);
        let bytes = machine_bytes().filter(|_| is_cpu);
        match bytes {
            Some(bytes) => Self {
                bytes: bytes as f64,
                whose: "this machine has",
            },
            None => Self {
                bytes: MOST_BYTES,
                whose: "any device has",
            },
        }
    }

    /// Checks that `bytes` fit; the error says that `what` needs them.
    fn check(&self, bytes: f64, what: impl Display) -> Result<()> {
        let gibibytes = |bytes: f64| bytes / f64::from(1 << 30);
        ensure!(
            bytes <= self.bytes,
            "{what} at least {:.1} GiB, more than the {:.1} GiB that {}",
            gibibytes(bytes),
            gibibytes(self.bytes),
            self.whose
        );
        Ok(())
    }
}

impl RunConfig {
    /// Checks that the device (any device if none is named) can hold the model and a training step.
    pub fn check_memory(&self, device: Option<&NamedDevice>) -> Result<()> {
        let room = Room::of(device);
        let (model, batch) = (&self.model, self.recipe.batch);
        let (widths, state) = (widths(model), TRAINED * least_parameters(model));
        let what = format!("{widths}: weights, gradients and moments take");
        room.check(state, what)?;
        let length = match model.pictures {
            Some(pictures) => format!("--picture-size {}", pictures.side),
            None => format!("--context {}", model.context),
        };
        let what = format!(
            "--batch {batch}, {length}, {widths}: what a step keeps for its backward pass takes, with the weights,"
        );
        (room.check(state + self.least_kept(), what))
            .map_err(|error| anyhow!("{error}; --recompute keeps less"))
    }

    /// Checks that the device can hold the model's weights.
    pub fn check_weights(&self, device: &NamedDevice) -> Result<()> {
        let bytes = 4.0 * least_parameters(&self.model);
        let what = format!("{}: the weights take", widths(&self.model));
        Room::of(Some(device)).check(bytes, what)
    }

    /// Checks that the number of steps can be counted, for a training split with `train_bytes` predicted bytes.
    ///
    /// # Errors
    /// Names `--epochs`; [`MOST`] bounds `--steps` when it is parsed.
    pub fn check_length(&self, train_bytes: usize) -> Result<()> {
        if let Length::Epochs(epochs) = self.recipe.length {
            let steps = self.steps(train_bytes);
            ensure!(
                steps <= MOST,
                "--epochs must be at most {MOST} steps, got {epochs:?}, which are {steps} of {} bytes",
                self.tokens_per_step()
            );
        }
        Ok(())
    }

    /// Returns the bytes that a step stores between its passes, counting only what every kind of attention has.
    fn least_kept(&self) -> f64 {
        let model = &self.model;
        let [layers, width] = [model.layers, model.d_model].map(|size| size as f64);
        let tokens = self.recipe.batch as f64 * model.context as f64;
        // The residual stream, queries and the attention's output, and the feed-forward network's inner width.
        let inner = model.d_ff.map_or(4.0 * width, |width| width as f64);
        let numbers = match self.recipe.recompute {
            Recompute::None => layers * (3.0 * width + inner),
            Recompute::Mlp => layers * 3.0 * width,
            Recompute::Segments(blocks) | Recompute::SegmentsSavingAttention(blocks) => {
                (layers / blocks.get() as f64).ceil() * width
            }
            _ => 0.0,
        };
        let size = match model.precision {
            Precision::Bf16 | Precision::Fp8 => 2.0,
            _ => 4.0,
        };
        tokens * numbers * size
    }
}

/// Formats the flags that determine the number of parameters.
fn widths(model: &ModelConfig) -> String {
    let mut text = format!("--layers {}, --d-model {}", model.layers, model.d_model);
    for (flag, width) in [("d-key", model.d_key), ("d-ff", model.d_ff)] {
        if let Some(width) = width {
            text += &format!(", --{flag} {width}");
        }
    }
    text
}

/// Counts the parameters that every kind of attention has: projections of queries and of the output, the feed-forward networks and the embedding.
fn least_parameters(model: &ModelConfig) -> f64 {
    let [layers, width] = [model.layers, model.d_model].map(|size| size as f64);
    let queries = model.d_key.map_or(width, |width| width as f64);
    let inner = model.d_ff.map_or(4.0 * width, |width| width as f64);
    let density = model.ff_weights.map_or(1.0, |weights| weights.density);
    layers * width * (queries + width + 2.0 * inner * density) + 256.0 * width
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets::Preset;

    /// No preset that may fit is rejected, and the bounds are below the actual numbers.
    #[test]
    fn presets_take_more_than_is_counted() {
        for (preset, parameters) in [
            (Preset::Tiny, 467_456.0),
            (Preset::Small, 14_448_384.0),
            (Preset::Paper, 94_949_376.0),
        ] {
            let config = RunConfig::read(preset, "").unwrap();
            let least = least_parameters(&config.model);
            assert!(
                least < parameters && least > 0.7 * parameters,
                "{preset}: {least}"
            );
        }
        // docs/dev/benchmark-tables.md: 590 MiB a layer, with the attention in bf16.
        let paper =
            RunConfig::read(Preset::Paper, "--batch 4 --precision bf16 --recompute none").unwrap();
        let layer = paper.least_kept() / 30.0 / f64::from(1 << 20);
        assert!(layer < 590.0 && layer > 200.0, "{layer}");
    }
}
