//! A sequence on its way to a file, or to another pool.

use burn::tensor::{Int, Tensor, TensorData};
use burn_blocksparse::pages::{CacheError, PagePool, SavedSequence, SequenceId};
use serde::{Deserialize, Serialize};

use super::KvPool;
use super::begin::Undo;
use super::store::ints;
use crate::TransformerError;
use crate::error::ensure_none;

const VERSION: u32 = 1;

/// The keys and values of a sequence of a [`KvPool`], those that are kept, in the order of their positions. It is serialized with serde, in whatever
/// format holds bytes.
///
/// It belongs to the model that made it: layers, patterns, heads, widths and dtypes are compared when it is loaded, weights and rotations are not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KvSnapshot {
    version: u32,
    /// Of each pattern of the layers.
    books: Vec<SavedSequence>,
    layers: Vec<SavedLayer>,
}

/// Rows of one layer, head after head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SavedLayer {
    /// Which of the books.
    books: usize,
    kind: String,
    rows: Vec<TensorData>,
}

impl KvSnapshot {
    /// Tokens of the sequence.
    pub fn tokens(&self) -> usize {
        self.books.first().map_or(0, SavedSequence::tokens)
    }
}

impl KvPool {
    /// What a pool keeps of a sequence, which stays in it.
    ///
    /// # Errors
    /// [`TransformerError::Cache`] if there is no such sequence; [`TransformerError::Argument`] if the pool evicts keys: what they are chosen by is not
    /// saved.
    pub fn save(&self, id: SequenceId) -> Result<KvSnapshot, TransformerError> {
        self.check_saved()?;
        let books = self.groups.iter().map(|group| group.books.save(id));
        let mut layers = Vec::with_capacity(self.layers.len());
        for (at, store) in &self.layers {
            let group = &self.groups[*at];
            let mut slots = Vec::with_capacity(group.books.table_rows());
            for row in 0..group.books.table_rows() {
                let page_size = group.books.config().page_size();
                let keys = group.books.slot_keys(id, row)?;
                let slots_of_row = keys.iter().map(|key| {
                    let slot = key.slot;
                    (slot.page * page_size + slot.slot) as i32
                });
                slots.push(slots_of_row.collect());
            }
            let ids = self.rows_of(&group.books, group.key.kv_heads, &slots);
            let rows = match ids.dims() {
                [0] => Vec::new(),
                _ => store.raw(&ids)?,
            };
            layers.push(SavedLayer {
                books: *at,
                kind: store.kind(),
                rows,
            });
        }
        Ok(KvSnapshot {
            version: VERSION,
            books: books.collect::<Result<_, _>>()?,
            layers,
        })
    }

    /// A sequence as it was saved, from this pool or another one of the same layers, whose pages may have another size. Nothing that was read is trusted,
    /// and nothing has changed after an error.
    ///
    /// # Errors
    /// [`TransformerError::Cache`] if it is of other layers or patterns, is stored otherwise, contradicts itself, or there are too few pages.
    pub fn load(&mut self, saved: &KvSnapshot) -> Result<SequenceId, TransformerError> {
        self.check_saved()?;
        let number =
            |what, expected: usize, got: usize| same(what, expected.to_string(), got.to_string());
        number("version", VERSION as usize, saved.version as usize)?;
        number("layers", self.layers.len(), saved.layers.len())?;
        number("patterns", self.groups.len(), saved.books.len())?;
        for ((at, store), layer) in self.layers.iter().zip(&saved.layers) {
            number("pattern of a layer", *at, layer.books)?;
            same("dtype", store.kind(), layer.kind.clone())?;
            let group = &self.groups[*at];
            let heads = group.key.kv_heads / group.books.table_rows();
            let keys: usize = saved.books[*at].keys().iter().sum();
            let expected = match keys {
                0 => Vec::new(),
                keys => store.raw_shapes(keys * heads)?,
            };
            let shapes = layer.rows.iter();
            let got: Vec<_> = shapes
                .map(|rows| (rows.shape().to_vec(), rows.dtype()))
                .collect();
            same("rows", format!("{expected:?}"), format!("{got:?}"))?;
        }
        let undo = Undo::of_books(self);
        match self.load_checked(saved) {
            Ok(id) => Ok(id),
            Err(error) => {
                self.undo(undo);
                Err(error)
            }
        }
    }

    fn load_checked(&mut self, saved: &KvSnapshot) -> Result<SequenceId, TransformerError> {
        let mut loaded = Vec::with_capacity(self.groups.len());
        for (group, books) in self.groups.iter_mut().zip(&saved.books) {
            group.uploaded = None;
            group.sight = None;
            loaded.push(group.books.load(books)?);
        }
        for (layer, saved) in saved.layers.iter().enumerate() {
            let at = self.layers[layer].0;
            let group = &self.groups[at];
            let ids = self.rows_of(&group.books, group.key.kv_heads, &loaded[at].1);
            if !saved.rows.is_empty() {
                let store = &mut self.layers[layer].1;
                store.write_raw(&ids, &saved.rows)?;
                // A sequence's keys are in one region, in the order of their slots.
                let slots = &loaded[at].1;
                let most = slots.iter().map(Vec::len).max().unwrap_or(0);
                let places = slots.iter().flat_map(|slots| {
                    let none = std::iter::repeat_n(-1, most - slots.len());
                    slots.iter().copied().chain(none)
                });
                let places = ints(places.collect(), [1, slots.len(), most], &self.device);
                store.summarize(places)?;
            }
        }
        let first = loaded.first().map(|(id, _)| *id);
        first.ok_or_else(|| TransformerError::argument("pool", "one of some layers", "none"))
    }

    /// Rows of all pages of slots of table rows, head after head.
    fn rows_of(&self, books: &PagePool, kv_heads: usize, slots: &[Vec<i32>]) -> Tensor<1, Int> {
        let page_size = books.config().page_size() as i32;
        let heads = (kv_heads / books.table_rows()) as i32;
        let mut ids = Vec::new();
        for slots in slots {
            for head in 0..heads {
                ids.extend(slots.iter().map(|slot| {
                    let (page, slot) = (slot / page_size, slot % page_size);
                    (page * heads + head) * page_size + slot
                }));
            }
        }
        let count = ids.len();
        ints(ids, [count], &self.device)
    }

    fn check_saved(&self) -> Result<(), TransformerError> {
        let expected = "none: what keys are chosen by is not saved";
        ensure_none("eviction", self.evictor.is_some(), expected)
    }
}

fn same(what: &'static str, expected: String, got: String) -> Result<(), TransformerError> {
    match expected == got {
        true => Ok(()),
        false => Err(CacheError::Mismatch {
            what,
            expected,
            got,
        }
        .into()),
    }
}
