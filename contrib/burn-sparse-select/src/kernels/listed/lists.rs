//! The lists of launches: of a query each, or unions of those of neighbouring queries.

use crate::kernels::listed::mainloops::Mainloops;
use crate::kernels::listed::request::ListedRequest;
use crate::kernels::listed::tile::{ListTensorsLaunch, ListsLaunch};
use blocksparse_cubecl::on_device::{BitsOfKeys, Queries, Uniting, neighbour_lists};
use blocksparse_cubecl::prelude::*;

/// The lists of a call, i32.
#[derive(Clone, Copy, Debug)]
pub enum ListedLists<'a> {
    /// Of blocks of keys.
    Blocks(PlacedLists<'a>),
    /// Of single keys, `[batch, kv_heads, seq_q, most]`, as [`unique_keys`](blocksparse_cubecl::unique_keys) writes them: ascending, each once, −1 behind the last.
    Keys(&'a Handle),
}

/// Lists of blocks, by queries and by blocks, negative for none.
#[derive(Clone, Copy, Debug)]
pub struct PlacedLists<'a> {
    /// The blocks that a query sees, `[batch, kv_heads, seq_q, most]`, each once.
    pub blocks: &'a Handle,
    /// The query at each place, `[batch, kv_heads, tiles · tile]`: those of a block are neighbours, from the first place of a tile on.
    pub queries: &'a Handle,
    /// The block of each tile, `[batch, kv_heads, tiles]`, rising, those of none last.
    pub tile_blocks: &'a Handle,
    /// The place of each choice, `[batch, kv_heads, seq_q, most]`.
    pub places: &'a Handle,
}

impl<'a> ListedLists<'a> {
    /// What queries list.
    pub fn of_queries(&self) -> &'a Handle {
        let (Self::Blocks(PlacedLists { blocks: lists, .. }) | Self::Keys(lists)) = self;
        lists
    }

    /// Lists of blocks.
    ///
    /// # Errors
    /// [`KernelError`] if they are of keys.
    pub fn by_blocks(self) -> Result<PlacedLists<'a>, KernelError> {
        match self {
            Self::Blocks(lists) => Ok(lists),
            Self::Keys(_) => Err(KernelError::Factor { factor: "lists" }),
        }
    }
}

/// The lists of a launch.
#[derive(Clone, Copy)]
pub struct LaunchedLists<'a> {
    /// What they name, i32 `[batch, kv_heads, count, most]`,
    pub keys: &'a Handle,
    /// and which of the neighbouring queries that share a list named it, u32 of the same shape. Where a list is of one query nothing reads it.
    pub masks: &'a Handle,
    /// How many of its numbers each list has, u32 `[batch, kv_heads, count]`, where lists are of neighbours.
    pub counts: &'a Handle,
    /// Which lists of neighbours have a key.
    pub bits: Option<&'a BitsOfKeys>,
    /// The first list's number among those of a head of keys.
    pub first: usize,
    /// How many of them a head of keys has.
    pub count: usize,
    /// Numbers of each.
    pub most: usize,
}

impl LaunchedLists<'_> {
    /// Lists of all heads.
    pub fn all(&self, request: &ListedRequest) -> usize {
        request.batch * request.kv_heads * self.count
    }

    /// Elements of all of them.
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

/// Launches over all lists, of neighbours some at a time.
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
