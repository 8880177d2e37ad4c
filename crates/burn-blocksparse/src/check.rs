//! Checks of a call's arguments.

use blocksparse::BlockLayout;

use crate::base::prelude::*;
use crate::call_layout::Layout;
use crate::graph::seeds;
use crate::options::{AttentionOptions, WeightsMode};

/// Checks all arguments except optional tensors.
pub fn call(
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    layout: Layout,
    options: &AttentionOptions,
) -> Result<(), OpError> {
    shapes(q, k, v, layout.sizes())?;
    options.validate(layout.sizes().heads(), q.dtype())?;
    if let Some(dropout) = options.active_dropout() {
        seeds::check(dropout.seed, &q.device())?;
    }
    let Layout::Device(layout) = layout else {
        return Ok(());
    };
    same_device("layout's device", &q.device(), "q's", &layout.device())?;
    match options.weights {
        WeightsMode::Recompute => Ok(()),
        WeightsMode::Store => Err(OpError::argument(
            "options.weights",
            "Recompute for a layout that is made on the device",
            "Store",
        )),
    }
}

/// Checks that the tensors fit the layout and each other, on a device that this crate serves.
pub fn shapes(
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    layout: &BlockLayout,
) -> Result<(), OpError> {
    something(q, v)?;
    let [batch, heads, seq_q, _] = q.dims();
    let seq_kv = k.dims()[2];
    if let Some(layout_batch) = layout.batch() {
        OpError::expect_same("q's batch", layout_batch, "the layout's", batch)?;
    }
    let whose = "the layout's";
    OpError::expect_same("q's heads", layout.heads(), whose, heads)?;
    OpError::expect_same("q's seq_q", layout.seq_q(), whose, seq_q)?;
    OpError::expect_same("k's seq_kv", layout.seq_kv(), whose, seq_kv)?;
    each_other(q, k, v)
}

/// Checks that the tensors fit each other, on a device that this crate serves.
pub fn tensors(q: &Tensor<4>, k: &Tensor<4>, v: &Tensor<4>) -> Result<(), OpError> {
    something(q, v)?;
    each_other(q, k, v)
}

/// Checks that no dimension is empty, on a device that this crate serves.
fn something(q: &Tensor<4>, v: &Tensor<4>) -> Result<(), OpError> {
    served(&q.device())?;
    let [batch, _, _, head_dim] = q.dims();
    let [_, _, _, value_dim] = v.dims();
    for (argument, size) in [
        ("q's batch", batch),
        ("q's head_dim", head_dim),
        ("v's value_dim", value_dim),
    ] {
        OpError::ensure_positive(argument, size)?;
    }
    Ok(())
}

fn each_other(q: &Tensor<4>, k: &Tensor<4>, v: &Tensor<4>) -> Result<(), OpError> {
    let equal = OpError::expect_same::<usize>;
    let [batch, heads, _, head_dim] = q.dims();
    let [k_batch, kv_heads, seq_kv, k_dim] = k.dims();
    let [v_batch, v_heads, v_seq, _] = v.dims();
    equal("k's batch", batch, "q's", k_batch)?;
    equal("k's head_dim", head_dim, "q's", k_dim)?;
    equal("v's batch", batch, "q's", v_batch)?;
    equal("v's kv_heads", kv_heads, "k's", v_heads)?;
    equal("v's seq_kv", seq_kv, "k's", v_seq)?;
    blocksparse::ensure! {
        OpError;
        kv_heads != 0 && heads.is_multiple_of(kv_heads) => "k's kv_heads", format!("a divisor of the {heads} heads of q"), kv_heads;
    }
    for (dtype, device, tensor) in [
        ("k's dtype", "k's device", k),
        ("v's dtype", "v's device", v),
    ] {
        OpError::expect_same(dtype, q.dtype(), "q's", tensor.dtype())?;
        same_device(device, &q.device(), "q's", &tensor.device())?;
    }
    Ok(())
}

/// Checks that `got` is the `expected` device. Devices compare equal whether autodiff is enabled or not; this crate's features determine whether it may be.
pub fn same_device(
    argument: &'static str,
    expected: &Device,
    whose: &str,
    got: &Device,
) -> Result<(), OpError> {
    OpError::expect_same(argument, expected, whose, got)?;
    served(got)
}
