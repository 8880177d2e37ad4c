//! The forward pass in FP8: queries, keys and values in E4M3 with a scale per [`BLOCK`] rows of a head, and the online softmax of their products.
//!
//! ```text
//! q, k   [batch, heads, seq, dim]                  in their order
//! v      [batch, heads, seq / 64, value_dim, 64]   transposed per 64 keys, since FP8 products need both operands contiguous along the depth
//! ```
//!
//! The scale of a block of values is a power of two and goes into the exponents of its weights, so that nothing has to be multiplied by it. With `f` the
//! product of the scales of queries and keys and the factor of scores, and `c = log2(scale of the values)`: `p = exp2(s · f + c − m)`, `o = Σ p · v` and
//! `l = Σ p · 2^−c`. The maximum `m` is that of `s · f + c`, less an offset that lets weights use the range of E4M3.

// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::forward_loads::{TileSteps, entry_of};
use super::maps::{map_of, tensor_map};
use super::tiles::Tile;
use crate::arch::sm90::*;
use crate::args::{address_of, buffer, row_tensor, spread};
use crate::call::TensorView;
use crate::error::KernelError;
use crate::pass::Pass;
use crate::shared::addressing::{PlanWords, QkvLaunch, RowTensor};
use crate::shared::own_rows::own_place;

/// Rows that share a scale.
pub const BLOCK: usize = FP8_COLUMNS;
/// Units per cube of the packing kernel.
const UNITS: usize = 256;
/// Largest number of E4M3.
const LARGEST: f32 = 448.0;
/// Least magnitude for which a scale is made, which bounds its exponent: base-2 exponents are sums of those of scores and of scales.
const LEAST: f32 = 2.7e-5;

/// The tensor to pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Operand {
    Queries,
    Keys,
    Values,
}

/// Packs [`BLOCK`] rows of a head, and stores their scale: for queries times `factor`, for values its base-2 logarithm. Those of keys and values are
/// interleaved. A cube has one block; each of `heads` heads has `blocks` blocks.
#[cube(launch_unchecked, address_type = "dynamic")]
fn pack_block<E: Float, N: Size>(
    x: &RowTensor<Vector<E, N>>,
    bytes: &mut [u32],
    scales: &mut [f32],
    factor: f32,
    blocks: usize,
    heads: usize,
    count: usize,
    #[comptime] operand: Operand,
    #[comptime] dim: usize,
    #[define(E)] _dtype: ElemType,
) {
    let words = comptime!(dim / 4);
    let each = comptime!(BLOCK * words / UNITS);
    let mut held = Array::<f32>::new(comptime!(each * 4));
    let mut highest = Shared::<[u32]>::new_slice(comptime!(UNITS / 32));
    let unit = UNIT_POS as usize;
    let cube = CUBE_POS;
    if cube < count {
        let block = cube % blocks;
        let first = block * BLOCK;
        let start =
            cube / blocks / heads * x.strides.batch + cube / blocks % heads * x.strides.head;
        let mut most = 0u32.runtime();
        #[unroll]
        for i in 0..each {
            let word = unit + comptime!(i * UNITS);
            let (row, column) = (word / words, word % words);
            let mut four = Vector::<E, N>::zeroed();
            if first + row < x.strides.len {
                four = x.vectors[start + (first + row) * x.strides.row + column];
            }
            #[unroll]
            for j in 0..4usize {
                let number = f32::cast_from(four.extract(j));
                held[comptime!(4 * i + j)] = number;
                most = max(most, u32::reinterpret(number) & 0x7fff_ffffu32);
            }
        }
        let most = highest_across(most);
        if unit % 32 == 0 {
            highest[unit / 32] = most;
        }
        sync_cube();
        let mut most = highest[0];
        #[unroll]
        for warp in 1..comptime!(UNITS / 32) {
            most = max(most, highest[warp]);
        }
        let most = max(f32::reinterpret(most), LEAST);
        if comptime!(matches!(operand, Operand::Values)) {
            // Exponent of the least power of two that is at least most / LARGEST.
            let exponent = (u32::reinterpret(most / LARGEST) + 0x7f_ffffu32) >> 23;
            let inverse = f32::reinterpret((254u32 - exponent) << 23);
            if unit == 0 {
                scales[cube * 2 + 1] = f32::cast_from(exponent) - 127.0;
            }
            // One more, so that a column's numbers are in different banks.
            let row_numbers = comptime!(dim + 1);
            let mut numbers = Shared::<[f32]>::new_slice(comptime!(BLOCK * (dim + 1)));
            #[unroll]
            for i in 0..comptime!(4 * each) {
                let word = unit + comptime!(i / 4 * UNITS);
                let at = word / words * row_numbers + word % words * 4 + i % 4;
                numbers[at] = held[i] * inverse;
            }
            sync_cube();
            #[unroll]
            for i in 0..each {
                // Per 16 keys, a unit has the weights of 2t, 2t + 1, 2t + 8 and 2t + 9.
                let word = unit + comptime!(i * UNITS);
                let (column, four) = (word / 16, word % 16);
                let key = four / 4 * 16 + four % 4 * 2;
                let at = key * row_numbers + column;
                bytes[cube * comptime!(BLOCK * words) + word] = four_bytes(
                    numbers[at],
                    numbers[at + row_numbers],
                    numbers[at + comptime!(8 * (dim + 1))],
                    numbers[at + comptime!(9 * (dim + 1))],
                );
            }
        } else {
            let inverse = LARGEST / most;
            let scale = most / LARGEST;
            if unit == 0 {
                match comptime!(operand) {
                    Operand::Queries => scales[cube] = scale * factor,
                    _ => scales[cube * 2] = scale,
                }
            }
            #[unroll]
            for i in 0..each {
                let word = unit + comptime!(i * UNITS);
                let row = first + word / words;
                if row < x.strides.len {
                    let row = cube / blocks * x.strides.len + row;
                    bytes[row * words + word % words] = four_bytes(
                        held[comptime!(4 * i)] * inverse,
                        held[comptime!(4 * i + 1)] * inverse,
                        held[comptime!(4 * i + 2)] * inverse,
                        held[comptime!(4 * i + 3)] * inverse,
                    );
                }
            }
        }
    }
}

/// The tensors of a call in E4M3.
pub struct Packed {
    q: TensorView,
    k: TensorView,
    v: TensorView,
    q_scales: Handle,
    kv_scales: Handle,
}

/// Packs queries, keys and values. `log2_scale` is the factor of scores.
pub fn pack(pass: &Pass, log2_scale: f64) -> Result<Packed, KernelError> {
    let [q, k, v] = pass.inputs;
    let scales = |tensor: &TensorView, each: usize| {
        let [batch, heads, seq, _] = tensor.shape;
        pass.client
            .empty(batch * heads * seq.div_ceil(BLOCK) * each * 4)
    };
    let (q_scales, kv_scales) = (scales(q, 1), scales(k, 2));
    Ok(Packed {
        q: pack_one(pass, q, Operand::Queries, log2_scale as f32, &q_scales)?,
        k: pack_one(pass, k, Operand::Keys, 1.0, &kv_scales)?,
        v: pack_one(pass, v, Operand::Values, 1.0, &kv_scales)?,
        q_scales,
        kv_scales,
    })
}

/// Packs one tensor. An element of the view has 16 bits, for TMA, and holds two numbers.
fn pack_one(
    pass: &Pass,
    x: &TensorView,
    operand: Operand,
    factor: f32,
    scales: &Handle,
) -> Result<TensorView, KernelError> {
    let client = pass.client;
    let [batch, heads, seq, dim] = x.shape;
    let blocks = seq.div_ceil(BLOCK);
    let count = batch * heads * blocks;
    let (rows, columns) = match operand {
        Operand::Values => (blocks * dim, BLOCK / 2),
        Operand::Queries | Operand::Keys => (seq, dim / 2),
    };
    let words = batch * heads * rows * columns / 2;
    let bytes = client.empty(words * 4);
    let each = match operand {
        Operand::Queries => 1,
        Operand::Keys | Operand::Values => 2,
    };
    // SAFETY: a unit reads existing rows, and writes words of its own block. The buffers have the stated lengths (see `buffer`).
    unsafe {
        pack_block::launch_unchecked(
            client,
            spread(client, count as u64)?,
            CubeDim::new_1d(UNITS as u32),
            address_of(client, x.reach().max(words))?,
            4,
            row_tensor(x, 4),
            buffer(&bytes, words),
            buffer(scales, count * each),
            factor,
            blocks,
            heads,
            count,
            operand,
            dim,
            pass.request.dtype,
        );
    }
    Ok(TensorView {
        handle: bytes,
        shape: [batch, heads, rows, columns],
        strides: [heads * rows * columns, rows * columns, columns, 1],
    })
}

impl Packed {
    /// Returns the tensor maps of the forward kernel.
    pub fn maps(&self, tile: &Tile) -> QkvLaunch<TensorMap<u32, Tiled>> {
        let element = ElemType::Float(FloatKind::BF16);
        let map = |tensor, rows| tensor_map(tensor, rows, None, element);
        let value_box = [tile.group / BLOCK * tile.value_dim, BLOCK / 2];
        QkvLaunch::new(
            map(&self.q, tile.a_group()),
            map(&self.k, tile.group),
            map_of(&self.v, value_box, None, element),
        )
    }

    /// Returns the scales as kernel arguments.
    pub fn scales(&self) -> Fp8ScalesLaunch {
        let blocks = |tensor: &TensorView| tensor.shape[2].div_ceil(BLOCK);
        let scales = |handle, tensor: &TensorView, each| {
            let [batch, heads, ..] = tensor.shape;
            buffer(handle, batch * heads * blocks(tensor) * each)
        };
        Fp8ScalesLaunch::new(
            scales(&self.q_scales, &self.q, 1),
            scales(&self.kv_scales, &self.k, 2),
            blocks(&self.q) as u32,
            blocks(&self.k) as u32,
        )
    }
}

/// Scales of a forward pass's tensors: see `pack_block`.
#[derive(CubeType, CubeLaunch)]
pub struct Fp8Scales {
    /// `[batch, heads, q_blocks]`
    pub q: Box<[f32]>,
    /// `[batch, heads of keys, kv_blocks, 2]`
    pub kv: Box<[f32]>,
    pub q_blocks: u32,
    pub kv_blocks: u32,
}

/// The scale of a tile's queries, and the location of those of its head's keys and values.
#[derive(CubeType, Clone, Copy)]
pub struct TileScales {
    q: f32,
    kv: u64,
    last: u32,
}

#[cube]
impl TileScales {
    /// Reads the scale of a tile's queries. `kv_head` counts over all batch entries.
    pub fn new(
        of: &Fp8Scales,
        plan: &PlanWords,
        rows: u32,
        head: u32,
        kv_head: u32,
        #[comptime] t: Tile,
    ) -> TileScales {
        // A tile is no higher than a block, and may end past the last query.
        let place = own_place(&plan.words[..], rows, 0u32, comptime!(t.own_shape()));
        let block = min(place / comptime!(BLOCK as u32), of.q_blocks - 1);
        let first = u64::cast_from(kv_head) * u64::cast_from(of.kv_blocks) * 8u64;
        TileScales {
            q: of.q[(head * of.q_blocks + block) as usize],
            kv: global_address::<f32>(&of.kv[..]) + first,
            last: of.kv_blocks - 1,
        }
    }

    /// Returns the blocks of keys of step `j`, or of the last step if there are fewer.
    fn blocks_of(
        &self,
        plan: &PlanWords,
        steps: &TileSteps,
        j: u32,
        #[comptime] t: Tile,
    ) -> Array<u32> {
        let entry = entry_of(steps, min(j, steps.steps - 1), t);
        let mut blocks = Array::<u32>::new(comptime!(t.cols / BLOCK));
        #[unroll]
        for i in 0..comptime!(t.cols / BLOCK) {
            let column = comptime!(i * BLOCK);
            let word = entry + comptime!(column / t.group * t.entry_words());
            blocks[i] = plan.words[word] * comptime!((t.group / BLOCK) as u32)
                + comptime!((column % t.group / BLOCK) as u32);
        }
        blocks
    }

    fn read(&self, blocks: &Array<u32>, #[comptime] t: Tile) -> Array<f32> {
        let mut scales = Array::<f32>::new(comptime!(t.cols / BLOCK * 2));
        #[unroll]
        for i in 0..comptime!(t.cols / BLOCK) {
            let two = read_two(self.kv + u64::cast_from(min(blocks[i], self.last)) * 8u64);
            scales[comptime!(2 * i)] = two.extract(0usize);
            scales[comptime!(2 * i + 1)] = two.extract(1usize);
        }
        scales
    }
}

/// Scales of a step's blocks of keys and values, which are read during the previous step, and the blocks of the next step.
#[derive(CubeType)]
pub struct ScalesAhead {
    scales: Array<f32>,
    blocks: Array<u32>,
}

#[cube]
impl ScalesAhead {
    /// Begins with the first step.
    pub fn new(
        of: &TileScales,
        plan: &PlanWords,
        steps: &TileSteps,
        #[comptime] t: Tile,
    ) -> ScalesAhead {
        let first = of.blocks_of(plan, steps, 0u32, t);
        ScalesAhead {
            scales: of.read(&first, t),
            blocks: of.blocks_of(plan, steps, 1u32, t),
        }
    }

    /// Returns the factor of products and the summand for each [`BLOCK`] keys of step `j`, and reads those of the next step.
    pub fn take(
        &mut self,
        of: &TileScales,
        plan: &PlanWords,
        steps: &TileSteps,
        j: u32,
        #[comptime] t: Tile,
    ) -> Array<f32> {
        let mut factors = Array::<f32>::new(comptime!(t.cols / BLOCK * 2));
        let scales = of.read(&self.blocks, t);
        let blocks = of.blocks_of(plan, steps, j + 2, t);
        #[unroll]
        for i in 0..comptime!(t.cols / BLOCK) {
            factors[comptime!(2 * i)] = self.scales[comptime!(2 * i)] * of.q;
            factors[comptime!(2 * i + 1)] = self.scales[comptime!(2 * i + 1)];
            self.scales[comptime!(2 * i)] = scales[comptime!(2 * i)];
            self.scales[comptime!(2 * i + 1)] = scales[comptime!(2 * i + 1)];
            self.blocks[i] = blocks[i];
        }
        factors
    }
}

/// Packs weights as the left operand of a product in FP8, with keys in the order of `pack_block`.
#[cube]
pub fn pack_weights<S: Size, P: Size>(s: Vector<f32, S>) -> Vector<u32, P> {
    let mut p = Vector::<u32, P>::zeroed();
    #[unroll]
    for i in 0..P::value() {
        let at = comptime!(i / 2 * 8 + i % 2 * 2);
        let (a, b) = (s.extract(at), s.extract(comptime!(at + 1)));
        let (c, d) = (s.extract(comptime!(at + 4)), s.extract(comptime!(at + 5)));
        p.insert(i, four_bytes(a, b, c, d));
    }
    p
}
