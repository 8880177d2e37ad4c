//! Choices among keys in pages, for decoding.

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use crate::dsa::Dsa;
use crate::dsa::pages::DsaPages;
use burn_blocksparse::OpError;
use burn_paged_attention::internal::ops::PagedOps;

impl Dsa {
    /// The keys that queries over pages attend to, as [`choose`](Self::choose) has them of keys side by side: i32 `[walks, kv_heads, most]`, the
    /// slots of each head of keys in ascending order of their positions, below 0 behind the last, for [`PagedKeysValues::of_slots`]. Of an entry `x` of the
    /// table the heads of the attention have the pages `x · kv_heads` and those behind it, as with tables that heads share. Nothing is read back where kernels
    /// run, and launches depend on shapes alone.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Int, Tensor};
    /// use burn_sparse_select::dsa::{Dsa, DsaPages};
    /// use burn_paged_attention::{PagedKeysValues, PagedOptions, PagedStore, paged_attention};
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
    /// let slots = Dsa::new(12)?.choose_in_pages(&index, 2)?;
    /// assert_eq!(slots.dims(), [1, 2, 12]);
    /// let chosen = PagedKeysValues::of_slots(PagedStore::Plain { keys, values }, slots, &spans);
    /// let q = Tensor::<4>::random([1, 4, 1, 32], Distribution::Default, &device);
    /// assert_eq!(paged_attention(q, &chosen, &PagedOptions::default())?.out.dims(), [1, 4, 1, 32]);
    /// # Ok::<(), burn_blocksparse::OpError>(())
    /// ```
    ///
    /// # Errors
    /// [`OpError`] if shapes or devices do not fit each other, `kv_heads` is 0, or no feature of this crate serves the device.
    ///
    /// [`PagedKeysValues::of_slots`]: burn_paged_attention::PagedKeysValues::of_slots
    pub fn choose_in_pages(
        &self,
        index: &DsaPages,
        kv_heads: usize,
    ) -> Result<Tensor<3, Int>, OpError> {
        index.check()?;
        if kv_heads == 0 {
            return Err(OpError::argument("kv_heads", "at least 1", kv_heads));
        }
        let index = index.clone().without_autodiff();
        let slots = index.slots();
        let places = self.places(&index, &slots)?;
        let [walks, _, entries] = index.table.dims();
        let table = index.table.clone().reshape([walks, entries]);
        Ok(Tensor::from_dispatch(<Dispatch as PagedOps>::picked_slots(
            places.into_dispatch(),
            table.into_dispatch(),
            kv_heads,
            index.page(),
        )))
    }

    /// Places in the lists of slots of walks, `[walks, most]`, ascending, below 0 behind the last.
    fn places(&self, index: &DsaPages, slots: &Tensor<2, Int>) -> Result<Tensor<2, Int>, OpError> {
        let [walks, listed] = slots.dims();
        if listed <= self.keep {
            // There is nothing to choose.
            let places = Tensor::<1, Int>::arange(0..listed as i64, (&slots.device(), DType::I32));
            let places = places.unsqueeze::<2>().expand([walks, listed]);
            return Ok(places.mask_fill(slots.clone().lower_elem(0), -1));
        }
        let seen = index.seen();
        #[cfg(feature = "cube")]
        {
            let wanted = [self.keep, self.near];
            let places =
                crate::dsa::kernels::top_k_in_pages(index, slots, &seen, wanted, self.numbers);
            if let Some(places) = places {
                return Ok(places);
            }
        }
        let gathered = index.gathered(slots)?;
        let places = self.listed(&gathered, Some(seen.unsqueeze_dim(1)));
        Ok(places.reshape([walks, self.keep]))
    }
}
