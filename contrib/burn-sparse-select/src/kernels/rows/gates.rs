//! Sums of branches, each times a gate per row, and their gradients.

use blocksparse_cubecl::limits::check_types;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::rows::columns::accumulator_of;
use blocksparse_cubecl::rows::norm_shape::{check_buffers, has, place, sum_of};
use blocksparse_cubecl::rows::typed::Typed;
use blocksparse_cubecl::shared::row_tile::{Combine, RowTile, across_lanes};

/// Maximum number of branches.
pub const MOST_BRANCHES: usize = 3;

/// A subset of the branches, as indices of their gates in a row, known at compile time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Columns {
    /// Number of branches in the subset.
    count: usize,
    /// Indices of the gates; entries from `count` on are unspecified.
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

/// Computes `out = Σ gate · branch`, one vector per unit.
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

/// Compile-time parameters of the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct BackwardKind {
    tile: RowTile,
    row_gates: usize,
    /// Branches to read, for the gradients with respect to their gates.
    read: Columns,
    /// Branches whose gradients are written.
    written: Columns,
    /// Missing branches, whose gates have gradients of 0.
    none: Columns,
}

/// Computes `by_branch = gate · grad` and `by_gate = Σ grad ∘ branch` over a row, reading `grad` and the branches once.
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
    // Every unit must reach every barrier: units after the last row read it again.
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
    // The backward pass binds three buffers, and two per branch.
    check_buffers(client, 3 + 2 * MOST_BRANCHES)?;
    let [element, _] = types;
    RowTile::new(client.properties(), width, element, usize::MAX)
        .ok_or_else(|| KernelError::limit("a row's numbers", usize::MAX as u64, width))
}

/// Returns the launch plan of [`gated_sum`] and its backward pass as text, for branches and gates of these types.
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

/// Computes `out = Σ gate · branch` per row and rounds once. All tensors are contiguous: branches `[rows, width]`, gates `[rows, branches]`. At most three
/// branches; gates of missing branches are not read. `out` may alias a branch.
///
/// # Errors
/// [`KernelError`] if there are more branches, or if the device lacks a type, does not bind nine buffers or cannot index the elements.
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
    // SAFETY: a unit reads one vector below `vectors` of each branch and its row's gates, and writes the same vector; the buffers have the lengths that
    // `buffer` gets. If `out` aliases a branch, the unit reads its vector before it writes it.
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

/// Arguments of the backward pass of [`gated_sum`].
#[derive(Clone, Copy, Debug)]
pub struct GatedBackward<'a> {
    /// Gradient with respect to the sum, `[rows, width]`.
    pub grad: Typed<'a>,
    /// Branches of the forward pass, in the type of `grad`.
    pub branches: &'a [Option<&'a Handle>],
    /// `[rows, branches]`
    pub gates: Typed<'a>,
    /// Destinations of the wanted gradients with respect to branches: `[rows, width]`. The last one may alias `grad`.
    pub by_branches: &'a [Option<&'a Handle>],
    /// Destination of the gradients with respect to gates, in their type: `[rows, branches]`, 0 for missing branches.
    pub by_gates: Option<&'a Handle>,
}

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
    // SAFETY: a unit reads vectors of a row below `rows` and the row's gates. It writes only its own vectors of an existing row, and the first lane writes the
    // gates' gradients of the row. The buffers have the lengths that `buffer` gets. If a gradient aliases `grad`, the unit reads its vector before it writes
    // it; units after the last row may read overwritten data, but discard it.
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
