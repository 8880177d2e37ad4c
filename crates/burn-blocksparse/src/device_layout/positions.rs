//! Layouts whose pairs follow from the positions of gathered tokens.

use blocksparse::{BlockLayout, BlockSource, PositionMask};

use super::{DeviceLayout, expect};
use crate::base::prelude::*;
use crate::base::values::DynamicBlocks;

impl DeviceLayout {
    /// Creates a layout of the blocks of `places`, which is on the host, and, among their pairs, those that the positions of query and key allow. For gathered
    /// sequences, in which the index of a token does not tell its position. Every batch entry and head has its own positions.
    ///
    /// If kernels run, the launch plans of `places` are uploaded once, and only masks are computed on the device: a bit for each pair of its blocks
    /// in the tiles of a launch. Use one `places` layout for all calls. Rows that see nothing give zeros, and lse −∞.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Int, Tensor};
    /// use burn_blocksparse::{DeviceLayout, Pattern, sparse_attention};
    /// use burn_blocksparse::layout::PositionMask;
    ///
    /// let device = Device::flex();
    /// let x = Tensor::<4>::random([1, 1, 64, 16], Distribution::Default, &device);
    /// // Tokens in the reverse order, in chunks of 16: a token sees the earlier ones of its chunk, and itself.
    /// let order = Tensor::<1, Int>::arange_step(0..64, 1, &device).flip([0]).reshape([1, 1, 64]);
    /// let places = Pattern::chunked(16).layout(1, 64, 16)?;
    /// let layout = DeviceLayout::from_positions(&places, order.clone(), order, PositionMask::UpTo)?;
    /// let dense = layout.to_host()?.to_dense(0);
    /// // The first place holds the last token, and sees all of its chunk.
    /// assert!(dense[0][..16].iter().all(|&seen| seen) && !dense[1][0] && !dense[0][16]);
    /// let out = sparse_attention(x.clone(), x.clone(), x, &layout)?;
    /// assert_eq!(out.dims(), [1, 1, 64, 16]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Shapes
    /// - `of_queries`: `[batch or 1, heads, seq_q]`, below 2³¹; a query at a negative position sees nothing
    /// - `of_keys`: `[batch or 1, heads, seq_kv]`, with the same batch; no query sees a key at a negative position
    ///
    /// # Errors
    /// [`OpError`] if the tensors do not fit the layout or each other, the layout has another batch size, or it is itself a device layout.
    pub fn from_positions(
        places: &BlockLayout,
        of_queries: Tensor<3, Int>,
        of_keys: Tensor<3, Int>,
        rule: PositionMask,
    ) -> Result<Self, OpError> {
        served(&of_queries.device().without_autodiff())?;
        let (of_queries, of_keys) = (of_queries.without_autodiff(), of_keys.without_autodiff());
        let (device, other) = (of_queries.device(), of_keys.device());
        OpError::expect_same("of_keys' device", device, "of_queries'", other)?;
        let [batch, heads, seq_q] = of_queries.dims();
        OpError::ensure_positive("of_queries' batch", batch)?;
        expect("of_queries' heads", places.heads(), heads)?;
        expect("of_queries' length", places.seq_q(), seq_q)?;
        let expected = [batch, heads, places.seq_kv()];
        OpError::expect_same("of_keys' shape", expected, "the queries'", of_keys.dims())?;
        let numbers = Tensor::cat([of_queries, of_keys].map(in_i32).into_iter().collect(), 2);
        Self::by_numbers(places, numbers, rule, BlockSource::Positions(rule))
    }

    /// Creates a layout like [`from_positions`](Self::from_positions) for sequences whose keys are at the positions of their queries.
    ///
    /// # Shapes
    /// - `positions`: `[batch or 1, heads, seq]`, below 2³¹, negative for none
    ///
    /// # Errors
    /// As [`from_positions`](Self::from_positions), and if the layout's numbers of queries and keys differ.
    pub fn from_own_positions(
        places: &BlockLayout,
        positions: Tensor<3, Int>,
        rule: PositionMask,
    ) -> Result<Self, OpError> {
        served(&positions.device().without_autodiff())?;
        let positions = positions.without_autodiff();
        let [batch, heads, seq] = positions.dims();
        OpError::ensure_positive("positions' batch", batch)?;
        expect("positions' heads", places.heads(), heads)?;
        expect("positions' length", places.seq_q(), seq)?;
        expect("positions' length, of keys", places.seq_kv(), seq)?;
        let numbers = in_i32(positions);
        Self::by_numbers(places, numbers, rule, BlockSource::OwnPositions(rule))
    }

    fn by_numbers(
        places: &BlockLayout,
        numbers: Tensor<3, Int>,
        rule: PositionMask,
        by: BlockSource,
    ) -> Result<Self, OpError> {
        let [batch, heads, count] = numbers.dims();
        let patterns = places.patterns_within([batch, heads])?;
        let numbers = match patterns[0] == batch {
            true => numbers,
            false => numbers.expand([patterns[0], heads, count]),
        };
        let name = format!("{}, by positions ({rule:?})", places.name());
        let numbers = DynamicBlocks::Ints(numbers.into_dispatch());
        Self::within(name, patterns, by, places, numbers)
    }
}

/// Casts to i32, unless the dtype already is: a cast to the same dtype would still be an operation.
fn in_i32(x: Tensor<3, Int>) -> Tensor<3, Int> {
    match x.dtype() {
        DType::I32 => x,
        _ => x.cast(DType::I32),
    }
}
