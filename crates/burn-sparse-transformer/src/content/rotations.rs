//! Random rotations of hashes.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_blocksparse::Seed;
use burn_blocksparse::graph::ensure_not_capturing;

use crate::error::Result;

/// Draws independent normal numbers `[rounds, dim, half]` from the seed alone, on the host in f64 (Box and Muller, 1958).
pub(super) fn rotations(
    shape: [usize; 3],
    seed: Seed,
    (device, dtype): (&Device, DType),
) -> Result<Tensor<3>> {
    ensure_not_capturing(WHAT)?;
    let count: usize = shape.iter().product();
    let numbers = (0..count as u64).map(|index| normal(seed.derive(index)));
    let data = TensorData::new(numbers.collect::<Vec<f64>>(), shape);
    let device = device.clone().without_autodiff();
    Ok(Tensor::from_data(
        data.convert_dtype(dtype),
        (&device, dtype),
    ))
}

/// Rotations of the latest seed, shared by copies: those of a configuration are the same in every call.
#[derive(Clone, Debug, Default)]
pub(super) struct KeptRotations(Arc<Mutex<Option<Kept>>>);

#[derive(Debug)]
struct Kept {
    shape: [usize; 3],
    device: Device,
    dtype: DType,
    rotations: Tensor<3>,
}

impl KeptRotations {
    /// [`rotations`] that are cached.
    ///
    /// # Errors
    /// Those of [`rotations`].
    pub fn get(
        &self,
        shape: [usize; 3],
        seed: u64,
        (device, dtype): (&Device, DType),
    ) -> Result<Tensor<3>> {
        ensure_not_capturing(WHAT)?;
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |of: &&Kept| of.shape == shape && of.device == *device && of.dtype == dtype;
        if let Some(known) = kept.as_ref().filter(is_it) {
            return Ok(known.rotations.clone());
        }
        let made = rotations(shape, seed.into(), (device, dtype))?;
        *kept = Some(Kept {
            shape,
            device: device.clone(),
            dtype,
            rotations: made.clone(),
        });
        Ok(made)
    }
}

const WHAT: &str = "rotations of hashes";

fn normal(seed: Seed) -> f64 {
    let [a, b] = [0, 1].map(|half| {
        let bits = seed.derive(half).value() >> 11;
        (bits as f64 + 0.5) / (1u64 << 53) as f64
    });
    (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotations_are_normal_and_those_of_their_seed() {
        let device = Device::flex();
        let draw = |seed: u64| {
            let shape = [4, 50, 50];
            let drawn = rotations(shape, seed.into(), (&device, DType::F64)).unwrap();
            drawn.into_data().iter::<f64>().collect::<Vec<f64>>()
        };
        let numbers = draw(1);
        let moment = |power| {
            let powers = numbers.iter().map(|x: &f64| x.powi(power));
            powers.sum::<f64>() / numbers.len() as f64
        };
        // Four standard errors of 10,000 numbers.
        for (power, expected, error) in [(1, 0.0, 0.04), (2, 1.0, 0.057), (4, 3.0, 0.4)] {
            let got = moment(power);
            assert!((got - expected).abs() < error, "{power}: {got}");
        }
        assert_eq!(draw(1), numbers);
        assert_ne!(draw(2), numbers);
    }
}
