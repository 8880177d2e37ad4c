//! Launches of gradients with respect to keys and values as records of pairs.

use crate::kernels::listed::lists::LaunchedLists;
use crate::kernels::listed::mainloops::{ByKeys, Mainloops};
use crate::kernels::listed::records::GatheredLaunch;
use crate::kernels::listed::spread::{ChunkLaunch, SpreadTile, spread};
use crate::kernels::listed::views::{ListedGradients, far_rows, input, words_of};
use crate::kernels::listed::warpgroups::{SpreadGroups, WarpgroupTile};
use crate::kernels::listed::{records, warpgroups};
use blocksparse_cubecl::call::TensorView;
use blocksparse_cubecl::mma::tile::Tile;
use blocksparse_cubecl::on_device::{KeyListSizes, PairPlaces, Queries, pair_places, places_of};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::slices::Slice;
use blocksparse_cubecl::tensor::{half_of, scales};

/// Arguments of the launches.
pub struct Spread<'a> {
    pub client: &'a Client,
    pub mainloops: &'a Mainloops,
    /// q, k, v and the gradient with respect to the output.
    pub inputs: [&'a TensorView; 4],
    pub stats: &'a Handle,
    pub gradients: ListedGradients<'a>,
    pub scale: f64,
}

/// Buffers for the records of some lists at a time, and for the accumulated sums of all lists.
pub struct RecordRoom {
    records: Handle,
    /// Number of 16-byte pieces of all records.
    in_records: usize,
    sums: Handle,
    /// Number of vectors of eight sums.
    in_sums: usize,
    /// Number of lists per KV head whose records fit.
    at_a_time: usize,
    /// Number of records of these lists.
    room: usize,
    /// Number of lists per KV head.
    lists: usize,
}

impl Spread<'_> {
    /// Returns the number of 16-byte pieces of a record.
    fn pieces(&self) -> usize {
        (self.mainloops.request.head_dim + self.mainloops.request.value_dim) / 8
    }

    /// Allocates the records of the lists of a launch, or of a part of them.
    ///
    /// # Errors
    /// [`KernelError`] if an index exceeds 32 bits.
    pub fn room(&self) -> Result<RecordRoom, KernelError> {
        let &Self {
            client, mainloops, ..
        } = self;
        let (request, lists, most) = (&mainloops.request, mainloops.lists(), mainloops.most());
        let at_a_time = request.lists_of_records(lists, most);
        let at_a_time = at_a_time.expect("planned so").min(mainloops.at_a_time());
        let (pieces, rows) = (self.pieces(), request.all_keys());
        let room = at_a_time * most;
        let in_records = self.heads() * room * pieces;
        KernelError::check_u32("the pieces of records", in_records)?;
        KernelError::check_u32("the sums of dK and dV, in fours", rows * pieces * 2)?;
        // Without further chunks, no sums are kept.
        let in_sums = if at_a_time >= lists { 1 } else { rows * pieces };
        Ok(RecordRoom {
            records: client.empty(in_records * 16),
            in_records,
            sums: client.empty(in_sums * 32),
            in_sums,
            at_a_time,
            room,
            lists,
        })
    }

    /// Adds the gradients with respect to keys and values of `lists`, after those of all lists before them.
    ///
    /// # Errors
    /// [`KernelError`] if an index exceeds 32 bits.
    pub fn launch(&self, room: &RecordRoom, lists: &LaunchedLists) -> Result<(), KernelError> {
        let &Self {
            client, mainloops, ..
        } = self;
        let (request, heads) = (&mainloops.request, self.heads());
        let sizes = KeyListSizes::new(heads, [lists.count, request.seq_kv], lists.most);
        for first in (0..lists.count).step_by(room.at_a_time) {
            let some = Queries {
                first,
                count: room.at_a_time.min(lists.count - first),
            };
            let places = match lists.bits {
                Some(bits) => places_of(client, [heads, request.seq_kv], bits.clone(), some)?,
                None => pair_places(client, &sizes, lists.keys, some)?,
            };
            self.write(room, lists, some, &places);
            self.gather(room, lists.first + first, some.count, &places);
        }
        Ok(())
    }

    /// Writes the records of a chunk of lists.
    fn write(&self, room: &RecordRoom, lists: &LaunchedLists, some: Queries, places: &PairPlaces) {
        let &Self {
            client,
            mainloops,
            inputs: [q, k, v, grad_out],
            stats,
            scale,
            ..
        } = self;
        let request = &mainloops.request;
        let (words, rows) = (places.words, request.all_keys());
        let far_rows = far_rows([k, v]);
        let parts = parts(client, mainloops.together, self.heads() * some.count);
        let (log2_scale, _) = scales(scale, None);
        for slice in Slice::whole(request.batch, request.kv_heads).cut(client) {
            // SAFETY: a cube reads its list, positions below the lengths in the strides, and writes the records of its pairs, of which there are at most as
            // many as list entries; the buffers have the lengths that `buffer` gets.
            unsafe {
                let cubes = slice.cubes(some.count * parts);
                let chunk = ChunkLaunch::new(
                    some.first as u32,
                    lists.count as u32,
                    ((lists.first + some.first) * mainloops.together) as u32,
                    parts as u32,
                    words as u32,
                    places.first_word as u32,
                    places.bits.words as u32,
                    room.room as u32,
                    request.seq_q as u32,
                    lists.most as u32,
                );
                // Both kernels have the same arguments, except for those of lists.
                macro_rules! launch {
                    ($kernel:path, $units:expr, [$($sizes:expr),*], $keys:expr, $tile:expr) => {
                        $kernel(
                            client,
                            cubes,
                            CubeDim::new_1d($units as u32),
                            $($sizes,)*
                            words_of(q),
                            input(k),
                            input(v),
                            words_of(grad_out),
                            buffer(stats, request.all_rows() * 2),
                            $keys,
                            buffer(&places.bits.bits, rows * places.bits.words),
                            buffer(&places.firsts, rows * (words + 1)),
                            buffer(&room.records, room.in_records),
                            slice.args(),
                            chunk,
                            scale as f32,
                            log2_scale as f32,
                            $tile,
                        )
                    };
                }
                match mainloops.by_keys {
                    ByKeys::WarpgroupRecords(tile) => launch!(
                        warpgroups::spread::spread::launch_unchecked,
                        tile.units(),
                        [
                            tile.cols() / 2,
                            tile.cols() / 4,
                            WarpgroupTile::sums(request.value_dim),
                            WarpgroupTile::sums(request.head_dim)
                        ],
                        lists.tensors(request),
                        SpreadGroups {
                            inner: WarpgroupTile {
                                far_rows,
                                ..tile.inner
                            },
                            ..tile
                        }
                    ),
                    ByKeys::Records(tile) => {
                        let inner = Tile {
                            far_rows,
                            ..tile.inner
                        };
                        let tile = SpreadTile { inner, ..tile };
                        let keys = buffer(lists.keys, lists.elements(request));
                        launch!(spread::launch_unchecked, inner.units(), [], keys, tile)
                    }
                    ByKeys::Blocks(_) => unreachable!("records are of single keys"),
                }
            }
        }
    }

    /// Sums the records of `count` lists per KV head, from list `first` on.
    fn gather(&self, room: &RecordRoom, first: usize, count: usize, places: &PairPlaces) {
        let &Self {
            client,
            mainloops,
            gradients,
            ..
        } = self;
        let request = &mainloops.request;
        let (pieces, rows, words) = (self.pieces(), request.all_keys(), places.words);
        let [k_pieces, v_pieces] =
            [request.head_dim, request.value_dim].map(|width| rows * width / 8);
        let half = half_of(request.dtype).expect("planned so");
        // SAFETY: a unit reads the records of an existing key and writes its own elements of that key.
        unsafe {
            records::gather::launch_unchecked(
                client,
                over(client, rows * pieces),
                CubeDim::new_1d(records::UNITS as u32),
                buffer(&room.records, room.in_records),
                buffer(&places.firsts, rows * (words + 1)),
                buffer(&room.sums, room.in_sums * 2),
                buffer(gradients.k, k_pieces),
                buffer(gradients.v, v_pieces),
                GatheredLaunch::new(
                    rows,
                    request.seq_kv,
                    words,
                    room.room,
                    u32::from(first == 0),
                    u32::from(first + count == room.lists),
                ),
                [request.head_dim, request.value_dim],
                half,
            );
        }
    }

    /// Returns `batch · kv_heads`.
    fn heads(&self) -> usize {
        self.mainloops.request.batch * self.mainloops.request.kv_heads
    }
}

/// Returns the number of cubes that share a list: several for a few lists of groups, to occupy all multiprocessors.
fn parts(client: &Client, together: usize, lists: usize) -> usize {
    /// Least number of cubes per multiprocessor, and maximum per list.
    const CUBES: usize = 4;
    const MOST: usize = 16;
    if together == 1 {
        return 1;
    }
    let known = client.properties().hardware.num_streaming_multiprocessors;
    let wanted = known.unwrap_or(1) as usize * CUBES;
    wanted.div_ceil(lists.max(1)).clamp(1, MOST)
}

/// Returns the cubes for `units` units, over two dimensions of a grid.
fn over(client: &Client, units: usize) -> CubeCount {
    let cubes = units.div_ceil(records::UNITS);
    let (most, ..) = client.properties().hardware.max_cube_count;
    let x = cubes.clamp(1, most as usize);
    CubeCount::Static(x as u32, cubes.div_ceil(x).max(1) as u32, 1)
}
