//! Norms and rotations of queries and keys between projection and scores.

use burn::module::Module;
use burn::nn::{
    LayerNorm, LayerNormConfig, RmsNorm, RmsNormConfig, RotaryEncoding, RotaryEncodingConfig,
};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_blocksparse::OpError;
use burn_blocksparse::graph::ensure_not_capturing;
use burn_fused_ops::{
    AddNormOptions, NormKind, NormParams, RopePositions, norm, rope as rope_op, rope_pair,
};
use serde::{Deserialize, Serialize};

use crate::TransformerError;
use crate::error::{Result, ensure, ensure_multiple};
use crate::stream::layer_norm_params;

/// Normalisation of every query and key head, before the rotation (Dehghani et al., 2023, §2).
///
/// There is one gain per channel for queries and one for keys, shared by all heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum QkNorm {
    /// `x / √(mean(x²) + ε) · γ`, as in Qwen3 and Gemma 3.
    Rms,
    /// `(x − mean(x)) / √(var(x) + ε) · γ + β`, as in ViT-22B.
    Layer,
}

/// Parameters of a [`QkNorm`], `[d_k]` each.
#[derive(Module, Debug)]
#[non_exhaustive]
pub enum HeadNorm {
    /// Parameters of [`QkNorm::Rms`].
    Rms(RmsNorm),
    /// Parameters of [`QkNorm::Layer`].
    Layer(LayerNorm),
}

impl HeadNorm {
    pub(crate) fn new(kind: QkNorm, width: usize, epsilon: f64, device: &Device) -> Self {
        match kind {
            QkNorm::Rms => {
                let config = RmsNormConfig::new(width).with_epsilon(epsilon);
                Self::Rms(config.init(device))
            }
            QkNorm::Layer => {
                let config = LayerNormConfig::new(width).with_epsilon(epsilon);
                Self::Layer(config.init(device))
            }
        }
    }

    /// Normalises each head of `[batch, heads, seq, width]`, in the parameters' dtype.
    pub(crate) fn forward(&self, x: Tensor<4>, epsilon: f64) -> Result<Tensor<4>, OpError> {
        let (params, options) = match self {
            Self::Rms(rms) => (
                NormParams::new(rms.gamma.val()),
                AddNormOptions::default()
                    .norm(NormKind::Rms)
                    .epsilon(rms.epsilon),
            ),
            Self::Layer(layer) => (
                layer_norm_params(layer),
                AddNormOptions::default().epsilon(epsilon),
            ),
        };
        let dtype = params.gamma.dtype();
        norm(x, params, &options.dtype(dtype.into()))
    }
}

/// Positions of a tensor's rows in their sequences.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Positions {
    /// Consecutive positions, from this one on.
    From(usize),
    /// Documents of these lengths, each from position 0 on.
    Documents(Vec<usize>),
    /// Position of every row of every batch entry, `[batch · seq]`; checked by the caller.
    Listed(Box<Tensor<1, Int>>),
}

impl Positions {
    /// Checks that the rotation table covers all positions.
    pub(crate) fn check(&self, rope: &RotaryEncoding, seq: usize) -> Result<()> {
        let [context, ..] = rope.freq_complex.dims();
        let (start, end) = match self {
            Self::From(start) => (*start, start + seq),
            Self::Documents(lengths) => (0, lengths.iter().copied().max().unwrap_or(0)),
            Self::Listed(_) => (0, 0),
        };
        match end > context {
            true => Err(TransformerError::ContextExceeded {
                context,
                limit: "rope.max_sequence_length",
                start,
                end,
            }),
            false => Ok(()),
        }
    }
}

/// Rotates the heads `[batch, heads, seq, width]` in the dtype of the table, like burn-nn's `RotaryEncoding::apply`, and rounds to `dtype`.
pub(crate) fn rotate(
    rope: &RotaryEncoding,
    x: Tensor<4>,
    positions: &Positions,
    dtype: DType,
) -> Result<Tensor<4>> {
    turned(rope, x, positions, dtype, false)
}

/// [`rotate`] for the first channels, as many as the table has, in the dtype of `x`.
pub(crate) fn rotate_first(
    rope: &Option<RotaryEncoding>,
    x: Tensor<4>,
    positions: &Positions,
) -> Result<Tensor<4>> {
    let Some(rope) = rope else { return Ok(x) };
    let [.., width] = x.dims();
    let [_, turned, _] = rope.freq_complex.dims();
    let first = x.clone().narrow(3, 0, turned);
    let first = rotate(rope, first, positions, x.dtype())?;
    Ok(match turned == width {
        true => first,
        false => Tensor::cat(vec![first, x.narrow(3, turned, width - turned)], 3),
    })
}

/// Rotates backwards: heads rotated for position p become heads rotated for p − `by`.
pub fn rotate_back(rope: &RotaryEncoding, x: Tensor<4>, by: &Positions) -> Result<Tensor<4>> {
    let dtype = x.dtype();
    turned(rope, x, by, dtype, true)
}

fn turned(
    rope: &RotaryEncoding,
    x: Tensor<4>,
    positions: &Positions,
    dtype: DType,
    back: bool,
) -> Result<Tensor<4>> {
    let table = rope.freq_complex.clone();
    let positions = places_in(&table, positions)?;
    Ok(rope_op(x, table, positions, dtype.into(), back)?)
}

/// [`rotate`] for queries and keys of the same rows.
pub(crate) fn rotate_both(
    rope: &RotaryEncoding,
    [query, key]: [Tensor<4>; 2],
    positions: &Positions,
    dtype: DType,
) -> Result<[Tensor<4>; 2]> {
    if query.dtype() != key.dtype() {
        let query = rotate(rope, query, positions, dtype)?;
        return Ok([query, rotate(rope, key, positions, dtype)?]);
    }
    let table = rope.freq_complex.clone();
    let positions = places_in(&table, positions)?;
    Ok(rope_pair(
        query,
        key,
        table,
        positions,
        dtype.into(),
        false,
    )?)
}

fn places_in(table: &Tensor<3>, positions: &Positions) -> Result<RopePositions> {
    Ok(match positions {
        Positions::From(start) => RopePositions::From(*start),
        Positions::Documents(lengths) => RopePositions::Of(Box::new(of_documents(lengths, table)?)),
        Positions::Listed(places) => RopePositions::Of(places.clone()),
    })
}

fn of_documents(lengths: &[usize], table: &Tensor<3>) -> Result<Tensor<1, Int>> {
    ensure_not_capturing("positions in documents")?;
    let places: Vec<i64> = (lengths.iter()).flat_map(|&n| 0..n as i64).collect();
    let count = places.len();
    let device = table.device().without_autodiff();
    Ok(Tensor::from_data(TensorData::new(places, [count]), &device))
}

/// [`rotate`] in about twenty autodiff steps. Autodiff runs steps by their depth: with that many, the branches of native sparse attention add their gradients
/// in one order, whatever is recomputed.
pub(crate) fn rotate_apart(
    rope: &RotaryEncoding,
    x: Tensor<4>,
    positions: &Positions,
    dtype: DType,
) -> Result<Tensor<4>> {
    let [batch, heads, seq, width] = x.dims();
    let table = rope.freq_complex.clone();
    // `[batch or 1, seq, width, 2]`: cosine and sine, for both channels of a pair.
    let table = match positions {
        Positions::From(start) => table.narrow(0, *start, seq).unsqueeze_dim::<4>(0),
        Positions::Documents(lengths) => {
            let places = of_documents(lengths, &table)?;
            table.select(0, places).unsqueeze_dim::<4>(0)
        }
        Positions::Listed(places) => {
            (table.select(0, *places.clone())).reshape([batch, seq, width, 2])
        }
    };
    let [entries, ..] = table.dims();
    let table = table.reshape([entries, 1, seq, width / 2, 4]);
    let (cosine, sine) = (table.clone().narrow(4, 0, 1), table.narrow(4, 1, 1));
    let pairs = x.cast(rope.freq_complex.dtype());
    let pairs = pairs.reshape([batch, heads, seq, width / 2, 2]);
    let (first, second) = (pairs.clone().narrow(4, 0, 1), pairs.narrow(4, 1, 1));
    let rotated = [
        first.clone() * cosine.clone() - second.clone() * sine.clone(),
        second * cosine + first * sine,
    ];
    let rotated = Tensor::cat(rotated.into(), 4).reshape([batch, heads, seq, width]);
    Ok(rotated.cast(dtype))
}

/// Angles are computed from positions in f32, which is exact up to 2²⁴.
const MAX_POSITIONS: usize = 1 << 24;

/// Checks that `config` does not panic and matches heads of width `d_k`.
pub(crate) fn validate_rope(config: &RotaryEncodingConfig, d_k: usize) -> Result<()> {
    ensure! {
        (1..=MAX_POSITIONS).contains(&config.max_sequence_length) =>
            "rope.max_sequence_length", format!("between 1 and {MAX_POSITIONS}"), config.max_sequence_length;
        config.d_model == d_k => "rope.d_model", format!("{d_k}, the width of a query head"), config.d_model;
    }
    ensure_multiple("rope.d_model", config.d_model, "the rotated pairs", 2)?;
    ensure! { config.theta > 0.0 && config.theta.is_finite() =>
    "rope.theta", "positive and finite", config.theta; }
    Ok(())
}
