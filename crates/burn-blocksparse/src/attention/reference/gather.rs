//! Conversions between `[batch, heads, seq, dim]` tensors and the tiles of a chunk.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::tensor::Device;
use burn::tensor::IndexingUpdateOp;

use blocksparse::{BlockLayout, Dropout};

use super::plan::{Group, GroupShape, Plan, Tile, TileEntry};
use super::tiles::{pad, tile, untile};
use crate::base::prelude::*;
use crate::base::values::{AttentionInputs, LayoutTensors};
use crate::graph::recording;
use crate::options::AttentionOptions;
use crate::upload;
use crate::weights;

/// Maximum number of scores in memory at a time (one tile may have more).
const CHUNK_SCORES: usize = 1 << 20;

/// Sizes, options and plan of a call.
pub(super) struct Problem<'a, B: Backend> {
    pub batch: usize,
    pub heads: usize,
    kv_heads: usize,
    pub seq_q: usize,
    pub seq_kv: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    /// Block size.
    pub b: usize,
    pub q_blocks: usize,
    pub kv_blocks: usize,
    pub scale: f64,
    pub softcap: Option<f64>,
    pub alibi: Option<Arc<[f64]>>,
    dropout: Option<Dropout>,
    /// Shape of the bias, or zeros.
    bias: [usize; 4],
    /// Shape of the relative bias, or zeros.
    pub relative: [usize; 2],
    pub device: Device<B>,
    /// Dtype of all computations.
    pub dtype: FloatDType,
    layout: &'a LayoutTensors<B>,
    plan: Arc<Plan>,
    /// The (batch entry, head) pairs that use each distinct pattern.
    users: Vec<Vec<(usize, usize)>>,
    /// `[batch entry][head]`: index of the first stored block.
    weight_offsets: Vec<Vec<usize>>,
}

/// The inputs as tiles, one per row: `[tiles, b · dim]`. `q` is already scaled.
pub(super) struct TiledInputs<B: Backend> {
    pub q: Array<B>,
    pub k: Array<B>,
    pub v: Array<B>,
    /// One row per block: `[blocks, rows · b]`.
    pub bias: Option<Array<B>>,
    /// The relative bias of all heads, flattened.
    pub relative: Option<Array<B>>,
}

/// Tiles that are computed together.
pub(super) struct Chunk<'a> {
    pub shape: GroupShape,
    pub tiles: Vec<Placed<'a>>,
}

/// A tile of the plan in one head of one batch entry.
#[derive(Clone, Copy)]
pub(super) struct Placed<'a> {
    tile: &'a Tile,
    batch: usize,
    head: usize,
}

impl<'a, B: Backend> Problem<'a, B> {
    pub fn new(
        inputs: &AttentionInputs<B>,
        layout: &'a LayoutTensors<B>,
        options: &AttentionOptions,
    ) -> Self {
        let [batch, heads, seq_q, head_dim] = inputs.q.shape().dims::<4>();
        let [_, kv_heads, seq_kv, value_dim] = inputs.v.shape().dims::<4>();
        let host: &BlockLayout = &layout.host;
        let mut users = vec![Vec::new(); host.num_patterns()];
        for entry in 0..batch {
            for head in 0..heads {
                users[host.pattern_of(entry, head)].push((entry, head));
            }
        }
        let weight_offsets = (0..host.batch().unwrap_or(1))
            .map(|entry| weights::head_offsets(host, entry))
            .collect();
        Self {
            batch,
            heads,
            kv_heads,
            seq_q,
            seq_kv,
            head_dim,
            value_dim,
            b: host.block_size(),
            q_blocks: host.q_blocks(),
            kv_blocks: host.kv_blocks(),
            scale: options.scale_for(head_dim),
            softcap: options.softcap,
            alibi: options.alibi.clone(),
            dropout: options.active_dropout(),
            bias: (inputs.scores.bias.as_ref()).map_or([0; 4], |bias| bias.shape().dims()),
            relative: (inputs.scores.relative_bias.as_ref())
                .map_or([0; 2], |table| table.shape().dims()),
            device: inputs.q.device(),
            dtype: accumulate_in(inputs.q.dtype().into()),
            layout,
            plan: host.attachment(|| Plan::new(host)),
            users,
            weight_offsets,
        }
    }

    pub fn num_q_tiles(&self) -> usize {
        self.batch * self.heads * self.q_blocks
    }

    pub fn num_kv_tiles(&self) -> usize {
        self.batch * self.kv_heads * self.kv_blocks
    }

    /// Splits the plan's groups into chunks with a bounded number of scores.
    pub fn chunks(&self) -> impl Iterator<Item = Chunk<'_>> {
        self.plan.groups.iter().flat_map(|group| {
            let Group { shape, tiles } = group;
            let placed: Vec<Placed<'_>> = (tiles.iter())
                .flat_map(|tile| {
                    let users = self.users[tile.pattern].iter();
                    users.map(move |&(batch, head)| Placed { tile, batch, head })
                })
                .collect();
            let scores_of_tile = self.b * shape.entries * self.b;
            let length = (CHUNK_SCORES / scores_of_tile).max(1);
            let chunks: Vec<Chunk<'_>> = (placed.chunks(length))
                .map(|tiles| Chunk {
                    shape: *shape,
                    tiles: tiles.to_vec(),
                })
                .collect();
            chunks
        })
    }

    pub fn zeros(&self, shape: impl Into<Shape>) -> Array<B> {
        Array::zeros(shape, &self.device, self.dtype)
    }

    pub fn numbers<const D: usize>(&self, numbers: Vec<f64>, shape: [usize; D]) -> Array<B> {
        recording::doom_by_upload(&self.device, "indices of the reference");
        let numbers = TensorData::new(numbers, shape).convert_dtype(self.dtype.into());
        Array::<B>(B::float_from_data(numbers, &self.device))
    }

    pub fn indices(&self, indices: Vec<i32>) -> IntTensor<B> {
        upload::indices::<B>(&self.device, indices)
    }

    /// Casts to the dtype of all computations.
    pub fn accumulate(&self, x: FloatTensor<B>) -> Array<B> {
        Array::<B>(x).cast(self.dtype)
    }

    pub fn tile_inputs(&self, inputs: AttentionInputs<B>) -> TiledInputs<B> {
        let AttentionInputs { q, k, v, scores } = inputs;
        let relative = scores.relative_bias.into_option();
        TiledInputs {
            q: self.tile(self.accumulate(q) * self.scale),
            k: self.tile(self.accumulate(k)),
            v: self.tile(self.accumulate(v)),
            bias: (scores.bias.into_option()).map(|bias| self.tile_bias(self.accumulate(bias))),
            relative: relative.map(|table| Array::<B>(table).flat()),
        }
    }

    /// Converts `[batch, heads, seq, dim]` to `[tiles, b · dim]`.
    pub fn tile(&self, x: Array<B>) -> Array<B> {
        tile(x, self.b)
    }

    /// Converts tiles of queries to `[batch, heads, seq_q, dim]`.
    pub fn untile_queries(&self, x: Array<B>) -> Array<B> {
        untile(x, [self.batch, self.heads, self.seq_q], self.b)
    }

    /// Converts tiles of keys to `[batch, kv_heads, seq_kv, dim]`.
    pub fn untile_keys(&self, x: Array<B>) -> Array<B> {
        untile(x, [self.batch, self.kv_heads, self.seq_kv], self.b)
    }

    /// Gathers the chunk's queries: `[T, b, dim]`.
    pub fn gather_queries(&self, tiles: &Array<B>, chunk: &Chunk) -> Array<B> {
        let dim = tiles.shape()[1] / self.b;
        let rows = (tiles.clone()).select(0, self.indices(chunk.query_tiles(self)));
        rows.reshape([chunk.tiles.len(), self.b, dim])
    }

    /// Gathers the chunk's keys or values: `[T, L·b, dim]`.
    pub fn gather_keys(&self, tiles: &Array<B>, chunk: &Chunk) -> Array<B> {
        let dim = tiles.shape()[1] / self.b;
        let rows = (tiles.clone()).select(0, self.indices(chunk.key_tiles(self)));
        rows.reshape([chunk.tiles.len(), chunk.shape.entries * self.b, dim])
    }

    /// Adds `rows`, reshaped to the target's width, to the rows `places` of the target, in order.
    pub fn add_rows(&self, target: Array<B>, places: Vec<i32>, rows: Array<B>) -> Array<B> {
        let rows = rows.reshape([places.len(), target.shape()[1]]).0;
        let (places, add) = (self.indices(places), IndexingUpdateOp::Add);
        Array::<B>(B::float_select_assign(target.0, 0, places, rows, add))
    }

    /// Returns the masked pairs of the chunk's partial blocks: `[T, b, P·b]`.
    pub fn blocked(&self, chunk: &Chunk) -> BoolTensor<B> {
        let (tiles, partial, b) = (chunk.tiles.len(), chunk.shape.partial, self.b);
        let masks = self.indices(chunk.entries(|_, entry| entry.mask as i32, partial));
        let blocked = B::bool_select(self.layout.blocked.clone(), 0, masks);
        let blocked = B::bool_reshape(blocked, Shape::new([tiles, partial, b, b]));
        let blocked = B::bool_permute(blocked, &[0, 2, 1, 3]);
        B::bool_reshape(blocked, Shape::new([tiles, b, partial * b]))
    }

    /// Returns `key − query` of each pair in positions: `[T, b, L·b]`.
    fn distances(&self, chunk: &Chunk) -> IntTensor<B> {
        let (tiles, b) = (chunk.tiles.len(), self.b as i32);
        let offset = self.seq_kv as i32 - self.seq_q as i32;
        let queries = chunk.rows(self.b).map(|row| row as i32 + offset);
        let queries = self.indices(queries.collect());
        let first_keys = chunk.entries(|_, entry| entry.kv_block as i32 * b, chunk.shape.entries);
        let keys = (first_keys.iter()).flat_map(|first| (0..b).map(move |column| first + column));
        let keys = self.indices(keys.collect());
        let queries = B::int_reshape(queries, Shape::new([tiles, self.b, 1]));
        let keys = B::int_reshape(keys, Shape::new([tiles, 1, chunk.shape.entries * self.b]));
        B::int_sub(keys, queries)
    }

    /// Returns `slope · |distance|` of each pair: `[T, b, L·b]`.
    pub fn alibi_penalty(&self, slopes: &[f64], chunk: &Chunk) -> Array<B> {
        let distances = B::int_abs(self.distances(chunk));
        let slopes: Vec<f64> = (chunk.tiles.iter())
            .map(|placed| slopes[placed.head])
            .collect();
        let slopes = self.numbers(slopes, [chunk.tiles.len(), 1, 1]);
        Array::<B>(B::int_into_float(distances, self.dtype)) * slopes
    }

    /// Returns the relative bias of each pair: `[T, b, L·b]`.
    pub fn gather_relative(&self, table: &Array<B>, chunk: &Chunk) -> Array<B> {
        let [heads, width] = self.relative;
        let reach = (width / 2) as i32;
        let distances = B::int_clamp(self.distances(chunk), (-reach).into(), reach.into());
        let shape = distances.shape();
        let zero = |placed: &Placed| (placed.head % heads * width) as i32 + reach;
        let zeros = self.indices(chunk.tiles.iter().map(zero).collect());
        let zeros = B::int_reshape(zeros, Shape::new([chunk.tiles.len(), 1, 1]));
        let places = B::int_add(distances, zeros);
        let places = B::int_reshape(places, Shape::new([shape.num_elements()]));
        table.clone().select(0, places).reshape(shape)
    }

    /// Returns the dropout factors of the probabilities, `[T, b, L·b]`, or `None` without dropout.
    pub fn dropout_factors(&self, chunk: &Chunk) -> Option<Array<B>> {
        let dropout = self.dropout?;
        let dropout = Dropout::new(dropout.probability, dropout.seed.value());
        let (b, factor) = (self.b, dropout.factor());
        let mut factors = Vec::with_capacity(chunk.tiles.len() * chunk.shape.entries * b * b);
        for placed in &chunk.tiles {
            for query in placed.tile.q_block * b..(placed.tile.q_block + 1) * b {
                for entry in &placed.tile.entries {
                    let first = entry.kv_block as usize * b / 8;
                    let kept = (first..first + b / 8).flat_map(|eight| {
                        dropout.keeps_eight(placed.batch, placed.head, query, eight)
                    });
                    factors.extend(kept.map(|kept| if kept { factor } else { 0.0 }));
                }
            }
        }
        let shape = [chunk.tiles.len(), b, chunk.shape.entries * b];
        Some(self.numbers(factors, shape))
    }

    /// Returns the number of query blocks with separate biases, and the rows of each.
    fn bias_blocks(&self) -> [usize; 2] {
        match self.bias[2] {
            1 => [1, 1],
            _ => [self.q_blocks, self.b],
        }
    }

    /// Converts `[batch or 1, heads or 1, seq_q or 1, seq_kv]` to one row per block, with ragged ends padded with zeros.
    fn tile_bias(&self, bias: Array<B>) -> Array<B> {
        let ([batch, heads, ..], b) = (self.bias, self.b);
        let [blocks, rows] = self.bias_blocks();
        let bias = pad(pad(bias, 2, blocks * rows), 3, self.kv_blocks * b);
        let bias = bias.reshape([batch * heads, blocks, rows, self.kv_blocks, b]);
        let blocks = batch * heads * blocks * self.kv_blocks;
        bias.swap(2, 3).reshape([blocks, rows * b])
    }

    /// Inverts [`Self::tile_bias`].
    pub fn untile_bias(&self, rows_of_blocks: Array<B>) -> Array<B> {
        let ([batch, heads, seq_q, seq_kv], b) = (self.bias, self.b);
        let [blocks, rows] = self.bias_blocks();
        let shape = [batch * heads, blocks, self.kv_blocks, rows, b];
        let bias = rows_of_blocks.reshape(shape).swap(2, 3);
        let bias = bias.reshape([batch, heads, blocks * rows, self.kv_blocks * b]);
        bias.narrow(2, 0..seq_q).narrow(3, 0..seq_kv)
    }

    /// Returns the bias of each pair: `[T, b, L·b]`, or `[T, 1, L·b]` if all queries share it.
    pub fn gather_bias(&self, bias: &Array<B>, chunk: &Chunk) -> Array<B> {
        let [_, rows] = self.bias_blocks();
        self.gather_blocks(bias, chunk.bias_places(self), rows, chunk)
    }

    /// Gathers blocks of `rows` rows, with the blocks of a tile side by side: `[T, rows, L·b]`.
    fn gather_blocks(
        &self,
        blocks: &Array<B>,
        places: Vec<i32>,
        rows: usize,
        chunk: &Chunk,
    ) -> Array<B> {
        let (tiles, entries, b) = (chunk.tiles.len(), chunk.shape.entries, self.b);
        let blocks = blocks.clone().select(0, self.indices(places));
        let blocks = blocks.reshape([tiles, entries, rows, b]).swap(1, 2);
        blocks.reshape([tiles, rows, entries * b])
    }

    /// Converts gradients of the scores, `[T, b, L·b]`, to gradients of the bias: one row per block, summed over queries if they share the bias.
    pub fn bias_rows(&self, ds: Array<B>, chunk: &Chunk) -> Array<B> {
        let (tiles, entries) = (chunk.tiles.len(), chunk.shape.entries);
        match self.bias[2] {
            1 => ds.sum_dim(1).reshape([tiles * entries, self.b]),
            _ => self.split_blocks(ds, chunk),
        }
    }

    /// Returns which queries of the chunk have no allowed key: `[T, b, 1]`.
    pub fn empty_rows(&self, chunk: &Chunk) -> BoolTensor<B> {
        recording::doom_by_upload(&self.device, "indices of the reference");
        let rows: Vec<bool> = (chunk.tiles.iter())
            .flat_map(|placed| placed.tile.empty_rows.iter().copied())
            .collect();
        let shape = [chunk.tiles.len(), self.b, 1];
        // In the backend's storage type for bools, which is that of the layout's tensor.
        let rows = TensorData::new(rows, shape).convert_dtype(self.layout.blocked.dtype());
        B::bool_from_data(rows, &self.device)
    }

    /// Returns the number of rows and the width of the stored weights as a matrix: `[batch · blocks, b²]`.
    pub fn weight_rows(&self) -> [usize; 2] {
        let [batch, blocks, b, _] = weights::shape(&self.layout.host, self.batch);
        [batch * blocks, b * b]
    }

    /// Converts `[T, b, L·b]` to one row per block, `[T·L, b²]`.
    pub fn split_blocks(&self, p: Array<B>, chunk: &Chunk) -> Array<B> {
        let (tiles, entries, b) = (chunk.tiles.len(), chunk.shape.entries, self.b);
        let p = p.reshape([tiles, b, entries, b]).swap(1, 2);
        p.reshape([tiles * entries, b * b])
    }

    /// Gathers stored weights to `[T, b, L·b]`, the inverse of [`Self::split_blocks`].
    pub fn gather_weights(&self, weights: &Array<B>, chunk: &Chunk) -> Array<B> {
        self.gather_blocks(weights, chunk.weight_places(self), self.b, chunk)
    }
}

impl Chunk<'_> {
    /// Returns the row of each tile in the tiled queries.
    pub fn query_tiles<B: Backend>(&self, problem: &Problem<B>) -> Vec<i32> {
        let place =
            |p: &Placed| (p.batch * problem.heads + p.head) * problem.q_blocks + p.tile.q_block;
        self.tiles.iter().map(|p| place(p) as i32).collect()
    }

    /// Returns the row of each key block of each tile in the tiled keys.
    pub fn key_tiles<B: Backend>(&self, problem: &Problem<B>) -> Vec<i32> {
        let group = problem.heads / problem.kv_heads;
        let place = |p: &Placed, entry: &TileEntry| {
            let first = (p.batch * problem.kv_heads + p.head / group) * problem.kv_blocks;
            (first + entry.kv_block as usize) as i32
        };
        self.entries(place, self.shape.entries)
    }

    /// Returns the tiles that contain one of `queries`, if there are any.
    pub fn with_queries(self, queries: &Range<usize>, b: usize) -> Option<Self> {
        let has = |placed: &Placed| {
            let first = placed.tile.q_block * b;
            first < queries.end && queries.start < first + b
        };
        let tiles: Vec<_> = self.tiles.into_iter().filter(has).collect();
        (!tiles.is_empty()).then_some(Self {
            shape: self.shape,
            tiles,
        })
    }

    /// Returns the query of each row of each tile.
    pub fn rows(&self, b: usize) -> impl Iterator<Item = usize> {
        self.tiles.iter().flat_map(move |placed| {
            let first = placed.tile.q_block * b;
            first..first + b
        })
    }

    /// Returns the row of each key block of each tile among the block columns of all heads.
    pub fn column_places<B: Backend>(&self, problem: &Problem<B>) -> Vec<i32> {
        let place = |p: &Placed, entry: &TileEntry| {
            let head = p.batch * problem.heads + p.head;
            (head * problem.kv_blocks + entry.kv_block as usize) as i32
        };
        self.entries(place, self.shape.entries)
    }

    /// Returns the row of each block of each tile among the block diagonals of all heads.
    pub fn diagonal_places<B: Backend>(&self, problem: &Problem<B>) -> Vec<i32> {
        let lines = problem.q_blocks + problem.kv_blocks - 1;
        let place = |p: &Placed, entry: &TileEntry| {
            let head = p.batch * problem.heads + p.head;
            let line = p.tile.q_block + problem.kv_blocks - 1 - entry.kv_block as usize;
            (head * lines + line) as i32
        };
        self.entries(place, self.shape.entries)
    }

    /// Returns the row of each block of each tile in the tiled bias.
    pub fn bias_places<B: Backend>(&self, problem: &Problem<B>) -> Vec<i32> {
        let [batch, heads, ..] = problem.bias;
        let [blocks, _] = problem.bias_blocks();
        let place = |p: &Placed, entry: &TileEntry| {
            let slice = (p.batch % batch) * heads + p.head % heads;
            let block = slice * blocks + p.tile.q_block % blocks;
            (block * problem.kv_blocks + entry.kv_block as usize) as i32
        };
        self.entries(place, self.shape.entries)
    }

    /// Returns the row of each block of each tile in the stored weights.
    pub fn weight_places<B: Backend>(&self, problem: &Problem<B>) -> Vec<i32> {
        let host = &problem.layout.host;
        let [_, blocks, ..] = weights::shape(host, problem.batch);
        let place = |p: &Placed, entry: &TileEntry| {
            let offsets = &problem.weight_offsets[p.batch % problem.weight_offsets.len()];
            let row = host.row_offsets(p.tile.pattern)[p.tile.q_block];
            (p.batch * blocks + offsets[p.head] + row + entry.rank as usize) as i32
        };
        self.entries(place, self.shape.entries)
    }

    /// Returns `place` of the first `count` entries of each tile.
    fn entries(&self, place: impl Fn(&Placed, &TileEntry) -> i32, count: usize) -> Vec<i32> {
        (self.tiles.iter())
            .flat_map(|p| p.tile.entries[..count].iter().map(|entry| place(p, entry)))
            .collect()
    }
}
