use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::nn::Linear;
use burn::tensor::{Device, FloatDType, IndexingUpdateOp, Int, Tensor, TensorData};
use burn_blocksparse::OpError;
use burn_fused_ops::sparse_linear::{
    BlockSparseLinearOptions, WeightLayout, WeightPattern, block_sparse_linear,
};

use super::kept_blocks::KeptBlocks;
use crate::Precision;
use crate::error::{Result, ensure, or_panics};

/// Configuration of [`BlockSparseLinear`].
#[derive(Config, Debug)]
#[must_use = "a configuration does nothing until `init`"]
pub struct BlockSparseLinearConfig {
    /// Width of the input, a multiple of `block`.
    pub d_input: usize,
    /// Width of the output, a multiple of `block`.
    pub d_output: usize,
    /// Share of the weight's blocks that is kept, in `(0, 1]`.
    pub density: f64,
    /// Side of a block: 16, 32, 64 or 128.
    #[config(default = 64)]
    pub block: usize,
    /// Pattern of the kept blocks.
    #[config(default = "WeightPattern::SmallWorld")]
    pub pattern: WeightPattern,
    /// Seed of random patterns.
    #[config(default = 0)]
    pub seed: u64,
    /// True if there is a bias.
    #[config(default = true)]
    pub bias: bool,
    /// True if each block has a learned factor, initialised to 1.
    #[config(default = false)]
    pub gates: bool,
    /// Initialisation of the parameters: like burn-nn's `Linear`, with the mean number of inputs of an output as fan-in.
    #[config(
        default = "Initializer::KaimingUniform { gain: 1.0 / 3f64.sqrt(), fan_out_only: false }"
    )]
    pub initializer: Initializer,
    /// Dtype of the product.
    #[config(default = "Precision::F32")]
    pub precision: Precision,
}

impl BlockSparseLinearConfig {
    or_panics! {
        /// Creates the layer, with weights that are initialised on first use.
        pub fn init(&self, device: &Device) -> BlockSparseLinear;

        /// # Errors
        /// [`TransformerError::Layout`](crate::TransformerError::Layout) if the widths, the block and the density have no layout;
        /// [`TransformerError::Precision`](crate::TransformerError::Precision) if the device does not support the precision.
        pub fn try_init {
            let shape = [self.d_input, self.d_output];
            let layout = (self.pattern).layout(shape, self.block, self.density, self.seed)?;
            self.try_init_with_layout(layout, device)
        }
    }

    or_panics! {
        /// [`Self::init`] with a given layout, which must be of a weight `[d_input, d_output]`; `density`, `block`, `pattern` and `seed` are ignored.
        pub fn init_with_layout(&self, layout: WeightLayout, device: &Device) -> BlockSparseLinear;

        /// # Errors
        /// If the layout has another shape; also those of [`Self::try_init`].
        pub fn try_init_with_layout {
            let (expected, shape) = (
                [self.d_input, self.d_output],
                [layout.inputs(), layout.outputs()],
            );
            ensure! { shape == expected =>
                "layout", format!("of a weight {expected:?}"), format!("{shape:?}"); }
            let [fan_in, fan_out] = fans(&layout).map(|width| (width.round() as usize).max(1));
            let bias = self.bias.then(|| {
                let (fan_in, fan_out) = (Some(fan_in), Some(fan_out));
                (self.initializer).init_with([self.d_output], fan_in, fan_out, device)
            });
            let weight =
                (self.initializer).init_with(layout.shape(), Some(fan_in), Some(fan_out), device);
            let mut layer = BlockSparseLinear::new(weight, bias, layout, device);
            if self.gates {
                let blocks = layer.layout()?.len();
                layer.gates = Some(Initializer::Ones.init([blocks], device));
            }
            layer.with_precision(self.precision)
        }
    }
}

/// Returns the mean number of inputs of an output, and of outputs of an input.
pub(crate) fn fans(layout: &WeightLayout) -> [f64; 2] {
    let kept = (layout.len() * layout.block()) as f64;
    [layout.out_blocks(), layout.in_blocks()].map(|blocks| kept / blocks as f64)
}

/// burn-nn's `Linear` with a block-sparse weight (Gray, Radford, Kingma, "GPU Kernels for Block-Sparse Weights", 2017): `x · W + b`, where `W` is zero
/// outside of the blocks of a [`WeightLayout`]. Computation and memory are proportional to the kept blocks.
///
/// Records store the layout with the parameters. A record loads into any layer of the same widths with the same number and size of blocks, whichever they
/// are: a layer that was pruned or made from a dense one loads into a new one of its density, if that is random.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_sparse_transformer::linear::{BlockSparseLinear, BlockSparseLinearConfig};
///
/// let device = Device::flex();
/// let layer = BlockSparseLinearConfig::new(64, 128, 0.25).with_block(16).init(&device);
/// let x = Tensor::<3>::random([2, 5, 64], Distribution::Default, &device);
/// assert_eq!(layer.forward(x).dims(), [2, 5, 128]);
///
/// // The quarter of a trained layer's blocks that is largest.
/// let trained = LinearConfig::new(64, 128).init(&device);
/// let layer = BlockSparseLinear::from_dense(&trained, 0.25, 16)?;
/// assert_eq!(layer.weight.dims(), [8, 16, 16]);
/// # Ok::<(), burn_sparse_transformer::TransformerError>(())
/// ```
#[derive(Module, Debug)]
pub struct BlockSparseLinear {
    /// Kept blocks, in the layout's order: `[blocks, block, block]`, inputs first.
    pub weight: Param<Tensor<3>>,
    /// Bias, `[d_output]`.
    pub bias: Option<Param<Tensor<1>>>,
    /// Factor of each block: `[blocks]`.
    pub gates: Option<Param<Tensor<1>>>,
    kept: KeptBlocks,
    #[module(skip)]
    precision: Precision,
}

impl BlockSparseLinear {
    pub(crate) fn new(
        weight: Param<Tensor<3>>,
        bias: Option<Param<Tensor<1>>>,
        layout: WeightLayout,
        device: &Device,
    ) -> Self {
        Self {
            weight,
            bias,
            gates: None,
            kept: KeptBlocks::new(layout, device),
            precision: Precision::default(),
        }
    }

    /// Keeps the blocks of `layer` with the largest norms, and its bias.
    ///
    /// # Errors
    /// [`TransformerError::Layout`](crate::TransformerError::Layout) if the layer's widths are not multiples of `block`, the block is none of 16, 32, 64 and
    /// 128, the density is not in `(0, 1]`, or a norm is NaN.
    pub fn from_dense(layer: &Linear, density: f64, block: usize) -> Result<Self> {
        let weight = layer.weight.val().detach();
        let shape = weight.dims();
        // Checks the sizes before the weight is cut.
        let all = WeightLayout::dense(shape, block)?;
        let blocks = cut(weight, &all);
        let norms = norms(blocks.clone())?;
        let layout = WeightLayout::by_magnitude(shape, block, &norms, density)?;
        let device = blocks.device();
        let kept = blocks.select(0, indices(places(&layout), &device));
        // A computed tensor is not a leaf of the autodiff graph, even if its inputs are detached.
        let weight = Param::from_tensor(kept.detach());
        Ok(Self::new(weight, layer.bias.clone(), layout, &device))
    }

    /// Returns the equivalent dense layer, with zeros in place of missing blocks, and gates multiplied into the weight.
    ///
    /// # Errors
    /// If a loaded layout cannot be read from the device.
    pub fn to_dense(&self) -> Result<Linear> {
        let layout = self.layout()?;
        let (ins, outs, block) = (layout.in_blocks(), layout.out_blocks(), layout.block());
        let blocks = self.gated().detach();
        let device = blocks.device();
        let all = Tensor::<3>::zeros([ins * outs, block, block], (&device, blocks.dtype()));
        let places = indices(places(&layout), &device);
        let all = all.select_assign(0, places, blocks, IndexingUpdateOp::Add);
        let dense = all.reshape([ins, outs, block, block]).permute([0, 2, 1, 3]);
        let dense = dense.reshape([layout.inputs(), layout.outputs()]);
        Ok(Linear {
            weight: Param::from_tensor(dense.detach()),
            bias: self.bias.clone(),
        })
    }

    /// Returns the layer with fewer blocks, those with the largest norms (gates included), and their previous indices. Parameters keep their ids; pass the
    /// indices to [`FusedAdamW::keep_rows`](burn_fused_ops::optim::FusedAdamW::keep_rows) to prune an optimizer's state of the weight and the gates.
    ///
    /// # Errors
    /// If `density`, as a share of all blocks of the weight, is not in `(0, 1]` or above the present one, or a norm is NaN.
    pub fn prune(self, density: f64) -> Result<(Self, Vec<usize>)> {
        let layout = self.layout()?;
        let blocks = layout.in_blocks() * layout.out_blocks();
        let kept_norms = norms(self.gated().detach())?;
        let mut norms = vec![f32::NEG_INFINITY; blocks];
        for (place, norm) in places(&layout).into_iter().zip(kept_norms) {
            norms[place] = norm;
        }
        let shape = [layout.inputs(), layout.outputs()];
        let fewer = WeightLayout::by_magnitude(shape, layout.block(), &norms, density)?;
        ensure! { fewer.len() <= layout.len() =>
        "density", format!("at most {}, the layer's", layout.density()), density; }
        let stay: Vec<usize> = fewer
            .kept_blocks()
            .filter_map(|(input, output)| layout.index_of(input as usize, output as usize))
            .collect();
        let device = self.weight.lazy_device();
        let rows = indices(stay.clone(), &device);
        let weight = self.weight.map(|weight| keep(weight, rows.clone()));
        let gates = self.gates.map(|gates| gates.map(|gates| keep(gates, rows)));
        let layer = Self {
            weight,
            gates,
            kept: KeptBlocks::new(fewer, &device),
            ..self
        };
        Ok((layer, stay))
    }

    /// Returns the same layer with its product in another precision.
    ///
    /// # Errors
    /// [`TransformerError::Precision`](crate::TransformerError::Precision) if the weight's device does not support it.
    pub fn with_precision(mut self, precision: Precision) -> Result<Self> {
        precision.check(&self.weight.lazy_device())?;
        self.precision = precision;
        Ok(self)
    }

    /// Returns the layout of the kept blocks.
    ///
    /// # Errors
    /// If a loaded layout cannot be read from the device.
    pub fn layout(&self) -> Result<WeightLayout> {
        self.kept.layout()
    }

    or_panics! {
        /// Applies the layer. The result has the input's dtype.
        ///
        /// # Shapes
        /// - input: `[.., d_input]`
        /// - output: `[.., d_output]`
        pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D>;

        /// # Errors
        /// If the last axis is not `d_input`, or a loaded layout does not match the weight.
        pub fn try_forward {
            let dtype = x.dtype();
            let bias = self.bias.as_ref().map(Param::val);
            let product = self.product(x, bias, self.precision.dtype(dtype))?;
            Ok(product.cast(dtype))
        }
    }

    pub(crate) fn product<const D: usize>(
        &self,
        x: Tensor<D>,
        bias: Option<Tensor<1>>,
        dtype: FloatDType,
    ) -> Result<Tensor<D>> {
        let mut options = BlockSparseLinearOptions::default().dtype(dtype);
        options.bias = bias;
        options.gates = self.gates.as_ref().map(Param::val);
        let weight = self.weight.val();
        Ok(block_sparse_linear(x, weight, &self.layout()?, options)?)
    }

    /// Returns the blocks times their gates.
    fn gated(&self) -> Tensor<3> {
        let weight = self.weight.val();
        match &self.gates {
            Some(gates) => {
                let [blocks] = gates.dims();
                weight * gates.val().reshape([blocks, 1, 1])
            }
            None => weight,
        }
    }
}

/// Cuts a weight into the blocks of a grid, row by row: `[in_blocks · out_blocks, block, block]`.
fn cut(weight: Tensor<2>, grid: &WeightLayout) -> Tensor<3> {
    let (ins, outs, block) = (grid.in_blocks(), grid.out_blocks(), grid.block());
    let blocks = weight
        .reshape([ins, block, outs, block])
        .permute([0, 2, 1, 3]);
    blocks.reshape([ins * outs, block, block])
}

/// Returns the indices of the kept blocks in the grid, row by row.
fn places(layout: &WeightLayout) -> Vec<usize> {
    let outs = layout.out_blocks();
    let places = layout
        .kept_blocks()
        .map(|(input, output)| input as usize * outs + output as usize);
    places.collect()
}

fn indices(indices: Vec<usize>, device: &Device) -> Tensor<1, Int> {
    let length = indices.len();
    let indices: Vec<i32> = indices.into_iter().map(|index| index as i32).collect();
    Tensor::from_data(TensorData::new(indices, [length]), device)
}

fn norms(blocks: Tensor<3>) -> Result<Vec<f32>> {
    let squares = blocks.powi_scalar(2).sum_dim(2).sum_dim(1).sqrt();
    let data = squares.try_into_data();
    let data = data.map_err(|error| OpError::Read(format!("{error:?}")))?;
    Ok(data.iter::<f32>().collect())
}

/// Selects rows of a parameter; the result is a leaf like the parameter.
fn keep<const D: usize>(tensor: Tensor<D>, rows: Tensor<1, Int>) -> Tensor<D> {
    let tracked = tensor.is_require_grad();
    tensor.select(0, rows).detach().set_require_grad(tracked)
}
