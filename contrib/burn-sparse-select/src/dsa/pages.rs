//! An indexer's keys in pages.

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use crate::dsa::scores::DsaIndex;
use burn_blocksparse::OpError;
use burn_blocksparse::internal::check::same_device;
use burn_blocksparse::internal::device::served;
use burn_paged_attention::internal::ops::PagedOps;

/// Queries of an indexer, one for each list of pages of its keys.
#[derive(Clone, Debug)]
pub struct DsaPages {
    /// `[walks, index_heads, index_dim]`
    pub q: Tensor<3>,
    /// `[walks, index_heads]`
    pub weights: Tensor<2>,
    /// `[pages, P, index_dim]`, a key a slot; `P` is a power of two.
    pub keys: Tensor<3>,
    /// i32 `[walks, 1, entries]`: the pages of each list, in the order of their keys' positions.
    pub table: Tensor<3, Int>,
    /// i32 `[walks, 1, 4]`, as [`PagedKeysValues::spans`](burn_paged_attention::PagedKeysValues::spans): so many keys the query sees as region one has slots. Region two is
    /// empty.
    pub spans: Tensor<3, Int>,
}

impl DsaPages {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        let device = self.q.device();
        served(&device)?;
        let [walks, heads, width] = self.q.dims();
        let [_, page, key_width] = self.keys.dims();
        let [_, _, entries] = self.table.dims();
        for (argument, size) in [
            ("index q's walks", walks),
            ("index q's heads", heads),
            ("index q's index_dim", width),
            ("table's entries", entries),
        ] {
            if size == 0 {
                return Err(OpError::argument(argument, "at least 1", 0));
            }
        }
        if !page.is_power_of_two() {
            return Err(OpError::argument("keys' page size", "a power of two", page));
        }
        let whose = "index q's";
        OpError::expect_same("keys' index_dim", width, whose, key_width)?;
        let got = self.weights.dims();
        OpError::expect_same("index weights' shape", [walks, heads], whose, got)?;
        let expected = [walks, 1, entries];
        OpError::expect_same("table's shape", expected, whose, self.table.dims())?;
        let got = self.spans.dims();
        OpError::expect_same("spans' shape", [walks, 1, 4], whose, got)?;
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

    pub(crate) fn without_autodiff(self) -> Self {
        Self {
            q: self.q.without_autodiff(),
            weights: self.weights.without_autodiff(),
            keys: self.keys.without_autodiff(),
            ..self
        }
    }

    /// Slots of a page.
    pub(crate) fn page(&self) -> usize {
        self.keys.dims()[1]
    }

    /// The keys of a walk, `[walks, listed]`, as slots of all pages.
    pub(crate) fn slots(&self) -> Tensor<2, Int> {
        let [walks, _, entries] = self.table.dims();
        let table = self.table.clone().reshape([walks, entries]);
        let spans = self.spans.clone().reshape([walks, 4]);
        Tensor::from_dispatch(<Dispatch as PagedOps>::walk_slots(
            table.into_dispatch(),
            spans.into_dispatch(),
            self.page(),
        ))
    }

    /// So many keys each query sees.
    pub(crate) fn seen(&self) -> Tensor<1, Int> {
        let [walks, ..] = self.spans.dims();
        let seen = self.spans.clone().narrow(2, 0, 1);
        seen.reshape([walks]).cast(DType::I32)
    }

    /// Gathered keys of the slots of walks, where no kernel reads them in pages.
    pub(crate) fn gathered(&self, slots: &Tensor<2, Int>) -> Result<DsaIndex, OpError> {
        let [count, page, width] = self.keys.dims();
        let [walks, listed] = slots.dims();
        let keys = self.keys.clone().reshape([count * page, width]);
        // Those behind the last are not seen, whatever they are.
        let ids = slots.clone().clamp_min(0).reshape([walks * listed]);
        let keys = keys.select(0, ids).reshape([walks, 1, listed, width]);
        DsaIndex::new(
            self.q.clone().unsqueeze_dim(2),
            keys.cast(self.q.dtype()),
            self.weights.clone().unsqueeze_dim(2),
        )
    }
}
