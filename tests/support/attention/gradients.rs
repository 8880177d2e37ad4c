//! Differentiable gradients, against the backward pass and against finite differences in f64.

use burn_blocksparse::alibi_slopes;
use burn_blocksparse::gradients::{AttentionGradients, attention_gradients, attention_hvp};
use burn_blocksparse::internal::runs_kernels;

use crate::prelude::*;

/// A call of attention, with its further tensors.
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

/// A pattern, queries and keys, KV heads, and further settings.
const TABLE: &str = "
    fixed:8,2 | 21 21 | 2 |
    holes     | 18 18 | 4 | softcap 1.3, scale 0.9, sinks
    window:6  | 13 20 | 1 | softcap 2.0, alibi, dropout, sinks, bias 1 4 13 20, relative 4 11
    strided:4 | 17 17 | 4 | bias 2 1 1 17, relative 1 7
";

fn cases() -> Vec<Case> {
    let case = |[name, seq, kv_heads, rest]: [&'static str; 4]| {
        let pattern = match name {
            // Queries 4 to 8 have no keys, and query 0 has one.
            "holes" => Pattern::from_fn(name, |_, i, j| j <= i && !(4..9).contains(&i)),
            text => text.parse().unwrap(),
        };
        let mut case = Case {
            name,
            layout: BlockLayout::new(&pattern, LayoutShape::new(HEADS, all(seq), 8)).unwrap(),
            kv_heads: one(kv_heads),
            options: AttentionOptions::default(),
            sinks: false,
            bias: None,
            relative: None,
        };
        for (word, numbers) in settings(rest) {
            match word {
                "softcap" => case.options.softcap = Some(one(numbers)),
                "scale" => case.options.scale = Some(one(numbers)),
                "alibi" => case.options.alibi = Some(alibi_slopes(HEADS).into()),
                "dropout" => case.options.dropout = Some(Dropout::new(0.2, 3)),
                "sinks" => case.sinks = true,
                "bias" => case.bias = Some(all(numbers)),
                "relative" => case.relative = Some(all(numbers)),
                _ => panic!("{name}: {word} is nothing to set"),
            }
        }
        case
    };
    rows(TABLE).into_iter().map(case).collect()
}

impl Case {
    /// Returns the shapes of q, k, v, the gradient with respect to the output, and the further tensors.
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

    /// Returns random numbers for all shapes, concatenated.
    fn random(&self, seed: u64) -> Vec<f64> {
        numbers(seed, self.shapes().iter().map(|shape| size(shape)).sum())
    }

    /// Splits `flat` into the tensors of all shapes.
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

/// q, k, v, the gradient with respect to the output, and the further tensors.
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

/// Concatenates the gradients in the order of the inputs; 0 for the output's gradient, which is not an input of the function.
fn joined(of: AttentionGradients) -> Tensor<1> {
    let tensors = of.tensors;
    let four = [of.q, of.k, of.v, of.out.zeros_like()].map(flat_of);
    let further = (tensors.bias.map(flat_of).into_iter()).chain(tensors.relative_bias.map(flat_of));
    Tensor::cat(
        (four.into_iter().chain(tensors.sinks))
            .chain(further)
            .collect(),
        0,
    )
}

fn numbers_of<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    to_f64(x.into_data())
}

/// Returns the devices with f64 and without kernels.
fn exact(devices: &[Device]) -> Vec<Device> {
    let fits = |device: &&Device| supports(device, DType::F64) && !runs_kernels(device);
    devices.iter().filter(fits).cloned().collect()
}

/// The gradients equal those of a backward pass through attention.
pub fn gradients_equal_the_backward_pass(devices: &[Device]) {
    for device in exact(devices) {
        for case in cases() {
            let start = case.random(1);
            let got = case.gradients(&flat(&start, &device));
            let leaf = flat(&start, &device.clone().autodiff()).require_grad();
            let Inputs { four, tensors } = case.inputs(&leaf);
            let [q, k, v, grad_out] = four;
            let call = call_of([&q, &k, &v], &case.layout, &case.options);
            let (out, _) = call.tensors(tensors).run_with_lse().unwrap();
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

/// Products of the Hessian with respect to (q, k, v) and a vector equal the derivatives of the gradients in its direction, by finite differences in
/// f64.
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

/// A backward pass through all gradients, with respect to all their inputs, with and without gradient checkpointing.
pub fn gradients_are_differentiated_by_every_input(devices: &[Device]) {
    const STEP: f64 = 1e-5;
    for device in exact(devices) {
        for case in cases() {
            let (start, direction, weights) = (case.random(1), case.random(2), case.random(3));
            // A weighted sum of the gradients with respect to all inputs.
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

/// Kernels have no second derivatives, and return an error.
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
            refused! { result => "q's device must be one of the reference implementation (Flex or NdArray), because kernels have no second derivatives…"; }
        } else {
            result.unwrap();
            let seven = call(x.clone().narrow(2, 0, 7));
            refused! { seven => "grad_out's shape must be [1, 1, 8, 8], the output's, got [1, 1, 7, 8]"; }
        }
        ran += 1;
    }
    assert_ran("gradients_on_kernels_are_refused", ran);
}
