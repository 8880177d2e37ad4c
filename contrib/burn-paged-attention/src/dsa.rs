//! DeepSeek sparse attention over pages: indexer keys in pages, and top-k selection among them.

use burn_blocksparse::internal::prelude::*;
use burn_sparse_select::dsa::{Dsa, DsaLists};

use crate::paged::ops::PagedOps;

/// Indexer queries, one per page list, and the paged indexer keys that they score.
#[derive(Clone, Debug)]
pub struct DsaPages {
    /// `[page_lists, index_heads, index_dim]`
    pub q: Tensor<3>,
    /// `[page_lists, index_heads]`
    pub weights: Tensor<2>,
    /// `[pages, P, index_dim]`: one key per slot. `P` is a power of two.
    pub keys: Tensor<3>,
    /// i32 `[page_lists, 1, entries]`: the pages of each list, in the order of their keys' positions.
    pub table: Tensor<3, Int>,
    /// i32 `[page_lists, 1, 4]`, like [`PagedKeysValues::spans`](crate::PagedKeysValues::spans). The length of region one is the number of keys that
    /// the query sees; region two is empty.
    pub spans: Tensor<3, Int>,
}

impl DsaPages {
    fn check(&self) -> Result<(), OpError> {
        let device = self.q.device();
        served(&device)?;
        let [page_lists, heads, width] = self.q.dims();
        let [_, page, key_width] = self.keys.dims();
        let [_, _, entries] = self.table.dims();
        for (argument, size) in [
            ("index q's queries", page_lists),
            ("index q's heads", heads),
            ("index q's index_dim", width),
            ("table's entries", entries),
        ] {
            OpError::ensure_positive(argument, size)?;
        }
        if !page.is_power_of_two() {
            return Err(OpError::argument("keys' page size", "a power of two", page));
        }
        let whose = "index q's";
        OpError::expect_same("keys' index_dim", width, whose, key_width)?;
        let got = self.weights.dims();
        OpError::expect_same("index weights' shape", [page_lists, heads], whose, got)?;
        let expected = [page_lists, 1, entries];
        OpError::expect_same("table's shape", expected, whose, self.table.dims())?;
        let got = self.spans.dims();
        OpError::expect_same("spans' shape", [page_lists, 1, 4], whose, got)?;
        for (argument, other) in [
            ("index weights' device", self.weights.device()),
            ("keys' device", self.keys.device()),
            ("table's device", self.table.device()),
            ("spans' device", self.spans.device()),
        ] {
            same_device(argument, &device, whose, &other)?;
        }
        Ok(())
    }

    fn without_autodiff(self) -> Self {
        Self {
            q: self.q.without_autodiff(),
            weights: self.weights.without_autodiff(),
            keys: self.keys.without_autodiff(),
            ..self
        }
    }

    fn page(&self) -> usize {
        self.keys.dims()[1]
    }

    /// Returns the keys of each page list as slots of all pages, `[page_lists, listed]`.
    fn slots(&self) -> Tensor<2, Int> {
        let [page_lists, _, entries] = self.table.dims();
        let table = self.table.clone().reshape([page_lists, entries]);
        let spans = self.spans.clone().reshape([page_lists, 4]);
        Tensor::from_dispatch(<Dispatch as PagedOps>::page_list_slots(
            table.into_dispatch(),
            spans.into_dispatch(),
            self.page(),
        ))
    }

    /// Returns the number of keys that each query sees, `[page_lists]`.
    fn seen(&self) -> Tensor<1, Int> {
        let [page_lists, ..] = self.spans.dims();
        let seen = self.spans.clone().narrow(2, 0, 1);
        seen.reshape([page_lists]).cast(DType::I32)
    }
}

/// Selects the keys that queries attend to, as [`Dsa::choose`] does for contiguous keys. Returns i32 `[page_lists, kv_heads, most]` for
/// [`PagedKeysValues::of_slots`]: each KV head's slots in ascending order of position, padded with negative numbers.
/// KV heads share the table: entry `x` is the pages `x · kv_heads ..` of the attention, one per head. With kernels nothing is read back, and
/// launches depend on shapes alone.
///
/// ```
/// use burn::tensor::{Device, Distribution, Int, Tensor};
/// use burn_paged_attention::dsa::{DsaPages, choose_in_pages};
/// use burn_paged_attention::{PagedKeysValues, PagedOptions, PagedStore, paged_attention};
/// use burn_sparse_select::dsa::Dsa;
///
/// let device = Device::flex();
/// let random = |shape| Tensor::<3>::random(shape, Distribution::Default, &device);
/// // A sequence of 75 keys in five of eight pages, for two heads of keys; and an indexer's keys.
/// let table = Tensor::<3, Int>::from_data([[[7, 2, 5, 0, 3]]], &device);
/// let spans = Tensor::<3, Int>::from_data([[[75, 0, 0, 0]]], &device);
/// let (keys, values) = (random([16, 16, 32]), random([16, 16, 32]));
/// let index = DsaPages {
///     q: random([1, 4, 8]),
///     weights: Tensor::ones([1, 4], &device),
///     keys: random([8, 16, 8]),
///     table,
///     spans: spans.clone(),
/// };
/// let slots = choose_in_pages(&Dsa::new(12)?, &index, 2)?;
/// assert_eq!(slots.dims(), [1, 2, 12]);
/// let chosen = PagedKeysValues::of_slots(PagedStore::Plain { keys, values }, slots, &spans);
/// let q = Tensor::<4>::random([1, 4, 1, 32], Distribution::Default, &device);
/// assert_eq!(paged_attention(q, &chosen, &PagedOptions::default())?.out.dims(), [1, 4, 1, 32]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Errors
/// [`OpError`] if shapes or devices do not match, `kv_heads` is 0, or no feature of this crate serves the device.
///
/// [`PagedKeysValues::of_slots`]: crate::PagedKeysValues::of_slots
pub fn choose_in_pages(
    dsa: &Dsa,
    index: &DsaPages,
    kv_heads: usize,
) -> Result<Tensor<3, Int>, OpError> {
    index.check()?;
    OpError::ensure_positive("kv_heads", kv_heads)?;
    let index = index.clone().without_autodiff();
    let slots = index.slots();
    let [count, page, width] = index.keys.dims();
    let places = dsa.choose_in_lists(&DsaLists {
        q: index.q.clone(),
        weights: index.weights.clone(),
        keys: index.keys.clone().reshape([count * page, width]),
        slots,
        seen: index.seen(),
    })?;
    let [page_lists, _, entries] = index.table.dims();
    let table = index.table.clone().reshape([page_lists, entries]);
    Ok(Tensor::from_dispatch(<Dispatch as PagedOps>::picked_slots(
        places.into_dispatch(),
        table.into_dispatch(),
        kv_heads,
        index.page(),
    )))
}
