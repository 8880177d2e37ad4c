//! Launches of gradients by keys and values as records of pairs.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::records::{self, GatheredLaunch};
use super::request::ListedRequest;
use super::spread::{ChunkLaunch, SpreadTile, spread};
use super::views::{ListedGradients, far_rows, input, strides};
use super::warpgroups::{self, SpreadGroups, WarpgroupTile};
use crate::kernels::args::buffer;
use crate::kernels::call::TensorView;
use crate::kernels::error::KernelError;
use crate::kernels::mma::tile::Tile;
use crate::kernels::on_device::{Queries, pair_places};
use crate::kernels::slices::Slice;
use crate::kernels::tensor::scales;

/// What is launched.
pub struct Spread<'a> {
    pub client: &'a Client,
    pub request: &'a ListedRequest,
    /// q, k, v and the output's gradient.
    pub inputs: [&'a TensorView; 4],
    pub stats: &'a Handle,
    /// The lists.
    pub keys: &'a Handle,
    pub gradients: ListedGradients<'a>,
    pub scale: f64,
    pub tile: SpreadTile,
    /// What writes records in place of that.
    pub on_wgmma: Option<SpreadGroups>,
}

/// Adds the gradients by keys and values, of some queries at a time.
///
/// # Errors
/// [`KernelError`] if the numbers are more than 32 bits count.
pub fn launch(of: &Spread) -> Result<(), KernelError> {
    let &Spread {
        client,
        request,
        inputs: [q, k, v, grad_out],
        stats,
        keys,
        gradients,
        scale,
        ..
    } = of;
    let tile = SpreadTile {
        inner: Tile {
            far_rows: far_rows([k, v]),
            ..of.tile.inner
        },
        ..of.tile
    };
    let on_wgmma = of.on_wgmma.map(|on_wgmma| SpreadGroups {
        far_rows: tile.inner.far_rows,
        ..on_wgmma
    });
    let most = request.queries_of_records().expect("planned so");
    let lists = request.batch * request.kv_heads;
    let (pieces, rows) = (tile.pieces(), request.all_keys());
    let room = most * request.most;
    let [in_records, in_sums] = [lists * room, rows].map(|count| count * pieces);
    KernelError::check_u32("the pieces of records", in_records)?;
    KernelError::check_u32("the sums of dK and dV, in fours", in_sums * 2)?;
    let records = client.empty(in_records * 16);
    let is_one = most >= request.seq_q;
    // Sums of all queries so far, if there are others.
    let in_sums = if is_one { 1 } else { in_sums };
    let sums = client.empty(in_sums * 32);
    let (log2_scale, _) = scales(scale, None);
    let [k_pieces, v_pieces] = [request.head_dim, request.value_dim].map(|width| rows * width / 8);
    for first in (0..request.seq_q).step_by(most) {
        let queries = Queries {
            first,
            count: most.min(request.seq_q - first),
        };
        let places = pair_places(client, &request.key_lists(), keys, queries)?;
        let words = places.words;
        for slice in Slice::whole(request.batch, request.kv_heads).cut(client) {
            // SAFETY: a cube reads its query's list, positions below the lengths in the strides, and writes the records of its pairs, which are as many as its
            // queries' numbers at most; the buffers have the lengths they say (see `buffer`).
            unsafe {
                let cubes = slice.cubes(queries.count);
                let chunk = ChunkLaunch::new(
                    first as u32,
                    words as u32,
                    room as u32,
                    request.seq_q as u32,
                    request.most as u32,
                );
                // Both kernels have the same arguments.
                macro_rules! launch {
                    ($kernel:path, $units:expr, [$($sizes:expr),*], $tile:expr) => {
                        $kernel(
                            client,
                            cubes,
                            CubeDim::new_1d($units as u32),
                            $($sizes,)*
                            input(q),
                            input(k),
                            input(v),
                            input(grad_out),
                            buffer(stats, request.all_rows() * 2),
                            buffer(keys, request.listed()),
                            buffer(&places.bits, rows * words),
                            buffer(&places.firsts, rows * (words + 1)),
                            buffer(&records, in_records),
                            strides(k),
                            strides(v),
                            slice.args(),
                            chunk,
                            scale as f32,
                            log2_scale as f32,
                            $tile,
                        )
                    };
                }
                match on_wgmma {
                    Some(tile) => launch!(
                        warpgroups::spread::spread::launch_unchecked,
                        tile.units(),
                        [
                            tile.cols / 2,
                            tile.cols / 4,
                            WarpgroupTile::sums(tile.value_dim),
                            WarpgroupTile::sums(tile.head_dim)
                        ],
                        tile
                    ),
                    None => launch!(spread::launch_unchecked, tile.inner.units(), [], tile),
                }
            }
        }
        let ends = first + queries.count == request.seq_q;
        // SAFETY: a unit reads the records of a key that there is and writes its own numbers of that key.
        unsafe {
            records::gather::launch_unchecked(
                client,
                over(client, rows * pieces),
                CubeDim::new_1d(records::UNITS as u32),
                buffer(&records, in_records),
                buffer(&places.firsts, rows * (words + 1)),
                buffer(&sums, in_sums * 2),
                buffer(gradients.k, k_pieces),
                buffer(gradients.v, v_pieces),
                GatheredLaunch::new(
                    rows,
                    request.seq_kv,
                    words,
                    room,
                    u32::from(first == 0),
                    u32::from(ends),
                ),
                [request.head_dim, request.value_dim],
                tile.inner.element.half(),
            );
        }
    }
    Ok(())
}

/// Cubes for so many units, over two dimensions of a grid.
fn over(client: &Client, units: usize) -> CubeCount {
    let cubes = units.div_ceil(records::UNITS);
    let (most, ..) = client.properties().hardware.max_cube_count;
    let x = cubes.clamp(1, most as usize);
    CubeCount::Static(x as u32, cubes.div_ceil(x).max(1) as u32, 1)
}
