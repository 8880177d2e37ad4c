//! Values cached with a layout.

use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use blocksparse::{BlockLayout, PaddingMask, Part, Pattern};

fn layout() -> BlockLayout {
    Pattern::causal().layout(4, 8, 8).unwrap()
}

#[test]
fn what_makes_a_value_may_attach_others() {
    struct Outer(Arc<String>);
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let layout = layout();
        let outer = layout.attachment(|| {
            // Packing caches its result with the layout.
            let packed = layout.pack_heads(2).unwrap();
            Outer(layout.attachment(|| packed.name().to_owned()))
        });
        let again = layout.attachment(|| -> String { panic!("made already") });
        assert!(Arc::ptr_eq(&outer.0, &again));
        sender.send((outer, layout.pack_heads(2).unwrap()))
    });
    // A timeout turns a deadlock into a failure.
    let made = receiver.recv_timeout(Duration::from_secs(20));
    let (outer, packed) = made.expect("neither a deadlock nor a panic");
    assert_eq!(*outer.0, packed.name());
}

#[test]
fn threads_that_ask_at_once_get_one_value() {
    let (layout, barrier) = (layout(), Barrier::new(8));
    let values: Vec<Arc<usize>> = thread::scope(|scope| {
        let ask = |thread: usize| {
            let (layout, barrier) = (&layout, &barrier);
            scope.spawn(move || {
                layout.attachment(|| {
                    // All threads compute it.
                    barrier.wait();
                    thread
                })
            })
        };
        let threads: Vec<_> = (0..8).map(ask).collect();
        let values = threads.into_iter().map(|thread| thread.join().unwrap());
        values.collect()
    });
    assert!(values.iter().all(|value| Arc::ptr_eq(value, &values[0])));
    let again = layout.attachment(|| -> usize { panic!("made already") });
    assert!(Arc::ptr_eq(&values[0], &again));
}

#[test]
fn layouts_cross_threads() {
    fn crosses<T: Send + Sync + 'static>() {}
    crosses::<BlockLayout>();
    crosses::<Pattern>();
    crosses::<Part>();
    crosses::<PaddingMask>();
}
