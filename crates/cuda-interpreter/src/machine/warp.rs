//! A warp: registers, and threads that diverge and reconverge.
//!
//! Threads at the same instruction run together. Of several groups, the one that is first in the text runs first, so that diverged
//! threads reconverge. A group that jumps back yields to the others from time to time, since it
//! may wait for them.

use super::cube::Cube;
use super::launch::Launch;
use super::memory::{check_alignment, out_of_bounds, part, placed, read, write};
use super::races::{Access, Meeting};
use crate::error::Fault;
use crate::ptx::{Address, Lanes, Place, Slot, Space, Special};

/// Reason why a group of threads waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The end of a round of a named barrier, and the register that receives whether any predicate was true.
    Barrier {
        id: u64,
        round: u64,
        any: Option<Slot>,
    },
    /// Other threads of the warp that have to arrive at the same instruction.
    Others,
}

#[derive(Clone, Copy, Debug)]
pub struct Group {
    pub at: u32,
    pub lanes: u32,
    pub wait: Option<Wait>,
    /// Number of backward jumps while another group of the warp was left behind.
    pub rounds: u32,
}

/// Number of such jumps after which another group runs first once.
const ROUNDS: u32 = 4096;

impl Group {
    pub fn new(at: u32, lanes: u32) -> Self {
        Self {
            at,
            lanes,
            wait: None,
            rounds: 0,
        }
    }

    fn yields(&self) -> bool {
        self.rounds >= ROUNDS
    }
}

/// Continuation after an instruction.
pub enum Flow {
    Next,
    /// Some threads jump to an instruction.
    Jump {
        to: u32,
        lanes: u32,
    },
    End {
        lanes: u32,
    },
    /// The next instruction, after a wait.
    Wait(Wait),
    /// The same instruction, once others have arrived.
    Again,
    /// The next instruction, after others had their turn.
    Yield,
}

/// A pending copy: its destination and its data.
pub struct Copied {
    pub to: u64,
    pub bytes: Vec<u8>,
}

pub struct Warp {
    pub number: usize,
    pub groups: Vec<Group>,
    pub registers: Vec<Lanes>,
    /// Closed groups of `cp.async` of each thread, and the open group.
    pub copies: Vec<(Vec<Vec<Copied>>, Vec<Copied>)>,
    local: Vec<u8>,
    local_bytes: usize,
}

impl Warp {
    pub fn new(cube: &Cube, number: usize) -> Self {
        let launch = cube.launch;
        let kernel = launch.kernel;
        let mut registers = vec![[0; 32]; kernel.slots as usize];
        for (&value, &slot) in &kernel.constants {
            registers[slot as usize] = [value; 32];
        }
        let [x, y, z] = launch.threads;
        let threads = x * y * z;
        let place = |lane: usize| {
            let thread = number as u32 * 32 + lane as u32;
            Place {
                thread: [thread % x, thread / x % y, thread / x / y],
                threads: launch.threads,
                cube: cube.index,
                cubes: launch.cubes,
                lane: lane as u32,
                warp: number as u32,
                dynamic_shared: launch.dynamic_shared as u32,
            }
        };
        for &(slot, special) in &kernel.specials {
            registers[slot as usize] =
                std::array::from_fn(|lane| special.value(&place(lane)).into());
        }
        let count = threads.saturating_sub(number as u32 * 32).min(32);
        let group = Group::new(0, u32::MAX >> (32 - count));
        Self {
            number,
            groups: vec![group],
            registers,
            copies: (0..32).map(|_| Default::default()).collect(),
            local: vec![0xff; 32 * kernel.local_bytes],
            local_bytes: kernel.local_bytes,
        }
    }

    pub fn lanes_alive(&self) -> u32 {
        self.groups.iter().fold(0, |all, group| all | group.lanes)
    }

    /// Sets clock registers to the number of instructions.
    pub fn tick(&mut self, launch: &Launch, instructions: u64) {
        for &(slot, special) in &launch.kernel.specials {
            if matches!(special, Special::Clock) {
                self.registers[slot as usize] = [instructions; 32];
            }
        }
    }

    pub fn at(&self, slot: Slot) -> &Lanes {
        &self.registers[slot as usize]
    }

    /// Returns a register value that is uniform in the warp: that of the first thread of `lanes`.
    pub fn uniform(&self, slot: Slot, lanes: u32) -> u64 {
        self.registers[slot as usize][lanes.trailing_zeros() as usize]
    }

    pub fn set(&mut self, slot: Slot, values: &Lanes, lanes: u32) {
        let register = &mut self.registers[slot as usize];
        if lanes == u32::MAX {
            *register = *values;
            return;
        }
        for lane in each(lanes) {
            register[lane] = values[lane];
        }
    }

    pub fn address(&self, at: Address, lane: usize) -> u64 {
        self.registers[at.base as usize][lane].wrapping_add_signed(at.offset)
    }

    /// Returns a pointer to bytes that a thread reads or writes.
    ///
    /// # Errors
    ///
    /// [`Fault`] for accesses that are out of bounds or misaligned.
    pub fn place(
        &mut self,
        cube: &mut Cube,
        (space, address, bytes): (Space, u64, usize),
        lane: usize,
        access: Access,
    ) -> Result<*mut u8, Fault> {
        let (space, address) = match space {
            // Addresses of shared and local memory have 32 bits.
            Space::Shared | Space::Local if address >> 56 == 0 => {
                (space, address & u64::from(u32::MAX))
            }
            _ => placed(space, address),
        };
        check_alignment(space, address, bytes)?;
        if space == Space::Shared
            && let Some(races) = &mut cube.races
        {
            races.access(self.number, address, bytes, access)?;
        }
        match space {
            Space::Shared => part(&mut cube.shared, space, address, bytes),
            Space::Local => {
                let held = &mut self.local[lane * self.local_bytes..][..self.local_bytes];
                part(held, space, address, bytes)
            }
            Space::Param => match address as usize + bytes <= cube.launch.parameters.len() {
                // SAFETY: the offset lies within the parameters. They are read only: PTX has no store to them.
                true => Ok(unsafe {
                    cube.launch
                        .parameters
                        .as_ptr()
                        .add(address as usize)
                        .cast_mut()
                }),
                false => Err(out_of_bounds(space, address, bytes)),
            },
            Space::Generic | Space::Global => match cube.launch.regions.holds(address, bytes) {
                true => Ok(address as *mut u8),
                false => Err(out_of_bounds(space, address, bytes)),
            },
        }
    }

    /// Reads at most 8 bytes from a space for a thread.
    ///
    /// # Errors
    ///
    /// As [`place`](Self::place).
    pub fn load(
        &mut self,
        cube: &mut Cube,
        from: (Space, u64, usize),
        lane: usize,
    ) -> Result<u64, Fault> {
        let place = self.place(cube, from, lane, Access::Read)?;
        // SAFETY: `place` has checked the bounds of the access.
        Ok(unsafe { read(place, from.2) })
    }

    /// # Errors
    ///
    /// As [`place`](Self::place).
    pub fn store(
        &mut self,
        cube: &mut Cube,
        to: (Space, u64, usize),
        lane: usize,
        value: u64,
    ) -> Result<(), Fault> {
        let place = self.place(cube, to, lane, Access::Write)?;
        // SAFETY: `place` has checked the bounds of the access.
        unsafe { write(place, to.2, value) };
        Ok(())
    }

    /// Returns the group that runs next: the runnable group that is first in the text, joined by others at the same instruction.
    pub fn choose(&mut self, cube: &mut Cube) -> Option<usize> {
        for group in &mut self.groups {
            if let Some(Wait::Barrier { id, round, any }) = group.wait
                && cube.is_past(id, round)
            {
                group.wait = None;
                if let Some(to) = any {
                    let said = cube.said(id).into();
                    each(group.lanes).for_each(|lane| self.registers[to as usize][lane] = said);
                }
                cube.watched(|races| races.wait(self.number, Meeting::Named(id)));
            }
        }
        self.join();
        let can = |yields: bool| {
            let groups = self.groups.iter().enumerate();
            let free =
                groups.filter(move |(_, group)| group.wait.is_none() && group.yields() == yields);
            free.min_by_key(|(_, group)| group.at)
                .map(|(index, _)| index)
        };
        if let Some(index) = can(false) {
            return Some(index);
        }
        let index = can(true);
        for group in &mut self.groups {
            group.rounds = 0;
        }
        index
    }

    /// Merges groups at the same instruction and ends their waits for each other there.
    fn join(&mut self) {
        let mut index = 0;
        while index < self.groups.len() {
            let group = self.groups[index];
            let mut lanes = group.lanes;
            let joins = |other: &Group| {
                let waits = |group: &Group| matches!(group.wait, Some(Wait::Barrier { .. }));
                other.at == group.at && !waits(other) && !waits(&group)
            };
            let mut other = index + 1;
            while other < self.groups.len() {
                if joins(&self.groups[other]) {
                    lanes |= self.groups.swap_remove(other).lanes;
                } else {
                    other += 1;
                }
            }
            if lanes != group.lanes {
                self.groups[index] = Group {
                    lanes,
                    wait: None,
                    ..group
                };
            }
            index += 1;
        }
    }
}

/// Iterates over the lanes of a mask.
pub fn each(lanes: u32) -> impl Iterator<Item = usize> {
    let mut left = lanes;
    std::iter::from_fn(move || {
        if left == 0 {
            return None;
        }
        let lane = left.trailing_zeros();
        left &= left - 1;
        Some(lane as usize)
    })
}
