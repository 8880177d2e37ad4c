"""Where each public name stands. The root keeps every name that is in none of these lists, and the script names those it did not know."""

# ---- burn-blocksparse ----
OPS = {
 "backend": dict(
   doc="Backend traits, and the values that cross them: for crates that serve another backend, not for users of the ops.",
   names="""ActivationGrads ActivationInputs ActivationSaved ActivationTask SparseLinearCall SparseLinearInputs SparseLinearOutput
   SparseLinearSaved BlockSparseTensorOps GatedGrads GatedInputs GatedSaved GatedTask HeadParts JoinCall Joined SplitInputs LinearGrads
   LinearInputs LinearOutput LinearSaved LinearTask LossDtypes LossGrads LossInputs LossOutput LossSaved LossTask MlpActive MlpCall
   MlpInnerInputs MlpInputs MlpOuterSaved MlpOuterTask NormBackwardCall NormCall NormGrads NormInputs NormOutput NormOutputGrads NormSaved
   ActivationOps AdamWInputs AdamWNumbers AdamWOutput AttentionMassOps BlockSparseLinearOps BlockSparseOps ClipFactor DropoutOps
   EmbeddingOps FixedOps GateOps HeadOps LinearOps LossOps MlpOps NormOps OptimOps PageChoiceOps PageSlotOps PagedOps ProjectionOps RowOps
   SamplingOps TensorList AppendInputs AppendPacked MaybeInt PackedPages PageChoiceCall PageScoreInputs PagedCall PagedInputs PagedRows
   Pages StoredPages SummarizeInputs MergeGrads MergeInputs MergeOutput MergeSaved MergeTask ProjectionCall ProjectionInputs
   ProjectionOutput AttentionGrads AttentionInputs AttentionOutput BlockChoice GivenOutput KernelPlan LayoutTensors MassInputs MassOutput
   MaybeFloat OutputGrads Saved ScoreTensors ThreeFloats WantedGrads""", keep_all=True),
 "internal": dict(hidden=True, facade=True,
   doc="Helpers of the sister crates and of tests. Nothing here is stable.",
   names="""attracted_rows AttractedRows hash_rows highest_in_rows HighestInRows highest_rows sort_buckets sort_hashes sort_rounds
   TokensInRounds rows_at keyed_rows_at means_at sums_at unit_rows attention_keeping attention_given KeptAttention KeptLayouts
   prepare_seed runs_kernels heads_apart heads_together philox font sum_all merge_attention_at highest_pages"""),
 "ops": dict(facade=True,
   doc="""Training ops beside attention: linear layers, normalisation, MLP, embedding, loss, dropout, and products of attention's
heads. Each is one function with its gradients; its `*_plan` says what would run and why.

| job | functions |
|---|---|
| linear layers | [`linear`], [`linear_joined`], [`linear_to_heads`], [`linear_from_heads`] |
| heads | [`split_heads`], [`join_heads`] |
| MLP | [`mlp`], [`bias_activation`] |
| normalisation and residuals | [`norm`], [`residual_norm`], [`residual_add`], [`dropout()`] |
| embedding and loss | [`embedding`], [`linear_cross_entropy`] |""",
   names="""Activation bias_activation bias_activation_plan accelerate_matmul accelerated_products dropout dropout_plan StreamDropout
   embedding embedding_backward embedding_plan join_heads split_heads split_heads_plan LinearOptions linear linear_joined linear_plan
   CrossEntropyOptions Reduction linear_cross_entropy linear_cross_entropy_plan MlpOptions MlpParams mlp mlp_plan Branch Norm NormParams
   ResidualNormOptions norm residual_add residual_norm residual_norm_plan OpPlan linear_from_heads linear_from_heads_plan linear_to_heads
   linear_to_heads_plan"""),
 "optim": dict(doc="AdamW over all parameters of a module in a few launches, and clipping by the norm of all gradients.",
   names="AdamWControl FusedAdamW FusedAdamWConfig clip_gradients gradient_norm"),
 "graph": dict(doc="CUDA graphs: a computation is captured once and replayed as one launch, on inputs that are overwritten in place.",
   names="DeviceSeed Fixed FixedKind Replayed check_not_recording SeedTable"),
 "gradients": dict(doc=None, names="attention_hvp AttentionGradients attention_gradients"),
 "layout": dict(facade=True,
   doc="What layouts are made of beside a [`Pattern`](crate::Pattern): options, masks, padding.",
   names="BLOCK_SIZES BlockMask DeviceLayoutOptions PositionRule Reach Restriction"),
 "sparse_linear": dict(moved_from="block_sparse",
   doc="Block-sparse linear layers: weights of which only some blocks exist, and products with them.",
   names="""BlockSparseLinearOptions block_sparse_linear block_sparse_linear_plan WEIGHT_BLOCK_SIZES WeightLayout WeightPattern"""),
 "paged": dict(doc="Attention over a paged KV cache, for decoding: append, attend, int8 and fp8 pages, page selection.",
   names="""PageChoice PageSummaries PagedKeysValues PagedOptions PagedOutput PagedStore PagedVisibility QuantizedPages append_quantized
   append_rows dequantize page_scores paged_attention paged_attention_plan select_pages summarize_pages summarize_stored Quantization
   pages"""),
 "sampling": dict(doc="Tokens drawn from logits: temperature, top-k, top-p, min-p and repetition penalty, on the device.",
   names="SampleOptions sample_tokens sample_tokens_plan"),
 "selection": dict(doc="""Attention that selects its keys by content: block scores, a rule that keeps some blocks, and attention over them.

Top-k of given scores: [`top_k_blocks`], [`top_k_blocks_on_device`]. A method that scores by itself: [`Selection`] with
[`attention_selected`]. Blocks or single keys that you chose: [`QueryLists`], [`KeyLists`].""",
   names="""EstimateKind Forced Keep Rule ScoreGrid TopKOptions routed_attention routed_attention_plan ChoiceWalk AttentionMasses
   MassOptions attention_masses KeyLists attention_with_keys attention_with_keys_plan attention_with_lists attention_with_lists_plan
   Antidiagonals BlockEstimator BlockMeans Chosen DenseCall EstimateGrid EstimatorTraits FlexHead FlexPrefill MixtureOfBlocks PageBounds
   PageSummary QueryLists ScoreCall SelectedOptions Selection SelectionQuality Sharing SpargeBlocks VerticalSlash Within
   attention_selected attention_selected_with_lse recall top_k_blocks top_k_blocks_on_device vertical_slash_layout
   vertical_slash_layout_async"""),
 "nsa": dict(doc=None, names="Nsa NsaBranches NsaKeysValues NsaOptions NsaStrides"),
 "dsa": dict(doc=None, names="Dsa DsaIndex DsaPages DsaTarget RotatedRows ROTATED_WIDTHS"),
}
OPS_ROOT = """AttentionAux attention attention_with_aux attention_with_lse attention_with_tensors attention_with_tensors_and_aux
 attention_with_tensors_and_weights attention_with_weights BlockLayout Dropout LayoutError LayoutShape Pattern Seed Layout
 check_collectives check_device DeviceLayout OpError merge_attention AttentionOptions ProductPrecision WeightsMode alibi_slopes
 AttentionPlan AttentionTensors BlockSparseTensor
 sparse_attention SparseAttentionCall SparseAttention SparseAttentionConfig SparseAttentionOutput Explain explain"""

# ---- burn-sparse-transformer ----
LAYERS = {
 "content": dict(doc="Experimental: heads that choose single keys by content, by clusters (Routing Transformer) or by hashes (Reformer).",
   names="""ContentAttention ContentHeads LshAttention LshAttentionConfig LshHeads LshHeadsConfig LshOptions RoutingAttention
   RoutingAttentionConfig RoutingAttentionInput RoutingAttentionOutput RoutingHeads RoutingHeadsConfig RoutingOutput lsh_attention"""),
 "dsa": dict(doc="Experimental: DeepSeek sparse attention (DSA: DeepSeek-V3.2-Exp, 2025, §2), an indexer that learns which keys to choose.",
   names="DsaAttention DsaAttentionConfig DsaHeads DsaHeadsConfig DsaIndexer DsaStage"),
 "nsa": dict(doc="Experimental: native sparse attention (NSA: Yuan et al., 2025), heads with compressed, selected and window branches.",
   names="Compression NsaAttention NsaAttentionConfig NsaCompressor NsaHeads NsaHeadsConfig NsaProjections"),
 "generate": dict(doc="Text generation from a [`SparseTransformer`](crate::SparseTransformer): sampling, stop conditions, speculative drafts.",
   names="NgramDrafts NgramIndex EndReason GenerateOptions GenerateStep Generated Sampling"),
 "pool": dict(doc="A paged KV cache for many sequences: continuous batching, forks, prefix reuse, eviction, int8 and fp8.",
   names="""KvDtype KvPool KvPoolConfig KvPositions KvSnapshot KvStep KvUsage ReplayedDecoder CacheError EvictionBudget EvictionConfig
   EvictionScore Residency SequenceId VotePool"""),
 "longformer": dict(doc="Longformer: attention with a window and global tokens of their own projections, and the encoder of it.",
   names="""LongformerAttention LongformerAttentionConfig LongformerInput LongformerEncoder LongformerEncoderConfig
   LongformerEncoderInput LongformerLayer"""),
 "linear": dict(doc="Linear layers: in mixed precision, and with block-sparse weights.",
   names="MixedPrecisionLinear MixedPrecisionLinearConfig BlockSparseLinear BlockSparseLinearConfig WeightLayout WeightPattern"),
 "feed_forward": dict(doc="The MLP of a block.", names="FeedForward FeedForwardActivation FeedForwardLinear FeedForwardSparsity"),
}
LAYERS_ROOT = """SparseMhaOutput SparseMultiHeadAttention SparseMultiHeadAttentionConfig SparseTransformerBlock SparseTransformerBlockConfig
 BlockAttentionConfig SparseMhaCache SparseTransformerCache PositionEmbedding SparseTransformerEncoder SparseTransformerEncoderConfig
 SparseTransformerEncoderInput SparseTransformerEncoderLayer TransformerError Factorization HeadSelections HeadNorm QkNorm SparseMhaInput
 Precision StepLosses Recompute SparseTransformer SparseTransformerConfig BlockLayout BlockSparseTensor DeviceLayout Layout LayoutError
 OpError Pattern Seed Selection SelectionQuality SparseAttention SparseAttentionConfig"""
