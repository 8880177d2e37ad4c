//! Bulk copies (PTX ISA, section 9.7.9.25). They are under way for a while after they are asked for: a kernel that
//! reads too early finds what was there before, and one that overwrites too early sends what it wrote.

use super::cube::Cube;
use super::launch::Launch;
use super::memory::{check_alignment, out_of_bounds, part, placed};
use super::pending::{Kind, Pending};
use super::races::{Access, Clock};
use super::tensor_map::{BYTES, TensorMap};
use super::warp::{Bytes, Warp};
use crate::error::Fault;
use crate::ptx::{Bulk, Effect, Space};

/// Bytes that bulk copies are multiples of, and so are their places.
const UNIT: usize = 16;
/// Bytes that places of tensor maps are multiples of.
const MAP_ALIGNMENT: usize = 64;

impl Pending {
    /// What a thread asks for.
    ///
    /// # Errors
    ///
    /// [`Fault`] for places and counts that the copy engine does not take.
    pub fn asked(
        launch: &Launch,
        cube: &mut Cube,
        warp: &mut Warp,
        bulk: &Bulk,
        lane: usize,
    ) -> Result<Self, Fault> {
        let races = cube.races.as_ref();
        let asked = races.map(|races| (races.clock(warp.number).clone(), races.line));
        Ok(Self {
            kind: Kind::asked(launch, cube, warp, bulk, lane)?,
            thread: (warp.number, lane),
            asked,
        })
    }

    /// Whether a thread waits for this when it waits for its stores.
    pub fn is_store_of(&self, asking: (usize, usize)) -> bool {
        matches!(self.kind, Kind::Store { .. } | Kind::StoreTensor { .. }) && self.thread == asking
    }

    /// Moves the bytes, and tells the barrier.
    ///
    /// # Errors
    ///
    /// [`Fault`] outside of what there is, and for races.
    pub fn perform(self, launch: &Launch, cube: &mut Cube) -> Result<(), Fault> {
        let Some((asked, line)) = self.asked else {
            return self.kind.perform(launch, cube, None);
        };
        let races = cube.races.as_mut().expect("somebody watches");
        races.line = line;
        let engine = match self.kind {
            Kind::Load { .. } | Kind::LoadTensor { .. } => races.loads(),
            Kind::Store { .. } | Kind::StoreTensor { .. } => races.stores(),
        };
        let clock = races.begin_copy(engine, asked);
        self.kind.perform(launch, cube, Some(&clock))
    }
}

impl Kind {
    fn asked(
        launch: &Launch,
        cube: &mut Cube,
        warp: &mut Warp,
        bulk: &Bulk,
        lane: usize,
    ) -> Result<Self, Fault> {
        let shared = |address: u64, unit: usize| {
            let (_, place) = placed(Space::Shared, address);
            check_alignment(Space::Shared, place, unit)?;
            Ok::<u64, Fault>(place)
        };
        let coordinates = |warp: &Warp, slots: &[u32]| -> Vec<i32> {
            slots
                .iter()
                .map(|&slot| warp.at(slot)[lane] as i32)
                .collect()
        };
        match bulk {
            Bulk::Load {
                to,
                from,
                bytes,
                barrier,
            } => {
                let bytes = warp.at(*bytes)[lane] as usize;
                let from = warp.address(*from, lane);
                check_bytes(launch, from, bytes)?;
                Ok(Self::Load {
                    to: shared(warp.address(*to, lane), UNIT)?,
                    from,
                    bytes,
                    barrier: shared(warp.address(*barrier, lane), 8)?,
                })
            }
            Bulk::Store {
                to,
                from,
                bytes,
                effect,
            } => {
                let bytes = warp.at(*bytes)[lane] as usize;
                let to = warp.address(*to, lane);
                check_bytes(launch, to, bytes)?;
                Ok(Self::Store {
                    to,
                    from: shared(warp.address(*from, lane), UNIT)?,
                    bytes,
                    effect: *effect,
                })
            }
            Bulk::LoadTensor {
                to,
                map,
                coordinates: at,
                barrier,
            } => {
                let address = warp.address(*map, lane);
                Ok(Self::LoadTensor {
                    to: shared(warp.address(*to, lane), 128)?,
                    map: read_map(launch, cube, warp, address, lane)?,
                    coordinates: coordinates(warp, at),
                    barrier: shared(warp.address(*barrier, lane), 8)?,
                })
            }
            Bulk::StoreTensor {
                map,
                coordinates: at,
                from,
                effect,
            } => {
                let address = warp.address(*map, lane);
                Ok(Self::StoreTensor {
                    map: read_map(launch, cube, warp, address, lane)?,
                    coordinates: coordinates(warp, at),
                    from: shared(warp.address(*from, lane), 128)?,
                    effect: *effect,
                })
            }
        }
    }

    fn perform(self, launch: &Launch, cube: &mut Cube, clock: Option<&Clock>) -> Result<(), Fault> {
        match self {
            Self::Load {
                to,
                from,
                bytes,
                barrier,
            } => {
                let place = reached(cube, to, bytes, clock, Access::Write)?;
                // SAFETY: both ranges were checked, and no device memory lies within a cube's vector.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, place, bytes) };
                tell(cube, barrier, bytes, clock)
            }
            Self::Store {
                to,
                from,
                bytes,
                effect,
            } => {
                for offset in (0..bytes).step_by(4) {
                    let place = reached(cube, from + offset as u64, 4, clock, Access::AsyncRead)?;
                    // SAFETY: both places were checked.
                    unsafe { put(effect, to + offset as u64, place, 4) };
                }
                cube.events += 1;
                Ok(())
            }
            Self::LoadTensor {
                to,
                map,
                coordinates,
                barrier,
            } => {
                let size = map.element_bytes;
                let outside = [if map.nan_outside { 0xff } else { 0 }; 8];
                let shared = (to, Access::Write);
                each_of_box(
                    launch,
                    cube,
                    clock,
                    &map,
                    &coordinates,
                    shared,
                    |place, address| {
                        let from = address.map_or(outside.as_ptr(), |address| address as *const u8);
                        // SAFETY: both places were checked.
                        unsafe { std::ptr::copy_nonoverlapping(from, place, size) };
                    },
                )?;
                tell(cube, barrier, map.box_bytes(), clock)
            }
            Self::StoreTensor {
                map,
                coordinates,
                from,
                effect,
            } => {
                let size = map.element_bytes;
                let shared = (from, Access::AsyncRead);
                each_of_box(
                    launch,
                    cube,
                    clock,
                    &map,
                    &coordinates,
                    shared,
                    |place, address| {
                        if let Some(address) = address {
                            // SAFETY: both places were checked.
                            unsafe { put(effect, address, place, size) };
                        }
                    },
                )?;
                cube.events += 1;
                Ok(())
            }
        }
    }
}

/// Where bytes lie in shared memory that a copy brings (a write) or takes.
fn reached(
    cube: &mut Cube,
    place: u64,
    bytes: usize,
    clock: Option<&Clock>,
    access: Access,
) -> Result<*mut u8, Fault> {
    if let (Some(races), Some(clock)) = (&mut cube.races, clock) {
        let engine = match access {
            Access::Write => races.loads(),
            _ => races.stores(),
        };
        races.check(engine, clock, place, bytes, access)?;
    }
    part(&mut cube.shared, Space::Shared, place, bytes)
}

/// # Safety
///
/// `size` bytes can be written at `to` and read at `from`.
unsafe fn put(effect: Effect, to: u64, from: *const u8, size: usize) {
    let to = to as *mut u8;
    // SAFETY: as the caller promises.
    unsafe {
        match effect {
            Effect::Replace => std::ptr::copy_nonoverlapping(from, to, size),
            Effect::AddF32 => {
                let sum = to.cast::<f32>().read_unaligned() + from.cast::<f32>().read_unaligned();
                to.cast::<f32>().write_unaligned(sum);
            }
        }
    }
}

fn tell(cube: &mut Cube, barrier: u64, bytes: usize, clock: Option<&Clock>) -> Result<(), Fault> {
    if let (Some(races), Some(clock)) = (&mut cube.races, clock) {
        races.end_load(barrier, clock);
    }
    let counted = cube.counted(barrier)?.expecting(-(bytes as i32));
    cube.set_counted(barrier, counted)
}

fn check_bytes(launch: &Launch, address: u64, bytes: usize) -> Result<(), Fault> {
    check_alignment(Space::Global, address, UNIT)?;
    if !launch.regions.holds(address, bytes) || !bytes.is_multiple_of(UNIT) {
        return Err(out_of_bounds(Space::Global, address, bytes));
    }
    Ok(())
}

fn read_map(
    launch: &Launch,
    cube: &mut Cube,
    warp: &mut Warp,
    address: u64,
    lane: usize,
) -> Result<TensorMap, Fault> {
    let mut bytes = [0; BYTES];
    for (part, held) in bytes.chunks_mut(MAP_ALIGNMENT).enumerate() {
        let from = address + (part * MAP_ALIGNMENT) as u64;
        let from = Bytes::new(Space::Generic, from, MAP_ALIGNMENT);
        let place = warp.place(launch, cube, from, lane, Access::Read)?;
        // SAFETY: `place` gives so many bytes.
        unsafe { std::ptr::copy_nonoverlapping(place, held.as_mut_ptr(), MAP_ALIGNMENT) };
    }
    TensorMap::from_bytes(&bytes)
}

/// Calls `each` for every element of a box, as [`TensorMap::each`] does, up to the first fault: with its place in the box that begins at an address of shared
/// memory, and its own, where there is one.
fn each_of_box(
    launch: &Launch,
    cube: &mut Cube,
    clock: Option<&Clock>,
    map: &TensorMap,
    coordinates: &[i32],
    (shared, access): (u64, Access),
    mut each: impl FnMut(*mut u8, Option<u64>),
) -> Result<(), Fault> {
    if coordinates.len() != map.sizes.len() {
        return Err(Fault::TensorMap(format!(
            "{} coordinates of {} dimensions",
            coordinates.len(),
            map.sizes.len()
        )));
    }
    let size = map.element_bytes;
    let mut found = Ok(());
    map.each(coordinates, |at, address| {
        if found.is_err() {
            return;
        }
        found = match address.filter(|&address| !launch.regions.holds(address, size)) {
            Some(beyond) => Err(out_of_bounds(Space::Global, beyond, size)),
            None => {
                let place = map.swizzle.place(shared + at as u64);
                reached(cube, place, size, clock, access).map(|place| each(place, address))
            }
        };
    });
    found
}
