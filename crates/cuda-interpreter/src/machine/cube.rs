//! What the warps of a cube share.

use super::counted::Counted;
use super::launch::Launch;
use super::memory::{check_alignment, part, read, write};
use super::pending::Pending;
use super::races::{Meeting, Races};
use crate::error::Fault;
use crate::ptx::Space;

/// Barriers by number that a cube has.
const BARRIERS: usize = 16;

/// A barrier by number: threads that have come, and how often it was passed.
#[derive(Clone, Copy, Default)]
struct Named {
    arrived: u32,
    /// Threads it waits for, where not for all of the cube.
    threads: Option<u32>,
    rounds: u64,
    /// Whether any of those that have come says so, and of the round before.
    any: [bool; 2],
}

pub struct Cube<'a> {
    pub launch: &'a Launch<'a>,
    pub index: [u32; 3],
    pub shared: Vec<u8>,
    /// Bulk copies that are under way.
    pub pending: Vec<Pending>,
    /// Threads that have not ended.
    pub alive: u32,
    /// Events that may let a waiting thread go on.
    pub events: u64,
    /// Who watches for races, if anybody does.
    pub races: Option<Box<Races>>,
    named: [Named; BARRIERS],
}

impl<'a> Cube<'a> {
    /// Nothing is known of what shared memory holds at first: here it is NaN in every float.
    pub fn new(launch: &'a Launch<'a>, index: [u32; 3], watches_races: bool) -> Self {
        let threads: u32 = launch.threads.iter().product();
        let shared_bytes = launch.kernel.static_shared + launch.dynamic_shared;
        let races = || Box::new(Races::new(threads.div_ceil(32) as usize, shared_bytes));
        Self {
            launch,
            index,
            shared: vec![0xff; shared_bytes],
            pending: Vec::new(),
            alive: threads,
            events: 0,
            races: watches_races.then(races),
            named: [Named::default(); BARRIERS],
        }
    }

    /// Tells who watches for races, if anybody does.
    pub fn watched(&mut self, tell: impl FnOnce(&mut Races)) {
        if let Some(races) = &mut self.races {
            tell(races);
        }
    }

    /// Threads arrive at a barrier by number. Returns the round that they wait for to be over.
    ///
    /// # Errors
    ///
    /// [`Fault::Barrier`] for numbers and counts that a cube does not have.
    pub fn arrive(
        &mut self,
        warp: usize,
        id: u64,
        count: u32,
        threads: Option<u64>,
    ) -> Result<u64, Fault> {
        if let Some(races) = &mut self.races {
            races.arrive(warp, Meeting::Named(id));
        }
        let alive = self.alive;
        let Some(named) = self.named.get_mut(id as usize) else {
            return Err(Fault::Barrier(format!("there is no number {id}")));
        };
        let threads = threads
            .filter(|&threads| threads > 0)
            .map(|threads| threads as u32);
        if threads.is_some_and(|threads| !threads.is_multiple_of(32)) {
            return Err(Fault::Barrier(format!(
                "of {threads:?} threads, which are no whole warps"
            )));
        }
        if named.arrived > 0 && named.threads != threads {
            return Err(Fault::Barrier(format!(
                "number {id} is waited at with {threads:?} threads and {:?}",
                named.threads
            )));
        }
        let round = named.rounds;
        named.threads = threads;
        named.arrived += count;
        let expected = threads.unwrap_or(alive);
        if named.arrived > expected {
            return Err(Fault::Barrier(format!(
                "{} threads are at number {id}, of {expected}",
                named.arrived
            )));
        }
        self.pass();
        Ok(round)
    }

    /// Opens barriers that all threads that are left have come to.
    fn pass(&mut self) {
        for (id, named) in self.named.iter_mut().enumerate() {
            if named.arrived > 0 && named.arrived == named.threads.unwrap_or(self.alive) {
                named.arrived = 0;
                named.rounds += 1;
                named.any = [false, named.any[0]];
                self.events += 1;
                if let Some(races) = &mut self.races {
                    races.pass(Meeting::Named(id as u64));
                }
            }
        }
    }

    pub fn is_past(&self, id: u64, round: u64) -> bool {
        self.named[id as usize].rounds > round
    }

    /// Threads that arrive next at a barrier say so.
    pub fn say(&mut self, id: u64) {
        if let Some(named) = self.named.get_mut(id as usize) {
            named.any[0] = true;
        }
    }

    /// Whether any thread of a barrier's last round said so.
    pub fn said(&self, id: u64) -> bool {
        self.named[id as usize].any[1]
    }

    pub fn end(&mut self, threads: u32) {
        self.alive -= threads;
        self.events += 1;
        self.pass();
    }

    /// The place of a barrier in shared memory.
    fn counted_place(&mut self, address: u64) -> Result<*mut u8, Fault> {
        check_alignment(Space::Shared, address, 8)?;
        part(&mut self.shared, Space::Shared, address, 8)
    }

    /// The barrier at an address in shared memory.
    ///
    /// # Errors
    ///
    /// [`Fault`] where no barrier was initialised.
    pub fn counted(&mut self, address: u64) -> Result<Counted, Fault> {
        // SAFETY: a barrier's place has 8 bytes.
        let barrier = Counted::from_bits(unsafe { read(self.counted_place(address)?, 8) });
        match barrier.is_initialised() {
            true => Ok(barrier),
            false => Err(Fault::Barrier(format!(
                "none was initialised at {address:#x}"
            ))),
        }
    }

    /// # Errors
    ///
    /// [`Fault`] outside of shared memory.
    pub fn set_counted(&mut self, address: u64, barrier: Counted) -> Result<(), Fault> {
        let place = self.counted_place(address)?;
        // SAFETY: a barrier's place has 8 bytes.
        let before = Counted::from_bits(unsafe { read(place, 8) });
        // SAFETY: as above.
        unsafe { write(place, 8, barrier.bits()) };
        if let Some(races) = self
            .races
            .as_mut()
            .filter(|_| before.is_odd() != barrier.is_odd())
        {
            races.pass(Meeting::Counted(address));
        }
        self.events += 1;
        Ok(())
    }
}
