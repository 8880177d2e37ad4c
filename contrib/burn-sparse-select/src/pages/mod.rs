//! Pages of a KV cache that queries choose by scores.

pub(crate) mod backend;
pub(crate) mod ops;
pub(crate) mod page_choice;

pub use page_choice::PageChoice;

use burn_blocksparse::internal::prelude::*;

use crate::pages::ops::PageChoiceOps;

/// Selects pages by scores, f32 `[batch, kv_heads, max_pages]`, as i32 `[batch, kv_heads, choice.selected_pages()]`. For each query and KV head these
/// are the [forced](PageChoice::forced) blocks of pages, with the one in which its page list ends (the first element of `spans`, `[batch, 1 or
/// kv_heads, 4]`), and the others with the highest scores, up to `keep` (ties go to the earlier; NaN sorts last). Pages are ascending, −1 where there
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
    let picks = <Dispatch as PageChoiceOps>::topk_pages(
        scores.without_autodiff().into_dispatch(),
        spans.clone().without_autodiff().into_dispatch(),
        *choice,
    );
    Ok(Tensor::from_dispatch(picks))
}
