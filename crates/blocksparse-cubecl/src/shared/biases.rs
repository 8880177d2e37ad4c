//! Arguments of biases in the `simt` tier.

use cubecl::prelude::*;

/// Strides of a contiguous bias `[batch or 1, heads or 1, seq_q or 1, seq_kv]`. The stride of a dimension of length 1 is 0.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct BiasStrides {
    /// Stride of batch entries.
    pub batch: usize,
    /// Stride of heads.
    pub head: usize,
    /// Stride of queries.
    pub row: usize,
}

/// Location of a table of biases of distances, `[heads or 1, 2 · reach + 1]`.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Distances {
    /// Element at which it begins.
    pub start: usize,
    /// Elements per head, 0 if heads share it.
    pub head: usize,
    /// Largest distance with a bias of its own.
    pub reach: usize,
}

/// Biases of scores. In a backward pass the slopes and the table are in the stats instead.
#[derive(CubeType, CubeLaunch)]
pub struct ScoreBiases<E: Float, A: Float> {
    /// ALiBi slopes, `[heads]`.
    pub slopes: ComptimeOption<Box<[A]>>,
    /// Bias tensor.
    pub bias: ComptimeOption<Box<[E]>>,
    /// Table of distances.
    pub table: ComptimeOption<Box<[A]>>,
    /// Strides of the bias tensor.
    pub strides: BiasStrides,
    /// Location of the table of distances.
    pub distances: Distances,
}
