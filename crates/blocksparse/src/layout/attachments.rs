//! Values that other crates keep with a layout, one of each type.

use std::any::{Any, TypeId, type_name};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};

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

struct Slot<T> {
    value: OnceLock<Arc<T>>,
    /// The thread that is making the value.
    maker: Mutex<Option<ThreadId>>,
}

impl<T> Slot<T> {
    fn new() -> Self {
        Self {
            value: OnceLock::new(),
            maker: Mutex::new(None),
        }
    }

    fn get_or_make(&self, make: impl FnOnce() -> T) -> Arc<T> {
        if let Some(value) = self.value.get() {
            return value.clone();
        }
        // Waiting for oneself would never end.
        assert!(
            *lock(&self.maker) != Some(thread::current().id()),
            "the value of type {} that is attached to a layout asks for itself while it is made",
            type_name::<T>()
        );
        let make = || {
            let _making = Making::begin(&self.maker);
            Arc::new(make())
        };
        self.value.get_or_init(make).clone()
    }
}

/// Says who makes a value until it is dropped, after a panic, too.
struct Making<'a>(&'a Mutex<Option<ThreadId>>);

impl<'a> Making<'a> {
    fn begin(maker: &'a Mutex<Option<ThreadId>>) -> Self {
        *lock(maker) = Some(thread::current().id());
        Self(maker)
    }
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        *lock(self.0) = None;
    }
}

/// Nothing that is locked here is left half changed by a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
