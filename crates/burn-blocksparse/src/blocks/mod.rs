//! Block-sparse tensors: products, softmax and element-wise functions over the blocks of a layout.
#[cfg(feature = "autodiff")]
mod autodiff;
mod compute;
mod ops;
mod places;

use blocksparse::BlockLayout;

use places::Places;

pub use compute::BlockProduct;
pub use ops::BlockSparseTensorOps;

use crate::attention::reference::tile;
use crate::base::prelude::*;
use crate::base::values::LayoutTensors;
use crate::check::same_device;
use crate::graph::recording;
use crate::upload;
use crate::weights::{self, BlockSparseTensor};

/// The operators of block-sparse attention as separate functions, as in Gray, Radford and Kingma, "GPU kernels for block-sparse weights" (2017), from which
/// other kinds of attention can be built. They run as Burn primitives on every backend, not as fused kernels ([`sparse_attention`](crate::sparse_attention)
/// does). The values of all kept blocks are in memory, `blocks · block_size²` per batch entry (two to four times that during a softmax or its gradient).
/// Gathered operands are in memory in chunks of about 16 MiB.
///
/// All operators are differentiable (once), and deterministic if Burn's matrix products are. On CUDA, Burn rounds operands of f32 products to tf32.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{BlockSparseTensor, Pattern, sparse_attention};
///
/// let device = Device::flex();
/// let [q, k, v] =
///     [(); 3].map(|_| Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &device));
/// let layout = Pattern::local(20).layout(2, 64, 16)?;
///
/// let scores = BlockSparseTensor::nt(q.clone(), k.clone(), &layout)?;
/// let out = scores.clone().softmax(0.25)?.nn(v.clone())?;
/// let fused = sparse_attention(q, k, v.clone(), &layout)?;
/// assert!((out - fused).abs().max().into_scalar::<f32>() < 1e-5);
///
/// // Squared ReLU in the place of the softmax, normalised by the sums of the rows.
/// let weights = scores.map(|s| s.clamp_min(0.0).powi_scalar(2))?;
/// let sums = weights.clone().nn(Tensor::ones([1, 2, 64, 1], &device))?;
/// let out = weights.nn(v)? / sums.clamp_min(1e-6);
/// # assert_eq!(out.dims(), [1, 2, 64, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
impl BlockSparseTensor {
    /// Computes the kept blocks of `a · bᵀ`: `w[i, j] = a[i] · b[j]` for allowed pairs, 0 for masked ones.
    ///
    /// # Shapes
    /// - `a`: `[batch, heads, seq_q, dim]`
    /// - `b`: `[batch, kv_heads, seq_kv, dim]`; `kv_heads` divides `heads`, and head `h` uses `h / (heads / kv_heads)`
    /// - values in f32 (f64 for f64 inputs)
    ///
    /// # Errors
    /// [`OpError`] if shapes, dtypes or devices do not fit each other or the layout.
    pub fn nt(a: Tensor<4>, b: Tensor<4>, layout: &BlockLayout) -> Result<Self, OpError> {
        served(&a.device())?;
        let [batch, _, _, dim] = a.dims();
        check_batch("a's batch", batch, layout)?;
        OpError::ensure_positive("a's dim", dim)?;
        let host = "the layout's";
        expect("a's heads", layout.heads(), host, a.dims()[1])?;
        expect("a's seq_q", layout.seq_q(), host, a.dims()[2])?;
        expect("b's batch", batch, "a's", b.dims()[0])?;
        check_kv(&b, layout)?;
        expect("b's dim", dim, "a's", b.dims()[3])?;
        expect("b's dtype", a.dtype(), "a's", b.dtype())?;
        same_device("b's device", &a.device(), "a's", &b.device())?;
        let tensors = on_device(layout, &a.device());
        let values = product(a, b, tensors, BlockProduct::Nt);
        Ok(Self::new(values, layout.clone()))
    }

    /// Computes the product with a dense tensor: `out[i] = Σ_j w[i, j] · b[j]`.
    ///
    /// # Shapes
    /// - `b`: `[batch, kv_heads, seq_kv, dim]`; `kv_heads` divides the layout's heads
    /// - returns `[batch, heads, seq_q, dim]` in `b`'s dtype
    ///
    /// # Errors
    /// [`OpError`] if shape, dtype or device do not fit the values. f16, bf16 and f32 fit values in f32.
    pub fn nn(self, b: Tensor<4>) -> Result<Tensor<4>, OpError> {
        check_kv(&b, self.layout())?;
        self.check_factor(["b's batch", "b's dim", "b's dtype", "b's device"], &b)?;
        let (w, tensors) = self.into_parts();
        Ok(product(w, b, tensors, BlockProduct::Nn))
    }

    /// Computes the product of the transpose with a dense tensor: `out[j] = Σ_i w[i, j] · a[i]`, head by head. (With grouped heads
    /// the gradient of [`Self::nt`] with respect to `b` is the sum over each group.)
    ///
    /// # Shapes
    /// - `a`: `[batch, heads, seq_q, dim]`
    /// - returns `[batch, heads, seq_kv, dim]` in `a`'s dtype
    ///
    /// # Errors
    /// As [`Self::nn`].
    pub fn tn(self, a: Tensor<4>) -> Result<Tensor<4>, OpError> {
        let (layout, host) = (self.layout(), "the layout's");
        let heads = layout.heads();
        expect("a's heads", heads, host, a.dims()[1])?;
        expect("a's seq_q", layout.seq_q(), host, a.dims()[2])?;
        self.check_factor(["a's batch", "a's dim", "a's dtype", "a's device"], &a)?;
        let (w, tensors) = self.into_parts();
        let of_heads = BlockProduct::Tn { kv_heads: heads };
        Ok(product(w, a, tensors, of_heads))
    }

    /// Computes the softmax over the allowed pairs of each row, across its blocks: `p[i, j] = exp(scale · w[i, j]) / Σ_k exp(scale · w[i, k])`. Rows without
    /// pairs stay 0. Finite values never give NaN.
    ///
    /// # Errors
    /// [`OpError`] if the scale is not finite.
    pub fn softmax(self, scale: f64) -> Result<Self, OpError> {
        blocksparse::ensure! { OpError; scale.is_finite() => "scale", "finite", scale; }
        let layout = self.layout().clone();
        let (w, tensors) = self.into_parts();
        let w = w.into_dispatch();
        let p = <Dispatch as BlockSparseTensorOps>::block_sparse_softmax(w, tensors, scale);
        Ok(Self::new(Tensor::from_dispatch(p), layout))
    }

    /// Applies a function to the values, element by element. Masked pairs stay 0 regardless of its result, and a non-finite value or
    /// derivative at 0 has no effect on them.
    ///
    /// # Errors
    /// [`OpError`] if the function returns another shape or device.
    pub fn map(self, f: impl FnOnce(Tensor<4>) -> Tensor<4>) -> Result<Self, OpError> {
        let (shape, device) = (self.values().dims(), self.values().device());
        let layout = self.layout().clone();
        // The values are already masked; this also masks the gradient that comes out of the function.
        let values = f(masked(self.values(), &layout));
        expect("the function's shape", shape, "its input's", values.dims())?;
        let own = values.device();
        expect("the function's device", device, "its input's", own)?;
        Self::from_values(values, &layout)
    }

    /// Creates a block-sparse tensor from values. Masked pairs are set to 0.
    ///
    /// # Shapes
    /// - `values`: `[batch, blocks, block_size, block_size]`, any float dtype, with blocks in the order of this type. A per-batch layout has as
    ///   many blocks as its fullest batch entry; surplus blocks of other entries are set to 0.
    ///
    /// # Errors
    /// [`OpError`] if the shape does not fit the layout.
    pub fn from_values(values: Tensor<4>, layout: &BlockLayout) -> Result<Self, OpError> {
        served(&values.device())?;
        let batch = values.dims()[0];
        check_batch("values' batch", batch, layout)?;
        let shape = weights::shape(layout, batch);
        expect("values' shape", shape, "the layout's", values.dims())?;
        let dtype = accumulate_in(FloatDType::from(values.dtype()));
        let values = masked(values.cast(dtype), layout);
        Ok(Self::new(values, layout.clone()))
    }

    /// Checks that a dense operand fits the values.
    fn check_factor(
        &self,
        [batch, dim, dtype, device]: [&'static str; 4],
        factor: &Tensor<4>,
    ) -> Result<(), OpError> {
        let values = self.values();
        expect(batch, values.dims()[0], "the values'", factor.dims()[0])?;
        OpError::ensure_positive(dim, factor.dims()[3])?;
        let accumulator = accumulate_in(FloatDType::from(factor.dtype()));
        blocksparse::ensure! {
            OpError;
            accumulator == FloatDType::from(values.dtype())
                => dtype, format!("one that is summed in {:?}, the values'", values.dtype()), format!("{:?}", factor.dtype());
        }
        same_device(device, &values.device(), "the values'", &factor.device())
    }

    /// Returns the values and the layout in the form that backends take.
    fn into_parts(self) -> (Tensor<4>, LayoutTensors<Dispatch>) {
        let (values, layout) = self.into_values();
        let tensors = on_device(&layout, &values.device());
        (values, tensors)
    }

    /// Returns the values as `[batch, heads, seq_q, seq_kv]`, with 0 for other pairs. O(n²) memory, for plots and tests.
    pub fn to_dense(&self) -> Tensor<4> {
        let layout = self.layout();
        let [batch, stored, b, _] = self.values().dims();
        let (heads, q_blocks, kv_blocks) = (layout.heads(), layout.q_blocks(), layout.kv_blocks());
        let device = self.values().device();
        let absent = batch * stored;
        let known = Places::of(layout, batch, heads);
        let kept = (known.stored_places()).unwrap_or_else(|| (0..absent as i32).collect());
        // The index of every block of the dense tensor among the stored blocks, or that of a block of zeros.
        let mut places = vec![absent as i32; batch * heads * q_blocks * kv_blocks];
        for ((query, key), place) in known.q_tiles.iter().zip(&known.kv_tiles).zip(kept) {
            places[*query as usize * kv_blocks + *key as usize % kv_blocks] = place;
        }
        let zeros = Tensor::zeros([1, b, b], (&device, self.values().dtype()));
        let blocks = match absent {
            0 => zeros,
            _ => Tensor::cat(vec![self.values().reshape([absent, b, b]), zeros], 0),
        };
        recording::expect_no_upload("the places of stored blocks");
        let places = TensorData::new(places, [batch * heads * q_blocks * kv_blocks]);
        blocks
            .select(0, Tensor::from_data(places, &device))
            .reshape([batch * heads, q_blocks, kv_blocks, b, b])
            .permute([0, 1, 3, 2, 4])
            .reshape([batch, heads, q_blocks * b, kv_blocks * b])
            .slice([0..batch, 0..heads, 0..layout.seq_q(), 0..layout.seq_kv()])
    }

    /// Multiplies the values by factors of their rows, `[batch, heads, seq_q]`. This is not a matrix product, whose operands Burn may round to tf32.
    pub(crate) fn times_rows(self, factors: Tensor<3>) -> Self {
        let (values, layout) = self.into_values();
        let [batch, stored, b, _] = values.dims();
        // Not every backend supports tensors without elements.
        if stored == 0 {
            return Self::new(values, layout);
        }
        let rows = Places::of(&layout, batch, layout.heads()).stored_q_tiles();
        recording::expect_no_upload("the rows of a block-sparse tensor");
        let rows = TensorData::new(rows, [batch * stored]);
        let factors = factors.unsqueeze_dim::<4>(3).into_dispatch();
        let tiles = tile(Array::<Dispatch>(factors), b);
        let factors = Tensor::<2>::from_dispatch(tiles.0)
            .select(0, Tensor::from_data(rows, &values.device()))
            .reshape([batch, stored, b, 1]);
        Self::new(values * factors, layout)
    }
}

fn product(
    lhs: Tensor<4>,
    rhs: Tensor<4>,
    layout: LayoutTensors<Dispatch>,
    product: BlockProduct,
) -> Tensor<4> {
    let (lhs, rhs) = (lhs.into_dispatch(), rhs.into_dispatch());
    let made = <Dispatch as BlockSparseTensorOps>::block_sparse_product(lhs, rhs, layout, product);
    Tensor::from_dispatch(made)
}

fn masked(values: Tensor<4>, layout: &BlockLayout) -> Tensor<4> {
    let tensors = on_device(layout, &values.device());
    let values = values.into_dispatch();
    let values = <Dispatch as BlockSparseTensorOps>::block_sparse_mask(values, tensors);
    Tensor::from_dispatch(values)
}

fn on_device(layout: &BlockLayout, device: &Device) -> LayoutTensors<Dispatch> {
    upload::layout_tensors(layout, device, false).unwrap_or_else(|error| panic!("{error}"))
}

fn expect<T: PartialEq + std::fmt::Debug>(
    argument: &'static str,
    expected: T,
    whose: &str,
    got: T,
) -> Result<(), OpError> {
    OpError::expect_same(argument, expected, whose, got)
}

fn check_batch(argument: &'static str, batch: usize, layout: &BlockLayout) -> Result<(), OpError> {
    match layout.batch() {
        Some(expected) => expect(argument, expected, "the layout's", batch),
        None => OpError::ensure_positive(argument, batch),
    }
}

/// Checks that `b` fits the layout's keys.
fn check_kv(b: &Tensor<4>, layout: &BlockLayout) -> Result<(), OpError> {
    let [_, kv_heads, seq_kv, _] = b.dims();
    let heads = layout.heads();
    expect("b's seq_kv", layout.seq_kv(), "the layout's", seq_kv)?;
    blocksparse::ensure! {
        OpError;
        kv_heads != 0 && heads.is_multiple_of(kv_heads) => "b's kv_heads", format!("a divisor of the {heads} heads of the layout"), kv_heads;
    }
    Ok(())
}
