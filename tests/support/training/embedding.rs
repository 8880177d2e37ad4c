//! Rows of a table and the gradient by it, against loops in f64.

use burn_fused_ops::{embedding, embedding_backward};

use crate::prelude::*;
use crate::training::results::assert_plan;

/// A table, ids and gradients by the rows.
struct Problem {
    vocab: usize,
    width: usize,
    batch: usize,
    seq: usize,
    table: Vec<f64>,
    ids: Vec<i32>,
    grad: Vec<f64>,
}

impl Problem {
    /// Ids are alike: the first entries come most often, some never.
    fn new(seed: u64, [vocab, width]: [usize; 2], [batch, seq]: [usize; 2]) -> Self {
        let mut rng = seeded(seed);
        let ids = (0..batch * seq)
            .map(|_| {
                let share: f64 = rng.random_range(0.0..1.0);
                ((share * share * vocab as f64) as usize).min(vocab - 1) as i32
            })
            .collect();
        Self {
            vocab,
            width,
            batch,
            seq,
            table: numbers(seed + 1, vocab * width),
            ids,
            grad: numbers(seed + 2, batch * seq * width),
        }
    }

    fn round(&mut self, dtype: DType) {
        round_to(&mut self.table, dtype);
        round_to(&mut self.grad, dtype);
    }

    fn rows(&self) -> Vec<f64> {
        let rows = self.ids.iter().map(|id| *id as usize * self.width);
        rows.flat_map(|start| self.table[start..start + self.width].to_vec())
            .collect()
    }

    fn by_table(&self) -> Vec<f64> {
        let mut sums = vec![0.0; self.vocab * self.width];
        for (position, id) in self.ids.iter().enumerate() {
            // What is outside of the vocabulary counts for nothing.
            if *id < 0 || *id as usize >= self.vocab {
                continue;
            }
            for channel in 0..self.width {
                sums[*id as usize * self.width + channel] +=
                    self.grad[position * self.width + channel];
            }
        }
        sums
    }

    fn ids(&self, device: &Device) -> Tensor<2, Int> {
        ints_of(&self.ids, [self.batch, self.seq], device)
    }

    /// The rows, and the gradient by the table.
    fn run(&self, device: &Device, dtype: DType) -> [TensorData; 2] {
        let device = device.clone().autodiff();
        let table = tensor(&self.table, [self.vocab, self.width], &device, dtype).require_grad();
        let grad = tensor(
            &self.grad,
            [self.batch, self.seq, self.width],
            &device,
            dtype,
        );
        let rows = embedding(table.clone(), self.ids(&device)).unwrap();
        let gradients = (rows.clone() * grad).sum().backward();
        [
            rows.into_data(),
            table.grad(&gradients).unwrap().into_data(),
        ]
    }

    fn check(&self, device: &Device, dtype: DType, tolerance: f64) {
        let what = format!(
            "[{}, {}] at {} × {} positions, {device:?}, {dtype:?}",
            self.vocab, self.width, self.batch, self.seq
        );
        let [rows, by_table] = self.run(device, dtype);
        assert_close(&format!("{what}: rows"), rows, &self.rows(), 1e-12);
        let expected = self.by_table();
        assert_close(&format!("{what}: by table"), by_table, &expected, tolerance);
    }
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
        for (device, dtype, tolerance) in exact(devices) {
            // The rows' table has what was rounded to f32.
            let mut problem = Problem::new(900 + index as u64, table, positions);
            problem.round(dtype);
            problem.check(device, dtype, tolerance);
        }
    }
}

pub fn embedding_in_half_precision(devices: &[Device]) {
    for (device, dtype) in halves(devices) {
        let mut problem = Problem::new(920, [65, 70], [3, 111]);
        problem.round(dtype);
        problem.check(device, dtype, unit(dtype));
    }
}

pub fn embedding_gives_the_same_bits(devices: &[Device]) {
    for device in devices {
        let problem = Problem::new(930, [256, 64], [2, 3000]);
        let [_, first] = problem.run(device, DType::F32);
        for _ in 0..2 {
            let [_, again] = problem.run(device, DType::F32);
            assert_eq!(first.as_bytes(), again.as_bytes(), "{device:?}");
        }
    }
}

/// The gradient alone, of views, of no positions; with kernels also of ids outside of the vocabulary.
pub fn embedding_backward_equals_f64(devices: &[Device]) {
    for device in devices {
        let mut problem = Problem::new(940, [70, 20], [1, 500]);
        let plan = burn_fused_ops::explain::embedding(
            &Tensor::zeros([70, 20], (device, DType::F32)),
            &problem.ids(device),
        );
        let kernels = plan.unwrap().is_kernels();
        if kernels {
            for id in problem.ids.iter_mut().step_by(3) {
                *id += 1000;
            }
            problem.ids[1] = -5;
        }
        let ids = || problem.ids(device).reshape([500]);
        let transposed: Vec<f64> = (0..20 * 500)
            .map(|at| problem.grad[at % 500 * 20 + at / 500])
            .collect();
        let whole = tensor(&problem.grad, [500, 20], device, DType::F32);
        let view = tensor(&transposed, [20, 500], device, DType::F32).swap_dims(0, 1);
        for grad in [whole, view] {
            let table = embedding_backward(ids(), grad, 70).unwrap().into_data();
            assert_close("the gradient alone", table, &problem.by_table(), 1e-5);
        }
        let none = Tensor::<1, Int>::from_data(TensorData::new(Vec::<i32>::new(), [0]), device);
        let grad = Tensor::<2>::zeros([0, 20], (device, DType::F32));
        let table = embedding_backward(none, grad, 70).unwrap().into_data();
        assert_close("of no positions", table, &[0.0; 1400], 0.0);
    }
}

pub fn embedding_of_a_frozen_table(devices: &[Device]) {
    for device in devices {
        let device = device.clone().autodiff();
        let problem = Problem::new(950, [9, 4], [1, 6]);
        let table = tensor(&problem.table, [9, 4], &device, DType::F32);
        let rows = embedding(table.clone(), problem.ids(&device)).unwrap();
        assert!(!rows.is_tracked());
        // Beside something that has a gradient.
        let other = Tensor::<3>::ones([1, 6, 4], (&device, DType::F32)).require_grad();
        let gradients = (rows * other.clone()).sum().backward();
        assert!(table.grad(&gradients).is_none());
        assert!(other.grad(&gradients).is_some());
    }
}

pub fn embedding_plans(devices: &[Device]) {
    for device in devices {
        let table = Tensor::<2>::zeros([256, 512], (device, DType::F32));
        let ids = Tensor::<2, Int>::zeros([4, 100], device);
        let plan = burn_fused_ops::explain::embedding(&table, &ids).unwrap();
        assert_plan(&plan, device);
    }
}
