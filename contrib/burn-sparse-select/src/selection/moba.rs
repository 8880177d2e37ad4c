//! Mixture of block attention, MoBA (Lu et al., 2025, §2.2).

use std::ops::Range;
use std::sync::Arc;

use blocksparse::{Budget, Rule};

use crate::selection::by_query::FORCED;
#[cfg(feature = "cube")]
use crate::selection::estimates;
use crate::selection::estimator::{
    BlockEstimator, EstimateGrid, EstimateInputs, EstimatorTraits, PageSummary, ReferenceInputs,
    dot,
};
use crate::selection::mean::{means, means_reference};
use crate::selection::sharing::GqaReduction;
use crate::selection::text::{Arguments, Method, Written};
use crate::selection::token_order::row_products;
use crate::selection::{Selection, by_query, check_wide_block};
use burn_blocksparse::internal::prelude::*;

/// Scores blocks by `q · mean(k)` of a query and a key block, with keys as attention uses them. Every query selects separately. Its own block is always
/// selected and counts as one of them: with `k` blocks a query selects `k − 1` before its own, and none with `k = 1`. Defined for causal attention.
///
/// The paper forces no other block. A selection may ([`Always`](blocksparse::Always)): the first blocks, and some before the query's own. They also count
/// towards `k`, so `moba:64,8,first=1,local=2` selects five by score. Use this form for models that were trained without block selection.
///
/// The method adds no parameters, and the selection has no gradient. The paper uses blocks of 512 and k = 3 at 8K tokens, 2,048 and 3 at 32K, 4,096 and 12 at
/// 1M with full attention in the last 3 layers. It trains on nine tenths of the tokens with MoBA and on the rest with full attention.
///
/// [`attention_selected`](crate::selection::attention_selected) runs over the selection. The text form is `moba:BLOCK,K[,FULL_LAST_LAYERS]`:
///
/// ```
/// use burn_sparse_select::Selection;
///
/// let selection: Selection = "moba:512,3,2".parse()?;
/// assert_eq!(selection.estimator().full_last_layers(), 2);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moba {
    /// Number of keys of a block: 8, 16, 32, 64, 128, or a larger multiple of 128.
    pub block: usize,
    /// Number of last layers with full attention. A model uses it; a single layer rejects a nonzero number ([`BlockEstimator::full_last_layers`]).
    pub full_last_layers: usize,
}

pub(crate) const METHOD: Method = Method {
    name: "moba",
    notation: "moba:BLOCK,K[,FULL_LAST_LAYERS]",
    read: |arguments: &mut Arguments| {
        let block = arguments.next("BLOCK")?;
        let keep = arguments.keep("K", |k| Budget::TopK(k as usize))?;
        let full_last_layers = arguments.next_or("FULL_LAST_LAYERS", 0)?;
        let estimator = Moba {
            block,
            full_last_layers,
        };
        Ok(Selection::new(estimator, keep).with_always(arguments.forced(FORCED)?))
    },
};

impl BlockEstimator for Moba {
    fn text(&self, rule: &Rule, sharing: GqaReduction) -> String {
        let written = Written::new(METHOD.name).number(self.block);
        let written = written.keep(rule.keep, |keep| matches!(keep, Budget::TopK(_)));
        let written = match self.full_last_layers {
            0 => written,
            layers => written.number(layers),
        };
        let written = written.forced(rule.forced, FORCED);
        written.finish(sharing, GqaReduction::PerHead)
    }

    fn grid(&self) -> EstimateGrid {
        EstimateGrid::by_query(self.block)
    }

    fn traits(&self) -> EstimatorTraits {
        by_query::TRAITS
    }

    fn check(&self) -> Result<(), OpError> {
        check_wide_block("block", self.block)
    }

    fn check_rule(&self, rule: &Rule) -> Result<(), OpError> {
        by_query::check_rule(rule, [METHOD.name, "blocks"], 0)
    }

    fn full_last_layers(&self) -> usize {
        self.full_last_layers
    }

    fn for_layer(&self) -> Option<Arc<dyn BlockEstimator>> {
        Some(Arc::new(Self {
            full_last_layers: 0,
            ..*self
        }))
    }

    fn page_summary(&self) -> Option<PageSummary> {
        Some(PageSummary::Mean)
    }

    fn scores(&self, call: &EstimateInputs, rows: Range<usize>) -> Result<Tensor<4>, OpError> {
        let q = call.q.clone().slice_dim(2, rows).cast(DType::F32);
        Ok(row_products(q, means(call.k.clone(), self.block)))
    }

    #[cfg(feature = "cube")]
    fn picks(&self, call: &EstimateInputs, most: usize) -> Option<Tensor<4, Int>> {
        estimates::picks(call, self.block, most)
    }

    fn reference(&self, call: &ReferenceInputs) -> Vec<f64> {
        let mut scores = Vec::new();
        for head in 0..call.heads {
            let k = means_reference(|row| call.key(head, row), call.seq_kv, self.block);
            for row in 0..call.seq_q {
                let q = call.query(head, row);
                scores.extend(k.iter().map(|k| dot(q, k)));
            }
        }
        scores
    }
}
