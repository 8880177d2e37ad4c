use burn::tensor::Tensor;

use crate::TransformerError;
use crate::error::{Result, ensure};
use crate::nsa::BranchCaches;

/// Initial capacity of a buffer, in positions.
const FIRST_CAPACITY: usize = 64;

/// Keys and values of the positions seen so far, for [`crate::SparseMultiHeadAttention::forward_cache`].
///
/// New positions are written into buffers that double when they are full: appending a position copies no earlier one, amortised.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct SparseMhaCache {
    /// Keys and values `[batch, kv_heads, capacity, width]`, of which the first `len` positions are in use.
    buffers: Option<[Tensor<4>; 2]>,
    len: usize,
    context: Option<usize>,
    /// Caches of native sparse attention.
    branches: Option<Box<BranchCaches>>,
    /// Keys of the indexer of DeepSeek sparse attention.
    index: Option<Box<SparseMhaCache>>,
}

impl SparseMhaCache {
    /// Returns an empty cache that grows without bound.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns an empty cache for at most `context` positions.
    pub fn with_context(context: usize) -> Self {
        Self::with_most(Some(context))
    }

    fn with_most(context: Option<usize>) -> Self {
        Self {
            context,
            ..Self::default()
        }
    }

    /// Returns the number of positions in the cache.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the capacity of the buffers, in positions.
    pub fn capacity(&self) -> usize {
        (self.buffers.as_ref()).map_or(0, |[key, _]| key.dims()[2])
    }

    /// Drops every position from `len` on; does nothing if there are fewer. The buffers keep their capacity.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        if let Some(branches) = &mut self.branches {
            branches.truncate(len);
        }
        if let Some(index) = &mut self.index {
            index.truncate(len);
        }
    }

    /// Drops all positions and frees the buffers. The next input may have another batch size.
    pub fn clear(&mut self) {
        self.buffers = None;
        self.branches = None;
        self.index = None;
        self.len = 0;
    }

    /// Returns the caches of the other branches of native sparse attention, for compressed blocks of `block` tokens, one every `stride`.
    pub(crate) fn branches(&mut self, block: usize, stride: usize) -> &mut BranchCaches {
        let empty = || Self::with_most(self.context);
        (self.branches).get_or_insert_with(|| Box::new(BranchCaches::new(empty, block, stride)))
    }

    pub(crate) fn index(&mut self) -> &mut Self {
        (self.index).get_or_insert_with(|| Box::new(Self::with_most(self.context)))
    }

    pub(crate) fn all(&self) -> Option<[Tensor<4>; 2]> {
        let buffers = self.buffers.clone().filter(|_| self.len > 0)?;
        Some(buffers.map(|x| x.narrow(2, 0, self.len)))
    }

    /// Checks that `new` more positions of keys `[batch, kv_heads, _, width]` fit, and returns the new length.
    pub(crate) fn check(&self, [batch, kv_heads, width]: [usize; 3], new: usize) -> Result<usize> {
        if let Some([key, _]) = &self.buffers {
            let [cached, cached_heads, _, cached_width] = key.dims();
            ensure! {
                batch == cached => "batch", format!("{cached}, the cache's"), batch;
                (kv_heads, width) == (cached_heads, cached_width) =>
                    "cache", format!("of {kv_heads} heads {width} wide, the module's"), format!("{cached_heads} heads {cached_width} wide");
            }
        }
        let total = self.len + new;
        match self.context {
            Some(context) if total > context => Err(TransformerError::ContextExceeded {
                context,
                limit: "the cache's context",
                start: self.len,
                end: total,
            }),
            _ => Ok(total),
        }
    }

    /// Writes keys and values `[batch, kv_heads, new, width]` after the present ones and returns all of them, `[batch, kv_heads, len, width]`.
    pub(crate) fn append(&mut self, pair: [Tensor<4>; 2]) -> [Tensor<4>; 2] {
        let [_, _, new, _] = pair[0].dims();
        let (start, end) = (self.len, self.len + new);
        let capacity = self.capacity_for(end);
        // The buffers are moved out, so that no second handle prevents an in-place write.
        let mut old = self.buffers.take().into_iter().flatten();
        let buffers = pair.map(|new| write(old.next(), new, start, capacity));
        self.len = end;
        (self.buffers.insert(buffers).clone()).map(|x| x.narrow(2, 0, end))
    }

    /// Returns the present capacity if `len` positions fit, else at least twice that, within the context.
    fn capacity_for(&self, len: usize) -> usize {
        let capacity = self.capacity();
        if len <= capacity {
            return capacity;
        }
        let grown = len.max(2 * capacity).max(FIRST_CAPACITY);
        self.context.map_or(grown, |context| grown.min(context))
    }
}

/// Writes `chunk` into `buffer` from position `start` on, in a buffer of `capacity` positions.
fn write(buffer: Option<Tensor<4>>, chunk: Tensor<4>, start: usize, capacity: usize) -> Tensor<4> {
    let [batch, heads, new, width] = chunk.dims();
    let buffer = match buffer {
        Some(buffer) if buffer.dims()[2] == capacity => buffer,
        smaller => {
            let shape = [batch, heads, capacity, width];
            let larger = Tensor::zeros(shape, (&chunk.device(), chunk.dtype()));
            match smaller {
                Some(old) if start > 0 => larger.slice_assign(
                    [0..batch, 0..heads, 0..start, 0..width],
                    old.narrow(2, 0, start),
                ),
                _ => larger,
            }
        }
    };
    buffer.slice_assign([0..batch, 0..heads, start..start + new, 0..width], chunk)
}

/// Cache of [`crate::SparseTransformer::forward_cache`]: keys and values of every block, and the current position.
///
/// For a batch of sequences of equal length. It keeps every key. A `KvPool` of `burn-paged-attention` serves sequences of unequal lengths that come and go,
/// and keeps only keys that the patterns reach.
///
/// Created by [`crate::SparseTransformer::new_cache`].
#[derive(Clone, Debug)]
#[must_use]
pub struct SparseTransformerCache {
    pub(crate) blocks: Vec<SparseMhaCache>,
    pub(crate) position: usize,
}

impl SparseTransformerCache {
    pub(crate) fn new(n_blocks: usize, context: usize) -> Self {
        Self {
            blocks: vec![SparseMhaCache::with_context(context); n_blocks],
            position: 0,
        }
    }

    /// Runs `run` for `new` positions with the first new position and the caches of a model's blocks. After an error the cache is unchanged.
    pub(crate) fn advance<T>(
        &mut self,
        blocks: usize,
        new: usize,
        run: impl FnOnce(usize, &mut [SparseMhaCache]) -> Result<T>,
    ) -> Result<T> {
        let (own, start) = (self.blocks.len(), self.position);
        ensure! { own == blocks =>
        "cache", format!("of {blocks} blocks, the model's"), format!("{own} blocks"); }
        let result = run(start, &mut self.blocks);
        match &result {
            Ok(_) => self.position += new,
            Err(_) => self.truncate(start),
        }
        result
    }

    /// Returns the number of positions so far, which is the position of the next token.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Returns to `position` and drops the tokens from there on; does nothing if the cache is shorter.
    pub fn truncate(&mut self, position: usize) {
        self.position = self.position.min(position);
        for block in &mut self.blocks {
            block.truncate(position);
        }
    }

    /// Returns to the first position; the next tokens may have another batch size.
    pub fn clear(&mut self) {
        self.position = 0;
        for block in &mut self.blocks {
            block.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, TensorData};

    /// Returns `[1, 1, len, 2]`, counting from `first`.
    fn chunk(first: usize, len: usize) -> Tensor<4> {
        let values: Vec<f32> = (2 * first..2 * (first + len)).map(|v| v as f32).collect();
        Tensor::from_data(TensorData::new(values, [1, 1, len, 2]), &Device::flex())
    }

    #[test]
    fn capacity_doubles_up_to_the_context() {
        let mut cache = SparseMhaCache::with_context(200);
        let mut seen = vec![];
        for position in 0..200 {
            let _ = cache.append([chunk(position, 1), chunk(position, 1)]);
            if seen.last() != Some(&cache.capacity()) {
                seen.push(cache.capacity());
            }
        }
        assert_eq!(seen, [64, 128, 200]);
        let error = cache.check([1, 1, 2], 1).unwrap_err();
        assert!(matches!(
            error,
            TransformerError::ContextExceeded {
                context: 200,
                limit: "the cache's context",
                start: 200,
                end: 201
            }
        ));
    }

    #[test]
    fn another_modules_cache_is_refused() {
        let mut cache = SparseMhaCache::new();
        let _ = cache.append([chunk(0, 1), chunk(0, 1)]);
        assert_eq!(
            cache.check([1, 4, 16], 1).unwrap_err().to_string(),
            "cache must be of 4 heads 16 wide, the module's, got 1 heads 2 wide"
        );
    }
}
