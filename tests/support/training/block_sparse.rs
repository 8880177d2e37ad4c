//! Products with block-sparse weights and their gradients, against f64.

use burn::tensor::FloatDType;
use burn_fused_ops::sparse_linear::{BlockSparseLinearOptions, WeightLayout, block_sparse_linear};
use burn_fused_ops::{LinearOptions, linear};

use crate::prelude::*;
use crate::training::case::*;

/// Makes a case, with dtypes of x, the weights and the result; the last is requested if it differs from x's.
fn case([batch, rows]: [usize; 2], layout: &WeightLayout, more: bool) -> Case<'_> {
    let (ins, outs, block) = (layout.inputs(), layout.outputs(), layout.block());
    let call = move |x: &mut Tensors| {
        let (rows, weight) = (x.take::<3>(), x.take());
        let mut options = BlockSparseLinearOptions::default();
        [options.bias, options.gates] = [(); 2].map(|()| more.then(|| x.take()));
        options.dtype = (x.dtypes[0] != x.dtypes[2]).then(|| FloatDType::from(x.dtypes[2]));
        let y = block_sparse_linear(rows, weight, layout, options);
        vec![y.unwrap().into()]
    };
    let judge = move |all: &[Vec<f64>], grads: &[Vec<f64>]| {
        let (rows, x, grad) = (batch * rows, &all[0], &grads[0]);
        let mut y = vec![0.0; rows * outs];
        let [mut dx, mut dw] = [0, 1].map(|of| vec![0.0; all[of].len()]);
        let (mut dbias, mut dgates) = (vec![0.0; outs], vec![0.0; layout.len()]);
        for (index, (input, output)) in layout.kept_blocks().enumerate() {
            let gate = all.get(3).map_or(1.0, |gates| gates[index]);
            for (i, o) in (0..block).flat_map(|i| (0..block).map(move |o| (i, o))) {
                let at = (index * block + i) * block + o;
                let weight = all[1][at];
                let (i, o) = (input as usize * block + i, output as usize * block + o);
                let mut sum = 0.0;
                for row in 0..rows {
                    let (x, grad) = (x[row * ins + i], grad[row * outs + o]);
                    y[row * outs + o] += x * weight * gate;
                    dx[row * ins + i] += grad * weight * gate;
                    sum += x * grad;
                }
                dw[at] = sum * gate;
                dgates[index] += sum * weight;
            }
        }
        let mut made = vec![y, dx, dw];
        if let Some(bias) = all.get(2) {
            for (at, y) in made[0].iter_mut().enumerate() {
                *y += bias[at % outs];
                dbias[at % outs] += grad[at];
            }
            made.extend([dbias, dgates]);
        }
        made
    };
    let (x, y, w) = ([batch, rows, ins], [batch, rows, outs], layout.shape());
    Case::new(format!("[{batch}, {rows}] rows, {layout}"), call, judge)
        .input("x", 0, &x, 1)
        .input("W", 1, &w, 2)
        .input_if(more, "bias", 1, &[outs], 4)
        .input_if(more, "gates", 1, &[layout.len()], 5)
        .result("y", 2, &y, 3)
}

/// Rows, layouts, and whether there are a bias and gates.
fn calls() -> Vec<([usize; 2], WeightLayout, bool)> {
    let random = |shape, block, density| WeightLayout::random(shape, block, density, 3).unwrap();
    // Output blocks 0 and 3 and input block 1 are empty.
    let holes = WeightLayout::from_mask([48, 64], 16, &HOLES).unwrap();
    let none = WeightLayout::from_mask([16, 32], 16, &[false; 2]).unwrap();
    let world = WeightLayout::small_world([128, 96], 16, 0.3, 0.2, 1).unwrap();
    let hubs = WeightLayout::barabasi_albert([128, 160], 32, 0.4, 2).unwrap();
    vec![
        ([1, 1], WeightLayout::dense([16, 16], 16).unwrap(), false),
        ([1, 7], holes.clone(), false),
        ([3, 11], holes, true),
        ([2, 5], none, true),
        ([1, 300], world, true),
        ([2, 33], hubs, false),
        (
            [2, 9],
            WeightLayout::banded([192, 384], 64, 1).unwrap(),
            false,
        ),
        ([1, 40], random([384, 256], 128, 0.5), true),
        // The rows of a weight's gradient in groups, and a long sum in one.
        ([4, 1024], random([48, 32], 16, 0.5), false),
        ([1, 5000], random([32, 48], 16, 0.5), false),
        ([2, 0], random([32, 48], 16, 0.5), true),
    ]
}

const HOLES: [bool; 12] = [
    false, true, true, false, // input block 0
    false, false, false, false, // 1
    false, true, false, false, // 2
];

/// Every block size and kind of layout, with and without bias and gates, empty blocks of outputs and of inputs, no blocks, no rows.
pub fn block_sparse_products_equal_f64(devices: &[Device]) {
    for (rows, layout, more) in calls() {
        let case = case(rows, &layout, more);
        for (device, dtype, tolerance) in exact(devices) {
            case.check_in(device, dtype, product_tolerance(device, dtype, tolerance));
        }
        case.gives_the_same_bits(devices, products_within(devices));
    }
}

/// Factors are rounded, sums are not: gradients are f32 if their tensors are.
pub fn block_sparse_products_in_half_precision(devices: &[Device]) {
    let world = WeightLayout::small_world([128, 96], 16, 0.3, 0.2, 1).unwrap();
    let random = WeightLayout::random([192, 128], 64, 0.5, 3).unwrap();
    for (rows, layout) in [([2, 20], world), ([1, 70], random)] {
        check_products_in_halves(devices, || case(rows, &layout, false));
    }
}

/// Equal results whatever the strides, and frozen inputs.
pub fn block_sparse_products_bits_and_constants(devices: &[Device]) {
    let layout = WeightLayout::random([64, 48], 16, 0.5, 1).unwrap();
    let within = products_within(devices);
    case([2, 20], &layout, false).gives_the_same_bits(devices, within);
    case([1, 30], &layout, true).has_constants(devices, within);
}

/// A layout with every block is a dense product.
pub fn dense_layouts_equal_linear(devices: &[Device]) {
    let (ins, outs, block) = (6, 4, 32);
    let layout = WeightLayout::dense([ins * block, outs * block], block).unwrap();
    for device in devices {
        let device = &device.clone().autodiff();
        let tolerance = product_tolerance(device, DType::F32, 1e-6);
        let of = |seed, shape: [usize; 2]| {
            tensor::<2>(
                &numbers(seed, shape[0] * shape[1]),
                shape,
                device,
                DType::F32,
            )
        };
        let dense = of(1, [ins * block, outs * block]);
        // [in blocks, block, out blocks, block] as [out blocks, in blocks, block, block]
        let blocks = dense.clone().reshape([ins, block, outs, block]);
        let blocks = blocks.permute([2, 0, 1, 3]).reshape(layout.shape());
        let x = of(2, [50, ins * block]);
        let options = BlockSparseLinearOptions::default();
        let got = block_sparse_linear(x.clone(), blocks, &layout, options).unwrap();
        let expected = linear(x, dense, &LinearOptions::default()).unwrap();
        let expected = to_f64(expected.into_data());
        assert_close("dense", got.into_data(), &expected, tolerance);
    }
}
