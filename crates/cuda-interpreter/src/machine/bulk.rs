//! Bulk copies (PTX ISA, section 9.7.9.25). They complete some time after they are issued. A kernel that
//! reads too early finds the old contents, and one that overwrites too early sends the new ones.

use super::cube::Cube;
use super::launch::Launch;
use super::memory::{check_alignment, out_of_bounds, part, placed};
use super::pending::{Effect, Moved, Pending, Way};
use super::races::{Access, Clock};
use super::tensor_map::{BYTES, TensorMap};
use super::warp::Warp;
use crate::error::Fault;
use crate::ptx::{Address, Slot, Space};

/// Alignment of the size and the addresses of bulk copies, in bytes.
const UNIT: usize = 16;
/// Alignment of boxes in shared memory, in bytes.
const BOX_UNIT: usize = 128;
/// Alignment of tensor maps, in bytes.
const MAP_ALIGNMENT: usize = 64;

/// The operand of a bulk copy outside of shared memory.
pub enum Outside {
    /// Consecutive bytes.
    Bytes { at: Address, count: Slot },
    /// A box of a tensor.
    Box {
        map: Address,
        coordinates: Vec<Slot>,
    },
}

pub struct Bulk {
    pub shared: Address,
    pub outside: Outside,
    pub way: Way<Address>,
}

impl Pending {
    /// Creates the copy that a thread issues.
    ///
    /// # Errors
    ///
    /// [`Fault`] for addresses and sizes that the copy engine does not accept.
    pub fn asked(
        cube: &mut Cube,
        warp: &mut Warp,
        bulk: &Bulk,
        lane: usize,
    ) -> Result<Self, Fault> {
        let (outside, unit) = match &bulk.outside {
            Outside::Bytes { at, count } => {
                let (at, count) = (warp.address(*at, lane), warp.at(*count)[lane] as usize);
                check_bytes(cube.launch, at, count)?;
                (Moved::Bytes(at, count), UNIT)
            }
            Outside::Box { map, coordinates } => {
                let map = read_map(cube, warp, warp.address(*map, lane), lane)?;
                let coordinates = coordinates.iter().map(|&slot| warp.at(slot)[lane] as i32);
                (Moved::Box(map, coordinates.collect()), BOX_UNIT)
            }
        };
        let shared = |at: Address, unit: usize| {
            let (_, place) = placed(Space::Shared, warp.address(at, lane));
            check_alignment(Space::Shared, place, unit)?;
            Ok::<u64, Fault>(place)
        };
        let races = cube.races.as_ref();
        Ok(Self {
            shared: shared(bulk.shared, unit)?,
            outside,
            way: match bulk.way {
                Way::In { barrier } => Way::In {
                    barrier: shared(barrier, 8)?,
                },
                Way::Out(effect) => Way::Out(effect),
            },
            thread: (warp.number, lane),
            asked: races.map(|races| (races.clock(warp.number).clone(), races.line)),
        })
    }

    /// Returns whether this is a store that the thread waits for.
    pub fn is_store_of(&self, asking: (usize, usize)) -> bool {
        matches!(self.way, Way::Out(_)) && self.thread == asking
    }

    /// Moves the bytes and signals the barrier.
    ///
    /// # Errors
    ///
    /// [`Fault`] for accesses out of bounds, and for races.
    pub fn perform(mut self, cube: &mut Cube) -> Result<(), Fault> {
        let clock = self.asked.take().map(|(asked, line)| {
            let races = cube.races.as_mut().expect("somebody watches");
            races.line = line;
            let engine = match self.way {
                Way::In { .. } => races.loads(),
                Way::Out(_) => races.stores(),
            };
            races.begin_copy(engine, asked)
        });
        let clock = clock.as_ref();
        let bytes = match &self.outside {
            Moved::Bytes(address, bytes) => {
                let place = self.reached(cube, self.shared, *bytes, clock)?;
                // SAFETY: both ranges were checked, and no device memory lies within a cube's vector.
                unsafe { self.moves(place, Some(*address), *bytes, 0) };
                *bytes
            }
            Moved::Box(map, coordinates) => {
                self.moves_box(cube, map, coordinates, clock)?;
                map.box_bytes()
            }
        };
        match self.way {
            Way::In { barrier } => tell(cube, barrier, bytes, clock)?,
            Way::Out(_) => cube.events += 1,
        }
        Ok(())
    }

    /// Returns the bytes in shared memory that the copy reads or writes.
    fn reached(
        &self,
        cube: &mut Cube,
        place: u64,
        bytes: usize,
        clock: Option<&Clock>,
    ) -> Result<*mut u8, Fault> {
        if let (Some(races), Some(clock)) = (&mut cube.races, clock) {
            let (engine, access) = match self.way {
                Way::In { .. } => (races.loads(), Access::Write),
                Way::Out(_) => (races.stores(), Access::AsyncRead),
            };
            races.check(engine, clock, place, bytes, access)?;
        }
        part(&mut cube.shared, Space::Shared, place, bytes)
    }

    /// Moves bytes between shared memory and an address. Without an address it writes the byte `outside`.
    ///
    /// # Safety
    ///
    /// `size` bytes can be read and written at both.
    unsafe fn moves(&self, place: *mut u8, address: Option<u64>, size: usize, outside: u8) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match (self.way, address.map(|address| address as *mut u8)) {
                (Way::In { .. }, Some(from)) => std::ptr::copy_nonoverlapping(from, place, size),
                (Way::In { .. }, None) => place.write_bytes(outside, size),
                (Way::Out(_), None) => {}
                (Way::Out(Effect::Replace), Some(to)) => {
                    std::ptr::copy_nonoverlapping(place, to, size);
                }
                (Way::Out(Effect::AddF32), Some(to)) => {
                    for at in 0..size / 4 {
                        let [to, from] = [to, place].map(|start| start.cast::<f32>().add(at));
                        to.write_unaligned(to.read_unaligned() + from.read_unaligned());
                    }
                }
            }
        }
    }

    /// Moves a box element by element, up to the first fault.
    fn moves_box(
        &self,
        cube: &mut Cube,
        map: &TensorMap,
        coordinates: &[i32],
        clock: Option<&Clock>,
    ) -> Result<(), Fault> {
        if coordinates.len() != map.sizes.len() {
            return Err(Fault::TensorMap(format!(
                "{} coordinates of {} dimensions",
                coordinates.len(),
                map.sizes.len()
            )));
        }
        let size = map.element_bytes;
        let outside = if map.nan_outside { 0xff } else { 0 };
        map.each(coordinates, |at, address| {
            if let Some(beyond) = address.filter(|&at| !cube.launch.regions.holds(at, size)) {
                return Err(out_of_bounds(Space::Global, beyond, size));
            }
            let place = map.swizzle.place(self.shared + at as u64);
            let place = self.reached(cube, place, size, clock)?;
            // SAFETY: both addresses were checked.
            unsafe { self.moves(place, address, size, outside) };
            Ok(())
        })
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
    cube: &mut Cube,
    warp: &mut Warp,
    address: u64,
    lane: usize,
) -> Result<TensorMap, Fault> {
    let mut bytes = [0; BYTES];
    for (part, held) in bytes.chunks_mut(MAP_ALIGNMENT).enumerate() {
        let from = address + (part * MAP_ALIGNMENT) as u64;
        let from = (Space::Generic, from, MAP_ALIGNMENT);
        let place = warp.place(cube, from, lane, Access::Read)?;
        // SAFETY: `place` has checked the bounds of the access.
        unsafe { std::ptr::copy_nonoverlapping(place, held.as_mut_ptr(), MAP_ALIGNMENT) };
    }
    TensorMap::from_bytes(&bytes)
}
