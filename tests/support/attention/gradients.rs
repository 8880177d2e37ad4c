//! Gradients that can be differentiated again, against the backward pass and against differences of f64 numbers.

use burn_blocksparse::alibi_slopes;
use burn_blocksparse::gradients::{AttentionGradients, attention_gradients, attention_hvp};

use crate::prelude::*;

/// A call of attention, and which further tensors it has.
struct Case {
    name: &'static str,
    layout: BlockLayout,
    kv_heads: usize,
    options: AttentionOptions,
    sinks: bool,
    bias: Option<[usize; 4]>,
    relative: Option<[usize; 2]>,
}

const BATCH: usize = 2;
const HEADS: usize = 4;
const HEAD_DIM: usize = 6;
const VALUE_DIM: usize = 5;

fn cases() -> Vec<Case> {
    let layout = |pattern: Pattern, seq_q, seq_kv| {
        let shape = LayoutShape::new(HEADS, [seq_q, seq_kv], 8);
        BlockLayout::new(&pattern, shape).unwrap()
    };
    let plain = AttentionOptions::default;
    let case = |name, layout, options| Case {
        name,
        layout,
        kv_heads: HEADS,
        options,
        sinks: false,
        bias: None,
        relative: None,
    };
    // Queries 4 to 8 have no keys, and query 0 has one.
    let holes = Pattern::from_fn("holes", |_, i, j| j <= i && !(4..9).contains(&i));
    vec![
        Case {
            kv_heads: 2,
            ..case(
                "grouped queries",
                layout(Pattern::fixed(8, 2), 21, 21),
                plain(),
            )
        },
        Case {
            sinks: true,
            ..case(
                "softcap, sinks and rows without keys",
                layout(holes, 18, 18),
                plain().softcap(1.3).scale(0.9),
            )
        },
        Case {
            kv_heads: 1,
            sinks: true,
            bias: Some([1, HEADS, 13, 20]),
            relative: Some([HEADS, 11]),
            ..case(
                "every option",
                layout(Pattern::window(6), 13, 20),
                plain()
                    .softcap(2.0)
                    .alibi(alibi_slopes(HEADS))
                    .dropout(Dropout::new(0.2, 3)),
            )
        },
        Case {
            bias: Some([BATCH, 1, 1, 17]),
            relative: Some([1, 7]),
            ..case(
                "shared biases",
                layout(Pattern::strided(4), 17, 17),
                plain(),
            )
        },
    ]
}

impl Case {
    /// Shapes of q, k, v and the output's gradient, and of further tensors that there are.
    fn shapes(&self) -> Vec<Vec<usize>> {
        let (seq_q, seq_kv) = (self.layout.seq_q(), self.layout.seq_kv());
        let mut shapes = vec![
            vec![BATCH, HEADS, seq_q, HEAD_DIM],
            vec![BATCH, self.kv_heads, seq_kv, HEAD_DIM],
            vec![BATCH, self.kv_heads, seq_kv, VALUE_DIM],
            vec![BATCH, HEADS, seq_q, VALUE_DIM],
        ];
        shapes.extend(self.sinks.then(|| vec![HEADS]));
        shapes.extend(self.bias.map(Vec::from));
        shapes.extend(self.relative.map(Vec::from));
        shapes
    }

    /// Numbers of all shapes, one after the other.
    fn random(&self, seed: u64) -> Vec<f64> {
        let mut rng = seeded(seed);
        let count: usize = self.shapes().iter().map(|shape| size(shape)).sum();
        (0..count)
            .map(|_| rng.random::<f64>() * 2.0 - 1.0)
            .collect()
    }

    /// The tensors of all shapes, which lie one behind the other in `flat`.
    fn inputs(&self, flat: &Tensor<1>) -> Inputs {
        let mut first = 0;
        let mut next = |length: usize| {
            first += length;
            flat.clone().narrow(0, first - length, length)
        };
        let shapes = self.shapes();
        let four = [0, 1, 2, 3].map(|index| {
            let shape: [usize; 4] = shapes[index].clone().try_into().unwrap();
            next(size(&shape)).reshape(shape)
        });
        let mut tensors = AttentionTensors::default();
        tensors.sinks = self.sinks.then(|| next(HEADS));
        tensors.bias = (self.bias).map(|shape| next(size(&shape)).reshape(shape));
        tensors.relative_bias = (self.relative).map(|shape| next(size(&shape)).reshape(shape));
        Inputs { four, tensors }
    }

    fn gradients(&self, flat: &Tensor<1>) -> AttentionGradients {
        let Inputs { four, tensors } = self.inputs(flat);
        let [q, k, v, grad_out] = four;
        let options = self.options.clone();
        attention_gradients(q, k, v, tensors, grad_out, &self.layout, options).unwrap()
    }
}

/// q, k, v, the output's gradient and the further tensors.
struct Inputs {
    four: [Tensor<4>; 4],
    tensors: AttentionTensors,
}

fn size(shape: &[usize]) -> usize {
    shape.iter().product()
}

fn flat(numbers: &[f64], device: &Device) -> Tensor<1> {
    tensor(numbers, [numbers.len()], device, DType::F64)
}

fn flat_of<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    x.flatten(0, D - 1)
}

/// The gradients by all inputs as inputs lie; 0 by the output's gradient, which only a backward pass gives.
fn joined(gradients: AttentionGradients) -> Tensor<1> {
    let AttentionGradients {
        q,
        k,
        v,
        tensors,
        out,
        ..
    } = gradients;
    let four = [q, k, v, out.zeros_like()].map(flat_of).into_iter();
    let further = (tensors.bias.map(flat_of).into_iter()).chain(tensors.relative_bias.map(flat_of));
    Tensor::cat(four.chain(tensors.sinks).chain(further).collect(), 0)
}

fn numbers_of<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    to_f64(x.into_data())
}

/// Devices whose numbers are fine enough, and which have no kernels.
fn exact(devices: &[Device]) -> Vec<Device> {
    let fits = |device: &&Device| supports(device, DType::F64) && !runs_kernels(device);
    devices.iter().filter(fits).cloned().collect()
}

fn runs_kernels(device: &Device) -> bool {
    let q = Tensor::<4>::zeros([1, 1, 8, 8], device);
    let layout = Pattern::causal().layout(1, 8, 8).unwrap();
    let plan = SparseAttentionCall::new(q.clone(), q.clone(), q.clone(), &layout).explain();
    plan.unwrap().is_kernels()
}

/// The gradients are those of a backward pass through the attention.
pub fn gradients_equal_the_backward_pass(devices: &[Device]) {
    for device in exact(devices) {
        for case in cases() {
            let start = case.random(1);
            let got = case.gradients(&flat(&start, &device));
            let leaf = flat(&start, &device.clone().autodiff()).require_grad();
            let Inputs { four, tensors } = case.inputs(&leaf);
            let [q, k, v, grad_out] = four;
            let (out, _) = SparseAttentionCall::new(q, k, v, &case.layout)
                .tensors(tensors)
                .options(case.options.clone())
                .run_with_lse()
                .unwrap();
            let of_out = numbers_of(out.clone());
            assert_close(case.name, got.out.to_data(), &of_out, 1e-12);
            let grads = (out * grad_out.detach()).sum().backward();
            let expected = numbers_of(leaf.grad(&grads).unwrap());
            let got = joined(got);
            assert_eq!(got.dims(), [expected.len()]);
            let mut first = 0;
            for (index, length) in case.shapes().iter().map(|shape| size(shape)).enumerate() {
                let what = format!("{}: gradient {index}", case.name);
                let got = got.clone().narrow(0, first, length).into_data();
                assert_close(&what, got, &expected[first..][..length], 1e-12);
                first += length;
            }
        }
    }
}

/// Products of the Hessian by (q, k, v) and a vector are derivatives of the gradients in its direction, which differences of f64 numbers give.
pub fn hessian_vector_products_equal_differences(devices: &[Device]) {
    const STEP: f64 = 1e-5;
    for device in exact(devices) {
        for case in cases() {
            let (start, direction) = (case.random(1), case.random(2));
            let moved: usize = case.shapes()[..3].iter().map(|shape| size(shape)).sum();
            let at = |step: f64| {
                let mut inputs = start.clone();
                for (x, d) in inputs.iter_mut().zip(&direction).take(moved) {
                    *x += step * d;
                }
                let gradients = case.gradients(&flat(&inputs, &device));
                [gradients.q, gradients.k, gradients.v].map(numbers_of)
            };
            let (after, before) = (at(STEP), at(-STEP));
            let Inputs { four, tensors } = case.inputs(&flat(&start, &device));
            let [q, k, v, grad_out] = four;
            let [tq, tk, tv, _] = case.inputs(&flat(&direction, &device)).four;
            let (tangents, options) = ([tq, tk, tv], case.options.clone());
            let (inputs, layout) = ([q, k, v], &case.layout);
            let products =
                attention_hvp(inputs, tensors, tangents, grad_out, layout, options).unwrap();
            for (index, product) in products.into_iter().enumerate() {
                assert!(!product.is_autodiff());
                let differences = after[index].iter().zip(&before[index]);
                let expected: Vec<f64> = differences.map(|(a, b)| (a - b) / (2.0 * STEP)).collect();
                assert!(expected.iter().any(|x| x.abs() > 1e-2), "{}", case.name);
                let name = format!("{}: product {index}", case.name);
                assert_close(&name, product.into_data(), &expected, 1e-7);
            }
        }
    }
}

/// A backward pass through all gradients, by all that they depend on, plain and under gradient checkpointing.
pub fn gradients_are_differentiated_by_every_input(devices: &[Device]) {
    const STEP: f64 = 1e-5;
    for device in exact(devices) {
        for case in cases() {
            let (start, direction, weights) = (case.random(1), case.random(2), case.random(3));
            // The gradients of all inputs, weighed and summed up.
            let loss = |flat: &Tensor<1>| {
                let weights = tensor(&weights, flat.dims(), &flat.device(), DType::F64);
                (joined(case.gradients(flat)) * weights).sum()
            };
            let at = |step: f64| {
                let moved = start.iter().zip(&direction).map(|(x, d)| x + step * d);
                let moved: Vec<f64> = moved.collect();
                loss(&flat(&moved, &device)).into_scalar::<f64>()
            };
            let expected = (at(STEP) - at(-STEP)) / (2.0 * STEP);
            assert!(expected.abs() > 1e-2, "{}: {expected}", case.name);
            for device in tracked(&device) {
                let leaf = flat(&start, &device).require_grad();
                let slopes = numbers_of(leaf.grad(&loss(&leaf).backward()).unwrap());
                let got: f64 = slopes.iter().zip(&direction).map(|(x, d)| x * d).sum();
                let error = (got - expected).abs() / expected.abs().max(1.0);
                assert!(error < 1e-6, "{}: {got}, not {expected}", case.name);
            }
        }
    }
}

/// Kernels have no second derivatives, and say so.
pub fn gradients_on_kernels_are_refused(devices: &[Device]) {
    let mut ran = 0;
    for device in devices {
        let x = Tensor::<4>::zeros([1, 1, 8, 8], device);
        let layout = Pattern::causal().layout(1, 8, 8).unwrap();
        let call = |grad_out: Tensor<4>| {
            let [q, k, v] = [(); 3].map(|_| x.clone());
            let (tensors, options) = (AttentionTensors::default(), AttentionOptions::default());
            attention_gradients(q, k, v, tensors, grad_out, &layout, options)
        };
        let result = call(x.clone());
        if runs_kernels(device) {
            let message = result.unwrap_err().to_string();
            let expected = "q's device must be one of the reference implementation (Flex or NdArray), because kernels have no second derivatives";
            assert!(message.starts_with(expected), "{message}");
        } else {
            result.unwrap();
            let Err(error) = call(x.clone().narrow(2, 0, 7)) else {
                panic!("a gradient of seven rows was taken");
            };
            assert_eq!(
                error,
                OpError::Argument {
                    argument: "grad_out's shape",
                    expected: "[1, 1, 8, 8], the output's".to_owned(),
                    got: "[1, 1, 7, 8]".to_owned(),
                }
            );
        }
        ran += 1;
    }
    assert_ran("gradients_on_kernels_are_refused", ran);
}
