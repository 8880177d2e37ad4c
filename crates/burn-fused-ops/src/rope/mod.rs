//! Rotary position embedding (Su et al., 2021).
#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
mod backend;
#[doc(hidden)]
pub mod ops;
pub(crate) mod reference;
#[doc(hidden)]
pub mod values;

use crate::rope::ops::RopeOps;
use crate::rope::values::{RopeCall, RopeInputs};
use burn_blocksparse::internal::prelude::*;

/// Positions of a tensor's rows in their sequences.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum RopePositions {
    /// Consecutive positions, beginning with this one.
    From(usize),
    /// One position for each row of each batch entry, `[batch · seq]`. They are not read back from the device and so not checked.
    Of(Box<Tensor<1, Int>>),
}

/// Rotates pairs of channels of queries or keys by their positions, in one launch: `(a, b) → (a cos φ − b sin φ, b cos φ + a sin φ)` for channels 2i and 2i +
/// 1, computed in the table's dtype and rounded once to `dtype`. This is one node of the autodiff graph, which stores the table.
///
/// `table` is burn-nn's `RotaryEncoding::freq_complex`; `back` reverses the rotation.
///
/// ```
/// use burn::nn::RotaryEncodingConfig;
/// use burn::tensor::{Device, Distribution, FloatDType, Tensor};
/// use burn_fused_ops::{RopePositions, rope};
///
/// let device = Device::flex();
/// let table = RotaryEncodingConfig::new(128, 16).init(&device).freq_complex;
/// let q = Tensor::<4>::random([2, 4, 100, 16], Distribution::Default, &device);
/// let turned = rope(q, table, RopePositions::From(28), FloatDType::F32, false)?;
/// assert_eq!(turned.dims(), [2, 4, 100, 16]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// - `x` and result: `[batch, heads, seq, width]`
/// - `table`: `[context, width, 2]`
///
/// # Errors
/// [`OpError`] if the shapes or devices do not match, or a position is not below `context`.
pub fn rope(
    x: Tensor<4>,
    table: Tensor<3>,
    positions: RopePositions,
    dtype: FloatDType,
    back: bool,
) -> Result<Tensor<4>, OpError> {
    let (turned, _) = run(x, None, table, positions, (dtype, back))?;
    Ok(turned)
}

/// [`rope`] of queries and keys at the same positions; one launch if no gradient is wanted.
///
/// # Shapes
/// - `query` and its result: `[batch, heads, seq, width]`
/// - `key` and its result: the same shape, with its own number of heads
///
/// # Errors
/// Those of [`rope`]; also if the other lengths, the dtypes or the devices of queries and keys differ.
pub fn rope_pair(
    query: Tensor<4>,
    key: Tensor<4>,
    table: Tensor<3>,
    positions: RopePositions,
    dtype: FloatDType,
    back: bool,
) -> Result<[Tensor<4>; 2], OpError> {
    let ([batch, _, seq, width], [key_batch, heads, key_seq, key_width]) =
        (query.dims(), key.dims());
    blocksparse::ensure! {
        OpError;
        [key_batch, key_seq, key_width] == [batch, seq, width]
            => "key's shape", format!("[{batch}, {heads}, {seq}, {width}], as the queries'"), format!("{:?}", key.dims());
        key.dtype() == query.dtype() => "key's dtype", format!("{:?}, the queries'", query.dtype()), format!("{:?}", key.dtype());
    }
    let (device, own) = (query.device(), key.device());
    same_device("key's device", &device, "the queries'", &own)?;
    let (query, key) = run(query, Some(key), table, positions, (dtype, back))?;
    Ok([query, key.expect("it was asked for")])
}

/// Rotates `x` and, if present, `key` by the same positions.
fn run(
    x: Tensor<4>,
    key: Option<Tensor<4>>,
    table: Tensor<3>,
    positions: RopePositions,
    (dtype, back): (FloatDType, bool),
) -> Result<(Tensor<4>, Option<Tensor<4>>), OpError> {
    let (first, places) = check(&x, &table, positions)?;
    let places = places.map(|places| places.without_autodiff().into_dispatch());
    let inputs = RopeInputs {
        x: x.into_dispatch(),
        key: key.map(Tensor::into_dispatch).into(),
        table: table.into_dispatch(),
        places: places.into(),
    };
    let call = RopeCall { first, back, dtype };
    let turned = <Dispatch as RopeOps>::rope(inputs, call);
    let key = turned.key.into_option().map(Tensor::from_dispatch);
    Ok((Tensor::from_dispatch(turned.x), key))
}

/// Returns the first position, or the tensor of positions of every row.
fn check(
    x: &Tensor<4>,
    table: &Tensor<3>,
    positions: RopePositions,
) -> Result<(usize, Option<Tensor<1, Int>>), OpError> {
    served(&x.device())?;
    same_device("table's device", &x.device(), "x's", &table.device())?;
    let ([batch, _, seq, width], [context, columns, numbers]) = (x.dims(), table.dims());
    blocksparse::ensure! {
        OpError;
        [columns, numbers] == [width, 2] && width.is_multiple_of(2)
            => "table's shape", format!("[context, {width}, 2], of x's even width"), format!("{:?}", table.dims());
    }
    match positions {
        RopePositions::From(first) => {
            let end = first.saturating_add(seq);
            blocksparse::ensure! {
                OpError;
                end <= context => "positions", format!("below {context}, the table's rows"), end.saturating_sub(1);
            }
            Ok((first, None))
        }
        RopePositions::Of(places) => {
            let [got] = places.dims();
            blocksparse::ensure! { OpError; got == batch * seq => "positions", format!("one for each of {batch} · {seq} rows"), got; }
            Ok((0, Some(*places)))
        }
    }
}
