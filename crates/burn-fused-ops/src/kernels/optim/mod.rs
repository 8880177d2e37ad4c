//! Optimizer steps over many tensors at once, on any CubeCL runtime.
//!
//! A launch covers as many tensors as the device binds, at most [`MOST_TENSORS`], and assigns cubes to them in proportion to their lengths. Tensors are
//! contiguous and flat. Kernels compute in f32 (f64 for f64). Every output has one writer and sums have a fixed order, so the same input gives the same bits
//! on a device. Values that change from step to step come from a buffer, so that a recorded graph can be replayed.
//!
//! ```text
//! sum_of_squares   of all tensors, in a fixed grid of partial sums; the norm and the factor of clipping
//! adamw            the step of AdamW, and scaling, both in place
//! concat           tensors one after another in a longer one
//! ```

mod adamw;
mod concat;
mod sum_of_squares;

use crate::kernels::prelude::*;
pub use adamw::{AdamWHyper, AdamWTensors, adamw, scale};
pub use concat::concat;
pub use sum_of_squares::{clip_factor, partial_sums, sum_of_squares};

/// Most tensors of a launch.
pub const MOST_TENSORS: usize = 32;

/// Units of a cube, if the device supports that many.
const UNITS: usize = 256;

/// Bytes that a unit loads at once, if a tensor's length and the device allow it.
const LOAD_BYTES: usize = 16;

/// A contiguous tensor of any shape.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FlatTensor {
    /// Buffer, beginning at the first element.
    pub handle: Handle,
    /// Number of elements.
    pub elements: usize,
    /// Element type.
    pub dtype: ElemType,
}

impl FlatTensor {
    /// Returns a tensor of `elements` that begins where the handle does.
    pub fn new(handle: Handle, elements: usize, dtype: ElemType) -> Self {
        Self {
            handle,
            elements,
            dtype,
        }
    }

    /// Returns the launch argument, in vectors of `vector` elements.
    fn arg(&self, vector: usize) -> BufferArg {
        buffer(&self.handle, self.elements / vector)
    }

    /// Returns the largest vector length that fits the tensor's length and offset, when the widest element of the launch has `widest` bytes.
    fn vector(&self, client: &Client, widest: usize) -> usize {
        let most = (LOAD_BYTES / widest).min(client.properties().hardware.max_vector_size.max(1));
        let offset = self.handle.offset_start.unwrap_or(0) as usize / self.dtype.size();
        [4, 2, 1]
            .into_iter()
            .find(|vector| {
                *vector <= most
                    && self.elements.is_multiple_of(*vector)
                    && offset.is_multiple_of(*vector)
            })
            .unwrap_or(1)
    }
}

/// Returns the units of a cube on a device: a power of two, at most `wanted`.
fn units_of(client: &Client, wanted: usize) -> usize {
    1 << wanted.min(most_units(client.properties())).ilog2()
}

/// Returns how many tensors fit in a launch that binds `own` buffers for each and `shared` for all.
///
/// # Errors
/// [`KernelError::Limit`] if the device does not bind the buffers of one tensor.
fn tensors_of_launch(client: &Client, own: usize, shared: usize) -> Result<usize, KernelError> {
    // One binding is taken by the launch's scalars.
    let most = client.properties().hardware.max_bindings as usize;
    match most.saturating_sub(shared + 1) / own {
        0 => Err(KernelError::limit(
            "the buffers of a launch",
            most as u32,
            own + shared + 1,
        )),
        tensors => Ok(tensors.min(MOST_TENSORS)),
    }
}

/// Groups tensors into launches with one key each and at most `most` tensors. The number of tensors of a launch is a power of two, so that few kernels are
/// compiled for any model.
fn launches<K: PartialEq + Copy, T>(
    tensors: impl Iterator<Item = (K, T)>,
    most: usize,
) -> Vec<(K, Vec<T>)> {
    let mut groups: Vec<(K, Vec<T>)> = Vec::new();
    for (key, tensor) in tensors {
        match groups.iter_mut().find(|(other, _)| *other == key) {
            Some((_, group)) => group.push(tensor),
            None => groups.push((key, vec![tensor])),
        }
    }
    let mut launches = Vec::new();
    for (key, mut group) in groups {
        while !group.is_empty() {
            let count = 1 << group.len().min(most).ilog2();
            let rest = group.split_off(count);
            launches.push((key, group));
            group = rest;
        }
    }
    launches
}

/// Checks that the device supports tensors of `elements`.
///
/// # Errors
/// [`KernelError::Limit`] if the device cannot index that many, or binds too few buffers.
pub fn check(client: &Client, elements: usize) -> Result<(), KernelError> {
    tensors_of_launch(client, 1, 1)?;
    let tensors = tensors_of_launch(client, 4, 2)?;
    address_of(client, elements + sum_of_squares::MARGIN)?;
    let cubes = elements.div_ceil(adamw::PART) as u64 * tensors as u64;
    spread(client, cubes).map(|_| ())
}

/// Describes the launches for tensors of at most `elements`. Part of plans.
///
/// # Errors
/// Those of [`check`].
pub fn describe(client: &Client, elements: usize) -> Result<String, KernelError> {
    check(client, elements)?;
    let most = |own, shared| {
        Ok::<usize, KernelError>(1 << tensors_of_launch(client, own, shared)?.ilog2())
    };
    let [squares, steps] = [most(1, 1)?, most(4, 2)?];
    let units = units_of(client, UNITS);
    Ok(format!(
        "sums of squares of up to {squares} tensors a launch, steps of up to {steps}, {units} units a cube"
    ))
}

/// Assignment of cubes to tensors: tensor `i` has cubes `starts[i]..starts[i + 1]`.
struct Deal {
    starts: Vec<usize>,
    cubes: CubeCount,
    /// Index type. It covers indices up to two parts past the end of a tensor.
    address: AddressType,
}

impl Deal {
    /// Assigns cubes to parts of `part` elements of each tensor; `other` is the length of another buffer of the launch.
    ///
    /// # Errors
    /// [`KernelError::Limit`] if the device cannot index that many elements.
    fn new(
        client: &Client,
        elements: impl Iterator<Item = usize>,
        part: usize,
        other: usize,
    ) -> Result<Self, KernelError> {
        let (mut starts, mut largest, mut cubes) = (vec![0], other, 0);
        for elements in elements {
            cubes += elements.div_ceil(part);
            starts.push(cubes);
            largest = largest.max(elements);
        }
        Ok(Self {
            starts,
            cubes: spread(client, cubes as u64)?,
            address: address_of(client, largest + 2 * part)?,
        })
    }
}
