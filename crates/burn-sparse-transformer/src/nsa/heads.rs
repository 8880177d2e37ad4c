//! Heads of native sparse attention.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, RotaryEncoding};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Int, Tensor};
use burn_sparse_select::nsa::{Nsa, NsaBranches, NsaKeysValues};

use super::{Compression, NsaCompressor, NsaHeadsConfig};
use crate::error::Result;
use crate::heads::{HeadNorm, Positions, rotate_apart};
use crate::linear::linear_flops;
use crate::precision::project_heads;
use crate::{Precision, SparseMhaCache, SparseMultiHeadAttentionConfig};
use burn_blocksparse::internal::arange;

/// Heads of native sparse attention (Yuan et al., 2025): projections of the compressed branch and the window, compression, and gates. Queries, and
/// keys and values of the selected branch, are those of the layer.
#[derive(Module, Debug)]
pub struct NsaHeads {
    /// Projections of the keys and values to compress. `None` if branches share theirs.
    pub compressed: Option<NsaProjections>,
    /// Projections of the window's keys and values. `None` if branches share theirs, or there is no window.
    pub window: Option<NsaProjections>,
    /// Projection from `d_model` to `3 · n_heads`: for each head the gates of compressed blocks, selected blocks and the window, before their sigmoids.
    pub gate: Linear,
    /// Network that compresses keys; without it, they are averaged.
    pub key_compressor: Option<NsaCompressor>,
    /// Network that compresses values; without it, they are averaged.
    pub value_compressor: Option<NsaCompressor>,
    n_kv_heads: usize,
    #[module(skip)]
    op: Nsa,
    #[module(skip)]
    config: NsaHeadsConfig,
    #[module(skip)]
    precision: Precision,
}

/// Key and value projections of a branch.
#[derive(Module, Debug)]
pub struct NsaProjections {
    /// Projection from `d_model` to `n_kv_heads · d_k`.
    pub key: Linear,
    /// Projection from `d_model` to `n_kv_heads · d_v`.
    pub value: Linear,
}

/// Rotations and norms of queries and keys after their projections.
pub struct Placing<'a> {
    pub(crate) norm: Option<&'a HeadNorm>,
    pub(crate) eps: f64,
    pub(crate) rope: Option<&'a RotaryEncoding>,
}

impl Placing<'_> {
    fn normed(&self, x: Tensor<4>) -> Result<Tensor<4>> {
        let dtype = x.dtype();
        Ok(match self.norm {
            Some(norm) => norm.forward(x, self.eps)?.cast(dtype),
            None => x,
        })
    }

    pub(crate) fn rotated(&self, x: Tensor<4>, positions: &Positions) -> Result<Tensor<4>> {
        let dtype = x.dtype();
        Ok(match self.rope {
            Some(rope) => rotate_apart(rope, x, positions, dtype)?,
            None => x,
        })
    }
}

/// Projected heads: queries normalised and rotated; keys and values of the selected branch as projected.
pub struct Projections {
    /// Queries of all branches.
    pub query: Tensor<4>,
    /// Keys of the selected branch.
    pub key: Tensor<4>,
    /// Values of the selected branch.
    pub value: Tensor<4>,
}

/// Keys and values of the branches, normalised, and rotated except for tokens that a network compresses.
pub struct Branches {
    /// Keys and values to compress.
    pub tokens: [Tensor<4>; 2],
    /// Keys and values of the selected branch.
    pub selected: [Tensor<4>; 2],
    /// Keys and values of the window.
    pub window: [Tensor<4>; 2],
}

impl NsaHeads {
    pub(crate) fn new(
        config: &NsaHeadsConfig,
        mha: &SparseMultiHeadAttentionConfig,
        device: &Device,
    ) -> Result<Self> {
        let (d_model, [d_k, d_v]) = (mha.d_model, mha.head_widths());
        let n_kv_heads = mha.n_kv_heads.unwrap_or(mha.n_heads);
        let linear = &|d_input: usize, d_output: usize| {
            LinearConfig::new(d_input, d_output)
                .with_initializer(mha.initializer.clone())
                .init(device)
        };
        let options = config.options().precision(mha.precision.products());
        let op = Nsa::new(match mha.scale {
            Some(scale) => options.scale(scale),
            None => options,
        })?;
        let projections = || NsaProjections {
            key: linear(d_model, n_kv_heads * d_k),
            value: linear(d_model, n_kv_heads * d_v),
        };
        let compressor = |width: usize| {
            let learns = config.compression == Compression::Mlp;
            learns.then(|| NsaCompressor::new([config.block, width], linear, device))
        };
        let own = !config.shared_kv;
        Ok(Self {
            compressed: own.then(projections),
            window: (own && config.window > 0).then(projections),
            gate: linear(d_model, NsaBranches::COUNT * mha.n_heads),
            key_compressor: compressor(d_k),
            value_compressor: compressor(d_v),
            n_kv_heads,
            op,
            config: config.clone(),
            precision: mha.precision,
        })
    }

    #[doc(hidden)]
    pub fn op(&self) -> &Nsa {
        &self.op
    }

    /// Returns the configuration.
    pub fn config(&self) -> &NsaHeadsConfig {
        &self.config
    }

    pub(crate) fn layers_mut(&mut self) -> Vec<&mut Linear> {
        let projections = [&mut self.compressed, &mut self.window];
        let projections = projections.into_iter().flatten();
        let projections = projections.flat_map(|both| [&mut both.key, &mut both.value]);
        let compressors = [&mut self.key_compressor, &mut self.value_compressor];
        let compressors = compressors.into_iter().flatten();
        let compressors =
            compressors.flat_map(|both| [&mut both.linear_inner, &mut both.linear_outer]);
        let layers = projections.chain(compressors);
        layers.chain([&mut self.gate]).collect()
    }

    /// Computes the heads' outputs for an input, `[batch, heads, seq, d_v]`.
    pub(crate) fn forward(
        &self,
        x: Tensor<3>,
        heads: Projections,
        placing: &Placing,
    ) -> Result<Tensor<4>> {
        let gates = self.gates(x.clone(), &heads.query)?;
        let query = heads.query.clone();
        let branches = self.branches(x, heads, &Positions::From(0), placing)?;
        let compressed = self.compressed(branches.tokens.clone(), 0, placing)?;
        self.attend(query, branches, compressed, gates)
    }

    /// Returns the heads' attention over whole sequences.
    #[doc(hidden)]
    pub fn attend(
        &self,
        query: Tensor<4>,
        branches: Branches,
        compressed: Option<[Tensor<4>; 2]>,
        gates: Tensor<4>,
    ) -> Result<Tensor<4>> {
        let keys_values = NsaKeysValues {
            compressed,
            selected: branches.selected,
            window: branches.window,
        };
        Ok(self.op.attention(query, keys_values, gates)?)
    }

    pub(crate) fn forward_cache(
        &self,
        x: Tensor<3>,
        heads: Projections,
        cache: &mut SparseMhaCache,
        placing: &Placing,
    ) -> Result<Tensor<4>> {
        let before = cache.len();
        let gates = self.gates(x.clone(), &heads.query)?;
        let query = heads.query.clone();
        let positions = Positions::From(before);
        let new = self.branches(x, heads, &positions, placing)?;
        let [k, v] = new.selected;
        let [k, v] = cache.append([k, v]);
        let seq = k.dims()[2];
        let NsaHeadsConfig { block, stride, .. } = self.config;
        let branches = cache.branches(block, stride);
        let tokens = branches.tokens.append(new.tokens);
        let window = match self.window {
            Some(_) => branches.window.append(new.window),
            None => [k.clone(), v.clone()],
        };
        let (known, all) = (self.op.entries(before), self.op.entries(seq));
        if all > known {
            let first = known * stride;
            let range = first..(all - 1) * stride + block;
            let tokens = tokens.map(|x| x.slice_dim(2, range.clone()));
            if let Some(pair) = self.compressed(tokens, first, placing)? {
                let _ = branches.entries.append(pair);
            }
        }
        let keys_values = NsaKeysValues {
            compressed: branches.entries.all(),
            selected: [k, v],
            window,
        };
        Ok(self.op.attention(query, keys_values, gates)?)
    }

    /// Returns the keys and values of the branches.
    #[doc(hidden)]
    pub fn branches(
        &self,
        x: Tensor<3>,
        heads: Projections,
        positions: &Positions,
        placing: &Placing,
    ) -> Result<Branches> {
        let kv_heads = self.n_kv_heads;
        let project = |of: &NsaProjections| -> Result<[Tensor<4>; 2]> {
            let layers = [&of.key, &of.value];
            let [key, value] = project_heads(self.precision, layers, x.clone(), [kv_heads; 2])?;
            Ok([placing.normed(key)?, value])
        };
        let own = [placing.normed(heads.key)?, heads.value];
        let rotated = |[key, value]: [Tensor<4>; 2]| -> Result<[Tensor<4>; 2]> {
            Ok([placing.rotated(key, positions)?, value])
        };
        let tokens = match &self.compressed {
            Some(of) => project(of)?,
            None => own.clone(),
        };
        // The mean is taken over rotated keys; a network's result is rotated itself.
        let tokens = match self.key_compressor {
            None => rotated(tokens)?,
            Some(_) => tokens,
        };
        let selected = rotated(own)?;
        let window = match &self.window {
            Some(of) => rotated(project(of)?)?,
            None => selected.clone(),
        };
        Ok(Branches {
            tokens,
            selected,
            window,
        })
    }

    /// Compresses each block of tokens to one key and one value. The first token is at position `first`.
    #[doc(hidden)]
    pub fn compressed(
        &self,
        tokens: [Tensor<4>; 2],
        first: usize,
        placing: &Placing,
    ) -> Result<Option<[Tensor<4>; 2]>> {
        let device = tokens[0].device().without_autodiff();
        let NsaHeadsConfig { block, stride, .. } = self.config;
        let last_of = |[batch, entries]: [usize; 2]| {
            let last = arange(entries, &device).mul_scalar(stride as i32);
            let last = last.add_scalar((first + block - 1) as i32);
            let last: Tensor<2, Int> = last.reshape([1, entries]).expand([batch, entries]);
            last.reshape([batch * entries])
        };
        self.compressed_at(tokens, last_of, placing)
    }

    /// [`Self::compressed`] with given positions: `last_of` returns the positions of the last tokens of blocks, `[batch · entries]`.
    #[doc(hidden)]
    pub fn compressed_at(
        &self,
        [keys, values]: [Tensor<4>; 2],
        last_of: impl FnOnce([usize; 2]) -> Tensor<1, Int>,
        placing: &Placing,
    ) -> Result<Option<[Tensor<4>; 2]>> {
        let compress = |x: Tensor<4>, by: &Option<NsaCompressor>| match by {
            None => Ok(self.op.means(x)?),
            Some(by) => match self.op.windows(x)? {
                None => Ok(None),
                Some(windows) => by.forward(windows, self.precision).map(Some),
            },
        };
        let keys = compress(keys, &self.key_compressor)?;
        let values = compress(values, &self.value_compressor)?;
        let Some((keys, values)) = keys.zip(values) else {
            return Ok(None);
        };
        if self.key_compressor.is_none() || placing.rope.is_none() {
            return Ok(Some([keys, values]));
        }
        // Rotated for the position of the block's last token.
        let [batch, _, entries, _] = keys.dims();
        let last = Positions::Listed(Box::new(last_of([batch, entries])));
        Ok(Some([placing.rotated(keys, &last)?, values]))
    }

    /// Returns the gates, `[batch, heads, seq, 3]`.
    #[doc(hidden)]
    pub fn gates(&self, x: Tensor<3>, query: &Tensor<4>) -> Result<Tensor<4>> {
        let [batch, n_heads, seq, _] = query.dims();
        let gates = self.precision.linear(&self.gate, x)?;
        let gates = gates.reshape([batch, seq, n_heads, NsaBranches::COUNT]);
        Ok(sigmoid(gates.swap_dims(1, 2)))
    }

    /// Returns the operations of projections, gates and compressors for one position, forward.
    pub(crate) fn matmul_flops_per_token(&self) -> u64 {
        let projections = [&self.compressed, &self.window];
        let projections = projections.into_iter().flatten();
        let projections = projections.flat_map(|both| [&both.key, &both.value]);
        let layers: u64 = projections.chain([&self.gate]).map(linear_flops).sum();
        let compressors = [&self.key_compressor, &self.value_compressor];
        let compressors = compressors.into_iter().flatten();
        // Each key head compresses a block for every stride.
        let of_block = |of: &NsaCompressor| {
            let block = linear_flops(&of.linear_inner) + linear_flops(&of.linear_outer);
            block * self.n_kv_heads as u64 / self.config.stride as u64
        };
        layers + compressors.map(of_block).sum::<u64>()
    }

    pub(crate) fn pairs(&self, seq: usize) -> u64 {
        let (selected_block, keep) = (self.config.selected_block, self.config.keep);
        let window = self.config.window;
        let of = |position: usize| {
            let (own, inside) = (position / selected_block, position % selected_block + 1);
            let chosen = own.min(keep - 1) * selected_block + inside;
            self.op.entries(position + 1) + chosen + window.min(position + 1)
        };
        (0..seq).map(|position| of(position) as u64).sum()
    }
}
