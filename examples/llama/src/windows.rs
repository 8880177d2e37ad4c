//! Windows of a text, and what their tokens take.

use burn::tensor::{Device, Int, Tensor, TensorData};

/// Bits of tokens that count.
#[derive(Default)]
pub struct Bits {
    pub bits: f64,
    pub tokens: usize,
    pub bytes: usize,
    /// Of causal pairs, or of earlier keys that a cache keeps, those that attention sees.
    pub share: Option<f64>,
}

/// Windows of a text.
pub struct Windows<'a> {
    pub ids: &'a [u32],
    /// Where each token ends in the text.
    pub ends: &'a [usize],
    /// The first token of each.
    pub starts: Vec<usize>,
    /// Tokens of each.
    pub length: usize,
    pub device: &'a Device,
}

impl Windows<'_> {
    /// Tokens of windows, `shift` behind where they start, `[starts, length]`.
    pub fn tokens(&self, starts: &[usize], shift: usize) -> Tensor<2, Int> {
        let of = |start: &usize| self.ids[start + shift..][..self.length].iter();
        let ids = starts.iter().flat_map(of).map(|&id| id as i32).collect();
        let data = TensorData::new::<i32, _>(ids, [starts.len(), self.length]);
        Tensor::from_data(data, self.device)
    }

    /// Bytes of a window's targets behind its first `prompt`.
    pub fn bytes(&self, start: usize, prompt: usize) -> usize {
        self.ends[start + self.length] - self.ends[start + prompt]
    }
}
