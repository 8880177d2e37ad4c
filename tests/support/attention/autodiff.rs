//! The op in Burn's autodiff: checkpointing, partial tracking, memory of saved tensors.

use crate::attention::cases::table;
use crate::prelude::*;
use crate::training::case::{Case, Tensors};

fn random(device: &Device) -> Tensor<4> {
    Tensor::random([1, 2, 40, 8], Distribution::Default, device)
}

/// Gradients under gradient checkpointing, through recomputed operations.
pub fn gradient_checkpointing_gives_the_same_gradients(devices: &[Device]) {
    for (index, case) in table() {
        let (problem, layout) = (case.problem(index as u64), case.layout());
        let answer = problem.solve();
        for device in devices {
            let device = device.clone().autodiff().gradient_checkpointing();
            let leaves = inputs(&problem, &device, DType::F32).map(Tensor::require_grad);
            let [q, k, v, grad_out] = leaves;
            // Memory-bound steps between the leaves and the op are recomputed, not stored.
            let through = |x: &Tensor<4>| (x.clone() * 2.0).swap_dims(1, 2) / 2.0;
            let [tq, tk, tv] = [&q, &k, &v].map(|x| through(x).swap_dims(1, 2));
            let out = attend([&tq, &tk, &tv], &layout, &case.options());
            let got = with_gradients(out, grad_out, [q, k, v]).split_off(1);
            answer.assert(case.name, got, &[Near::Tensor(1e-5)]);
        }
    }
}

/// Constants get no gradient and change no other, for all subsets of inputs and biases.
pub fn constants_get_no_gradient(devices: &[Device]) {
    let layout = Pattern::causal().layout(2, 40, 8).unwrap();
    let call = |x: &mut Tensors| {
        let [q, k, v, bias] = [(); 4].map(|()| x.take::<4>());
        let tensors = AttentionTensors::default()
            .bias(bias)
            .relative_bias(x.take());
        let call = SparseAttentionCall::new(q, k, v, &layout).tensors(tensors);
        let (out, lse) = call.run_with_lse().unwrap();
        vec![out.into(), lse.into()]
    };
    let given = |seed: u64, shape: &[usize]| numbers(seed, shape.iter().product());
    let mut case = Case::unjudged("attention", call);
    let rows: &[usize] = &[1, 2, 40, 8];
    let inputs = [
        ("q", rows),
        ("k", rows),
        ("v", rows),
        ("bias", &[1, 2, 40, 40]),
        ("relative bias", &[1, 15]),
    ];
    for (seed, (name, shape)) in (0..).zip(inputs) {
        case = case.input(name, 0, shape, given(seed, shape));
    }
    case.result("out", 0, rows, given(5, rows))
        .result("lse", 0, &rows[..3], given(6, &rows[..3]))
        .has_constants(devices, 0.0);
    for plain in devices {
        // k and v come from the device without autodiff.
        let q = random(&plain.clone().autodiff()).require_grad();
        let [k, v] = [random(plain), random(plain)];
        let out = attend([&q, &k, &v], &layout, &AttentionOptions::default());
        assert!(q.grad(&out.sum().backward()).is_some());
    }
}

/// Out and lse share one backward pass, whichever of them the loss uses and in whatever order; gradient checkpointing may recompute either.
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
            // lse is used twice, once deep in the graph after out.
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
        // The weights of lse's gradient sum to 1, and none of it reaches the values.
        let [_, _, dv] = grads(&device, &|_, lse| lse.sum());
        assert_eq!(dv.abs().max().into_scalar::<f32>(), 0.0, "{device:?}");
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
