//! Bits of the ends of windows whose beginnings are in a KV cache.

use anyhow::{Result, ensure};
use burn::tensor::activation::log_softmax;
use burn::tensor::{FloatDType, Tensor};
use burn_paged_attention::pool::{KvPoolConfig, KvStep, PagedDecoder};
use burn_sparse_transformer::llama::Llama;

use crate::rows::Setting;
use crate::windows::{Bits, Windows};

/// Partition of windows: a prompt in one call, then `chunk` tokens per call, which are scored.
pub struct Ends {
    pub prompt: usize,
    pub chunk: usize,
    /// Windows of a call.
    pub batch: usize,
}

impl Ends {
    pub fn check(&self, window: usize) -> Result<()> {
        ensure!(
            (1..window).contains(&self.prompt),
            "--prompt must be from 1 to {}, below --window, got {}",
            window.saturating_sub(1),
            self.prompt
        );
        ensure!(
            self.chunk > 0 && self.batch > 0,
            "--chunk and --batch must be above 0"
        );
        Ok(())
    }

    /// Returns the bits after the prompts, and the share of earlier keys that the cache lets a call see.
    pub fn bits(
        &self,
        model: &Llama,
        setting: Setting,
        windows: &Windows,
        done: impl Fn(usize),
    ) -> Result<Bits> {
        let mut found = Bits::default();
        let (mut shares, mut calls) = (0.0, 0);
        for starts in windows.starts.chunks(self.batch) {
            let [tokens, targets] = [0, 1].map(|shift| windows.tokens(starts, shift));
            let config = KvPoolConfig::new(starts.len(), windows.length).with_chunk(self.chunk);
            let mut pool = model.new_pool(&setting.pool(config, self.prompt.max(self.chunk)))?;
            let ids = starts.iter().map(|_| pool.join());
            let ids = ids.collect::<Result<Vec<_>, _>>()?;
            let of = |count| -> Vec<KvStep> {
                let steps = ids.iter().map(|&id| KvStep::new(id, count));
                steps.collect()
            };
            let prompt = tokens.clone().narrow(1, 0, self.prompt);
            drop(model.next_logits(prompt, &of(self.prompt), &mut pool)?);
            let mut sums = Vec::new();
            for first in (self.prompt..windows.length).step_by(self.chunk) {
                let count = self.chunk.min(windows.length - first);
                // All windows have the same length, and so the same number of kept keys.
                let usage = pool.usage(ids[0])?;
                shares += usage.read_bytes as f64 / usage.all_bytes as f64;
                calls += 1;
                let [read, next] = [&tokens, &targets].map(|x| x.clone().narrow(1, first, count));
                let logits = model.try_forward_pool(read, &of(count), &mut pool)?;
                let logs = log_softmax(logits.cast(FloatDType::F32), 2);
                sums.push(logs.gather(2, next.unsqueeze_dim(2)).sum());
            }
            let sum: f32 = Tensor::cat(sums, 0).sum().into_scalar();
            found.bits -= f64::from(sum) / std::f64::consts::LN_2;
            for &start in starts {
                found.tokens += windows.length - self.prompt;
                found.bytes += windows.bytes(start, self.prompt);
            }
            done(starts.len());
        }
        found.share = (calls > 0).then(|| shares / f64::from(calls));
        Ok(found)
    }
}
