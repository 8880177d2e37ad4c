//! A model and its pool, one call at a time or replayed.

use anyhow::Result;
use burn::tensor::{Device, Tensor, TensorData};
use burn_paged_attention::pool::{GraphDecoder, KvPool, KvStep, PagedDecoder};
use burn_sparse_transformer::SparseTransformer;

use crate::model::numbers;
use crate::step::replays;

/// A model and its pool.
pub enum Decoder {
    Plain(Box<(SparseTransformer, KvPool)>),
    CapturedGraph(Box<GraphDecoder<SparseTransformer>>),
}

impl Decoder {
    /// With `graph` steps of as many tokens are recorded and replayed where the device can.
    pub fn new(model: SparseTransformer, pool: KvPool, graph: bool) -> Result<Self> {
        Ok(match graph {
            true => Self::CapturedGraph(Box::new(GraphDecoder::new(model, pool)?)),
            false => Self::Plain(Box::new((model, pool))),
        })
    }

    /// Does something with the pool.
    pub fn with_pool<T>(&mut self, f: impl FnOnce(&mut KvPool) -> T) -> T {
        match self {
            Self::Plain(plain) => f(&mut plain.1),
            Self::CapturedGraph(decoder) => f(&mut decoder.pool_mut()),
        }
    }

    /// The logits behind every byte of rows of them.
    pub fn all_logits(
        &mut self,
        tokens: &[u32],
        steps: &[KvStep],
        device: &Device,
    ) -> Result<Tensor<3>> {
        let data = rows_of(tokens, steps.len());
        Ok(match self {
            Self::Plain(plain) => {
                let (model, pool) = &mut **plain;
                model.try_forward_pool(Tensor::from_data(data, device), steps, pool)?
            }
            Self::CapturedGraph(decoder) => decoder.all_logits(tokens, steps)?,
        })
    }

    /// The logits after the last token of each row, on the host.
    pub fn next_rows(
        &mut self,
        tokens: &[u32],
        steps: &[KvStep],
        device: &Device,
    ) -> Result<Vec<Vec<f32>>> {
        let next = match self {
            Self::Plain(plain) => {
                let (model, pool) = &mut **plain;
                let tokens = Tensor::from_data(rows_of(tokens, steps.len()), device);
                model.next_logits(tokens, steps, pool)?
            }
            Self::CapturedGraph(decoder) => decoder.next_logits(tokens, steps)?,
        };
        let [_, vocab] = next.dims();
        let next = numbers(next)?;
        Ok(next.chunks(vocab).map(<[f32]>::to_vec).collect())
    }

    /// How steps of a token run, where they were to be replayed and it is known.
    pub fn describe(&self) -> Option<String> {
        match self {
            Self::Plain(_) => None,
            Self::CapturedGraph(decoder) => {
                replays(decoder.is_recorded(), decoder.fallback_reason())
            }
        }
    }
}

fn rows_of(tokens: &[u32], rows: usize) -> TensorData {
    let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    let row = tokens.len() / rows;
    TensorData::new(tokens, [rows, row])
}
