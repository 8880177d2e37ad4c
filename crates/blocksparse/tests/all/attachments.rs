//! Values that are kept with a layout.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use blocksparse::{BlockLayout, PaddingMask, Part, Pattern};

/// Runs `test` on a thread of its own: one that waits for ever is a failure, not a test that never ends.
fn in_time<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = channel();
    thread::spawn(move || sender.send(test()));
    receiver
        .recv_timeout(Duration::from_secs(20))
        .expect("neither a deadlock nor a panic")
}

fn layout() -> BlockLayout {
    Pattern::causal().layout(4, 8, 8).unwrap()
}

#[test]
fn what_makes_a_value_may_attach_others() {
    struct Outer(Arc<String>);
    let (outer, packed) = in_time(|| {
        let layout = layout();
        let outer = layout.attachment(|| {
            // Packing keeps its result with the layout.
            let packed = layout.pack_heads(2).unwrap();
            Outer(layout.attachment(|| packed.name().to_owned()))
        });
        let again = layout.attachment(|| -> String { panic!("made already") });
        assert!(Arc::ptr_eq(&outer.0, &again));
        (outer, layout.pack_heads(2).unwrap())
    });
    assert_eq!(*outer.0, packed.name());
}

#[test]
fn threads_that_ask_at_once_get_one_value() {
    let made = Arc::new(AtomicUsize::new(0));
    let values: Vec<Arc<usize>> = in_time(move || {
        let (layout, barrier) = (layout(), Arc::new(Barrier::new(8)));
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let (layout, barrier, made) = (layout.clone(), barrier.clone(), made.clone());
                thread::spawn(move || {
                    barrier.wait();
                    layout.attachment(|| {
                        thread::sleep(Duration::from_millis(20));
                        made.fetch_add(1, Ordering::SeqCst)
                    })
                })
            })
            .collect();
        let join = |thread: thread::JoinHandle<_>| thread.join().unwrap();
        threads.into_iter().map(join).collect()
    });
    assert!(values.iter().all(|value| Arc::ptr_eq(value, &values[0])));
    assert_eq!(*values[0], 0, "made once");
}

#[test]
fn a_value_that_asks_for_itself_panics() {
    struct Own;
    struct Other;
    let message = in_time(|| {
        let layout = layout();
        let through_another = || {
            layout.attachment(|| {
                layout.attachment(|| {
                    layout.attachment(|| Own);
                    Other
                });
                Own
            })
        };
        let panic = catch_unwind(AssertUnwindSafe(through_another));
        let message = panic.err().unwrap().downcast::<String>().unwrap();
        // A panic leaves nothing behind: the values are made when they are asked for again.
        layout.attachment(|| Other);
        layout.attachment(|| Own);
        message
    });
    assert!(
        message.ends_with("Own that is attached to a layout asks for itself while it is made"),
        "{message}"
    );
}

/// Threads in a ring, each of which makes a value that needs the next one's, begin at once.
#[test]
fn threads_that_need_each_others_values_do_not_wait_for_ever() {
    struct Value<const N: usize>;

    /// Value `N`, made once all threads make theirs, out of value `M`.
    fn begin<const N: usize, const M: usize>(
        layout: &BlockLayout,
        barrier: &Arc<Barrier>,
    ) -> thread::JoinHandle<()> {
        let (layout, barrier) = (layout.clone(), barrier.clone());
        thread::spawn(move || {
            let mut needed = None;
            let own = layout.attachment(|| {
                barrier.wait();
                needed = Some(layout.attachment(|| Value::<M>));
                Value::<N>
            });
            // What this thread has seen is what there is.
            assert!(Arc::ptr_eq(
                &own,
                &layout.attachment(|| -> Value<N> { panic!("made") })
            ));
            let needed = needed.unwrap();
            assert!(Arc::ptr_eq(
                &needed,
                &layout.attachment(|| -> Value<M> { panic!("made") })
            ));
        })
    }

    for _ in 0..50 {
        in_time(|| {
            let (layout, barrier) = (layout(), Arc::new(Barrier::new(2)));
            let ring = [
                begin::<0, 1>(&layout, &barrier),
                begin::<1, 0>(&layout, &barrier),
            ];
            ring.into_iter().for_each(|thread| thread.join().unwrap());
        });
        in_time(|| {
            let (layout, barrier) = (layout(), Arc::new(Barrier::new(3)));
            let ring = [
                begin::<0, 1>(&layout, &barrier),
                begin::<1, 2>(&layout, &barrier),
                begin::<2, 0>(&layout, &barrier),
            ];
            ring.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
}

#[test]
fn two_values_that_cannot_be_made_without_each_other_panic() {
    struct One;
    struct Two;
    fn one(layout: &BlockLayout, wait: &dyn Fn()) {
        layout.attachment(|| {
            wait();
            two(layout, &|| ());
            One
        });
    }
    fn two(layout: &BlockLayout, wait: &dyn Fn()) {
        layout.attachment(|| {
            wait();
            one(layout, &|| ());
            Two
        });
    }
    let panics = in_time(|| {
        let (layout, barrier) = (layout(), Arc::new(Barrier::new(2)));
        let threads = [one, two].map(|make: fn(&BlockLayout, &dyn Fn())| {
            let (layout, barrier) = (layout.clone(), barrier.clone());
            thread::spawn(move || {
                make(&layout, &|| {
                    barrier.wait();
                })
            })
        });
        threads.map(|thread| thread.join().unwrap_err().downcast::<String>().unwrap())
    });
    for panic in panics {
        let end = "that is attached to a layout asks for itself while it is made";
        assert!(panic.ends_with(end), "{panic}");
    }
}

#[test]
fn layouts_cross_threads() {
    fn crosses<T: Send + Sync + 'static>() {}
    crosses::<BlockLayout>();
    crosses::<Pattern>();
    crosses::<Part>();
    crosses::<PaddingMask>();
}
