//! Top-k of rows by [`radix_select`](blocksparse_cubecl::primitives::radix_select), one row per cube.

use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::primitives::radix_select::{
    ListPlace, RadixTile, RowKeys, RowKeysExpand, Span, list_top_k, vector_of,
};
use blocksparse_cubecl::shared::order_key::key;

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    rows: usize,
    of_group: usize,
    columns: usize,
    most: usize,
}

/// Elements of a row that starts at vector `start`.
#[derive(CubeType, Clone, Copy)]
struct Numbers {
    start: usize,
}

#[cube]
impl RowKeys for Numbers {
    fn load<N: Size>(&self, numbers: &[Vector<u32, N>], vector: usize) -> Vector<u32, N> {
        numbers[self.start + vector]
    }

    fn key(&self, number: u32, _at: usize) -> u32 {
        key(number)
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn top_k<N: Size>(
    numbers: &[Vector<u32, N>],
    lists: &mut [i32],
    places: ComptimeOption<Box<[i32]>>,
    sizes: Sizes,
    #[comptime] t: RadixTile,
) {
    let mut places = places;
    // Surplus cubes repeat the last row.
    let row = CUBE_POS.min(sizes.rows - 1);
    let keys = Numbers {
        start: row * sizes.columns / N::value(),
    };
    let span = Span {
        begin: 0usize.runtime(),
        end: sizes.columns,
    };
    let mut place = ListPlace::new(row * sizes.most, sizes.columns);
    place.row_places = row * sizes.columns;
    place.first_place = row % sizes.of_group * sizes.most;
    list_top_k::<N, Numbers>(
        numbers,
        &keys,
        &span,
        sizes.most as u32,
        lists,
        &mut places,
        &place,
        1usize,
        t,
    );
}

/// Returns the columns of the `most` highest elements of each row, ties in favor of the earlier, NaN lowest. `lists` are i32 `[groups, rows, most]`, ascending,
/// for contiguous f32 `numbers` `[groups, rows, columns]`; `most` is at most `columns`. `places`, i32 in the shape of `numbers`, holds for each element its
/// index in the lists of its group, `row · most` plus its index in the row's list, or −1.
///
/// # Errors
/// Those of [`RadixTile::new`], or if the device cannot index the elements.
pub fn topk_rows(
    client: &Client,
    [groups, of_group, columns]: [usize; 3],
    most: usize,
    numbers: &Handle,
    [lists, places]: [&Handle; 2],
) -> Result<(), KernelError> {
    let rows = groups * of_group;
    KernelError::check_u32("the places of a group", of_group * most)?;
    let tile = RadixTile::new(client, columns)?;
    let address = address_of(client, rows * columns.max(most))?;
    let cubes = spread(client, rows as u64)?;
    if rows * columns * most == 0 {
        return Ok(());
    }
    let vector = vector_of(client, columns, numbers.offset_start);
    // SAFETY: a cube reads the elements of its row and writes its list and places; the buffers have the lengths that `buffer` gets.
    unsafe {
        top_k::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(tile.units as u32),
            address,
            vector,
            buffer(numbers, rows * columns / vector),
            buffer(lists, rows * most),
            ComptimeOptionArgs::Some(buffer(places, rows * columns)),
            SizesLaunch::new(rows, of_group, columns, most),
            tile,
        );
    }
    Ok(())
}
