//! One instruction of a group of threads.

use super::counted::Counted;
use super::cube::Cube;
use super::exchange::{matching, shuffle, transposed, vote};
use super::fragments;
use super::matrix::{multiply, multiply_group};
use super::memory::{placed, read, write};
use super::pending::Pending;
use super::races::{Access, Meeting};
use super::warp::{Copied, Flow, Wait, Warp, each};
use crate::error::Fault;
use crate::ptx::{Address, Lanes, Op, Slot, Space, Together, Vector};

impl Warp {
    /// Runs an instruction for `active` of the threads that are here.
    ///
    /// # Errors
    ///
    /// [`Fault`] for what a device would not do.
    pub fn step(
        &mut self,
        cube: &mut Cube,
        op: &Op,
        here: u32,
        active: u32,
    ) -> Result<Flow, Fault> {
        if let Some(races) = &cube.races {
            op.each_read(|slot| races.check_register(self.number, slot))?;
        }
        match op {
            Op::Nothing => {}
            Op::Pure { function, to, from } => {
                let values = function.over(from.map(|slot| self.at(slot)));
                self.set(*to, &values, active);
            }
            Op::Compare {
                function,
                to,
                opposite,
                from,
                combined,
            } => {
                let found = function(self.at(from[0]), self.at(from[1]));
                let combine = |values: Lanes| match combined {
                    None => values,
                    Some((combine, other)) => {
                        let other = self.at(*other);
                        std::array::from_fn(|lane| combine(values[lane], other[lane]) & 1)
                    }
                };
                let (values, others) = (combine(found), combine(found.map(|value| value ^ 1)));
                self.set(*to, &values, active);
                if let Some(opposite) = opposite {
                    self.set(*opposite, &others, active);
                }
            }
            Op::Pack { to, from, bits } => {
                let mask = u64::MAX >> (64 - bits);
                let values = std::array::from_fn(|lane| {
                    let parts = from.iter().enumerate();
                    parts.fold(0, |value, (part, &slot)| {
                        value | (self.at(slot)[lane] & mask) << (bits * part as u32)
                    })
                });
                self.set(*to, &values, active);
            }
            Op::Unpack { to, from, bits } => {
                let (mask, from) = (u64::MAX >> (64 - bits), *self.at(*from));
                for (part, &slot) in to.iter().enumerate() {
                    self.set(
                        slot,
                        &from.map(|value| value >> (bits * part as u32) & mask),
                        active,
                    );
                }
            }
            Op::Load(from) => self.load_vectors(cube, from, active)?,
            Op::Store(to) => {
                self.store_vectors(cube, to, active)?;
                cube.events += 1;
            }
            Op::Atomic {
                space,
                kind,
                function,
                to,
                at,
                from,
            } => {
                for lane in each(active) {
                    let bytes = (*space, self.address(*at, lane), kind.bytes());
                    let place = self.place(cube, bytes, lane, Access::Atomic)?;
                    let [first, second] = from.map(|slot| kind.truncate(self.at(slot)[lane]));
                    // SAFETY: `place` gives so many bytes.
                    let old = unsafe { read(place, kind.bytes()) };
                    unsafe { write(place, kind.bytes(), function.once([old, first, second])) };
                    if let Some(to) = to {
                        self.registers[*to as usize][lane] = old;
                    }
                }
                cube.events += 1;
            }
            Op::Branch(to) => {
                return Ok(Flow::Jump {
                    to: *to,
                    lanes: active,
                });
            }
            Op::Exit => return Ok(Flow::End { lanes: active }),
            Op::Trap => return Err(Fault::Trap),
            Op::Barrier {
                id,
                threads,
                waits,
                any,
            } => {
                let threads = threads.map(|slot| self.uniform(slot, active) & u64::from(u32::MAX));
                let id = self.uniform(*id, active) & u64::from(u32::MAX);
                if any
                    .is_some_and(|[_, from]| each(active).any(|lane| self.at(from)[lane] & 1 != 0))
                {
                    cube.say(id);
                }
                let round = cube.arrive(self.number, id, active.count_ones(), threads)?;
                if *waits {
                    let any = any.map(|[to, _]| to);
                    return Ok(Flow::Wait(Wait::Barrier { id, round, any }));
                }
            }
            Op::ActiveMask { to } => self.set(*to, &[active.into(); 32], active),
            Op::Together { members, what } => {
                let members = self.uniform(*members, active) as u32 & self.lanes_alive();
                if members & !here != 0 {
                    return Ok(Flow::Again);
                }
                self.together(what, members, active);
            }
            Op::LoadMatrices { .. }
            | Op::StoreMatrices { .. }
            | Op::TransposeMatrix { .. }
            | Op::Product(_)
            | Op::GroupProduct(_)
            | Op::LoadFragment(..)
            | Op::StoreFragment(..)
            | Op::FragmentProduct(_)
                if here != u32::MAX =>
            {
                return Ok(Flow::Again);
            }
            Op::LoadMatrices {
                transposed: turned,
                to,
                at,
            } => {
                for (matrix, &slot) in to.iter().enumerate() {
                    let mut values = [0; 32];
                    for (place, value) in values.iter_mut().enumerate() {
                        *value = self.load(cube, self.matrix_part(*at, matrix, place), place)?;
                    }
                    let values = if *turned { transposed(&values) } else { values };
                    self.set(slot, &values, active);
                }
            }
            Op::StoreMatrices {
                transposed: turned,
                at,
                from,
            } => {
                for (matrix, &slot) in from.iter().enumerate() {
                    let values = if *turned {
                        transposed(self.at(slot))
                    } else {
                        *self.at(slot)
                    };
                    for (place, &value) in values.iter().enumerate() {
                        self.store(cube, self.matrix_part(*at, matrix, place), place, value)?;
                    }
                }
            }
            Op::TransposeMatrix { to, from } => {
                let values = transposed(self.at(*from));
                self.set(*to, &values, active);
            }
            Op::FenceAsync => cube.watched(|races| races.fence(self.number)),
            Op::CommitProducts => cube.watched(|races| races.commit_products(self.number)),
            Op::WaitProducts(left) => {
                if let Some(races) = &mut cube.races {
                    races.wait_products(self.number, self.registers[*left as usize][0] as usize)?;
                }
            }
            Op::LoadFragment(fragment, from) => fragments::load(self, cube, fragment, from)?,
            Op::StoreFragment(fragment, to) => fragments::store(self, cube, fragment, to)?,
            Op::FragmentProduct(product) => fragments::multiply(self, product),
            Op::Product(product) => multiply(self, product, active),
            Op::GroupProduct(product) => {
                multiply_group(self, cube, product)?;
                cube.watched(|races| races.hold_registers(self.number, &product.sums));
            }
            Op::Copy {
                to,
                from,
                bytes,
                read,
            } => {
                self.copy(cube, [*to, *from], *bytes, *read, active)?;
            }
            Op::CommitCopies => {
                for lane in each(active) {
                    let (closed, open) = &mut self.copies[lane];
                    closed.push(std::mem::take(open));
                }
            }
            Op::WaitCopies(left) => {
                let left = self.uniform(*left, active) as usize;
                for lane in each(active) {
                    let closed = &mut self.copies[lane].0;
                    let ended = closed.len().saturating_sub(left);
                    let ended: Vec<_> = closed.drain(..ended).flatten().collect();
                    self.arrive_copies(cube, ended, lane)?;
                }
            }
            Op::WaitAllCopies => {
                for lane in each(active) {
                    let (closed, open) = std::mem::take(&mut self.copies[lane]);
                    let ended = closed.into_iter().flatten().chain(open).collect();
                    self.arrive_copies(cube, ended, lane)?;
                }
            }
            Op::Bulk(bulk) => {
                for lane in each(active) {
                    let pending = Pending::asked(cube, self, bulk, lane)?;
                    cube.pending.push(pending);
                }
            }
            Op::WaitBulk => {
                for lane in each(active) {
                    let thread = (self.number, lane);
                    while let Some(at) = cube
                        .pending
                        .iter()
                        .position(|pending| pending.is_store_of(thread))
                    {
                        cube.pending.remove(at).perform(cube)?;
                    }
                }
                cube.watched(|races| races.wait_stores(self.number));
            }
            Op::CountedInit { at, count } => {
                for lane in each(active) {
                    let (_, place) = placed(Space::Shared, self.address(*at, lane));
                    self.touch_counted(cube, place, Access::Write)?;
                    cube.set_counted(place, Counted::new(self.at(*count)[lane])?)?;
                }
            }
            Op::CountedArrive {
                at,
                count,
                expects,
                arrives,
                to,
            } => {
                for lane in each(active) {
                    let (_, place) = placed(Space::Shared, self.address(*at, lane));
                    self.touch_counted(cube, place, Access::Atomic)?;
                    let barrier = cube.counted(place)?;
                    if *arrives {
                        cube.watched(|races| races.arrive(self.number, Meeting::Counted(place)));
                    }
                    let state = u64::from(barrier.is_odd());
                    let expected = expects.map_or(0, |slot| self.at(slot)[lane] as i32);
                    let count = if *arrives {
                        count.map_or(1, |slot| self.at(slot)[lane])
                    } else {
                        0
                    };
                    // Of an arrival that expects bytes the phase cannot end in between.
                    let barrier = barrier.expecting(expected).arrived(count)?;
                    cube.set_counted(place, barrier)?;
                    if let Some(to) = to {
                        self.registers[*to as usize][lane] = state;
                    }
                }
            }
            Op::CountedWait { to, at, phase } => {
                let mut values = [0; 32];
                for lane in each(active) {
                    let (_, place) = placed(Space::Shared, self.address(*at, lane));
                    self.touch_counted(cube, place, Access::Atomic)?;
                    let over = cube.counted(place)?.is_over(self.at(*phase)[lane] & 1 == 1);
                    if over {
                        cube.watched(|races| races.wait(self.number, Meeting::Counted(place)));
                    }
                    values[lane] = over.into();
                }
                self.set(*to, &values, active);
                if each(active).any(|lane| values[lane] == 0) {
                    return Ok(Flow::Yield);
                }
            }
        }
        Ok(Flow::Next)
    }

    /// A barrier is initialised before others touch it.
    fn touch_counted(&self, cube: &mut Cube, place: u64, access: Access) -> Result<(), Fault> {
        let races = cube.races.as_mut();
        races.map_or(Ok(()), |races| races.access(self.number, place, 8, access))
    }

    /// What all of `members` that are alive have come to.
    fn together(&mut self, what: &Together, members: u32, active: u32) {
        match what {
            Together::Meet => {}
            Together::Shuffle {
                mode,
                to,
                valid,
                from,
                lane,
                clamp,
            } => {
                let [from, lane, clamp] = [from, lane, clamp].map(|slot| self.at(*slot));
                let (values, within) = shuffle(*mode, from, lane, clamp);
                self.set(*to, &values, active);
                if let Some(valid) = valid {
                    self.set(*valid, &within, active);
                }
            }
            Together::Vote { mode, to, from } => {
                let value = vote(*mode, self.at(*from), members);
                self.set(*to, &[value; 32], active);
            }
            Together::Match { to, from } => {
                let values = matching(self.at(*from), members);
                self.set(*to, &values, active);
            }
            Together::Reduce { function, to, from } => {
                let values = self.at(*from);
                let all = each(members).map(|lane| values[lane]);
                let value = all.reduce(|a, b| function.once([a, b, b])).unwrap_or(0);
                self.set(*to, &[value; 32], active);
            }
            Together::Elect { to, elected } => {
                let leader = members.trailing_zeros();
                self.set(*to, &[leader.into(); 32], active);
                let is_leader = std::array::from_fn(|lane| (lane as u32 == leader).into());
                self.set(*elected, &is_leader, active);
            }
        }
    }

    /// Four bytes of a row of a matrix of 8 × 8 numbers, where a lane has them: the lanes' addresses are those of rows.
    fn matrix_part(&self, at: Address, matrix: usize, lane: usize) -> (Space, u64, usize) {
        let row = self.address(at, 8 * matrix + lane / 4);
        (Space::Shared, row + (lane % 4 * 4) as u64, 4)
    }

    /// Where a thread's elements of a load or a store lie.
    fn vector_place(
        &mut self,
        cube: &mut Cube,
        vector: &Vector,
        lane: usize,
        access: Access,
    ) -> Result<*mut u8, Fault> {
        let count = vector.kind.bytes() * vector.slots.len();
        let bytes = (vector.space, self.address(vector.at, lane), count);
        self.place(cube, bytes, lane, access)
    }

    fn load_vectors(&mut self, cube: &mut Cube, from: &Vector, active: u32) -> Result<(), Fault> {
        let size = from.kind.bytes();
        for lane in each(active) {
            let place = self.vector_place(cube, from, lane, Access::Read)?;
            for (part, &slot) in from.slots.iter().enumerate() {
                // SAFETY: `place` gives so many bytes.
                let bits = unsafe { read(place.add(size * part), size) };
                self.registers[slot as usize][lane] = if size < 4 {
                    from.kind.widen(bits) as u64
                } else {
                    bits
                };
            }
        }
        Ok(())
    }

    fn store_vectors(&mut self, cube: &mut Cube, to: &Vector, active: u32) -> Result<(), Fault> {
        let size = to.kind.bytes();
        for lane in each(active) {
            let place = self.vector_place(cube, to, lane, Access::Write)?;
            for (part, &slot) in to.slots.iter().enumerate() {
                // SAFETY: `place` gives so many bytes.
                unsafe { write(place.add(size * part), size, self.at(slot)[lane]) };
            }
        }
        Ok(())
    }

    /// Takes what is to be copied at once, and puts it down when it is waited for.
    fn copy(
        &mut self,
        cube: &mut Cube,
        [to, from]: [Address; 2],
        bytes: Slot,
        read: Option<Slot>,
        active: u32,
    ) -> Result<(), Fault> {
        for lane in each(active) {
            let bytes = self.at(bytes)[lane] as usize;
            let wanted = read.map_or(bytes, |slot| {
                (self.at(slot)[lane] as u32 as usize).min(bytes)
            });
            let mut content = vec![0; bytes];
            if wanted > 0 {
                let address = self.address(from, lane);
                let place =
                    self.place(cube, (Space::Global, address, bytes), lane, Access::Read)?;
                // SAFETY: `place` gives so many bytes.
                unsafe { std::ptr::copy_nonoverlapping(place, content.as_mut_ptr(), wanted) };
            }
            let copied = Copied {
                to: self.address(to, lane),
                bytes: content,
            };
            self.copies[lane].1.push(copied);
        }
        Ok(())
    }

    fn arrive_copies(
        &mut self,
        cube: &mut Cube,
        ended: Vec<Copied>,
        lane: usize,
    ) -> Result<(), Fault> {
        for copied in ended {
            let bytes = (Space::Shared, copied.to, copied.bytes.len());
            let place = self.place(cube, bytes, lane, Access::Write)?;
            // SAFETY: `place` gives so many bytes.
            unsafe {
                std::ptr::copy_nonoverlapping(copied.bytes.as_ptr(), place, copied.bytes.len())
            };
        }
        Ok(())
    }
}
