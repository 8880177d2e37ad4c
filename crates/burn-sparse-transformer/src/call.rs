//! What a call of the attention computes.

use burn::tensor::{Bool, DType, Tensor};
use burn_blocksparse::layout::PaddingMask;

use crate::SparseMhaInput;
use crate::error::Result;
use crate::heads::Positions;
use crate::input::{CallOptions, padded_queries};
use crate::shared_choice::Aside;

/// Queries, keys and values.
pub(crate) type Heads = [Tensor<4>; 3];

/// What a call computes, decided before it.
pub(crate) struct Call {
    pub(crate) query: Positions,
    pub(crate) key: Positions,
    /// Queries that are padding, `[batch, seq_q, 1]`.
    pub(crate) padding: Option<Tensor<3, Bool>>,
    pub(crate) dtype: DType,
    pub(crate) options: CallOptions,
}

impl Call {
    /// One of projected heads of a dtype.
    pub(crate) fn of_heads(dtype: DType) -> Self {
        Self {
            query: Positions::From(0),
            key: Positions::From(0),
            padding: None,
            dtype,
            options: CallOptions::default(),
        }
    }

    /// One whose queries and keys are the same rows, at these positions.
    pub(crate) fn at(input: &SparseMhaInput, positions: Positions) -> Result<Self> {
        Ok(Self {
            query: positions.clone(),
            key: positions,
            ..Self::new(input, &[])?
        })
    }

    /// One whose positions count from 0.
    pub(crate) fn new(input: &SparseMhaInput, padding: &[PaddingMask]) -> Result<Self> {
        Ok(Self {
            padding: padded_queries(padding, &input.query.device())?,
            options: input.options.clone(),
            ..Self::of_heads(input.query.dtype())
        })
    }
}

/// What a layer's heads see.
pub struct Seen {
    /// `[batch, heads, seq, d_v]`.
    pub heads: Tensor<4>,
    /// For the loss, and the layers behind.
    pub aside: Aside,
}

impl From<Tensor<4>> for Seen {
    fn from(heads: Tensor<4>) -> Self {
        Self {
            heads,
            aside: Aside::default(),
        }
    }
}
