//! Rows of a table and the gradient with respect to it, against f64 loops.

use burn_fused_ops::{embedding, embedding_backward};

use crate::prelude::*;
use crate::training::case::*;

/// Returns ids of uneven frequency: the first entries are most frequent, some never occur.
fn ids_of(seed: u64, vocab: usize, count: usize) -> Vec<i32> {
    let shares = drawn(&mut seeded(seed), count, 0.0..1.0).into_iter();
    let ids = shares.map(|share: f64| ((share * share * vocab as f64) as usize).min(vocab - 1));
    ids.map(|id| id as i32).collect()
}

/// Sums the rows' gradients per table row; ids outside of the vocabulary are skipped.
fn by_table(ids: &[i32], grad: &[f64], [vocab, width]: [usize; 2]) -> Vec<f64> {
    let mut sums = vec![0.0; vocab * width];
    for (id, grad) in ids.iter().zip(grad.chunks(width)) {
        if let Some(row) = usize::try_from(*id).ok().filter(|id| *id < vocab) {
            let row = sums[row * width..].iter_mut();
            row.zip(grad).for_each(|(sum, x)| *sum += x);
        }
    }
    sums
}

fn case(seed: u64, table: [usize; 2], positions: [usize; 2]) -> Case<'static> {
    let ([vocab, width], [batch, seq]) = (table, positions);
    let ids = ids_of(seed, vocab, batch * seq);
    let of_judge = ids.clone();
    let call = move |x: &mut Tensors| {
        let table = x.take();
        let ids = ints_of(&ids, positions, &table.device());
        vec![embedding(table, ids).unwrap().into()]
    };
    let judge = move |x: &[Vec<f64>], grads: &[Vec<f64>]| {
        let rows = of_judge.iter().map(|id| *id as usize * width);
        let rows = rows.flat_map(|start| x[0][start..start + width].to_vec());
        vec![rows.collect(), by_table(&of_judge, &grads[0], table)]
    };
    Case::new(format!("{table:?} at {positions:?}"), call, judge)
        .input("table", 0, &table, seed + 1)
        .result("rows", 0, &[batch, seq, width], seed + 2)
}

fn check(case: &Case<'_>, device: &Device, dtype: DType, tolerance: f64) {
    case.check(device, &[dtype], |index| [1e-12, tolerance][index]);
}

const SHAPES: [([usize; 2], [usize; 2]); 7] = [
    ([1, 1], [1, 1]),
    ([7, 3], [2, 5]),
    ([64, 64], [1, 256]),
    ([65, 70], [3, 111]),
    ([256, 130], [2, 1000]),
    ([5000, 4], [1, 300]),
    ([300, 33], [1, 1]),
];

pub fn embedding_equals_f64(devices: &[Device]) {
    for (index, (table, positions)) in SHAPES.into_iter().enumerate() {
        let case = case(900 + index as u64, table, positions);
        for (device, dtype, tolerance) in exact(devices) {
            check(&case, device, dtype, tolerance);
        }
    }
}

pub fn embedding_in_half_precision(devices: &[Device]) {
    for (device, dtype) in halves(devices) {
        check(&case(920, [65, 70], [3, 111]), device, dtype, unit(dtype));
    }
}

pub fn embedding_gives_the_same_bits(devices: &[Device]) {
    case(930, [256, 64], [2, 3000]).gives_the_same_bits(devices, 0.0);
}

/// The gradient alone, of views, without positions; on kernels also with ids outside of the vocabulary.
pub fn embedding_backward_equals_f64(devices: &[Device]) {
    for device in devices {
        let (mut ids, grad) = (ids_of(940, 70, 500), numbers(942, 500 * 20));
        let plan = burn_fused_ops::explain::embedding(
            &Tensor::zeros([70, 20], (device, DType::F32)),
            &ints_of(&ids, [1, 500], device),
        );
        let kernels = plan.unwrap().is_kernels();
        if kernels {
            ids.iter_mut().step_by(3).for_each(|id| *id += 1000);
            ids[1] = -5;
        }
        let whole = tensor(&grad, [500, 20], device, DType::F32);
        for by_rows in [stored_swapped(&whole, 0, 1), whole] {
            let ids_of_device = ints_of(&ids, [500], device);
            let table = embedding_backward(ids_of_device, by_rows, 70).unwrap();
            let expected = by_table(&ids, &grad, [70, 20]);
            assert_close("the gradient alone", table.into_data(), &expected, 1e-5);
        }
        let none = Tensor::<1, Int>::from_data(TensorData::new(Vec::<i32>::new(), [0]), device);
        let grad = Tensor::<2>::zeros([0, 20], (device, DType::F32));
        let table = embedding_backward(none, grad, 70).unwrap().into_data();
        assert_close("of no positions", table, &[0.0; 1400], 0.0);
    }
}

pub fn embedding_of_a_frozen_table(devices: &[Device]) {
    case(950, [9, 4], [1, 6]).has_constants(devices, 0.0);
}

pub fn embedding_plans(devices: &[Device]) {
    for device in devices {
        let table = Tensor::<2>::zeros([256, 512], (device, DType::F32));
        let ids = Tensor::<2, Int>::zeros([4, 100], device);
        let plan = burn_fused_ops::explain::embedding(&table, &ids).unwrap();
        assert_plan(&plan, device);
    }
}
