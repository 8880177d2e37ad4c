//! Block-sparse attention in CubeCL kernels, on any CubeCL runtime.
//!
//! ```text
//! forward     s = scale · q · kᵀ    p = softmax(s)    out = p · v          lse = ln Σ exp(s)
//! backward    delta = rowsum(dO ∘ O) − dlse           p = exp(s − lse)
//!             dp = dO · vᵀ          ds = p ∘ (dp − delta) · scale
//!             dQ = ds · k           dK = dsᵀ · q       dV = pᵀ · dO
//! ```
//!
//! Only the pairs in kept blocks are computed. The forward and the dQ kernel give a cube a tile of
//! queries, which walks the keys it needs; the dK/dV kernel gives it a tile of keys, which walks the queries that need
//! them. So every output has one writer: there are no atomics, and the same input gives the same bits.
//! [`plan`](crate::plan) says what a cube walks.
//!
//! [`AttentionPlan`] is what a call will run, chosen from the layout, the sizes and the device; it prints. Nothing
//! falls back silently: what cannot run is a [`KernelError`] before anything is launched.

mod device;
#[cfg(feature = "cuda-asm")]
pub mod hopper;
mod launch;
mod masses;
#[cfg(feature = "cuda-asm")]
pub mod mma;
mod on_device;
mod shared;
mod simt;
#[cfg(feature = "cuda-asm")]
mod tensor;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use cubecl::device::DeviceId;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::plan::{Tiling, Walk};
use crate::{BlockLayout, Residue};

pub use on_device::{ChoiceTensor, choose_blocks};

pub use launch::{
    BiasView, Gradients, OutputGrads, Outputs, ScoreOptions, TableView, backward, forward,
};
pub use masses::{MassOutputs, check_masses, masses};

/// What can be wrong with a launch. All of it is known before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A dtype the kernels or the device do not have.
    #[error("dtype must be a float type of the device, got {dtype}")]
    Dtype {
        /// The dtype that came.
        dtype: String,
    },
    /// No tile fits the shared memory of the device.
    #[error(
        "head_dim and value_dim must fit tiles in {available} bytes of shared memory, \
         got {head_dim} and {value_dim}"
    )]
    SharedMemory {
        /// Width of queries and keys.
        head_dim: usize,
        /// Width of values.
        value_dim: usize,
        /// Bytes a cube has.
        available: usize,
    },
    /// More of something than a launch on the device can have.
    #[error("{what} must be at most {limit}, a limit of the device, got {got}")]
    Limit {
        /// What there is too much of.
        what: &'static str,
        /// The most there can be.
        limit: u64,
        /// What a launch would need.
        got: u64,
    },
    /// A tensor whose last dimension is not contiguous.
    #[error("{tensor}'s last dimension must have stride 1, got {stride}")]
    Stride {
        /// The tensor.
        tensor: &'static str,
        /// Its last stride.
        stride: usize,
    },
    /// A tensor that TMA cannot read.
    #[error(
        "{tensor} must begin at and have strides of multiples of {multiple} elements, got {got}"
    )]
    Alignment {
        /// The tensor.
        tensor: &'static str,
        /// The multiple.
        multiple: usize,
        /// A stride, or where it begins.
        got: usize,
    },
    /// Residue classes of different lengths, which TMA cannot read.
    #[error("{tensor}'s sequence must be a multiple of the pattern's stride {stride}, got {seq}")]
    Classes {
        /// The tensor.
        tensor: &'static str,
        /// The pattern's stride.
        stride: usize,
        /// Its sequence.
        seq: usize,
    },
    /// A scale that a kernel does not take.
    #[error("scale must be positive, got {scale}")]
    Scale {
        /// The scale.
        scale: String,
    },
}

impl KernelError {
    fn limit(what: &'static str, limit: impl Into<u64>, got: usize) -> Self {
        Self::Limit {
            what,
            limit: limit.into(),
            got: got as u64,
        }
    }
}

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
    fn reach(&self) -> usize {
        let last = self.shape.iter().zip(&self.strides);
        last.map(|(length, stride)| (length - 1) * stride)
            .sum::<usize>()
            + 1
    }
}

/// What a call computes, apart from the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sizes {
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
    /// Whether scores are softcapped.
    pub softcap: bool,
    /// Whether the scale is positive.
    pub positive_scale: bool,
    /// Whether scores have ALiBi biases.
    pub alibi: bool,
    /// Whether weights are dropped out.
    pub dropout: bool,
    /// Whether scores have a given bias.
    pub bias: bool,
    /// Whether scores have a bias of each distance.
    pub relative: bool,
    /// Whether products of f32 tensors may be of tf32: 10 bits of mantissa.
    pub tf32: bool,
}

impl Sizes {
    /// The type of sums, lse and weights: f32, or f64 for f64 tensors.
    pub fn accumulator(&self) -> ElemType {
        match self.dtype {
            ElemType::Float(FloatKind::F64) => ElemType::Float(FloatKind::F64),
            _ => ElemType::Float(FloatKind::F32),
        }
    }
}

impl Sizes {
    /// Whether tiles may be of like blocks. A tile of keys goes through all query heads of its group, which must agree
    /// on its rows, and stored weights are found by a tile's place.
    fn may_cluster(&self, layout: &BlockLayout, walk: Walk) -> bool {
        let common =
            walk == Walk::Rows || layout.num_patterns() == 1 || self.kv_heads == layout.heads();
        common && !self.store
    }
}

/// The kernels that walk a layout.
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
    fn walk(self) -> Walk {
        match self {
            Kernel::Forward | Kernel::BackwardRows => Walk::Rows,
            Kernel::BackwardColumns => Walk::Columns,
        }
    }
}

/// What a call will run on a device.
///
/// ```text
/// fixed(128, 32), bf16 with sums in f32
///   forward  hopper  128 × 128 tiles gathered from 32-wide blocks, 256 units, 3 stages in 113 KiB shared
///   backward hopper  128 × 128 tiles gathered from 32-wide blocks, like rows together, 256 units, 2 stages in 195 KiB shared
/// ```
#[derive(Clone, Debug)]
pub struct AttentionPlan {
    name: String,
    sizes: Sizes,
    parts: Vec<PartPlan>,
    backward: Result<(), KernelError>,
    /// What makes the gradient of biases of distances, over the whole layout.
    distances: Option<simt::Tile>,
}

/// A part of a call: its launches come after those of the parts before.
#[derive(Clone, Debug)]
struct PartPlan {
    /// `None`: the call's own layout (which keeps this plan, so the plan cannot keep it).
    layout: Option<BlockLayout>,
    residue: Option<Residue>,
    tiles: [simt::Tile; 3],
    /// The forward pass on tensor cores, or why it is not.
    #[cfg(feature = "cuda-asm")]
    hopper: Result<hopper::Tile, &'static str>,
    /// The backward pass, likewise.
    #[cfg(feature = "cuda-asm")]
    hopper_backward: Result<hopper::Backward, &'static str>,
    /// What the hopper tier does not take, on tensor cores all the same, or why it is not.
    #[cfg(feature = "cuda-asm")]
    mma: Result<mma::Tile, &'static str>,
    #[cfg(feature = "cuda-asm")]
    mma_backward: Result<[mma::Tile; 2], &'static str>,
}

impl PartPlan {
    fn layout<'a>(&'a self, own: &'a BlockLayout) -> &'a BlockLayout {
        self.layout.as_ref().unwrap_or(own)
    }

    fn tile(&self, kernel: Kernel) -> simt::Tile {
        self.tiles[kernel as usize]
    }

    /// Whether a kernel runs on tensor cores.
    #[cfg_attr(not(feature = "cuda-asm"), allow(unused_variables))]
    fn is_tensor(&self, kernel: Kernel) -> bool {
        #[cfg(feature = "cuda-asm")]
        return match kernel {
            Kernel::Forward => self.hopper.is_ok() || self.mma.is_ok(),
            _ => self.hopper_backward.is_ok() || self.mma_backward.is_ok(),
        };
        #[cfg(not(feature = "cuda-asm"))]
        false
    }

    /// What runs on tensor cores, and why the rest does not.
    #[cfg(feature = "cuda-asm")]
    fn write_tensor(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Err(reason) = self.hopper {
            writeln!(f, "  forward  not on the hopper tier: {reason}")?;
        }
        match (self.hopper, self.mma) {
            (Ok(tile), _) => writeln!(f, "  forward  {tile}")?,
            (_, Ok(tile)) => writeln!(f, "  forward  {}", mma::describe(tile, Kernel::Forward))?,
            (_, Err(reason)) => writeln!(f, "  forward  not on the mma tier: {reason}")?,
        }
        if let Err(reason) = self.hopper_backward {
            writeln!(f, "  backward not on the hopper tier: {reason}")?;
        }
        match (self.hopper_backward, self.mma_backward) {
            (Ok(hopper::Backward::Fused(tile)), _) => writeln!(f, "  backward {tile}"),
            (Ok(hopper::Backward::Walks([rows, columns])), _) => {
                writeln!(f, "  dQ       {rows}\n  dK, dV   {columns}")
            }
            (_, Ok(tiles)) => {
                let rows = mma::describe(tiles[0], Kernel::BackwardRows);
                let columns = mma::describe(tiles[1], Kernel::BackwardColumns);
                writeln!(f, "  dQ       {rows}\n  dK, dV   {columns}")
            }
            (_, Err(reason)) => writeln!(f, "  backward not on the mma tier: {reason}"),
        }
    }

    /// What runs on the simt tier.
    fn write_simt(
        &self,
        f: &mut fmt::Formatter<'_>,
        name: &str,
        kernel: Kernel,
        accumulator: ElemType,
    ) -> fmt::Result {
        let tile = self.tile(kernel);
        let shared = simt::shared_bytes(&tile, kernel, accumulator.size()).div_ceil(1024);
        writeln!(
            f,
            "  {name:<8} simt  {} × {} tiles gathered from {}-wide blocks{}, {} units, {shared} KiB shared{}",
            tile.rows,
            tile.cols(),
            tile.group,
            if tile.clustered {
                ", like rows together"
            } else {
                ""
            },
            tile.units(),
            if tile.planes { ", planes" } else { "" },
        )
    }

    /// How the plan is cut that a kernel's launch walks, on whatever tier.
    fn launched(&self, kernel: Kernel) -> Tiling {
        #[cfg(feature = "cuda-asm")]
        {
            let walk = kernel.walk();
            let index = usize::from(walk == Walk::Columns);
            let tensor = match kernel {
                Kernel::Forward => match (self.hopper, self.mma) {
                    (Ok(tile), _) => Some(tile.tiling()),
                    (_, Ok(tile)) => Some(tile.tiling(walk)),
                    _ => None,
                },
                _ => match (self.hopper_backward, self.mma_backward) {
                    (Ok(hopper::Backward::Fused(tile)), _) => Some(tile.tiling()),
                    (Ok(hopper::Backward::Walks(tiles)), _) => Some(tiles[index].tiling(walk)),
                    (_, Ok(tiles)) => Some(tiles[index].tiling(walk)),
                    _ => None,
                },
            };
            if let Some(tiling) = tensor {
                return tiling;
            }
        }
        self.tiling(kernel)
    }

    fn tiling(&self, kernel: Kernel) -> Tiling {
        let tile = self.tile(kernel);
        Tiling {
            walk: kernel.walk(),
            rows: tile.rows,
            cols: tile.cols(),
            places: tile.store.is_some(),
            clustered: tile.clustered,
            visits: false,
        }
    }
}

impl AttentionPlan {
    /// Chooses kernels and tiles, and checks them against the device's limits. Remembered with the layout: the
    /// second call with the same sizes costs a lookup.
    ///
    /// # Errors
    /// [`KernelError`] if the device lacks the dtype or the forward pass exceeds a limit.
    pub fn new(
        client: &Client,
        layout: &BlockLayout,
        sizes: Sizes,
    ) -> Result<Arc<Self>, KernelError> {
        let known = layout.attachment(Plans::default);
        let mut known = known.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (device_key(client), sizes);
        if let Some(plan) = known.get(&key) {
            return Ok(plan.clone());
        }
        let plan = Arc::new(Self::choose(layout, sizes, client)?);
        known.insert(key, plan.clone());
        Ok(plan)
    }

    fn choose(layout: &BlockLayout, sizes: Sizes, client: &Client) -> Result<Self, KernelError> {
        let properties = client.properties();
        check_dtype(client, sizes.dtype)?;
        let kernels = [
            Kernel::Forward,
            Kernel::BackwardRows,
            Kernel::BackwardColumns,
        ];
        // Stored weights are those of the layout's own blocks.
        let parts: Vec<(Option<&BlockLayout>, Option<Residue>)> = match layout.parts() {
            Some(parts) if !sizes.store => (parts.iter())
                .map(|part| (Some(&part.layout), part.residue))
                .collect(),
            _ => vec![(None, None)],
        };
        let parts = (parts.into_iter().enumerate())
            .map(|(index, (part, residue))| {
                let by_class = residue.is_some();
                let walked = part.unwrap_or(layout);
                let choose =
                    |kernel| simt::choose(walked, &sizes, kernel, by_class, index > 0, properties);
                let [forward, rows, columns] = kernels.map(choose);
                #[cfg(feature = "cuda-asm")]
                let hopper = hopper::choose(
                    walked,
                    &sizes,
                    layout.seq_kv(),
                    residue,
                    index > 0,
                    properties,
                );
                #[cfg(feature = "cuda-asm")]
                let hopper_backward = hopper::choose_backward(walked, &sizes, &hopper, properties);
                #[cfg(feature = "cuda-asm")]
                let mma =
                    |kernel| mma::choose(walked, &sizes, kernel, residue, index > 0, properties);
                #[cfg(feature = "cuda-asm")]
                const TAKEN: &str = "the hopper tier takes it";
                Ok(PartPlan {
                    #[cfg(feature = "cuda-asm")]
                    mma: match hopper {
                        Ok(_) => Err(TAKEN),
                        Err(_) => mma(Kernel::Forward),
                    },
                    #[cfg(feature = "cuda-asm")]
                    mma_backward: match hopper_backward {
                        Ok(_) => Err(TAKEN),
                        Err(_) => mma(Kernel::BackwardRows)
                            .and_then(|rows| Ok([rows, mma(Kernel::BackwardColumns)?])),
                    },
                    #[cfg(feature = "cuda-asm")]
                    hopper,
                    #[cfg(feature = "cuda-asm")]
                    hopper_backward,
                    layout: part.cloned(),
                    residue,
                    tiles: [forward?, rows?, columns?],
                })
            })
            .collect::<Result<Vec<_>, KernelError>>()?;
        let check = |kernel: Kernel| {
            let heads = match kernel.walk() {
                Walk::Rows => layout.heads(),
                Walk::Columns => sizes.kv_heads,
            };
            let tiles = parts.iter().map(|part: &PartPlan| {
                let walked = part.layout(layout);
                let length = match kernel.walk() {
                    Walk::Rows => walked.seq_q(),
                    Walk::Columns => walked.seq_kv(),
                };
                length.div_ceil(part.tile(kernel).rows)
            });
            let tiles = tiles.max().unwrap_or(0);
            for part in &parts {
                let walked = part.layout(layout);
                on_device::check(walked, part.launched(kernel), properties)?;
                if sizes.bias {
                    // Its gradient is the simt tier's.
                    on_device::check(walked, part.tiling(kernel), properties)?;
                }
            }
            // With the buffer in which CubeCL passes scalars.
            let buffers = match kernel {
                // In the backward pass slopes and biases of distances lie behind lse and delta.
                Kernel::Forward => {
                    7 + [sizes.alibi, sizes.bias, sizes.relative]
                        .map(usize::from)
                        .iter()
                        .sum::<usize>()
                }
                // The bias and its gradient.
                _ => 8 + 2 * usize::from(sizes.bias),
            } + usize::from(sizes.store);
            let hardware = &properties.hardware;
            let most = hardware.max_cube_count;
            for (what, limit, got) in [
                ("the tiles of a head", most.0, tiles),
                ("heads", most.1, heads),
                ("batch", most.2, sizes.batch),
                ("the buffers of a kernel", hardware.max_bindings, buffers),
            ] {
                if got as u64 > u64::from(limit) {
                    return Err(KernelError::limit(what, limit, got));
                }
            }
            Ok(())
        };
        check(Kernel::Forward)?;
        // The lines of a layout that is made on the device are not known here.
        let distances = (sizes.relative && layout.device_choice().is_none())
            .then(|| masses::check_distances(client, layout, &sizes))
            .transpose();
        Ok(Self {
            name: layout.name().to_string(),
            sizes,
            distances: distances.clone().unwrap_or(None),
            backward: check(Kernel::BackwardRows)
                .and_then(|()| check(Kernel::BackwardColumns))
                .and_then(|()| distances.map(|_| ())),
            parts,
        })
    }

    /// The multiple that strides, in elements, and beginnings of inputs must be of: tensor cores are fed in pieces of
    /// 16 bytes.
    pub fn alignment(&self) -> usize {
        match self
            .parts
            .iter()
            .any(|part| part.is_tensor(Kernel::Forward))
        {
            true => 16 / self.sizes.dtype.size(),
            false => 1,
        }
    }

    /// Whether the backward pass can run, too.
    ///
    /// # Errors
    /// [`KernelError`] if it exceeds a limit of the device.
    pub fn check_backward(&self) -> Result<(), KernelError> {
        self.backward.clone()
    }
}

/// That a dtype is one of the kernels' and the device's.
fn check_dtype(client: &Client, dtype: ElemType) -> Result<(), KernelError> {
    use FloatKind::{BF16, F16, F32, F64, Flex32};
    let float = matches!(dtype, ElemType::Float(F16 | BF16 | F32 | F64 | Flex32));
    // WGSL names the type, but SPIR-V has no 64-bit exp.
    let exp = dtype != ElemType::Float(F64) || !client.name().starts_with("wgpu");
    match float && exp && client.properties().supports_type(dtype) {
        true => Ok(()),
        false => Err(KernelError::Dtype {
            dtype: dtype.to_string(),
        }),
    }
}

/// A device of a runtime.
type DeviceKey = (&'static str, DeviceId);

fn device_key(client: &Client) -> DeviceKey {
    (client.name(), client.service_id().device)
}

#[derive(Default)]
struct Plans(Mutex<HashMap<(DeviceKey, Sizes), Arc<AttentionPlan>>>);

impl fmt::Display for AttentionPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sizes { dtype, .. } = self.sizes;
        let accumulator = self.sizes.accumulator();
        let name = &self.name;
        writeln!(f, "{name}, {dtype} with sums in {accumulator}")?;
        for part in &self.parts {
            if let Some(layout) = &part.layout {
                writeln!(f, "  part {}", layout.name())?;
            }
            #[cfg(feature = "cuda-asm")]
            part.write_tensor(f)?;
            for (name, kernel) in [
                ("forward", Kernel::Forward),
                ("dQ", Kernel::BackwardRows),
                ("dK, dV", Kernel::BackwardColumns),
            ] {
                if !part.is_tensor(kernel) {
                    part.write_simt(f, name, kernel, accumulator)?;
                }
            }
            // On this tier whatever the rest runs on, in a walk over rows, or over columns where queries share a row of the bias.
            if self.sizes.bias {
                part.write_simt(f, "dbias", Kernel::BackwardRows, accumulator)?;
                part.write_simt(f, "or dbias", Kernel::BackwardColumns, accumulator)?;
            }
        }
        if let Some(tile) = &self.distances {
            let (side, units) = (tile.rows, tile.units());
            writeln!(
                f,
                "  dtable   simt  diagonals of {side} × {side} tiles, {units} units"
            )?;
        }
        Ok(())
    }
}
