//! Detects races in shared memory: accesses that are not ordered.
//!
//! Warps and the two directions of the copy engine are *actors*. Each has a clock of what it knows of the others
//! (vector clocks; Mattern, 1989). Barriers transfer clocks: arrival publishes the actor's clock, and a wait merges the
//! published clocks. An access is a race if the actor does not know of an earlier access that must precede it: a write, or, if
//! the access itself is a write, a read. Data that threads wrote must also be fenced (`fence.proxy.async`) before tensor cores and the
//! copy engine read it. Products read until they are waited for.
//!
//! The threads of a warp are one actor, so races between them are not detected. Global memory is not checked either.

use std::collections::HashMap;

use crate::error::Fault;
use crate::ptx::Slot;

/// Granularity of race detection in bytes.
const CELL: u64 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
    /// Reads and writes that do not conflict with other atomics.
    Atomic,
    /// A read by tensor cores or the copy engine.
    AsyncRead,
}

/// An actor's knowledge: for each actor, the last time that it knows.
pub type Clock = Vec<u32>;

/// The last write to a cell.
#[derive(Clone, Copy, Default)]
struct Written {
    by: usize,
    /// The writer's time, starting at 1.
    at: u32,
    line: u32,
    atomic: bool,
}

/// A barrier, named by number or given by its address in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Meeting {
    Named(u64),
    Counted(u64),
}

/// The clocks that a barrier transfers.
#[derive(Clone, Default)]
struct Handed {
    arriving: Clock,
    released: Clock,
}

/// Products that are waited for together: the cells that they read and the registers to which they add.
#[derive(Clone, Default)]
struct Group {
    cells: Vec<usize>,
    sums: Vec<Slot>,
}

pub struct Races {
    warps: usize,
    clocks: Vec<Clock>,
    /// Clock of each warp at its last fence.
    fenced: Vec<Clock>,
    handed: HashMap<Meeting, Handed>,
    written: Vec<Written>,
    /// Time and line of each actor's last read of each cell.
    read: Vec<[u32; 2]>,
    /// Pending products of each warp, by group.
    products: Vec<Vec<Group>>,
    /// Line in the text of the current access.
    pub line: u32,
}

fn join(clock: &mut Clock, other: &[u32]) {
    if clock.len() < other.len() {
        clock.resize(other.len(), 0);
    }
    for (time, &known) in clock.iter_mut().zip(other) {
        *time = (*time).max(known);
    }
}

impl Races {
    pub fn new(warps: usize, shared_bytes: usize) -> Self {
        let actors = warps + 2;
        let cells = shared_bytes.div_ceil(CELL as usize);
        let begun = |own: usize| (0..actors).map(|actor| u32::from(actor == own)).collect();
        Self {
            warps,
            clocks: (0..actors).map(begun).collect(),
            fenced: vec![vec![0; actors]; warps],
            handed: HashMap::new(),
            written: vec![Written::default(); cells],
            read: vec![[0; 2]; cells * actors],
            products: vec![vec![Group::default()]; warps],
            line: 0,
        }
    }

    /// Returns the actor that copies into shared memory.
    pub fn loads(&self) -> usize {
        self.warps
    }

    /// Returns the actor that copies out of shared memory.
    pub fn stores(&self) -> usize {
        self.warps + 1
    }

    pub fn clock(&self, actor: usize) -> &Clock {
        &self.clocks[actor]
    }

    fn name(&self, actor: usize) -> String {
        match actor {
            actor if actor < self.warps => format!("warp {actor}"),
            actor if actor == self.loads() => "a bulk copy in".to_owned(),
            _ => "a bulk copy out".to_owned(),
        }
    }

    /// Checks and records an access by a warp.
    ///
    /// # Errors
    ///
    /// [`Fault::Race`] if it is a race.
    pub fn access(
        &mut self,
        warp: usize,
        place: u64,
        bytes: usize,
        access: Access,
    ) -> Result<(), Fault> {
        let clock = std::mem::take(&mut self.clocks[warp]);
        let found = self.check(warp, &clock, place, bytes, access);
        self.clocks[warp] = clock;
        found
    }

    /// Checks and records an access by an actor with a given clock.
    ///
    /// # Errors
    ///
    /// [`Fault::Race`] if it is a race.
    pub fn check(
        &mut self,
        actor: usize,
        clock: &Clock,
        place: u64,
        bytes: usize,
        access: Access,
    ) -> Result<(), Fault> {
        let actors = self.clocks.len();
        // An engine processes many copies concurrently: one copy does not know of another.
        let is_own = |by: usize| by == actor && actor < self.warps;
        for cell in (place / CELL) as usize..((place + bytes as u64).div_ceil(CELL)) as usize {
            let Some(&written) = self.written.get(cell) else {
                break;
            };
            let knows =
                |by: usize, at: u32| is_own(by) || clock.get(by).is_some_and(|&known| known >= at);
            let both_atomic = written.atomic && access == Access::Atomic;
            if written.at > 0 && !both_atomic && !knows(written.by, written.at) {
                return self.race(cell, actor, access, written.by, written.line, "wrote");
            }
            let by_thread = written.at > 0 && written.by < self.warps;
            if access == Access::AsyncRead && by_thread && !self.is_fenced(actor, written) {
                return self.race(
                    cell,
                    actor,
                    access,
                    written.by,
                    written.line,
                    "wrote, without a fence,",
                );
            }
            if matches!(access, Access::Write | Access::Atomic) {
                for by in 0..actors {
                    let [at, line] = self.read[cell * actors + by];
                    if at > 0 && !knows(by, at) {
                        return self.race(cell, actor, access, by, line, "read");
                    }
                }
                self.written[cell] = Written {
                    by: actor,
                    at: clock[actor],
                    line: self.line,
                    atomic: access == Access::Atomic,
                };
            } else {
                self.read[cell * actors + actor] = [clock[actor], self.line];
            }
        }
        Ok(())
    }

    /// Returns whether the writer fenced after the write, or the reader since it knew of the write.
    fn is_fenced(&self, reader: usize, written: Written) -> bool {
        let fenced = |warp: usize| {
            self.fenced
                .get(warp)
                .is_some_and(|clock| clock[written.by] >= written.at)
        };
        fenced(written.by) || fenced(reader)
    }

    fn race(
        &self,
        cell: usize,
        actor: usize,
        access: Access,
        other: usize,
        line: u32,
        did: &str,
    ) -> Result<(), Fault> {
        Err(Fault::Race(format!(
            "{:?} at {:#x} by {}, which {} {did} at line {line}",
            access,
            cell as u64 * CELL,
            self.name(actor),
            self.name(other),
        )))
    }

    /// Advances a warp's time: other actors may now know of its past accesses.
    fn tick(&mut self, actor: usize) -> u32 {
        let time = &mut self.clocks[actor][actor];
        *time += 1;
        *time - 1
    }

    /// Records a `fence.proxy.async` of a warp.
    pub fn fence(&mut self, warp: usize) {
        self.fenced[warp].clone_from(&self.clocks[warp]);
        self.tick(warp);
    }

    pub fn arrive(&mut self, warp: usize, at: Meeting) {
        let handed = self.handed.entry(at).or_default();
        join(&mut handed.arriving, &self.clocks[warp]);
        self.tick(warp);
    }

    /// Completes a phase: all expected threads have arrived.
    pub fn pass(&mut self, at: Meeting) {
        let handed = self.handed.entry(at).or_default();
        handed.released = std::mem::take(&mut handed.arriving);
    }

    pub fn wait(&mut self, warp: usize, at: Meeting) {
        if let Some(handed) = self.handed.get(&at) {
            join(&mut self.clocks[warp], &handed.released);
        }
    }

    /// Assigns a new time to a copy whose issuer had this clock.
    pub fn begin_copy(&mut self, engine: usize, mut asked: Clock) -> Clock {
        asked[engine] = self.tick(engine);
        asked
    }

    /// Signals the barrier of a copy into shared memory.
    pub fn end_load(&mut self, address: u64, clock: &Clock) {
        let engine = self.loads();
        let mut told = vec![0; clock.len()];
        told[engine] = clock[engine];
        let handed = self.handed.entry(Meeting::Counted(address)).or_default();
        join(&mut handed.arriving, &told);
    }

    /// Records that a warp has waited for its copies out of shared memory.
    pub fn wait_stores(&mut self, warp: usize) {
        let engine = self.stores();
        let time = self.clocks[engine][engine] - 1;
        let known = &mut self.clocks[warp][engine];
        *known = (*known).max(time);
    }

    /// Records that a product reads these bytes until it is waited for.
    ///
    /// # Errors
    ///
    /// [`Fault::Race`] if it is a race.
    pub fn read_by_product(&mut self, warp: usize, place: u64, bytes: usize) -> Result<(), Fault> {
        self.access(warp, place, bytes, Access::AsyncRead)?;
        let cells = (place / CELL) as usize..((place + bytes as u64).div_ceil(CELL)) as usize;
        self.open_group(warp).cells.extend(cells);
        Ok(())
    }

    fn open_group(&mut self, warp: usize) -> &mut Group {
        self.products[warp].last_mut().expect("a group is open")
    }

    /// Records that a product adds to registers until it is waited for.
    pub fn hold_registers(&mut self, warp: usize, sums: &[Slot]) {
        self.open_group(warp).sums.extend(sums);
    }

    /// # Errors
    ///
    /// [`Fault::Race`] if a pending product adds to the register.
    pub fn check_register(&self, warp: usize, slot: Slot) -> Result<(), Fault> {
        match self.products[warp]
            .iter()
            .any(|group| group.sums.contains(&slot))
        {
            false => Ok(()),
            true => Err(Fault::Race(
                "of a register, which a product adds to that nobody has waited for".to_owned(),
            )),
        }
    }

    pub fn commit_products(&mut self, warp: usize) {
        self.products[warp].push(Group::default());
    }

    /// Completes all but `left` groups of products. What they read counts as read until now.
    ///
    /// # Errors
    ///
    /// [`Fault::Race`] if their operands were overwritten in the meantime.
    pub fn wait_products(&mut self, warp: usize, left: usize) -> Result<(), Fault> {
        // The last group is the open one.
        let ended = (self.products[warp].len() - 1).saturating_sub(left);
        let mut cells: Vec<usize> = self.products[warp]
            .drain(..ended)
            .flat_map(|group| group.cells)
            .collect();
        cells.sort_unstable();
        cells.dedup();
        for cell in cells {
            self.access(warp, cell as u64 * CELL, CELL as usize, Access::AsyncRead)?;
        }
        Ok(())
    }
}
