//! Values that other crates attach to a layout, one of each type.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::known::lock;

/// Attached values by type.
#[derive(Default)]
pub(crate) struct Attachments(Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>);

impl Attachments {
    /// Returns the value of a type and makes it on first use. No lock is held meanwhile, so `make` may request values of other types. If several threads make
    /// it at once, all get the value that is finished first.
    pub fn get_or_make<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> Arc<T> {
        let id = TypeId::of::<T>();
        let known = lock(&self.0).get(&id).cloned();
        let value = known.unwrap_or_else(|| {
            let made = Arc::new(make());
            lock(&self.0).entry(id).or_insert(made).clone()
        });
        value.downcast().expect("stored under its type")
    }
}
