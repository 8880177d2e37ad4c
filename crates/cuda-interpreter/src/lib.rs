//! A CUDA driver library that interprets PTX on the CPU.
//!
//! Kernels for tensor cores, bulk copies and their barriers can run without an NVIDIA GPU. A program that loads
//! `libcuda.so` finds this crate's library instead, compiles its kernels with the real NVRTC, and launches them here. A
//! launch completes before its call returns. Times are meaningless and nothing is fast. The interpreter checks that
//! results are right, that accesses are aligned and within allocations, and that every wait ends. Warps take
//! turns in an order given by a seed (`CUDA_INTERPRETER_SEED`), and bulk copies arrive late, so a missing barrier
//! or fence shows.
//!
//! Not modelled: products of a warpgroup complete immediately, memory has one global order, and clusters have one
//! cube. Unknown instructions are errors, with their line, when a module is loaded.

mod driver;
mod error;
mod machine;
mod ptx;
