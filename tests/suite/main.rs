//! One program for all of it: every test program links all of Burn, some 80 MB, and 215 MB with wgpu.

mod activation;
mod attention;
mod autodiff;
mod blocks;
mod compare;
mod device_layout;
mod embedding;
mod errors;
mod fuzz;
mod heads;
mod kept;
mod layers;
mod linear;
mod loss;
mod masses;
mod max_scores;
mod mlp;
mod norm;
mod optim;
mod options;
mod projection;
mod sharing;
mod stream_dropout;
mod table;
mod top_k;
mod vertical_slash;
