//! Attention within the clusters that means attract, by kernels that gather rows themselves, against f64 on the host.

use burn::module::Param;
use burn_sparse_select::internal::topk_per_centroid;
use burn_sparse_select::{routed_attention, routed_attention_plan};
use burn_sparse_transformer::content::RoutingHeadsConfig;

use crate::prelude::*;

/// Batch entries and heads, rows of a list, clusters and their rows, widths of queries and of values.
type Sizes = ([usize; 2], usize, [usize; 2], [usize; 2]);

/// One row and a few, a product's rows and more, as many as several warpgroups have one after the other; all widths; rows that no kernel takes.
const CASES: [Sizes; 8] = [
    ([1, 2], 70, [3, 1], [64, 64]),
    ([2, 1], 100, [2, 33], [64, 128]),
    ([1, 2], 200, [3, 64], [128, 64]),
    ([2, 2], 300, [4, 128], [64, 64]),
    ([1, 1], 500, [2, 200], [128, 128]),
    ([1, 1], 700, [2, 450], [64, 64]),
    ([1, 1], 150, [2, 130], [192, 256]),
    ([1, 1], 100, [2, 20], [48, 64]),
];

fn tensor<const D: usize>(
    x: &[f64],
    dims: [usize; D],
    (device, dtype): (&Device, DType),
) -> Tensor<D> {
    let data = TensorData::new(x.to_vec(), dims).convert_dtype(DType::F32);
    Tensor::<D>::from_data(data, (device, DType::F32)).cast(dtype)
}

/// Rows that are drawn, and a row of zeros. The clusters are those that [`topk_per_centroid`] finds, which has checks of its own.
pub fn routed_attention_equals_f64(devices: &[Device]) {
    for (number, (lists, length, [clusters, width], [head_dim, value_dim])) in
        CASES.into_iter().enumerate()
    {
        let mut rng = seeded(8400 + number as u64);
        let [batch, heads] = lists;
        let count = batch * heads;
        let mut x = drawn(&mut rng, count * length * head_dim, -2.0..2.0);
        x[head_dim..2 * head_dim].fill(0.0);
        let value = drawn(&mut rng, count * length * value_dim, -2.0..2.0);
        let means = drawn(&mut rng, heads * clusters * head_dim, -2.0..2.0);
        let scale = 0.7 / (head_dim as f64).sqrt();
        for (device, dtype) in with_each(devices, &[DType::BF16, DType::F16]) {
            let on = (device, dtype);
            let given = tensor(&x, [batch, heads, length, head_dim], on);
            let values = tensor(&value, [batch, heads, length, value_dim], on);
            let means = tensor(&means, [heads, clusters, head_dim], (device, DType::F32));
            let plan = routed_attention_plan(&given, &values, &means, width, scale).unwrap();
            let made = routed_attention(given.clone(), values.clone(), means.clone(), width, scale);
            let made = made.unwrap();
            assert_eq!(made.is_some(), plan.is_ok(), "{plan:?}");
            let Some(made) = made else {
                continue;
            };
            let what = format!("case {number}, {dtype:?}, {}", plan.unwrap());
            let found = topk_per_centroid(given.clone(), means, width)
                .unwrap()
                .unwrap();
            let tokens = read_ints(found.rows);
            let (given, values) = (to_f64(given.into_data()), to_f64(values.into_data()));
            let mut out = vec![0.0f64; count * length * value_dim];
            let mut shares = vec![0.0f64; count * length];
            for (cluster, tokens) in tokens.chunks(width).enumerate() {
                let first = cluster / clusters * length;
                let rows: Vec<usize> = (tokens.iter()).map(|&at| first + at as usize).collect();
                let row = |at: usize| &given[rows[at] * head_dim..][..head_dim];
                for at in 0..width {
                    let score = |key: usize| {
                        let square = dot(row(key), row(key)).max(1e-24);
                        scale * dot(row(at), row(key)) / square.sqrt()
                    };
                    let weights = softmax(&(0..at.max(1)).map(score).collect::<Vec<_>>());
                    shares[rows[at]] += 1.0;
                    for (key, weight) in weights.iter().enumerate() {
                        for n in 0..value_dim {
                            let value = values[rows[key] * value_dim + n];
                            out[rows[at] * value_dim + n] += weight * value;
                        }
                    }
                }
            }
            for (out, share) in out.chunks_mut(value_dim).zip(shares) {
                out.iter_mut().for_each(|out| *out /= share.max(1.0));
            }
            let tolerance = if dtype == DType::F16 { 2e-3 } else { 1e-2 };
            assert_close(&what, made.into_data(), &out, tolerance);
        }
    }
}

/// Heads of clusters without autodiff, which may gather rows themselves, and with it, which do not.
pub fn clusters_without_autodiff_equal_those_with_it(devices: &[Device]) {
    let [batch, heads, seq, dim] = [2, 2, 150, 64];
    let mut rng = seeded(8500);
    let [query, value] = [(); 2].map(|()| drawn(&mut rng, batch * heads * seq * dim, -2.0..2.0));
    let means = drawn(&mut rng, heads * 4 * dim, -2.0..2.0);
    for (device, dtype) in with_each(devices, &[DType::BF16]) {
        let run = |device: &Device| {
            let config = RoutingHeadsConfig::new(40).with_clusters(Some(4));
            let mut routing = config.try_init(heads, dim, 1, device).unwrap();
            let means = tensor(&means, [heads, 4, dim], (device, DType::F32));
            routing.means = Param::from_tensor(means).set_require_grad(false);
            let [query, value] =
                [&query, &value].map(|x| tensor(x, [batch, heads, seq, dim], (device, dtype)));
            routing
                .try_forward(query, value)
                .unwrap()
                .context
                .into_data()
        };
        let expected = to_f64(run(&device.clone().autodiff()));
        assert_close(&format!("{device:?}"), run(device), &expected, 1e-2);
    }
}

/// What does not fit is an error that says so, and what has a gradient is not taken.
pub fn routed_attention_errors(devices: &[Device]) {
    for device in with(devices, DType::F32) {
        let x = |dims: [usize; 4]| Tensor::<4>::zeros(dims, device);
        for (value, means, window, scale, word) in [
            ([1, 2, 9, 4], [2, 3, 4], 4, 1.0, "value"),
            ([1, 2, 8, 4], [1, 3, 4], 4, 1.0, "means"),
            ([1, 2, 8, 4], [2, 0, 4], 4, 1.0, "means"),
            ([1, 2, 8, 4], [2, 3, 4], 0, 1.0, "window"),
            ([1, 2, 8, 4], [2, 3, 4], 9, 1.0, "window"),
            ([1, 2, 8, 4], [2, 3, 4], 4, 0.0, "scale"),
            ([1, 2, 8, 4], [2, 3, 4], 4, f64::NAN, "scale"),
        ] {
            let means = Tensor::zeros(means, device);
            let error = routed_attention(x([1, 2, 8, 4]), x(value), means, window, scale);
            let error = error.unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        let leaf = x([1, 2, 8, 64]).autodiff();
        let means = Tensor::zeros([2, 3, 64], device).autodiff();
        let plan = routed_attention_plan(&leaf, &leaf, &means, 4, 1.0).unwrap();
        assert_eq!(plan.unwrap_err(), "it has no backward pass");
    }
}
