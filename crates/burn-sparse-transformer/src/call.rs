//! What a call of the attention computes.

use burn::tensor::{Bool, DType, Tensor};
use burn_blocksparse::Dropout as WeightDropout;

use crate::error::Result;
use crate::heads::Positions;
use crate::input::PaddedBatch;
use crate::results::Results;
use crate::shared_choice::SharedChoice;
use crate::{Seed, SparseMhaInput};

/// What a call computes, decided before it.
pub(crate) struct Call {
    pub(crate) query: Positions,
    pub(crate) key: Positions,
    /// Queries that are padding, `[batch, seq_q, 1]`.
    pub(crate) padding: Option<Tensor<3, Bool>>,
    pub(crate) dtype: DType,
    /// Of the scores, `[batch or 1, heads or 1, seq_q or 1, seq_kv]`.
    pub(crate) bias: Option<Tensor<4>>,
    pub(crate) dropout_seed: Option<Seed>,
    /// In place of the module's own.
    pub(crate) dropout: Option<WeightDropout>,
    pub(crate) results: Results,
    /// Of an earlier layer.
    pub(crate) choice: Option<SharedChoice>,
}

impl Call {
    /// One of projected heads of a dtype.
    pub(crate) fn of_heads(dtype: DType) -> Self {
        Self {
            query: Positions::From(0),
            key: Positions::From(0),
            padding: None,
            dtype,
            bias: None,
            dropout_seed: None,
            dropout: None,
            results: Results::default(),
            choice: None,
        }
    }

    /// One whose queries and keys are the same rows, at these positions.
    pub(crate) fn at(input: &SparseMhaInput, positions: Positions) -> Result<Self> {
        Ok(Self {
            query: positions.clone(),
            key: positions,
            ..Self::new(input, None)?
        })
    }

    /// One whose positions count from 0.
    pub(crate) fn new(input: &SparseMhaInput, padded: Option<PaddedBatch>) -> Result<Self> {
        let device = input.query.device();
        let padding = match padded {
            Some(padded) => padded.queries_mask(&device)?,
            None => None,
        };
        Ok(Self {
            padding,
            bias: input.bias.clone(),
            dropout_seed: input.dropout_seed,
            dropout: input.dropout,
            results: input.results.clone(),
            choice: input.choice.clone(),
            ..Self::of_heads(input.query.dtype())
        })
    }
}

pub(crate) struct Seen {
    /// `[batch, heads, seq, d_v]`.
    pub(crate) heads: Tensor<4>,
    /// To be added to the loss.
    pub(crate) aux_loss: Option<Tensor<1>>,
    /// For the layers behind this one.
    pub(crate) choice: Option<SharedChoice>,
}

impl From<Tensor<4>> for Seen {
    fn from(heads: Tensor<4>) -> Self {
        Self {
            heads,
            aux_loss: None,
            choice: None,
        }
    }
}
