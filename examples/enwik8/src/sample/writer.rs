//! Generation of several texts at once.

use anyhow::Result;
use burn_paged_attention::pool::{GraphDecoder, KvPoolConfig, KvStep, PagedDecoder, SequenceId};
use burn_sparse_transformer::SparseTransformer;

use super::statistics::CacheStatistics;
use crate::model;
use crate::step::replays;

/// Model, and what it has read of each text.
pub struct Writer {
    decoder: GraphDecoder<SparseTransformer>,
    context: usize,
    windows: Vec<Window>,
    /// Least bytes of each text that steps with drafts read: recordings have one size.
    padded: usize,
}

/// Window of a text in the context.
struct Window {
    id: SequenceId,
    bytes: Vec<u8>,
}

impl Writer {
    /// Creates a writer. With `graph`, steps of one byte and of up to `drafted` bytes and one are recorded and replayed if the device supports it.
    pub fn new(
        model: SparseTransformer,
        pool: &KvPoolConfig,
        graph: bool,
        drafted: usize,
    ) -> Result<Self> {
        let (context, pool) = (model.context(), model.new_pool(pool)?);
        Ok(Writer {
            decoder: GraphDecoder::new(model, pool)?.recording(graph),
            context,
            windows: Vec::new(),
            padded: if graph { 1 + drafted } else { 1 },
        })
    }

    /// Begins the texts and returns the logits of each one's next byte. Equal prompts are read once and share their keys.
    pub fn begin(&mut self, prompts: &[&[u8]]) -> Result<Vec<Vec<f32>>> {
        let first = |prompt: &&[u8]| prompts.iter().position(|other| other == prompt);
        let firsts: Vec<usize> = prompts.iter().filter_map(first).collect();
        let read: Vec<usize> = (0..prompts.len()).filter(|&at| firsts[at] == at).collect();
        for _ in &read {
            self.windows.push(Window {
                id: self.decoder.pool_mut().join()?,
                bytes: Vec::new(),
            });
        }
        let bytes: Vec<(usize, &[u8])> = (read.iter().enumerate())
            .map(|(at, &text)| (at, prompts[text]))
            .collect();
        let logits = self.read(&bytes)?;
        let windows = std::mem::take(&mut self.windows);
        let mut each = Vec::with_capacity(prompts.len());
        for (text, first) in firsts.iter().enumerate() {
            let at = read.binary_search(first).unwrap_or_default();
            let Window { id, bytes } = &windows[at];
            let id = match text == *first {
                true => *id,
                false => self.decoder.pool_mut().fork(*id)?,
            };
            let bytes = bytes.clone();
            self.windows.push(Window { id, bytes });
            each.push(logits[at].clone());
        }
        Ok(each)
    }

    /// Reads more bytes of texts and returns the logits of each one's next byte.
    pub fn read(&mut self, more: &[(usize, &[u8])]) -> Result<Vec<Vec<f32>>> {
        let context = self.context;
        let mut logits = vec![Vec::new(); more.len()];
        let (mut single, mut longer) = (Vec::new(), Vec::new());
        for (place, &(text, bytes)) in more.iter().enumerate() {
            let window = &mut self.windows[text];
            let mut new = bytes.to_vec();
            if window.bytes.len() + bytes.len() <= context {
                window.bytes.extend(bytes);
            } else {
                // Positions are absolute, so the cache cannot slide: the newest half is read again from position 0.
                let all = [window.bytes.as_slice(), bytes].concat();
                new = all[all.len() - (context / 2).max(1)..].to_vec();
                window.bytes = new.clone();
                let mut pool = self.decoder.pool_mut();
                pool.leave(window.id)?;
                window.id = pool.join()?;
            }
            let together = if new.len() == 1 {
                &mut single
            } else {
                &mut longer
            };
            together.push((place, window.id, new));
        }
        for together in [single, longer] {
            self.forward(&together, &mut logits)?;
        }
        Ok(logits)
    }

    /// Returns the bytes of a draft that fit in the window of a text, after one more byte.
    pub fn room(&self, text: usize) -> usize {
        let len = self.windows[text].bytes.len();
        self.context.saturating_sub(len + 1)
    }

    /// Reads the next byte of each text and its draft, within [`Self::room`], and returns the logits after each of them.
    pub fn check(&mut self, more: &[(usize, Vec<u8>)]) -> Result<Vec<Vec<Vec<f32>>>> {
        let is_plain = self.padded == 1 && more.iter().all(|(_, bytes)| bytes.len() == 1);
        // Full windows begin anew, which is a separate read.
        let is_full = |text: usize| self.windows[text].bytes.len() == self.context;
        let (alone, together): (Vec<usize>, Vec<usize>) =
            (0..more.len()).partition(|&place| is_plain || is_full(more[place].0));
        let read: Vec<(usize, &[u8])> = (alone.iter())
            .map(|&place| (more[place].0, more[place].1.as_slice()))
            .collect();
        let mut rows = vec![Vec::new(); more.len()];
        for (place, logits) in alone.into_iter().zip(self.read(&read)?) {
            rows[place] = vec![logits];
        }
        if together.is_empty() {
            return Ok(rows);
        }
        for &place in &together {
            let (text, bytes) = &more[place];
            self.windows[*text].bytes.extend(bytes);
        }
        let texts = together.iter().map(|&place| &more[place]);
        let (steps, tokens) = call_of(
            texts.map(|(text, bytes)| (self.windows[*text].id, &**bytes)),
            self.padded,
        );
        let logits = self.decoder.all_logits(&tokens, &steps)?;
        let [batch, seq, vocab] = logits.dims();
        let logits = model::rows(logits.reshape([batch * seq, vocab]))?;
        for (&place, logits) in together.iter().zip(logits.chunks(seq)) {
            rows[place] = logits[..more[place].1.len()].to_vec();
        }
        Ok(rows)
    }

    /// Rolls back the last bytes that were read of a text.
    pub fn take_back(&mut self, text: usize, bytes: usize) -> Result<()> {
        let window = &mut self.windows[text];
        let len = window.bytes.len() - bytes;
        window.bytes.truncate(len);
        Ok(self.decoder.pool_mut().truncate(window.id, len)?)
    }

    /// Runs one call for several texts.
    fn forward(
        &mut self,
        texts: &[(usize, SequenceId, Vec<u8>)],
        logits: &mut [Vec<f32>],
    ) -> Result<()> {
        if texts.is_empty() {
            return Ok(());
        }
        let (steps, tokens) = call_of(texts.iter().map(|(_, id, bytes)| (*id, &**bytes)), 0);
        let next = self.decoder.next_logits(&tokens, &steps)?;
        for ((place, ..), next) in texts.iter().zip(model::rows(next)?) {
            logits[*place] = next;
        }
        Ok(())
    }

    /// Returns the size of the keys and values of all texts.
    pub fn usage(&self) -> Result<CacheStatistics> {
        let pool = self.decoder.pool();
        let shared = pool.page_pools().map(|books| {
            let pages = 0..books.config().pages();
            pages.filter(|&page| books.references(page) > 1).count()
        });
        let mut sum = CacheStatistics {
            pool_bytes: pool.bytes(),
            shared_pages: shared.sum(),
            ..CacheStatistics::default()
        };
        for window in &self.windows {
            let usage = pool.usage(window.id)?;
            sum.slots += usage.slots;
            sum.bytes += usage.bytes;
            sum.live_bytes += usage.live_bytes;
            sum.all_bytes += usage.all_bytes;
            sum.score_bytes += usage.score_bytes;
            sum.summary_bytes += usage.summary_bytes;
            sum.read_bytes += usage.read_bytes;
        }
        Ok(sum)
    }

    /// Describes how steps of a byte run, if they were to be replayed and it is known.
    pub fn describe(&self) -> Option<String> {
        replays(self.decoder.is_recorded(), self.decoder.fallback_reason())
    }
}

/// Returns the steps of a call, and its rows of tokens, padded to the longest text and at least to `least`.
fn call_of<'a>(
    texts: impl Iterator<Item = (SequenceId, &'a [u8])> + Clone,
    least: usize,
) -> (Vec<KvStep>, Vec<u32>) {
    let most = texts
        .clone()
        .map(|(_, bytes)| bytes.len())
        .fold(least, usize::max);
    let row = |(_, bytes): (SequenceId, &'a [u8])| {
        let tokens = bytes.iter().map(|&byte| u32::from(byte));
        tokens.chain(std::iter::repeat(0)).take(most)
    };
    let steps = texts
        .clone()
        .map(|(id, bytes)| KvStep::new(id, bytes.len()));
    (steps.collect(), texts.flat_map(row).collect())
}
