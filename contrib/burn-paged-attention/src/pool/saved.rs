//! Saving and loading of a sequence, to a file or another pool.

use burn::tensor::{Int, Tensor, TensorData};
use burn_sparse_transformer::TransformerError;
use burn_sparse_transformer::internal::ensure_none;
use serde::{Deserialize, Serialize};

use super::begin::Undo;
use super::store::{Store, ints, lost};
use super::{Group, KvPool, nsa_step};
use crate::PoolError;
use crate::pages::{CacheError, SavedSequence, SequenceId};

const VERSION: u32 = 1;

/// The retained keys and values of a sequence of a [`KvPool`], in the order of their positions. Serialized with serde, in any format that holds
/// bytes.
///
/// It belongs to the model that made it: layers, patterns, heads, widths and dtypes are compared when it is loaded, weights and rotations are not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KvSnapshot {
    version: u32,
    /// One per pattern of the layers.
    books: Vec<SavedSequence>,
    layers: Vec<SavedLayer>,
}

/// Rows of one layer, head after head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SavedLayer {
    /// Index into the block tables.
    books: usize,
    kind: String,
    rows: Vec<TensorData>,
}

/// A paged tensor of a layer.
#[derive(Clone, Copy, Debug)]
struct Part {
    layer: usize,
    kind: PartKind,
    /// Index of the group whose block tables hold its slots.
    group: usize,
}

#[derive(Clone, Copy, Debug)]
enum PartKind {
    Keys,
    /// Native sparse attention: compressed pairs, tokens to compress, and the window.
    Entries,
    Tokens,
    Window,
    /// Keys of an indexer (DeepSeek or MiniMax sparse attention).
    Index,
}

impl KvSnapshot {
    /// Returns the tokens of the sequence.
    pub fn tokens(&self) -> usize {
        self.books.first().map_or(0, SavedSequence::tokens)
    }
}

impl KvPool {
    /// Saves a sequence with its keys and values. It also stays in the pool.
    ///
    /// # Errors
    /// [`PoolError::Cache`] if the sequence does not exist; [`TransformerError::Argument`] if the pool evicts keys, because the state of eviction is
    /// not saved.
    pub fn save(&self, id: SequenceId) -> Result<KvSnapshot, PoolError> {
        self.check_saved()?;
        let books = self.groups.iter().map(|group| group.books.save(id));
        let mut layers = Vec::with_capacity(self.layers.len());
        for part in self.parts() {
            let (at, store) = (part.group, self.part(part)?);
            let ids = self.rows_of(part, &self.slots_of(part, id)?);
            let rows = match ids.dims() {
                [0] => Vec::new(),
                _ => store.raw(&ids)?,
            };
            layers.push(SavedLayer {
                books: at,
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

    /// Adds a saved sequence, from this pool or another one of the same layers, whose page size may differ. Input is not trusted. Nothing has
    /// changed after an error.
    ///
    /// # Errors
    /// [`PoolError::Cache`] if layers, patterns or storage differ, the data is inconsistent, or there are too few pages.
    pub fn load(&mut self, saved: &KvSnapshot) -> Result<SequenceId, PoolError> {
        self.check_saved()?;
        CacheError::expect_same("version", VERSION, saved.version)?;
        let parts = self.parts();
        CacheError::expect_same("layers", parts.len(), saved.layers.len())?;
        CacheError::expect_same("patterns", self.groups.len(), saved.books.len())?;
        // Validate before allocating by these sizes.
        let mut keys = Vec::with_capacity(saved.books.len());
        for (group, books) in self.groups.iter().zip(&saved.books) {
            CacheError::expect_same("tokens", saved.tokens(), books.tokens())?;
            keys.push(group.books.saved_keys(books)?);
        }
        for (&part, layer) in parts.iter().zip(&saved.layers) {
            let (at, store) = (part.group, self.part(part)?);
            CacheError::expect_same("pattern of a layer", at, layer.books)?;
            CacheError::expect_same("dtype", store.kind(), &layer.kind)?;
            let group = &self.groups[at];
            let heads = match part.kind {
                PartKind::Index => 1,
                _ => group.key.kv_heads / group.books.table_rows(),
            };
            let keys = match (part.kind, &group.key.nsa) {
                (PartKind::Entries, Some(nsa)) => nsa.entries(saved.books[at].tokens()),
                _ => keys[at].iter().sum(),
            };
            let expected = match keys {
                0 => Vec::new(),
                keys => store.raw_shapes(keys * heads)?,
            };
            let shapes = layer.rows.iter();
            let got: Vec<_> = shapes
                .map(|rows| (rows.shape().to_vec(), rows.dtype()))
                .collect();
            CacheError::expect_same("rows", format!("{expected:?}"), format!("{got:?}"))?;
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

    fn load_checked(&mut self, saved: &KvSnapshot) -> Result<SequenceId, PoolError> {
        let mut loaded = Vec::with_capacity(self.groups.len());
        for (group, books) in self.groups.iter_mut().zip(&saved.books) {
            group.uploaded = None;
            group.sight = None;
            let (id, _) = group.books.load(books)?;
            loaded.push(id);
        }
        for (part, saved) in self.parts().into_iter().zip(&saved.layers) {
            if !saved.rows.is_empty() {
                let slots = self.slots_of(part, loaded[part.group])?;
                let ids = self.rows_of(part, &slots);
                // As many rows as were saved, unless keys are missing.
                let rows = saved.rows[0].shape()[0];
                CacheError::expect_same("rows", ids.dims()[0], rows)?;
                let device = self.device.clone();
                let store = self.part_mut(part)?;
                store.write_raw(&ids, &saved.rows)?;
                // A sequence's keys are in one region, in the order of their slots.
                let most = slots.iter().map(Vec::len).max().unwrap_or(0);
                let places = slots.iter().flat_map(|slots| {
                    let none = std::iter::repeat_n(-1, most - slots.len());
                    slots.iter().copied().chain(none)
                });
                let places = ints(places.collect(), [1, slots.len(), most], &device);
                store.summarize(places)?;
            }
        }
        let first = loaded.first().copied();
        first.ok_or_else(|| PoolError::argument("pool", "one of some layers", "none"))
    }

    /// Lists all paged tensors.
    fn parts(&self) -> Vec<Part> {
        let mut parts = Vec::with_capacity(self.layers.len());
        for (layer, pages) in self.layers.iter().enumerate() {
            let of = |kind, group| Part { layer, kind, group };
            let group = pages.group;
            parts.push(of(PartKind::Keys, group));
            if let (Some(branches), Some(nsa)) = (&pages.branches, self.groups[group].nsa) {
                parts.push(of(PartKind::Entries, group));
                parts.push(of(PartKind::Tokens, nsa.tokens));
                let window = nsa.window.filter(|_| branches.window.is_some());
                parts.extend(window.map(|group| of(PartKind::Window, group)));
            }
            parts.extend(pages.index.as_ref().map(|_| of(PartKind::Index, group)));
        }
        parts
    }

    fn part(&self, part: Part) -> Result<&Store, TransformerError> {
        let pages = &self.layers[part.layer];
        let branches = pages.branches.as_ref();
        match part.kind {
            PartKind::Keys => Some(&pages.store),
            PartKind::Entries => branches.map(|branches| &branches.entries),
            PartKind::Tokens => branches.map(|branches| &branches.tokens),
            PartKind::Window => branches.and_then(|branches| branches.window.as_ref()),
            PartKind::Index => pages.index.as_ref(),
        }
        .ok_or_else(lost)
    }

    fn part_mut(&mut self, part: Part) -> Result<&mut Store, TransformerError> {
        let pages = &mut self.layers[part.layer];
        let branches = pages.branches.as_mut();
        match part.kind {
            PartKind::Keys => Some(&mut pages.store),
            PartKind::Entries => branches.map(|branches| &mut branches.entries),
            PartKind::Tokens => branches.map(|branches| &mut branches.tokens),
            PartKind::Window => branches.and_then(|branches| branches.window.as_mut()),
            PartKind::Index => pages.index.as_mut(),
        }
        .ok_or_else(lost)
    }

    /// Returns the slots of a sequence in each table row, in the order of its keys.
    fn slots_of(&self, part: Part, id: SequenceId) -> Result<Vec<Vec<i32>>, PoolError> {
        let Group { key, books, .. } = &self.groups[part.group];
        let page_size = books.config().page_size();
        let of_row = |row: usize| {
            let keys = books.slot_keys(id, row)?;
            Ok(match (part.kind, &key.nsa) {
                (PartKind::Entries, Some(nsa)) => nsa_step::entry_slots(nsa, page_size, &keys),
                _ => (keys.iter())
                    .map(|key| (key.slot.page * page_size + key.slot.slot) as i32)
                    .collect(),
            })
        };
        (0..books.table_rows()).map(of_row).collect()
    }

    /// Returns the rows, among those of all pages, of slots of table rows, head after head.
    fn rows_of(&self, part: Part, slots: &[Vec<i32>]) -> Tensor<1, Int> {
        let Group { key, books, .. } = &self.groups[part.group];
        let kv_heads = key.kv_heads;
        let page_size = match (part.kind, &key.nsa) {
            (PartKind::Entries, Some(nsa)) => books.config().page_size() / nsa.stride,
            _ => books.config().page_size(),
        } as i32;
        let heads = match part.kind {
            PartKind::Index => 1,
            _ => (kv_heads / books.table_rows()) as i32,
        };
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

    fn check_saved(&self) -> Result<(), PoolError> {
        let expected = "none: the scores of its keys are not saved";
        Ok(ensure_none("eviction", self.evictor.is_some(), expected)?)
    }
}
