//! What other crates keep with a layout.

use std::any::{Any, TypeId};
use std::sync::{Arc, Mutex, PoisonError};

#[derive(Default)]
pub(super) struct Attachments(Mutex<Vec<(TypeId, Arc<dyn Any + Send + Sync>)>>);

impl Attachments {
    /// The value of a type, made on first use.
    pub fn get_or_make<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> Arc<T> {
        let mut attachments = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let id = TypeId::of::<T>();
        if let Some((_, value)) = attachments.iter().find(|(known, _)| *known == id) {
            return value.clone().downcast().expect("stored under its type");
        }
        let value = Arc::new(make());
        attachments.push((id, value.clone()));
        value
    }
}
