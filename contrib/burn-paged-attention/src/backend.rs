//! Backend traits and the types in their signatures. They are for crates that serve another backend, not for users of the ops.

pub use crate::paged::ops::PagedOps;
pub use crate::paged::values::{
    AppendInputs, OptInt, PackedRows, PagedCall, PagedInputs, PagedRows, StoredPages, StoredRows,
    SumsInputs,
};
pub use crate::sampling::ops::SamplingOps;
pub use crate::summaries::ops::{PageScoreInputs, PageSummaryOps, SummarizeInputs};
