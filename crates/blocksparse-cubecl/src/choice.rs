//! The plan of a call: chosen, checked against the device, cached with the layout, and printed.

use std::fmt;
use std::sync::Arc;

use cubecl::prelude::*;

use super::call::{DeviceFacts, Kernel, PartRequest, Readable, Request};
use super::device_key::{DeviceKey, device_key};
use super::error::KernelError;
use super::pass::Part;
use super::tier::{self, BackwardTile, BiasTile, Choice, ForwardTile};
use super::tuning::Tuning;
use super::{attention_sums, on_device, simt};
use crate::tuning::TierLimit;
use blocksparse::internal::Slots;
use blocksparse::plan::Tiling;
use blocksparse::{BlockLayout, DeviceChoice, Residue};

/// The kernels and tiles of a call on a device.
///
/// ```text
/// fixed(128, 32), bf16 with sums in f32
///   forward  hopper  128 × 128 tiles gathered from 32-wide blocks, 256 units, 3 stages in 113 KiB shared
///   backward hopper  128 × 128 tiles gathered from 32-wide blocks, like rows together, 256 units, 2 stages in 195 KiB shared
/// ```
#[derive(Clone, Debug)]
pub struct AttentionPlan {
    name: String,
    request: Request,
    parts: Vec<PartPlan>,
    backward: Result<(), KernelError>,
    /// Tile of the gradient of the table of distances, over the whole layout.
    distances: Option<simt::Tile>,
    /// Largest number of elements that the device can index.
    indexed: usize,
}

/// The plan of a part of a call. Parts are launched in order.
#[derive(Clone, Debug)]
pub struct PartPlan {
    /// `None` means the call's own layout, which holds this plan, so the plan cannot hold it.
    layout: Option<BlockLayout>,
    residue: Option<Residue>,
    pub forward: Choice<ForwardTile>,
    pub backward: Choice<BackwardTile>,
    /// Tile of the bias's gradient, used if the call has a bias.
    pub bias: Choice<BiasTile>,
    /// Tiles of the `simt` tier, in the order of the kernels.
    simt: [simt::Tile; 3],
}

impl PartPlan {
    /// Returns the part's layout and positions, given the call's `own` layout.
    pub fn part<'a>(&'a self, own: &'a BlockLayout) -> Part<'a> {
        Part {
            layout: self.layout.as_ref().unwrap_or(own),
            residue: self.residue,
        }
    }

    /// Returns the tiling of a kernel's launch plan, on the chosen tier.
    fn launched(&self, kernel: Kernel) -> Tiling {
        match kernel {
            Kernel::Forward => self.forward.tile.tiling(),
            _ => self.backward.tile.tiling(kernel),
        }
    }

    /// Writes the part's kernels, tensor-core kernels first.
    fn write(&self, f: &mut fmt::Formatter<'_>, request: &Request) -> fmt::Result {
        let accumulator = request.accumulator().size();
        let (forward, backward) = (&self.forward, &self.backward);
        let mut scalar = Vec::new();
        for (pass, refused, is_tensor, lines) in [
            (
                "forward",
                &forward.refused,
                forward.tile.is_tensor(),
                forward.tile.lines(accumulator),
            ),
            (
                "backward",
                &backward.refused,
                backward.tile.is_tensor(),
                backward.tile.lines(accumulator),
            ),
        ] {
            write_refused(f, pass, refused)?;
            match is_tensor {
                true => write_lines(f, lines)?,
                false => scalar.extend(lines),
            }
        }
        write_lines(f, scalar)?;
        if request.score.bias {
            write_refused(f, "dbias", &self.bias.refused)?;
            write_lines(f, self.bias.tile.lines(accumulator))?;
        }
        Ok(())
    }
}

/// Writes the tiers that do not take a pass, and why.
fn write_refused(f: &mut fmt::Formatter<'_>, pass: &str, refused: &[(&str, &str)]) -> fmt::Result {
    let mut refused = refused.iter();
    refused.try_for_each(|(tier, why)| writeln!(f, "  {pass:<8} not on the {tier} tier: {why}"))
}

fn write_lines(f: &mut fmt::Formatter<'_>, lines: Vec<(&str, String)>) -> fmt::Result {
    let mut lines = lines.into_iter();
    lines.try_for_each(|(name, tile)| writeln!(f, "  {name:<8} {tile}"))
}

/// Plans of a layout and of the device-made choices within it. Each call with such a choice has a layout of its own, of which a plan depends only on the
/// choice and the name.
#[derive(Default)]
struct Plans(Slots<(DeviceKey, Request, TierLimit), Vec<KnownPlan>>);

struct KnownPlan {
    choice: Option<DeviceChoice>,
    plan: Arc<AttentionPlan>,
}

impl AttentionPlan {
    /// Chooses kernels and tiles, and checks them against the device's limits. The plan is cached with the layout, or with the layout that the device
    /// chooses blocks from, so a second call with the same request costs a lookup. Tiers named by `BLOCKSPARSE_TIER` are left out.
    ///
    /// # Errors
    /// [`KernelError`] if the device lacks the dtype, the forward pass exceeds a limit, or the variable has an invalid value.
    pub fn new(
        client: &Client,
        layout: &BlockLayout,
        request: Request,
    ) -> Result<Arc<Self>, KernelError> {
        Self::with_limit(client, layout, request, Tuning::of_process()?.tier)
    }

    /// Like [`new`](Self::new), but leaves out the tiers of `limit` and ignores the environment.
    ///
    /// # Errors
    /// [`KernelError`] if the device lacks the dtype or the forward pass exceeds a limit.
    pub fn with_limit(
        client: &Client,
        layout: &BlockLayout,
        request: Request,
        limit: TierLimit,
    ) -> Result<Arc<Self>, KernelError> {
        let keeper = layout.within().unwrap_or(layout);
        let choice = layout.device_choice().copied();
        let known = keeper.attachment(Plans::default);
        let key = (device_key(client), request, limit);
        known.0.with(key, |plans| {
            let is_it = |of: &&KnownPlan| of.choice == choice && of.plan.name == layout.name();
            if let Some(known) = plans.iter().find(is_it) {
                return Ok(known.plan.clone());
            }
            let plan = Self::choose(layout, request, limit, DeviceFacts::of(client))?;
            let plan = Arc::new(plan);
            plans.push(KnownPlan {
                choice,
                plan: plan.clone(),
            });
            Ok(plan)
        })
    }

    /// Like [`with_limit`](Self::with_limit), for a described device and without caching.
    pub fn choose(
        layout: &BlockLayout,
        request: Request,
        limit: TierLimit,
        device: DeviceFacts,
    ) -> Result<Self, KernelError> {
        device.check_dtype(request.dtype)?;
        // Stored weights are indexed by the blocks of the whole layout, so the call is not split into parts.
        let parts: Vec<(Option<&BlockLayout>, Option<Residue>)> = match layout.parts() {
            Some(parts) if !request.store => (parts.iter())
                .map(|part| (Some(&part.layout), part.residue))
                .collect(),
            _ => vec![(None, None)],
        };
        let parts = (parts.into_iter().enumerate())
            .map(|(index, (part, residue))| {
                let asked = PartRequest {
                    layout: part.unwrap_or(layout),
                    request: &request,
                    seq_kv: layout.seq_kv(),
                    residue,
                    carry: index > 0,
                    limit,
                    properties: device.properties,
                };
                let [tile, rows, columns] = Kernel::ALL.map(|kernel| simt::choose(&asked, kernel));
                let simt = [tile?, rows?, columns?];
                let (forward, backward) = tier::choose(&asked, simt);
                Ok(PartPlan {
                    layout: part.cloned(),
                    residue,
                    backward,
                    bias: tier::choose_bias(&asked, &forward, simt),
                    forward,
                    simt,
                })
            })
            .collect::<Result<Vec<_>, KernelError>>()?;
        let check = |kernel| check_limits(layout, &request, &parts, kernel, device.properties);
        check(Kernel::Forward)?;
        // The lines of a layout that is made on the device are not known here.
        let distances = (request.score.relative && layout.device_choice().is_none())
            .then(|| attention_sums::check_distances(device, layout, &request))
            .transpose();
        Ok(Self {
            name: layout.name().to_string(),
            request,
            distances: distances.clone().unwrap_or(None),
            backward: check(Kernel::BackwardRows)
                .and_then(|()| check(Kernel::BackwardColumns))
                .and_then(|()| distances.map(|_| ())),
            parts,
            indexed: match device.properties.supports_address(AddressType::U64) {
                true => usize::MAX,
                false => u32::MAX as usize,
            },
        })
    }

    /// Returns the request of the call.
    pub fn request(&self) -> &Request {
        &self.request
    }

    pub fn parts(&self) -> &[PartPlan] {
        &self.parts
    }

    /// Alignment of strides and first elements of inputs, in elements: tensor-core kernels load pieces of 16 bytes.
    pub fn alignment(&self) -> usize {
        let is_tensor = |part: &PartPlan| {
            let of_bias = self.request.score.bias && part.bias.tile.is_tensor();
            part.forward.tile.is_tensor() || part.backward.tile.is_tensor() || of_bias
        };
        match self.parts.iter().any(is_tensor) {
            true => 16 / self.request.dtype.size(),
            false => 1,
        }
    }

    /// Returns the strides and offsets that q, k and v may have.
    pub fn inputs(&self) -> Readable {
        Readable {
            alignment: self.alignment(),
            reach: self.indexed,
        }
    }

    /// Returns the strides and offsets that the output's gradient may have.
    pub fn gradient(&self) -> Readable {
        let most = self
            .parts
            .iter()
            .map(|part| part.backward.tile.most_reach());
        Readable {
            alignment: self.alignment(),
            reach: most.fold(self.indexed, usize::min),
        }
    }

    /// Checks that the backward pass can run.
    ///
    /// # Errors
    /// [`KernelError`] if it exceeds a limit of the device.
    pub fn check_backward(&self) -> Result<(), KernelError> {
        self.backward.clone()
    }
}

/// Checks a kernel's launches against the limits of a device.
fn check_limits(
    layout: &BlockLayout,
    request: &Request,
    parts: &[PartPlan],
    kernel: Kernel,
    properties: &DeviceProperties,
) -> Result<(), KernelError> {
    let mut tiles = 0;
    for plan in parts {
        let (launched, tile) = (plan.part(layout).layout, &plan.simt[kernel as usize]);
        let [length, _] = kernel.mainloop().lengths(launched);
        tiles = tiles.max(length.div_ceil(tile.rows));
        on_device::check(launched, plan.launched(kernel), properties)?;
        if request.score.bias && kernel != Kernel::Forward {
            on_device::check(launched, plan.bias.tile.tiling(kernel), properties)?;
        }
    }
    // Including the buffer in which CubeCL passes scalars.
    let buffers = match kernel {
        // In the backward pass, slopes and the table of distances are stored in the stats.
        Kernel::Forward => 7 + request.score.buffers() + usize::from(request.max_scores),
        // Plus the bias and its gradient.
        _ => 8 + 2 * usize::from(request.score.bias) + usize::from(request.score.seeds),
    } + usize::from(request.store);
    let hardware = &properties.hardware;
    KernelError::check("the tiles of a head", hardware.max_cube_count.0, tiles)?;
    KernelError::check("the buffers of a kernel", hardware.max_bindings, buffers)
}

impl fmt::Display for AttentionPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (dtype, accumulator) = (self.request.dtype, self.request.accumulator());
        writeln!(f, "{}, {dtype} with sums in {accumulator}", self.name)?;
        for part in &self.parts {
            if let Some(layout) = &part.layout {
                writeln!(f, "  part {}", layout.name())?;
            }
            part.write(f, &self.request)?;
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
