//! A call as data: its tensors, what it asks for, and the device it runs on.

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
    /// The buffer, beginning at the first element.
    pub handle: Handle,
    /// `[batch, heads, seq, dim]`
    pub shape: [usize; 4],
    /// In elements.
    pub strides: [usize; 4],
}

impl TensorView {
    /// Elements from the first one to the last, both included.
    pub fn reach(&self) -> usize {
        reach(&self.shape, &self.strides)
    }

    /// Strides of outer dimensions that are longer than 1: those of others are arbitrary.
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

/// How a tensor has to lie for launches to read it there. One that lies otherwise is made contiguous before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readable {
    /// The multiple that strides and the beginning must be of, in elements.
    pub alignment: usize,
    /// Elements from the first to the last, at most.
    pub reach: usize,
}

impl Readable {
    /// Whether launches read a tensor with these strides, which begins `start` elements into its buffer.
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

/// Elements from the first to the last of a tensor.
fn reach(shape: &[usize; 4], strides: &[usize; 4]) -> usize {
    let last = shape.iter().zip(strides);
    last.map(|(length, stride)| length.saturating_sub(1) * stride)
        .sum::<usize>()
        + 1
}

/// Biases of distances.
#[derive(Clone, Debug)]
pub struct TableView {
    /// The buffer, contiguous, in the type of sums.
    pub handle: Handle,
    /// `[heads or 1, 2 · reach + 1]`
    pub shape: [usize; 2],
}

/// A bias of scores.
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

/// What the forward pass writes and the backward pass reads.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Outputs<'a> {
    /// `[batch, heads, seq_q, value_dim]`, contiguous.
    pub out: &'a Handle,
    /// `[batch, heads, seq_q]`, contiguous.
    pub lse: &'a Handle,
    /// `[batch, blocks, b, b]`, if the request says that weights are stored. Holds zeros before the forward pass.
    pub weights: Option<&'a Handle>,
    /// `[batch, heads, seq_q]`, contiguous, in lse's type, if the request says so: each row's largest score over the keys it attends to,
    /// scaled, softcapped and biased, in natural units; −∞ in rows without keys. The backward pass does not read it.
    pub max_scores: Option<&'a Handle>,
}

impl<'a> Outputs<'a> {
    /// Out and lse only.
    pub fn new(out: &'a Handle, lse: &'a Handle) -> Self {
        Self {
            out,
            lse,
            weights: None,
            max_scores: None,
        }
    }

    /// With a buffer for weights, or without.
    pub fn with_weights(self, weights: Option<&'a Handle>) -> Self {
        Self { weights, ..self }
    }

    /// With a buffer for each row's largest score, or without.
    pub fn with_max_scores(self, max_scores: Option<&'a Handle>) -> Self {
        Self { max_scores, ..self }
    }
}

/// Gradients by the outputs.
#[derive(Clone, Copy, Debug)]
pub struct OutputGrads<'a> {
    /// `[batch, heads, seq_q, value_dim]`
    pub out: &'a TensorView,
    /// `[batch, heads, seq_q]`, contiguous, in lse's type. None: 0.
    pub lse: Option<&'a Handle>,
}

/// Where the gradients go.
#[derive(Debug)]
#[non_exhaustive]
pub struct Gradients {
    /// `[batch, heads, seq_q, head_dim]`
    pub q: Handle,
    /// dK `[batch, kv_heads, seq_kv, head_dim]`, and from element `v_offset` on dV
    /// `[batch, kv_heads, seq_kv, value_dim]`: one buffer, since some devices bind only eight.
    pub kv: Handle,
    /// Elements before dV, a multiple of 4.
    pub v_offset: usize,
    /// The bias's, if it is wanted: of the bias's shape, in the type of sums. Holds zeros before.
    pub bias: Option<Handle>,
    /// That of the biases of distances, if it is wanted: of their shape, in the type of sums.
    pub relative: Option<Handle>,
}

impl Gradients {
    /// Those of queries, and of keys and values; [`bias`](Self::bias) and [`relative`](Self::relative) are set if they are wanted.
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

/// What scores and weights are besides scaled products. Kernels are compiled for it: what is off costs nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ScoreKind {
    /// Whether scores are softcapped.
    pub softcap: bool,
    /// Whether scores have ALiBi biases.
    pub alibi: bool,
    /// Whether scores have a given bias.
    pub bias: bool,
    /// Whether scores have a bias of each distance.
    pub relative: bool,
    /// Whether weights are dropped out.
    pub dropout: bool,
    /// Whether dropout has its seed from a table on the device.
    pub seeds: bool,
    /// Whether tiles are skipped whose scores are below a threshold.
    pub threshold: bool,
}

impl ScoreKind {
    /// Whether anything is added to scores.
    pub fn biased(&self) -> bool {
        self.alibi || self.bias || self.relative
    }

    /// Whether anything depends on the positions of a pair.
    pub fn positions(&self) -> bool {
        self.biased() || self.dropout
    }

    /// Buffers that a kernel binds for the biases and the seed.
    pub fn buffers(&self) -> usize {
        [self.alibi, self.bias, self.relative, self.seeds]
            .into_iter()
            .map(usize::from)
            .sum()
    }
}

/// What a call asks for, apart from the layout and the numbers in its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Request {
    /// Batch entries.
    pub batch: usize,
    /// Heads of keys and values; divides the layout's heads.
    pub kv_heads: usize,
    /// Width of queries and keys.
    pub head_dim: usize,
    /// Width of values.
    pub value_dim: usize,
    /// Type of all tensors but lse and the weights.
    pub dtype: ElemType,
    /// Whether the weights are stored.
    pub store: bool,
    /// Whether the forward pass writes each row's largest score.
    pub max_scores: bool,
    /// Whether the scale is positive.
    pub positive_scale: bool,
    /// What factors of products may be rounded to.
    pub precision: ProductPrecision,
    /// What scores are besides scaled products.
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

    /// With scores of this kind.
    pub fn with_score(self, score: ScoreKind) -> Self {
        Self { score, ..self }
    }

    /// With products scaled by this.
    pub fn with_scale(self, scale: f64) -> Self {
        Self {
            positive_scale: scale > 0.0,
            ..self
        }
    }

    /// Whether the weights are stored.
    pub fn with_stored_weights(self, store: bool) -> Self {
        Self { store, ..self }
    }

    /// Whether the forward pass writes each row's largest score.
    pub fn with_max_scores(self, max_scores: bool) -> Self {
        Self { max_scores, ..self }
    }

    /// With factors of products that may be rounded to this.
    pub fn with_precision(self, precision: ProductPrecision) -> Self {
        Self { precision, ..self }
    }

    /// The type of sums, lse and weights: f32, or f64 for f64 tensors.
    pub fn accumulator(&self) -> ElemType {
        accumulator_of(self.dtype)
    }

    /// Whether tiles may be of like blocks. A tile of keys goes through all query heads of its group, which must agree
    /// on its rows, and stored weights are found by a tile's place.
    pub fn may_cluster(&self, layout: &BlockLayout, mainloop: Mainloop) -> bool {
        let common = mainloop == Mainloop::Rows
            || layout.num_patterns() == 1
            || self.kv_heads == layout.heads();
        common && !self.store
    }
}

/// The type of sums of elements of a type.
pub fn accumulator_of(element: ElemType) -> ElemType {
    match element {
        ElemType::Float(FloatKind::F64) => element,
        _ => ElemType::Float(FloatKind::F32),
    }
}

/// The kernels that run over a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Out and lse (and weights).
    Forward,
    /// dQ.
    BackwardRows,
    /// dK and dV.
    BackwardColumns,
}

impl Kernel {
    /// In the order of a call.
    pub const ALL: [Self; 3] = [Self::Forward, Self::BackwardRows, Self::BackwardColumns];

    /// How it goes through a layout.
    pub fn mainloop(self) -> Mainloop {
        match self {
            Kernel::Forward | Kernel::BackwardRows => Mainloop::Rows,
            Kernel::BackwardColumns => Mainloop::Columns,
        }
    }
}

/// Whether the application has the compiler for kernels with PTX of their own, CubeCL's for CUDA C++.
pub const HAS_PTX: bool = cfg!(feature = "cuda-asm");

fn check_device(is_it: bool, reason: &'static str) -> Result<(), &'static str> {
    match (is_it, HAS_PTX) {
        (false, _) => Err(reason),
        (true, false) => Err("feature `cuda` is off"),
        (true, true) => Ok(()),
    }
}

/// What all kernels on mma.sync need: ldmatrix, cp.async and products of bf16.
pub fn check_ampere(properties: &DeviceProperties) -> Result<(), &'static str> {
    let capability = properties.identity.fingerprint.strip_prefix("ptx_sm");
    let capability: u32 = capability.and_then(|text| text.parse().ok()).unwrap_or(0);
    let reason = "the device is not of compute capability 8.0 or up";
    check_device(capability >= 80, reason)
}

/// What all kernels on wgmma need.
pub fn check_hopper(properties: &DeviceProperties) -> Result<(), &'static str> {
    let is_it = properties.identity.fingerprint == "ptx_sm90";
    check_device(is_it, "the device is not of compute capability 9.0")
}

/// The device of a call, as far as plans depend on it.
#[derive(Clone, Copy)]
pub struct DeviceFacts<'a> {
    /// Name of the runtime.
    pub runtime: &'static str,
    /// What it says of itself.
    pub properties: &'a DeviceProperties,
}

impl<'a> DeviceFacts<'a> {
    /// Of a client's device.
    pub fn of(client: &'a Client) -> Self {
        Self {
            runtime: client.name(),
            properties: client.properties(),
        }
    }

    /// Checks that a dtype is one of the kernels' and the device's.
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
    /// What the launches compute.
    pub layout: &'a BlockLayout,
    /// What the call asks for.
    pub request: &'a Request,
    /// Keys of the call.
    pub seq_kv: usize,
    /// How positions are listed; `None`: as they come.
    pub residue: Option<Residue>,
    /// Whether it carries on from what the parts before left.
    pub carry: bool,
    /// Tiers that are left out.
    pub limit: TierLimit,
    /// The device's.
    pub properties: &'a DeviceProperties,
}
