//! Burn's signature: equal to Burn's `attention_fallback` in f64 over its arguments, with gradients of q, k, v and bias.

use burn::tensor::module::attention_fallback;
use burn::tensor::ops::AttentionModuleOptions;
use burn_blocksparse::{attention, mask_layout, try_attention};

use burn_blocksparse_tests::prelude::*;

const BATCH: usize = 2;
const HEADS: usize = 3;

type Function = fn(
    Tensor<4>,
    Tensor<4>,
    Tensor<4>,
    Option<Tensor<4, Bool>>,
    Option<Tensor<4>>,
    AttentionModuleOptions,
) -> Tensor<4>;

/// Lengths, and dims of mask and bias.
type Shapes = ([usize; 2], Option<[usize; 4]>, Option<[usize; 4]>);

/// Every way to share masks and biases, and lengths within a block, over ragged ones, and unequal either way.
fn shapes() -> Vec<Shapes> {
    vec![
        ([70, 70], None, None),
        ([40, 90], Some([BATCH, HEADS, 40, 90]), None),
        ([90, 40], None, Some([1, HEADS, 90, 40])),
        (
            [66, 130],
            Some([BATCH, 1, 1, 130]),
            Some([BATCH, 1, 1, 130]),
        ),
        ([66, 66], Some([1, HEADS, 66, 1]), Some([1, 1, 66, 66])),
        ([5, 7], Some([1, 1, 5, 7]), Some([BATCH, HEADS, 5, 1])),
    ]
}

/// Numbers that bf16 has, so that all dtypes see the same.
fn random(rng: &mut ChaCha8Rng, dims: [usize; 4]) -> TensorData {
    let count = dims.iter().product();
    let numbers: Vec<f32> = (0..count)
        .map(|_| rng.random_range(-64..=64) as f32 / 64.0)
        .collect();
    TensorData::new(numbers, dims)
}

/// Masks a third, and all of every fifth row.
fn random_mask(rng: &mut ChaCha8Rng, dims: [usize; 4]) -> TensorData {
    let count: usize = dims.iter().product();
    let masked: Vec<bool> = (0..count)
        .map(|i| (dims[2] > 1 && i / dims[3] % 5 == 3) || rng.random_range(0..3) == 0)
        .collect();
    TensorData::new(masked, dims)
}

struct Data {
    qkv: [TensorData; 3],
    grad: TensorData,
    mask: Option<TensorData>,
    bias: Option<TensorData>,
    options: AttentionModuleOptions,
}

/// Output, and gradients of q, k, v and bias.
fn run(function: Function, data: &Data, device: &Device, dtype: DType) -> Vec<Vec<f64>> {
    let device = device.clone().autodiff();
    let float = |x: &TensorData| Tensor::<4>::from_data(x.clone(), (&device, dtype));
    let [q, k, v] = data.qkv.each_ref().map(|x| float(x).require_grad());
    let bias = data.bias.as_ref().map(|x| float(x).require_grad());
    let mask = (data.mask.as_ref()).map(|x| Tensor::<4, Bool>::from_data(x.clone(), &device));
    // Small: in Burn's fallback gradients of fully masked rows are divided by the least normal number, and must not overflow.
    let grad = float(&data.grad) / 8.0;
    let out = function(
        q.clone(),
        k.clone(),
        v.clone(),
        mask,
        bias.clone(),
        data.options,
    );
    let grads = (out.clone() * grad).sum().backward();
    let inputs = [Some(q), Some(k), Some(v), bias].into_iter().flatten();
    let grads = inputs.map(|x| x.grad(&grads).expect("a gradient"));
    let numbers = |x: Tensor<4>| x.into_data().iter::<f64>().collect();
    std::iter::once(out.inner())
        .chain(grads)
        .map(numbers)
        .collect()
}

#[test]
fn equals_burns_fallback_in_f64() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let exact = Device::flex();
    for ([seq_q, seq_kv], mask, bias) in shapes() {
        for (scale, softcap, is_causal) in [
            (None, None, false),
            (None, None, true),
            // Burn's gradient of a division takes 1 / softcap in f32, which is exact for a power of 2.
            (Some(0.3), Some(2.0), true),
        ] {
            let [q, kv, value] =
                [(seq_q, 16), (seq_kv, 16), (seq_kv, 32)].map(|(n, d)| [BATCH, HEADS, n, d]);
            let data = Data {
                qkv: [q, kv, value].map(|dims| random(&mut rng, dims)),
                grad: random(&mut rng, [BATCH, HEADS, seq_q, 32]),
                mask: mask.map(|dims| random_mask(&mut rng, dims)),
                bias: bias.map(|dims| random(&mut rng, dims)),
                options: AttentionModuleOptions {
                    scale,
                    softcap,
                    is_causal,
                },
            };
            let expected = run(attention_fallback, &data, &exact, DType::F64);
            for device in devices() {
                let mut dtypes = exact_dtypes(&device);
                dtypes.extend(half_dtypes(&device).into_iter().map(|dtype| (dtype, 3e-2)));
                for (dtype, tolerance) in dtypes {
                    let got = run(attention, &data, &device, dtype);
                    for (which, (got, expected)) in got.iter().zip(&expected).enumerate() {
                        let largest = expected
                            .iter()
                            .fold(0.125, |most: f64, x| most.max(x.abs()));
                        assert_eq!(got.len(), expected.len());
                        for (got, expected) in got.iter().zip(expected) {
                            assert!(
                                (got - expected).abs() <= tolerance * largest,
                                "{which} of {seq_q} × {seq_kv}, mask {mask:?}, bias {bias:?}, {:?}, {dtype:?}: {got}, {expected}",
                                data.options
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_mask_read_once_gives_the_same() {
    let mut rng = ChaCha8Rng::seed_from_u64(rand::random());
    for device in devices() {
        let x = Tensor::<4>::from_data(random(&mut rng, [BATCH, HEADS, 70, 16]), &device);
        let mask = random_mask(&mut rng, [BATCH, 1, 70, 70]);
        let mask = Tensor::<4, Bool>::from_data(mask, &device);
        let layout = mask_layout(mask.clone(), HEADS, [70, 70], true).unwrap();
        let options = AttentionModuleOptions {
            scale: None,
            softcap: None,
            is_causal: true,
        };
        let call = attention(x.clone(), x.clone(), x.clone(), Some(mask), None, options);
        let kept = SparseAttentionCall::new(x.clone(), x.clone(), x, &layout);
        assert_eq!(call.into_data(), kept.run().unwrap().out.into_data());
    }
}

#[test]
fn a_mask_that_does_not_fit_is_named() {
    let device = &devices()[0];
    let x = Tensor::<4>::zeros([BATCH, HEADS, 8, 16], device);
    for (dims, argument) in [
        ([3, 1, 8, 8], "mask's batch"),
        ([1, 2, 8, 8], "mask's heads"),
        ([1, 1, 7, 8], "mask's seq_q"),
        ([1, 1, 8, 9], "mask's seq_kv"),
    ] {
        let mask = TensorData::new(vec![false; dims.iter().product()], dims);
        let mask = Tensor::<4, Bool>::from_data(mask, device);
        let options = AttentionModuleOptions {
            scale: None,
            softcap: None,
            is_causal: false,
        };
        let error = try_attention(x.clone(), x.clone(), x.clone(), Some(mask), None, options);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(argument), "{error}");
    }
}
