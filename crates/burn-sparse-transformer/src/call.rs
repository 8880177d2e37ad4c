//! Parameters of an attention call.

use burn::tensor::{Bool, DType, Tensor};
use burn_blocksparse::layout::PaddingMask;

use crate::SparseMhaInput;
use crate::error::Result;
use crate::heads::Positions;
use crate::input::{CallOptions, padded_queries};
use crate::shared_choice::Aside;

/// Queries, keys and values.
pub(crate) type Heads = [Tensor<4>; 3];

/// Parameters of a call, determined before it runs.
pub(crate) struct Call {
    pub(crate) query: Positions,
    pub(crate) key: Positions,
    /// Queries that are padding, `[batch, seq_q, 1]`.
    pub(crate) padding: Option<Tensor<3, Bool>>,
    pub(crate) dtype: DType,
    pub(crate) options: CallOptions,
}

impl Call {
    /// Returns the call for projected heads of a dtype.
    pub(crate) fn of_heads(dtype: DType) -> Self {
        Self {
            query: Positions::From(0),
            key: Positions::From(0),
            padding: None,
            dtype,
            options: CallOptions::default(),
        }
    }

    /// Returns the call for queries and keys that are the same rows, at these positions.
    pub(crate) fn at(input: &SparseMhaInput, positions: Positions) -> Result<Self> {
        Ok(Self {
            query: positions.clone(),
            key: positions,
            ..Self::new(input, &[])?
        })
    }

    /// Returns the call for positions from 0 on.
    pub(crate) fn new(input: &SparseMhaInput, padding: &[PaddingMask]) -> Result<Self> {
        Ok(Self {
            padding: padded_queries(padding, &input.query.device())?,
            options: input.options.clone(),
            ..Self::of_heads(input.query.dtype())
        })
    }
}

/// Outputs of a layer's heads.
pub struct Seen {
    /// `[batch, heads, seq, d_v]`.
    pub heads: Tensor<4>,
    /// Auxiliary loss, and choice for later layers.
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
