use std::sync::Arc;

use burn::tensor::{Bool, Device, Tensor, TensorData};
use burn_blocksparse::graph::ensure_not_capturing;
use burn_blocksparse::layout::PaddingMask;
use burn_blocksparse::{Dropout, Seed};

use crate::error::{Result, ensure, ensure_shape};
use crate::results::Results;
use crate::shared_choice::SharedChoice;

/// Input of [`crate::SparseMultiHeadAttention`].
#[derive(Clone, Debug)]
#[must_use = "an input does nothing until it is passed to a layer"]
pub struct SparseMhaInput {
    pub(crate) query: Tensor<3>,
    pub(crate) key: Tensor<3>,
    pub(crate) value: Tensor<3>,
    pub(crate) padding: Option<Padding>,
    pub(crate) options: CallOptions,
    /// True if the queries are positions of the same sequence as the keys.
    self_attention: bool,
}

/// Options of a call.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallOptions {
    /// Bias of the scores, `[batch or 1, heads or 1, seq_q or 1, seq_kv]`.
    pub(crate) bias: Option<Tensor<4>>,
    pub(crate) dropout_seed: Option<Seed>,
    /// Dropout, in training or not; `None` leaves it to the module.
    pub(crate) dropout: Option<Dropout>,
    pub(crate) results: Results,
    /// Choice of an earlier layer.
    pub(crate) choice: Option<SharedChoice>,
}

#[derive(Clone, Debug)]
pub(crate) enum Padding {
    /// `[batch, seq_kv]`, `true` = padding.
    Mask(Box<Tensor<2, Bool>>),
    /// Mask that was read from its device: shape and values.
    Read([usize; 2], Arc<Vec<bool>>),
    /// Number of real keys of each batch entry; all later ones are padding.
    Lengths(Vec<usize>),
}

impl Padding {
    /// Reads a mask from its device, for repeated use.
    pub(crate) fn read(self) -> Self {
        match self {
            Self::Mask(mask) => {
                let dims = mask.dims();
                Self::Read(dims, Arc::new(mask.into_data().iter::<bool>().collect()))
            }
            other => other,
        }
    }

    /// Returns which of `[batch, seq_kv]` keys are real.
    fn keys(&self, batch: usize, seq_kv: usize) -> Result<Vec<Vec<bool>>> {
        let check = |dims| {
            let expected = [Some(batch), Some(seq_kv)];
            ensure_shape("mask_pad", dims, expected, ["batch", "seq_kv"])
        };
        Ok(match self {
            Self::Mask(mask) => {
                check(mask.dims())?;
                return self.clone().read().keys(batch, seq_kv);
            }
            Self::Read(dims, padding) => {
                check(*dims)?;
                let entries = padding.chunks(seq_kv);
                entries
                    .map(|entry| entry.iter().map(|padded| !padded).collect())
                    .collect()
            }
            Self::Lengths(lengths) => {
                ensure! { lengths.len() == batch =>
                "lengths", format!("of {batch} batch entries"), lengths.len(); }
                let over = lengths.iter().find(|&&length| length > seq_kv);
                ensure! { over.is_none() =>
                "lengths", format!("at most {seq_kv}, the number of keys"), over.unwrap_or(&0); }
                let entries = lengths.iter();
                entries
                    .map(|&length| (0..seq_kv).map(|j| j < length).collect())
                    .collect()
            }
        })
    }
}

impl SparseMhaInput {
    /// Self-attention: one tensor is query, key and value.
    ///
    /// # Shapes
    /// - `tensor`: `[batch, seq, d_model]`
    pub fn self_attn(tensor: Tensor<3>) -> Self {
        Self {
            self_attention: true,
            ..Self::new(tensor.clone(), tensor.clone(), tensor)
        }
    }

    /// Query, key and value from different tensors.
    ///
    /// # Shapes
    /// - `query`: `[batch, seq_q, d_model]`
    /// - `key`, `value`: `[batch, seq_kv, d_model]`
    pub fn new(query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> Self {
        Self {
            query,
            key,
            value,
            padding: None,
            options: CallOptions::default(),
            self_attention: false,
        }
    }

    /// Sets which keys are padding, as in burn-nn: no query attends to them. In self-attention ([`Self::self_attn`]) the same positions are padding as
    /// queries too, and their output is 0.
    ///
    /// The mask becomes part of the layout, so it is read from its device, which waits for pending work; [`Self::lengths`] does not.
    ///
    /// # Shapes
    /// - `mask`: `[batch, seq_kv]`, `true` = padding; with a cache `seq_kv` includes its positions
    pub fn mask_pad(mut self, mask: Tensor<2, Bool>) -> Self {
        self.padding = Some(Padding::Mask(Box::new(mask)));
        self
    }

    /// [`Self::mask_pad`] for padding at the end: batch entry `b` has `lengths[b]` real keys; all later ones are padding.
    pub fn lengths(mut self, lengths: impl IntoIterator<Item = usize>) -> Self {
        self.padding = Some(Padding::Lengths(lengths.into_iter().collect()));
        self
    }

    blocksparse::setters! {
        /// Sets a bias of the scores, added after scale and softcap, with gradient. Values must be finite: the pattern masks.
        ///
        /// # Shapes
        /// - `bias`: `[batch or 1, n_heads or 1, seq_q or 1, seq_kv]`; with a cache `seq_kv` includes its positions
        bias => options.bias: Some(Tensor<4>),
        /// Sets the keys that queries attend to, for a layer that takes them ([`ChoiceSharing::Takes`](crate::content::ChoiceSharing::Takes)): the choice of
        /// an earlier layer for the same tokens ([`SparseMhaOutput::choice`](crate::SparseMhaOutput::choice)).
        choice => options.choice: Some(SharedChoice),
    }

    /// Sets the seed of the module's dropout, which determines the mask ([`burn_blocksparse::Dropout`]), and of the rotations of heads that choose by hashes.
    /// Default: a new seed in every call, but fixed rotations outside of training.
    pub fn dropout_seed(mut self, seed: impl Into<Seed>) -> Self {
        self.options.dropout_seed = Some(seed.into());
        self
    }

    pub(crate) fn is_self_attention(&self) -> bool {
        self.self_attention
    }

    /// Returns the padding per batch entry; empty if there is none.
    pub(crate) fn padding(
        &self,
        batch: usize,
        seq_q: usize,
        seq_kv: usize,
    ) -> Result<Vec<PaddingMask>> {
        let Some(padding) = &self.padding else {
            return Ok(Vec::new());
        };
        let mask = |keys: Vec<bool>| {
            // Queries are the last positions; those before the first key are not padding.
            let is_real = |i: usize| (i + seq_kv).checked_sub(seq_q).is_none_or(|at| keys[at]);
            let queries = (self.self_attention).then(|| (0..seq_q).map(is_real).collect());
            let mut mask = PaddingMask::default().keys(keys);
            mask.queries = queries;
            mask
        };
        let keys = padding.keys(batch, seq_kv)?;
        Ok(keys.into_iter().map(mask).collect())
    }
}

/// Returns the queries that are padding, `[batch, seq_q, 1]`; `None` unless they are the keys' tokens.
pub(crate) fn padded_queries(
    padding: &[PaddingMask],
    device: &Device,
) -> Result<Option<Tensor<3, Bool>>> {
    let queries = padding.iter().map(|entry| entry.queries.as_deref());
    let queries: Vec<&[bool]> = queries.flatten().collect();
    let Some(first) = queries.first() else {
        return Ok(None);
    };
    ensure_not_capturing("which queries are padding")?;
    let shape = [queries.len(), first.len(), 1];
    let padding: Vec<bool> = queries.concat().iter().map(|kept| !kept).collect();
    let device = device.clone().without_autodiff();
    let padding = TensorData::new(padding, shape);
    Ok(Some(Tensor::from_data(padding, &device)))
}
