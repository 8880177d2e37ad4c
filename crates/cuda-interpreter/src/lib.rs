//! A CUDA driver library that interprets PTX on the CPU.
//!
//! Kernels for tensor cores, bulk copies and their barriers run where there is no NVIDIA GPU: a program that loads
//! `libcuda.so` finds this crate's in its place, compiles its kernels with the real NVRTC, and launches them here. A
//! launch runs to its end before the call returns. Nothing is timed and nothing is fast; what is checked is that
//! results are right, that accesses are aligned and within what was allocated, and that every wait ends. Warps take
//! turns in an order that a seed decides (`CUDA_INTERPRETER_SEED`), and bulk copies arrive late, so a missing barrier
//! or fence shows.
//!
//! What is not modelled: products of a warpgroup are there at once, memory has one order for all, and clusters have one
//! cube. An instruction that is not known is an error when its module is loaded, with its line.

mod driver;
mod error;
mod machine;
mod ptx;
