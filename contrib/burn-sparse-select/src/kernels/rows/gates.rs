//! Branches added, each times the gate of a row, and their gradients.

use blocksparse_cubecl::limits::check_types;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::rows::columns::accumulator_of;
use blocksparse_cubecl::rows::norm_shape::{check_buffers, has, place, sum_of};
use blocksparse_cubecl::rows::typed::Typed;
use blocksparse_cubecl::shared::row_tile::{Combine, RowTile, across_lanes};

/// How many branches there may be.
pub const MOST_BRANCHES: usize = 3;

/// Some of the branches, by their gates' places in a row: known to the compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Columns {
    /// How many.
    count: usize,
    /// Where; those behind the last say nothing.
    of: [usize; MOST_BRANCHES],
}

impl Columns {
    fn new(are: impl IntoIterator<Item = bool>) -> Self {
        let mut columns = Self {
            count: 0,
            of: [0; MOST_BRANCHES],
        };
        let are = are.into_iter().enumerate().filter(|(_, is)| *is);
        for (column, _) in are {
            columns.of[columns.count] = column;
            columns.count += 1;
        }
        columns
    }
}

/// `out = Σ gate · branch`: a unit has one vector.
#[cube(launch_unchecked, address_type = "dynamic")]
fn forward<E: Float, G: Float, A: Float, N: Size>(
    branches: Sequence<Box<[Vector<E, N>]>>,
    gates: &[G],
    out: &mut [Vector<E, N>],
    vectors: usize,
    #[comptime] columns: Columns,
    #[comptime] row_vectors: usize,
    #[comptime] row_gates: usize,
    #[define(E, G, A)] _types: [ElemType; 3],
) {
    let at = ABSOLUTE_POS;
    if at < vectors {
        let first = at / row_vectors * row_gates;
        let mut sum = Vector::<A, N>::zeroed();
        #[unroll]
        for i in 0..comptime!(columns.count) {
            let gate = A::cast_from(gates[first + comptime!(columns.of[i])]);
            let x = Vector::<A, N>::cast_from(branches[i][at]);
            sum += x * Vector::<A, N>::empty().fill(gate);
        }
        out[at] = Vector::<E, N>::cast_from(sum);
    }
}

/// What the backward pass is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct BackwardKind {
    tile: RowTile,
    row_gates: usize,
    /// The branches that are read, for their gates' gradients,
    read: Columns,
    /// and those whose gradients are written.
    written: Columns,
    /// The gates of branches that are not there, whose gradients are 0.
    none: Columns,
}

/// `by_branch = gate · grad` and `by_gate = Σ grad ∘ branch` over a row, by one reading of `grad` and of the branches.
#[cube(launch_unchecked, address_type = "dynamic")]
fn backward<E: Float, G: Float, A: Float, N: Size>(
    grad: &[Vector<E, N>],
    branches: Sequence<Box<[Vector<E, N>]>>,
    gates: &[G],
    mut by_branches: Sequence<Box<[Vector<E, N>]>>,
    by_gates: ComptimeOption<Box<[G]>>,
    rows: usize,
    #[comptime] k: BackwardKind,
    #[define(E, G, A)] _types: [ElemType; 3],
) {
    let tile = comptime!(k.tile);
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(tile.lanes);
    let row = CUBE_POS * comptime!(tile.rows) + unit / comptime!(tile.lanes);
    let exists = row < rows;
    // Units behind the last row read it once more: every unit meets every barrier.
    let row = min(row, rows - 1);
    let start = row * comptime!(tile.row_vectors);
    let first = row * comptime!(k.row_gates);

    let mut factors = Array::<A>::new(comptime!(MOST_BRANCHES));
    #[unroll]
    for b in 0..comptime!(k.written.count) {
        factors[b] = A::cast_from(gates[first + comptime!(k.written.of[b])]);
    }
    let mut sums = Array::<A>::new(comptime!(MOST_BRANCHES));
    #[unroll]
    for b in 0..comptime!(k.read.count) {
        sums[b] = A::new(0.0);
    }
    for i in 0..comptime!(tile.lane_vectors()) {
        let at = start + place(lane, i, tile);
        let is_own = has(lane, i, tile);
        let dy = Vector::<A, N>::cast_from(grad[at]);
        #[unroll]
        for b in 0..comptime!(k.read.count) {
            let x = Vector::<A, N>::cast_from(branches[b][at]);
            sums[b] += select(is_own, sum_of::<A, N>(dy * x), A::new(0.0));
        }
        if exists && is_own {
            #[unroll]
            for b in 0..comptime!(k.written.count) {
                let by_branch = by_branches.index_mut(b);
                let factor = Vector::<A, N>::empty().fill(factors[b]);
                by_branch[at] = Vector::<E, N>::cast_from(dy * factor);
            }
        }
    }
    #[comptime]
    match by_gates {
        ComptimeOption::Some(mut by_gates) => {
            let mut shared = Shared::<[A]>::new_slice(comptime!(tile.shared()));
            let writes = exists && lane == 0;
            #[unroll]
            for b in 0..comptime!(k.read.count) {
                let sum = across_lanes::<A>(sums[b], &mut shared, tile, Combine::Sum);
                if writes {
                    by_gates[first + comptime!(k.read.of[b])] = G::cast_from(sum);
                }
            }
            #[unroll]
            for b in 0..comptime!(k.none.count) {
                if writes {
                    by_gates[first + comptime!(k.none.of[b])] = G::new(0.0);
                }
            }
        }
        ComptimeOption::None => {}
    }
}

fn check(
    client: &Client,
    branches: usize,
    types: [ElemType; 2],
    width: usize,
) -> Result<RowTile, KernelError> {
    if branches > MOST_BRANCHES {
        let most = MOST_BRANCHES as u64;
        return Err(KernelError::limit("branches", most, branches));
    }
    check_types(client.properties(), types)?;
    // Those of the backward pass: three more than what is read and written of each branch.
    check_buffers(client, 3 + 2 * MOST_BRANCHES)?;
    let [element, _] = types;
    RowTile::new(client.properties(), width, element, usize::MAX)
        .ok_or_else(|| KernelError::limit("a row's numbers", usize::MAX as u64, width))
}

/// How [`gated_sum`] and its backward pass are launched, of so many branches of `element`, and gates of a type.
pub fn gated_text(
    client: &Client,
    width: usize,
    branches: usize,
    types: [ElemType; 2],
) -> Result<String, KernelError> {
    let tile = check(client, branches, types, width)?;
    Ok(format!(
        "gates: {} numbers a load, backward {} × {} units a cube",
        tile.vector, tile.lanes, tile.rows
    ))
}

/// `out = Σ gate · branch`, each row of a branch times one number, rounded once: contiguous `[rows, width]` all, and gates `[rows, branches]`, of the
/// branches in their order, one for each place, three at most. Gates of branches that are not there are not read. `out` may be a branch.
///
/// # Errors
/// [`KernelError`] if there are more branches, or the device lacks a type, does not bind nine buffers or cannot index the numbers.
pub fn gated_sum(
    client: &Client,
    branches: &[Option<&Handle>],
    gates: Typed,
    (out, element): Typed,
    [rows, width]: [usize; 2],
) -> Result<(), KernelError> {
    let tile = check(client, branches.len(), [element, gates.1], width)?;
    if rows * width == 0 {
        return Ok(());
    }
    let vectors = rows * tile.row_vectors;
    let units = tile.units();
    let row_gates = branches.len();
    let largest = (rows * width).max(rows * row_gates);
    let address = address_of(client, largest.max(2 * vectors.next_multiple_of(units)))?;
    let cubes = spread(client, vectors.div_ceil(units) as u64)?;
    let mut read = SequenceArg::new();
    for branch in branches.iter().flatten() {
        read.push(buffer(branch, vectors));
    }
    // SAFETY: a unit reads one vector below `vectors` of each branch, and its row's gates, and writes the same vector; the buffers have the lengths
    // they say (see `buffer`). Where `out` is a branch it is read by the unit that writes it, before.
    unsafe {
        forward::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(units as u32),
            address,
            tile.vector,
            read,
            buffer(gates.0, rows * row_gates),
            buffer(out, vectors),
            vectors,
            Columns::new(branches.iter().map(Option::is_some)),
            tile.row_vectors,
            row_gates,
            [element, gates.1, accumulator_of(element)],
        );
    }
    Ok(())
}

/// The backward pass of [`gated_sum`].
#[derive(Clone, Copy, Debug)]
pub struct GatedBackward<'a> {
    /// By the sum, `[rows, width]`.
    pub grad: Typed<'a>,
    /// As the sum had them, in the type of `grad`.
    pub branches: &'a [Option<&'a Handle>],
    /// `[rows, branches]`
    pub gates: Typed<'a>,
    /// By each branch, to be written where it is wanted: `[rows, width]`. The last of them may be `grad`'s buffer.
    pub by_branches: &'a [Option<&'a Handle>],
    /// By the gates in their type, to be written: `[rows, branches]`, 0 for those of branches that are not there.
    pub by_gates: Option<&'a Handle>,
}

/// Runs a backward pass.
pub fn gated_sum_backward(
    client: &Client,
    [rows, width]: [usize; 2],
    pass: &GatedBackward,
) -> Result<(), KernelError> {
    let ((grad, element), (gates, gate)) = (pass.grad, pass.gates);
    let tile = check(client, pass.branches.len(), [element, gate], width)?;
    if rows * width == 0 {
        return Ok(());
    }
    let row_gates = pass.branches.len();
    let vectors = rows * tile.row_vectors;
    let read = match pass.by_gates {
        Some(_) => pass.branches,
        None => &[],
    };
    let k = BackwardKind {
        tile,
        row_gates,
        read: Columns::new(read.iter().map(Option::is_some)),
        written: Columns::new(pass.by_branches.iter().map(Option::is_some)),
        none: Columns::new(read.iter().map(Option::is_none)),
    };
    let sequence = |list: &[Option<&Handle>]| {
        let mut sequence = SequenceArg::new();
        for handle in list.iter().flatten() {
            sequence.push(buffer(handle, vectors));
        }
        sequence
    };
    let tiles = rows.div_ceil(tile.rows);
    let largest = (rows * width)
        .max(rows * row_gates)
        .max(2 * tiles * tile.rows);
    let address = address_of(client, largest)?;
    let cubes = spread(client, tiles as u64)?;
    // SAFETY: a unit reads vectors of a row below `rows`, and the row's gates; it writes its own vectors of a row that exists, and the first lane the row's
    // gates' gradients. The buffers have the lengths they say (see `buffer`). Where a gradient is in `grad`'s place, it is read by the unit that writes it,
    // before; what others read of it behind a row's end they throw away.
    unsafe {
        backward::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(tile.units() as u32),
            address,
            tile.vector,
            buffer(grad, vectors),
            sequence(read),
            buffer(gates, rows * row_gates),
            sequence(pass.by_branches),
            optional(pass.by_gates, rows * row_gates),
            rows,
            k,
            [element, gate, accumulator_of(element)],
        );
    }
    Ok(())
}
