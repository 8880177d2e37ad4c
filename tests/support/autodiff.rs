//! How the op sits in Burn's autodiff: checkpointing, partial tracking, memory of what is kept.

use crate::cases::table;
use crate::compare::{assert_close, to_f64};
use burn::tensor::{DType, Device, Distribution, Tensor, TensorData};
use burn_blocksparse::{AttentionOptions, Pattern, WeightsMode, attention, attention_with_lse};

fn random(device: &Device) -> Tensor<4> {
    Tensor::random([1, 2, 40, 8], Distribution::Default, device)
}

/// Gradients under gradient checkpointing, through operations that it computes again.
pub fn gradient_checkpointing_gives_the_same_gradients(devices: &[Device]) {
    for (index, case) in &table() {
        let index = *index;
        let (problem, layout) = (case.problem(index as u64), case.layout());
        let answer = problem.solve();
        let sizes = problem.sizes;
        for device in devices.iter().cloned() {
            let device = device.autodiff().gradient_checkpointing();
            let leaf = |values: &[f64], shape: [usize; 4]| {
                let data = TensorData::new(values.to_vec(), shape);
                Tensor::<4>::from_data(data, (&device, DType::F32)).require_grad()
            };
            let q = leaf(&problem.q, sizes.q());
            let k = leaf(&problem.k, sizes.k());
            let v = leaf(&problem.v, sizes.v());
            let grad_out = leaf(&problem.grad_out, sizes.out());
            // Memory-bound steps between the leaves and the op: recomputed, not stored.
            let through = |x: &Tensor<4>| (x.clone() * 2.0).swap_dims(1, 2) / 2.0;
            let [tq, tk, tv] = [&q, &k, &v].map(|x| through(x).swap_dims(1, 2));
            let out = attention(tq, tk, tv, &layout, case.options()).unwrap();
            let grads = (out * grad_out).sum().backward();
            for (leaf, expected) in [(&q, &answer.dq), (&k, &answer.dk), (&v, &answer.dv)] {
                let grad = leaf.grad(&grads).unwrap().into_data();
                assert_close(case.name, grad, expected, 1e-5);
            }
        }
    }
}

pub fn constants_get_no_gradient_and_lse_leaves_the_graph(devices: &[Device]) {
    let layout = Pattern::causal().layout(2, 40, 8).unwrap();
    for plain in devices {
        let device = plain.clone().autodiff();
        let q = random(&device).require_grad();
        // k and v from the device without autodiff: constants.
        let (k, v) = (random(plain), random(plain));
        let call = |q: Tensor<4>| {
            let (k, v) = (k.clone(), v.clone());
            attention_with_lse(q, k, v, &layout, AttentionOptions::default()).unwrap()
        };
        let (out, lse) = call(q.clone());
        let with_lse = q.grad(&(out.sum() + lse.sum() * 100.0).backward()).unwrap();
        let (out, _) = call(q.clone());
        let without = q.grad(&out.sum().backward()).unwrap();
        let difference = (with_lse - without).abs().max().into_scalar::<f32>();
        assert_eq!(difference, 0.0, "{plain:?}");
        // Nothing tracked: plain in, plain out, even after an autodiff call with the same layout.
        let (out, lse) = call(random(plain));
        assert!(!out.device().is_autodiff() && !lse.device().is_autodiff());
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
            let out = attention(q.clone(), k.clone(), v.clone(), &layout, options).unwrap();
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
        let sizes = problem.sizes;
        for device in devices.iter().cloned() {
            let device = device.autodiff();
            let grads = [WeightsMode::Recompute, WeightsMode::Store].map(|mode| {
                let leaf = |values: &[f64], shape: [usize; 4]| {
                    let data = TensorData::new(values.to_vec(), shape);
                    Tensor::<4>::from_data(data, (&device, DType::F32)).require_grad()
                };
                let q = leaf(&problem.q, sizes.q());
                let k = leaf(&problem.k, sizes.k());
                let v = leaf(&problem.v, sizes.v());
                let options = case.options().weights(mode);
                let out = attention(q.clone(), k.clone(), v.clone(), &layout, options).unwrap();
                let grads = (out * leaf(&problem.grad_out, sizes.out()))
                    .sum()
                    .backward();
                [q, k, v].map(|x| x.grad(&grads).unwrap().into_data())
            });
            // The two modes sum in other orders where they cut tiles differently.
            let [recomputed, stored] = grads;
            for ((a, b), name) in recomputed.into_iter().zip(stored).zip(["dq", "dk", "dv"]) {
                let what = format!("{}, {device:?}: {name} of stored weights", case.name);
                assert_close(&what, b, &to_f64(a), 2e-6);
            }
        }
    }
}
