//! Quality of a selection: its share of the attention, and that of the best selection of equal size.

use std::ops::Range;

use blocksparse::{BlockLayout, Budget, EstimateKind, Rule};
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, DType, Device, Tensor, TensorData};

use crate::selection::estimator::EstimateInputs;
use crate::selection::mean::products;
use crate::selection::parts::{in_steps, padded, softmax_of_seen};
use crate::selection::{Selection, check_call};
use burn_blocksparse::internal::allowed_blocks;
use burn_blocksparse::{AttentionOptions, Layout, OpError, SparseAttentionCall};

/// Quality of a selection for a head: means over query rows and batch entries.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct SelectionQuality {
    /// Share of the attention that the selected blocks cover.
    pub recall: f64,
    /// First percentile over rows of that share: 99 of 100 rows have at least this.
    pub first_percentile: f64,
    /// Share that the best selection covers with the same number of blocks per row, forced blocks included.
    pub oracle: f64,
    /// Number of selected blocks, as a share of the visible ones.
    pub density: f64,
}

impl SelectionQuality {
    /// Quality of a head that attends to everything it sees.
    pub const ALL: Self = Self {
        recall: 1.0,
        first_percentile: 1.0,
        oracle: 1.0,
        density: 1.0,
    };

    /// Returns the recall as a share of the best possible recall with as many blocks.
    pub fn ratio(&self) -> f64 {
        self.recall / self.oracle
    }
}

/// Upper bound of the elements of a slab of probabilities.
const SLAB: usize = 1 << 23;

impl Selection {
    /// Measures the selection for each head. Computes full attention in slabs and reads it back, so it is meant for reports.
    ///
    /// # Errors
    /// Those of [`choose`](Self::choose), and if reading from the device fails.
    pub fn quality(&self, call: &EstimateInputs) -> Result<Vec<SelectionQuality>, OpError> {
        self.quality_within(call, None)
    }

    /// Measures [`quality`](Self::quality) of a selection restricted to the blocks of a layout ([`Candidates::layout`](crate::selection::Candidates::layout)),
    /// relative to attention over that layout.
    ///
    /// # Errors
    /// Those of [`quality`](Self::quality), and if the layout's sizes or batch are not the call's.
    pub fn quality_within(
        &self,
        call: &EstimateInputs,
        layout: Option<&BlockLayout>,
    ) -> Result<Vec<SelectionQuality>, OpError> {
        self.check()?;
        check_call(call)?;
        if let Some(layout) = layout {
            let shape = self.shape(call.q.dims(), call.k.dims()[2])?;
            OpError::expect_same("layout's shape", shape, "the choice's", *layout.shape())?;
            let own = call.q.dims()[0];
            let batch = layout.batch().unwrap_or(own);
            OpError::expect_same("layout's batch", own, "q's", batch)?;
        }
        let call = call.without_autodiff();
        let mut grid = call.grid(self.estimator.grid());
        // With a layout, the layout alone determines visibility.
        grid.causal &= layout.is_none();
        let (rows, blocks) = (grid.rows(), grid.blocks());
        let [batch, heads, ..] = call.q.dims();
        let rule = self.rule();
        let mut of_heads = vec![Rows::default(); heads];
        let slab = (SLAB / (batch * heads * grid.query_rows * grid.seq_kv)).clamp(1, rows.max(1));
        for Range { start: first, end } in in_steps(0..rows, slab) {
            let scores = self.estimator.scores(&call, first..end)?;
            let scores = self.sharing.reduce(scores, call.group());
            let of_scores = scores.dims()[1];
            let scores = read(scores)?;
            let attention_sums = read(self.attention_sums(&call, first, end, layout))?;
            for (entry_head, head) in (0..batch).flat_map(|_| 0..heads).enumerate() {
                let entry = entry_head / heads;
                for row in first..end {
                    let at = |head: usize, of: usize| {
                        ((entry * of + head) * (end - first) + row - first) * blocks
                    };
                    let shared = head / (heads / of_scores);
                    let scores = &scores[at(shared, of_scores)..][..blocks];
                    let attention_sums = &attention_sums[at(head, heads)..][..blocks];
                    let allowed = match layout {
                        Some(layout) => allowed_blocks(layout, entry, head, row),
                        None => vec![true; blocks],
                    };
                    let may_choose = |block: usize| allowed[block];
                    let kept = rule.selects_of(&grid, row, scores, may_choose);
                    let is_visible = |&block: &usize| allowed[block] && grid.is_visible(row, block);
                    let visible = (0..blocks).filter(is_visible).count();
                    let count = kept.iter().filter(|&&kept| kept).count();
                    let best = Rule {
                        kind: EstimateKind::Probability,
                        keep: Budget::TopK(count.max(1)),
                        ..rule
                    };
                    let share = |kept: &[bool]| -> f64 {
                        let pairs = kept.iter().zip(attention_sums);
                        pairs
                            .filter(|(kept, _)| **kept)
                            .map(|(_, attention_sum)| attention_sum)
                            .sum()
                    };
                    let of = &mut of_heads[head];
                    of.recall.push(share(&kept));
                    of.oracle += match count {
                        0 => 0.0,
                        _ => share(&best.selects_of(&grid, row, attention_sums, may_choose)),
                    };
                    of.kept += count;
                    of.visible += visible;
                }
            }
        }
        Ok(of_heads.into_iter().map(Rows::finish).collect())
    }

    /// Returns the attention that rows of queries give each block of keys: `[batch, heads, rows, blocks]`. Each row sums to 1.
    fn attention_sums(
        &self,
        call: &EstimateInputs,
        first: usize,
        end: usize,
        layout: Option<&BlockLayout>,
    ) -> Tensor<4> {
        let grid = call.grid(self.estimator.grid());
        let (from, to) = (
            first * grid.query_rows,
            (end * grid.query_rows).min(grid.seq_q),
        );
        let [batch, heads, ..] = call.q.dims();
        let device = call.q.device();
        let q = call.q.clone().slice_dim(2, from..to).cast(DType::F32);
        let k = call.k.clone().cast(DType::F32);
        let scores = products(q * call.scale, k, call.group());
        let hidden = match layout {
            Some(layout) => Some(hidden(layout, from..to, &device)),
            None => call.causal.then(|| {
                let offset = grid.seq_kv as i64 - grid.seq_q as i64 + from as i64;
                let shape = [to - from, grid.seq_kv];
                Tensor::<2, Bool>::tril_mask(shape, offset, &device).unsqueeze()
            }),
        };
        let p = match hidden {
            Some(hidden) => {
                let dims = scores.dims();
                softmax_of_seen(scores, hidden.expand(dims))
            }
            None => softmax(scores, 3),
        };
        let p = padded(p, 3, [0, grid.blocks() * grid.block - grid.seq_kv]);
        let dims = [batch * heads, to - from, grid.blocks(), grid.block];
        let p = p.reshape(dims).sum_dim(3);
        let p = p.reshape([batch, heads, to - from, grid.blocks()]);
        // The last row may have fewer queries; pad it.
        let rows = end - first;
        let p = padded(p, 2, [0, rows * grid.query_rows - (to - from)]);
        let dims = [batch * heads, rows, grid.query_rows, grid.blocks()];
        let p = p.reshape(dims).sum_dim(2);
        let p = p.reshape([batch, heads, rows, grid.blocks()]);
        let last = grid.seq_q - (rows - 1) * grid.query_rows - from;
        match last < grid.query_rows && to == grid.seq_q {
            false => p / grid.query_rows as f64,
            true => {
                let whole = p.clone().slice_dim(2, 0..rows - 1) / grid.query_rows as f64;
                let rest = p.slice_dim(2, rows - 1..rows) / last as f64;
                match rows {
                    1 => rest,
                    _ => Tensor::cat(vec![whole, rest], 2),
                }
            }
        }
    }
}

/// Returns true for pairs that are not in the layout, of a range of queries: `[batch or 1, heads, queries, seq_kv]`.
fn hidden(layout: &BlockLayout, queries: Range<usize>, device: &Device) -> Tensor<4, Bool> {
    let (entries, heads, b) = (
        layout.batch().unwrap_or(1),
        layout.heads(),
        layout.block_size(),
    );
    let dims = [entries, heads, queries.len(), layout.seq_kv()];
    let mut hidden = Vec::with_capacity(dims.iter().product());
    for (entry, head) in (0..entries).flat_map(|entry| (0..heads).map(move |head| (entry, head))) {
        let pattern = layout.pattern_of(entry, head);
        for query in queries.clone() {
            let mut row = vec![true; layout.seq_kv()];
            for block in layout.row(pattern, query / b) {
                let mask = &layout.masks()[block.mask as usize];
                let first = block.block as usize * b;
                let own = row[first..].iter_mut().take(b).enumerate();
                own.for_each(|(column, hidden)| *hidden = !mask.get(query % b, column));
            }
            hidden.extend(row);
        }
    }
    Tensor::from_data(TensorData::new(hidden, dims), device)
}

/// Accumulated sums of a head.
#[derive(Clone, Debug, Default)]
struct Rows {
    recall: Vec<f64>,
    oracle: f64,
    kept: usize,
    visible: usize,
}

impl Rows {
    fn finish(mut self) -> SelectionQuality {
        let rows = self.recall.len().max(1) as f64;
        self.recall.sort_by(f64::total_cmp);
        SelectionQuality {
            recall: self.recall.iter().sum::<f64>() / rows,
            first_percentile: self
                .recall
                .get(self.recall.len() / 100)
                .copied()
                .unwrap_or(0.0),
            oracle: self.oracle / rows,
            density: self.kept as f64 / self.visible.max(1) as f64,
        }
    }
}

fn read(tensor: Tensor<4>) -> Result<Vec<f64>, OpError> {
    let data = tensor.try_into_data().map_err(OpError::read)?;
    data.convert::<f64>().to_vec().map_err(OpError::read)
}

/// Returns the share of each query's full attention that the pairs of a layout cover, `Σ p` over them `= exp(lse of the layout − lse of full attention)`. It is
/// 1 if nothing that matters is left out, and 0 for a query without pairs. It bounds the error of the output: `‖o − o_full‖ ≤ 2 (1 − recall) · max‖v‖`.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{AttentionOptions, Pattern, SparseAttentionCall};
/// use burn_sparse_select::{EstimateInputs, Selection, recall};
///
/// let [q, k, v] = [(); 3]
///     .map(|_| Tensor::<4>::random([1, 2, 256, 16], Distribution::Default, &Device::flex()));
/// let selection: Selection = "topk:32,4".parse()?;
/// let layout = selection.choose(&EstimateInputs::new(q.clone(), k.clone()))?.layout;
/// let options = AttentionOptions::default();
/// let full = Pattern::causal().layout(2, 256, 32)?;
/// let call = SparseAttentionCall::new(q.clone(), k.clone(), v, &full);
/// let (_, lse) = call.options(options.clone()).run_with_lse()?;
/// let recall = recall(q, k, lse, &layout, options)?;
/// assert_eq!(recall.dims(), [1, 2, 256]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `q`: `[batch, heads, seq_q, head_dim]`, `k`: `[batch, kv_heads, seq_kv, head_dim]`
/// - `lse`: `[batch, heads, seq_q]`, of full attention with the same options
/// - result: as `lse`, without autodiff
///
/// # Errors
/// Those of [`sparse_attention`](burn_blocksparse::sparse_attention), and if `lse` does not match.
pub fn recall<'a>(
    q: Tensor<4>,
    k: Tensor<4>,
    lse: Tensor<3>,
    layout: impl Into<Layout<'a>>,
    options: AttentionOptions,
) -> Result<Tensor<3>, OpError> {
    let (q, k) = (q.without_autodiff(), k.without_autodiff());
    let [batch, heads, rows, _] = q.dims();
    OpError::expect_same("lse's shape", [batch, heads, rows], "q's rows", lse.dims())?;
    let (_, chosen) = SparseAttentionCall::new(q, k.clone(), k, layout)
        .options(options)
        .run_with_lse()?;
    let lse = lse.without_autodiff().cast(chosen.dtype());
    let empty = lse.clone().equal_elem(f32::NEG_INFINITY);
    Ok((chosen - lse).exp().mask_fill(empty, 0.0))
}
