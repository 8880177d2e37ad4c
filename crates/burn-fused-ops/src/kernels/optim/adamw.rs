//! In-place kernels of the AdamW step (Loshchilov & Hutter, 2019, algorithm 2) and of scaling.

use crate::kernels::optim::{Deal, FlatTensor, UNITS, launches, tensors_of_launch, units_of};
use crate::kernels::prelude::*;

/// Elements per cube.
pub(crate) const PART: usize = 4096;

/// Hyperparameters, constant over steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWHyper {
    /// β₁ and β₂: decay of the moments.
    pub betas: [f64; 2],
    /// ε, added to the root of the second moment.
    pub epsilon: f64,
    /// λ: parameters are multiplied by `1 − η λ`.
    pub weight_decay: f64,
}

/// Tensors of one parameter's step, all with equal numbers of elements. The moments have the type of the parameter's sums.
#[derive(Clone, Debug)]
pub struct AdamWTensors {
    /// Parameter: read and written.
    pub parameter: FlatTensor,
    /// Gradient.
    pub gradient: FlatTensor,
    /// Moments: read and written.
    pub moments: [FlatTensor; 2],
}

#[derive(CubeType, CubeLaunch)]
struct Numbers {
    beta_1: InputScalar,
    rest_1: InputScalar,
    beta_2: InputScalar,
    rest_2: InputScalar,
    epsilon: InputScalar,
    weight_decay: InputScalar,
}

/// Updates parameters and moments. `control` holds η, 1 − β₁ᵗ and 1 − β₂ᵗ.
#[cube(launch_unchecked, address_type = "dynamic")]
fn step<P: Float, G: Float, A: Float, N: Size>(
    mut parameters: Sequence<Box<[Vector<P, N>]>>,
    gradients: Sequence<Box<[Vector<G, N>]>>,
    mut first: Sequence<Box<[Vector<A, N>]>>,
    mut second: Sequence<Box<[Vector<A, N>]>>,
    control: &[A],
    factor: ComptimeOption<Box<[A]>>,
    vectors: Sequence<usize>,
    starts: Sequence<usize>,
    numbers: Numbers,
    #[comptime] count: usize,
    #[comptime] units: usize,
    #[define(P, G, A)] _types: [ElemType; 3],
) {
    let width = N::value();
    let steps = comptime!((PART / width).div_ceil(units));
    let cube = CUBE_POS;
    let rate = control[0];
    let mut kept = A::new(1.0);
    #[comptime]
    match factor {
        ComptimeOption::Some(factor) => {
            kept = factor[0];
        }
        ComptimeOption::None => {}
    }
    let kept = fill::<A, N>(kept);
    let decay = fill::<A, N>(A::new(1.0) - rate * numbers.weight_decay.get::<A>());
    let rate = fill::<A, N>(rate);
    let unbiased_1 = fill::<A, N>(A::new(1.0) / control[1]);
    let unbiased_2 = fill::<A, N>(A::new(1.0) / control[2]);
    let beta_1 = fill::<A, N>(numbers.beta_1.get::<A>());
    let rest_1 = fill::<A, N>(numbers.rest_1.get::<A>());
    let beta_2 = fill::<A, N>(numbers.beta_2.get::<A>());
    let rest_2 = fill::<A, N>(numbers.rest_2.get::<A>());
    let epsilon = fill::<A, N>(numbers.epsilon.get::<A>());
    #[unroll]
    for i in 0..count {
        let start = *starts.index(i);
        if cube >= start && cube < *starts.index(comptime!(i + 1)) {
            let parameter = parameters.index_mut(i);
            let gradient = gradients.index(i);
            let first = first.index_mut(i);
            let second = second.index_mut(i);
            let end = *vectors.index(i);
            let begin = (cube - start) * comptime!(PART / width) + UNIT_POS as usize;
            // Not unrolled: the code is already instantiated for every tensor, and its loads keep the memory busy.
            for step in 0..steps {
                let at = begin + step * units;
                if at < end {
                    let g = Vector::<A, N>::cast_from(gradient[at]) * kept;
                    let p = Vector::<A, N>::cast_from(parameter[at]);
                    let m = beta_1 * first[at] + rest_1 * g;
                    let v = beta_2 * second[at] + rest_2 * g * g;
                    let moved = m * unbiased_1 / ((v * unbiased_2).sqrt() + epsilon);
                    parameter[at] = Vector::<P, N>::cast_from(p * decay - rate * moved);
                    first[at] = m;
                    second[at] = v;
                }
            }
        }
    }
}

#[cube]
fn fill<A: Float, N: Size>(value: A) -> Vector<A, N> {
    Vector::<A, N>::empty().fill(value)
}

/// Computes `tensor ← factor · tensor`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn scale_parts<E: Float, A: Float, N: Size>(
    mut tensors: Sequence<Box<[Vector<E, N>]>>,
    factor: &[A],
    vectors: Sequence<usize>,
    starts: Sequence<usize>,
    #[comptime] count: usize,
    #[comptime] units: usize,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let width = N::value();
    let steps = comptime!((PART / width).div_ceil(units));
    let cube = CUBE_POS;
    let factor = fill::<A, N>(factor[0]);
    #[unroll]
    for i in 0..count {
        let start = *starts.index(i);
        if cube >= start && cube < *starts.index(comptime!(i + 1)) {
            let tensor = tensors.index_mut(i);
            let end = *vectors.index(i);
            let begin = (cube - start) * comptime!(PART / width) + UNIT_POS as usize;
            for step in 0..steps {
                let at = begin + step * units;
                if at < end {
                    let scaled = Vector::<A, N>::cast_from(tensor[at]) * factor;
                    tensor[at] = Vector::<E, N>::cast_from(scaled);
                }
            }
        }
    }
}

/// Takes the step of all `tensors`: `g ← factor · g`, `m ← β₁ m + (1 − β₁) g`, `v ← β₂ v + (1 − β₂) g²`,
/// `p ← p (1 − η λ) − η (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)`. `control` holds η, 1 − β₁ᵗ, 1 − β₂ᵗ and five more elements, `factor` one element, all of
/// type `accumulator`, like the moments.
///
/// # Errors
/// [`KernelError::Limit`] if a tensor has more elements than the device indexes, or the device binds too few buffers.
pub fn adamw(
    client: &Client,
    tensors: &[AdamWTensors],
    control: &Handle,
    factor: Option<&Handle>,
    numbers: AdamWHyper,
    accumulator: ElemType,
) -> Result<(), KernelError> {
    let most = tensors_of_launch(client, 4, 2)?;
    let tensors = tensors.iter().filter(|x| x.parameter.elements > 0);
    let tensors = tensors.map(|tensors| {
        let (parameter, gradient) = (&tensors.parameter, &tensors.gradient);
        let [first, second] = &tensors.moments;
        let all = [parameter, gradient, first, second].into_iter();
        let widths = all.map(|tensor| tensor.vector(client, accumulator.size()));
        let vector = widths.min().unwrap_or(1);
        ((parameter.dtype, gradient.dtype, vector), tensors)
    });
    let launches = launches(tensors, most);
    let units = units_of(client, UNITS);
    for ((parameter, gradient, vector), held) in launches {
        let deal = Deal::new(client, held.iter().map(|x| x.parameter.elements), PART, 0)?;
        let buffers = |tensor: fn(&AdamWTensors) -> &FlatTensor| {
            held.iter().map(move |x| tensor(x).arg(vector))
        };
        let [beta_1, beta_2] = numbers.betas;
        let number = |value: f64| InputScalar::new(value, accumulator);
        // SAFETY: a unit reads and writes vectors of its tensors below their length, each once; the buffers have the declared lengths (see `buffer`).
        unsafe {
            step::launch_unchecked(
                client,
                deal.cubes,
                CubeDim::new_1d(units as u32),
                deal.address,
                vector,
                buffers(|x| &x.parameter).collect(),
                buffers(|x| &x.gradient).collect(),
                buffers(|x| &x.moments[0]).collect(),
                buffers(|x| &x.moments[1]).collect(),
                buffer(control, 8),
                optional(factor, 1),
                held.iter().map(|x| x.parameter.elements / vector).collect(),
                deal.starts.into_iter().collect(),
                NumbersLaunch::new(
                    number(beta_1),
                    number(1.0 - beta_1),
                    number(beta_2),
                    number(1.0 - beta_2),
                    number(numbers.epsilon),
                    number(numbers.weight_decay),
                ),
                held.len(),
                units,
                [parameter, gradient, accumulator],
            );
        }
    }
    Ok(())
}

/// Multiplies all `tensors` by `factor`, one element of type `accumulator`.
///
/// # Errors
/// Those of [`adamw`].
pub fn scale(
    client: &Client,
    tensors: &[FlatTensor],
    factor: &Handle,
    accumulator: ElemType,
) -> Result<(), KernelError> {
    let most = tensors_of_launch(client, 1, 1)?;
    let tensors = tensors.iter().filter(|tensor| tensor.elements > 0);
    let tensors = tensors.map(|tensor| {
        let widest = tensor.dtype.size().max(accumulator.size());
        ((tensor.dtype, tensor.vector(client, widest)), tensor)
    });
    let launches = launches(tensors, most);
    let units = units_of(client, UNITS);
    for ((dtype, vector), held) in launches {
        let deal = Deal::new(client, held.iter().map(|tensor| tensor.elements), PART, 0)?;
        // SAFETY: see `adamw`.
        unsafe {
            scale_parts::launch_unchecked(
                client,
                deal.cubes,
                CubeDim::new_1d(units as u32),
                deal.address,
                vector,
                held.iter().map(|tensor| tensor.arg(vector)).collect(),
                buffer(factor, 1),
                held.iter().map(|tensor| tensor.elements / vector).collect(),
                deal.starts.into_iter().collect(),
                held.len(),
                units,
                [dtype, accumulator],
            );
        }
    }
    Ok(())
}
