//! Attention of queries to lists of single keys.

use blocksparse::BlockLayout;

use crate::selection::ops::SelectionOps;
use crate::selection::parts::{checked_overlap, overlap_of};
use crate::selection::query_lists::SelectedBlocks;
use crate::selection::token_sparse::backend::{gathers, plan};
use crate::selection::token_sparse::ops::{
    QueryLists, Sparsity, TokenSparseCall, TokenSparseInputs, TokenSparseOps,
};
use crate::selection::values::UniqueKeys;
use burn_blocksparse::internal::check;
use burn_blocksparse::internal::prelude::*;
use burn_blocksparse::{AttentionOptions, DeviceLayout};

/// Indices of the keys that each query attends to, per KV head or for all heads. On the device, without autodiff, never read back.
#[derive(Clone, Debug)]
pub struct TokenIndices {
    /// Ascending and unique, then −1: `[batch, lists, queries, most]`.
    keys: Tensor<4, Int>,
    seq_kv: usize,
    causal: bool,
    overlap: f64,
}

impl SelectedBlocks {
    /// Creates lists of single keys in place of blocks: [`TokenIndices::new`] with causal visibility.
    ///
    /// # Errors
    /// Those of [`TokenIndices::new`].
    pub fn of_keys(keys: Tensor<4, Int>, seq_kv: usize) -> Result<TokenIndices, OpError> {
        TokenIndices::new(keys, seq_kv, true)
    }
}

impl TokenIndices {
    /// Creates lists from keys in any order. A key that a query lists twice counts once; indices below 0 or at least `seq_kv` are ignored. With `causal` a
    /// query does not see keys after its own position, and the last query is at the position of the last key.
    ///
    /// # Shapes
    /// - `keys`: i32 `[batch, lists, queries, most]`, where `lists` is the number of KV heads, or 1 for all of them
    ///
    /// # Errors
    /// [`OpError`] if a size is 0, or no feature of this crate serves the device.
    pub fn new(keys: Tensor<4, Int>, seq_kv: usize, causal: bool) -> Result<Self, OpError> {
        let [batch, lists, queries, most] = keys.dims();
        for (argument, size) in [
            ("keys' batch", batch),
            ("keys' lists", lists),
            ("keys' queries", queries),
            ("keys' width", most),
            ("seq_kv", seq_kv),
        ] {
            OpError::ensure_positive(argument, size)?;
        }
        served(&keys.device())?;
        let keys = keys.without_autodiff().into_dispatch();
        let call = UniqueKeys { seq_kv, causal };
        let keys = <Dispatch as SelectionOps>::unique_keys(keys, call);
        Ok(Self::of_unique(Tensor::from_dispatch(keys), seq_kv, causal))
    }

    /// Creates lists from keys that are already ascending, unique and visible.
    pub(crate) fn of_unique(keys: Tensor<4, Int>, seq_kv: usize, causal: bool) -> Self {
        Self {
            keys,
            seq_kv,
            causal,
            overlap: 0.0,
        }
    }

    /// Sets the expected overlap of the lists of adjacent queries, from 0 (disjoint) to 1 (equal), defined as in
    /// [`measure_group_reuse`](Self::measure_group_reuse). The default is 0, and .85 for lists that [`Dsa`](crate::dsa::Dsa) chooses. It affects the choice of
    /// kernels, not results: with a large overlap, adjacent queries of few heads attend to the union of their lists.
    ///
    /// # Errors
    /// [`OpError`] if it is not from 0 to 1.
    pub fn with_group_reuse(self, overlap: f64) -> Result<Self, OpError> {
        let overlap = checked_overlap(overlap)?;
        Ok(Self { overlap, ..self })
    }

    /// Returns the expected overlap of the lists of adjacent queries.
    pub fn group_reuse(&self) -> f64 {
        self.overlap
    }

    /// Measures the overlap of the lists of eight adjacent queries: `(8 − u) / 7`, where `u` is the size of their union relative to one list. It is 1 if the
    /// lists are equal, and 0 if no key is on two of them. Only groups whose queries list fewer keys than they see are counted; without such groups it is 1.
    ///
    /// Reads all lists back and counts on the host.
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_sparse_select::SelectedBlocks;
    ///
    /// // Queries list the first key, the one before them, and themselves: eight of them list ten keys.
    /// let lists = (0..64).flat_map(|query| [0, query - 1, query]);
    /// let keys = Tensor::<1, Int>::from_data(lists.collect::<Vec<i32>>().as_slice(), &Device::flex());
    /// let lists = SelectedBlocks::of_keys(keys.reshape([1, 1, 64, 3]), 64)?;
    /// assert!((lists.measure_group_reuse() - (8.0 - 10.0 / 3.0) / 7.0).abs() < 1e-9);
    /// # Ok::<(), burn_blocksparse::OpError>(())
    /// ```
    pub fn measure_group_reuse(&self) -> f64 {
        let [_, _, queries, _] = self.keys.dims();
        let seen = |query: usize| match self.causal {
            true => (query + 1 + self.seq_kv).saturating_sub(queries),
            false => self.seq_kv,
        };
        overlap_of(&self.keys, |query, listed| listed < seen(query))
    }

    /// Returns the keys that each query sees, ascending and unique, then −1: i32 `[batch, lists, queries, most]`.
    pub fn keys(&self) -> &Tensor<4, Int> {
        &self.keys
    }

    /// Returns the number of keys of the sequence.
    pub fn seq_kv(&self) -> usize {
        self.seq_kv
    }

    /// Returns whether queries see no keys after their own position.
    pub fn is_causal(&self) -> bool {
        self.causal
    }

    /// Returns the backend call of these lists.
    fn call(&self, q: &Tensor<4>, options: &AttentionOptions, dispatch: bool) -> TokenSparseCall {
        let sparsity = Sparsity::Tokens {
            causal: self.causal,
        };
        let scale = options.scale_for(q.dims()[3]);
        TokenSparseCall {
            sparsity,
            scale,
            overlap: self.overlap,
            dispatch,
        }
    }

    /// Returns the lists expanded to `kv_heads` KV heads.
    fn for_heads(self, kv_heads: usize) -> Tensor<4, Int> {
        let [batch, lists, queries, most] = self.keys.dims();
        match lists == kv_heads {
            true => self.keys,
            false => self.keys.expand([batch, kv_heads, queries, most]),
        }
    }

    /// Returns the plan of [`token_sparse_attention`] for these arguments, which can be printed.
    ///
    /// # Errors
    /// Those of [`token_sparse_attention`].
    pub fn explain(
        &self,
        q: &Tensor<4>,
        k: &Tensor<4>,
        v: &Tensor<4>,
        options: &AttentionOptions,
    ) -> Result<OpPlan, OpError> {
        check([q, k, v], self, options)?;
        let kernel_plan = kernel_plan([q, k, v], self, options);
        Ok(OpPlan::new(&q.device(), |_| kernel_plan))
    }

    /// Returns a layout that consists of the blocks of `places`, which is on the host, and of their pairs those in the lists. All options of attention work
    /// with it, such as biases, softcaps and dropout.
    ///
    /// Tiles of adjacent queries compute all blocks of `places`, whatever the lists contain. That is fast where queries list a good part of what they see, and
    /// takes one bit per pair of these blocks, in the tiles of a launch. [`token_sparse_attention`](crate::selection::token_sparse_attention) runs either this
    /// way or over the lists alone, without options. Reuse one layout `places` for all calls.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Int, Tensor};
    /// use burn_blocksparse::{Pattern, SparseAttentionCall};
    /// use burn_sparse_select::SelectedBlocks;
    ///
    /// let device = Device::flex();
    /// let x = Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &device);
    /// // Every query lists itself and the first key.
    /// let lists = (0..64).flat_map(|query| [query, 0]);
    /// let keys = Tensor::<1, Int>::from_data(lists.collect::<Vec<i32>>().as_slice(), &device);
    /// let lists = SelectedBlocks::of_keys(keys.reshape([1, 1, 64, 2]), 64)?;
    /// let places = Pattern::causal().layout(2, 64, 16)?;
    /// let layout = lists.layout(&places)?;
    /// let dense = layout.to_host()?.to_dense(0);
    /// assert!(dense[9][0] && dense[9][9] && !dense[9][5]);
    /// let call = SparseAttentionCall::new(x.clone(), x.clone(), x, &layout).softcap(20.0);
    /// let out = call.run()?.out;
    /// assert_eq!(out.dims(), [1, 2, 64, 16]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`OpError`] if the lists do not match the layout, the layout has another batch size, or it was itself made on a device.
    pub fn layout(&self, places: &BlockLayout) -> Result<DeviceLayout, OpError> {
        DeviceLayout::of_keys(places, self.keys().clone(), self.seq_kv())
    }
}

/// Computes the attention of each query to the keys that it lists: out and lse. Differentiable in q, k and v; the lists have no gradient. To attend to further
/// keys, make another call and merge both by lse ([`merge_attention`](burn_blocksparse::merge_attention)).
///
/// On GPUs with kernels for it each query attends to its own list, and the heads that share the list are the rows of a matrix.
/// [`DispatchMode::GroupByBlock`](burn_blocksparse::internal::DispatchMode::GroupByBlock) disables these kernels. Without them all logits of some queries at a
/// time are computed, and pairs that are not listed have weight 0. [`TokenIndices::explain`] says which of the two runs. Either way every element has one
/// writer, which sums in a fixed order.
///
/// ```
/// use burn::tensor::{Device, Distribution, Int, Tensor};
/// use burn_blocksparse::AttentionOptions;
/// use burn_sparse_select::{SelectedBlocks, token_sparse_attention};
///
/// let device = Device::flex();
/// let q = Tensor::<4>::random([1, 4, 64, 16], Distribution::Default, &device);
/// let [k, v] = [(); 2].map(|_| Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &device));
/// // Every query lists itself, the first key and the one before it, which query 0 does not have.
/// let lists = (0..2 * 64).flat_map(|row| [row % 64, 0, row % 64 - 1]);
/// let keys = Tensor::<1, Int>::from_data(lists.collect::<Vec<i32>>().as_slice(), &device);
/// let lists = SelectedBlocks::of_keys(keys.reshape([1, 2, 64, 3]), 64)?;
/// let (out, lse) = token_sparse_attention(q, k, v, lists, AttentionOptions::default())?;
/// assert_eq!((out.dims(), lse.dims()), ([1, 4, 64, 16], [1, 4, 64]));
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// - `q`: `[batch, heads, seq_q, head_dim]`; `k`: `[batch, kv_heads, seq_kv, head_dim]`; `v`: `[batch, kv_heads, seq_kv, value_dim]`
/// - result: out `[batch, heads, seq_q, value_dim]` and lse `[batch, heads, seq_q]`. A query that lists no key gets 0 and −∞
///
/// # Errors
/// [`OpError`] if shapes, dtypes or devices do not match each other or the lists, and for softcaps, ALiBi, dropout, stored weights and largest scores.
pub fn token_sparse_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    lists: TokenIndices,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    check([&q, &k, &v], &lists, &options)?;
    let kernel_plan = kernel_plan([&q, &k, &v], &lists, &options).is_ok();
    let call = lists.call(&q, &options, kernel_plan);
    let kv_heads = k.dims()[1];
    let inputs = TokenSparseInputs {
        q: q.into_dispatch(),
        k: k.into_dispatch(),
        v: v.into_dispatch(),
        lists: QueryLists::Tokens(lists.for_heads(kv_heads).into_dispatch()),
    };
    let output = <Dispatch as TokenSparseOps>::token_sparse_attention(inputs, call);
    let (out, lse) = (output.out, output.lse);
    Ok((Tensor::from_dispatch(out), Tensor::from_dispatch(lse)))
}

fn check(
    [q, k, v]: [&Tensor<4>; 3],
    lists: &TokenIndices,
    options: &AttentionOptions,
) -> Result<(), OpError> {
    check::tensors(q, k, v)?;
    let [batch, heads, seq_q, _] = q.dims();
    let [_, kv_heads, seq_kv, _] = k.dims();
    OpError::ensure_positive("q's seq_q", seq_q)?;
    options.validate(heads, q.dtype())?;
    crate::selection::lists::check_options(options)?;
    let expected = "none with lists of single keys";
    for (argument, given) in [
        ("options.softcap", options.softcap),
        ("options.softmax_threshold", options.softmax_threshold),
    ] {
        if let Some(given) = given {
            return Err(OpError::argument(argument, expected, given));
        }
    }
    blocksparse::ensure! { OpError; !options.max_scores => "options.max_scores", expected, true; }
    let [list_batch, of_heads, queries, _] = lists.keys.dims();
    OpError::expect_same("lists' batch", batch, "q's", list_batch)?;
    OpError::expect_same("lists' queries", seq_q, "q's", queries)?;
    OpError::expect_same("lists' seq_kv", seq_kv, "k's", lists.seq_kv)?;
    blocksparse::ensure! { OpError; of_heads == kv_heads || of_heads == 1 => "lists' heads", format!("{kv_heads}, those of k, or 1"), of_heads; }
    let device = lists.keys.device();
    check::same_device("lists' device", &q.device(), "q's", &device)
}

/// Returns the plan of the kernels, or the reason why they do not run.
fn kernel_plan(
    [q, k, v]: [&Tensor<4>; 3],
    lists: &TokenIndices,
    options: &AttentionOptions,
) -> Result<String, String> {
    gathers(q, options)?;
    let call = lists.call(q, options, true);
    Ok(plan([q, k, v], [lists.keys.dims()[3], 1], &call)?)
}
