//! Graph capture: inputs that are overwritten, and replays.

use burn_blocksparse::graph::{CapturedGraph, StaticInput};
use burn_blocksparse::sparse_attention;

use crate::prelude::*;

/// A written value is read by the tensor and by tensors derived from it earlier.
pub fn fixed_tensors_are_overwritten(devices: &[Device]) {
    for device in devices {
        for device in [device.clone(), device.clone().autodiff()] {
            let numbers = |first: i32| -> Vec<i32> { (first..first + 3 * 33).collect() };
            let data = |first| TensorData::new(numbers(first), [3, 33]);
            let ids = StaticInput::<2, Int>::new(data(0), &device).unwrap();
            let clone = ids.clone();
            assert_eq!(ids.dims(), [3, 33]);
            for first in [7, -100, 0] {
                ids.write(data(first)).unwrap();
                let read = clone.tensor().into_data().convert::<i32>();
                let expected = numbers(first);
                assert_eq!(read.try_into_vec::<i32>().unwrap(), expected, "{device:?}");
            }
            let floats = |x: f32| TensorData::new(vec![x, 2.0 * x, -x], [3]);
            let x = StaticInput::<1>::new(floats(0.5), &device).unwrap();
            for value in [1.5, -3.25] {
                x.write(floats(value)).unwrap();
                // Must not compute in place of the input.
                let doubled = x.tensor() * 2.0;
                assert_eq!(doubled.into_data(), floats(2.0 * value), "{device:?}");
                assert_eq!(x.tensor().into_data(), floats(value), "{device:?}");
            }
        }
    }
}

/// Attention over a batch that changes from run to run, with its gradients.
fn step(x: Tensor<4>, scale: Tensor<1>, layout: &BlockLayout) -> Result<[Tensor<4>; 2], OpError> {
    let x = Tensor::from_inner(x).require_grad();
    let scaled = x.clone() * Tensor::from_inner(scale).unsqueeze::<4>();
    let out = sparse_attention(scaled, x.clone(), x.clone(), layout)?;
    let gradients = out.clone().square().sum().backward();
    let gradient = x.grad(&gradients).expect("of an input");
    Ok([out.inner(), gradient])
}

/// Equal bits as without capture, at every run before the capture, at it and after, with other work in between.
pub fn replayed_runs_equal_plain_runs(devices: &[Device]) {
    let layout = Pattern::fixed(8, 2).layout(2, 64, 8).unwrap();
    for device in devices {
        let batch =
            |_| Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, device).into_data();
        let batches: Vec<TensorData> = (0..7).map(batch).collect();
        let scale = |run: usize| TensorData::from([0.5 + run as f32]);
        let x = StaticInput::<4>::new(batches[0].clone(), device).unwrap();
        let factor = StaticInput::<1>::new(scale(0), device).unwrap();
        let mut calls = 0;
        let mut replayed = CapturedGraph::new(device, {
            let (x, factor, layout, calls) = (x.clone(), factor.clone(), &layout, &mut calls);
            move || {
                *calls += 1;
                step(x.tensor(), factor.tensor(), layout)
            }
        })
        .unwrap();
        for (run, data) in batches.iter().enumerate() {
            x.write(data.clone()).unwrap();
            factor.write(scale(run)).unwrap();
            let got = replayed.run().unwrap().clone().map(Tensor::into_data);
            let plain = Tensor::from_data(data.clone(), device);
            let factor = Tensor::from_data(scale(run), device);
            let expected = step(plain, factor, &layout).unwrap().map(Tensor::into_data);
            assert_eq!(got, expected, "run {run} on {device:?}");
            // Other work between replays must not overwrite what they read.
            let _ = Tensor::<1, Bool>::full([1000 + run], true, device).into_data();
        }
        let recorded = replayed.is_recorded();
        assert_eq!(recorded, replayed.fallback_reason().is_none());
        drop(replayed);
        assert_eq!(calls, if recorded { 4 } else { 7 });
    }
}
