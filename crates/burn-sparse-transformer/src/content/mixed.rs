//! Attention in which some heads use a pattern and the others choose by content.

use burn::module::{Content, Module};
use burn::nn::{Linear, RotaryEncoding};
use burn::tensor::{Device, Int, Tensor};
use burn_blocksparse::{Pattern, Seed};

use super::kind::ContentAttention;
use super::lsh::LshHeads;
use super::routing::RoutingHeads;
use crate::call::{Call, Heads, Seen};
use crate::dsa::indexed::{self, Indexed, check_pattern, seen};
use crate::dsa::{DsaHeads, DsaStage};
use crate::error::{Result, ensure, ensure_none};
use crate::kind::{AttentionKind, check_causal, check_input};
use crate::layouts::Request;
use crate::msa::MsaHeads;
use crate::nsa::NsaHeads;
use crate::shared_choice::ChoiceSharing;
use crate::stream::Stream;
use crate::{
    SparseMhaCache, SparseMhaInput, SparseMultiHeadAttention, SparseMultiHeadAttentionConfig,
    SparseTransformer, TransformerError,
};

/// Derives the seed of hash rotations from a call's dropout seed.
const ROTATIONS: u64 = 0x6c73_6800;

/// Heads of a [`SparseMultiHeadAttention`] that choose by content, after those of its pattern. With clusters and hashes, keys are the queries, normalised to
/// unit length.
#[derive(Module, Debug)]
pub struct ContentHeads {
    /// Heads that choose by clusters; records store their means.
    pub routing: Option<RoutingHeads>,
    /// Heads that choose by hashes.
    #[module(skip)]
    lsh: Option<LshHeads>,
    /// Heads of native sparse attention, all of the layer's; keys and values of the selected branch are the layer's own.
    pub nsa: Option<NsaHeads>,
    /// Heads of DeepSeek sparse attention, all of the layer's; queries, keys and values are the layer's own.
    pub dsa: Option<DsaHeads>,
    /// Heads of MiniMax sparse attention, all of the layer's; queries, keys and values are the layer's own.
    pub msa: Option<MsaHeads>,
    local_heads: usize,
    #[module(skip)]
    config: ContentAttention,
    /// Training stage of an indexer, the layer's own or an earlier layer's.
    #[module(skip)]
    stage: DsaStage,
}

impl ContentHeads {
    /// Returns the configuration.
    pub fn config(&self) -> &ContentAttention {
        &self.config
    }

    /// Returns the number of the pattern's heads, which come first.
    pub fn local_heads(&self) -> usize {
        self.local_heads
    }

    pub(crate) fn layers_mut(&mut self) -> Vec<&mut Linear> {
        let nsa = self.nsa.iter_mut().flat_map(NsaHeads::layers_mut);
        let dsa = self.dsa.iter_mut().flat_map(|dsa| dsa.indexer.layers_mut());
        let msa = self.msa.iter_mut().flat_map(MsaHeads::layers_mut);
        nsa.chain(dsa).chain(msa).collect()
    }

    pub(crate) fn index_rope_mut(&mut self) -> Option<&mut Option<RotaryEncoding>> {
        match (&mut self.dsa, &mut self.msa) {
            (Some(dsa), _) => Some(&mut dsa.indexer.rope),
            (None, msa) => msa.as_mut().map(|msa| &mut msa.rope),
        }
    }

    /// Sets the stage of an indexer, the layer's own or an earlier layer's, and returns whether there is one.
    pub(crate) fn set_stage(&mut self, stage: DsaStage) -> bool {
        let has_indexer = self.config.has_indexer();
        if has_indexer {
            self.stage = stage;
        }
        has_indexer
    }

    /// Returns the stage of an indexer, the layer's own or an earlier layer's.
    pub(crate) fn stage(&self) -> Option<DsaStage> {
        self.config.has_indexer().then_some(self.stage)
    }

    /// Returns whether an indexer chooses in the current stage.
    fn is_chosen(&self) -> bool {
        self.stage() == Some(DsaStage::Sparse)
    }

    /// Computes the outputs of heads that choose by clusters or hashes.
    fn forward(&self, query: Tensor<4>, value: Tensor<4>, seed: Option<Seed>) -> Result<Seen> {
        match (&self.routing, &self.lsh) {
            (Some(routing), _) => {
                let out = routing.try_forward(query, value)?;
                let mut seen = Seen::from(out.context);
                seen.aside.aux_loss = out.commitment;
                Ok(seen)
            }
            (None, Some(lsh)) => Ok(lsh.try_forward(query, value, seed)?.into()),
            (None, None) => unreachable!("made with one of them, or called as a whole layer"),
        }
    }

    /// Computes the pattern's heads, followed by those that choose by content.
    fn beside_pattern(
        &self,
        mha: &SparseMultiHeadAttention,
        input: SparseMhaInput,
    ) -> Result<(Seen, Call)> {
        let (call, request) = mha.prepare(&input, 0)?;
        let layout = mha.layouts.get(&request)?;
        let [query, key, value] = mha.project(input, &call)?;
        let local = self.local_heads;
        let trains = query.is_autodiff();
        let groups = |x: Tensor<4>| {
            let far = x.clone().slice_dim(1, local..mha.n_heads);
            (x.slice_dim(1, 0..local), far)
        };
        let ((query, far_query), (value, far_value)) = (groups(query), groups(value));
        let near = mha.attend([query, key, value], &layout, &call)?;
        let seed = match call.options.dropout_seed {
            Some(seed) => Some(seed.derive(ROTATIONS)),
            None => trains.then(|| mha.seeds.next()),
        };
        let far = self.forward(far_query, far_value, seed)?;
        let seen = Seen {
            heads: Tensor::cat(vec![near, far.heads], 1),
            aside: far.aside,
        };
        Ok((seen, call))
    }
}

impl AttentionKind for ContentHeads {
    fn check_input(&self, input: &SparseMhaInput) -> Result<()> {
        check_input(
            match self.config.is_whole_layer() {
                true => self.config.name(),
                false => "heads that choose by content",
            },
            input,
        )
    }

    fn context(
        &self,
        mha: &SparseMultiHeadAttention,
        input: SparseMhaInput,
        cache: Option<&mut SparseMhaCache>,
    ) -> Result<(Seen, Call)> {
        match (&self.nsa, &self.dsa, &self.msa) {
            (Some(nsa), ..) => nsa.context(mha, input, cache),
            (_, Some(dsa), _) => indexed::context(dsa, self.stage, mha, input, cache),
            (.., Some(msa)) => indexed::context(msa, self.stage, mha, input, cache),
            _ if self.config.has_indexer() => self.attend_projected(mha, input, cache),
            _ => self.beside_pattern(mha, input),
        }
    }

    fn attend(
        &self,
        mha: &SparseMultiHeadAttention,
        heads: Heads,
        request: &Request,
        call: &Call,
    ) -> Result<Seen> {
        match mha.takes_choice() && self.is_chosen() {
            true => call.taken_by(mha, heads),
            false => Ok((mha.attend(heads, &mha.layouts.get(request)?, call)?).into()),
        }
    }

    fn check_pattern(&self, pattern: &Pattern) -> Result<()> {
        match self.config.has_indexer() {
            true => check_pattern(self.config.name(), pattern),
            false => check_causal(pattern),
        }
    }

    fn ensure_replaceable(&self) -> Result<()> {
        let expected = match &self.config {
            ContentAttention::Routing(_) | ContentAttention::Lsh(_) => {
                "none with padding, packed sequences, weights, caches and pools: later tokens influence what its heads see"
            }
            ContentAttention::Nsa(_) => {
                "none with padding, packed sequences and weights, which know nothing of its branches"
            }
            ContentAttention::Dsa(_) | ContentAttention::Msa(_) => {
                "none with padding, packed sequences and weights, which know nothing of its indexer"
            }
        };
        let refused = TransformerError::argument("content", expected, &self.config);
        Err(refused)
    }

    fn ensure_decodable(&self) -> Result<()> {
        match self.config.is_prefix_stable() {
            true => Ok(()),
            false => self.ensure_replaceable(),
        }
    }

    fn pairs(&self, mha: &SparseMultiHeadAttention, seq: usize) -> Result<u64> {
        let far = (mha.n_heads - self.local_heads) as u64;
        let of_head = match (&self.routing, &self.lsh, &self.nsa) {
            (Some(routing), ..) => routing.pairs(seq),
            (_, Some(lsh), _) => lsh.pairs(seq),
            (.., Some(nsa)) => nsa.pairs(seq),
            (None, None, None) => match &self.config {
                ContentAttention::Dsa(dsa) if self.is_chosen() => seen(seq, dsa.keep),
                ContentAttention::Msa(msa) if self.is_chosen() => msa.pairs(seq)?,
                _ => seen(seq, seq),
            },
        };
        let near = match self.config.is_whole_layer() {
            true => 0,
            false => mha.layout(seq, seq)?.allowed_pairs(),
        };
        Ok(near + far * of_head)
    }

    fn matmul_flops_per_token(&self) -> u64 {
        match (&self.nsa, &self.dsa, &self.msa) {
            (Some(nsa), ..) => nsa.matmul_flops_per_token(),
            (_, Some(dsa), _) if self.is_chosen() => dsa.layer_flops(),
            (.., Some(msa)) if self.is_chosen() => msa.layer_flops(),
            _ => 0,
        }
    }

    fn score_flops(&self, seq: usize) -> u64 {
        match (&self.dsa, &self.msa) {
            (Some(dsa), _) if self.is_chosen() => dsa.choice_flops(seq),
            (_, Some(msa)) if self.is_chosen() => msa.choice_flops(seq),
            _ => 0,
        }
    }

    fn display(&self, content: Content) -> Content {
        let content = content.add("content", &self.config.to_string());
        content.add("local_heads", &self.local_heads)
    }
}

impl SparseMultiHeadAttentionConfig {
    pub(crate) fn pattern_heads(&self) -> usize {
        match &self.content {
            Some(content) if !content.is_whole_layer() => {
                self.local_heads.unwrap_or(self.n_heads / 2)
            }
            // In the second case the pattern is not used.
            None | Some(_) => self.n_heads,
        }
    }

    pub(crate) fn validate_content(&self) -> Result<()> {
        let Some(content) = &self.content else {
            let expected = "none without content, where all heads are the pattern's";
            return ensure_none("local_heads", self.local_heads.is_some(), expected);
        };
        content.validate()?;
        if content.is_whole_layer() {
            let name = content.name();
            if content.has_indexer() {
                check_pattern(name, &self.pattern)?;
            }
            ensure! { self.pattern.is_causal() =>
            "pattern", format!("causal with {name}, whose tokens see earlier ones alone"), &self.pattern; }
            let expected = format!("none with {name}, which is all heads of a layer");
            ensure_none("local_heads", self.local_heads.is_some(), &expected)?;
            return self.ensure_no_options(&expected);
        }
        let local = self.pattern_heads();
        ensure! { (1..self.n_heads).contains(&local) =>
        "local_heads", format!("at least 1 and below n_heads = {}, so that there are heads of both kinds", self.n_heads), local; }
        let counted =
            !matches!(content, ContentAttention::Routing(config) if config.clusters.is_none());
        ensure! { counted => "clusters", "given where the context is not", "none"; }
        if let ContentAttention::Lsh(config) = content {
            ensure! { config.causal =>
            "causal", "true: its queries see earlier tokens alone", config.causal; }
        }
        ensure! { self.pattern.is_causal() =>
        "pattern", "causal next to content-based heads, which see earlier tokens alone", &self.pattern; }
        let expected = "none next to content-based heads";
        self.ensure_no_options(expected)?;
        for (argument, given) in [
            (
                "n_kv_heads",
                self.n_kv_heads.is_some_and(|heads| heads != self.n_heads),
            ),
            ("scale", self.scale.is_some()),
            ("rope", self.rope.is_some()),
            ("qk_norm", self.qk_norm.is_some()),
        ] {
            ensure_none(argument, given, expected)?;
        }
        Ok(())
    }

    /// Checks that no option is set that content-based heads do not support.
    pub(crate) fn ensure_no_options(&self, expected: &str) -> Result<()> {
        for (argument, given) in [
            ("selection", self.selection.is_some()),
            ("head_dim", self.head_dim.is_some()),
            ("rope_scaling", self.rope_scaling.is_some()),
            ("softcap", self.softcap.is_some()),
            ("softmax_threshold", self.softmax_threshold.is_some()),
            ("dropout", self.dropout > 0.0),
            ("alibi", self.alibi),
            ("relative_reach", self.relative_reach.is_some()),
            ("sinks", self.sinks),
            ("quiet_softmax", self.quiet_softmax),
            ("store_weights", self.store_weights),
        ] {
            ensure_none(argument, given, expected)?;
        }
        Ok(())
    }

    pub(crate) fn init_content(
        &self,
        head_dim: usize,
        device: &Device,
    ) -> Result<Option<ContentHeads>> {
        let Some(content) = &self.content else {
            return Ok(None);
        };
        let local_heads = match content.is_whole_layer() {
            true => 0,
            false => self.pattern_heads(),
        };
        let mut heads = ContentHeads {
            routing: None,
            lsh: None,
            nsa: None,
            dsa: None,
            msa: None,
            local_heads,
            config: content.clone(),
            stage: DsaStage::default(),
        };
        match content {
            ContentAttention::Routing(config) => {
                // The number of clusters is set: validated.
                let far = self.n_heads - local_heads;
                let mut means = config.try_init(far, head_dim, 1, device)?;
                means.products = self.precision.products();
                heads.routing = Some(means);
            }
            ContentAttention::Lsh(config) => heads.lsh = Some(config.try_init()?),
            // An earlier layer chooses.
            _ if self.choice_sharing == Some(ChoiceSharing::Takes) => {}
            ContentAttention::Nsa(config) => heads.nsa = Some(NsaHeads::new(config, self, device)?),
            ContentAttention::Dsa(config) => heads.dsa = Some(DsaHeads::new(config, self, device)?),
            ContentAttention::Msa(config) => heads.msa = Some(MsaHeads::new(config, self, device)?),
        }
        Ok(Some(heads))
    }
}

impl SparseMultiHeadAttention {
    /// Returns the heads of DeepSeek sparse attention, if the layer has them.
    pub fn dsa(&self) -> Option<&DsaHeads> {
        self.content.as_ref()?.dsa.as_ref()
    }

    /// Returns the heads of MiniMax sparse attention, if the layer has them.
    pub fn msa(&self) -> Option<&MsaHeads> {
        self.content.as_ref()?.msa.as_ref()
    }

    /// Returns the heads of DeepSeek sparse attention if they choose in the current stage: in the others, heads use their pattern.
    pub fn choosing_dsa(&self) -> Option<&DsaHeads> {
        (self.choosing_indexer()).and_then(|_| self.dsa())
    }

    /// Returns the configuration of the indexer whose choice heads attend to, the layer's own or that of an earlier layer; `None` in other stages of
    /// training.
    #[doc(hidden)]
    pub fn choosing_indexer(&self) -> Option<&ContentAttention> {
        let content = self.content.as_ref()?;
        content.is_chosen().then_some(&content.config)
    }

    /// Returns the heads of MiniMax sparse attention if they choose in the current stage.
    pub fn choosing_msa(&self) -> Option<&MsaHeads> {
        (self.choosing_indexer()).and_then(|_| self.msa())
    }

    pub(crate) fn kv_heads(&self) -> [usize; 2] {
        match &self.content {
            Some(content) if !content.config.is_whole_layer() => {
                [content.local_heads, self.n_heads]
            }
            None | Some(_) => [self.n_kv_heads; 2],
        }
    }

    pub(crate) fn pattern_heads(&self) -> usize {
        (self.content.as_ref()).map_or(self.n_heads, ContentHeads::local_heads)
    }

    /// Checks that a call that supports patterns only, or a cache, does not meet heads that choose by content.
    #[doc(hidden)]
    pub fn ensure_no_content(&self) -> Result<()> {
        match &self.content {
            None => Ok(()),
            Some(content) => content.ensure_replaceable(),
        }
    }

    /// Moves the means of heads that choose by clusters to an input's queries: see [`RoutingHeads::settle`]. Does nothing without such heads.
    ///
    /// # Errors
    /// If the shape does not match, or there are fewer tokens than clusters.
    pub fn kmeans_init(&mut self, x: Tensor<3>, seed: impl Into<Seed>) -> Result<()> {
        let Some(local) = self.content.as_ref().map(ContentHeads::local_heads) else {
            return Ok(());
        };
        let input = SparseMhaInput::self_attn(x);
        let (call, _) = self.prepare(&input, 0)?;
        let [query, ..] = self.project(input, &call)?;
        let query = query.slice_dim(1, local..self.n_heads);
        let routing = self.routing_mut();
        routing.map_or(Ok(()), |routing| routing.settle(query, seed))
    }

    /// [`RoutingHeads::ema_update`], if there are such heads.
    pub fn ema_update(&mut self) {
        if let Some(routing) = self.routing_mut() {
            routing.ema_update();
        }
    }

    fn routing_mut(&mut self) -> Option<&mut RoutingHeads> {
        self.content.as_mut()?.routing.as_mut()
    }
}

impl SparseTransformer {
    /// Moves the means of all heads that choose by clusters to their queries of some tokens, layer by layer: see [`RoutingHeads::settle`]. Call it before
    /// training. Does nothing without such heads.
    ///
    /// # Errors
    /// Those of [`Self::forward`]; also if there are fewer tokens than clusters.
    pub fn kmeans_init(&mut self, tokens: Tensor<2, Int>, seed: impl Into<Seed>) -> Result<()> {
        let seed = seed.into();
        // A copy without autodiff, which does not move means by itself.
        let plain = self.valid();
        let mut stream = Stream::new(plain.embed(tokens.without_autodiff(), 0)?);
        for (layer, block) in plain.blocks.iter().enumerate() {
            let mut mha = block.mha.clone();
            let attend = |input: SparseMhaInput| {
                mha.kmeans_init(input.query.clone(), seed.derive(layer as u64))?;
                mha.forward_projected(input)
            };
            stream = block.residual(stream, attend, block.pass(false))?;
            let settled = mha.content.and_then(|content| content.routing);
            if let Some((own, settled)) = self.blocks[layer].mha.routing_mut().zip(settled) {
                own.set_means(settled.means.val());
            }
        }
        Ok(())
    }

    /// Updates the means of all heads that choose by clusters with the queries of the latest training pass: see [`RoutingHeads::ema_update`]. Call it once in
    /// each step, after the optimizer's.
    pub fn ema_update(&mut self) {
        for block in &mut self.blocks {
            block.mha.ema_update();
        }
    }
}
