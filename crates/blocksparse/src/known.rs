//! Values that are made once for a key. The map is locked only while a key is looked up: who asks for a value that is being made waits for it, and nobody else.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A value for each key, as long as the map lives.
pub struct Slots<K, V>(Mutex<HashMap<K, Arc<Mutex<V>>>>);

impl<K, V> Default for Slots<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash, V: Default> Slots<K, V> {
    /// Calls `with` with a key's value. Others with this key wait until it returns.
    pub fn with<T>(&self, key: K, with: impl FnOnce(&mut V) -> T) -> T {
        let slot = lock(&self.0).entry(key).or_default().clone();
        with(&mut lock(&slot))
    }
}

impl<K: Eq + Hash, V: Clone> Slots<K, Option<V>> {
    /// A key's value, made if there is none.
    pub fn get_or_make(&self, key: K, make: impl FnOnce() -> V) -> V {
        self.with(key, |value| value.get_or_insert_with(make).clone())
    }

    /// A key's value, made if there is none. An error is not kept.
    pub fn get_or_try_make<E>(&self, key: K, make: impl FnOnce() -> Result<V, E>) -> Result<V, E> {
        self.with(key, |value| match value {
            Some(known) => Ok(known.clone()),
            None => Ok(value.insert(make()?).clone()),
        })
    }
}

/// Where a key's value is made.
type Slot<V> = Arc<Mutex<Option<V>>>;

/// Values of the keys that were asked for last, so many at most.
pub struct Recent<K, V> {
    most: usize,
    /// The latest last.
    slots: Mutex<Vec<(K, Slot<V>)>>,
}

impl<K: PartialEq, V: Clone> Recent<K, V> {
    /// Of at most so many keys.
    pub const fn new(most: usize) -> Self {
        Self {
            most,
            slots: Mutex::new(Vec::new()),
        }
    }

    /// A key's value, made if there is none. An error is not kept.
    pub fn get_or_try_make<E>(&self, key: K, make: impl FnOnce() -> Result<V, E>) -> Result<V, E> {
        let (slot, gone) = self.slot(key);
        // What a value drops may be much.
        drop(gone);
        let mut value = lock(&slot);
        match &*value {
            Some(known) => Ok(known.clone()),
            None => Ok(value.insert(make()?).clone()),
        }
    }

    /// A key's slot, and the one that went for it.
    fn slot(&self, key: K) -> (Slot<V>, Option<(K, Slot<V>)>) {
        let mut slots = lock(&self.slots);
        let at = slots.iter().position(|(known, _)| *known == key);
        let found = match at {
            Some(at) => slots.remove(at),
            None => (key, Arc::default()),
        };
        let slot = found.1.clone();
        slots.push(found);
        let gone = (slots.len() > self.most).then(|| slots.remove(0));
        (slot, gone)
    }
}

/// Nothing that is locked here is left half changed by a panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// Runs `make` with the key 1, and with the key 2 while that is not done: whether both come back in time, and whether a second call with the key 1 waited.
    fn others_go_on(get: impl Fn(u32, &dyn Fn() -> u32) -> u32 + Clone + Send + 'static) {
        let (began, begins) = channel();
        let (go_on, goes_on) = channel();
        let (told, tells) = channel();
        let slow = get.clone();
        let maker = thread::spawn(move || {
            slow(1, &|| {
                began.send(()).unwrap();
                goes_on.recv().unwrap();
                10
            })
        });
        begins.recv().unwrap();
        let (other, tell) = (get.clone(), told.clone());
        thread::spawn(move || tell.send(other(2, &|| 20)));
        let in_time = tells.recv_timeout(Duration::from_secs(20));
        assert_eq!(in_time, Ok(20), "another key waits");
        thread::spawn(move || told.send(get(1, &|| 11)));
        let waits = tells.recv_timeout(Duration::from_millis(50));
        assert!(waits.is_err(), "the same key is made twice: {waits:?}");
        go_on.send(()).unwrap();
        assert_eq!(tells.recv_timeout(Duration::from_secs(20)), Ok(10));
        assert_eq!(maker.join().unwrap(), 10);
    }

    #[test]
    fn who_asks_for_another_key_does_not_wait() {
        let slots = Arc::new(Slots::<u32, Option<u32>>::default());
        others_go_on(move |key, make| {
            let made = slots.get_or_try_make(key, || Ok::<_, Infallible>(make()));
            made.unwrap()
        });
        let recent = Arc::new(Recent::<u32, u32>::new(4));
        others_go_on(move |key, make| {
            let made = recent.get_or_try_make(key, || Ok::<_, Infallible>(make()));
            made.unwrap()
        });
    }

    #[test]
    fn values_are_made_once_and_errors_are_not_kept() {
        let slots = Slots::<u32, Option<u32>>::default();
        let recent = Recent::<u32, u32>::new(4);
        assert_eq!(slots.get_or_try_make(1, || Err("none")), Err("none"));
        assert_eq!(recent.get_or_try_make(1, || Err("none")), Err("none"));
        for made in [10, 11, 12] {
            assert_eq!(slots.get_or_try_make(1, || Ok::<_, ()>(made)), Ok(10));
            assert_eq!(recent.get_or_try_make(1, || Ok::<_, ()>(made)), Ok(10));
        }
    }

    #[test]
    fn the_latest_are_kept() {
        let recent = Recent::<u32, Arc<u32>>::new(2);
        let get = |key, made| {
            let made = recent.get_or_try_make(key, || Ok::<_, ()>(Arc::new(made)));
            made.unwrap()
        };
        let one = Arc::downgrade(&get(1, 10));
        let two = Arc::downgrade(&get(2, 20));
        assert_eq!(*get(1, 11), 10);
        // Two was asked for longest ago.
        assert_eq!(*get(3, 30), 30);
        assert!(two.upgrade().is_none());
        assert!(one.upgrade().is_some());
        assert_eq!(*get(2, 21), 21);
        assert!(one.upgrade().is_none());
    }
}
