//! Bits of a layout's blocks, from the tensor that chooses them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, PoisonError};

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::bits::{self, GridLaunch};
use super::budget;
use super::budget_tile::{self, BudgetTile};
use super::key_lists::{KeyListSizes, pair_bits};
use super::within::AllowedBits;
use super::{UNITS, cubes, units};
use crate::args::buffer;
use crate::device_key::{DeviceKey, device_key};
use crate::error::KernelError;
use blocksparse::plan::Mainloop;
use blocksparse::{BlockLayout, BlockSource, DeviceChoice, LayoutShape};

/// The tensor that chooses a layout's blocks, contiguous.
#[derive(Clone, Debug)]
pub struct ChoiceTensor {
    /// The buffer, which begins at the first element.
    pub handle: Handle,
    /// Element type: any integer for a mask, with 0 for blocks that are not chosen; i32 for indices; f32 for scores.
    pub dtype: ElemType,
}

/// Bits of a layout's blocks, cached per device.
#[derive(Default)]
struct Bits(Mutex<HashMap<DeviceKey, ByMainloop>>);

/// Bits of blocks or of pairs, by rows, and by columns once a loop over columns needs them. If the layout depends on positions, `rows` has those and
/// `columns` is unused.
struct ByMainloop {
    rows: Handle,
    columns: Option<Handle>,
}

/// Sets the tensor that chooses a layout's blocks, as its [`DeviceChoice`] specifies: `[batch or 1, heads or 1, q_blocks, n]`, with `n` `kv_blocks` or the
/// indices per row; or positions, i32 `[batch or 1, heads, seq_q + seq_kv]`, or `[.., seq_q]` if keys have the same positions as queries; or lists of keys,
/// i32 `[batch or 1, heads, seq_q, most]`, as [`unique_keys`](super::unique_keys) writes them. A layout that already has a tensor on this device keeps it.
/// Nothing is read back to the host.
///
/// # Errors
/// [`KernelError`] if the device lacks the tensor's type, or the pairs of blocks do not fit 32 bits.
pub fn choose_blocks(
    client: &Client,
    layout: &BlockLayout,
    tensor: &ChoiceTensor,
) -> Result<(), KernelError> {
    let Some(choice) = layout.device_choice() else {
        return Ok(());
    };
    if !client.properties().supports_type(tensor.dtype) {
        return Err(KernelError::Dtype {
            dtype: tensor.dtype.to_string(),
        });
    }
    let known = layout.attachment(Bits::default);
    let mut known = known.0.lock().unwrap_or_else(PoisonError::into_inner);
    if let Entry::Vacant(entry) = known.entry(device_key(client)) {
        entry.insert(ByMainloop {
            rows: row_bits(client, layout, choice, tensor)?,
            columns: None,
        });
    }
    Ok(())
}

pub(super) fn patterns(choice: &DeviceChoice) -> usize {
    choice.patterns.iter().product()
}

fn grid(layout: &BlockLayout) -> GridLaunch {
    GridLaunch::new(
        layout.q_blocks(),
        layout.kv_blocks(),
        layout.kv_blocks().div_ceil(32),
        layout.block_size(),
        layout.block_size(),
        layout.seq_q(),
        offset(layout.shape()),
    )
}

/// Returns the position of the first query.
pub(super) fn offset(shape: &LayoutShape) -> i32 {
    shape.seq_kv as i32 - shape.seq_q as i32
}

fn row_bits(
    client: &Client,
    layout: &BlockLayout,
    choice: &DeviceChoice,
    tensor: &ChoiceTensor,
) -> Result<Handle, KernelError> {
    if let Some([numbers, _]) = choice.positions(layout.shape()) {
        KernelError::check_u32("the positions of a layout", patterns(choice) * numbers)?;
        return Ok(tensor.handle.clone());
    }
    if let BlockSource::Keys { most } = choice.by {
        let lengths @ [seq_q, seq_kv] = [layout.seq_q(), layout.seq_kv()];
        KernelError::check_u32(
            "the words of a layout's pairs, by keys",
            patterns(choice) * seq_kv * seq_q.div_ceil(32),
        )?;
        let sizes = KeyListSizes::new(patterns(choice), lengths, most);
        return pair_bits(client, &sizes, &tensor.handle);
    }
    let rows = patterns(choice) * layout.q_blocks();
    let width = match choice.by {
        BlockSource::Indices { most } => most,
        _ => layout.kv_blocks(),
    };
    let elements = rows * width.max(layout.kv_blocks());
    KernelError::check_u32("the pairs of blocks of a layout", elements)?;
    let len = rows * layout.kv_blocks().div_ceil(32);
    let made = client.empty(len * size_of::<u32>());
    let address = AddressType::U32;
    let output = buffer(&made, len);
    let allowed = (layout.within())
        .map(|whole| AllowedBits::new(client, whole))
        .transpose()?;
    let hidden = match (&allowed, choice.by) {
        (Some(allowed), BlockSource::Scores(_)) => {
            Some(hide(client, layout, choice, tensor, allowed))
        }
        _ => None,
    };
    let input = buffer(hidden.as_ref().unwrap_or(&tensor.handle), rows * width);
    let (grid, causal) = (grid(layout), choice.causal);
    match choice.by {
        BlockSource::Positions(_) | BlockSource::OwnPositions(_) | BlockSource::Keys { .. } => {
            unreachable!("positions and lists of keys choose no blocks")
        }
        // SAFETY: a unit writes its own word of bits, below `len`, and reads the elements of that word in its row.
        BlockSource::Mask => unsafe {
            let cubes = units(client, len);
            let (dim, dtype) = (CubeDim::new_1d(UNITS), tensor.dtype);
            bits::from_mask::launch_unchecked(
                client, cubes, dim, address, input, output, grid, causal, dtype,
            );
        },
        // SAFETY: a unit writes the bits of its own row, below `rows`, and reads that row's indices.
        BlockSource::Indices { most } => unsafe {
            let (cubes, dim) = (units(client, rows), CubeDim::new_1d(UNITS));
            bits::from_indices::launch_unchecked(
                client, cubes, dim, address, input, output, grid, most, rows, causal,
            );
        },
        BlockSource::Scores(rule) => {
            let most = layout.kv_blocks();
            let numbers = budget_tile::rule_scalars(&rule, most);
            let hides = hidden.is_some();
            let tile = BudgetTile::new(client.properties(), &rule, most, causal, hides)?;
            // SAFETY: a cube, or a plane of it, does likewise for its rows.
            unsafe {
                let cubes = cubes(client, rows.div_ceil(tile.rows()));
                let dim = CubeDim::new_1d(tile.units());
                budget::from_scores::launch_unchecked(
                    client, cubes, dim, address, input, output, grid, numbers, rows, tile,
                );
            }
        }
    }
    if let (Some(allowed), None) = (allowed, hidden) {
        // SAFETY: a unit updates its own word of bits, below `len`, with the word of the same row and blocks in the layout's bits.
        unsafe {
            bits::cut::launch_unchecked(
                client,
                units(client, len),
                CubeDim::new_1d(UNITS),
                address,
                buffer(&made, len),
                buffer(&allowed.words, allowed.len),
                self::grid(layout),
                allowed.launched(choice.patterns[1]),
            );
        }
    }
    Ok(made)
}

/// Returns the scores, with blocks marked that cannot be chosen.
fn hide(
    client: &Client,
    layout: &BlockLayout,
    choice: &DeviceChoice,
    scores: &ChoiceTensor,
    allowed: &AllowedBits,
) -> Handle {
    let len = patterns(choice) * layout.q_blocks() * layout.kv_blocks();
    let made = client.empty(len * size_of::<u32>());
    // SAFETY: a unit writes its own score, below `len`, and reads it and the word of its block in the layout's bits.
    unsafe {
        bits::hide::launch_unchecked(
            client,
            units(client, len),
            CubeDim::new_1d(UNITS),
            AddressType::U32,
            buffer(&scores.handle, len),
            buffer(&allowed.words, allowed.len),
            buffer(&made, len),
            grid(layout),
            allowed.launched(choice.patterns[1]),
        );
    }
    made
}

/// Counts the blocks of each block row into `counts`, i32 `[patterns, q_blocks]`, for a layout whose tensor [`choose_blocks`] has set. Writes nothing for
/// any other layout, and for one by positions or lists of keys, whose blocks the host knows.
pub fn count_blocks(client: &Client, layout: &BlockLayout, counts: &Handle) {
    let Some(choice) = layout.device_choice() else {
        return;
    };
    if choice.by.has_all_blocks() {
        return;
    }
    let known = layout.attachment(Bits::default);
    let known = known.0.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(ByMainloop { rows, .. }) = known.get(&device_key(client)) else {
        return;
    };
    let len = patterns(choice) * layout.q_blocks();
    let words = layout.kv_blocks().div_ceil(32);
    // SAFETY: a unit writes its own count, below `len`, and reads its row's words.
    unsafe {
        bits::count_rows::launch_unchecked(
            client,
            units(client, len),
            CubeDim::new_1d(UNITS),
            AddressType::U32,
            buffer(rows, len * words),
            buffer(counts, len),
            words,
        );
    }
}

fn column_bits(
    client: &Client,
    layout: &BlockLayout,
    choice: &DeviceChoice,
    rows: &Handle,
) -> Handle {
    if let BlockSource::Keys { .. } = choice.by {
        let lengths = [layout.seq_q(), layout.seq_kv()];
        return bits::turn_pairs(client, rows, patterns(choice), lengths);
    }
    let row_len = patterns(choice) * layout.q_blocks() * layout.kv_blocks().div_ceil(32);
    let words = layout.q_blocks().div_ceil(32);
    let len = patterns(choice) * layout.kv_blocks() * words;
    let made = client.empty(len * size_of::<u32>());
    // SAFETY: a unit writes its own word, below `len`, and reads 32 rows' bits.
    unsafe {
        bits::transpose::launch_unchecked(
            client,
            units(client, len),
            CubeDim::new_1d(UNITS),
            AddressType::U32,
            buffer(rows, row_len),
            buffer(&made, len),
            grid(layout),
            words,
        );
    }
    made
}

/// Returns the bits by rows or by columns, as the loop needs, or positions.
///
/// # Panics
/// If [`choose_blocks`] was not called before.
pub(super) fn bits_of(
    client: &Client,
    layout: &BlockLayout,
    choice: &DeviceChoice,
    mainloop: Mainloop,
) -> Handle {
    let bits = layout.attachment(Bits::default);
    let mut bits = bits.0.lock().unwrap_or_else(PoisonError::into_inner);
    let bits = bits.get_mut(&device_key(client));
    let ByMainloop { rows, columns } = bits.expect("a layout has its blocks before a launch");
    let bits = match mainloop {
        _ if choice.positions(layout.shape()).is_some() => rows,
        Mainloop::Rows => rows,
        Mainloop::Columns => {
            columns.get_or_insert_with(|| column_bits(client, layout, choice, rows))
        }
    };
    bits.clone()
}
