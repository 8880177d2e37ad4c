//! Choices among keys that lists name, as a cache in pages needs them.

use burn::tensor::{DType, Int, Tensor};
use burn_blocksparse::OpError;

use crate::dsa::Dsa;
use crate::dsa::scores::DsaLists;

impl Dsa {
    /// The places of the keys that queries attend to in their lists, as [`choose`](Self::choose) has them of keys side by side: i32 `[queries, most]`, ascending,
    /// below 0 after the last. Nothing is read back where kernels run, and launches depend on shapes alone. Shapes are the caller's to check.
    ///
    /// # Errors
    /// [`OpError`] if queries and keys make no index.
    pub fn choose_in_lists(&self, index: &DsaLists) -> Result<Tensor<2, Int>, OpError> {
        let slots = &index.slots;
        let [queries, listed] = slots.dims();
        if listed <= self.keep {
            // There is nothing to choose.
            let places = Tensor::<1, Int>::arange(0..listed as i64, (&slots.device(), DType::I32));
            let places = places.unsqueeze::<2>().expand([queries, listed]);
            return Ok(places.mask_fill(slots.clone().lower_elem(0), -1));
        }
        #[cfg(feature = "cube")]
        {
            let picks = [self.keep, self.near];
            let places = crate::dsa::kernels::top_k_in_lists(index, picks, self.numbers);
            if let Some(places) = places {
                return Ok(places);
            }
        }
        let seen = index.seen.clone().unsqueeze_dim(1);
        let places = self.listed(&index.gathered()?, Some(seen))?;
        Ok(places.reshape([queries, self.keep]))
    }
}
