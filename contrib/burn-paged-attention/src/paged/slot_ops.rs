//! The backend trait of slots one by one.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, backend_extension};

use crate::paged::slots_reference as reference;

/// Slots of walks and of keys that were picked among them as backend operations, on tensors that are not on an autodiff device. Arguments are checked by the
/// public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait PageSlotOps: Backend {
    /// The slots of region one of walks over a table `[walks, entries]` with spans `[walks, 4]`, i32 `[walks, entries · page]`: `x · page + slot` of entry `x`,
    /// and below 0 behind the last.
    #[fusion(meta = meta::walked)]
    fn walk_slots(table: IntTensor<Self>, spans: IntTensor<Self>, page: usize) -> IntTensor<Self> {
        reference::walk_slots::<Self>(table, spans, page)
    }

    /// The slots of each of so many heads of keys at places `[walks, most]` of walks, i32 `[walks, heads, most]`: below 0 where a place is. Of an entry `x` the
    /// heads have pages `x · heads` and those behind it.
    #[fusion(meta = meta::picked)]
    fn picked_slots(
        places: IntTensor<Self>,
        table: IntTensor<Self>,
        heads: usize,
        page: usize,
    ) -> IntTensor<Self> {
        reference::picked_slots::<Self>(places, table, heads, page)
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    pub fn walked(table: &TensorSpec, _spans: &TensorSpec, page: &usize) -> TensorSpec {
        let [walks, entries] = table.shape.dims::<2>();
        TensorSpec::new([walks, entries * page].into(), DType::I32)
    }

    pub fn picked(
        places: &TensorSpec,
        _table: &TensorSpec,
        heads: &usize,
        _page: &usize,
    ) -> TensorSpec {
        let [walks, most] = places.shape.dims::<2>();
        TensorSpec::new([walks, *heads, most].into(), DType::I32)
    }
}
