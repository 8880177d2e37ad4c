//! Heads of every width that tensor cores support, and sizes beyond limits of indices: strides, batch entries, heads.

use burn_blocksparse::ProductPrecision;

use crate::attention::cases::{Case, per_batch};
use crate::prelude::*;

/// 16 bytes in half precision.
const STEP: usize = 8;
const WIDEST: usize = 256;

/// Makes a case of these widths, for one of four kinds of mainloops.
fn case(head_dim: usize, value_dim: usize) -> Case {
    let (name, pattern, block_size) = match head_dim / STEP % 4 {
        0 => ("causal", Pattern::causal(), 32),
        1 => ("merged strided", Pattern::merged_strided(12), 16),
        2 => ("fixed", Pattern::fixed(32, 8), 8),
        _ => ("local, a ragged end", Pattern::local(40), 16),
    };
    let seq = if name.contains("ragged") { 75 } else { 96 };
    Case {
        batch: 1,
        kv_heads: 2 - usize::from(head_dim.is_multiple_of(3 * STEP)),
        head_dim,
        value_dim,
        ..Case::new(name, pattern, [seq; 2], block_size)
    }
}

/// Out and gradients of heads of width 8, 16, 24, … 256, with equal and different widths of keys and values, in half precision or else in f32.
/// Kernels without tensor cores depend only on whether the width is a multiple of 4, so some widths suffice for them.
pub fn every_width_equals_f64(devices: &[Device]) {
    let mut ran = 0;
    for device in devices {
        let all = is_cuda(device);
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
                let what = format!("{}, widths {width} and {other}", case.name);
                let mut problem = case.problem(9000 + width as u64);
                check_rows(&what, &mut problem, &case.layout(), device, dtype);
                ran += 1;
            }
        }
    }
    assert_ran("every width", ran);
}

/// Returns out and gradients of a call.
fn results(inputs: [Tensor<4>; 4], pattern: &Pattern, block_size: usize) -> Results {
    let [q, k, v, grad_out] = inputs;
    let [_, heads, seq, _] = q.dims();
    let layout = pattern.layout(heads, seq, block_size).unwrap();
    let device = q.device().autodiff();
    let [q, k, v] = [q, k, v].map(|x| Tensor::from_inner(x).to_device(&device).require_grad());
    let grad_out = Tensor::from_inner(grad_out);
    let options = AttentionOptions::default().precision(ProductPrecision::Tf32);
    let out = attend([&q, &k, &v], &layout, &options);
    with_gradients(out, grad_out, [q, k, v])
}

/// More batch entries, and more heads, than a grid dimension allows (65,535): the last ones give the same results as alone.
pub fn more_batch_entries_and_heads_than_a_grid(devices: &[Device]) {
    /// Batch entries; and the most heads that a layout supports.
    const MANY: [usize; 2] = [65_535 + 70, 65_536];
    for device in devices {
        // Widths of three tiers, if the device has them.
        let mut kinds = vec![(DType::F32, 8)];
        for dtype in half_dtypes(device) {
            kinds.extend([(dtype, 16), (dtype, 64)]);
        }
        for (dtype, width) in kinds {
            for (shape, dim) in [([MANY[0], 1, 8, width], 0), ([1, MANY[1], 8, width], 1)] {
                let inputs = [(); 4]
                    .map(|()| Tensor::<4>::random(shape, Distribution::Default, (device, dtype)));
                let last = inputs.clone().map(|x| x.narrow(dim, MANY[dim] - 100, 100));
                let all = results(inputs, &Pattern::causal(), 8);
                let alone = results(last, &Pattern::causal(), 8);
                for ((name, all), (_, alone)) in all.into_iter().zip(alone) {
                    let what = format!("{name} of {shape:?}, {device:?}, {dtype:?}");
                    let (all, alone) = (to_f64(all), to_f64(alone));
                    let from = all.len() - alone.len();
                    assert!(all[from..] == alone[..], "{what} differs");
                    let finite = all.iter().filter(|x| x.is_finite()).count();
                    assert_eq!(finite, all.len(), "{what} is not finite everywhere");
                }
            }
        }
    }
}

/// Batch entries more than 2³⁰ elements apart in memory, and rows 4 GB or more apart, are read in place. Needs 20 GB on the device.
pub fn far_strides(devices: &[Device]) {
    for device in devices {
        let random = |shape: [usize; 4], dtype| {
            Tensor::<4>::random(shape, Distribution::Default, (device, dtype))
        };
        let compare = |inputs: [Tensor<4>; 4], dtype| {
            let copy = |x: Tensor<4>| Tensor::<4>::from_data(x.into_data(), (device, dtype));
            let near = results(inputs.clone().map(copy), &Pattern::causal(), 16);
            let far = results(inputs, &Pattern::causal(), 16);
            for ((name, far), (_, near)) in far.into_iter().zip(near) {
                let what = format!("{name} of far rows, {device:?}, {dtype:?}");
                assert!(to_f64(far) == to_f64(near), "{what} differs");
            }
        };
        for (dtype, width) in half_dtypes(device)
            .into_iter()
            .flat_map(|dtype| [(dtype, 64), (dtype, 16)])
        {
            let far = random([2, 1, (1 << 30) / width + 512, width], dtype);
            let rows = [0, 128, 256, 384].map(|first| far.clone().narrow(2, first, 128));
            compare(rows, dtype);
        }
        // [1, 16, 2, 16]: two rows with 4 GB between them.
        let far = random([2, (1 << 30) / 256 + 64, 16, 16], DType::F32);
        let rows = |first| {
            let rows = far.clone().narrow(1, first, 1);
            rows.swap_dims(0, 1).swap_dims(1, 2)
        };
        compare([0, 8, 16, 24].map(rows), DType::F32);
    }
}

/// Strided patterns in padded layouts, with a pattern per batch entry, or parsed from text, are computed by residue class like others.
pub fn strided_layouts_of_other_kinds(devices: &[Device]) {
    let sizes = Sizes::new([3, 2, 1], [96, 96], [16, 16]);
    let lengths = [96, 61, 80];
    let merged = Pattern::merged_strided(12);
    let padded = (merged.layout(2, 96, 8).unwrap())
        .with_key_padding(&lengths)
        .unwrap();
    let text = serde_json::to_string(&padded).unwrap();
    let read: BlockLayout = serde_json::from_str(&text).unwrap();
    let of_padded = || {
        let merged = merged.clone();
        Problem::random(sizes, 21, move |batch, head, i, j| {
            j < lengths[batch] && merged.attends(head, i as i64, j as i64)
        })
    };
    let patterns = [merged.clone(), Pattern::local(9), Pattern::strided(12)];
    let (stacked, of_stacked) = per_batch(&patterns, sizes, 8, 22);
    let cases = [
        ("padded", padded, of_padded()),
        ("read", read, of_padded()),
        ("per batch entry", stacked, of_stacked),
    ];
    for (name, layout, mut problem) in cases {
        assert!(layout.parts().is_some(), "{name}");
        for device in devices {
            check_rows(name, &mut problem, &layout, device, half_or_f32(device));
        }
    }
}
