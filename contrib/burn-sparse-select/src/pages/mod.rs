//! Pages of a KV cache that queries choose by summaries of their keys.

pub(crate) mod backend;
pub(crate) mod choice;
pub(crate) mod ops;
pub(crate) mod page_choice;
pub(crate) mod reference;
pub(crate) mod values;

pub use choice::{PageSummaries, page_scores, select_pages, summarize_pages, summarize_stored};
pub use page_choice::PageChoice;
