//! How the `simt` tier reads biases.

use cubecl::prelude::*;

/// Strides of a contiguous bias `[batch or 1, heads or 1, seq_q or 1, seq_kv]`: 0 where it is 1.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct BiasStrides {
    /// Between batch entries.
    pub batch: usize,
    /// Between heads.
    pub head: usize,
    /// Between queries.
    pub row: usize,
}

/// A table of biases of distances, `[heads or 1, 2 · reach + 1]`.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Distances {
    /// Elements before it.
    pub start: usize,
    /// Elements of a head: 0 if heads share it.
    pub head: usize,
    /// The largest distance that has a bias of its own.
    pub reach: usize,
}

/// What is added to scores. In a backward pass the slopes and the table are in its stats.
#[derive(CubeType, CubeLaunch)]
pub struct ScoreBiases<E: Float, A: Float> {
    /// ALiBi slopes, `[heads]`.
    pub slopes: ComptimeOption<Box<[A]>>,
    /// The given bias.
    pub bias: ComptimeOption<Box<[E]>>,
    /// Biases of distances.
    pub table: ComptimeOption<Box<[A]>>,
    /// Strides of the given bias.
    pub strides: BiasStrides,
    /// Where the biases of distances are.
    pub distances: Distances,
}
