//! A call as data: its tensors, the request and the device.

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::error::KernelError;
use super::tuning::TierLimit;
use blocksparse::plan::Mainloop;
use blocksparse::{BlockLayout, ProductPrecision, Residue};

/// A 4-dimensional tensor on the device. Outer dimensions may have any strides.
#[derive(Clone, Debug)]
pub struct TensorView {
    /// The buffer, which begins at the tensor's first element.
    pub handle: Handle,
    /// `[batch, heads, seq, dim]`
    pub shape: [usize; 4],
    /// Strides in elements.
    pub strides: [usize; 4],
}

impl TensorView {
    /// Number of elements from the first to the last, both included.
    pub fn reach(&self) -> usize {
        reach(&self.shape, &self.strides)
    }

    /// Strides of the outer dimensions that are longer than 1. Strides of dimensions of length 1 are arbitrary.
    pub fn outer_strides(&self) -> impl Iterator<Item = usize> {
        outer_strides(self.shape, self.strides)
    }

    /// Checks that rows are contiguous.
    ///
    /// # Errors
    /// [`KernelError::Stride`], which names the tensor.
    pub fn check_rows(&self, tensor: &'static str) -> Result<(), KernelError> {
        match has_rows(self.shape, self.strides) {
            true => Ok(()),
            false => Err(KernelError::Stride {
                tensor,
                stride: self.strides[3],
            }),
        }
    }
}

/// The strides and offsets that launches can read. Other tensors must be made contiguous first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readable {
    /// Strides and the offset of the first element must be multiples of this, in elements.
    pub alignment: usize,
    /// Largest number of elements from the first to the last.
    pub reach: usize,
}

impl Readable {
    /// Whether launches can read a tensor with these strides that begins `start` elements into its buffer.
    pub fn takes(&self, shape: [usize; 4], strides: [usize; 4], start: usize) -> bool {
        let is_aligned = |number: usize| number.is_multiple_of(self.alignment);
        is_aligned(start)
            && outer_strides(shape, strides).all(is_aligned)
            && has_rows(shape, strides)
            && reach(&shape, &strides) <= self.reach
    }
}

fn outer_strides(shape: [usize; 4], strides: [usize; 4]) -> impl Iterator<Item = usize> {
    let outer = shape.into_iter().zip(strides).take(3);
    outer
        .filter(|(length, _)| *length > 1)
        .map(|(_, stride)| stride)
}

fn has_rows(shape: [usize; 4], strides: [usize; 4]) -> bool {
    strides[3] == 1 || shape[3] == 1
}

/// Number of elements from the first to the last, both included.
fn reach(shape: &[usize; 4], strides: &[usize; 4]) -> usize {
    let last = shape.iter().zip(strides);
    last.map(|(length, stride)| length.saturating_sub(1) * stride)
        .sum::<usize>()
        + 1
}

/// Table of biases of distances.
#[derive(Clone, Debug)]
pub struct TableView {
    /// The buffer, contiguous, in the accumulator type.
    pub handle: Handle,
    /// `[heads or 1, 2 · reach + 1]`
    pub shape: [usize; 2],
}

/// Bias of scores.
#[derive(Clone, Debug)]
pub struct BiasView {
    /// The buffer, contiguous, in the inputs' type.
    pub handle: Handle,
    /// `[batch or 1, heads or 1, seq_q or 1, seq_kv]`
    pub shape: [usize; 4],
}

impl BiasView {
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Outputs of the forward pass, which the backward pass reads.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Outputs<'a> {
    /// `[batch, heads, seq_q, value_dim]`, contiguous.
    pub out: &'a Handle,
    /// `[batch, heads, seq_q]`, contiguous.
    pub lse: &'a Handle,
    /// `[batch, blocks, b, b]`, if the request stores weights. Must hold zeros before the forward pass.
    pub weights: Option<&'a Handle>,
    /// `[batch, heads, seq_q]`, contiguous, in lse's type, if the request asks for it: each row's largest score over the keys it attends to, scaled,
    /// softcapped and biased, in natural units; −∞ in rows without keys. The backward pass does not read it.
    pub max_scores: Option<&'a Handle>,
}

impl<'a> Outputs<'a> {
    /// Outputs without weights and largest scores.
    pub fn new(out: &'a Handle, lse: &'a Handle) -> Self {
        Self {
            out,
            lse,
            weights: None,
            max_scores: None,
        }
    }

    /// Sets the buffer of the weights.
    pub fn with_weights(self, weights: Option<&'a Handle>) -> Self {
        Self { weights, ..self }
    }

    /// Sets the buffer of each row's largest score.
    pub fn with_max_scores(self, max_scores: Option<&'a Handle>) -> Self {
        Self { max_scores, ..self }
    }
}

/// Gradients with respect to the outputs.
#[derive(Clone, Copy, Debug)]
pub struct OutputGrads<'a> {
    /// `[batch, heads, seq_q, value_dim]`
    pub out: &'a TensorView,
    /// `[batch, heads, seq_q]`, contiguous, in lse's type. `None` means 0.
    pub lse: Option<&'a Handle>,
}

/// Buffers that the gradients are written to.
#[derive(Debug)]
#[non_exhaustive]
pub struct Gradients {
    /// `[batch, heads, seq_q, head_dim]`
    pub q: Handle,
    /// dK `[batch, kv_heads, seq_kv, head_dim]`, followed from element `v_offset` by dV `[batch, kv_heads, seq_kv, value_dim]`. They share a buffer because
    /// some devices bind only eight.
    pub kv: Handle,
    /// Element at which dV begins, a multiple of 4.
    pub v_offset: usize,
    /// Gradient of the bias, if wanted: in the bias's shape and the accumulator type. Must hold zeros before the pass.
    pub bias: Option<Handle>,
    /// Gradient of the table of distances, if wanted: in the table's shape and the accumulator type.
    pub relative: Option<Handle>,
}

impl Gradients {
    /// Buffers of dQ and of dK and dV. Set [`bias`](Self::bias) and [`relative`](Self::relative) if they are wanted.
    pub fn new(q: Handle, kv: Handle, v_offset: usize) -> Self {
        Self {
            q,
            kv,
            v_offset,
            bias: None,
            relative: None,
        }
    }
}

/// Options of scores and weights besides scaled products. Kernels are compiled for them, so an option that is off costs nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ScoreKind {
    /// Whether scores are softcapped.
    pub softcap: bool,
    /// Whether scores have ALiBi biases.
    pub alibi: bool,
    /// Whether scores have a bias tensor.
    pub bias: bool,
    /// Whether scores have a table of distances.
    pub relative: bool,
    /// Whether weights have dropout.
    pub dropout: bool,
    /// Whether the dropout seed is in a table on the device.
    pub seeds: bool,
    /// Whether tiles with scores below a threshold are skipped.
    pub threshold: bool,
}

impl ScoreKind {
    /// Whether scores have slopes, a bias or a table of distances.
    pub fn biased(&self) -> bool {
        self.alibi || self.bias || self.relative
    }

    /// Whether scores or weights depend on the positions of a pair.
    pub fn positions(&self) -> bool {
        self.biased() || self.dropout
    }

    /// Number of buffers that a kernel binds for biases and the seed.
    pub fn buffers(&self) -> usize {
        [self.alibi, self.bias, self.relative, self.seeds]
            .into_iter()
            .map(usize::from)
            .sum()
    }
}

/// The parameters of a call, apart from the layout and the contents of its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Request {
    /// Number of batch entries.
    pub batch: usize,
    /// Number of heads of keys and values. Divides the layout's heads.
    pub kv_heads: usize,
    /// Width of queries and keys.
    pub head_dim: usize,
    /// Width of values.
    pub value_dim: usize,
    /// Type of all tensors except lse and the weights.
    pub dtype: ElemType,
    /// Whether the weights are stored.
    pub store: bool,
    /// Whether the forward pass writes each row's largest score.
    pub max_scores: bool,
    /// Whether the scale is positive. The tensor-core tiers need that unless scores are softcapped or biased.
    pub positive_scale: bool,
    /// Precision to which factors of products may be rounded.
    pub precision: ProductPrecision,
    /// Options of scores besides scaled products.
    pub score: ScoreKind,
}

impl Request {
    /// Plain attention with a positive scale.
    pub fn new(
        [batch, kv_heads]: [usize; 2],
        [head_dim, value_dim]: [usize; 2],
        dtype: ElemType,
    ) -> Self {
        Self {
            batch,
            kv_heads,
            head_dim,
            value_dim,
            dtype,
            store: false,
            max_scores: false,
            positive_scale: true,
            precision: ProductPrecision::Full,
            score: ScoreKind::default(),
        }
    }

    /// Sets the options of scores.
    pub fn with_score(self, score: ScoreKind) -> Self {
        Self { score, ..self }
    }

    /// Sets whether the scale is positive, from its value.
    pub fn with_scale(self, scale: f64) -> Self {
        Self {
            positive_scale: scale > 0.0,
            ..self
        }
    }

    /// Sets whether the weights are stored.
    pub fn with_stored_weights(self, store: bool) -> Self {
        Self { store, ..self }
    }

    /// Sets whether the forward pass writes each row's largest score.
    pub fn with_max_scores(self, max_scores: bool) -> Self {
        Self { max_scores, ..self }
    }

    /// Sets the precision to which factors of products may be rounded.
    pub fn with_precision(self, precision: ProductPrecision) -> Self {
        Self { precision, ..self }
    }

    /// The accumulator type, also of lse and weights: f32, or f64 for f64 tensors.
    pub fn accumulator(&self) -> ElemType {
        accumulator_of(self.dtype)
    }

    /// Whether tiles may gather block rows with similar patterns (clustering). A tile of keys is used by all query heads of its group, which must then
    /// share a pattern, and stored weights are found by a tile's place, so neither may be reordered.
    pub fn may_cluster(&self, layout: &BlockLayout, mainloop: Mainloop) -> bool {
        let common = mainloop == Mainloop::Rows
            || layout.num_patterns() == 1
            || self.kv_heads == layout.heads();
        common && !self.store
    }
}

/// Returns the accumulator type of an element type.
pub fn accumulator_of(element: ElemType) -> ElemType {
    match element {
        ElemType::Float(FloatKind::F64) => element,
        _ => ElemType::Float(FloatKind::F32),
    }
}

/// The kernels that run over a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// out and lse, and the weights if stored.
    Forward,
    /// dQ.
    BackwardRows,
    /// dK and dV.
    BackwardColumns,
}

impl Kernel {
    /// All kernels in launch order.
    pub const ALL: [Self; 3] = [Self::Forward, Self::BackwardRows, Self::BackwardColumns];

    /// Returns which side of the layout has the tiles.
    pub fn mainloop(self) -> Mainloop {
        match self {
            Kernel::Forward | Kernel::BackwardRows => Mainloop::Rows,
            Kernel::BackwardColumns => Mainloop::Columns,
        }
    }
}

/// Whether the crate is built with CubeCL's CUDA C++ compiler, which kernels with inline PTX need.
pub const HAS_PTX: bool = cfg!(feature = "cuda-asm");

fn check_device(is_it: bool, reason: &'static str) -> Result<(), &'static str> {
    match (is_it, HAS_PTX) {
        (false, _) => Err(reason),
        (true, false) => Err("feature `cuda` is off"),
        (true, true) => Ok(()),
    }
}

/// Checks that the device has the features that kernels on mma.sync need: ldmatrix, cp.async and products of bf16.
pub fn check_ampere(properties: &DeviceProperties) -> Result<(), &'static str> {
    let capability = properties.identity.fingerprint.strip_prefix("ptx_sm");
    let capability: u32 = capability.and_then(|text| text.parse().ok()).unwrap_or(0);
    let reason = "the device is not of compute capability 8.0 or up";
    check_device(capability >= 80, reason)
}

/// Checks that the device has the features that kernels on wgmma need.
pub fn check_hopper(properties: &DeviceProperties) -> Result<(), &'static str> {
    let is_it = properties.identity.fingerprint == "ptx_sm90";
    check_device(is_it, "the device is not of compute capability 9.0")
}

/// The properties of a device that plans depend on.
#[derive(Clone, Copy)]
pub struct DeviceFacts<'a> {
    /// Name of the runtime.
    pub runtime: &'static str,
    /// Properties that the runtime reports.
    pub properties: &'a DeviceProperties,
}

impl<'a> DeviceFacts<'a> {
    /// Returns the facts of a client's device.
    pub fn of(client: &'a Client) -> Self {
        Self {
            runtime: client.name(),
            properties: client.properties(),
        }
    }

    /// Checks that the kernels and the device support a dtype.
    pub fn check_dtype(&self, dtype: ElemType) -> Result<(), KernelError> {
        use FloatKind::{BF16, F16, F32, F64, Flex32};
        let float = matches!(dtype, ElemType::Float(F16 | BF16 | F32 | F64 | Flex32));
        // WGSL names the type, but SPIR-V has no 64-bit exp.
        let exp = dtype != ElemType::Float(F64) || !self.runtime.starts_with("wgpu");
        match float && exp && self.properties.supports_type(dtype) {
            true => Ok(()),
            false => Err(KernelError::Dtype {
                dtype: dtype.to_string(),
            }),
        }
    }
}

/// A part of a layout for which a tier is chosen.
#[derive(Clone, Copy)]
pub struct PartRequest<'a> {
    /// Layout of the part's launches.
    pub layout: &'a BlockLayout,
    /// Request of the call.
    pub request: &'a Request,
    /// Number of keys of the call.
    pub seq_kv: usize,
    /// Order of positions, by residue class. `None` means consecutive positions.
    pub residue: Option<Residue>,
    /// Whether the part continues the softmax state of earlier parts.
    pub carry: bool,
    /// Tiers to leave out.
    pub limit: TierLimit,
    /// Properties of the device.
    pub properties: &'a DeviceProperties,
}
