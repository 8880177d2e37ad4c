//! Patterns to begin with, for 1,024 positions.

/// Texts of [`Pattern::NOTATION`](blocksparse::Pattern::NOTATION): each form is in one at least.
pub const EXAMPLES: [&str; 22] = [
    "fixed:128,32,4",
    "local:192",
    "streaming:128,64",
    "merged-strided:128",
    "local:64/strided:64/fixed:128,32/streaming:64,16",
    "causal",
    "dense",
    "strided:128",
    "prefix:256",
    "window:96",
    "window:48,3",
    "window:64+global:0,1,2,3",
    "longformer:64,1,0,512",
    "bigbird:64,16,2",
    "random-blocks:64,16,3&causal",
    "chunked:128",
    "chunked:128,1,0&causal",
    "deepspeed-fixed:128,32,2",
    "deepspeed-variable:1024,128,192,320+global-keys:40,560",
    "vertical:0,1,2,3,300,560+slash:0,1,2,3,4,5,6,7,320",
    "packed:0,400,660(fixed:128,32)",
    "documents:0,400,660&(local:128+tree:2)",
];
