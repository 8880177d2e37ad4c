//! Which calls kernels take, on which devices.

use cubecl::prelude::*;

use crate::kernels::listed::request::ListedRequest;
use blocksparse_cubecl::arch::sm80::Element;
use blocksparse_cubecl::call::check_ampere;
use blocksparse_cubecl::tensor::{TOO_LARGE, half_of, is_u32};
use blocksparse_cubecl::tuning::Tuning;

/// The most that queries and keys are wide, and values.
const WIDEST: [usize; 2] = [192, 128];

/// Rows of a query at most.
const MOST_ROWS: usize = 128;

/// What the products' operands are, or why the call is not taken.
pub fn check(
    properties: &DeviceProperties,
    request: &ListedRequest,
) -> Result<Element, &'static str> {
    check_ampere(properties)?;
    if Tuning::or_reason()?.tier.is_simt() {
        return Err("BLOCKSPARSE_TIER says simt");
    }
    let element = Element::Half(half_of(request.dtype)?);
    let rows = request.rows();
    if rows > MOST_ROWS || rows == 0 {
        return Err("more than 128 heads share a list");
    }
    let widths = [request.head_dim, request.value_dim].into_iter();
    let is_served =
        |(width, widest): (usize, usize)| width.is_multiple_of(16) && (1..=widest).contains(&width);
    if !widths.zip(WIDEST).all(is_served) {
        return Err("head_dim is no multiple of 16 up to 192, or value_dim of 16 up to 128");
    }
    if !(matches!(request.block, 1 | 16 | 32) || request.block.is_multiple_of(64)) {
        return Err("blocks are not of 1, 16, 32, 64 or a multiple of 64 keys");
    }
    if request.is_of_keys() && i32::try_from(request.listed()).is_err() {
        return Err(TOO_LARGE);
    }
    let widest = request.head_dim.max(request.value_dim);
    let numbers = [
        request.all_rows() * widest.max(2),
        request.all_keys() * widest,
        request.listed(),
        request.batch * request.kv_heads * request.tiles * request.tile,
    ];
    // Pairs of a row of stats, and words of everything else.
    match numbers.into_iter().all(is_u32) {
        true => Ok(element),
        false => Err(TOO_LARGE),
    }
}
