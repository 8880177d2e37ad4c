//! Caches that compute the value of a key once. The map is locked only while a key is looked up. A thread that asks for a value under construction waits for
//! that value; threads with other keys do not wait.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A cache that holds the value of each key as long as the map lives.
pub struct Slots<K, V>(Mutex<HashMap<K, Arc<Mutex<V>>>>);

impl<K, V> Default for Slots<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash, V: Default> Slots<K, V> {
    /// Calls `with` with a key's value. Other threads with this key wait until it returns.
    pub fn with<T>(&self, key: K, with: impl FnOnce(&mut V) -> T) -> T {
        let slot = lock(&self.0).entry(key).or_default().clone();
        with(&mut lock(&slot))
    }
}

impl<K: Eq + Hash, V: Clone> Slots<K, Option<V>> {
    /// Returns a key's value and computes it if it is missing.
    pub fn get_or_make(&self, key: K, make: impl FnOnce() -> V) -> V {
        self.with(key, |value| value.get_or_insert_with(make).clone())
    }

    /// Returns a key's value and computes it if it is missing. Errors are not cached.
    pub fn get_or_try_make<E>(&self, key: K, make: impl FnOnce() -> Result<V, E>) -> Result<V, E> {
        self.with(key, |value| match value {
            Some(known) => Ok(known.clone()),
            None => Ok(value.insert(make()?).clone()),
        })
    }
}

/// The value of a key, locked while it is computed.
type Slot<V> = Arc<Mutex<Option<V>>>;

/// A cache of the most recently requested keys, with a maximum size.
pub struct Recent<K, V> {
    most: usize,
    /// Ordered by last request, the most recent last.
    slots: Mutex<Vec<(K, Slot<V>)>>,
}

impl<K: PartialEq, V: Clone> Recent<K, V> {
    /// Creates a cache of at most `most` keys.
    pub const fn new(most: usize) -> Self {
        Self {
            most,
            slots: Mutex::new(Vec::new()),
        }
    }

    /// Returns a key's value and computes it if it is missing. Errors are not cached.
    pub fn get_or_try_make<E>(&self, key: K, make: impl FnOnce() -> Result<V, E>) -> Result<V, E> {
        let (slot, gone) = self.slot(key);
        // Dropped outside the lock: dropping a value may be expensive.
        drop(gone);
        let mut value = lock(&slot);
        match &*value {
            Some(known) => Ok(known.clone()),
            None => Ok(value.insert(make()?).clone()),
        }
    }

    /// Returns a key's slot, and the evicted slot if there is one.
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

/// Locks a mutex and ignores poisoning: no panic leaves the locked data half changed.
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

    /// Runs `make` with the key 1, and with the key 2 in the meantime. Checks that both return in time, and that a second call with the key 1 waits.
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
        // Key 2 is the least recently requested.
        assert_eq!(*get(3, 30), 30);
        assert!(two.upgrade().is_none());
        assert!(one.upgrade().is_some());
        assert_eq!(*get(2, 21), 21);
        assert!(one.upgrade().is_none());
    }
}
