//! The share of possible attention that a layer computes.

use burn_blocksparse::layout::PaddingMask;
use burn_sparse_select::{Budget, Rule, Selection};

use crate::error::{Result, ensure};
use crate::selected::is_by_query;
use crate::{SparseMhaInput, SparseMultiHeadAttention, TransformerError};

impl SparseMultiHeadAttention {
    /// Returns the share of query-key pairs that [`Self::forward`] attends to for this input, relative to causal attention, or to dense attention if the
    /// pattern is not causal. It is taken over all batch entries and heads, from 0 to 1, without padding. Single pairs are counted, whether a pattern or a
    /// selection keeps them, so patterns and methods are comparable. **Waits for the device** if a selection chooses by blocks of queries.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_sparse_transformer::{Pattern, SparseMhaInput, SparseMultiHeadAttentionConfig};
    ///
    /// let device = Device::flex();
    /// let mha = SparseMultiHeadAttentionConfig::new(64, 4, Pattern::causal()).init(&device);
    /// let x = Tensor::<3>::random([1, 512, 64], Distribution::Default, &device);
    /// let density = |selection: &str| {
    ///     let mha = mha.clone().with_selection(Some(selection.parse()?))?;
    ///     mha.attention_density(SparseMhaInput::self_attn(x.clone()))
    /// };
    /// assert!(density("topk:32,4")? < 0.5);
    /// // Forced blocks are some of those that are counted.
    /// assert_eq!(density("moba:32,4")?, density("moba:32,4,first=1,local=2")?);
    /// # Ok::<(), burn_sparse_transformer::TransformerError>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Self::forward`]; also if heads choose in different ways or by [`content`](crate::content), or the device returns no data.
    pub fn attention_density(&self, input: SparseMhaInput) -> Result<f64> {
        self.kind().ensure_replaceable()?;
        let (_, request) = self.prepare(&input, 0)?;
        let causal = self.pattern().is_causal();
        let sizes = [request.seq_q, request.seq_kv];
        let (kept, entries) = match self.selection() {
            Some(selection) if is_by_query(selection) => {
                ensure! { causal =>
                "pattern", "causal where every query chooses for itself", self.pattern(); }
                // A query sees earlier keys only and padding comes last, so each entry counts as if it were alone.
                let of = |sizes| pairs_by_query(selection, sizes).map(|pairs| pairs as f64);
                let kept = match self.cut(selection, &request)?.lengths {
                    None => of(sizes)?,
                    Some(lengths) => {
                        let kept = lengths.into_iter().map(|length| of([length; 2]));
                        kept.sum::<Result<f64, _>>()?
                    }
                };
                (kept, 1)
            }
            _ => {
                let layout = match self.chosen(input)? {
                    Some(chosen) => chosen.to_host()?,
                    None => self.layouts.get(&request)?,
                };
                let kept = layout.allowed_pairs() as f64 / layout.heads() as f64;
                (kept, layout.batch().unwrap_or(1))
            }
        };
        let all = match request.restrictions.as_slice() {
            [] => entries as u64 * pairs(sizes, causal, &PaddingMask::default()),
            padded => padded.iter().map(|mask| pairs(sizes, causal, mask)).sum(),
        };
        Ok(kept / all.max(1) as f64)
    }
}

/// Counts the pairs of one sequence when each query keeps its own fixed number of blocks.
fn pairs_by_query(selection: &Selection, [seq_q, seq_kv]: [usize; 2]) -> Result<u64> {
    let Rule { keep, forced, .. } = selection.rule();
    let keep = match keep {
        Budget::TopK(keep) if forced.local > 0 => keep,
        _ => {
            let expected = "one of a number of blocks, a query's own among them";
            return Err(TransformerError::argument("selection", expected, selection));
        }
    };
    let block = selection.estimator().grid().block;
    let of_position = |position: usize| {
        let visible = position / block + 1;
        let forced = forced.first.saturating_add(forced.local);
        let kept = keep.max(forced).min(visible);
        // Blocks before a query's own are whole.
        (position % block + 1 + (kept - 1) * block) as u64
    };
    Ok((seq_kv.saturating_sub(seq_q)..seq_kv)
        .map(of_position)
        .sum())
}

/// Counts the pairs of one sequence under causal or dense attention.
fn pairs([seq_q, seq_kv]: [usize; 2], causal: bool, padding: &PaddingMask) -> u64 {
    let is_real = |of: &Option<Vec<bool>>, at: usize| of.as_ref().is_none_or(|real| real[at]);
    let mut keys_before = vec![0; seq_kv + 1];
    for key in 0..seq_kv {
        keys_before[key + 1] = keys_before[key] + u64::from(is_real(&padding.keys, key));
    }
    let seen = |query: usize| match causal {
        true => (query + 1 + seq_kv).saturating_sub(seq_q).min(seq_kv),
        false => seq_kv,
    };
    let queries = (0..seq_q).filter(|&query| is_real(&padding.queries, query));
    queries.map(|query| keys_before[seen(query)]).sum()
}
