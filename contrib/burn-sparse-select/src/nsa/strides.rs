//! Queries of sequences of unequal lengths, over compressed keys that are indexed by the stride they end with. Paged pools decode this way.
//!
//! A compressed block `[i · stride, i · stride + block)` ends with stride `s = i + block / stride − 1`. So a page of tokens holds the compressed keys of its
//! own strides, independent of the pages around it:
//!
//! ```text
//! tokens       0 1 2 3 | 4 5 6 7 | 8 9 …      stride 4, block 8
//! compressed      –    |  [0, 8) | [4, 12)    no block ends with the first stride
//! ```

use blocksparse::Always;
use burn::tensor::{Bool, DType, Int, Tensor};

use crate::nsa::Nsa;
use crate::pages::{PageChoice, topk_pages};
use crate::selection::parts::{NOTHING, padded};
use crate::selection::products;
use burn_blocksparse::OpError;

/// Score of forced blocks, above every attention sum.
const FORCED: f32 = 1e30;

/// Attention to compressed keys, and the importance scores of blocks, see [`Nsa::of_strides`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NsaStrides {
    /// Output of the compressed branch, `[batch, heads, rows, value_dim]`, in the queries' dtype. Rows that see no compressed key are 0.
    pub out: Tensor<4>,
    /// Importance of each block of [`selected_block`](crate::nsa::NsaOptions::selected_block) tokens, `[batch, kv_heads, rows, blocks]`, f32. Blocks that a
    /// query does not see have 0.
    pub importance: Tensor<4>,
}

impl Nsa {
    /// Returns the selection over pages of `page` tokens, of [`keep`](crate::nsa::NsaOptions::keep) blocks.
    ///
    /// # Errors
    /// [`OpError`] if the page size is not a power of two, does not divide the selected block, or is not a multiple of the stride.
    pub fn on_pages(&self, page: usize) -> Result<PageChoice, OpError> {
        let options = self.options();
        let (stride, selected) = (options.stride, options.selected_block);
        let fits = page.is_power_of_two() && page.is_multiple_of(stride);
        blocksparse::ensure! {
            OpError;
            fits && selected.is_multiple_of(page) => "page_size",
                format!("a power of two that {stride}, the stride of nsa, divides, and a divisor of {selected}, its selected block"), page;
        }
        Ok(PageChoice::of_blocks(page, selected / page, options.keep))
    }

    /// Computes the compressed branch of queries at arbitrary positions, and the importance scores by which they select blocks. Uses Burn's operations and sums
    /// in f32 at least.
    ///
    /// # Shapes
    /// - `q`: `[batch, heads, rows, head_dim]`
    /// - `k`, `v`: `[batch, kv_heads, strides, width]`: row `s` holds the compressed key and value of the block whose last token is `(s + 1) · stride − 1`.
    ///   Rows that no query sees may have any content
    /// - `positions`: `[batch, rows]`, the positions of the queries
    ///
    /// # Errors
    /// [`OpError`] if the shapes do not match.
    pub fn of_strides(
        &self,
        q: Tensor<4>,
        [k, v]: [Tensor<4>; 2],
        positions: &Tensor<2, Int>,
    ) -> Result<NsaStrides, OpError> {
        crate::selection::check_shapes(&q, &k)?;
        let ([batch, heads, rows, width], [_, kv_heads, strides, _]) = (q.dims(), k.dims());
        let value_width = v.dims()[3];
        let expected = [batch, kv_heads, strides, value_width];
        OpError::expect_same("v's shape", expected, "k's rows", v.dims())?;
        let got = positions.dims();
        OpError::expect_same("positions' shape", [batch, rows], "q's rows", got)?;
        let (dtype, group) = (q.dtype(), heads / kv_heads);
        let sums = match dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let [q, k, v] = [q, k, v].map(|x| x.without_autodiff().cast(sums));
        let scale = (self.options().scale).unwrap_or(1.0 / (width as f64).sqrt());
        let hidden = self.hidden_strides(positions, strides);
        let of_heads = hidden.clone().reshape([batch, 1, rows, strides]);
        let of_heads = of_heads.expand([batch, heads, rows, strides]);
        let scores = products(q * scale, k, group).mask_fill(of_heads.clone(), NOTHING);
        let top = scores.clone().max_dim(3);
        let weights = (scores - top).exp().mask_fill(of_heads, 0.0);
        let total = weights.clone().sum_dim(3).clamp_min(f32::MIN_POSITIVE);
        let p = weights / total;
        // Unseen values are replaced with 0, because 0 times NaN is NaN.
        let unseen = hidden.int().cast(DType::I32).min_dim(1).equal_elem(1);
        let unseen = unseen.reshape([batch, 1, strides, 1]).expand(v.dims());
        let v = v.mask_fill(unseen, 0.0);
        let out = (p.clone().reshape([batch, kv_heads, group * rows, strides])).matmul(v);
        let out = out.reshape([batch, heads, rows, value_width]).cast(dtype);
        let p = p.reshape([batch * kv_heads, group, rows, strides]);
        let p = p.sum_dim(1).reshape([batch, kv_heads, rows, strides]);
        let importance = self.of_blocks(p.cast(DType::F32));
        Ok(NsaStrides { out, importance })
    }

    /// Returns the pages of the blocks that queries see, up to the block of their position: the forced ones and those with the largest importance scores.
    ///
    /// # Shapes
    /// - `importance`: `[batch, kv_heads, rows, blocks]`, f32, as returned by [`Self::of_strides`]
    /// - `positions`: `[batch, rows]`, i32
    /// - result: `[batch · rows, kv_heads, choice.selected_pages()]`, i32, one page list per query
    ///
    /// # Errors
    /// Those of [`topk_pages`].
    pub fn choose_pages(
        &self,
        importance: Tensor<4>,
        positions: &Tensor<2, Int>,
        choice: &PageChoice,
    ) -> Result<Tensor<3, Int>, OpError> {
        let [batch, kv_heads, rows, blocks] = importance.dims();
        let got = positions.dims();
        OpError::expect_same(
            "positions' shape",
            [batch, rows],
            "the attention sums'",
            got,
        )?;
        let device = importance.device();
        let Always { first, local } = self.options().forced;
        let dims = [batch, kv_heads, rows, blocks];
        let block = Tensor::<1, Int>::arange(0..blocks as i64, (&device, DType::I32));
        let block = block.reshape([1, 1, 1, blocks]).expand(dims);
        let own = positions.clone().cast(DType::I32);
        let own = own.div_scalar(self.options().selected_block as i32);
        let before = own.sub_scalar(local as i32).reshape([batch, 1, rows, 1]);
        let forced = block.clone().greater(before.expand(dims));
        let first = i32::try_from(first).unwrap_or(i32::MAX);
        let forced = forced.bool_or(block.lower_elem(first));
        let scores = importance.mask_fill(forced, FORCED).swap_dims(1, 2);
        // A block's score is the sum of its pages', so only the first page carries it.
        let page_lists = batch * rows;
        let scores = scores.reshape([page_lists, kv_heads, blocks, 1]);
        let scores = padded(scores, 3, [0, choice.block - 1]);
        let scores = scores.reshape([page_lists, kv_heads, blocks * choice.block]);
        let keys = positions.clone().cast(DType::I32).add_scalar(1);
        let keys = keys.reshape([page_lists, 1, 1]);
        let spans = padded_ints(keys);
        topk_pages(scores, &spans, choice)
    }

    /// Returns true where a query does not see the compressed key that ends with a stride: `[batch, rows, strides]`.
    fn hidden_strides(&self, positions: &Tensor<2, Int>, strides: usize) -> Tensor<3, Bool> {
        let options = self.options();
        let [batch, rows] = positions.dims();
        let dims = [batch, rows, strides];
        let stride = Tensor::<1, Int>::arange(0..strides as i64, (&positions.device(), DType::I32));
        let last = stride.clone().add_scalar(1);
        let last = last.mul_scalar(options.stride as i32).sub_scalar(1);
        let positions = positions.clone().cast(DType::I32).reshape([batch, rows, 1]);
        let later = (last.reshape([1, 1, strides]).expand(dims)).greater(positions.expand(dims));
        let whole = (options.block / options.stride) as i32 - 1;
        let begun = stride.lower_elem(whole).reshape([1, 1, strides]);
        later.bool_or(begun.expand(dims))
    }

    /// Converts weights of compressed keys, `[batch, kv_heads, rows, strides]`, to sums of blocks. A compressed key distributes its weight evenly over the
    /// strides that it covers.
    fn of_blocks(&self, p: Tensor<4>) -> Tensor<4> {
        let options = self.options();
        let [batch, kv_heads, rows, strides] = p.dims();
        let [of_block, covered] =
            [options.selected_block, options.block].map(|x| x / options.stride);
        let blocks = strides.div_ceil(of_block);
        // A stride is covered by the compressed blocks that end with it or with a following stride.
        let behind = blocks * of_block + covered - 1 - strides;
        let p = padded(p, 3, [0, behind]);
        let ending = (0..covered).rev();
        let ending = ending.map(|s| p.clone().slice_dim(3, s..s + blocks * of_block));
        let of_strides = (ending.reduce(|a, b| a + b)).expect("a block has a stride at least");
        let of_strides = of_strides.reshape([batch * kv_heads, rows, blocks, of_block]);
        of_strides
            .sum_dim(3)
            .reshape([batch, kv_heads, rows, blocks])
    }
}

/// Appends zeros to lengths, up to the four elements of a span.
fn padded_ints(slots: Tensor<3, Int>) -> Tensor<3, Int> {
    let [page_lists, ..] = slots.dims();
    let zeros = Tensor::zeros([page_lists, 1, 3], (&slots.device(), DType::I32));
    Tensor::cat(vec![slots, zeros], 2)
}
