//! Windows of a text, and their scores.

use burn::tensor::{Device, Int, Tensor, TensorData};

/// Bits of scored tokens.
#[derive(Default)]
pub struct Bits {
    pub bits: f64,
    pub tokens: usize,
    pub bytes: usize,
    /// Share of causal pairs, or of earlier keys that a cache keeps, that attention sees.
    pub share: Option<f64>,
}

pub struct Windows<'a> {
    pub ids: &'a [u32],
    /// End offset of each token in the text.
    pub ends: &'a [usize],
    /// First token of each window.
    pub starts: Vec<usize>,
    /// Tokens of a window.
    pub length: usize,
    pub device: &'a Device,
}

impl Windows<'_> {
    /// Returns the tokens of windows, shifted by `shift`: `[starts, length]`.
    pub fn tokens(&self, starts: &[usize], shift: usize) -> Tensor<2, Int> {
        let of = |start: &usize| self.ids[start + shift..][..self.length].iter();
        let ids = starts.iter().flat_map(of).map(|&id| id as i32).collect();
        let data = TensorData::new::<i32, _>(ids, [starts.len(), self.length]);
        Tensor::from_data(data, self.device)
    }

    /// Returns the bytes of a window's targets after its first `prompt` ones.
    pub fn bytes(&self, start: usize, prompt: usize) -> usize {
        self.ends[start + self.length] - self.ends[start + prompt]
    }
}
