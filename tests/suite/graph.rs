//! Graph capture.

use std::process::Command;

use burn_blocksparse::graph::{CapturedGraph, StaticInput};
use burn_blocksparse::sparse_attention;

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(graph);

/// Reserved bytes of a device include those of other tests in the process, so this test has its own process.
#[test]
fn decoding_reserves_nothing_more() {
    const ALONE: &str = "BURN_SPARSE_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return burn_blocksparse_tests::graph::decoding::decoding_reserves_nothing_more(&devices());
    }
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "graph::decoding_reserves_nothing_more"])
        .env(ALONE, "")
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{printed}");
    assert!(printed.contains("1 passed"), "{printed}");
}

/// Returns the devices without capture, which run the closure again.
fn rerunning() -> Vec<Device> {
    let of_cpu = |device: &Device| !is_cube(device);
    devices().into_iter().filter(of_cpu).collect()
}

#[test]
fn a_layout_that_is_not_warm_is_refused() {
    let layout = |window| Pattern::local(window).layout(2, 32, 8).unwrap();
    for device in rerunning() {
        let q = Tensor::<4>::random([1, 2, 32, 8], Distribution::Default, &device);
        let warm = layout(9);
        let run = |layout: &BlockLayout| sparse_attention(q.clone(), q.clone(), q.clone(), layout);
        let mut runs = 0;
        let mut replayed = CapturedGraph::new(&device, || {
            runs += 1;
            match runs {
                ..5 => run(&warm),
                _ => run(&layout(9 + runs)),
            }
        })
        .unwrap();
        for _ in 0..4 {
            replayed.run().unwrap();
        }
        refused! { replayed.run() => "the masks of a layout must be on the device before a recording begins…"; }
        // The error is only raised inside a capture.
        run(&layout(11)).unwrap();
    }
}

#[test]
fn inputs_are_not_written_inside() {
    for device in rerunning() {
        let x = StaticInput::<1>::new(TensorData::from([1f32]), &device).unwrap();
        let mut replayed = CapturedGraph::new(&device, || {
            x.write(TensorData::from([2f32]))?;
            Ok::<_, OpError>(())
        })
        .unwrap();
        for _ in 0..3 {
            replayed.run().unwrap();
        }
        refused! { replayed.run() => "an input of a recording must be on the device before a recording begins…"; }
        x.write(TensorData::from([3f32])).unwrap();
    }
}

#[test]
fn other_numbers_are_refused() {
    for device in devices() {
        let first = TensorData::new(vec![0i32; 6], [2, 3]);
        let ids = StaticInput::<2, Int>::new(first, &device).unwrap();
        assert_eq!(ids.tensor().dtype(), DType::I32);
        refused! {
            ids.write(TensorData::new(vec![1i32; 6], [3, 2])) => "data's shape must be [2, 3], the tensor's, got [3, 2]";
            ids.write(TensorData::new(vec![1f32; 6], [2, 3])) => "data's dtype must be an integer dtype, got F32";
            ids.write(TensorData::new(vec![1u8; 6], [2, 3])) => "data's dtype must be I32, the tensor's, got U8";
        }
    }
}
