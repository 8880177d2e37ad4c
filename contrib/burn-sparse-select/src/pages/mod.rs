//! Pages of a KV cache that queries select by scores.

pub(crate) mod backend;
pub(crate) mod ops;
pub(crate) mod page_choice;

pub use page_choice::PageChoice;

use burn_blocksparse::internal::prelude::*;

use crate::pages::ops::PageChoiceOps;

/// Selects pages by scores, f32 `[batch, kv_heads, max_pages]`, and returns i32 `[batch, kv_heads, choice.selected_pages()]`. Each query and KV head selects up
/// to `keep` blocks of pages: the [forced](PageChoice::forced) ones, including the one in which its page list ends (the first element of `spans`,
/// `[batch, 1 or kv_heads, 4]`), and those with the highest scores. Ties go to the earlier block; NaN sorts last. Pages are ascending, −1 where there are
/// fewer. Reads nothing back where kernels run, and launches depend on shapes only.
///
/// # Errors
/// [`OpError`] if shapes, dtypes or devices do not match, or no feature of this crate serves the device.
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
