//! Which numbers are the highest, and where, on devices with kernels: what chooses single tokens by content.
#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
pub mod ops;

#[cfg(feature = "cube")]
use burn::backend::Dispatch;
#[cfg(feature = "cube")]
use burn::tensor::DType;
use burn::tensor::{Int, Tensor};

#[cfg(feature = "cube")]
use crate::order::ops::{OrderOps, SortedRounds};
use burn_blocksparse::OpError;
use burn_blocksparse::internal::check::same_device;
use burn_blocksparse::internal::device::served;
#[cfg(feature = "cube")]
use burn_blocksparse::internal::dtype::accumulate_in;
use burn_blocksparse::internal::kernels_run::runs_kernels;

/// What kernels find on a device, and `None` where [none run](runs_kernels).
macro_rules! by_kernels {
    ($device:expr, $found:expr) => {{
        if !runs_kernels($device) {
            return Ok(None);
        }
        #[cfg(feature = "cube")]
        let found = Ok(Some($found));
        #[cfg(not(feature = "cube"))]
        let found = Ok(None);
        found
    }};
}

/// Tokens in the order of their buckets, those of a bucket by number: the token at each place, and the place of each token. `None` where
/// [no kernels run](runs_kernels). Nothing is read back.
///
/// # Shapes
/// - `buckets`: `[groups, length]`, each below `count`; others count as the nearest that is
/// - results: i32 `[groups, length]`, without autodiff
///
/// # Errors
/// [`OpError`] if there are no tokens, or not 1 to 2³⁰ buckets, or no feature of this crate serves the device.
pub fn counting_argsort(
    buckets: Tensor<2, Int>,
    count: usize,
) -> Result<Option<[Tensor<2, Int>; 2]>, OpError> {
    let buckets = buckets.without_autodiff();
    served(&buckets.device())?;
    let [groups, length] = buckets.dims();
    blocksparse::ensure! {
        OpError;
        groups * length != 0 => "buckets", "at least one token", 0;
        (1..=1 << 30).contains(&count) => "count", "from 1 to 2³⁰", count;
    }
    let sorted = counting_argsort_rounds(buckets.reshape([groups, 1, length]), count, length)?;
    Ok(sorted.map(|sorted| {
        let of_group = |x: Tensor<3, Int>| x.reshape([groups, length]);
        [of_group(sorted.tokens), of_group(sorted.places)]
    }))
}

/// Tokens of lists in the order of their buckets in several rounds, each with places of its own, as [`counting_argsort_rounds`] gives them: i32, without autodiff.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ArgsortRounds {
    /// The token at each place, −1 behind the last of a round: `[lists, rounds, room]`.
    pub tokens: Tensor<3, Int>,
    /// The place of each token in each round, counted through all of a list's rounds: `[lists, length, rounds]`.
    pub places: Tensor<3, Int>,
    /// The reverse: at each place `token · rounds + round`, negative behind the last: `[lists, rounds, room]`.
    pub choices: Tensor<3, Int>,
}

#[cfg(feature = "cube")]
impl From<SortedRounds<Dispatch>> for ArgsortRounds {
    fn from(sorted: SortedRounds<Dispatch>) -> Self {
        Self {
            tokens: Tensor::from_dispatch(sorted.tokens),
            places: Tensor::from_dispatch(sorted.places),
            choices: Tensor::from_dispatch(sorted.choices),
        }
    }
}

/// [`counting_argsort`] of lists that have other buckets in each of several rounds, in one launch, or two of more than 256 buckets: what
/// [`gather_qkv`](burn_blocksparse::internal::gather_qkv) and [`merge_gathered_attention`](burn_blocksparse::internal::merge_gathered_attention) take. `None` where [no kernels run](runs_kernels).
///
/// # Shapes
/// - `buckets`: `[lists, rounds, length]`, each below `count`; others count as the nearest that is
/// - `room`: places of a round, `length` at least
///
/// # Errors
/// As [`counting_argsort`], and if there are fewer places than tokens.
pub fn counting_argsort_rounds(
    buckets: Tensor<3, Int>,
    count: usize,
    room: usize,
) -> Result<Option<ArgsortRounds>, OpError> {
    let buckets = buckets.without_autodiff();
    served(&buckets.device())?;
    let [lists, rounds, length] = buckets.dims();
    blocksparse::ensure! {
        OpError;
        lists * rounds * length != 0 => "buckets", "at least one token", 0;
        (1..=1 << 30).contains(&count) => "count", "from 1 to 2³⁰", count;
        room >= length => "room", format!("at least the {length} tokens"), room;
    }
    by_kernels!(&buckets.device(), {
        let sorted =
            <Dispatch as OrderOps>::counting_argsort_rounds(buckets.into_dispatch(), count, room);
        sorted.into()
    })
}

/// The bucket of each row under each of some rotations, the first of the largest of `[x R; −x R]`, summed in f32 (f64 for f64), in one launch. `None` where
/// [no kernels run](runs_kernels). No gradient flows through it.
///
/// # Shapes
/// - `x`: `[batch, heads, length, dim]`
/// - `rotations`: `[rounds, dim, half]`
/// - result: i32 `[batch, heads, rounds, length]`, below `2 · half`
///
/// # Errors
/// [`OpError`] if shapes or devices do not fit each other, one is empty, or no feature of this crate serves the device.
pub fn lsh_hash(x: Tensor<4>, rotations: Tensor<3>) -> Result<Option<Tensor<4, Int>>, OpError> {
    let (x, rotations) = hashed(x, rotations)?;
    by_kernels!(&rotations.device(), {
        let rotations = in_sums(rotations, &x);
        let buckets =
            <Dispatch as OrderOps>::lsh_hash(x.into_dispatch(), rotations.into_dispatch());
        Tensor::from_dispatch(buckets)
    })
}

/// [`counting_argsort_rounds`] by [`lsh_hash`], in one operation. Lists are those of all batch entries and
/// heads, `[batch · heads]`. `None` where [no kernels run](runs_kernels). No gradient flows through it.
///
/// # Shapes
/// - `x`: `[batch, heads, length, dim]`
/// - `rotations`: `[rounds, dim, half]`
/// - `room`: places of a round, `length` at least
///
/// # Errors
/// As [`lsh_hash`], and if there are fewer places than rows, or more than 2³⁰ buckets.
pub fn lsh_argsort(
    x: Tensor<4>,
    rotations: Tensor<3>,
    room: usize,
) -> Result<Option<ArgsortRounds>, OpError> {
    let (x, rotations) = hashed(x, rotations)?;
    let ([_, _, length, _], [.., half]) = (x.dims(), rotations.dims());
    blocksparse::ensure! {
        OpError;
        half <= 1 << 29 => "rotations' half", "at most 2²⁹", half;
        room >= length => "room", format!("at least the {length} rows"), room;
    }
    by_kernels!(&x.device(), {
        let rotations = in_sums(rotations, &x);
        let sorted =
            <Dispatch as OrderOps>::lsh_argsort(x.into_dispatch(), rotations.into_dispatch(), room);
        sorted.into()
    })
}

/// Rows and rotations that fit each other, without autodiff.
fn hashed(x: Tensor<4>, rotations: Tensor<3>) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let (x, rotations) = (x.without_autodiff(), rotations.without_autodiff());
    served(&x.device())?;
    same_device("rotations' device", &x.device(), "x's", &rotations.device())?;
    let [batch, heads, length, dim] = x.dims();
    let [rounds, of_rotations, half] = rotations.dims();
    OpError::expect_same("rotations' dim", dim, "x's", of_rotations)?;
    blocksparse::ensure! { OpError; batch * heads * length * dim * rounds * half != 0 => "x and rotations", "not empty", 0; }
    Ok((x, rotations))
}

/// Rotations in the dtype of sums over rows.
#[cfg(feature = "cube")]
fn in_sums(rotations: Tensor<3>, x: &Tensor<4>) -> Tensor<3> {
    let sums: DType = accumulate_in(x.dtype().into()).into();
    match rotations.dtype() == sums {
        true => rotations,
        false => rotations.cast(sums),
    }
}

/// Of each column the row of its highest number, of equal ones the first, counted through the rows of all heads: row `r` of head `h` is `h · rows + r`. `None`
/// where [no kernels run](runs_kernels).
///
/// # Shapes
/// - `numbers`: `[batch, heads, rows, columns]`
/// - result: i32 `[batch, heads, columns]`, without autodiff
///
/// # Errors
/// [`OpError`] if there are no numbers, or no feature of this crate serves the device.
pub fn argmax_rows(numbers: Tensor<4>) -> Result<Option<Tensor<3, Int>>, OpError> {
    let numbers = numbers.without_autodiff();
    let device = numbers.device();
    served(&device)?;
    blocksparse::ensure! { OpError; !numbers.dims().contains(&0) => "numbers", "at least one", 0; }
    by_kernels!(&device, {
        let found = <Dispatch as OrderOps>::argmax_rows(numbers.into_dispatch());
        Tensor::from_dispatch(found)
    })
}

/// The top-k of each row, and the place of each column in it, as [`topk_rows`] gives them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TopKRows {
    /// The columns, ascending: i32 `[groups, rows, most]`.
    pub columns: Tensor<3, Int>,
    /// Of each number of each row `row · most` and its place in the row's list, or −1: i32 `[groups, rows, columns]`.
    pub places: Tensor<3, Int>,
}

/// The `most` highest elements of each row: of equal ones the earlier, NaN is the lowest, and elements are compared in f32. `None` where
/// [no kernels run](runs_kernels). Nothing is sorted or read back.
///
/// # Shapes
/// - `numbers`: `[groups, rows, columns]`
///
/// # Errors
/// [`OpError`] if `most` is not from 1 to the columns, there are no rows, or no feature of this crate serves the device.
pub fn topk_rows(numbers: Tensor<3>, most: usize) -> Result<Option<TopKRows>, OpError> {
    let numbers = numbers.without_autodiff();
    let device = numbers.device();
    served(&device)?;
    let [groups, rows, columns] = numbers.dims();
    blocksparse::ensure! {
        OpError;
        groups * rows != 0 => "numbers", "at least one row", 0;
        (1..=columns).contains(&most) => "most", format!("from 1 to the {columns} columns"), most;
    }
    by_kernels!(&device, {
        let lists = <Dispatch as OrderOps>::topk_rows(numbers.into_dispatch(), most);
        TopKRows {
            columns: Tensor::from_dispatch(lists.columns),
            places: Tensor::from_dispatch(lists.places),
        }
    })
}

/// The rows that means attract, as [`topk_per_centroid`] gives them: i32, without autodiff.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TopKPerCentroid {
    /// The rows of each mean, ascending: `[batch, heads, means, most]`.
    pub rows: Tensor<4, Int>,
    /// Of each mean and row `mean · most` and the row's place in the mean's list, or −1: `[batch, heads, means, length]`.
    pub places: Tensor<4, Int>,
    /// The nearest mean of each row, of equally near ones the first, counted through the means of all heads: `[batch, heads, length]`.
    pub nearest: Tensor<3, Int>,
}

/// The `most` rows that are most similar to each mean of their head, of equally similar ones the earlier, and the nearest mean of each row. A similarity is
/// the product of the mean and the row made as long as 1, in f32; squares of lengths are 10⁻²⁴ at least, and NaN is the lowest. Two launches, whatever the
/// number of means. `None` where [no kernels run](runs_kernels), and of f64. No gradient flows through it.
///
/// Similarities are within 2⁻¹⁶ of the mean's length of exact ones, for rows of up to 128 numbers: between rows that are closer, rounding chooses.
///
/// # Shapes
/// - `x`: `[batch, heads, length, width]`
/// - `means`: `[heads, means, width]`, read in f32
///
/// # Errors
/// [`OpError`] if shapes or devices do not fit each other, one is empty, `most` is not from 1 to the length, or no feature of this crate serves the device.
pub fn topk_per_centroid(
    x: Tensor<4>,
    means: Tensor<3>,
    most: usize,
) -> Result<Option<TopKPerCentroid>, OpError> {
    let (x, means) = (x.without_autodiff(), means.without_autodiff());
    check_attraction(&x, &means, ("most", most))?;
    by_kernels!(&x.device(), {
        if x.dtype() == DType::F64 {
            return Ok(None);
        }
        let lists = <Dispatch as OrderOps>::topk_per_centroid(
            x.into_dispatch(),
            means.into_dispatch(),
            most,
        );
        TopKPerCentroid {
            rows: Tensor::from_dispatch(lists.rows),
            places: Tensor::from_dispatch(lists.places),
            nearest: Tensor::from_dispatch(lists.nearest),
        }
    })
}

/// Checks rows, means, and how many each of these is to attract, of an argument's name.
pub fn check_attraction(
    x: &Tensor<4>,
    means: &Tensor<3>,
    (argument, most): (&'static str, usize),
) -> Result<(), OpError> {
    served(&x.device())?;
    same_device("means' device", &x.device(), "x's", &means.device())?;
    let [batch, heads, length, width] = x.dims();
    let [of_heads, count, of_means] = means.dims();
    OpError::expect_same(
        "means' heads and width",
        [heads, width],
        "x's",
        [of_heads, of_means],
    )?;
    blocksparse::ensure! {
        OpError;
        batch * heads * length * width * count != 0 => "x and means", "not empty", 0;
        (1..=length).contains(&most) => argument, format!("from 1 to the {length} rows"), most;
    }
    Ok(())
}
