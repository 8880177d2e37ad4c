//! How the op sits in Burn's autodiff: checkpointing, partial tracking, memory of what is kept.

use crate::attention::cases::table;
use crate::prelude::*;

fn random(device: &Device) -> Tensor<4> {
    Tensor::random([1, 2, 40, 8], Distribution::Default, device)
}

/// Gradients under gradient checkpointing, through operations that it computes again.
pub fn gradient_checkpointing_gives_the_same_gradients(devices: &[Device]) {
    for (index, case) in table() {
        let (problem, layout) = (case.problem(index as u64), case.layout());
        let answer = problem.solve();
        for device in devices {
            let device = device.clone().autodiff().gradient_checkpointing();
            let leaves = inputs(&problem, &device, DType::F32).map(Tensor::require_grad);
            let [q, k, v, grad_out] = leaves;
            // Memory-bound steps between the leaves and the op: recomputed, not stored.
            let through = |x: &Tensor<4>| (x.clone() * 2.0).swap_dims(1, 2) / 2.0;
            let [tq, tk, tv] = [&q, &k, &v].map(|x| through(x).swap_dims(1, 2));
            let out = attend([&tq, &tk, &tv], &layout, &case.options());
            let got = with_gradients(out, grad_out, [q, k, v]).split_off(1);
            answer.assert(case.name, got, &[Near::Tensor(1e-5)]);
        }
    }
}

pub fn constants_get_no_gradient(devices: &[Device]) {
    let layout = Pattern::causal().layout(2, 40, 8).unwrap();
    for plain in devices {
        let device = plain.clone().autodiff();
        // k and v from the device without autodiff: constants.
        let (k, v) = (random(plain), random(plain));
        let call = |q: Tensor<4>| {
            let (k, v) = (k.clone(), v.clone());
            attend_with_lse([&q, &k, &v], &layout, &AttentionOptions::default())
        };
        let q = random(&device).require_grad();
        let (out, _) = call(q.clone());
        assert!(q.grad(&out.sum().backward()).is_some());
        // An autodiff tensor that is not tracked is a constant, too.
        let (out, lse) = call(random(&device));
        assert!(!out.is_require_grad() && !lse.is_require_grad());
        // Nothing tracked: plain in, plain out, even after an autodiff call with the same layout.
        let (out, lse) = call(random(plain));
        assert!(!out.device().is_autodiff() && !lse.device().is_autodiff());
    }
}

/// Out and lse take one backward pass, whichever of them the loss uses, in whatever order, and are values that gradient
/// checkpointing may need again.
pub fn out_and_lse_are_differentiated_together(devices: &[Device]) {
    let layout = Pattern::local(9).layout(2, 40, 8).unwrap();
    for plain in devices {
        let data = [(); 3].map(|_| random(plain).into_data());
        let grads = |device: &Device, loss: &dyn Fn(Tensor<4>, Tensor<3>) -> Tensor<1>| {
            let leaf =
                |data: &TensorData| Tensor::<4>::from_data(data.clone(), device).require_grad();
            let [q, k, v] = [leaf(&data[0]), leaf(&data[1]), leaf(&data[2])];
            let (tq, tk, tv) = (q.clone() * 2.0, k.clone() * 0.5, v.clone());
            let options = AttentionOptions::default();
            let (out, lse) = attend_with_lse([&tq, &tk, &tv], &layout, &options);
            let grads = loss(out, lse).backward();
            [q, k, v].map(|x| x.grad(&grads).unwrap())
        };
        let device = plain.clone().autodiff();
        let by_out = grads(&device, &|out, _| out.powi_scalar(2).sum());
        let by_lse = grads(&device, &|_, lse| lse.exp().sum());
        let both = |out: Tensor<4>, lse: Tensor<3>| {
            // lse in two places, one of them deep behind out.
            let half = (lse.clone().exp() * 0.5).sum();
            let deep = (out.powi_scalar(2).sum_dim(3) + lse.exp().unsqueeze_dim(3) * 0.5).sum();
            half + deep
        };
        for device in tracked(plain) {
            let together = grads(&device, &both);
            for index in 0..3 {
                let sum = by_out[index].clone() + by_lse[index].clone();
                let difference = (sum - together[index].clone()).abs().max();
                let difference = difference.into_scalar::<f32>();
                assert!(difference < 1e-4, "{device:?}, input {index}: {difference}");
            }
        }
        // The weights of lse's gradient sum to 1, and nothing of it reaches the values.
        let [_, _, dv] = grads(&device, &|_, lse| lse.sum());
        assert_eq!(dv.abs().max().into_scalar::<f32>(), 0.0, "{device:?}");
    }
}

/// The bias alone may be what is differentiated by, and a constant bias changes no other gradient.
pub fn bias_with_and_without_gradient(devices: &[Device]) {
    let layout = Pattern::causal().layout(2, 40, 8).unwrap();
    for plain in devices {
        let (x, y) = (random(plain).into_data(), random(plain).into_data());
        let bias = Tensor::<4>::random([1, 2, 40, 40], Distribution::Default, plain).into_data();
        let table = Tensor::<2>::random([1, 15], Distribution::Default, plain).into_data();
        for device in tracked(plain) {
            let grads = |tracked: [bool; 3]| {
                let tensor = |data: &TensorData, track: bool| {
                    let tensor = Tensor::<4>::from_data(data.clone(), &device);
                    if track { tensor.require_grad() } else { tensor }
                };
                let (x, bias) = (tensor(&x, tracked[0]), tensor(&bias, tracked[1]));
                let table = Tensor::<2>::from_data(table.clone(), &device);
                let table = if tracked[2] {
                    table.require_grad()
                } else {
                    table
                };
                let y = tensor(&y, false);
                // Memory-bound steps, which checkpointing computes again.
                let tensors = AttentionTensors::default()
                    .bias(bias.clone() * 2.0)
                    .relative_bias(table.clone() * 2.0);
                let options = AttentionOptions::default();
                let (out, _) = SparseAttentionCall::new(x.clone() * 2.0, y.clone(), y, &layout)
                    .tensors(tensors)
                    .options(options)
                    .run_with_lse()
                    .unwrap();
                let grads = out.powi_scalar(2).sum().backward();
                let data = |x: &Tensor<4>| x.grad(&grads).map(|grad| grad.into_data());
                let table = table.grad(&grads).map(|grad| grad.into_data());
                [data(&x), data(&bias), table]
            };
            let all = grads([true; 3]);
            for bits in 1..7 {
                let tracked = [0, 1, 2].map(|bit| bits >> bit & 1 == 1);
                for ((some, all), tracked) in grads(tracked).iter().zip(&all).zip(tracked) {
                    let bytes = |data: &Option<TensorData>| {
                        data.as_ref().map(|data| data.as_bytes().to_vec())
                    };
                    let expected = bytes(all).filter(|_| tracked);
                    assert_eq!(bytes(some), expected, "{device:?}, {bits:b}");
                }
            }
        }
    }
}

pub fn one_tensor_as_query_key_and_value(devices: &[Device]) {
    let layout = Pattern::local(7).layout(2, 40, 8).unwrap();
    for device in devices.iter().cloned() {
        let device = device.autodiff();
        let data = random(&device).into_data();
        let leaf = || Tensor::<4>::from_data(data.clone(), &device).require_grad();
        let grads_of = |q: &Tensor<4>, k: &Tensor<4>, v: &Tensor<4>| {
            let options = AttentionOptions::default();
            let out = attend([q, k, v], &layout, &options);
            out.powi_scalar(2).sum().backward()
        };
        let shared = leaf();
        let together = shared.grad(&grads_of(&shared, &shared, &shared)).unwrap();
        let (q, k, v) = (leaf(), leaf(), leaf());
        let grads = grads_of(&q, &k, &v);
        let sum = q.grad(&grads).unwrap() + k.grad(&grads).unwrap() + v.grad(&grads).unwrap();
        let difference = (together - sum).abs().max().into_scalar::<f32>();
        assert!(difference < 1e-5, "{device:?}: {difference}");
    }
}

pub fn recompute_and_store_agree(devices: &[Device]) {
    for (_, case) in table() {
        let (problem, layout) = (case.problem(77), case.layout());
        for device in devices {
            let device = &device.clone().autodiff();
            let gradients = |mode: WeightsMode| {
                let options = case.options().weights(mode);
                run(&problem, &layout, options, device, DType::F32).split_off(1)
            };
            let modes = [WeightsMode::Store, WeightsMode::Recompute];
            let [stored, recomputed] = modes.map(gradients);
            // The two modes sum in other orders where they cut tiles differently.
            let what = format!("{}, {device:?}, of stored weights", case.name);
            assert_alike(&what, stored, recomputed, 2e-6);
        }
    }
}
