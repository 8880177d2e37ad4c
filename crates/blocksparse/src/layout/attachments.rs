//! Values that other crates keep with a layout, one of each type.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::known::lock;

/// Values by their types.
#[derive(Default)]
pub(crate) struct Attachments(Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>);

impl Attachments {
    /// The value of a type, made on first use. Nothing is locked while it is made, so that `make` may ask for others; of several that are made at once all
    /// get the first that is done.
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
