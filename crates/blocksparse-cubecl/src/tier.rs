//! The tiers as values: their order, and what each launches.
//!
//! A tier is a folder, a variant of [`ForwardTile`] and [`BackwardTile`], and a row of `ORDER`. The first tier that accepts a part of a layout gets it; the
//! others say why not. `simt` accepts everything, so it comes last.

use cubecl::server::Handle;

use super::call::{BiasView, Kernel, PartRequest};
use super::error::KernelError;
use super::hopper::Backward::{Fused, Unfused};
use super::pass::{BackwardPass, Part, Pass};
use super::{hopper, mma};
use super::{simt, stats};
use blocksparse::ProductPrecision;
use blocksparse::plan::{Mainloop, Tiling};

/// Why a tier refuses a part.
type Reason = &'static str;

/// The chosen tile, and the refusals of the tiers before it.
#[derive(Clone, Debug)]
pub struct Choice<T> {
    /// The chosen tile.
    pub tile: T,
    /// Names of refusing tiers, with their reasons.
    pub refused: Vec<(&'static str, Reason)>,
}

struct Tier {
    name: &'static str,
    forward: fn(&Asked) -> Result<ForwardTile, Reason>,
    backward: fn(&Asked, &Choice<ForwardTile>) -> Result<BackwardTile, Reason>,
}

/// The request to a tier.
struct Asked<'a> {
    part: &'a PartRequest<'a>,
    /// Tiles of the `simt` tier, chosen beforehand.
    simt: [simt::Tile; 3],
}

/// The tiers, fastest first.
const ORDER: &[Tier] = &[
    Tier {
        name: FP8,
        forward: |asked| hopper::choose_fp8(asked.part).map(ForwardTile::Hopper),
        backward: hopper_backward,
    },
    Tier {
        name: HOPPER,
        forward: |asked| hopper::choose(asked.part).map(ForwardTile::Hopper),
        backward: hopper_backward,
    },
    Tier {
        name: "mma",
        forward: |asked| mma::choose(asked.part, Kernel::Forward).map(ForwardTile::Mma),
        backward: |asked, _| mma::choose_backward(asked.part).map(BackwardTile::Mma),
    },
    Tier {
        name: "simt",
        forward: |asked| Ok(ForwardTile::Simt(asked.simt[0])),
        backward: |asked, _| {
            let mainloops = [asked.simt[1], asked.simt[2]];
            Ok(match simt::fused::choose(asked.part, mainloops) {
                Ok(fused) => BackwardTile::SimtFused(fused),
                Err(reason) => BackwardTile::Simt(mainloops, reason),
            })
        },
    },
];

const HOPPER: &str = "hopper";
/// The hopper tier with products in E4M3, for forward passes that ask for it.
const FP8: &str = "fp8";

/// The hopper tier's backward pass refuses whatever its forward pass refuses.
fn hopper_backward(asked: &Asked, forward: &Choice<ForwardTile>) -> Result<BackwardTile, Reason> {
    let ForwardTile::Hopper(mut tile) = forward.tile else {
        let said = forward.refused.iter().find(|(tier, _)| *tier == HOPPER);
        return Err(
            said.map_or("a tier before it takes the forward pass", |&(_, reason)| {
                reason
            }),
        );
    };
    if tile.fp8 {
        tile = hopper::choose(asked.part)?;
    }
    hopper::choose_backward(asked.part, tile).map(BackwardTile::Hopper)
}

/// Chooses the tiers of the two passes over a part. `simt` are the tiles of the `simt` tier.
pub fn choose(
    part: &PartRequest,
    simt: [simt::Tile; 3],
) -> (Choice<ForwardTile>, Choice<BackwardTile>) {
    let asked = Asked { part, simt };
    let fp8 = part.request.precision == ProductPrecision::Fp8;
    let forward = first(fp8, |tier| (tier.forward)(&asked));
    let backward = first(false, |tier| (tier.backward)(&asked, &forward));
    (forward, backward)
}

/// Returns the tile of the first tier that accepts.
fn first<T>(fp8: bool, ask: impl Fn(&Tier) -> Result<T, Reason>) -> Choice<T> {
    let mut refused = Vec::new();
    for tier in ORDER.iter().filter(|tier| fp8 || tier.name != FP8) {
        match ask(tier) {
            Ok(tile) => return Choice { tile, refused },
            Err(reason) => refused.push((tier.name, reason)),
        }
    }
    unreachable!("the simt tier takes everything");
}

/// Tier and tile of a part's forward pass.
#[derive(Clone, Copy, Debug)]
pub enum ForwardTile {
    /// wgmma and TMA.
    Hopper(hopper::Tile),
    /// mma.sync.
    Mma(mma::Tile),
    /// Scalar multiply-adds.
    Simt(simt::Tile),
}

impl ForwardTile {
    /// Whether the tile runs on tensor cores.
    pub fn is_tensor(&self) -> bool {
        !matches!(self, Self::Simt(_))
    }

    /// Returns the tiling of the launch plan.
    pub fn tiling(&self) -> Tiling {
        match self {
            Self::Hopper(tile) => tile.tiling,
            Self::Mma(tile) => tile.tiling(),
            Self::Simt(tile) => simt::tiling(tile),
        }
    }

    /// Returns the printed lines of a plan, as name and description. `accumulator` is the size of an accumulator element in bytes.
    pub fn lines(&self, accumulator: usize) -> Vec<(&'static str, String)> {
        let tile = match self {
            Self::Hopper(tile) => tile.to_string(),
            Self::Mma(tile) => mma::describe(*tile, Kernel::Forward),
            Self::Simt(tile) => simt::describe(tile, Kernel::Forward, accumulator),
        };
        vec![("forward", tile)]
    }

    /// Runs the forward pass over a part.
    ///
    /// # Errors
    /// [`KernelError`] if the tier cannot read a tensor, or one is too large.
    pub fn launch(&self, pass: &Pass, part: Part) -> Result<(), KernelError> {
        match *self {
            Self::Hopper(tile) => hopper::launch_forward(pass, part, tile),
            Self::Mma(tile) => mma::launch_forward(pass, part, tile),
            Self::Simt(tile) => simt::launch::launch_forward(pass, part, tile),
        }
    }
}

/// Tier and tile of a part's backward pass.
#[derive(Clone, Copy, Debug)]
pub enum BackwardTile {
    /// wgmma and TMA.
    Hopper(hopper::Backward),
    /// mma.sync, with two mainloops.
    Mma([mma::Tile; 2]),
    /// Scalar multiply-adds, with all gradients in one loop over columns.
    SimtFused(simt::fused::Fused),
    /// Scalar multiply-adds with two mainloops, and why the fused pass cannot run.
    Simt([simt::Tile; 2], Reason),
}

/// Tier and tiles of the gradient of a bias tensor, which has a launch of its own.
#[derive(Clone, Copy, Debug)]
pub enum BiasTile {
    /// wgmma and TMA, with the `mma` tiles for what these do not support.
    Hopper(hopper::BiasTiles, [mma::Tile; 2]),
    /// mma.sync, with one of two mainloops.
    Mma([mma::Tile; 2]),
    /// Scalar multiply-adds, with one of two mainloops.
    Simt([simt::Tile; 2]),
}

/// Chooses the tier of a part's bias gradient, given the choice of its forward pass and its `simt` tiles.
pub fn choose_bias(
    part: &PartRequest,
    forward: &Choice<ForwardTile>,
    [_, rows, columns]: [simt::Tile; 3],
) -> Choice<BiasTile> {
    let mut refused = Vec::new();
    let tile = match (mma::choose_bias_gradient(part), forward.tile) {
        (Err(_), _) => BiasTile::Simt([rows, columns]),
        // If the forward pass is not on the hopper tier, its refusal is already recorded.
        (Ok(tiles), ForwardTile::Hopper(forward)) if part.request.score.bias => {
            match hopper::choose_bias(part, forward) {
                Ok(own) => BiasTile::Hopper(own, tiles),
                Err(reason) => {
                    refused.push((HOPPER, reason));
                    BiasTile::Mma(tiles)
                }
            }
        }
        (Ok(tiles), _) => BiasTile::Mma(tiles),
    };
    Choice { tile, refused }
}

impl BiasTile {
    /// Whether the tile runs on tensor cores.
    pub fn is_tensor(&self) -> bool {
        !matches!(self, Self::Simt(_))
    }

    /// Like [`BackwardTile::tiling`].
    pub fn tiling(&self, kernel: Kernel) -> Tiling {
        let mainloop = kernel.mainloop();
        let index = usize::from(kernel == Kernel::BackwardColumns);
        match self {
            Self::Hopper(own, _) if mainloop == Mainloop::Rows => own.pairs.tiling,
            Self::Hopper(hopper::BiasTiles { keys: Ok(keys), .. }, _) => keys.tiling,
            Self::Hopper(_, tiles) | Self::Mma(tiles) => tiles[index].tiling(),
            Self::Simt(tiles) => simt::tiling(&tiles[index]),
        }
    }

    /// Like [`ForwardTile::lines`]: a loop over rows, and a loop over columns for queries that share a row of the bias.
    pub fn lines(&self, accumulator: usize) -> Vec<(&'static str, String)> {
        mainloop_lines(["dbias", "or dbias"], |index, kernel| match self {
            Self::Hopper(own, _) if index == 0 => own.pairs.to_string(),
            Self::Hopper(own, tiles) => match own.keys {
                Ok(keys) => format!("{keys}, sums over queries"),
                Err(reason) => {
                    let tile = mma::describe(tiles[index], kernel);
                    format!("{tile} (not on the {HOPPER} tier: {reason})")
                }
            },
            Self::Mma(tiles) => mma::describe(tiles[index], kernel),
            Self::Simt(tiles) => simt::describe(&tiles[index], kernel, accumulator),
        })
    }

    /// Adds a part's gradient of the bias to `out`.
    ///
    /// # Errors
    /// Those of [`ForwardTile::launch`].
    pub fn launch(
        &self,
        pass: &BackwardPass,
        part: Part,
        (bias, out): (&BiasView, &Handle),
        known: &mut KnownStats,
    ) -> Result<(), KernelError> {
        match *self {
            Self::Hopper(own, _) if bias.shape[2] > 1 => {
                hopper::launch_bias_pairs(pass, part, own.pairs, bias, out)
            }
            Self::Hopper(hopper::BiasTiles { keys: Ok(keys), .. }, _) => {
                hopper::launch_bias_keys(pass, part, keys, bias, out)
            }
            Self::Hopper(_, tiles) | Self::Mma(tiles) => {
                mma::launch_bias_gradient(pass, part, tiles, bias, out)
            }
            // `pass` holds the output buffer.
            Self::Simt(tiles) => {
                let stats = known.plain(pass)?;
                simt::launch::launch_bias_gradient(pass, part, tiles, &stats, bias)
            }
        }
    }
}

/// Stats that the parts of a pass share.
#[derive(Default)]
pub struct KnownStats {
    plain: Option<Handle>,
    fused: Option<hopper::Stats>,
}

impl KnownStats {
    /// Returns the stats of all positions in order, computed at first use.
    ///
    /// # Errors
    /// Those of [`stats::make`].
    pub fn plain(&mut self, pass: &BackwardPass) -> Result<Handle, KernelError> {
        if let Some(stats) = &self.plain {
            return Ok(stats.clone());
        }
        let made = stats::make_plain(pass)?;
        Ok(self.plain.insert(made).clone())
    }
}

/// Returns a line for each of two mainloops, named by its outputs.
fn mainloop_lines(
    names: [&'static str; 2],
    describe: impl Fn(usize, Kernel) -> String,
) -> Vec<(&'static str, String)> {
    let kernels = [Kernel::BackwardRows, Kernel::BackwardColumns];
    let lines = [0, 1].map(|index| (names[index], describe(index, kernels[index])));
    lines.into()
}

impl BackwardTile {
    /// Whether the tile runs on tensor cores.
    pub fn is_tensor(&self) -> bool {
        !matches!(self, Self::SimtFused(_) | Self::Simt(..))
    }

    /// Returns the tiling of a mainloop's launch plan.
    pub fn tiling(&self, kernel: Kernel) -> Tiling {
        let index = usize::from(kernel == Kernel::BackwardColumns);
        match self {
            Self::Hopper(Fused(tile)) => tile.tiling,
            Self::Hopper(Unfused(mainloops)) => mainloops[index].tile.tiling,
            Self::Mma(tiles) => tiles[index].tiling(),
            Self::SimtFused(fused) => simt::tiling(&fused.tile),
            Self::Simt(tiles, _) => simt::tiling(&tiles[index]),
        }
    }

    /// Largest number of elements that the output's gradient may span.
    pub fn most_reach(&self) -> usize {
        match self {
            Self::Hopper(Fused(_)) => hopper::MOST_REACH,
            _ => usize::MAX,
        }
    }

    /// Like [`ForwardTile::lines`].
    pub fn lines(&self, accumulator: usize) -> Vec<(&'static str, String)> {
        let mainloops =
            |describe: &dyn Fn(usize, Kernel) -> String| mainloop_lines(["dQ", "dK, dV"], describe);
        match self {
            Self::Hopper(Fused(tile)) => vec![("backward", tile.to_string())],
            Self::Hopper(Unfused(plans)) => mainloops(&|index, _| plans[index].to_string()),
            Self::Mma(tiles) => mainloops(&|index, kernel| mma::describe(tiles[index], kernel)),
            Self::SimtFused(fused) => vec![("backward", fused.describe(accumulator))],
            Self::Simt(tiles, reason) => {
                let mut lines = vec![("backward", format!("two mainloops: {reason}"))];
                lines.extend(mainloops(&|index, kernel| {
                    simt::describe(&tiles[index], kernel, accumulator)
                }));
                lines
            }
        }
    }

    /// Runs the backward pass over a part.
    ///
    /// # Errors
    /// Those of [`ForwardTile::launch`].
    pub fn launch(
        &self,
        pass: &BackwardPass,
        part: Part,
        known: &mut KnownStats,
    ) -> Result<(), KernelError> {
        match *self {
            Self::Hopper(Fused(tile)) => {
                let made = hopper::launch_fused(pass, part, tile, known.fused.take())?;
                known.fused = Some(made);
                Ok(())
            }
            Self::Hopper(Unfused(mainloops)) => hopper::launch_mainloops(pass, part, mainloops),
            Self::Mma(tiles) => mma::launch_backward(pass, part, tiles),
            Self::SimtFused(fused) => {
                let stats = known.plain(pass)?;
                simt::launch::launch_fused(pass, part, fused, &stats)
            }
            Self::Simt(tiles, _) => {
                let stats = known.plain(pass)?;
                simt::launch::launch_backward(pass, part, tiles, &stats)
            }
        }
    }
}
