//! Text from a model: token after token, from caches.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::error::ensure;
use crate::{Sampling, SparseTransformer, TransformerError};

/// What [`SparseTransformer::generate`] writes, and where it ends. Build it from [`Default`].
#[derive(Clone, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct GenerateOptions {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// The most tokens that a prompt is followed by. Default: 256.
    pub max_new: usize,
    /// Tokens that end a text and do not belong to it.
    pub stop_tokens: Vec<u32>,
    /// Sequences of tokens that end a text and do not belong to it.
    pub stop: Vec<Vec<u32>>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            sampling: Sampling::default(),
            max_new: 256,
            stop_tokens: Vec::new(),
            stop: Vec::new(),
        }
    }
}

impl GenerateOptions {
    /// Sets how tokens are chosen.
    pub fn sampling(mut self, sampling: Sampling) -> Self {
        self.sampling = sampling;
        self
    }

    /// Sets the most tokens that a prompt is followed by.
    pub fn max_new(mut self, max_new: usize) -> Self {
        self.max_new = max_new;
        self
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
}

/// A token as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GenerateStep {
    /// Which prompt it follows.
    pub prompt: usize,
    /// Tokens that were written before it.
    pub index: usize,
    /// The token.
    pub token: u32,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EndReason {
    /// A stop token or sequence was drawn.
    Stop,
    /// [`GenerateOptions::max_new`] tokens were written.
    Length,
    /// The caller broke off.
    Caller,
    /// The model's context is full.
    Context,
    /// No logit was finite.
    NotFinite,
}

/// What follows a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Generated {
    /// The tokens, without the prompt and without what stopped them.
    pub tokens: Vec<u32>,
    /// Why there are no more.
    pub reason: EndReason,
}

/// A text that is being written.
struct Text {
    prompt: usize,
    /// Whether a token was read or written.
    seen: Vec<bool>,
    tokens: Vec<u32>,
    /// Tokens that the caller was given: not those that may begin a stop sequence.
    given: usize,
    reason: Option<EndReason>,
}

impl Text {
    fn end(&mut self, reason: EndReason) {
        self.reason.get_or_insert(reason);
    }

    /// Takes the next token, as far as the text goes on.
    fn push(&mut self, token: Option<u32>, options: &GenerateOptions) {
        let Some(token) = token else {
            return self.end(EndReason::NotFinite);
        };
        if options.stop_tokens.contains(&token) {
            return self.end(EndReason::Stop);
        }
        self.tokens.push(token);
        self.seen[token as usize] = true;
        let stop = options
            .stop
            .iter()
            .filter(|stop| self.tokens.ends_with(stop));
        if let Some(longest) = stop.map(Vec::len).max() {
            self.tokens.truncate(self.tokens.len() - longest);
            self.end(EndReason::Stop);
        } else if self.tokens.len() == options.max_new {
            self.end(EndReason::Length);
        }
    }

    /// Gives the caller what is certain to belong to the text.
    fn give(
        &mut self,
        options: &GenerateOptions,
        on_token: &mut dyn FnMut(GenerateStep) -> ControlFlow<()>,
    ) {
        let held = match self.reason {
            None => held_back(&self.tokens, &options.stop),
            Some(_) => 0,
        };
        while self.given < self.tokens.len() - held {
            let step = GenerateStep {
                prompt: self.prompt,
                index: self.given,
                token: self.tokens[self.given],
            };
            self.given += 1;
            if on_token(step).is_break() {
                self.tokens.truncate(self.given);
                self.reason = Some(EndReason::Caller);
                return;
            }
        }
    }
}

/// How many of the last tokens may be the beginning of a stop sequence.
fn held_back(tokens: &[u32], stop: &[Vec<u32>]) -> usize {
    let of = |stop: &Vec<u32>| {
        (1..stop.len())
            .rev()
            .find(|&len| tokens.ends_with(&stop[..len]))
    };
    stop.iter().filter_map(of).max().unwrap_or(0)
}

impl SparseTransformer {
    /// Continues prompts, which may be of different lengths, and calls `on_token` for each token as soon as it is certain to belong to the text.
    /// A break ends that prompt's text.
    ///
    /// Prompts of one length are read and continued as one batch, from one cache. What is drawn depends on the seed, the prompt's number in
    /// `prompts` and the step, not on what else is in the batch. Logits are read back for every step.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    ///
    /// use burn::tensor::Device;
    /// use burn_sparse_transformer::{
    ///     Factorization, GenerateOptions, Pattern, Sampling, SparseTransformerConfig,
    /// };
    ///
    /// let model = SparseTransformerConfig::new(16, 2, Factorization::from(Pattern::fixed(8, 2)))
    ///     .with_vocab_size(256)
    ///     .with_context(64)
    ///     .with_n_layers(1)
    ///     .init(&Device::flex())?;
    /// let prompts = ["The ".as_bytes(), b"A"].map(|text| text.iter().map(|&byte| byte.into()).collect());
    /// let options = GenerateOptions::default().max_new(5).sampling(Sampling::default().top_p(0.9));
    /// let texts = model.generate(&prompts, &options, &mut |step| {
    ///     println!("{}: {}", step.prompt, step.token);
    ///     ControlFlow::Continue(())
    /// })?;
    /// assert_eq!((texts.len(), texts[1].tokens.len()), (2, 5));
    /// # Ok::<(), burn_sparse_transformer::TransformerError>(())
    /// ```
    ///
    /// # Errors
    /// If a prompt is empty, longer than the context or has a token that is none, a stop sequence is empty, or a number of `options.sampling` is out
    /// of its range; and as [`Self::forward_cache`].
    pub fn generate(
        &self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        on_token: &mut dyn FnMut(GenerateStep) -> ControlFlow<()>,
    ) -> Result<Vec<Generated>, TransformerError> {
        let device = self.token_embedding.weight.device();
        #[cfg(feature = "autodiff")]
        if device.is_autodiff() {
            // Caches would keep the graph of every step.
            return burn::module::Module::valid(self).generate(prompts, options, on_token);
        }
        let [_, vocab] = self.output.weight.dims();
        self.check_prompts(prompts, options, vocab)?;
        let mut by_length: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, prompt) in prompts.iter().enumerate() {
            by_length.entry(prompt.len()).or_default().push(index);
        }
        let mut generated: Vec<Option<Generated>> = vec![None; prompts.len()];
        for group in by_length.into_values() {
            let texts = group.into_iter().map(|prompt| {
                let mut seen = vec![false; vocab];
                (prompts[prompt].iter()).for_each(|&token| seen[token as usize] = true);
                Text {
                    prompt,
                    seen,
                    tokens: Vec::new(),
                    given: 0,
                    reason: (options.max_new == 0).then_some(EndReason::Length),
                }
            });
            let mut texts: Vec<Text> = texts.collect();
            self.continue_texts(prompts, &mut texts, options, on_token, &device)?;
            for text in texts {
                generated[text.prompt] = Some(Generated {
                    tokens: text.tokens,
                    reason: text.reason.unwrap_or(EndReason::Length),
                });
            }
        }
        Ok(generated.into_iter().flatten().collect())
    }

    /// Writes the texts of prompts of one length.
    fn continue_texts(
        &self,
        prompts: &[Vec<u32>],
        texts: &mut [Text],
        options: &GenerateOptions,
        on_token: &mut dyn FnMut(GenerateStep) -> ControlFlow<()>,
        device: &Device,
    ) -> Result<(), TransformerError> {
        let mut cache = self.new_cache();
        let mut tokens: Vec<u32> = (texts.iter())
            .flat_map(|text| prompts[text.prompt].iter().copied())
            .collect();
        for step in 0.. {
            if texts.iter().all(|text| text.reason.is_some()) {
                break;
            }
            let [batch, new] = [texts.len(), tokens.len() / texts.len()];
            if cache.position() + new > self.context() {
                texts
                    .iter_mut()
                    .for_each(|text| text.end(EndReason::Context));
                texts
                    .iter_mut()
                    .for_each(|text| text.give(options, on_token));
                break;
            }
            let ids: Vec<i64> = tokens.iter().map(|&token| token.into()).collect();
            let data = TensorData::new(ids, [batch, new]);
            let ids = Tensor::<2, Int>::from_data(data, device);
            let logits = self.forward_cache(ids, &mut cache)?;
            let [_, _, vocab] = logits.dims();
            let logits: Vec<f32> = (logits.narrow(1, new - 1, 1).into_data())
                .convert::<f32>()
                .try_into_vec()
                .map_err(|error| {
                    TransformerError::argument("logits", "numbers", format!("{error:?}"))
                })?;
            tokens.clear();
            for (text, logits) in texts.iter_mut().zip(logits.chunks(vocab)) {
                if text.reason.is_none() {
                    let seen = |token: u32| text.seen[token as usize];
                    let token = options.sampling.choose(logits, seen, [text.prompt, step]);
                    text.push(token, options);
                    text.give(options, on_token);
                }
                // What has ended keeps its place in the batch, and reads something.
                tokens.push(text.tokens.last().copied().unwrap_or(0));
            }
        }
        Ok(())
    }

    fn check_prompts(
        &self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        vocab: usize,
    ) -> Result<(), TransformerError> {
        options.sampling.check()?;
        ensure(
            options.stop.iter().all(|stop| !stop.is_empty()),
            "stop",
            || "sequences of at least one token".into(),
            "an empty one",
        )?;
        for (index, prompt) in prompts.iter().enumerate() {
            let expected = || {
                let context = self.context();
                format!("of 1 to {context} tokens, the context")
            };
            let fits = (1..=self.context()).contains(&prompt.len());
            ensure(
                fits,
                "prompts",
                expected,
                format!("{} in prompt {index}", prompt.len()),
            )?;
            if let Some(token) = prompt.iter().find(|&&token| token as usize >= vocab) {
                let expected = format!("of tokens below {vocab}, the model's vocabulary");
                let got = format!("{token} in prompt {index}");
                return Err(TransformerError::argument("prompts", expected, got));
            }
        }
        Ok(())
    }
}
