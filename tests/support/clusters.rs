//! Attention within clusters of rows that a kernel gathers itself, against f64 on the host.

use burn::module::Param;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_blocksparse::{attention_in_clusters, attention_in_clusters_plan};
use burn_sparse_transformer::RoutingHeadsConfig;
use rand::seq::index::sample;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::compare::{assert_close, to_f64};
use crate::devices::supports;

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

fn random(count: usize, rng: &mut ChaCha8Rng) -> Vec<f64> {
    (0..count).map(|_| rng.random_range(-2.0..2.0)).collect()
}

fn tensor<const D: usize>(
    x: &[f64],
    dims: [usize; D],
    (device, dtype): (&Device, DType),
) -> Tensor<D> {
    let data = TensorData::new(x.to_vec(), dims).convert_dtype(DType::F32);
    Tensor::<D>::from_data(data, (device, DType::F32)).cast(dtype)
}

fn numbers(x: &[i32], dims: [usize; 4], device: &Device) -> Tensor<4, Int> {
    Tensor::from_data(TensorData::new(x.to_vec(), dims), (device, DType::I32))
}

/// Rows that are drawn, rows of zeros, and numbers that name none.
pub fn attention_in_clusters_equals_f64(devices: &[Device]) {
    for (number, (lists, length, [clusters, width], [head_dim, value_dim])) in
        CASES.into_iter().enumerate()
    {
        let mut rng = ChaCha8Rng::seed_from_u64(8400 + number as u64);
        let [batch, heads] = lists;
        let count = batch * heads;
        let mut x = random(count * length * head_dim, &mut rng);
        x[head_dim..2 * head_dim].fill(0.0);
        let value = random(count * length * value_dim, &mut rng);
        let mut tokens = Vec::new();
        for _ in 0..count * clusters {
            let mut drawn: Vec<i32> = (sample(&mut rng, length, width).into_iter())
                .map(|token| token as i32)
                .collect();
            drawn.sort_unstable();
            tokens.extend(drawn);
        }
        // The last place of all names nothing.
        *tokens.last_mut().unwrap() = -1;
        let scale = 0.7 / (head_dim as f64).sqrt();
        for (device, dtype) in (devices.iter())
            .flat_map(|device| [DType::BF16, DType::F16].map(|dtype| (device, dtype)))
            .filter(|(device, dtype)| supports(device, *dtype))
        {
            let on = (device, dtype);
            let given = tensor(&x, [batch, heads, length, head_dim], on);
            let values = tensor(&value, [batch, heads, length, value_dim], on);
            let named = numbers(&tokens, [batch, heads, clusters, width], device);
            let plan = attention_in_clusters_plan(&given, &values, &named, scale).unwrap();
            let made = attention_in_clusters(given.clone(), values.clone(), named, scale).unwrap();
            assert_eq!(made.is_some(), plan.is_ok(), "{plan:?}");
            let Some(made) = made else {
                continue;
            };
            let what = format!("case {number}, {dtype:?}, {}", plan.unwrap());
            let (given, values) = (to_f64(given.into_data()), to_f64(values.into_data()));
            let row = |of: &[f64], dim: usize, list: usize, token: i32| -> Vec<f64> {
                match token {
                    ..0 => vec![0.0; dim],
                    token => of[(list * length + token as usize) * dim..][..dim].to_vec(),
                }
            };
            let (mut out, mut lse) = (Vec::new(), Vec::new());
            for (cluster, tokens) in tokens.chunks(width).enumerate() {
                let list = cluster / clusters;
                let rows: Vec<_> = (tokens.iter())
                    .map(|&token| row(&given, head_dim, list, token))
                    .collect();
                let values: Vec<_> = (tokens.iter())
                    .map(|&token| row(&values, value_dim, list, token))
                    .collect();
                let product =
                    |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
                for at in 0..width {
                    let scores: Vec<f64> = (0..at.max(1))
                        .map(|key| {
                            let square = product(&rows[key], &rows[key]).max(1e-24);
                            scale * product(&rows[at], &rows[key]) / square.sqrt()
                        })
                        .collect();
                    let total: f64 = scores.iter().map(|score| score.exp()).sum();
                    lse.push(total.ln());
                    out.extend((0..value_dim).map(|n| {
                        let weighed = scores.iter().zip(&values);
                        weighed.map(|(s, v)| s.exp() / total * v[n]).sum::<f64>()
                    }));
                }
            }
            let tolerance = if dtype == DType::F16 { 2e-3 } else { 1e-2 };
            assert_close(&what, made.out.into_data(), &out, tolerance);
            assert_close(&format!("{what}, lse"), made.lse.into_data(), &lse, 2e-5);
        }
    }
}

/// Heads of clusters without autodiff, which may gather rows themselves, and with it, which do not.
pub fn clusters_without_autodiff_equal_those_with_it(devices: &[Device]) {
    let [batch, heads, seq, dim] = [2, 2, 150, 64];
    let mut rng = ChaCha8Rng::seed_from_u64(8500);
    let [query, value] = [(); 2].map(|()| random(batch * heads * seq * dim, &mut rng));
    let means = random(heads * 4 * dim, &mut rng);
    for (device, dtype) in (devices.iter())
        .map(|device| (device, DType::BF16))
        .filter(|(device, dtype)| supports(device, *dtype))
    {
        let run = |device: &Device| {
            let config = RoutingHeadsConfig::new(40).with_clusters(Some(4));
            let mut routing = config.init(heads, dim, 1, device).unwrap();
            let means = tensor(&means, [heads, 4, dim], (device, DType::F32));
            routing.means = Param::from_tensor(means).set_require_grad(false);
            let [query, value] =
                [&query, &value].map(|x| tensor(x, [batch, heads, seq, dim], (device, dtype)));
            routing.forward(query, value).unwrap().context.into_data()
        };
        let expected = to_f64(run(&device.clone().autodiff()));
        assert_close(&format!("{device:?}"), run(device), &expected, 1e-2);
    }
}

/// What does not fit is an error that says so, and what has a gradient is not taken.
pub fn attention_in_clusters_errors(devices: &[Device]) {
    for device in devices.iter().filter(|device| supports(device, DType::F32)) {
        let x = |dims: [usize; 4]| Tensor::<4>::zeros(dims, device);
        for (value, tokens, scale, word) in [
            ([1, 2, 9, 4], [1, 2, 3, 4], 1.0, "value"),
            ([1, 2, 8, 4], [1, 1, 3, 4], 1.0, "tokens"),
            ([1, 2, 8, 4], [1, 2, 0, 4], 1.0, "tokens"),
            ([1, 2, 8, 4], [1, 2, 3, 4], 0.0, "scale"),
            ([1, 2, 8, 4], [1, 2, 3, 4], f64::NAN, "scale"),
        ] {
            let tokens = Tensor::zeros(tokens, device);
            let error = attention_in_clusters(x([1, 2, 8, 4]), x(value), tokens, scale);
            let error = error.unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        let leaf = x([1, 2, 8, 64]).autodiff();
        let tokens = Tensor::zeros([1, 2, 3, 4], device).autodiff();
        let plan = attention_in_clusters_plan(&leaf, &leaf, &tokens, 1.0).unwrap();
        assert_eq!(plan.unwrap_err(), "it has no backward pass");
    }
}
