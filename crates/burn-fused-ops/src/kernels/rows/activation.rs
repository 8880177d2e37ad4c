//! Bias and activation kernels, forward and backward.

use blocksparse_cubecl::call::HAS_PTX;
use blocksparse_cubecl::shared::curve::{ActivationKind, Curve, slope, value};

use crate::kernels::prelude::*;
use crate::kernels::rows::strips::{Grid, Strips, partial_sums, store_sums, sum_up};

/// Rows that a unit loads at once.
const UNROLLED: usize = 4;
/// Cubes that keep a large device busy while it sums.
const CUBES: usize = 2048;

/// Comptime parameters of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kind {
    curve: Curve,
    grid: Grid,
    /// True if the gradient is written, not only its sums.
    written: bool,
    /// True if the backward pass recomputes the activation.
    again: bool,
}

/// Computes `y = f(x + bias)`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn forward<E: Float, P: Float, A: Float, N: Size>(
    x: &[Vector<E, N>],
    bias: ComptimeOption<Box<[Vector<P, N>]>>,
    y: &mut [Vector<E, N>],
    rows: usize,
    #[comptime] k: Kind,
    #[define(E, P, A)] _types: [ElemType; 3],
) {
    let unit = UNIT_POS as usize;
    let column = CUBE_POS_X as usize * comptime!(k.grid.columns) + unit % comptime!(k.grid.columns);
    let top =
        CUBE_POS_Y as usize * comptime!(k.grid.rows * UNROLLED) + unit / comptime!(k.grid.columns);
    if column < comptime!(k.grid.row_vectors) {
        let added = bias_of::<P, A, N>(bias, column);
        let mut values = Array::<Vector<A, N>>::new(comptime!(UNROLLED));
        #[unroll]
        for i in 0..comptime!(UNROLLED) {
            // Units past the last row read it again.
            let row = min(top + i * comptime!(k.grid.rows), rows - 1);
            values[i] = Vector::<A, N>::cast_from(x[row * comptime!(k.grid.row_vectors) + column]);
        }
        #[unroll]
        for i in 0..comptime!(UNROLLED) {
            let row = top + i * comptime!(k.grid.rows);
            if row < rows {
                y[row * comptime!(k.grid.row_vectors) + column] =
                    Vector::<E, N>::cast_from(value::<A, N>(values[i] + added, k.curve));
            }
        }
    }
}

#[cube]
fn bias_of<P: Float, A: Float, N: Size>(
    bias: ComptimeOption<Box<[Vector<P, N>]>>,
    column: usize,
) -> Vector<A, N> {
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => Vector::<A, N>::cast_from(bias[column]),
        ComptimeOption::None => Vector::<A, N>::zeroed(),
    }
}

/// Computes `dx = dy ∘ f'(x + bias)`, its sums over the rows of each chunk, and `y = f(x + bias)` again.
#[cube(launch_unchecked, address_type = "dynamic")]
fn backward<E: Float, P: Float, A: Float, N: Size>(
    x: ComptimeOption<Box<[Vector<E, N>]>>,
    bias: ComptimeOption<Box<[Vector<P, N>]>>,
    dy: &[Vector<E, N>],
    dx: ComptimeOption<Box<[Vector<E, N>]>>,
    y: ComptimeOption<Box<[Vector<E, N>]>>,
    sums: ComptimeOption<Box<[Vector<A, N>]>>,
    rows: usize,
    steps: usize,
    #[comptime] k: Kind,
    #[define(E, P, A)] _types: [ElemType; 3],
) {
    let mut dx = dx;
    let mut y = y;
    let unit = UNIT_POS as usize;
    let column = CUBE_POS_X as usize * comptime!(k.grid.columns) + unit % comptime!(k.grid.columns);
    let step_rows = comptime!(k.grid.rows * UNROLLED);
    let top = CUBE_POS_Y as usize * steps * step_rows + unit / comptime!(k.grid.columns);
    let mut sum = Vector::<A, N>::zeroed();
    if column < comptime!(k.grid.row_vectors) {
        let added = bias_of::<P, A, N>(bias, column);
        for step in 0..steps {
            let top = top + step * step_rows;
            // Kept in the stored type and widened where used: half of the registers.
            let mut grads = Array::<Vector<E, N>>::new(comptime!(UNROLLED));
            let mut values = Array::<Vector<E, N>>::new(comptime!(UNROLLED));
            #[unroll]
            for i in 0..comptime!(UNROLLED) {
                let row = min(top + i * comptime!(k.grid.rows), rows - 1);
                grads[i] = dy[row * comptime!(k.grid.row_vectors) + column];
            }
            if comptime!(k.curve.activation != ActivationKind::None) {
                let x = x.as_ref().unwrap();
                #[unroll]
                for i in 0..comptime!(UNROLLED) {
                    let row = min(top + i * comptime!(k.grid.rows), rows - 1);
                    values[i] = x[row * comptime!(k.grid.row_vectors) + column];
                }
            }
            #[unroll]
            for i in 0..comptime!(UNROLLED) {
                let row = top + i * comptime!(k.grid.rows);
                if row < rows {
                    let at = row * comptime!(k.grid.row_vectors) + column;
                    let mut grad = Vector::<A, N>::cast_from(grads[i]);
                    if comptime!(k.curve.activation != ActivationKind::None) {
                        let x = Vector::<A, N>::cast_from(values[i]) + added;
                        grad *= slope::<A, N>(x, k.curve);
                        if comptime!(k.again) {
                            y.as_mut().unwrap()[at] =
                                Vector::<E, N>::cast_from(value::<A, N>(x, k.curve));
                        }
                    }
                    sum += grad;
                    if comptime!(k.written) {
                        dx.as_mut().unwrap()[at] = Vector::<E, N>::cast_from(grad);
                    }
                }
            }
        }
    }
    store_sums::<A, N>(sums, sum, column, k.grid);
}

/// Returns the grid of a matrix and the comptime parameters.
fn launch_of(
    client: &Client,
    [rows, width]: [usize; 2],
    element: ElemType,
    activation: ActivationKind,
    written: bool,
) -> Result<(Strips, Kind), KernelError> {
    let strips = Strips::new(client, [rows, width], &[width], UNROLLED, element)?;
    let kind = Kind {
        curve: Curve {
            activation,
            fast: HAS_PTX && element.size() == 2 && client.name() == "cuda",
        },
        grid: strips.grid,
        written,
        again: false,
    };
    Ok((strips, kind))
}

/// Describes the launches of [`bias_activation`] and its backward pass.
///
/// # Errors
/// Those of the launches.
pub fn activation_text(
    client: &Client,
    matrix: [usize; 2],
    element: ElemType,
    activation: ActivationKind,
) -> Result<String, KernelError> {
    let (strips, _) = launch_of(client, matrix, element, activation, true)?;
    Ok(format!(
        "bias and {activation:?}: {} numbers a load, {} × {} units a cube, {UNROLLED} rows a unit",
        strips.vector, strips.grid.columns, strips.grid.rows
    ))
}

/// Computes `y = f(x + bias)` for contiguous `[rows, width]`, rounded once. `y` may be `x`.
///
/// # Errors
/// [`KernelError::Limit`] if there are more elements or cubes than the device supports.
pub fn bias_activation(
    client: &Client,
    x: Typed,
    bias: Option<Typed>,
    y: &Handle,
    [rows, width]: [usize; 2],
    activation: ActivationKind,
) -> Result<(), KernelError> {
    if rows == 0 || width == 0 {
        return Ok(());
    }
    let (strips, kind) = launch_of(client, [rows, width], x.1, activation, true)?;
    let chunks = strips.chunks(rows)?;
    let accumulator = accumulator_of(x.1);
    let row_vectors = kind.grid.row_vectors;
    // SAFETY: a unit reads its vector of rows below `rows` and of the bias, and writes the same vectors; the buffers have the declared lengths (see
    // `buffer`). Where `y` is `x`, the unit that writes an element has read it before.
    unsafe {
        forward::launch_unchecked(
            client,
            strips.cubes(chunks),
            strips.dim(),
            strips.address,
            strips.vector,
            buffer(x.0, rows * row_vectors),
            optional(bias.map(|bias| bias.0), row_vectors),
            buffer(y, rows * row_vectors),
            rows,
            kind,
            [x.1, bias.map_or(accumulator, |bias| bias.1), accumulator],
        );
    }
    Ok(())
}

/// Arguments of the backward pass of [`bias_activation`].
#[derive(Clone, Copy, Debug)]
pub struct ActivationBackward<'a> {
    pub activation: ActivationKind,
    /// Input of the forward pass, `[rows, width]` in `dy`'s type; not read without an activation.
    pub x: Option<&'a Handle>,
    /// Bias, `[width]`.
    pub bias: Option<Typed<'a>>,
    /// Gradient with respect to the result, `[rows, width]`.
    pub dy: Typed<'a>,
    /// Output: gradient with respect to x, `[rows, width]`. May be `dy`'s buffer.
    pub dx: Option<&'a Handle>,
    /// Output: the recomputed activation, `[rows, width]`. May be `x`'s buffer. Requires `dx` and an activation.
    pub y: Option<&'a Handle>,
    /// Output: gradient with respect to the bias, `[width]`.
    pub sums: Option<Typed<'a>>,
}

/// Launches the backward pass.
///
/// # Errors
/// Those of [`bias_activation`].
pub fn bias_activation_backward(
    client: &Client,
    [rows, width]: [usize; 2],
    pass: &ActivationBackward,
) -> Result<(), KernelError> {
    let (activation, x, bias) = (pass.activation, pass.x, pass.bias);
    let (dy, dx, y) = (pass.dy, pass.dx, pass.y);
    let sums = pass.sums;
    if width == 0 || (dx.is_none() && sums.is_none()) {
        return Ok(());
    }
    if rows == 0 || (dx.is_none() && activation == ActivationKind::None) {
        return sum_up(client, Some(dy), [rows, width], sums);
    }
    let (strips, mut kind) = launch_of(client, [rows, width], dy.1, activation, dx.is_some())?;
    let y = y.filter(|_| dx.is_some() && activation != ActivationKind::None);
    kind.again = y.is_some();
    let (of_a_cube, chunks) = strips.steps(rows, sums.map(|_| CUBES));
    let accumulator = accumulator_of(dy.1);
    let partial = partial_sums(client, sums, [chunks, width], accumulator);
    let row_vectors = kind.grid.row_vectors;
    // SAFETY: a unit reads its vectors of rows below `rows` and of the bias, and writes the same vectors and one of its chunk's sums; the buffers have the
    // declared lengths (see `buffer`). Where `dx` is `dy`, or `y` is `x`, the unit that writes an element has read it before.
    unsafe {
        backward::launch_unchecked(
            client,
            strips.cubes(chunks),
            strips.dim(),
            strips.address,
            strips.vector,
            optional(
                x.filter(|_| activation != ActivationKind::None),
                rows * row_vectors,
            ),
            optional(bias.map(|bias| bias.0), row_vectors),
            buffer(dy.0, rows * row_vectors),
            optional(dx, rows * row_vectors),
            optional(y, rows * row_vectors),
            optional(partial.as_ref(), chunks * row_vectors),
            rows,
            of_a_cube,
            kind,
            [dy.1, bias.map_or(accumulator, |bias| bias.1), accumulator],
        );
    }
    let partial = partial.as_ref().map(|partial| (partial, accumulator));
    sum_up(client, partial, [chunks, width], sums)
}
