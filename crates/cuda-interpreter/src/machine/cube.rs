//! State that the warps of a cube share.

use super::counted::Counted;
use super::launch::Launch;
use super::memory::{check_alignment, part, read, write};
use super::pending::Pending;
use super::races::{Meeting, Races};
use crate::error::Fault;
use crate::ptx::Space;

/// Number of named barriers of a cube.
const BARRIERS: usize = 16;

/// A named barrier: arrived threads and completed rounds.
#[derive(Clone, Copy, Default)]
struct Named {
    arrived: u32,
    /// Number of threads that it waits for; `None` means all of the cube.
    threads: Option<u32>,
    rounds: u64,
    /// Whether any arrived thread's predicate is true, in the current and in the previous round.
    any: [bool; 2],
}

pub struct Cube<'a> {
    pub launch: &'a Launch<'a>,
    pub index: [u32; 3],
    pub shared: Vec<u8>,
    /// Pending bulk copies.
    pub pending: Vec<Pending>,
    /// Number of threads that have not ended.
    pub alive: u32,
    /// Number of events that may unblock a waiting thread.
    pub events: u64,
    /// Race detector, if enabled.
    pub races: Option<Box<Races>>,
    named: [Named; BARRIERS],
}

impl<'a> Cube<'a> {
    /// Creates a cube. The initial contents of shared memory are undefined: here all floats are NaN.
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

    /// Calls `tell` with the race detector, if enabled.
    pub fn watched(&mut self, tell: impl FnOnce(&mut Races)) {
        if let Some(races) = &mut self.races {
            tell(races);
        }
    }

    /// Lets threads arrive at a named barrier. Returns the round whose end they wait for.
    ///
    /// # Errors
    ///
    /// [`Fault::Barrier`] for invalid numbers and counts.
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

    /// Releases barriers at which all expected threads have arrived.
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

    /// Records that the predicate of a thread about to arrive is true.
    pub fn say(&mut self, id: u64) {
        if let Some(named) = self.named.get_mut(id as usize) {
            named.any[0] = true;
        }
    }

    /// Returns whether any predicate of the barrier's last round was true.
    pub fn said(&self, id: u64) -> bool {
        self.named[id as usize].any[1]
    }

    pub fn end(&mut self, threads: u32) {
        self.alive -= threads;
        self.events += 1;
        self.pass();
    }

    /// Returns the location of an `mbarrier` in shared memory.
    fn counted_place(&mut self, address: u64) -> Result<*mut u8, Fault> {
        check_alignment(Space::Shared, address, 8)?;
        part(&mut self.shared, Space::Shared, address, 8)
    }

    /// Returns the `mbarrier` at an address in shared memory.
    ///
    /// # Errors
    ///
    /// [`Fault`] if no barrier was initialized there.
    pub fn counted(&mut self, address: u64) -> Result<Counted, Fault> {
        // SAFETY: `counted_place` has checked 8 bytes.
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
        // SAFETY: `counted_place` has checked 8 bytes.
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
