//! The `hopper` tier: wgmma and TMA, bf16 and f16, on GPUs of compute capability 9.0.
//!
//! Keys and values of a step are gathered by TMA, one box of `group` rows per entry, side by side in shared memory.
//! The 128-byte swizzle repeats after 8 rows, so boxes of 8, 16, … rows make up the layout wgmma reads.
//! A head_dim between multiples of 64 is filled up with zeros by TMA, in shared memory only. With positions listed by
//! residue class the maps have the class as a dimension of its own, so that a box is strided in memory.

mod asm;
mod backward;
mod forward;
mod gradient;
mod options;
mod walks;

use std::fmt;

use cubecl::ir::{ElemType, FloatKind, features::Tma};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::device::plan;
use super::launch::{ScoreOptions, batch_words, listing, optional, plan_parts};
use super::simt::tile::StridesLaunch;
use super::tensor::{WalkOperands, check_options, check_rows, check_scale, scales, tier_limit};
use super::{Gradients, KernelError, Outputs, Sizes, TensorView};
use crate::plan::{Grouping, Tiling, Walk};
use crate::{BlockLayout, Residue};
pub use asm::Half;
use asm::{ROW, ROW_ELEMENTS};
use backward::LengthsLaunch;
use gradient::{MaskShape, StoreShape};
use options::{Options, PairArgs, PairArgsLaunch, PairNumbersLaunch, PairShape};

/// Rows of a warpgroup.
const GROUP_ROWS: usize = 64;
/// Heads of keys that take turns in the grid of the fused backward pass.
const SPREAD: u32 = 64;
/// Cubes of the fused backward pass compute tile after tile where a tile walks fewer steps than this on average: then what
/// a tile begins and ends with is much of its time.
const SHORT_WALK: f64 = 12.0;
/// TMA's strides and addresses are multiples of 16 bytes.
const ALIGNMENT: usize = 8;

/// The comptime shape of the kernel: its key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Type of the tensors.
    pub half: Half,
    /// Width of queries, keys and values, a multiple of 32.
    pub dim: usize,
    /// Warpgroups, each with 64 rows: 1 or 2.
    pub warpgroups: usize,
    /// Columns of a step: 64 or 128.
    pub cols: usize,
    /// Consecutive positions an entry names.
    pub group: usize,
    /// Steps whose keys and values are in shared memory at a time.
    pub stages: usize,
    /// How many steps late a buffer is filled again: with 1 a warp may have to wait for the other warpgroup.
    pub lag: usize,
    /// Whether a step's second product overlaps the next step's softmax.
    pub overlap: bool,
    /// Whether scores are softcapped.
    pub softcap: bool,
    /// What else a call may ask for.
    pub options: Options,
    /// Whether positions are listed by residue class.
    pub residue: bool,
    /// Whether the kernel carries on from what an earlier part of the pattern left in its outputs.
    pub carry: bool,
    /// Whether the tile's rows are gathered from like blocks.
    pub clustered: bool,
}

impl Tile {
    /// Rows of a tile.
    pub fn rows(&self) -> usize {
        GROUP_ROWS * self.warpgroups
    }

    /// Units of a cube.
    pub fn units(&self) -> usize {
        128 * self.warpgroups
    }

    /// How the layout is cut.
    pub fn tiling(&self) -> Tiling {
        Tiling {
            walk: Walk::Rows,
            rows: self.rows(),
            cols: self.cols,
            places: false,
            clustered: self.clustered,
            visits: false,
        }
    }

    /// Whether layouts of this block size can be cut so.
    pub fn fits(&self, block: usize) -> bool {
        let rows = self.rows();
        (rows.is_multiple_of(block) || block.is_multiple_of(rows))
            && (self.cols.is_multiple_of(block) || block.is_multiple_of(self.cols))
            && self.group == self.cols.min(block)
    }

    fn pairs(&self) -> PairShape {
        PairShape {
            options: self.options,
            walk: Walk::Rows,
            half: self.half,
            softcap: self.softcap,
            cols: self.cols,
            group: self.group,
            entry_words: self.tiling().entry_words(),
            residue: self.residue,
        }
    }

    fn warps(&self) -> u32 {
        4 * self.warpgroups as u32
    }

    /// Whether there are registers for a step's masks while its scores are computed.
    fn early_masks(&self) -> bool {
        self.overlap || self.dim == 64
    }

    /// Whether the warpgroups take turns at the tensor cores.
    fn turns(&self) -> bool {
        self.warpgroups == 2 && self.overlap
    }

    /// Spans of 64 columns in shared memory.
    fn spans(&self) -> usize {
        self.dim.div_ceil(ROW_ELEMENTS)
    }

    fn entries(&self) -> usize {
        self.cols / self.group
    }

    /// Rows of a box of queries. All positions of a box are of one class and one block.
    fn q_group(&self) -> usize {
        match self.residue || self.clustered {
            true => self.rows().min(self.group),
            false => self.rows(),
        }
    }

    fn q_boxes(&self) -> usize {
        self.rows() / self.q_group() * self.spans()
    }

    /// TMA boxes of the keys, or the values, of a step.
    fn boxes(&self) -> usize {
        self.entries() * self.spans()
    }

    /// Boxes of a step that one warp loads.
    fn lane_boxes(&self) -> usize {
        self.boxes().div_ceil(self.warps() as usize)
    }

    fn loading_warps(&self) -> u32 {
        self.warps().min(self.boxes() as u32)
    }

    fn mask_words(&self) -> usize {
        self.group.div_ceil(32)
    }

    fn q_bytes(&self) -> usize {
        self.rows() * self.spans() * ROW
    }

    /// Bytes of the keys, or the values, of a step.
    fn stage_bytes(&self) -> usize {
        self.cols * self.spans() * ROW
    }

    // Byte offsets in shared memory. The barrier of q comes first.

    fn k_full(&self) -> u32 {
        8
    }

    fn v_full(&self) -> u32 {
        self.k_full() + 8 * self.stages as u32
    }

    fn k_empty(&self) -> u32 {
        self.v_full() + 8 * self.stages as u32
    }

    fn v_empty(&self) -> u32 {
        self.k_empty() + 8 * self.stages as u32
    }

    fn kv_head_offset(&self) -> u32 {
        self.v_empty() + 8 * self.stages as u32
    }

    fn q_offset(&self) -> usize {
        1024
    }

    fn k_offset(&self) -> usize {
        self.q_offset() + self.q_bytes()
    }

    fn v_offset(&self) -> usize {
        self.k_offset() + self.stages * self.stage_bytes()
    }

    /// Bytes of shared memory of a cube.
    pub fn shared_bytes(&self) -> usize {
        self.v_offset() + self.stages * self.stage_bytes()
    }
}

impl fmt::Display for Tile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "hopper  {} × {} tiles gathered from {}-wide blocks{}, {} units, {} stages in {} KiB shared",
            self.rows(),
            self.cols,
            self.group,
            if self.clustered {
                ", like rows together"
            } else {
                ""
            },
            self.units(),
            self.stages,
            self.shared_bytes().div_ceil(1024),
        )
    }
}

/// A shape that a tile may have, and its speed relative to the others on dense attention.
struct Candidate {
    dim: usize,
    warpgroups: usize,
    cols: usize,
    stages: usize,
    lag: usize,
    overlap: bool,
    speed: f64,
}

const fn candidate(
    dim: usize,
    [warpgroups, cols, stages, lag]: [usize; 4],
    overlap: bool,
    speed: f64,
) -> Candidate {
    Candidate {
        dim,
        warpgroups,
        cols,
        stages,
        lag,
        overlap,
        speed,
    }
}

/// The fastest shape of 128 rows and the fastest of 64, which reads keys twice as often but unites fewer rows of blocks.
/// Except for 128 rows of 96 and more, and 256, two cubes or more share a multiprocessor.
const CANDIDATES: [Candidate; 8] = [
    candidate(64, [2, 128, 3, 2], false, 1.0),
    candidate(64, [1, 128, 2, 1], false, 0.8),
    candidate(96, [2, 128, 3, 2], false, 1.0),
    candidate(96, [1, 64, 3, 1], true, 0.85),
    candidate(128, [2, 128, 3, 2], false, 1.0),
    candidate(128, [1, 64, 3, 1], true, 0.85),
    candidate(256, [2, 64, 2, 1], true, 1.0),
    candidate(256, [1, 64, 2, 1], true, 0.55),
];

/// The tile that should be fastest, or why the tier does not take the call.
///
/// # Errors
/// What the tier lacks: the device, the type, the head_dim, or something it does not compute.
pub fn choose(
    layout: &BlockLayout,
    sizes: &Sizes,
    seq: usize,
    residue: Option<Residue>,
    carry: bool,
    properties: &DeviceProperties,
) -> Result<Tile, &'static str> {
    if properties.identity.fingerprint != "ptx_sm90" || !properties.features.tma.contains(Tma::Base)
    {
        return Err("the device is not of compute capability 9.0");
    }
    match tier_limit().as_deref() {
        Some("simt") => return Err("BLOCKSPARSE_TIER says simt"),
        Some("mma") => return Err("BLOCKSPARSE_TIER says mma"),
        _ => {}
    }
    let half = match sizes.dtype {
        ElemType::Float(FloatKind::BF16) => Half::Bf16,
        ElemType::Float(FloatKind::F16) => Half::F16,
        _ => return Err("the dtype is neither bf16 nor f16"),
    };
    check_options(sizes)?;
    let options = Options {
        alibi: sizes.alibi,
        bias: sizes.bias,
        relative: sizes.relative,
        wide_bias: false,
        dropout: sizes.dropout,
    };
    if let Some(Residue { stride, .. }) = residue
        && !seq.is_multiple_of(stride)
    {
        return Err("the sequence is no multiple of the pattern's stride");
    }
    if sizes.head_dim != sizes.value_dim {
        return Err("head_dim and value_dim differ");
    }
    if !CANDIDATES.iter().any(|shape| shape.dim == sizes.head_dim) {
        return Err("head_dim is none of 64, 96, 128, 256");
    }
    let block = layout.block_size();
    let hardware = &properties.hardware;
    let multiprocessors = hardware.num_streaming_multiprocessors.unwrap_or(1) as f64;
    let mut best: Option<(f64, Tile)> = None;
    for shape in CANDIDATES
        .iter()
        .filter(|shape| shape.dim == sizes.head_dim)
    {
        let rows = GROUP_ROWS * shape.warpgroups;
        let grouping = Grouping::best(
            layout,
            Walk::Rows,
            [rows, shape.cols],
            sizes.may_cluster(layout, Walk::Rows),
        );
        let tile = Tile {
            half,
            dim: shape.dim,
            warpgroups: shape.warpgroups,
            cols: shape.cols,
            group: shape.cols.min(block),
            stages: shape.stages,
            lag: shape.lag,
            overlap: shape.overlap,
            softcap: sizes.softcap,
            options,
            residue: residue.is_some(),
            carry,
            clustered: grouping.clustered,
        };
        if !tile.fits(block) || tile.shared_bytes() > hardware.max_shared_memory_size {
            continue;
        }
        let waste = layout.seq_q().next_multiple_of(rows) as f64 / layout.seq_q() as f64;
        // Fewer cubes than multiprocessors leave some idle.
        let cubes = layout.seq_q().div_ceil(rows) * layout.heads() * sizes.batch;
        let idle = (multiprocessors / cubes as f64).max(1.0);
        let cost = grouping.overhead * waste * idle / shape.speed;
        if best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, tile));
        }
    }
    best.map(|(_, tile)| tile)
        .ok_or("no tile fits the shared memory of the device")
}

/// What a call asks for besides attention itself.
#[derive(Clone, Copy)]
pub struct Asked<'a> {
    /// As the call says.
    pub options: &'a ScoreOptions,
    /// Its slopes on the device.
    pub slopes: Option<&'a Handle>,
}

impl Asked<'_> {
    /// Whether scores are not just products but for their scale.
    fn transformed(&self) -> bool {
        let ScoreOptions {
            softcap,
            slopes,
            bias,
            relative,
            ..
        } = self.options;
        softcap.is_some() || slopes.is_some() || bias.is_some() || relative.is_some()
    }

    /// Factors of scores to powers of two, and of products before that.
    fn scales(&self) -> (f64, f64) {
        let &ScoreOptions { scale, softcap, .. } = self.options;
        match (softcap, self.transformed()) {
            (None, true) => (std::f64::consts::LOG2_E, scale),
            _ => scales(scale, softcap),
        }
    }

    /// A kernel's options, when the tensors are known.
    fn options(&self, options: Options, residue: Option<Residue>) -> Options {
        let wide = self.options.bias.as_ref().is_some_and(|bias| {
            let first = bias.handle.offset_start.unwrap_or(0);
            bias.shape[3].is_multiple_of(8) && first.is_multiple_of(16)
        });
        Options {
            wide_bias: wide && residue.is_none(),
            ..options
        }
    }

    /// What kernels get.
    fn args(
        &self,
        options: Options,
        heads: usize,
        [queries, keys]: [usize; 2],
    ) -> ComptimeOptionArgs<PairArgs> {
        if !options.any() {
            return ComptimeOptionArgs::None;
        }
        let [batch, head, row] = self.options.bias_bytes();
        let pairs = PairNumbersLaunch::new(
            queries as u32,
            keys as u32,
            batch,
            head,
            row as u32,
            self.options.mask(),
            self.options.dropout.map_or(1.0, |dropout| dropout.factor()) as f32,
        );
        ComptimeOptionArgs::Some(PairArgsLaunch::new(
            optional(self.slopes, heads),
            self.options.bias(),
            self.options.table_args(),
            pairs,
        ))
    }
}

/// Whether a launch can take these tensors, which a plan cannot know.
///
/// # Errors
/// [`KernelError`] if TMA cannot read a tensor, or the scale is not positive where it has to be.
pub fn check(
    named: &[(&'static str, &TensorView)],
    residue: Option<Residue>,
    asked: Asked,
) -> Result<(), KernelError> {
    for &(name, tensor) in named {
        check_rows(name, tensor, ALIGNMENT)?;
        // The last of a class of another length would be beyond the sequence, in the next head.
        if let Some(Residue { stride, .. }) = residue
            && !tensor.shape[2].is_multiple_of(stride)
        {
            return Err(KernelError::Classes {
                tensor: name,
                stride,
                seq: tensor.shape[2],
            });
        }
    }
    match asked.transformed() {
        true => Ok(()),
        false => check_scale(asked.options.scale, None),
    }
}

/// Runs the forward pass over a layout, or a part of one, into `out` `[batch, heads, seq_q, dim]` and `lse`
/// `[batch, heads, seq_q]`, both contiguous. With [`Tile::carry`] they hold the parts before.
///
/// # Errors
/// As [`check`], and if the output is too large. Then nothing was launched.
#[allow(clippy::too_many_arguments)]
pub fn forward(
    client: &Client,
    tile: Tile,
    layout: &BlockLayout,
    sizes: &Sizes,
    residue: Option<Residue>,
    [q, k, v]: [&TensorView; 3],
    out: &Handle,
    lse: &Handle,
    asked: Asked,
) -> Result<(), KernelError> {
    check(&[("q", q), ("k", k), ("v", v)], residue, asked)?;
    let tile = Tile {
        options: asked.options(tile.options, residue),
        ..tile
    };
    let device_plan = plan(client, layout, tile.tiling());
    let (heads, seq_q) = (layout.heads(), q.shape[2]);
    let rows = sizes.batch * heads * seq_q;
    if u32::try_from(rows * tile.dim / 8).is_err() {
        let most = u64::from(u32::MAX) * 8;
        return Err(KernelError::limit(
            "the elements of the output",
            most,
            rows * tile.dim,
        ));
    }
    let (log2_scale, cap_scale) = asked.scales();
    let softcap = asked.options.softcap.unwrap_or(1.0);
    unsafe {
        forward::forward::launch_unchecked(
            client,
            CubeCount::Static(device_plan.tiles as u32, heads as u32, sizes.batch as u32),
            CubeDim::new_1d(tile.units() as u32),
            tile.cols / 2,
            tile.cols / 4,
            (tile.dim / 2).next_power_of_two(),
            tensor_map(q, tile.q_group(), residue, sizes.dtype),
            tensor_map(k, tile.group, residue, sizes.dtype),
            tensor_map(v, tile.group, residue, sizes.dtype),
            BufferArg::from_raw_parts(out.clone(), rows * tile.dim / 8),
            BufferArg::from_raw_parts(lse.clone(), rows),
            BufferArg::from_raw_parts(device_plan.words.clone(), device_plan.len),
            asked.args(tile.options, heads, [seq_q, k.shape[2]]),
            plan_parts(&device_plan.sections, batch_words(layout)),
            listing(residue),
            seq_q as u32,
            (heads / sizes.kv_heads) as u32,
            log2_scale as f32,
            (std::f64::consts::LOG2_E / log2_scale) as f32,
            softcap as f32,
            cap_scale as f32,
            tile,
        );
    }
    Ok(())
}

/// How the backward pass runs.
#[derive(Clone, Copy, Debug)]
pub enum Backward {
    /// One walk over columns, with five products a pair.
    Fused(BackwardTile),
    /// A walk over rows for dQ and one over columns for dK and dV, with seven, where tiles would wait for each other.
    Walks([WalkTile; 2]),
}

/// The comptime shape of the fused backward kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardTile {
    /// Type of the tensors.
    pub half: Half,
    /// Width of queries, keys and values: 64, 96 or 128.
    pub dim: usize,
    /// Warpgroups, each with 64 keys: 1 or 2.
    pub warpgroups: usize,
    /// Queries of a step: 64 or 128.
    pub cols: usize,
    /// Consecutive positions an entry names.
    pub group: usize,
    /// Steps that are in shared memory at a time.
    pub stages: usize,
    /// How many steps late a buffer is filled again.
    pub lag: usize,
    /// Whether scores are softcapped.
    pub softcap: bool,
    /// What else a call may ask for.
    pub options: Options,
    /// Whether positions are listed by residue class.
    pub residue: bool,
    /// Whether results are added to what is there.
    pub carry: bool,
    /// Whether the tile's keys are gathered from like blocks.
    pub clustered: bool,
    /// Whether cubes compute tile after tile.
    pub persistent: bool,
}

impl BackwardTile {
    /// Keys of a tile.
    pub fn rows(&self) -> usize {
        GROUP_ROWS * self.warpgroups
    }

    /// Units of a cube.
    pub fn units(&self) -> usize {
        128 * self.warpgroups
    }

    /// How the layout is cut.
    pub fn tiling(&self) -> Tiling {
        Tiling {
            walk: Walk::Columns,
            rows: self.rows(),
            cols: self.cols,
            places: false,
            clustered: self.clustered,
            visits: true,
        }
    }

    fn mask(&self) -> MaskShape {
        MaskShape {
            rows: self.rows(),
            cols: self.cols,
            group: self.group,
            entry_words: self.tiling().entry_words(),
        }
    }

    fn pairs(&self) -> PairShape {
        PairShape {
            options: self.options,
            walk: Walk::Columns,
            half: self.half,
            softcap: self.softcap,
            cols: self.cols,
            group: self.group,
            entry_words: self.tiling().entry_words(),
            residue: self.residue,
        }
    }

    fn store(&self) -> StoreShape {
        StoreShape {
            half: self.half,
            dim: self.dim,
            residue: self.residue,
            carry: self.carry,
        }
    }

    fn warps(&self) -> u32 {
        4 * self.warpgroups as u32
    }

    fn spans(&self) -> usize {
        self.dim.div_ceil(ROW_ELEMENTS)
    }

    /// Columns in shared memory.
    fn padded(&self) -> usize {
        self.spans() * ROW_ELEMENTS
    }

    fn entries(&self) -> usize {
        self.cols / self.group
    }

    /// Rows of a box of keys or values. All positions of a box are of one class and one block.
    fn a_group(&self) -> usize {
        match self.residue || self.clustered {
            true => self.rows().min(self.group),
            false => self.rows(),
        }
    }

    /// Boxes of the tile's keys, or its values.
    fn a_boxes(&self) -> usize {
        self.rows() / self.a_group() * self.spans()
    }

    fn a_bytes(&self) -> usize {
        self.rows() * self.spans() * ROW
    }

    fn b_bytes(&self) -> usize {
        self.cols * self.spans() * ROW
    }

    /// TMA writes to multiples of 128 bytes, and the lse and delta of 8 queries have 64.
    fn stats_bytes(&self) -> usize {
        self.entries() * (self.group * 8).max(128)
    }

    /// Where the lse and delta of the `eight`-th eight queries of a step are.
    fn stats_eight(&self, eight: usize) -> u32 {
        eight as u32 * if self.group == 8 { 128 } else { 64 }
    }

    /// Whether ds is made of weights in half precision: where registers are short.
    fn packed(&self) -> bool {
        self.dim > 64 || self.cols > GROUP_ROWS
    }

    fn ds_bytes(&self) -> usize {
        self.rows() * self.cols * 2
    }

    // dQ of a step: two warpgroups have half the columns each, or half the queries where a step has 128.

    /// Whether a warpgroup has half the queries of a step.
    fn halves_queries(&self) -> bool {
        self.cols == 2 * GROUP_ROWS && self.warpgroups == 2
    }

    /// Parts of the columns, each with counters of its own.
    fn parts(&self) -> usize {
        match self.halves_queries() {
            true => 1,
            false => self.warpgroups,
        }
    }

    /// Columns of dQ that a warpgroup computes.
    fn dq_cols(&self) -> usize {
        self.padded() / self.parts()
    }

    /// From one warpgroup's ds to the other's.
    fn dq_left_offset(&self) -> usize {
        match self.halves_queries() {
            true => self.rows() * ROW,
            false => 0,
        }
    }

    /// From one warpgroup's columns of the keys to the other's.
    fn dq_right_offset(&self) -> usize {
        match (self.parts(), self.spans()) {
            (1, _) => 0,
            (_, 1) => ROW / 2,
            _ => self.rows() * ROW,
        }
    }

    fn dq_query_offset(&self) -> usize {
        match self.halves_queries() {
            true => GROUP_ROWS,
            false => 0,
        }
    }

    /// Bytes of the sums of eight queries.
    fn dq_eight_bytes(&self) -> usize {
        8 * self.padded() * 4
    }

    /// Queries that share a counter.
    fn counted(&self) -> usize {
        self.group.min(16)
    }

    /// Counters of a warp's 16 queries.
    fn counters(&self) -> usize {
        16 / self.counted()
    }

    /// Tiles whose keys and values are in shared memory at a time.
    fn own_buffers(&self) -> usize {
        1 + usize::from(self.persistent)
    }

    // Byte offsets in shared memory, barriers first.

    /// Of the tile's own rows. The stats of eight queries leave room for barriers.
    fn own(&self) -> u32 {
        match self.group {
            8 => 64,
            _ => 0,
        }
    }

    fn full(&self) -> u32 {
        self.own() + 8 * self.own_buffers() as u32
    }

    fn empty(&self) -> u32 {
        self.full() + 8 * self.stages as u32
    }

    /// Of what is noted of a cube's next two tiles, 32 bytes each.
    fn slots(&self) -> u32 {
        (self.empty() + 8 * self.stages as u32).next_multiple_of(32)
    }

    fn stats_offset(&self) -> usize {
        match self.group {
            8 => 0,
            _ => 128,
        }
    }

    fn k_offset(&self) -> usize {
        (self.stats_offset() + self.stages * self.stats_bytes()).next_multiple_of(1024)
    }

    fn ds_offset(&self) -> usize {
        self.k_offset() + 2 * self.own_buffers() * self.a_bytes()
    }

    fn q_offset(&self) -> usize {
        self.ds_offset() + 2 * self.ds_bytes()
    }

    fn do_offset(&self) -> usize {
        self.q_offset() + self.stages * self.b_bytes()
    }

    fn dq_offset(&self) -> usize {
        self.do_offset() + self.stages * self.b_bytes()
    }

    /// Bytes of dQ of a warp's eight queries.
    fn warp_eight_bytes(&self) -> usize {
        8 * self.dq_cols() * 4
    }

    /// Bytes of shared memory of a cube.
    pub fn shared_bytes(&self) -> usize {
        self.dq_offset() + 8 * self.warpgroups * self.warp_eight_bytes()
    }
}

impl fmt::Display for BackwardTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "hopper  {} × {} tiles gathered from {}-wide blocks{}, {} units, {} stages in {} KiB shared{}",
            self.rows(),
            self.cols,
            self.group,
            if self.clustered {
                ", like rows together"
            } else {
                ""
            },
            self.units(),
            self.stages,
            self.shared_bytes().div_ceil(1024),
            if self.persistent {
                ", tile after tile"
            } else {
                ""
            },
        )
    }
}

/// As [`choose`], for the backward pass. What the forward tier does not take, this one does not either.
///
/// # Errors
/// What the tier lacks.
pub fn choose_backward(
    layout: &BlockLayout,
    sizes: &Sizes,
    forward: &Result<Tile, &'static str>,
    properties: &DeviceProperties,
) -> Result<Backward, &'static str> {
    let forward = (*forward)?;
    if tier_limit().is_some_and(|limit| limit == "hopper-forward") {
        return Err("BLOCKSPARSE_TIER says hopper-forward");
    }
    let walks = || {
        let tile = |walk| choose_walk(layout, sizes, &forward, walk);
        Ok(Backward::Walks([Walk::Rows, Walk::Columns].map(tile)))
    };
    let block = layout.block_size();
    // Visits are counted on the host.
    let chosen = layout.device_choice().is_some();
    if chosen || tier_limit().is_some_and(|limit| limit == "hopper-walks") {
        if forward.dim != 64 && forward.dim != 128 {
            return Err("head_dim is neither 64 nor 128");
        }
        if block < 16 {
            // TMA writes to multiples of 128 bytes of shared memory, and the lse and delta of 8 queries have 64.
            return Err("blocks are narrower than 16");
        }
        return walks();
    }
    if forward.dim > 128 {
        return Err("head_dim is none of 64, 96, 128");
    }
    // A tile of unlike blocks computes pairs that none of them keeps, where two walks may have tiles of half the height. And tiles side by
    // side that see different queries do not keep step: they wait for each other at the sums of dQ. The classes of a listing
    // share no queries.
    let may_cluster = sizes.may_cluster(layout, Walk::Columns);
    let [small, grouping, large] = [1, 2, 4].map(|groups| {
        Grouping::best(
            layout,
            Walk::Columns,
            [GROUP_ROWS * groups, 64],
            may_cluster,
        )
    });
    // What the fused pass gains on two walks where both compute the same pairs.
    let gain = if forward.dim == 64 { 1.5 } else { 1.3 };
    let unlike =
        grouping.overhead > gain * small.overhead || large.overhead > 1.7 * grouping.overhead;
    if unlike && !forward.residue && forward.dim != 96 && block >= 16 {
        return walks();
    }
    let (cols, stages) = match forward.dim {
        64 => (128, 2),
        _ => (64, 3),
    };
    let tile = BackwardTile {
        half: forward.half,
        dim: forward.dim,
        warpgroups: 2,
        cols,
        group: block.min(cols),
        stages,
        lag: stages - 1,
        softcap: forward.softcap,
        options: forward.options,
        residue: forward.residue,
        carry: forward.carry,
        clustered: grouping.clustered,
        persistent: steps_of_tile(layout, sizes, cols) * grouping.overhead < SHORT_WALK,
    };
    // The keys and values of two tiles fit at the least width only.
    let single = BackwardTile {
        persistent: false,
        ..tile
    };
    let most = properties.hardware.max_shared_memory_size;
    let fits = |tile: &BackwardTile| tile.shared_bytes() <= most;
    let tile = [tile, single].into_iter().find(fits);
    let tile = tile.ok_or("no tile fits the shared memory of the device")?;
    Ok(Backward::Fused(tile))
}

/// Steps of `cols` queries that a tile of 128 keys would walk on average if nothing were computed in vain.
fn steps_of_tile(layout: &BlockLayout, sizes: &Sizes, cols: usize) -> f64 {
    let heads_per_kv = layout.heads() / sizes.kv_heads;
    let blocks: usize = (0..layout.num_patterns())
        .map(|pattern| layout.pattern_blocks(pattern))
        .sum();
    let pairs = (blocks * heads_per_kv) as f64 * (layout.block_size() as f64).powi(2);
    pairs / (layout.num_patterns() * layout.seq_kv().max(1) * cols) as f64
}

/// What the fused backward pass needs of each query, with `pitch` places of each head.
#[derive(Clone)]
pub struct Stats {
    values: Handle,
    pitch: usize,
    /// Whether places are positions.
    in_order: bool,
}

/// The backward pass over a layout, or a part of one: `outputs` as the forward pass left them, and the stats if a part before
/// has made them. Three launches: what is needed of each query, the walk over columns, and dQ from its sums.
///
/// # Errors
/// As [`check`], and if a tensor is too large. Then nothing was launched.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    client: &Client,
    tile: BackwardTile,
    layout: &BlockLayout,
    sizes: &Sizes,
    residue: Option<Residue>,
    [q, k, v, grad_out]: [&TensorView; 4],
    outputs: Outputs,
    grad_lse: Option<&Handle>,
    known: Option<Stats>,
    gradients: &Gradients,
    asked: Asked,
) -> Result<Stats, KernelError> {
    let named = [("q", q), ("k", k), ("v", v), ("grad_out", grad_out)];
    check(&named, residue, asked)?;
    let tile = BackwardTile {
        options: asked.options(tile.options, residue),
        ..tile
    };
    let scale = asked.options.scale;
    let device_plan = plan(client, layout, tile.tiling());
    let heads = layout.heads();
    let (seq_q, seq_kv) = (q.shape[2], k.shape[2]);
    // A group, and 16 queries, are of one head.
    let pitch = layout.seq_q().next_multiple_of(tile.group.max(16));
    let rows = sizes.batch * heads * pitch;
    let lanes = tile.padded() / 8;
    let kv_elements = sizes.batch * sizes.kv_heads * seq_kv * tile.dim + gradients.v_offset;
    let cubes = device_plan.tiles * sizes.kv_heads * sizes.batch;
    for (what, count) in [
        ("the elements of a gradient", kv_elements / 8),
        ("the queries of a backward pass", rows * lanes),
        ("the tiles of a backward pass", cubes * 2),
    ] {
        if u32::try_from(count).is_err() {
            return Err(KernelError::limit(what, u32::MAX, count));
        }
    }
    let hardware = &client.properties().hardware;
    let multiprocessors = hardware.num_streaming_multiprocessors.unwrap_or(1) as usize;
    let grid = match tile.persistent {
        // All of them run at once: a tile may wait for one that another cube has.
        true => cubes.min(multiprocessors),
        false => cubes,
    };
    let (log2_scale, cap_scale) = asked.scales();
    let softcap = asked.options.softcap.unwrap_or(1.0);
    let counters = rows / tile.counted() * tile.parts();
    let counters = (client.empty((counters + 1) * 4), counters);
    let stats = client.empty(rows * 8);
    let scratch = client.empty(rows * tile.padded() * 4);
    let [batch_stride, head_stride, row_stride, _] = grad_out.strides;
    const UNITS: usize = 256;
    let over = |units: usize| CubeCount::Static(units.div_ceil(UNITS) as u32, 1, 1);
    match known.filter(|known| known.in_order) {
        Some(known) => unsafe {
            backward::relist::launch_unchecked(
                client,
                over(rows),
                CubeDim::new_1d(UNITS as u32),
                BufferArg::from_raw_parts(known.values, sizes.batch * heads * known.pitch),
                BufferArg::from_raw_parts(stats.clone(), rows),
                BufferArg::from_raw_parts(counters.0.clone(), counters.1 + 1),
                listing(residue),
                rows as u32,
                pitch as u32,
                known.pitch as u32,
                seq_q as u32,
                tile,
            );
        },
        None => unsafe {
            backward::stats::launch_unchecked(
                client,
                over(rows * lanes),
                CubeDim::new_1d(UNITS as u32),
                BufferArg::from_raw_parts(
                    outputs.out.clone(),
                    sizes.batch * heads * seq_q * tile.dim / 8,
                ),
                BufferArg::from_raw_parts(grad_out.handle.clone(), grad_out.reach().div_ceil(8)),
                BufferArg::from_raw_parts(outputs.lse.clone(), sizes.batch * heads * seq_q),
                optional(grad_lse, sizes.batch * heads * seq_q),
                BufferArg::from_raw_parts(stats.clone(), rows * 2),
                BufferArg::from_raw_parts(counters.0.clone(), counters.1 + 1),
                StridesLaunch::new(batch_stride / 8, head_stride / 8, row_stride / 8, seq_q),
                listing(residue),
                heads as u32,
                rows as u32,
                pitch as u32,
                lanes as u32,
                tile,
            );
        },
    }
    let stats_map = stats_map(&stats, tile.group, sizes.batch * heads, pitch);
    unsafe {
        backward::backward::launch_unchecked(
            client,
            CubeCount::Static(grid as u32, 1, 1),
            CubeDim::new_1d(tile.units() as u32),
            tile.cols / 2,
            tile.cols / 4,
            (tile.dim / 2).next_power_of_two(),
            tile.dq_cols() / 2,
            tensor_map(k, tile.a_group(), residue, sizes.dtype),
            tensor_map(v, tile.a_group(), residue, sizes.dtype),
            tensor_map(q, tile.group, residue, sizes.dtype),
            tensor_map(grad_out, tile.group, residue, sizes.dtype),
            stats_map,
            BufferArg::from_raw_parts(scratch.clone(), rows * tile.padded()),
            BufferArg::from_raw_parts(counters.0.clone(), counters.1 + 1),
            BufferArg::from_raw_parts(gradients.kv.clone(), kv_elements / 8),
            BufferArg::from_raw_parts(device_plan.words.clone(), device_plan.len),
            asked.args(tile.options, heads, [seq_q, seq_kv]),
            plan_parts(&device_plan.sections, batch_words(layout)),
            listing(residue),
            LengthsLaunch::new(
                device_plan.tiles as u32,
                SPREAD,
                sizes.kv_heads as u32,
                (heads / sizes.kv_heads) as u32,
                sizes.batch as u32,
                seq_kv as u32,
                pitch as u32,
                (gradients.v_offset / 8) as u32,
                counters.1 as u32,
            ),
            scale as f32,
            log2_scale as f32,
            softcap as f32,
            cap_scale as f32,
            tile,
        );
        backward::finish::launch_unchecked(
            client,
            over(rows * tile.dim / 8),
            CubeDim::new_1d(UNITS as u32),
            BufferArg::from_raw_parts(scratch, rows * tile.padded() / 2),
            BufferArg::from_raw_parts(counters.0, counters.1 + 1),
            BufferArg::from_raw_parts(
                gradients.q.clone(),
                sizes.batch * heads * seq_q * tile.dim / 8,
            ),
            listing(residue),
            rows as u32,
            pitch as u32,
            seq_q as u32,
            scale as f32,
            tile,
        );
    }
    Ok(Stats {
        values: stats,
        pitch,
        in_order: residue.is_none(),
    })
}

/// The comptime shape of the kernel of the two walks, in either.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WalkTile {
    /// Type of the tensors.
    pub half: Half,
    /// Width of queries, keys and values: 64 or 128.
    pub dim: usize,
    /// Warpgroups, each with 64 rows: 1 or 2.
    pub warpgroups: usize,
    /// Columns of a step.
    pub cols: usize,
    /// Consecutive positions an entry names.
    pub group: usize,
    /// Steps that are in shared memory at a time.
    pub stages: usize,
    /// How many steps late a buffer is filled again.
    pub lag: usize,
    /// Whether scores are softcapped.
    pub softcap: bool,
    /// What else a call may ask for.
    pub options: Options,
    /// Whether positions are listed by residue class.
    pub residue: bool,
    /// Whether results are added to what is there.
    pub carry: bool,
    /// Whether the tile's rows are gathered from like blocks.
    pub clustered: bool,
}

impl WalkTile {
    /// Rows of a tile.
    pub fn rows(&self) -> usize {
        GROUP_ROWS * self.warpgroups
    }

    /// Units of a cube.
    pub fn units(&self) -> usize {
        128 * self.warpgroups
    }

    /// How the layout is cut.
    pub fn tiling(&self, walk: Walk) -> Tiling {
        Tiling {
            walk,
            rows: self.rows(),
            cols: self.cols,
            places: false,
            clustered: self.clustered,
            visits: false,
        }
    }

    fn mask(&self) -> MaskShape {
        MaskShape {
            rows: self.rows(),
            cols: self.cols,
            group: self.group,
            entry_words: self.tiling(Walk::Columns).entry_words(),
        }
    }

    fn pairs(&self, walk: Walk) -> PairShape {
        PairShape {
            options: self.options,
            walk,
            half: self.half,
            softcap: self.softcap,
            cols: self.cols,
            group: self.group,
            entry_words: self.tiling(walk).entry_words(),
            residue: self.residue,
        }
    }

    fn store(&self) -> StoreShape {
        StoreShape {
            half: self.half,
            dim: self.dim,
            residue: self.residue,
            carry: self.carry,
        }
    }

    fn warps(&self) -> u32 {
        4 * self.warpgroups as u32
    }

    fn spans(&self) -> usize {
        self.dim.div_ceil(ROW_ELEMENTS)
    }

    fn entries(&self) -> usize {
        self.cols / self.group
    }

    /// Rows of a box of the tile's own rows. All positions of a box are of one class and one block.
    fn a_group(&self) -> usize {
        match self.residue || self.clustered {
            true => self.rows().min(self.group),
            false => self.rows(),
        }
    }

    fn a_bytes(&self) -> usize {
        self.rows() * self.spans() * ROW
    }

    fn b_bytes(&self) -> usize {
        self.cols * self.spans() * ROW
    }

    fn stats_bytes(&self) -> usize {
        self.cols * 8
    }

    // Byte offsets in shared memory. The barrier of the tile's own rows comes first.

    fn full(&self) -> u32 {
        8
    }

    fn empty(&self) -> u32 {
        self.full() + 8 * self.stages as u32
    }

    fn stats_offset(&self) -> usize {
        1024
    }

    fn a1_offset(&self) -> usize {
        (self.stats_offset() + self.stages * self.stats_bytes()).next_multiple_of(1024)
    }

    fn a2_offset(&self) -> usize {
        self.a1_offset() + self.a_bytes()
    }

    fn b1_offset(&self) -> usize {
        self.a2_offset() + self.a_bytes()
    }

    fn b2_offset(&self) -> usize {
        self.b1_offset() + self.stages * self.b_bytes()
    }

    /// Bytes of shared memory of a cube.
    pub fn shared_bytes(&self) -> usize {
        self.b2_offset() + self.stages * self.b_bytes()
    }
}

impl fmt::Display for WalkTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "hopper  {} × {} tiles gathered from {}-wide blocks{}, {} units, {} stages in {} KiB shared",
            self.rows(),
            self.cols,
            self.group,
            if self.clustered {
                ", like rows together"
            } else {
                ""
            },
            self.units(),
            self.stages,
            self.shared_bytes().div_ceil(1024),
        )
    }
}

/// The tile of a walk.
fn choose_walk(layout: &BlockLayout, sizes: &Sizes, forward: &Tile, walk: Walk) -> WalkTile {
    let may_cluster = sizes.may_cluster(layout, walk);
    let tiles = [2, 1].map(|warpgroups| {
        let grouping = Grouping::best(layout, walk, [GROUP_ROWS * warpgroups, 64], may_cluster);
        // Two warpgroups share what is gathered; one unites fewer rows of blocks.
        let speed = if warpgroups == 2 { 1.0 } else { 0.8 };
        // One warpgroup leaves room for a second cube, if its buffers do.
        let stages = match (forward.dim, warpgroups) {
            (64, _) => 4,
            (_, 1) => 2,
            _ => 3,
        };
        let tile = WalkTile {
            half: forward.half,
            dim: forward.dim,
            warpgroups,
            cols: 64,
            group: layout.block_size().min(64),
            stages,
            lag: stages.min(3) - 1,
            softcap: forward.softcap,
            options: forward.options,
            residue: forward.residue,
            carry: forward.carry,
            clustered: grouping.clustered,
        };
        (grouping.overhead / speed, tile)
    });
    let [(cost, tile), (other, small)] = tiles;
    if cost <= other { tile } else { small }
}

/// One walk of the backward pass over a layout, or a part of one.
///
/// # Errors
/// As [`check`]. Then nothing was launched.
#[allow(clippy::too_many_arguments)]
pub fn walk(
    client: &Client,
    tile: WalkTile,
    walk: Walk,
    layout: &BlockLayout,
    sizes: &Sizes,
    residue: Option<Residue>,
    operands: &WalkOperands,
    asked: Asked,
) -> Result<(), KernelError> {
    let &WalkOperands {
        a: [a1, a2],
        b: [b1, b2],
        stats,
        pitch,
        out,
        second,
    } = operands;
    check(&operands.named(), residue, asked)?;
    let tile = WalkTile {
        options: asked.options(tile.options, residue),
        ..tile
    };
    let scale = asked.options.scale;
    let device_plan = plan(client, layout, tile.tiling(walk));
    let heads = layout.heads();
    let outer_heads = a1.shape[1];
    let len = a1.shape[2];
    let lengths = match walk {
        Walk::Rows => [len, b1.shape[2]],
        Walk::Columns => [b1.shape[2], len],
    };
    let elements = sizes.batch * outer_heads * len * tile.dim + second;
    if u32::try_from(elements / 8).is_err() {
        let most = u64::from(u32::MAX) * 8;
        return Err(KernelError::limit(
            "the elements of a gradient",
            most,
            elements,
        ));
    }
    let (log2_scale, cap_scale) = asked.scales();
    let softcap = asked.options.softcap.unwrap_or(1.0);
    let stat_rows = sizes.batch * heads;
    let stats_map = stats_map(stats, tile.group, stat_rows, pitch);
    unsafe {
        walks::one_walk::launch_unchecked(
            client,
            CubeCount::Static(
                device_plan.tiles as u32,
                outer_heads as u32,
                sizes.batch as u32,
            ),
            CubeDim::new_1d(tile.units() as u32),
            tile.cols / 2,
            tile.cols / 4,
            tile.dim / 2,
            tensor_map(a1, tile.a_group(), residue, sizes.dtype),
            tensor_map(a2, tile.a_group(), residue, sizes.dtype),
            tensor_map(b1, tile.group, residue, sizes.dtype),
            tensor_map(b2, tile.group, residue, sizes.dtype),
            stats_map,
            BufferArg::from_raw_parts(stats.clone(), stat_rows * pitch * 2),
            BufferArg::from_raw_parts(out.clone(), elements / 8),
            BufferArg::from_raw_parts(device_plan.words.clone(), device_plan.len),
            asked.args(tile.options, heads, lengths),
            plan_parts(&device_plan.sections, batch_words(layout)),
            listing(residue),
            len as u32,
            pitch as u32,
            (heads / sizes.kv_heads) as u32,
            (second / 8) as u32,
            scale as f32,
            log2_scale as f32,
            softcap as f32,
            cap_scale as f32,
            walk,
            tile,
        );
    }
    Ok(())
}

/// A map of `[rows, pitch, 2]` numbers whose boxes have those of `group` places.
fn stats_map(stats: &Handle, group: usize, rows: usize, pitch: usize) -> TensorMapArg<Tiled> {
    let boxes = TiledArgs {
        tile_size: [1, group * 2].into(),
    };
    let (strides, shape) = ([pitch * 2, 1].into(), [rows, pitch * 2].into());
    let stats = unsafe { TensorArg::from_raw_parts(stats.clone(), strides, shape) };
    TensorMapArg::new(boxes, stats, ElemType::Float(FloatKind::F32))
}

/// A map whose boxes have `rows` rows of 64 columns.
fn tensor_map(
    tensor: &TensorView,
    rows: usize,
    residue: Option<Residue>,
    dtype: ElemType,
) -> TensorMapArg<Tiled> {
    let [batch, heads, seq, dim] = tensor.shape;
    let [batch_stride, head_stride, row_stride, _] = tensor.strides;
    let (shape, mut strides, boxes) = match residue {
        None => (
            vec![batch, heads, seq, dim],
            vec![batch_stride, head_stride, row_stride, 1],
            vec![1, 1, rows, ROW_ELEMENTS],
        ),
        Some(Residue { stride, .. }) => (
            vec![batch, heads, stride, seq / stride, dim],
            vec![
                batch_stride,
                head_stride,
                row_stride,
                row_stride * stride,
                1,
            ],
            vec![1, 1, 1, rows, ROW_ELEMENTS],
        ),
    };
    // Strides of dimensions of length 1 are arbitrary, but a map's have to be multiples of 16 bytes.
    for (stride, length) in strides.iter_mut().zip(&shape) {
        if *length == 1 {
            *stride = dim;
        }
    }
    let last = strides.len() - 1;
    strides[last] = 1;
    let tensor = unsafe {
        TensorArg::from_raw_parts(
            tensor.handle.clone(),
            strides.as_slice().into(),
            shape.as_slice().into(),
        )
    };
    let boxes = TiledArgs {
        tile_size: boxes.as_slice().into(),
    };
    TensorMapArg::new(boxes, tensor, dtype).with_swizzle(TensorMapSwizzle::B128)
}
