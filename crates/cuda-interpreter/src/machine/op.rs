//! Executable instructions.

use super::Instruction;
use super::cube::Cube;
use super::warp::{Flow, Warp, each};
use crate::error::Fault;
use crate::ptx::Slot;

/// Threads at an instruction: those that have arrived, and those of them that participate.
#[derive(Clone, Copy)]
pub struct Active {
    pub here: u32,
    pub lanes: u32,
}

type Run = dyn Fn(&mut Warp, &mut Cube, Active) -> Result<Flow, Fault> + Send + Sync;

pub struct Op {
    /// Registers that arithmetic, stores and shuffles read.
    reads: Vec<Slot>,
    run: Box<Run>,
}

impl Op {
    pub fn new(
        run: impl Fn(&mut Warp, &mut Cube, Active) -> Result<Flow, Fault> + Send + Sync + 'static,
    ) -> Self {
        Self {
            reads: Vec::new(),
            run: Box::new(run),
        }
    }

    /// Creates a jump to an instruction, by index.
    pub fn jump(to: u32) -> Self {
        Self::new(move |_, _, active| {
            let lanes = active.lanes;
            Ok(Flow::Jump { to, lanes })
        })
    }

    pub fn nothing() -> Self {
        Self::new(|_, _, _| Ok(Flow::Next))
    }

    /// Creates an operation of the participating threads that continues with the next instruction.
    pub fn then(
        run: impl Fn(&mut Warp, &mut Cube, u32) -> Result<(), Fault> + Send + Sync + 'static,
    ) -> Self {
        Self::new(move |warp, cube, active| run(warp, cube, active.lanes).map(|()| Flow::Next))
    }

    /// Creates an operation that the participating threads execute one after another.
    pub fn by_lane(
        run: impl Fn(&mut Warp, &mut Cube, usize) -> Result<(), Fault> + Send + Sync + 'static,
    ) -> Self {
        Self::then(move |warp, cube, lanes| each(lanes).try_for_each(|lane| run(warp, cube, lane)))
    }

    /// Creates an operation that all threads of a warp execute together.
    pub fn whole(
        run: impl Fn(&mut Warp, &mut Cube, u32) -> Result<(), Fault> + Send + Sync + 'static,
    ) -> Self {
        Self::new(move |warp, cube, active| match active.here {
            u32::MAX => run(warp, cube, active.lanes).map(|()| Flow::Next),
            _ => Ok(Flow::Again),
        })
    }

    /// Creates an operation that the threads named by a register execute together, once all of them that are alive have arrived.
    pub fn together(
        members: Slot,
        run: impl Fn(&mut Warp, u32, u32) + Send + Sync + 'static,
    ) -> Self {
        Self::new(move |warp, _, active| {
            let members = warp.uniform(members, active.lanes) as u32 & warp.lanes_alive();
            if members & !active.here != 0 {
                return Ok(Flow::Again);
            }
            run(warp, members, active.lanes);
            Ok(Flow::Next)
        })
    }

    pub fn reading(self, reads: &[Slot]) -> Self {
        let reads = reads.to_vec();
        Self { reads, ..self }
    }

    /// Runs the operation for the threads that the guard selects.
    ///
    /// # Errors
    ///
    /// [`Fault`] for an invalid operation.
    pub fn run(&self, warp: &mut Warp, cube: &mut Cube, active: Active) -> Result<Flow, Fault> {
        if let Some(races) = &cube.races {
            let mut reads = self.reads.iter();
            reads.try_for_each(|&slot| races.check_register(warp.number, slot))?;
        }
        (self.run)(warp, cube, active)
    }
}

/// Returns the threads of a group that an instruction's guard selects.
pub fn guarded(warp: &Warp, instruction: &Instruction, lanes: u32) -> u32 {
    let Some((slot, negated)) = instruction.guard else {
        return lanes;
    };
    let predicate = warp.at(slot);
    let holds = |lane: &usize| (predicate[*lane] & 1 == 1) != negated;
    let holding = each(lanes).filter(holds);
    holding.fold(0, |active, lane| active | 1 << lane)
}
