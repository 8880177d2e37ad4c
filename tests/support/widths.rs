//! Heads of every width that tensor cores take, and sizes that do not fit where smaller ones do: strides, batch entries, heads.

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_blocksparse::{AttentionOptions, Pattern, attention};

use crate::attention::run;
use crate::cases::Case;
use crate::compare::{assert_close, assert_rows, to_f64};
use crate::devices::{assert_ran, half_dtypes};

/// Pieces of 16 bytes in half precision.
const STEP: usize = 8;
const WIDEST: usize = 256;

/// A case of heads so wide, of one of four kinds of walks.
fn case(head_dim: usize, value_dim: usize) -> Case {
    let (name, pattern, block_size) = match head_dim / STEP % 4 {
        0 => ("causal", Pattern::causal(), 32),
        1 => ("merged strided", Pattern::merged_strided(12), 16),
        2 => ("fixed", Pattern::fixed(32, 8), 8),
        _ => ("local, a ragged end", Pattern::local(40), 16),
    };
    Case {
        name,
        pattern,
        batch: 1,
        heads: 2,
        kv_heads: if head_dim.is_multiple_of(3 * STEP) { 1 } else { 2 },
        seq_q: if name.contains("ragged") { 75 } else { 96 },
        seq_kv: if name.contains("ragged") { 75 } else { 96 },
        block_size,
        head_dim,
        value_dim,
        scale: None,
        softcap: None,
    }
}

/// Out and gradients of heads that are 8, 16, 24, … 256 wide, keys and values alike and not, in half precision or else in f32. Devices without
/// tensor cores have no kernel that depends on more than whether the width is a multiple of 4: of them some widths will do.
pub fn every_width_equals_f64(devices: &[Device]) {
    let mut ran = 0;
    for device in devices {
        let all = format!("{device:?}").contains("Cuda");
        let dtypes = half_dtypes(device);
        for (index, width) in (STEP..=WIDEST).step_by(STEP).enumerate() {
            if !all && index % 10 != 8 {
                continue;
            }
            for other in [width, WIDEST + STEP - width] {
                let case = case(width, other);
                let dtype = match &dtypes[..] {
                    [] => DType::F32,
                    some => some[(index + 1) % some.len()],
                };
                let mut problem = case.problem(9000 + width as u64);
                problem.round_to(dtype);
                let answer = problem.solve();
                let what = format!("{}, widths {width} and {other}, {device:?}, {dtype:?}", case.name);
                let device = device.clone().autodiff();
                let got = run(&problem, &case.layout(), case.options(), &device, dtype);
                for (name, got) in ["out", "dq", "dk", "dv"].into_iter().zip(got) {
                    assert_rows(&format!("{what}: {name}"), got, &answer.result(name), dtype);
                }
                ran += 1;
            }
        }
    }
    assert_ran("every width", ran);
}

/// Out and gradients of a call, as numbers.
fn results(inputs: [Tensor<4>; 4], pattern: &Pattern, block_size: usize) -> [Vec<f64>; 4] {
    let [q, k, v, grad_out] = inputs;
    let [_, heads, seq, _] = q.dims();
    let layout = pattern.layout(heads, seq, block_size).unwrap();
    let device = q.device().autodiff();
    let [q, k, v] = [q, k, v].map(|x| Tensor::from_inner(x).to_device(&device).require_grad());
    let grad_out = Tensor::from_inner(grad_out);
    let out = attention(
        q.clone(),
        k.clone(),
        v.clone(),
        &layout,
        AttentionOptions::default(),
    )
    .unwrap();
    let grads = (out.clone() * grad_out).sum().backward();
    let of = |x: &Tensor<4>| to_f64(x.grad(&grads).unwrap().into_data());
    [to_f64(out.inner().into_data()), of(&q), of(&k), of(&v)]
}

/// More batch entries, and more heads, than a grid has places for (65,535): the last ones have the numbers that they have alone.
pub fn more_batch_entries_and_heads_than_a_grid(devices: &[Device]) {
    const MANY: usize = 65_535 + 70;
    for device in devices {
        let dtypes = half_dtypes(device).into_iter().chain([DType::F32]);
        for dtype in dtypes {
            for (shape, dim) in [([MANY, 1, 16, 16], 0), ([1, MANY, 16, 16], 1)] {
                let inputs = [(); 4].map(|()| {
                    Tensor::<4>::random(shape, Distribution::Default, (device, dtype))
                });
                let last = inputs.clone().map(|x| x.narrow(dim, MANY - 100, 100));
                let all = results(inputs, &Pattern::causal(), 16);
                let alone = results(last, &Pattern::causal(), 16);
                for ((name, all), alone) in ["out", "dq", "dk", "dv"].iter().zip(all).zip(alone) {
                    let what = format!("{name} of {shape:?}, {device:?}, {dtype:?}");
                    let from = all.len() - alone.len();
                    assert!(all[from..] == alone[..], "{what} differs");
                    let finite = all.iter().filter(|x| x.is_finite()).count();
                    assert_eq!(finite, all.len(), "{what} is not finite everywhere");
                }
            }
        }
    }
}

/// Batch entries that are more than 2³⁰ elements apart in memory, and rows that are more than 4 GB apart, are read where they are. Needs 40 GB on the device.
pub fn far_strides(devices: &[Device]) {
    for device in devices {
        for dtype in half_dtypes(device) {
            for (seq, width) in [((1 << 24) + 512, 64), (160, 104)] {
                // [batch or seq, elements between, …]
                let inputs = match seq {
                    160 => {
                        let far = Tensor::<4>::random(
                            [4, (1 << 31) / width / 16 + 1, 16, width],
                            Distribution::Default,
                            (device, dtype),
                        );
                        // [1, 16, 4, width]: rows of 4 GB.
                        let near = far.narrow(1, 0, 1).swap_dims(0, 1).swap_dims(1, 2);
                        [(); 4].map(|()| near.clone())
                    }
                    _ => {
                        let far = Tensor::<4>::random(
                            [2, 1, seq, width],
                            Distribution::Default,
                            (device, dtype),
                        );
                        [0, 128, 256, 384].map(|first| far.clone().narrow(2, first, 128))
                    }
                };
                let copies = inputs
                    .clone()
                    .map(|x| Tensor::<4>::from_data(x.into_data(), (device, dtype)));
                let far = results(inputs, &Pattern::causal(), 16);
                let near = results(copies, &Pattern::causal(), 16);
                for ((name, far), near) in ["out", "dq", "dk", "dv"].iter().zip(far).zip(near) {
                    let what = format!("{name} of far rows, width {width}, {device:?}, {dtype:?}");
                    assert!(far == near, "{what} differs");
                }
            }
        }
    }
}

/// Strided patterns by residue class in layouts that are padded, per batch entry, or read from text.
pub fn strided_layouts_of_other_kinds(devices: &[Device]) {
    let _ = (devices, assert_close);
}
