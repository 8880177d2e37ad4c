//! Native sparse attention (NSA: Yuan et al., 2025): each query sees all earlier tokens in compressed form, a few uncompressed blocks of them, and a window.

// mod             the three branches and their sum
// options         parameters
// windows         the token blocks to compress
// attention_sums  attention of key blocks via compressed blocks, used for selection
// by_kernel       attention sums and selection in one kernel
// strides         queries at arbitrary positions, over compressed keys in pages

mod attention_sums;
#[cfg(feature = "cube")]
mod by_kernel;
mod options;
mod strides;
mod windows;

use blocksparse::{BLOCK_SIZES, BlockLayout, BlockMask, LayoutShape, Pattern, ScoreGrid};

use crate::gates::{gated_plan, gated_sum};
use crate::selection::estimator::EstimateGrid;
use crate::selection::layouts::LayoutCache;
use crate::selection::lists::attention_of_choice;
use crate::selection::query_lists::{ListSizes, SelectedBlocks};
use attention_sums::AttentionSums;
use burn_blocksparse::internal::prelude::*;
use burn_blocksparse::{AttentionOptions, SparseAttentionCall};
pub use options::NsaOptions;
pub use strides::NsaStrides;

/// Native sparse attention (Yuan et al., 2025, §3): three branches, each with its own keys and values. Their outputs are added with a gate per query, head and
/// branch.
///
/// ```text
/// compressed   softmax over compressed blocks i with i · stride + block ≤ position + 1, of φ(keys of the block), φ(values of the block)
/// selected     softmax over the keys of `keep` blocks J of selected_block keys: the first, the nearest two, and those with the largest
///              Σ over the group's heads h and compressed i of p_compressed[h, i] · overlap(i, J)
/// window       softmax over the last `window` keys
/// ```
///
/// Queries see no later tokens in any branch, and select by earlier ones. The heads of a KV head share a selection. The selection has no gradient; the
/// compression is trained through the compressed branch. `overlap(i, J)` is the number of tokens that compressed block i has in J, divided by `stride` (the
/// paper's equation 9).
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_sparse_select::nsa::{Nsa, NsaKeysValues, NsaOptions};
///
/// let device = Device::flex().autodiff();
/// let random = |heads, width| {
///     Tensor::<4>::random([1, heads, 256, width], Distribution::Default, &device).require_grad()
/// };
/// let options = NsaOptions::default().block(16).stride(8).selected_block(16).keep(5).window(32);
/// let nsa = Nsa::new(options)?;
/// let (q, k, v) = (random(4, 16), random(2, 16), random(2, 16));
/// // All branches see the same keys and values; a model has projections of its own for each.
/// let keys_values = NsaKeysValues::shared(k.clone(), v).compressed_by_means(&nsa)?;
/// let gates = random(4, 3);
/// let out = nsa.attention(q, keys_values, gates)?;
/// assert_eq!(out.dims(), [1, 4, 256, 16]);
/// let gradients = out.sum().backward();
/// assert_eq!(k.grad(&gradients).unwrap().dims(), [1, 2, 256, 16]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Nsa {
    options: NsaOptions,
    layouts: LayoutCache,
    /// True to leave out the kernel of attention sums.
    #[cfg_attr(not(feature = "cube"), allow(dead_code))]
    is_general: bool,
}

/// Keys and values of the branches of [`Nsa`], each `[batch, kv_heads, rows, width]`. Keys are as wide as queries, and all values are equally wide.
#[derive(Clone, Debug)]
pub struct NsaKeysValues {
    /// Keys and values of compressed blocks, [`Nsa::entries`] rows. `None` if the sequence is shorter than a block.
    pub compressed: Option<[Tensor<4>; 2]>,
    /// Keys and values of the selected branch, one row per token.
    pub selected: [Tensor<4>; 2],
    /// Keys and values of the window, one row per token.
    pub window: [Tensor<4>; 2],
}

impl NsaKeysValues {
    /// Creates keys and values that the window and the selected branch share, without compressed ones.
    pub fn shared(key: Tensor<4>, value: Tensor<4>) -> Self {
        Self {
            compressed: None,
            selected: [key.clone(), value.clone()],
            window: [key, value],
        }
    }

    /// Sets the compressed keys and values to block means of the selected branch's.
    ///
    /// # Errors
    /// Those of [`Nsa::means`].
    pub fn compressed_by_means(mut self, nsa: &Nsa) -> Result<Self, OpError> {
        let [k, v] = self.selected.clone();
        self.compressed = match (nsa.means(k)?, nsa.means(v)?) {
            (Some(k), Some(v)) => Some([k, v]),
            _ => None,
        };
        Ok(self)
    }
}

/// Outputs of the branches of [`Nsa`], each `[batch, heads, seq_q, value_dim]`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NsaBranches {
    /// Output over compressed blocks. `None` (zeros) if the sequence is shorter than a block.
    pub compressed: Option<Tensor<4>>,
    /// Output of the selected branch.
    pub selected: Tensor<4>,
    /// Output of the window. `None` (zeros) if the window is off.
    pub window: Option<Tensor<4>>,
}

impl NsaBranches {
    /// Number of branches.
    pub const COUNT: usize = 3;

    /// Creates the outputs of the compressed branch, the selected one and the window.
    pub fn new(
        compressed: Option<Tensor<4>>,
        selected: Tensor<4>,
        window: Option<Tensor<4>>,
    ) -> Self {
        Self {
            compressed,
            selected,
            window,
        }
    }

    /// Sums the branches, each times its gate, in f32 (f64 for f64), and rounds once. This is one node of the autodiff graph; kernels need one launch forward
    /// and one backward. Deterministic.
    ///
    /// # Shapes
    /// - `gates`: `[batch, heads, seq_q, 3]` for the compressed branch, the selected one and the window, in any float dtype
    /// - result: `[batch, heads, seq_q, value_dim]`, in the branches' dtype
    ///
    /// # Errors
    /// [`OpError`] if shapes, dtypes or devices do not match.
    pub fn gated(self, gates: Tensor<4>) -> Result<Tensor<4>, OpError> {
        self.check(&gates)?;
        Ok(gated_sum(
            [self.compressed, Some(self.selected), self.window],
            gates,
        ))
    }

    /// Returns the plan of [`Self::gated`] and its backward pass, which can be printed.
    ///
    /// # Errors
    /// Those of [`Self::gated`].
    pub fn explain_gated(&self, gates: &Tensor<4>) -> Result<OpPlan, OpError> {
        self.check(gates)?;
        Ok(gated_plan(&self.selected, gates))
    }

    fn check(&self, gates: &Tensor<4>) -> Result<(), OpError> {
        let of = &self.selected;
        let device = of.device();
        served(&device)?;
        let [batch, heads, seq_q, _] = of.dims();
        let expected = [batch, heads, seq_q, Self::COUNT];
        OpError::expect_same("gates' shape", expected, "q's rows and 3", gates.dims())?;
        same_device("gates' device", &device, "the branches'", &gates.device())?;
        let whose = "the selected one's";
        for other in self.compressed.iter().chain(&self.window) {
            OpError::expect_same("a branch's shape", of.dims(), whose, other.dims())?;
            OpError::expect_same("a branch's dtype", of.dtype(), whose, other.dtype())?;
            same_device("a branch's device", &device, whose, &other.device())?;
        }
        Ok(())
    }
}

impl Nsa {
    /// Creates the attention with these options.
    ///
    /// # Errors
    /// [`OpError`] if a parameter is out of its range, see [`NsaOptions`].
    pub fn new(options: NsaOptions) -> Result<Self, OpError> {
        options.check()?;
        Ok(Self {
            options,
            layouts: LayoutCache::default(),
            is_general: false,
        })
    }

    /// Disables the kernel that computes attention sums and selects by them. For measurements and comparisons.
    pub fn without_importance_kernel(self) -> Self {
        Self {
            is_general: true,
            ..self
        }
    }

    /// Returns the plan of a call's importance scores, with the reason if the selecting kernel does not run. It can be printed.
    ///
    /// # Errors
    /// Those of [`Self::attention`].
    pub fn explain(&self, q: &Tensor<4>, keys_values: &NsaKeysValues) -> Result<OpPlan, OpError> {
        Call::new(self, q, keys_values)?;
        let [batch, heads, seq_q, _] = q.dims();
        let no_lse = || Tensor::empty([batch, heads, seq_q], &q.device());
        let compressed = keys_values.compressed.clone();
        let compressed = compressed.map(|keys_values| (keys_values, no_lse()));
        let attention_sums = AttentionSums::new(self, q, &keys_values.selected[0], compressed);
        Ok(attention_sums.op_plan())
    }

    /// Returns the options.
    pub fn options(&self) -> &NsaOptions {
        &self.options
    }

    /// Computes the sum of the branches, each times its gate. Reads nothing back where kernels run.
    ///
    /// Forward keeps at most 64 MiB of scores in memory. If queries are packed by block, heads are processed in parts of at least one head, so that packed
    /// queries and their outputs have up to 2³¹ elements. In training the graph stores those of all heads,
    /// `(keep − 3) · seq_q · heads · (head_dim + value_dim)` elements.
    ///
    /// # Shapes
    /// - `q`: `[batch, heads, seq_q, head_dim]`; the last query is at the position of the last key
    /// - `gates`: `[batch, heads, seq_q, 3]` for the compressed branch, the selected one and the window; the paper uses sigmoids
    /// - result: `[batch, heads, seq_q, value_dim]`
    ///
    /// # Errors
    /// [`OpError`] if shapes, dtypes or devices do not match.
    pub fn attention(
        &self,
        q: Tensor<4>,
        keys_values: NsaKeysValues,
        gates: Tensor<4>,
    ) -> Result<Tensor<4>, OpError> {
        self.branches(q, keys_values)?.gated(gates)
    }

    /// Computes the branches without summing them.
    ///
    /// # Errors
    /// Those of [`Self::attention`].
    pub fn branches(
        &self,
        q: Tensor<4>,
        keys_values: NsaKeysValues,
    ) -> Result<NsaBranches, OpError> {
        let call = Call::new(self, &q, &keys_values)?;
        let options = self.attention_options();
        let NsaKeysValues {
            compressed,
            selected,
            window,
        } = keys_values;
        let [_, heads, ..] = q.dims();
        let (by_entries, lse) = self.of_entries(&call, &q, &compressed)?.unzip();
        let [k, v] = selected;
        let forced = self.options.forced;
        let near = self.forced_of(&call.grid, heads)?;
        let lists = match ListSizes::new(call.grid, self.options.keep, forced) {
            None => None,
            Some(sizes) => {
                let attention_sums = AttentionSums::new(self, &q, &k, compressed.zip(lse));
                Some(attention_sums.lists(&sizes)?)
            }
        };
        let (selected, _) = attention_of_choice([q.clone(), k, v], &near, lists, &options)?;
        let window = match self.options.window {
            0 => None,
            width => {
                let shape = LayoutShape {
                    block_size: block_for(width),
                    ..*near.shape()
                };
                let layout = self.layouts.of_pattern(&Pattern::local(width), shape)?;
                let [k, v] = window;
                let (out, _) = SparseAttentionCall::new(q, k, v, &layout)
                    .options(options)
                    .run_with_lse()?;
                Some(out)
            }
        };
        Ok(NsaBranches {
            compressed: by_entries,
            selected,
            window,
        })
    }

    /// Computes the attention to compressed blocks only. `None` if the sequence is shorter than a block.
    ///
    /// # Errors
    /// Those of [`Self::attention`].
    pub fn compressed_branch(
        &self,
        q: Tensor<4>,
        keys_values: &NsaKeysValues,
    ) -> Result<Option<Tensor<4>>, OpError> {
        let call = Call::new(self, &q, keys_values)?;
        let found = self.of_entries(&call, &q, &keys_values.compressed)?;
        Ok(found.map(|(out, _)| out))
    }

    /// Returns the attention to compressed blocks and its lse, if there are any.
    fn of_entries(
        &self,
        call: &Call,
        q: &Tensor<4>,
        compressed: &Option<[Tensor<4>; 2]>,
    ) -> Result<Option<(Tensor<4>, Tensor<3>)>, OpError> {
        let Some([k, v]) = compressed.clone() else {
            return Ok(None);
        };
        let layout = self.entries_layout(call)?;
        SparseAttentionCall::new(q.clone(), k, v, &layout)
            .options(self.attention_options())
            .run_with_lse()
            .map(Some)
    }

    /// Returns the attention that blocks of [`NsaOptions::selected_block`] keys receive in compressed form, summed over the heads that share a selection.
    /// Queries select blocks by it. Entries of blocks that a query does not see are unspecified.
    ///
    /// # Shapes
    /// - `q`, `keys_values`: see [`Self::attention`]
    /// - result: `[batch, kv_heads, seq_q, blocks]`, f32, without autodiff
    ///
    /// # Errors
    /// Those of [`Self::attention`].
    pub fn block_importance(
        &self,
        q: Tensor<4>,
        keys_values: &NsaKeysValues,
    ) -> Result<Tensor<4>, OpError> {
        let rows = 0..q.dims()[2];
        self.attention_sums(q, keys_values)?.of_rows(rows)
    }

    /// Returns the inputs of a call's attention sums, without autodiff.
    fn attention_sums(
        &self,
        q: Tensor<4>,
        keys_values: &NsaKeysValues,
    ) -> Result<AttentionSums<'_>, OpError> {
        let call = Call::new(self, &q, keys_values)?;
        let q = q.without_autodiff();
        let compressed = keys_values.compressed.clone();
        let compressed = compressed.map(|keys_values| keys_values.map(Tensor::without_autodiff));
        let lse = self.of_entries(&call, &q, &compressed)?.map(|(_, lse)| lse);
        let compressed = compressed.zip(lse);
        let k = &keys_values.selected[0];
        Ok(AttentionSums::new(self, &q, k, compressed))
    }

    /// Returns the blocks that every query selects in addition to the forced ones, and the queries of each block, in lists per KV head. `None` if there is
    /// nothing to select.
    ///
    /// # Errors
    /// Those of [`Self::attention`].
    pub fn query_lists(
        &self,
        q: Tensor<4>,
        keys_values: &NsaKeysValues,
    ) -> Result<Option<SelectedBlocks>, OpError> {
        let call = Call::new(self, &q, keys_values)?;
        let sizes = ListSizes::new(call.grid, self.options.keep, self.options.forced);
        match sizes {
            None => Ok(None),
            Some(sizes) => self.attention_sums(q, keys_values)?.lists(&sizes).map(Some),
        }
    }

    /// Returns the layout of the forced blocks for queries `[batch, heads, seq_q, head_dim]` and `seq_kv` keys. With the [lists](Self::query_lists) it makes up
    /// the selected branch.
    ///
    /// # Errors
    /// [`OpError`] if there is no query, or if there are more queries than keys.
    pub fn forced_layout(
        &self,
        [_, heads, seq_q, _]: [usize; 4],
        seq_kv: usize,
    ) -> Result<BlockLayout, OpError> {
        crate::selection::check_seq_q("seq_q", seq_q, seq_kv)?;
        let grid = EstimateGrid::by_query(self.options.selected_block).of([seq_q, seq_kv], true);
        self.forced_of(&grid, heads)
    }

    fn forced_of(&self, grid: &ScoreGrid, heads: usize) -> Result<BlockLayout, OpError> {
        let shape = LayoutShape::new(
            heads,
            [grid.seq_q, grid.seq_kv],
            grid.block.min(BLOCK_SIZES[BLOCK_SIZES.len() - 1]),
        );
        self.layouts.of_forced(grid, self.options.forced, shape)
    }

    fn attention_options(&self) -> AttentionOptions {
        let options = AttentionOptions::default()
            .precision(self.options.precision)
            .dispatch_mode(self.options.dispatch_mode);
        match self.options.scale {
            Some(scale) => options.scale(scale),
            None => options,
        }
    }

    fn entries_layout(&self, call: &Call) -> Result<BlockLayout, OpError> {
        let shape = LayoutShape::new(
            call.heads,
            [call.grid.seq_q, self.entries(call.grid.seq_kv)],
            block_for(self.entries(call.grid.seq_kv)),
        );
        let [first, _] = call.grid.positions(0);
        let NsaOptions { block, stride, .. } = self.options;
        let seen = format!("blocks of {block} every {stride} from position {first}");
        let make = || of_entries(&seen, shape, [block, stride], first);
        self.layouts.get(seen.clone(), shape, make)
    }
}

/// Sizes of a checked call.
struct Call {
    heads: usize,
    grid: ScoreGrid,
}

impl Call {
    fn new(nsa: &Nsa, q: &Tensor<4>, keys_values: &NsaKeysValues) -> Result<Self, OpError> {
        let [_, heads, seq_q, _] = q.dims();
        let [k, v] = &keys_values.selected;
        crate::selection::check_shapes(q, k)?;
        let seq_kv = k.dims()[2];
        crate::selection::check_seq_q("seq_q", seq_q, seq_kv)?;
        let entries = nsa.entries(seq_kv);
        let got = (keys_values.compressed.as_ref()).map_or(0, |[k, _]| k.dims()[2]);
        let of_them = "the blocks of so many keys that are compressed";
        OpError::expect_same("compressed keys", entries, of_them, got)?;
        let [of_window, _] = &keys_values.window;
        let got = of_window.dims()[2];
        OpError::expect_same("window's keys", seq_kv, "the selected ones", got)?;
        let width = v.dims()[3];
        let others = keys_values.compressed.iter().chain([&keys_values.window]);
        for [_, v] in others {
            let got = v.dims()[3];
            OpError::expect_same("value_dim of a branch", width, "the selected one's", got)?;
        }
        Ok(Self {
            heads,
            grid: EstimateGrid::by_query(nsa.options.selected_block).of([seq_q, seq_kv], true),
        })
    }
}

/// Returns the widest block size of layouts of which at least four fit `keys`.
fn block_for(keys: usize) -> usize {
    let fitting = BLOCK_SIZES.into_iter().filter(|block| block * 4 <= keys);
    fitting.max().unwrap_or(BLOCK_SIZES[0])
}

/// Returns the layout of queries from position `first` on over compressed blocks of `block` tokens, which start every `stride` tokens.
pub(crate) fn of_entries(
    name: &str,
    shape: LayoutShape,
    [block, stride]: [usize; 2],
    first: i64,
) -> Result<BlockLayout, OpError> {
    let b = shape.block_size;
    let last_token = |entry: usize| (entry * stride + block) as i64 - 1;
    let is_seen = |query: usize, entry: usize| last_token(entry) <= query as i64 + first;
    let one = LayoutShape { heads: 1, ..shape };
    let layout = BlockLayout::from_block_fn(name, one, |_, q_block, kv_block| {
        let (from, to) = (q_block * b, ((q_block + 1) * b).min(shape.seq_q) - 1);
        let entries = (kv_block * b, ((kv_block + 1) * b).min(shape.seq_kv) - 1);
        if !is_seen(to, entries.0) {
            return None;
        }
        Some(match is_seen(from, entries.1) {
            true => BlockMask::corner(b, b, b),
            false => BlockMask::from_fn(b, |row, column| is_seen(from + row, entries.0 + column)),
        })
    })?;
    Ok(layout.of_first_head(shape.heads)?)
}
