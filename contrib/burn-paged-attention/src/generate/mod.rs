//! Text generation from any [`Decoder`]: sampling, stop conditions, speculative drafts.

mod drafts;
mod sampling;

pub use drafts::{PromptLookup, PromptLookupIndex};
pub use sampling::Sampling;

use std::cmp::Reverse;
use std::ops::ControlFlow;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_sparse_transformer::decoder::Decoder;

use crate::PoolError;
use crate::pool::{
    self, CachePolicy, EvictionConfig, KvDtype, KvPool, KvPoolConfig, KvRetention, KvStep,
    PagedDecoder, SequenceId,
};
use crate::sampling::sample_tokens;

/// Options of [`generate`]. Build them from [`Default`].
#[derive(Clone, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct GenerateOptions {
    /// Sampling of tokens.
    pub sampling: Sampling,
    /// Most tokens to generate per prompt. Default: 256.
    pub max_new: usize,
    /// Tokens that end a text and do not belong to it.
    pub stop_tokens: Vec<u32>,
    /// Sequences of tokens that end a text and do not belong to it.
    pub stop: Vec<Vec<u32>>,
    /// Keys that are retained. Default: those that later tokens reach.
    pub residency: KvRetention,
    /// Eviction of keys, in place of [`Self::residency`]. Default: none.
    pub eviction: Option<EvictionConfig>,
    /// Dtype of stored keys and values. Default: that of the model's matmuls.
    pub kv_dtype: Option<KvDtype>,
    /// Slots of a page of keys and values: 16, 32, 64 or 128. Default: 32, or what the layers' selections need.
    pub page_size: Option<usize>,
    /// Speculative decoding by prompt lookup. Default: none.
    pub drafts: Option<PromptLookup>,
    /// True if the layers' selections apply to prompts only ([`KvPoolConfig::with_choosing_prompts`]). Default: no.
    pub choosing_prompts: bool,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            sampling: Sampling::default(),
            max_new: 256,
            stop_tokens: Vec::new(),
            stop: Vec::new(),
            residency: KvRetention::default(),
            eviction: None,
            kv_dtype: None,
            page_size: None,
            drafts: None,
            choosing_prompts: false,
        }
    }
}

impl GenerateOptions {
    blocksparse::setters! {
        /// Sets the sampling of tokens.
        sampling: Sampling,
        /// Sets the most tokens to generate per prompt.
        max_new: usize,
    }

    /// Sets tokens that end a text.
    pub fn stop_tokens(mut self, tokens: impl IntoIterator<Item = u32>) -> Self {
        self.stop_tokens = tokens.into_iter().collect();
        self
    }

    /// Sets sequences of tokens that end a text.
    pub fn stop(mut self, sequences: impl IntoIterator<Item = Vec<u32>>) -> Self {
        self.stop = sequences.into_iter().collect();
        self
    }

    blocksparse::setters! {
        /// Sets the keys that are retained.
        residency: KvRetention,
        /// Evicts keys by attention scores, per layer and KV head ([`KvPoolConfig::with_eviction`]): **changes the output**.
        eviction: Some(EvictionConfig),
    }

    /// Sets [`Self::residency`] or [`Self::eviction`] from a policy.
    pub fn policy(self, policy: CachePolicy) -> Self {
        match policy {
            CachePolicy::Retain(residency) => self.residency(residency),
            CachePolicy::Evict(eviction) => self.eviction(eviction),
        }
    }

    /// Sets the dtype of stored keys and values.
    pub fn kv_dtype(mut self, dtype: impl Into<KvDtype>) -> Self {
        self.kv_dtype = Some(dtype.into());
        self
    }

    blocksparse::setters! {
        /// Sets the page size, in slots.
        page_size: Some(usize),
        /// Sets speculative decoding by prompt lookup.
        drafts: Some(PromptLookup),
    }

    /// Applies the layers' selections to prompts only; later tokens see all retained keys ([`KvPoolConfig::with_choosing_prompts`]).
    pub fn choosing_prompts(mut self) -> Self {
        self.choosing_prompts = true;
        self
    }

    /// Returns the capacity for prompts and their continuations.
    fn pool(&self, prompts: &[Vec<u32>], context: usize) -> KvPoolConfig {
        let lengths = prompts.iter().map(|prompt| {
            let length = prompt.len().saturating_add(self.max_new);
            length.min(context)
        });
        // Keys that a window hides or that are evicted after a prompt are stored until the end of its call.
        let residency = self.eviction.map_or(self.residency, |_| KvRetention::Evict);
        let chunk = match residency {
            KvRetention::All | KvRetention::Reachable => 1,
            _ => prompts.iter().map(Vec::len).max().unwrap_or(1),
        };
        let drafted = self.drafts.map_or(0, |drafts| drafts.tokens);
        KvPoolConfig {
            chunk: chunk.max(1 + drafted),
            page_size: self.page_size,
            residency,
            rollback: drafted,
            dtype: self.kv_dtype.unwrap_or_default(),
            eviction: self.eviction,
            prompts_choose: self.choosing_prompts,
            ..KvPoolConfig::for_lengths(lengths)
        }
    }
}

/// A generated token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GenerateStep {
    /// Index of its prompt.
    pub prompt: usize,
    /// Number of tokens generated before it.
    pub index: usize,
    /// The token.
    pub token: u32,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// A stop token or stop sequence was sampled.
    Stop,
    /// [`GenerateOptions::max_new`] tokens were generated.
    Length,
    /// The callback returned `Break`.
    Caller,
    /// The model's context is full.
    Context,
    /// No logit was finite.
    NotFinite,
}

/// A generated text.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GenerateOutput {
    /// The tokens, without the prompt and without stop tokens.
    pub tokens: Vec<u32>,
    /// Why the text ended.
    pub reason: FinishReason,
    /// Number of draft tokens that were read; 0 without [`GenerateOptions::drafts`].
    pub drafted: usize,
    /// Number of draft tokens that were accepted.
    pub accepted: usize,
}

/// State of all texts.
struct Writer<'a> {
    options: &'a GenerateOptions,
    on_token: &'a mut dyn FnMut(GenerateStep) -> ControlFlow<()>,
    pool: KvPool,
}

/// A text in progress.
struct Text {
    prompt: usize,
    /// Its sequence in the pool, until it ends.
    sequence: Option<SequenceId>,
    /// Whether each token was read or written.
    seen: Vec<bool>,
    /// The prompt and the generated tokens, with drafts only.
    index: Option<PromptLookupIndex>,
    tokens: Vec<u32>,
    /// Number of tokens passed to the caller; those that may begin a stop sequence are held back.
    given: usize,
    drafted: usize,
    accepted: usize,
    reason: Option<FinishReason>,
}

impl Text {
    fn end(&mut self, reason: FinishReason) {
        self.reason.get_or_insert(reason);
    }

    /// Appends the next token, unless it ends the text.
    fn push(&mut self, token: Option<u32>, options: &GenerateOptions) {
        let Some(token) = token else {
            return self.end(FinishReason::NotFinite);
        };
        if options.stop_tokens.contains(&token) {
            return self.end(FinishReason::Stop);
        }
        self.tokens.push(token);
        self.seen[token as usize] = true;
        if let Some(index) = &mut self.index {
            index.extend([token]);
        }
        let stop = options
            .stop
            .iter()
            .filter(|stop| self.tokens.ends_with(stop));
        if let Some(longest) = stop.map(Vec::len).max() {
            self.tokens.truncate(self.tokens.len() - longest);
            self.end(FinishReason::Stop);
        } else if self.tokens.len() == options.max_new {
            self.end(FinishReason::Length);
        }
    }

    /// Appends the next token; a text that ends leaves the pool.
    fn next(&mut self, token: Option<u32>, writer: &mut Writer) -> Result<(), PoolError> {
        self.push(token, writer.options);
        self.give(writer);
        if self.reason.is_some()
            && let Some(id) = self.sequence.take()
        {
            writer.pool.leave(id)?;
        }
        Ok(())
    }

    /// Returns the draft for the model to verify after the last token.
    fn draft(&self, options: &GenerateOptions, len: usize, context: usize) -> Vec<u32> {
        let mut draft = self
            .index
            .as_ref()
            .map(PromptLookupIndex::draft)
            .unwrap_or_default();
        // The last token is read too, and one token is sampled after those that are read.
        let room = (context - len - 1).min(options.max_new - self.tokens.len() - 1);
        draft.truncate(room);
        draft
    }

    /// Accepts the sampled tokens as long as they equal the draft, and one more; rolls back the rest.
    fn check(
        &mut self,
        draft: &[u32],
        drawn: &[Option<u32>],
        writer: &mut Writer,
    ) -> Result<(), PoolError> {
        let mut accepted = 0;
        for &token in drawn {
            self.next(token, writer)?;
            if self.reason.is_some() || self.tokens.last() != draft.get(accepted) {
                break;
            }
            accepted += 1;
        }
        self.drafted += draft.len();
        self.accepted += accepted;
        let pool = &mut writer.pool;
        match self.sequence {
            Some(id) if accepted < draft.len() => {
                pool.truncate(id, pool.len(id)? - (draft.len() - accepted))
            }
            _ => Ok(()),
        }
    }

    /// Passes the tokens to the caller that certainly belong to the text.
    fn give(&mut self, writer: &mut Writer) {
        let held = match self.reason {
            None => held_back(&self.tokens, &writer.options.stop),
            Some(_) => 0,
        };
        while self.given < self.tokens.len() - held {
            let step = GenerateStep {
                prompt: self.prompt,
                index: self.given,
                token: self.tokens[self.given],
            };
            self.given += 1;
            if (writer.on_token)(step).is_break() {
                self.tokens.truncate(self.given);
                self.reason = Some(FinishReason::Caller);
                return;
            }
        }
    }
}

/// A text, and the draft tokens between its last one and a row.
type Row<'a> = (&'a Text, &'a [u32]);

/// Returns the number of last tokens that may begin a stop sequence.
fn held_back(tokens: &[u32], stop: &[Vec<u32>]) -> usize {
    let of = |stop: &Vec<u32>| {
        (1..stop.len())
            .rev()
            .find(|&len| tokens.ends_with(&stop[..len]))
    };
    stop.iter().filter_map(of).max().unwrap_or(0)
}

/// Continues prompts, whose lengths may differ, and calls `on_token` for each token as soon as it certainly belongs to the text. A break ends that
/// prompt's text.
///
/// Prompts are read and continued as one batch from one [`KvPool`]; a text that has ended leaves it. Samples depend on the seed, the prompt's index
/// in `prompts` and the step, not on the rest of the batch. Tokens are sampled on the device ([`sample_tokens`]) and read back in every step. With
/// [`GenerateOptions::drafts`] a step may write several tokens; the text is the same.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use burn::tensor::Device;
/// use burn_paged_attention::generate::{GenerateOptions, Sampling, generate};
/// use burn_sparse_transformer::{Factorization, Pattern, SparseTransformerConfig};
///
/// let model = SparseTransformerConfig::new(16, 2, Factorization::from(Pattern::fixed(8, 2)))
///     .with_vocab_size(256)
///     .with_context(64)
///     .with_n_layers(1)
///     .init(&Device::flex());
/// let prompts = ["The ".as_bytes(), b"A"].map(|text| text.iter().map(|&byte| byte.into()).collect());
/// let options = GenerateOptions::default().max_new(5).sampling(Sampling::default().top_p(0.9));
/// let texts = generate(&model, &prompts, &options, &mut |step| {
///     println!("{}: {}", step.prompt, step.token);
///     ControlFlow::Continue(())
/// })?;
/// assert_eq!((texts.len(), texts[1].tokens.len()), (2, 5));
/// # Ok::<(), burn_paged_attention::PoolError>(())
/// ```
///
/// # Errors
/// If a prompt is empty, longer than the context or has a token outside the vocabulary, a stop sequence is empty, or a value of `options.sampling`
/// is out of range; and those of [`PagedDecoder::forward_pool`].
pub fn generate<M: Decoder>(
    model: &M,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    on_token: &mut dyn FnMut(GenerateStep) -> ControlFlow<()>,
) -> Result<Vec<GenerateOutput>, PoolError> {
    #[cfg(feature = "autodiff")]
    if device_of(model).is_autodiff() {
        // Caches would retain the autodiff graph of every step.
        return generate(&model.valid(), prompts, options, on_token);
    }
    let vocab = model.vocab_size();
    let context = context_of(model);
    check_prompts(prompts, options, vocab, context)?;
    let texts = (0..prompts.len()).map(|prompt| {
        let mut seen = vec![false; vocab];
        (prompts[prompt].iter()).for_each(|&token| seen[token as usize] = true);
        let index = options.drafts.map(|drafts| {
            let mut index = PromptLookupIndex::new(drafts);
            index.extend(prompts[prompt].iter().copied());
            index
        });
        Text {
            prompt,
            sequence: None,
            seen,
            index,
            tokens: Vec::new(),
            given: 0,
            drafted: 0,
            accepted: 0,
            reason: (options.max_new == 0).then_some(FinishReason::Length),
        }
    });
    let mut texts: Vec<Text> = texts.collect();
    if options.max_new > 0 && !texts.is_empty() {
        let mut writer = Writer {
            options,
            on_token,
            pool: model.new_pool(&options.pool(prompts, context))?,
        };
        read_prompts(model, prompts, &mut texts, &mut writer)?;
        continue_texts(model, &mut texts, &mut writer)?;
    }
    let ended = texts.into_iter().map(|text| GenerateOutput {
        tokens: text.tokens,
        reason: text.reason.unwrap_or(FinishReason::Length),
        drafted: text.drafted,
        accepted: text.accepted,
    });
    Ok(ended.collect())
}

/// Reads the prompts and samples a token after each. A batch contains prompts at least half as long as its longest.
fn read_prompts<M: Decoder>(
    model: &M,
    prompts: &[Vec<u32>],
    texts: &mut [Text],
    writer: &mut Writer,
) -> Result<(), PoolError> {
    let mut order: Vec<usize> = (0..texts.len()).collect();
    order.sort_by_key(|&text| Reverse(prompts[text].len()));
    let mut rest = order.as_slice();
    while let Some(&longest) = rest.first() {
        let most = prompts[longest].len();
        let count = rest.partition_point(|&text| 2 * prompts[text].len() >= most);
        let (group, shorter) = rest.split_at(count);
        rest = shorter;
        let (mut steps, mut read) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for &text in group {
            let id = writer.pool.join()?;
            texts[text].sequence = Some(id);
            steps.push(KvStep::new(id, prompts[text].len()));
            read.push(&prompts[text]);
        }
        let logits = model.next_logits(ids(model, &read, most), &steps, &mut writer.pool)?;
        let rows: Vec<Row> = group.iter().map(|&text| (&texts[text], &[][..])).collect();
        let drawn = draw(logits, &rows, &writer.options.sampling)?;
        for (&text, token) in group.iter().zip(drawn) {
            texts[text].next(token, writer)?;
        }
    }
    Ok(())
}

/// Continues texts until all have ended.
fn continue_texts<M: Decoder>(
    model: &M,
    texts: &mut [Text],
    writer: &mut Writer,
) -> Result<(), PoolError> {
    loop {
        let (mut steps, mut read, mut going_on) = (Vec::new(), Vec::new(), Vec::new());
        for text in texts.iter_mut().filter(|text| text.reason.is_none()) {
            let Some((id, &token)) = text.sequence.zip(text.tokens.last()) else {
                continue;
            };
            let (len, context) = (writer.pool.len(id)?, context_of(model));
            if len == context {
                text.end(FinishReason::Context);
                text.give(writer);
                continue;
            }
            let draft = text.draft(writer.options, len, context);
            steps.push(KvStep::new(id, 1 + draft.len()));
            read.push([vec![token], draft].concat());
            going_on.push(text);
        }
        if steps.is_empty() {
            return Ok(());
        }
        let seq = read.iter().map(Vec::len).max().unwrap_or(1);
        let ids = ids(model, &read.iter().collect::<Vec<_>>(), seq);
        let logits = match seq {
            1 => model.next_logits(ids, &steps, &mut writer.pool)?,
            _ => {
                let logits = model.try_forward_pool(ids, &steps, &mut writer.pool)?;
                let [batch, seq, vocab] = logits.dims();
                logits.reshape([batch * seq, vocab])
            }
        };
        let texts = going_on.iter().zip(&read);
        // Each row's draft prefix is the text before it. Rows after a text's own are unused.
        let rows = texts.flat_map(|(text, read)| {
            let text: &Text = text;
            (0..seq).map(move |row| (text, &read[1..read.len().min(row + 1)]))
        });
        let drawn = draw(
            logits,
            &rows.collect::<Vec<Row>>(),
            &writer.options.sampling,
        )?;
        let drawn = drawn.chunks(seq).zip(&read);
        for (text, (drawn, read)) in going_on.into_iter().zip(drawn) {
            text.check(&read[1..], &drawn[..read.len()], writer)?;
        }
    }
}

/// Samples a token from each row of logits; None if no logit is finite. Samples on the device and reads back.
fn draw(
    logits: Tensor<2>,
    rows: &[Row],
    sampling: &Sampling,
) -> Result<Vec<Option<u32>>, PoolError> {
    let device = logits.device();
    let [count, vocab] = logits.dims();
    let numbers = rows.iter().map(|(text, draft)| {
        let step = text.tokens.len() + draft.len();
        sampling.number(text.prompt, step) as f32
    });
    // Rounding to f32 must not give 1.
    let numbers = numbers.map(|number| number.min(1.0 - f32::EPSILON / 2.0));
    let numbers = TensorData::new(numbers.collect::<Vec<f32>>(), [count]);
    let numbers = Tensor::from_data(numbers, (&device, DType::F32));
    let seen = (sampling.repetition != 1.0).then(|| {
        let mut seen = Vec::with_capacity(count * vocab);
        for (row, (text, draft)) in rows.iter().enumerate() {
            seen.extend(text.seen.iter().map(|&seen| i32::from(seen)));
            for &token in *draft {
                seen[row * vocab + token as usize] = 1;
            }
        }
        let seen = TensorData::new(seen, [count, vocab]);
        Tensor::<2, Int>::from_data(seen, (&device, DType::I32))
    });
    let tokens = sample_tokens(logits, numbers, seen, &sampling.options)?;
    let tokens = tokens.into_data();
    Ok(tokens
        .iter::<i64>()
        .map(|token| u32::try_from(token).ok())
        .collect())
}

/// Uploads tokens of rows, padded with zeros.
fn ids<M: Decoder>(model: &M, rows: &[&Vec<u32>], seq: usize) -> Tensor<2, Int> {
    let mut ids: Vec<i64> = Vec::with_capacity(rows.len() * seq);
    for (row, tokens) in rows.iter().enumerate() {
        ids.extend(tokens.iter().map(|&token| i64::from(token)));
        ids.resize((row + 1) * seq, 0);
    }
    let data = TensorData::new(ids, [rows.len(), seq]);
    Tensor::from_data(data, &device_of(model))
}

fn device_of<M: Decoder>(model: &M) -> Device {
    model.attentions()[0].key.weight.device()
}

/// Returns the number of positions of a model.
fn context_of<M: Decoder>(model: &M) -> usize {
    let most = pool::context_of(&model.attentions(), model.max_positions());
    most.unwrap_or(usize::MAX)
}

fn check_prompts(
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    vocab: usize,
    context: usize,
) -> Result<(), PoolError> {
    options.sampling.check()?;
    if let Some(drafts) = &options.drafts {
        drafts.check()?;
    }
    blocksparse::ensure! { PoolError; options.stop.iter().all(|stop| !stop.is_empty()) => "stop", "sequences of at least one token", "an empty one"; }
    for (index, prompt) in prompts.iter().enumerate() {
        blocksparse::ensure! {
            PoolError;
            (1..=context).contains(&prompt.len()) => "prompts", format!("of 1 to {context} tokens, the context"), format!("{} in prompt {index}", prompt.len());
        }
        if let Some(token) = prompt.iter().find(|&&token| token as usize >= vocab) {
            let expected = format!("of tokens below {vocab}, the model's vocabulary");
            let got = format!("{token} in prompt {index}");
            return Err(PoolError::argument("prompts", expected, got));
        }
    }
    Ok(())
}
