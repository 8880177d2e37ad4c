//! Block selection by bounds of pages, Quest (Tang et al., 2024, §3).

use std::ops::Range;
use std::sync::Arc;

use blocksparse::{BLOCK_SIZES, Budget, Rule};
use burn::tensor::{DType, Tensor};

use crate::selection::by_query::FORCED;
use crate::selection::estimator::{
    BlockEstimator, EstimateGrid, EstimateInputs, EstimatorTraits, PageSummary, ReferenceInputs,
};
use crate::selection::mean::products;
use crate::selection::parts::{in_steps, joined};
use crate::selection::sharing::GqaReduction;
use crate::selection::text::{Arguments, Method, Written};
use crate::selection::{Selection, by_query};
use burn_blocksparse::OpError;

/// Scores pages by `Σ_c max(q_c · max_c, q_c · min_c)` of a query and a page's channel-wise maxima and minima, with keys as attention uses them. This bounds
/// the product of the query and any key of the page from above. Every query selects separately; its own page is always selected and counts towards the budget.
/// Defined for causal attention, and meant for decoding: a [pool of pages](crate::pages) stores the bounds of its pages. A selection may also force the first
/// pages and some before the own one ([`Always`](blocksparse::Always)), which count as well: `quest:16,2048,first=1,local=2` for models with attention sinks.
///
/// The heads of a KV head share a selection by the mean of their bounds, unless the selection says otherwise. The paper uses pages of 16 and budgets of 256 to
/// 4,096 keys, and full attention in the first two layers. The text form is `quest:PAGE,BUDGET[,FULL_FIRST_LAYERS]`:
///
/// ```
/// use burn_sparse_select::{Budget, Selection};
///
/// let selection: Selection = "quest:16,2048,2".parse()?;
/// assert_eq!(selection.rule().keep, Budget::TopK(128));
/// assert_eq!(selection.estimator().full_first_layers(), 2);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quest {
    /// Number of keys of a page: 8, 16, 32, 64 or 128.
    pub page: usize,
    /// Number of first layers with full attention. A model uses it; a single layer rejects a nonzero number ([`BlockEstimator::full_first_layers`]).
    pub full_first_layers: usize,
}

/// Least number of selected pages.
const LEAST: usize = 3;

pub(crate) const METHOD: Method = Method {
    name: "quest",
    notation: "quest:PAGE,BUDGET[,FULL_FIRST_LAYERS]",
    read: |arguments: &mut Arguments| {
        let page = arguments.next("PAGE")?;
        let budget: usize = arguments.next("BUDGET")?;
        let full_first_layers = arguments.next_or("FULL_FIRST_LAYERS", 0)?;
        let estimator = Quest {
            page,
            full_first_layers,
        };
        estimator.check()?;
        blocksparse::ensure! {
            OpError;
            budget.is_multiple_of(page) && budget / page >= LEAST => "BUDGET",
                format!("a multiple of {page}, PAGE, and at least {LEAST} times it"), budget;
        }
        let selection = Selection::new(estimator, Budget::TopK(budget / page));
        let selection = selection.with_always(arguments.forced(FORCED)?);
        Ok(selection.with_gqa_reduction(GqaReduction::Mean))
    },
};

impl BlockEstimator for Quest {
    fn text(&self, rule: &Rule, sharing: GqaReduction) -> String {
        let written = Written::new(METHOD.name).number(self.page);
        let written = match rule.keep {
            Budget::TopK(pages) => written.number(pages.saturating_mul(self.page)),
            keep => written.keep(keep, |_| false),
        };
        let written = match self.full_first_layers {
            0 => written,
            layers => written.number(layers),
        };
        let written = written.forced(rule.forced, FORCED);
        written.finish(sharing, GqaReduction::Mean)
    }

    fn grid(&self) -> EstimateGrid {
        EstimateGrid::by_query(self.page)
    }

    fn traits(&self) -> EstimatorTraits {
        by_query::TRAITS
    }

    fn check(&self) -> Result<(), OpError> {
        blocksparse::ensure! { OpError; BLOCK_SIZES.contains(&self.page) => "page", "8, 16, 32, 64 or 128", self.page; }
        Ok(())
    }

    fn check_rule(&self, rule: &Rule) -> Result<(), OpError> {
        by_query::check_rule(rule, [METHOD.name, "pages"], LEAST)
    }

    fn full_first_layers(&self) -> usize {
        self.full_first_layers
    }

    fn for_layer(&self) -> Option<Arc<dyn BlockEstimator>> {
        Some(Arc::new(Self {
            full_first_layers: 0,
            ..*self
        }))
    }

    fn page_summary(&self) -> Option<PageSummary> {
        Some(PageSummary::Bounds)
    }

    fn scores(&self, call: &EstimateInputs, rows: Range<usize>) -> Result<Tensor<4>, OpError> {
        let q = call.q.clone().slice_dim(2, rows).cast(DType::F32);
        // The larger product is the one with the maximum where q is positive, and with the minimum where q is negative.
        let signs = vec![q.clone().clamp_min(0.0), q.clamp_max(0.0)];
        let bounds = bounds(call.k.clone().cast(DType::F32), self.page);
        Ok(products(Tensor::cat(signs, 3), bounds, call.group()))
    }

    fn reference(&self, call: &ReferenceInputs) -> Vec<f64> {
        let mut scores = Vec::new();
        for head in 0..call.heads {
            let pages = in_steps(0..call.seq_kv, self.page).map(|keys| {
                let of = |c: usize, least: f64, choose: fn(f64, f64) -> f64| {
                    let numbers = keys.clone().map(|key| call.key(head, key)[c]);
                    numbers.fold(least, choose)
                };
                let both = |c: usize| {
                    [
                        of(c, f64::NEG_INFINITY, f64::max),
                        of(c, f64::INFINITY, f64::min),
                    ]
                };
                (0..call.head_dim).map(both).collect()
            });
            let pages: Vec<Vec<[f64; 2]>> = pages.collect();
            for row in 0..call.seq_q {
                let q = call.query(head, row);
                let bound = |page: &Vec<[f64; 2]>| -> f64 {
                    let channels = q.iter().zip(page);
                    channels
                        .map(|(q, [most, least])| (q * most).max(q * least))
                        .sum()
                };
                scores.extend(pages.iter().map(bound));
            }
        }
        scores
    }
}

/// Returns the largest elements of each page of keys, then the smallest: `[batch, heads, pages, 2 · dim]`.
fn bounds(k: Tensor<4>, page: usize) -> Tensor<4> {
    let [batch, heads, rows, dim] = k.dims();
    let whole = rows / page;
    let part = |from: usize, to: usize, pages: usize| {
        let k = k.clone().slice_dim(2, from..to);
        let k = k.reshape([batch * heads, pages, (to - from) / pages, dim]);
        let both = vec![k.clone().max_dim(2), k.min_dim(2)];
        Tensor::cat(both, 3).reshape([batch, heads, pages, 2 * dim])
    };
    let mut parts = Vec::new();
    if whole > 0 {
        parts.push(part(0, whole * page, whole));
    }
    if !rows.is_multiple_of(page) {
        parts.push(part(whole * page, rows, 1));
    }
    joined(parts, 2)
}
