//! Pages of a KV cache that queries choose by scores.

pub(crate) mod backend;
pub(crate) mod ops;
pub(crate) mod page_choice;
pub(crate) mod reference;

pub use page_choice::PageChoice;

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};
use burn_blocksparse::OpError;
use burn_blocksparse::internal::check::same_device;
use burn_blocksparse::internal::device::served;

use crate::pages::ops::PageChoiceOps;
use crate::pages::page_choice::{OWN, PageChoiceCall};
use crate::selection::PageSummary;

/// The pages that queries choose by scores, f32 `[batch, kv_heads, max_pages]`, i32 `[batch, kv_heads, choice.selected_pages()]`: of each query and head of keys
/// the blocks of pages that are [forced](PageChoice::forced), that in which its page list (the first number of `spans`, `[batch, 1 or kv_heads, 4]`) ends among
/// them, and of the others so many with the highest scores that `keep` are kept (of equal ones the earlier; NaN is the lowest), ascending, and −1 where there
/// are fewer. Nothing is read back where kernels run, and launches depend on shapes alone.
///
/// # Errors
/// [`OpError`] if shapes, dtypes or devices do not fit each other, or no feature of this crate serves the device.
pub fn topk_pages(
    scores: Tensor<3>,
    spans: &Tensor<3, Int>,
    choice: &PageChoice,
) -> Result<Tensor<3, Int>, OpError> {
    served(&scores.device())?;
    choice.check()?;
    let [batch, kv_heads, _] = scores.dims();
    let tables = spans.dims()[1];
    blocksparse::ensure! { OpError; tables == 1 || tables == kv_heads => "spans' heads", format!("1 or {kv_heads}, kv_heads"), tables; }
    let got = spans.dims();
    OpError::expect_same("spans' shape", [batch, tables, 4], "the scores'", got)?;
    OpError::expect_same("scores' dtype", DType::F32, "the only one", scores.dtype())?;
    same_device(
        "spans' device",
        &scores.device(),
        "the scores'",
        &spans.device(),
    )?;
    let call = PageChoiceCall::new(kv_heads, choice);
    let picks = <Dispatch as PageChoiceOps>::topk_pages(
        scores.without_autodiff().into_dispatch(),
        spans.clone().without_autodiff().into_dispatch(),
        call,
    );
    Ok(Tensor::from_dispatch(picks))
}

/// The `most` keys of the highest scores of each row, ascending, −1 behind the last: of equal ones the earlier, and NaN is the lowest.
///
/// Rows are page lists of pages of one key. A page list always keeps the page that it ends in, so each gets one more, which is left out again.
///
/// # Shapes
/// - `scores`: f32 `[batch, rows, keys]`, on no autodiff device
/// - `seen`: i32 `[batch or 1, rows]`: so many keys a row sees, from the first on
/// - result: i32 `[batch, rows, most]`
pub(crate) fn topk_keys(scores: Tensor<3>, seen: Tensor<2, Int>, most: usize) -> Tensor<3, Int> {
    let [batch, rows, keys] = scores.dims();
    let device = scores.device();
    let behind = Tensor::<3>::zeros([batch, rows, 1], (&device, DType::F32));
    let scores = Tensor::cat(vec![scores.cast(DType::F32), behind], 2);
    let scores = scores.reshape([batch * rows, 1, keys + 1]);
    let seen = seen.unsqueeze_dim::<3>(2).expand([batch, rows, 1]);
    let ends = seen.clone().add_scalar(1).reshape([batch * rows, 1, 1]);
    let spans = ends.expand([batch * rows, 1, 4]);
    let choice = PageChoice {
        summary: PageSummary::Mean,
        page: 1,
        block: 1,
        keep: most + 1,
        forced: OWN,
        mean: false,
    };
    let picks = <Dispatch as PageChoiceOps>::topk_pages(
        scores.into_dispatch(),
        spans.into_dispatch(),
        PageChoiceCall::new(1, &choice),
    );
    let picks = Tensor::<3, Int>::from_dispatch(picks).slice_dim(2, 0..most);
    let picks = picks.reshape([batch, rows, most]);
    let is_behind = picks
        .clone()
        .greater_equal(seen.expand([batch, rows, most]));
    picks.mask_fill(is_behind, -1)
}
