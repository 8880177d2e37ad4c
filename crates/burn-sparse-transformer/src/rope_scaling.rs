//! Rotary embeddings for contexts longer than a model was trained for.

use std::f64::consts::PI;

use burn::nn::{RotaryEncoding, RotaryEncodingConfig};
use burn::tensor::{Device, Tensor};
use serde::{Deserialize, Serialize};

use crate::error::{Result, ensure};

/// Scaling of the frequencies of rotary embeddings, like `rope_scaling` of `transformers`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum RopeScaling {
    /// Divides all frequencies by `factor`: position interpolation (Chen et al., 2023).
    Linear {
        /// Factor by which the context grows.
        factor: f64,
    },
    /// Divides low frequencies by `factor`, keeps high ones, with a ramp in between: Llama 3.1.
    Llama3 {
        /// Factor by which the context grows.
        factor: f64,
        /// Frequencies with wavelengths above the original context divided by this are divided by `factor`.
        low_freq_factor: f64,
        /// Frequencies with wavelengths below the original context divided by this are kept.
        high_freq_factor: f64,
        /// Original context.
        original_max_position_embeddings: usize,
    },
    /// YaRN (Peng et al., 2023): a ramp between dimensions, and larger scores.
    Yarn {
        /// Factor by which the context grows.
        factor: f64,
        /// Original context.
        original_max_position_embeddings: usize,
        /// Frequencies with at least this many rotations in the original context are kept. The paper's value is 32.
        #[serde(default = "beta_fast")]
        beta_fast: f64,
        /// Frequencies with at most this many rotations in the original context are divided by `factor`. The paper's value is 1.
        #[serde(default = "beta_slow")]
        beta_slow: f64,
        /// Factor of rotated queries and of rotated keys. Default: `0.1 · ln(factor) + 1`.
        attention_factor: Option<f64>,
    },
    /// Divides each frequency by its own factor, as in `rope_freqs.weight` of a GGUF file of Llama 3.1.
    Factors {
        /// One factor per frequency, half the width of a head, highest frequency first.
        factors: Vec<f64>,
    },
}

fn beta_fast() -> f64 {
    32.0
}

fn beta_slow() -> f64 {
    1.0
}

impl RopeScaling {
    /// Checks that its values are in range for heads of `width`.
    pub(crate) fn check(&self, width: usize) -> Result<()> {
        let factor = match self {
            Self::Linear { factor } | Self::Llama3 { factor, .. } | Self::Yarn { factor, .. } => {
                *factor
            }
            Self::Factors { factors } => return check_factors(factors, width),
        };
        ensure! { factor.is_finite() && factor >= 1.0 =>
        "rope_scaling.factor", "finite and at least 1", factor; }
        if let Self::Yarn {
            attention_factor: Some(factor),
            ..
        } = *self
        {
            let valid = factor.is_finite() && factor > 0.0;
            ensure! { valid => "rope_scaling.attention_factor", "finite and above 0", factor; }
        }
        let (original, [low, high]) = match *self {
            Self::Linear { .. } | Self::Factors { .. } => return Ok(()),
            Self::Llama3 {
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
                ..
            } => (
                original_max_position_embeddings,
                [low_freq_factor, high_freq_factor],
            ),
            Self::Yarn {
                beta_slow,
                beta_fast,
                original_max_position_embeddings,
                ..
            } => (original_max_position_embeddings, [beta_slow, beta_fast]),
        };
        ensure! {
            original > 0 => "rope_scaling.original_max_position_embeddings", "at least 1", original;
            0.0 < low && low < high && high.is_finite() =>
                "rope_scaling", "bounds above 0, the lower one first", format!("{low} and {high}");
        }
        Ok(())
    }

    /// Returns the `width / 2` scaled frequencies with base `theta`.
    fn frequencies(&self, width: usize, theta: f64) -> Vec<f64> {
        let plain = (0..width / 2).map(|pair| theta.powf(-2.0 * pair as f64 / width as f64));
        match *self {
            Self::Linear { factor } => plain.map(|frequency| frequency / factor).collect(),
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let turn = |frequency: f64| {
                    let turns = original_max_position_embeddings as f64 * frequency / (2.0 * PI);
                    let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    mixed(frequency, factor, smooth.clamp(0.0, 1.0))
                };
                plain.map(turn).collect()
            }
            Self::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                ..
            } => {
                // Dimension that rotates this many times in the original context.
                let dimension = |turns: f64| {
                    let original = original_max_position_embeddings as f64;
                    width as f64 * (original / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln())
                };
                let low = dimension(beta_fast).floor().max(0.0);
                let high = dimension(beta_slow).ceil().min(width as f64 - 1.0);
                let length = if low == high { 0.001 } else { high - low };
                let turn = |(pair, frequency)| {
                    let ramp = ((pair as f64 - low) / length).clamp(0.0, 1.0);
                    mixed(frequency, factor, 1.0 - ramp)
                };
                plain.enumerate().map(turn).collect()
            }
            Self::Factors { ref factors } => {
                let pairs = plain.zip(factors);
                pairs
                    .map(|(frequency, factor)| frequency / factor)
                    .collect()
            }
        }
    }

    /// Returns the factor of the scores. It is not in the table, since rotating back would apply it again.
    pub(crate) fn score_factor(&self) -> f64 {
        match *self {
            Self::Yarn {
                factor,
                attention_factor,
                ..
            } => {
                let factor = attention_factor.unwrap_or(0.1 * factor.ln() + 1.0);
                factor * factor
            }
            Self::Linear { .. } | Self::Llama3 { .. } | Self::Factors { .. } => 1.0,
        }
    }

    /// Returns the rotation table.
    pub(crate) fn init(&self, rope: &RotaryEncodingConfig, device: &Device) -> RotaryEncoding {
        let scaled = self.frequencies(rope.d_model, f64::from(rope.theta));
        let scaled: Vec<f32> = scaled
            .into_iter()
            .map(|frequency| frequency as f32)
            .collect();
        rope.init_with_frequency_scaling(|_| Tensor::from_floats(scaled.as_slice(), device), device)
    }
}

fn check_factors(factors: &[f64], width: usize) -> Result<()> {
    let count = factors.len();
    ensure! { count == width / 2 =>
    "the number of rope_scaling.factors", format!("{}, half the width of a head", width / 2), count; }
    let wrong = (factors.iter()).find(|factor| !(factor.is_finite() && **factor > 0.0));
    ensure! { wrong.is_none() => "rope_scaling.factors", "finite and above 0", wrong.unwrap_or(&0.0); }
    Ok(())
}

/// Interpolates: the share `kept` of a frequency stays, the rest is divided by `factor`.
fn mixed(frequency: f64, factor: f64, kept: f64) -> f64 {
    frequency * kept + frequency / factor * (1.0 - kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama_3_2() -> RopeScaling {
        RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        }
    }

    fn yarn() -> RopeScaling {
        RopeScaling::Yarn {
            factor: 4.0,
            original_max_position_embeddings: 32_768,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
        }
    }

    /// Frequencies of Llama-3.2-1B and of Qwen2.5 with a factor of 4, by the formulas of `transformers`.
    #[test]
    fn frequencies_are_those_of_transformers() {
        let llama: [(usize, f64); 6] = [
            (0, 1.0),
            (5, 0.1286873734326505),
            (13, 0.004839421345719893),
            (15, 0.001290547928209264),
            (17, 9.70828780262767e-05),
            (31, 9.418306725434909e-08),
        ];
        let qwen: [(usize, f64); 6] = [
            (0, 1.0),
            (20, 0.01333521432163324),
            (25, 0.004131738022518394),
            (32, 0.0006029411764705882),
            (39, 6.490394320837028e-05),
            (63, 3.102344401879299e-07),
        ];
        let llama_table = llama_3_2().frequencies(64, 5e5);
        let qwen_table = yarn().frequencies(128, 1e6);
        for (table, golden) in [(llama_table, llama), (qwen_table, qwen)] {
            for (pair, expected) in golden {
                let error = (table[pair] / expected - 1.0).abs();
                assert!(error < 1e-12, "{pair}: {} for {expected}", table[pair]);
            }
        }
        let linear = RopeScaling::Linear { factor: 8.0 };
        assert_eq!(linear.frequencies(4, 1e4), [0.125, 0.01 / 8.0]);
        let factors = RopeScaling::Factors {
            factors: vec![1.0, 4.0],
        };
        assert_eq!(factors.frequencies(4, 1e4), [1.0, 0.01 / 4.0]);
        assert!((yarn().score_factor() - 1.296476992780706).abs() < 1e-14);
    }

    #[test]
    fn numbers_out_of_their_range_are_refused() {
        let message = |scaling: RopeScaling| scaling.check(64).unwrap_err().to_string();
        assert_eq!(
            message(RopeScaling::Linear { factor: 0.5 }),
            "rope_scaling.factor must be finite and at least 1, got 0.5"
        );
        let turned = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 4.0,
            high_freq_factor: 1.0,
            original_max_position_embeddings: 8192,
        };
        assert_eq!(
            message(turned),
            "rope_scaling must be bounds above 0, the lower one first, got 4 and 1"
        );
        yarn().check(64).unwrap();
        let factors = |factors: &[f64]| RopeScaling::Factors {
            factors: factors.to_vec(),
        };
        assert_eq!(
            message(factors(&[1.0; 31])),
            "the number of rope_scaling.factors must be 32, half the width of a head, got 31"
        );
        let mut numbers = [1.0; 32];
        factors(&numbers).check(64).unwrap();
        numbers[7] = 0.0;
        assert_eq!(
            message(factors(&numbers)),
            "rope_scaling.factors must be finite and above 0, got 0"
        );
    }
}
