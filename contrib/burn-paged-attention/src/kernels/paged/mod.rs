//! Attention of few queries to keys and values in pages, for decoding.
//!
//! The queries of the heads that share a KV head are rows of one matrix, so that keys are read once for all of them. A sequence's page list is cut
//! into shares (split-KV). Lengths are on the device, so cubes find their shares there (`page_list`), and a launch depends on shapes alone. Each
//! share has its own softmax; a second launch joins them.
//!
//! ```text
//! tile       how a cube shares keys among units          page_list shares of page lists, and their pages
//! exchange   what the lanes of a key tell each other     attend   the kernel over a share
//! merge      the shares of a query as one softmax        append   rows written into pages
//! mma        the kernel over a share on tensor cores      mma_tile its shape
//! mma_load   what lanes load on tensor cores              join     the softmaxes of a cube as one, and shares in
//!                                                         the launch of mma
//! quantize   rows written into pages of eight bits        shape    what a call is
//! plan       how it is launched
//! summary    what is known of each page besides its keys  page_scores  scores of pages by it
//! slots      slots of page lists one by one, of keys that were picked, and numbers of each
//! attention_sums  what each key got of attention
//! ```

mod append;
mod attend;
mod attention_sums;
mod exchange;
mod join;
mod merge;
mod mma;
mod mma_load;
mod mma_tile;
mod page_list;
mod page_scores;
mod plan;
#[cfg(test)]
mod plan_tests;
mod quantize;
mod shape;
mod slots;
mod summary;
mod tile;

pub use append::{AppendShape, append_rows};
pub use attention_sums::{SumsBuffers, attention_sums};
pub use page_scores::{PageScoreBuffers, PageScoreShape, page_scores};
pub use plan::{PagedBuffers, PagedPlan, paged_attention};
pub use quantize::append_quantized;
pub use shape::PagedShape;
pub use slots::{SlotShape, page_list_slots, picked_slots, write_integers};
pub use summary::{StoredKeys, summarize_pages};
