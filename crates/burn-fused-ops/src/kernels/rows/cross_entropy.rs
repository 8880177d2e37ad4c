//! Cross entropy of rows of logits, and the gradient with respect to the logits.

use crate::kernels::prelude::*;
use cubecl::ir::IntKind;

use blocksparse_cubecl::shared::row_tile::{Combine, RowTile, across_lanes};

/// Vectors of a row that a lane keeps in registers between the two passes; longer rows are read twice.
const HELD_VECTORS: usize = 8;

/// Units of a row that is read twice, if the device supports that many: few such rows are processed at once.
const LONG_LANES: usize = 1024;

/// Below every logit; the exponential of its difference to a logit is 0.
const LOWEST: f32 = -3.0e38;

/// Destination of the gradient with respect to a row's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Gradient {
    /// Not computed.
    None,
    /// Overwrites the logits.
    InPlace,
    /// A buffer of another type.
    Rounded,
}

/// Comptime parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Rows {
    tile: RowTile,
    /// True if rows stay in registers between the passes.
    held: bool,
    gradient: Gradient,
    /// True if there is an ignored target.
    ignores: bool,
    /// True if labels are smoothed.
    smooths: bool,
}

/// Parameters of a row's gradient, the same in all lanes of the row.
#[derive(CubeType, Clone, Copy)]
struct RowGradient<A: Float> {
    /// Largest logit of the row.
    most: A,
    /// Factor of the exponentials: the reciprocal of their sum, NaN for a target out of range.
    factor: A,
    /// Subtracted from the target's probability.
    on_target: A,
    /// Subtracted from every probability.
    on_all: A,
    /// Vector that contains the target, and the target's index in it.
    vector: usize,
    place: usize,
    /// True if the row's target is not ignored.
    counts: bool,
}

/// Returns `softmax − onehot` for a vector of logits.
#[cube]
fn gradient_of<A: Float, N: Size>(
    logits: Vector<A, N>,
    column: usize,
    row: &RowGradient<A>,
    #[comptime] is_exponential: bool,
) -> Vector<A, N> {
    let mut result = Vector::<A, N>::empty().fill(A::new(0.0));
    #[unroll]
    for c in 0..N::value() {
        let mut value = logits.extract(c);
        if comptime!(!is_exponential) {
            value = (value - row.most).exp();
        }
        value = value * row.factor - row.on_all;
        let is_target = column == row.vector && c == row.place;
        value -= select(is_target, row.on_target, A::new(0.0));
        // 0 whatever the logits are, NaN included.
        result.insert(c, select(row.counts, value, A::new(0.0)));
    }
    result
}

/// Computes `stats[position] = (−log softmax(logits)[target], 1)`, `(0, 0)` if the target is ignored, and the gradient with respect to the logits,
/// `softmax − onehot`.
///
/// `logits` are `[rows, vocab]` of the positions from `first` on; `targets` and `stats` cover all positions.
#[cube(launch_unchecked, address_type = "dynamic")]
fn cross_entropy<A: Float, E: Float, I: Int, N: Size>(
    logits: &mut [Vector<A, N>],
    rounded: ComptimeOption<Box<[Vector<E, N>]>>,
    targets: &[I],
    stats: &mut [A],
    rows: usize,
    first: usize,
    vocab: usize,
    ignored: InputScalar,
    nan: InputScalar,
    smoothing: InputScalar,
    #[comptime] r: Rows,
    #[define(A, E, I)] _types: [ElemType; 3],
) {
    let t = comptime!(r.tile);
    let width = N::value();
    let mut shared = Shared::<[A]>::new_slice(comptime!(t.shared()));
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(t.lanes);
    let row = CUBE_POS * comptime!(t.rows) + unit / comptime!(t.lanes);
    let exists = row < rows;
    let vectors = select(exists, comptime!(t.row_vectors).runtime(), 0usize);
    let start = select(exists, row, 0usize) * comptime!(t.row_vectors);
    let position = first + select(exists, row, 0usize);

    let target = targets[position];
    let mut counts = true.runtime();
    if comptime!(r.ignores) {
        counts = target != ignored.get::<I>();
    }
    let valid = target >= I::new(0) && target < I::cast_from(vocab);
    let mut vector = comptime!(t.row_vectors).runtime();
    let mut place = 0usize.runtime();
    if counts && valid {
        let column = usize::cast_from(target);
        vector = column / width;
        place = column % width;
    }

    let held_vectors = comptime!(if r.held { t.lane_vectors() } else { 1 });
    let mut held = Array::<Vector<A, N>>::new(held_vectors);
    let mut most = A::new(LOWEST);
    let mut sum = A::new(0.0);
    let mut total = A::new(0.0);
    let mut chosen = A::new(0.0);
    if comptime!(r.held) {
        #[unroll]
        for i in 0..held_vectors {
            let column = lane + i * comptime!(t.lanes);
            held[i] = Vector::<A, N>::empty().fill(A::new(LOWEST));
            if column < vectors {
                held[i] = logits[start + column];
                #[unroll]
                for c in 0..width {
                    let logit = held[i].extract(c);
                    most = max(most, logit);
                    chosen += select(column == vector && c == place, logit, A::new(0.0));
                    if comptime!(r.smooths) {
                        total += logit;
                    }
                }
            }
        }
        most = across_lanes::<A>(most, &mut shared, t, Combine::Max);
        #[unroll]
        for i in 0..held_vectors {
            let mut exponentials = Vector::<A, N>::empty().fill(A::new(0.0));
            #[unroll]
            for c in 0..width {
                let exponential = (held[i].extract(c) - most).exp();
                exponentials.insert(c, exponential);
                sum += exponential;
            }
            held[i] = exponentials;
        }
    } else {
        let mut column = lane;
        while column < vectors {
            let loaded = logits[start + column];
            let mut largest = most;
            #[unroll]
            for c in 0..width {
                let logit = loaded.extract(c);
                largest = max(largest, logit);
                chosen += select(column == vector && c == place, logit, A::new(0.0));
                if comptime!(r.smooths) {
                    total += logit;
                }
            }
            sum *= (most - largest).exp();
            #[unroll]
            for c in 0..width {
                sum += (loaded.extract(c) - largest).exp();
            }
            most = largest;
            column += comptime!(t.lanes);
        }
        let own = most;
        most = across_lanes::<A>(own, &mut shared, t, Combine::Max);
        sum *= (own - most).exp();
    }
    sum = across_lanes::<A>(sum, &mut shared, t, Combine::Sum);
    if comptime!(r.smooths) {
        total = across_lanes::<A>(total, &mut shared, t, Combine::Sum);
    }

    let smoothing = smoothing.get::<A>();
    let count = A::cast_from(vocab);
    // The lane that holds the target's logit writes.
    let writer = select(counts && valid, vector % comptime!(t.lanes), 0usize);
    if exists && lane == writer {
        let mut loss = sum.ln() + (most - chosen);
        if comptime!(r.smooths) {
            loss = sum.ln()
                + (A::new(1.0) - smoothing) * (most - chosen)
                + smoothing * (most - total / count);
        }
        loss = select(valid, loss, nan.get::<A>());
        stats[position * 2] = select(counts, loss, A::new(0.0));
        stats[position * 2 + 1] = select(counts, A::new(1.0), A::new(0.0));
    }

    if comptime!(r.gradient != Gradient::None) {
        let mut on_all = A::new(0.0);
        let mut on_target = A::new(1.0);
        if comptime!(r.smooths) {
            on_all = smoothing / count;
            on_target = A::new(1.0) - smoothing;
        }
        let of_row = RowGradient::<A> {
            most,
            factor: select(valid, A::new(1.0) / sum, nan.get::<A>()),
            on_target,
            on_all,
            vector,
            place,
            counts,
        };
        if comptime!(r.held) {
            #[unroll]
            for i in 0..held_vectors {
                let column = lane + i * comptime!(t.lanes);
                if column < vectors {
                    let gradient = gradient_of::<A, N>(held[i], column, &of_row, true);
                    store::<A, E, N>(gradient, start + column, logits, &rounded, r.gradient);
                }
            }
        } else {
            let mut column = lane;
            while column < vectors {
                let loaded = logits[start + column];
                let gradient = gradient_of::<A, N>(loaded, column, &of_row, false);
                store::<A, E, N>(gradient, start + column, logits, &rounded, r.gradient);
                column += comptime!(t.lanes);
            }
        }
    }
}

/// Writes a vector of the gradient.
#[cube]
fn store<A: Float, E: Float, N: Size>(
    gradient: Vector<A, N>,
    at: usize,
    logits: &mut [Vector<A, N>],
    rounded: &ComptimeOption<Box<[Vector<E, N>]>>,
    #[comptime] to: Gradient,
) {
    if comptime!(to == Gradient::Rounded) {
        let mut rounded = rounded.clone().unwrap();
        rounded[at] = Vector::<E, N>::cast_from(gradient);
    } else {
        logits[at] = gradient;
    }
}

/// Computes `loss = factor · Σ losses` and the factor: 1, or the reciprocal of the number of targets that count, 0 if there are none.
#[cube(launch_unchecked)]
fn reduce<A: Float>(
    totals: &[A],
    loss: &mut [A],
    factor: &mut [A],
    #[comptime] mean: bool,
    #[define(A)] _accumulator: ElemType,
) {
    if ABSOLUTE_POS == 0 {
        let mut by = A::new(1.0);
        if comptime!(mean) {
            let counted = totals[1];
            let none = counted == A::new(0.0);
            by = select(
                none,
                A::new(0.0),
                A::new(1.0) / select(none, A::new(1.0), counted),
            );
        }
        loss[0] = totals[0] * by;
        factor[0] = by;
    }
}

/// Sizes, types and options of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct CrossEntropyKind {
    /// Columns of the logits.
    pub vocab: usize,
    /// Type of the logits and of sums: f32 or f64.
    pub accumulator: ElemType,
    /// Type of targets: i32 or i64.
    pub index: ElemType,
    /// Type of the gradient with respect to the logits, if it is wanted. If it is [`Self::accumulator`], the gradient overwrites the logits.
    pub gradient: Option<ElemType>,
    /// Target that is ignored.
    pub ignore_index: Option<i64>,
    /// Share of a target's probability that is spread over the vocabulary.
    pub smoothing: f64,
}

impl CrossEntropyKind {
    /// Returns a kind without an ignored target and without label smoothing.
    pub fn new(
        vocab: usize,
        accumulator: ElemType,
        index: ElemType,
        gradient: Option<ElemType>,
    ) -> Self {
        Self {
            vocab,
            accumulator,
            index,
            gradient,
            ignore_index: None,
            smoothing: 0.0,
        }
    }

    /// Returns the ignored target if the targets' type can represent it.
    fn ignored(&self) -> Option<i64> {
        self.ignore_index.filter(|ignored| match self.index {
            ElemType::Int(IntKind::I32) => i32::try_from(*ignored).is_ok(),
            _ => true,
        })
    }

    fn launch(&self, client: &Client) -> Result<Rows, KernelError> {
        let properties = client.properties();
        let gradient = self.gradient.unwrap_or(self.accumulator);
        check_types(properties, [self.accumulator, self.index, gradient])?;
        if self.index == ElemType::Int(IntKind::I32) && self.vocab > i32::MAX as usize {
            return Err(KernelError::limit(
                "the vocabulary of targets of 32 bits",
                i32::MAX as u32,
                self.vocab,
            ));
        }
        let most_units = most_units(properties);
        let tile = |most: usize| RowTile::new(properties, self.vocab, self.accumulator, most);
        let (tile, held) = match tile(HELD_VECTORS) {
            Some(tile) => (Some(tile), true),
            None => {
                let lanes = 1 << LONG_LANES.min(most_units).ilog2();
                let vectors = tile(self.vocab).map_or(self.vocab, |tile| tile.row_vectors);
                (tile(vectors.div_ceil(lanes)), false)
            }
        };
        let Some(tile) = tile else {
            return Err(KernelError::limit(
                "units of a row",
                most_units as u32,
                most_units + 1,
            ));
        };
        Ok(Rows {
            tile,
            held,
            gradient: match self.gradient {
                None => Gradient::None,
                Some(gradient) if gradient == self.accumulator => Gradient::InPlace,
                Some(_) => Gradient::Rounded,
            },
            ignores: self.ignored().is_some(),
            smooths: self.smoothing != 0.0,
        })
    }
}

/// Describes the launch of [`cross_entropy_rows`].
///
/// # Errors
/// [`KernelError`] if the device lacks a type or a row is too long for it.
pub fn cross_entropy_plan(client: &Client, kind: &CrossEntropyKind) -> Result<String, KernelError> {
    let Rows { tile, held, .. } = kind.launch(client)?;
    Ok(format!(
        "{} rows of {} units a cube, vectors of {}, {}",
        tile.rows,
        tile.lanes,
        tile.vector,
        match held {
            true => "logits in registers",
            false => "logits read twice",
        }
    ))
}

/// Buffers of [`cross_entropy_rows`], all contiguous.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyRows<'a> {
    /// Logits, `[rows, vocab]`, overwritten by their gradient if it has their type.
    pub logits: &'a Handle,
    /// Output: the logits' gradient in another type, `[rows, vocab]`.
    pub rounded: Option<&'a Handle>,
    /// Targets, `[positions]`.
    pub targets: &'a Handle,
    /// Output, `[positions, 2]`: the loss of each position, and 1 if it counts. Only the entries of these rows are written.
    pub stats: &'a Handle,
    /// Number of all positions.
    pub positions: usize,
    /// Position of the first row.
    pub first: usize,
    /// Number of rows of logits.
    pub rows: usize,
}

/// Computes the cross entropy of each row of logits with its target, `−log softmax(logits)[target]`, and, if wanted, its gradient with respect to the logits,
/// `softmax − onehot`. Rows with an ignored target have loss and gradient 0; rows with a target out of range have NaN.
///
/// # Errors
/// Those of [`cross_entropy_plan`]; also if the device cannot index the logits.
pub fn cross_entropy_rows(
    client: &Client,
    kind: &CrossEntropyKind,
    buffers: CrossEntropyRows,
) -> Result<(), KernelError> {
    let launch = kind.launch(client)?;
    let CrossEntropyRows { rows, first, .. } = buffers;
    if rows == 0 {
        return Ok(());
    }
    let tile = launch.tile;
    let largest = (rows * kind.vocab).max(buffers.positions * 2);
    let address = address_of(client, largest)?;
    let cubes = spread(client, rows.div_ceil(tile.rows) as u64)?;
    let vectors = rows * tile.row_vectors;
    let accumulator = kind.accumulator;
    // SAFETY: a unit reads and writes its vectors of a row below `rows`, reads that row's target and writes its two statistics; units without a row read the
    // first target only. The buffers have the declared lengths (see `buffer`).
    unsafe {
        cross_entropy::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(tile.units() as u32),
            address,
            tile.vector,
            buffer(buffers.logits, vectors),
            optional(
                buffers
                    .rounded
                    .filter(|_| launch.gradient == Gradient::Rounded),
                vectors,
            ),
            buffer(buffers.targets, buffers.positions),
            buffer(buffers.stats, buffers.positions * 2),
            rows,
            first,
            kind.vocab,
            InputScalar::new(kind.ignored().unwrap_or(0), kind.index),
            InputScalar::new(f64::NAN, accumulator),
            InputScalar::new(kind.smoothing, accumulator),
            launch,
            [
                accumulator,
                kind.gradient.unwrap_or(accumulator),
                kind.index,
            ],
        );
    }
    Ok(())
}

/// Computes the loss of all positions from their `stats`, and the factor of its gradients, with sums in a fixed order. With `mean` the sum is divided by the
/// number of positions that count; the factor is 0 if there are none. `loss` and `factor` have one element.
///
/// # Errors
/// Those of [`column_sums`].
pub fn cross_entropy_loss(
    client: &Client,
    (stats, accumulator): (&Handle, ElemType),
    positions: usize,
    mean: bool,
    [loss, factor]: [&Handle; 2],
) -> Result<(), KernelError> {
    debug_assert_eq!(accumulator, accumulator_of(accumulator));
    let totals = client.empty(2 * accumulator.size());
    column_sums(
        client,
        (stats, accumulator),
        [positions, 2],
        (&totals, accumulator),
    )?;
    // SAFETY: one unit reads two elements and writes one of each output.
    unsafe {
        reduce::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(1),
            buffer(&totals, 2),
            buffer(loss, 1),
            buffer(factor, 1),
            mean,
            accumulator,
        );
    }
    Ok(())
}
