//! Values that other crates keep with a layout, one of each type.

use std::any::{Any, TypeId, type_name};
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, ThreadId};

use crate::known::lock;

/// A slot for each type. The map is locked only while a slot is looked up, so that what makes a value may use the layout and ask for
/// values of other types.
#[derive(Default)]
pub(crate) struct Attachments(Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>);

impl Attachments {
    /// The value of a type, made on first use.
    pub fn get_or_make<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> Arc<T> {
        let slot = lock(&self.0)
            .entry(TypeId::of::<T>())
            .or_insert_with(|| Arc::new(Slot::<T>::new()))
            .clone();
        let slot: Arc<Slot<T>> = slot.downcast().expect("stored under its type");
        slot.get_or_make(make)
    }
}

/// Threads that wait, of all layouts: for a value of which slot, by its address, and for which thread.
static WAITING: Mutex<Vec<Waiting>> = Mutex::new(Vec::new());

struct Waiting {
    thread: ThreadId,
    slot: usize,
    maker: ThreadId,
}

/// Returns whether a thread waits for another, directly or for one that does.
fn waits_for(waiting: &[Waiting], thread: ThreadId, other: ThreadId) -> bool {
    let next = |at: &ThreadId| waiting.iter().find(|waiting| waiting.thread == *at);
    let mut chain = std::iter::successors(Some(thread), |at| next(at).map(|next| next.maker));
    chain.any(|at| at == other)
}

struct Slot<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T> {
    value: Option<Arc<T>>,
    /// The threads that are making the value. Others wait for the first. There are more only where that would never end.
    makers: Vec<ThreadId>,
    /// How many have ended, with a value or without.
    ended: usize,
}

impl<T> Slot<T> {
    fn new() -> Self {
        Self {
            state: Mutex::new(State {
                value: None,
                makers: Vec::new(),
                ended: 0,
            }),
            changed: Condvar::new(),
        }
    }

    fn get_or_make(&self, make: impl FnOnce() -> T) -> Arc<T> {
        match self.get_or_begin() {
            Ok(value) => value,
            Err(making) => making.end(Arc::new(make())),
        }
    }

    /// The value, or that this thread is to make it.
    fn get_or_begin(&self) -> Result<Arc<T>, Making<'_, T>> {
        let thread = thread::current().id();
        if let Some(value) = &lock(&self.state).value {
            return Ok(value.clone());
        }
        loop {
            // Before the slot's, always.
            let mut waiting = lock(&WAITING);
            waiting.retain(|waiting| waiting.thread != thread);
            let mut state = lock(&self.state);
            if let Some(value) = &state.value {
                return Ok(value.clone());
            }
            // What it needs would need it again and again.
            assert!(
                !state.makers.contains(&thread),
                "the value of type {} that is attached to a layout asks for itself while it is made",
                type_name::<T>()
            );
            let maker = match state.makers.first() {
                Some(&maker) if !waits_for(&waiting, maker, thread) => maker,
                // Nobody makes it, or somebody who waits for this thread: both make it then, and the first to be done is right.
                _ => {
                    state.makers.push(thread);
                    return Err(Making { slot: self, thread });
                }
            };
            waiting.push(Waiting {
                thread,
                slot: self.address(),
                maker,
            });
            drop(waiting);
            let ended = state.ended;
            let state = self.changed.wait_while(state, |state| state.ended == ended);
            drop(state.unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

/// Marks that a thread makes a value until it is dropped, also after a panic.
struct Making<'a, T> {
    slot: &'a Slot<T>,
    thread: ThreadId,
}

impl<T> Making<'_, T> {
    /// The value from now on: this one, unless another thread was faster.
    fn end(self, made: Arc<T>) -> Arc<T> {
        lock(&self.slot.state).value.get_or_insert(made).clone()
    }
}

impl<T> Drop for Making<'_, T> {
    fn drop(&mut self) {
        let mut waiting = lock(&WAITING);
        let mut state = lock(&self.slot.state);
        state.makers.retain(|maker| *maker != self.thread);
        state.ended += 1;
        // Who waits looks again.
        let address = self.slot.address();
        waiting.retain(|waiting| waiting.slot != address);
        self.slot.changed.notify_all();
    }
}
