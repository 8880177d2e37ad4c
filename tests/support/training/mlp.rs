//! Feed-forward networks against the three operations that they fuse, each of which is compared with f64 elsewhere.

use burn::tensor::FloatDType;
use burn_fused_ops::{
    Activation, LinearOptions, MlpOptions, MlpParams, bias_activation, linear, mlp,
};

use crate::prelude::*;
use crate::training::activation::value_and_slope;
use crate::training::case::*;

/// Operations that compute the result.
#[derive(Clone, Copy, Debug)]
enum By {
    /// The three separate operations.
    Parts,
    Op {
        recompute: bool,
    },
}

/// Rows; input, hidden and output widths; an activation, and whether there is a bias.
type Call = (usize, [usize; 3], Activation, bool);

/// Makes a case, with dtypes of x, the parameters and the result; the last is requested if it differs from x's.
fn case(call: Call, by: By) -> Case<'static> {
    let (rows, [width, hidden, out], activation, has_bias) = call;
    let make = move |x: &mut Tensors| {
        let product = (x.dtypes[0] != x.dtypes[2]).then(|| FloatDType::from(x.dtypes[2]));
        let (rows, inner, outer) = (x.take::<2>(), x.take(), x.take());
        let bias = has_bias.then(|| x.take());
        let y = match by {
            By::Op { recompute } => {
                let mut params = MlpParams::new(inner, outer);
                params.bias = bias;
                let mut options = MlpOptions::default().recompute(recompute);
                options.dtype = product;
                mlp(rows, params, activation, &options)
            }
            By::Parts => {
                let mut options = LinearOptions::default();
                options.dtype = product;
                let between = linear(rows, inner, &options).unwrap();
                let between = bias_activation(between, bias, activation).unwrap();
                linear(between, outer, &options)
            }
        };
        vec![y.unwrap().into()]
    };
    // Judges the result alone.
    let judge = move |x: &[Vec<f64>], _: &[Vec<f64>]| {
        let sizes = [rows, width, hidden];
        let mut between = product(
            sizes,
            |r, k| x[0][r * width + k],
            |k, c| x[1][k * hidden + c],
        );
        for (at, x_at) in between.iter_mut().enumerate() {
            let bias = x.get(3).map_or(0.0, |bias| bias[at % hidden]);
            [*x_at, _] = value_and_slope(*x_at + bias, activation);
        }
        let sizes = [rows, hidden, out];
        vec![product(
            sizes,
            |r, k| between[r * hidden + k],
            |k, c| x[2][k * out + c],
        )]
    };
    Case::new(format!("{call:?}, {by:?}"), make, judge)
        .input("x", 0, &[rows, width], 41)
        .input("inner", 1, &[width, hidden], 42)
        .input("outer", 1, &[hidden, out], 43)
        .input_if(has_bias, "bias", 1, &[hidden], 44)
        .result("y", 2, &[rows, out], 45)
}

const CALLS: [Call; 7] = [
    (1, [1, 1, 1], Activation::Relu, true),
    (70, [20, 33, 12], Activation::GeluErf, true),
    (300, [64, 136, 40], Activation::GeluSigmoid, true),
    (40, [16, 24, 8], Activation::Silu, false),
    (40, [16, 24, 8], Activation::None, true),
    (40, [16, 24, 8], Activation::None, false),
    (0, [6, 9, 4], Activation::GeluTanh, true),
];

/// Equal bits as the three operations, or equal within a rounding to half precision, with and without recomputing the first product, and with
/// gradient checkpointing.
pub fn mlp_equals_its_parts(devices: &[Device]) {
    let mut ran = 0;
    for plain in devices {
        let exact = exact_dtypes(plain).into_iter().map(|(dtype, _)| [dtype; 3]);
        // All in half precision, and with only the products rounded.
        let halves = half_dtypes(plain).into_iter();
        let halves = halves.flat_map(|half| {
            let f32 = DType::F32;
            [[half, f32, half], [f32, f32, half]]
        });
        for (call, dtypes) in exact
            .chain(halves)
            .flat_map(|dtypes| CALLS.map(|call| (call, dtypes)))
        {
            let parts = case(call, By::Parts).run_all(plain, &dtypes);
            let both = |device: Device| [(device.clone(), false), (device, true)];
            for (device, recompute) in tracked(plain).into_iter().flat_map(both) {
                let op = case(call, By::Op { recompute });
                let got = op.run_on(&device, &dtypes);
                let what = format!("{device:?}, {call:?}, {dtypes:?}, {recompute}");
                // A kernel that fuses two of the three may sum in another order.
                assert_found(&what, &got, &parts, 2.0 * unit(dtypes[2]));
                ran += 1;
            }
        }
    }
    assert_ran("mlp_equals_its_parts", ran);
}

/// Frozen inputs get no gradient, and change no other.
pub fn mlp_constants(devices: &[Device]) {
    for activation in [Activation::Silu, Activation::None] {
        for recompute in [false, true] {
            let call = (9, [8, 10, 6], activation, true);
            case(call, By::Op { recompute }).has_constants(devices, 0.0);
        }
    }
}

/// Results equal f64, so that not all comparisons are relative.
pub fn mlp_equals_f64(devices: &[Device]) {
    for call in CALLS {
        let case = case(call, By::Op { recompute: false });
        for (device, dtype, tolerance) in exact(devices) {
            let tolerance = product_tolerance(device, dtype, 10.0 * tolerance);
            case.check_results(device, dtype, tolerance);
        }
    }
}
