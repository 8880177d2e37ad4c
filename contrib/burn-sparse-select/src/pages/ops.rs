//! Backend trait of page selection by scores, and a reference in loops on the host, where CPU backends have the scores anyway.

use crate::pages::page_choice::PageChoice;
use crate::selection::reference::highest;
use burn_blocksparse::graph::recording;
use burn_blocksparse::internal::host;
use burn_blocksparse::internal::prelude::*;

/// Page selection as backend operations, on tensors without autodiff. The public functions check the arguments.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait PageChoiceOps: Backend {
    /// Returns the pages with the highest scores, i32 `[batch, kv_heads, keep · block]`.
    #[fusion(dtype = DType::I32, shape = [scores[0], scores[1], choice.selected_pages()].into())]
    fn topk_pages(
        scores: FloatTensor<Self>,
        spans: IntTensor<Self>,
        choice: PageChoice,
    ) -> IntTensor<Self> {
        highest_pages::<Self>(scores, spans, &choice)
    }
}

reference_backends!(PageChoiceOps);

pub(crate) fn highest_pages<B: Backend>(
    scores: FloatTensor<B>,
    spans: IntTensor<B>,
    choice: &PageChoice,
) -> IntTensor<B> {
    let device = scores.device();
    let [batch, kv_heads, entries] = scores.shape().dims();
    let tables = spans.shape()[1];
    let spans: Vec<i64> = host::ints::<B, _>(spans);
    let scores: Vec<f32> = host::floats::<B, _>(scores);
    let (size, listed) = (choice.block, choice.selected_pages());
    let mut picks: Vec<i32> = Vec::with_capacity(batch * kv_heads * listed);
    for row in 0..batch * kv_heads {
        let head = row % kv_heads;
        let slots = spans[(row / kv_heads * tables + head % tables) * 4];
        let slots = usize::try_from(slots).unwrap_or(0);
        let pages = slots.div_ceil(choice.page).min(entries);
        let last = pages.saturating_sub(1) / size;
        let between = choice.between(last);
        let own = &scores[row * entries..][..entries];
        let block = |at: usize| f64::from(own[at * size..][..size].iter().sum::<f32>());
        let blocks: Vec<f64> = (0..between.end).map(block).collect();
        let mut order = highest(&blocks, between.clone(), choice.chosen());
        order.sort_unstable();
        let end = (row + 1) * listed;
        let pages_of = |block: usize| (block * size..(block + 1) * size).map(|page| page as i32);
        let kept = (0..between.start).chain(order).chain(between.end..last + 1);
        let listed_pages = kept.flat_map(pages_of);
        picks.extend(listed_pages.filter(|&page| (page as usize) < pages));
        picks.resize(end, -1);
    }
    recording::doom_by_upload(&device, "pages that are chosen");
    let picks = TensorData::new(picks, [batch, kv_heads, listed]);
    B::int_from_data(picks, &device)
}
