//! Lists of launches: of one query each, or unions over groups of adjacent queries.

use crate::kernels::listed::mainloops::Mainloops;
use crate::kernels::listed::request::ListedRequest;
use crate::kernels::listed::tile::{ListTensorsLaunch, ListsLaunch};
use blocksparse_cubecl::on_device::{BitsOfKeys, Queries, Uniting, neighbour_lists};
use blocksparse_cubecl::prelude::*;

/// Lists of a call, i32.
#[derive(Clone, Copy, Debug)]
pub enum ListedLists<'a> {
    /// Lists of key blocks.
    Blocks(PlacedLists<'a>),
    /// Lists of single keys, `[batch, kv_heads, seq_q, most]`, as [`unique_keys`](blocksparse_cubecl::unique_keys) writes them: ascending and unique, then −1.
    Keys(&'a Handle),
}

/// Lists of blocks by query and by block, negative for empty entries.
#[derive(Clone, Copy, Debug)]
pub struct PlacedLists<'a> {
    /// Blocks that a query sees, `[batch, kv_heads, seq_q, most]`, each once.
    pub blocks: &'a Handle,
    /// Query at each place, `[batch, kv_heads, tiles · tile]`. The queries of a block are adjacent, from the start of a tile on.
    pub queries: &'a Handle,
    /// Block of each tile, `[batch, kv_heads, tiles]`, ascending, then unused tiles.
    pub tile_blocks: &'a Handle,
    /// Place of each selection, `[batch, kv_heads, seq_q, most]`.
    pub places: &'a Handle,
}

impl<'a> ListedLists<'a> {
    /// Returns the lists by query.
    pub fn of_queries(&self) -> &'a Handle {
        let (Self::Blocks(PlacedLists { blocks: lists, .. }) | Self::Keys(lists)) = self;
        lists
    }

    /// Returns the lists of blocks.
    ///
    /// # Errors
    /// [`KernelError`] if they are lists of keys.
    pub fn by_blocks(self) -> Result<PlacedLists<'a>, KernelError> {
        match self {
            Self::Blocks(lists) => Ok(lists),
            Self::Keys(_) => Err(KernelError::Factor { factor: "lists" }),
        }
    }
}

/// Lists of a launch.
#[derive(Clone, Copy)]
pub struct LaunchedLists<'a> {
    /// Listed keys or blocks, i32 `[batch, kv_heads, count, most]`.
    pub keys: &'a Handle,
    /// Bit masks of the queries of a group that listed each entry, u32 in the same shape. Not read if a list is of one query.
    pub masks: &'a Handle,
    /// Number of entries of each list, u32 `[batch, kv_heads, count]`, for lists of groups.
    pub counts: &'a Handle,
    /// Bits of the groups' lists that contain each key.
    pub bits: Option<&'a BitsOfKeys>,
    /// Index of the first list within a KV head.
    pub first: usize,
    /// Number of lists per KV head.
    pub count: usize,
    /// Number of entries of each list.
    pub most: usize,
}

impl LaunchedLists<'_> {
    /// Returns the number of lists over all heads.
    pub fn all(&self, request: &ListedRequest) -> usize {
        request.batch * request.kv_heads * self.count
    }

    /// Returns the number of entries of all lists.
    pub fn elements(&self, request: &ListedRequest) -> usize {
        self.all(request) * self.most
    }

    pub fn tensors(&self, request: &ListedRequest) -> ListTensorsLaunch {
        let elements = self.elements(request);
        ListTensorsLaunch::new(
            buffer(self.keys, elements),
            buffer(self.masks, elements),
            buffer(self.counts, self.all(request)),
        )
    }

    pub fn args(&self) -> ListsLaunch {
        ListsLaunch::new(self.first as u32, self.count as u32, self.most as u32)
    }
}

/// Runs a launch over all lists. Lists of groups are built and launched in chunks.
pub fn for_lists(
    client: &Client,
    mainloops: &Mainloops,
    given: &Handle,
    with_bits: bool,
    mut launch: impl FnMut(&LaunchedLists) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let request = &mainloops.request;
    if mainloops.together == 1 {
        return launch(&LaunchedLists {
            keys: given,
            masks: given,
            counts: given,
            bits: None,
            first: 0,
            count: request.seq_q,
            most: request.most,
        });
    }
    let (groups, at_a_time) = (mainloops.lists(), mainloops.at_a_time());
    let uniting = Uniting {
        together: mainloops.together,
        ascending: request.is_of_keys(),
        with_bits,
    };
    for first in (0..groups).step_by(at_a_time) {
        let count = at_a_time.min(groups - first);
        let sizes = request.list_sizes();
        let made = neighbour_lists(client, &sizes, given, Queries { first, count }, uniting)?;
        let bits = made.bits.as_ref().map(|by_rows| {
            let lengths = [count, sizes.seq_kv];
            BitsOfKeys::new(client, by_rows, sizes.lists, lengths)
        });
        launch(&LaunchedLists {
            keys: &made.keys,
            masks: &made.masks,
            counts: &made.counts,
            bits: bits.as_ref(),
            first,
            count,
            most: made.sizes.most,
        })?;
    }
    Ok(())
}
