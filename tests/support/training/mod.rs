//! Operations besides attention, and the optimizer.

pub mod activation;
pub mod block_sparse;
pub mod case;
pub mod dropout;
pub mod embedding;
pub mod few_rows;
pub mod gates;
pub mod heads;
pub mod linear;
pub mod loss;
pub mod mlp;
pub mod norm;
pub mod optim;
pub mod projection;
pub mod rope;
