//! Attention from residuals of another pass: equal bits as without, and the residuals are really used.

use burn_blocksparse::internal::AttentionResiduals;

use crate::attention::cases::{Case, gaps_per_batch, table};
use crate::attention::options::{SHARED, everything, with_alibi, with_distances};
use crate::device_layout::case::cases as device_cases;
use crate::device_layout::chosen::layout_of;
use crate::prelude::*;

/// Makes a case's problem with one of five kinds of scores: dropout, sinks and ALiBi, either kind of bias, all options. Without options if there are
/// few queries.
fn variant(index: usize, case: &Case, seed: u64) -> Problem {
    let problem = case.problem(seed).with_grad_lse(seed);
    match index % 5 {
        // Options would prevent the heads of a KV head from becoming one sequence.
        _ if case.seq_q < case.heads => problem,
        0 => problem.with_dropout(Dropout::new(0.3, seed)),
        1 => with_alibi(problem).with_sinks(7),
        2 => problem.with_bias(6, SHARED[index / 5 % 6]),
        3 => with_distances(index, problem),
        _ => everything(index, problem),
    }
}

/// Origin of out and lse.
#[derive(Clone)]
enum By {
    Itself,
    Keeping,
    Given(Box<AttentionResiduals>),
}

type Kept = (Results, Option<AttentionResiduals>);

/// Returns outputs and gradients by name, and the residuals of the call.
fn run<'a>(
    problem: &Problem,
    layout: impl Into<Layout<'a>>,
    (device, dtype): (&Device, DType),
    by: By,
) -> Kept {
    let tracks = device.is_autodiff();
    let [q, k, v, grad_out] = inputs(problem, device, dtype);
    let [q, k, v] = [q, k, v].map(|x| if tracks { x.require_grad() } else { x });
    let mut tensors = tensors(problem, device, dtype);
    if tracks {
        tensors = require_grad(tensors);
    }
    let leaves = tensors.clone();
    // Steps that gradient checkpointing recomputes, and that change no bit.
    let through = |x: &Tensor<4>| x.clone() * 2.0 / 2.0;
    let [tq, tk, tv] = [&q, &k, &v].map(through);
    tensors.bias = tensors.bias.as_ref().map(through);
    let call = call_of([&tq, &tk, &tv], layout, &problem.asked()).tensors(tensors);
    let ((out, lse), kept) = match by {
        By::Itself => (call.run_with_lse().unwrap(), None),
        By::Keeping => {
            let (out, lse, kept) = call.run_with_residuals().unwrap();
            assert!(!kept.out.is_autodiff() && !kept.lse.is_autodiff());
            ((out, lse), Some(kept))
        }
        By::Given(kept) => (call.run_from_residuals(*kept).unwrap(), None),
    };
    if !tracks {
        return (outputs((out, lse)), kept);
    }
    let grads = loss_of(problem, (&out, Some(grad_out)), &lse).backward();
    (by_name((out, lse), [q, k, v], &leaves, &grads), kept)
}

/// Makes residuals without autodiff, uses them with it, and compares with a call without residuals, and with one that makes them in its graph.
fn check<'a>(
    what: &str,
    problem: &Problem,
    layout: impl Into<Layout<'a>>,
    plain: &Device,
    dtype: DType,
    checkpointing: bool,
) {
    let layout = layout.into();
    let device = &tracked(plain)[usize::from(checkpointing)];
    let run = |device: &Device, by: By| run(problem, layout, (device, dtype), by);
    let (expected, _) = run(device, By::Itself);
    let (first, kept) = run(plain, By::Keeping);
    let given = By::Given(Box::new(kept.unwrap()));
    let (again, _) = run(device, given.clone());
    let (plain_again, _) = run(plain, given);
    let (keeping, _) = run(device, By::Keeping);
    assert_eq!(expected.len(), again.len());
    for (way, results) in [
        ("kept", &first),
        ("given", &again),
        ("given without a graph", &plain_again),
        ("kept in a graph", &keeping),
    ] {
        for ((name, got), (_, expected)) in results.iter().zip(&expected) {
            let what = format!("{what}, {device:?}, {dtype:?}: {name}, {way}");
            // Burn sums around sinks, possibly in another order on a GPU.
            if problem.sinks.is_some() && is_cube(device) {
                assert_close(&what, got.clone(), &to_f64(expected.clone()), 1e-5);
            } else {
                assert_eq!(got.as_bytes(), expected.as_bytes(), "{what}");
            }
        }
    }
}

pub fn given_attention_gives_the_same_bits(devices: &[Device]) {
    let mut ran = 0;
    // Includes rows without keys, and grouped heads with few queries.
    let has = |(index, case): &(usize, Case)| {
        (index % 6 == 1 || case.seq_q < case.heads) && case.seq_kv <= 300
    };
    for (index, case) in table().into_iter().filter(has) {
        for device in devices {
            for (dtype, _) in exact_dtypes(device).into_iter().take(1 + index % 2) {
                let problem = variant(index, &case, 9000 + index as u64);
                let (what, layout) = (case.name, case.layout());
                check(what, &problem, &layout, device, dtype, index % 2 == 0);
                ran += 1;
            }
        }
    }
    assert_ran("given attention", ran);
}

/// Half precision, layouts per batch entry and layouts made on the device.
pub fn given_attention_of_other_kinds(devices: &[Device]) {
    for (index, case) in table().iter().filter(|(index, _)| index % 10 == 3) {
        for (device, dtype) in halves(devices) {
            let mut problem = variant(index / 10, case, 9100 + *index as u64);
            problem.sinks = None;
            problem.round_to(dtype);
            let layout = case.layout();
            check(case.name, &problem, &layout, device, dtype, false);
        }
    }
    let (layout, problem) = gaps_per_batch(92);
    let problem = problem.with_grad_lse(92);
    for device in devices {
        let dtype = DType::F32;
        check("per batch", &problem, &layout, device, dtype, true);
        for index in [0, 4] {
            let case = &device_cases()[index];
            let (mask, problem) = case.drawn(9200);
            let problem = problem.options(Some(0.3), None);
            let layout = layout_of(case, &mask, device);
            check(case.name, &problem, &layout, device, dtype, false);
        }
    }
}

/// Out and lse are the residuals, whatever a kernel would compute from the inputs, and the backward pass reads them.
pub fn given_attention_is_not_computed(devices: &[Device]) {
    let layout = Pattern::local(9).layout(2, 40, 8).unwrap();
    for plain in devices {
        let random = || Tensor::<4>::random([1, 2, 40, 8], Distribution::Default, plain);
        let [q, k, v, grad_out] = [random(), random(), random(), random()];
        let call = |q: &Tensor<4>, k: &Tensor<4>, v: &Tensor<4>| {
            SparseAttentionCall::new(q.clone(), k.clone(), v.clone(), &layout)
        };
        let (_, _, kept) = call(&q, &k, &v).run_with_residuals().unwrap();
        // Halves the weights, and alters out independently of them.
        let other_lse = kept.lse.clone() + std::f64::consts::LN_2;
        let altered = AttentionResiduals::new(kept.out.clone() * -3.0 + 1.0, other_lse);
        let given = |tracked: [bool; 3], kept: AttentionResiduals| {
            let leaf = |x: &Tensor<4>, tracked: bool| match tracked {
                true => x.clone().autodiff().require_grad(),
                false => x.clone(),
            };
            let inputs = [0, 1, 2].map(|at| leaf([&q, &k, &v][at], tracked[at]));
            let [q, k, v] = &inputs;
            let (out, lse) = call(q, k, v).run_from_residuals(kept).unwrap();
            (inputs, out, lse)
        };
        let bytes = |data: TensorData| data.as_bytes().to_vec();
        let gradients = |tracked: [bool; 3], kept: &AttentionResiduals| {
            let (inputs, out, lse) = given(tracked, kept.clone());
            assert_eq!(bytes(out.to_data()), bytes(kept.out.to_data()), "{plain:?}");
            assert_eq!(bytes(lse.to_data()), bytes(kept.lse.to_data()), "{plain:?}");
            let grads = (out * grad_out.clone().autodiff()).sum().backward();
            inputs.map(|x| x.grad(&grads).map(Tensor::into_data))
        };
        let [true_grads, grads] = [&kept, &altered].map(|kept| gradients([true; 3], kept));
        // dv = pᵀ · grad_out. Kernels recompute weights from lse; the reference recomputes the softmax.
        let kernels = is_cube(plain);
        let factor = if kernels { 0.5 } else { 1.0 };
        let scaled = to_f64(true_grads[2].clone().unwrap()).into_iter();
        let scaled: Vec<f64> = scaled.map(|x| x * factor).collect();
        let what = format!("{plain:?}: dv of half of the weights");
        assert_close(&what, grads[2].clone().unwrap(), &scaled, 1e-5);
        // delta = rowsum(grad_out ∘ out).
        assert_ne!(true_grads[0], grads[0], "{plain:?}");
        // Constants get no gradient, and change no other.
        for bits in 1..7 {
            let tracked = [0, 1, 2].map(|bit| bits >> bit & 1 == 1);
            let pairs = gradients(tracked, &kept).into_iter().zip(&true_grads);
            for ((some, all), tracked) in pairs.zip(tracked) {
                let expected = all.clone().filter(|_| tracked).map(bytes);
                assert_eq!(some.map(bytes), expected, "{plain:?}, {bits:b}");
            }
        }
        let (_, out, lse) = given([false; 3], altered.clone());
        assert!(!out.is_autodiff() && !lse.is_autodiff());
        assert_eq!(bytes(out.into_data()), bytes(altered.out.to_data()));
        // No gradient flows into residuals.
        let mut leaf = kept.clone();
        leaf.out = leaf.out.autodiff().require_grad();
        leaf.lse = leaf.lse.autodiff().require_grad();
        let (_, out, lse) = given([true; 3], leaf.clone());
        let grads = (out.sum() + lse.exp().sum()).backward();
        assert!(leaf.out.grad(&grads).is_none() && leaf.lse.grad(&grads).is_none());
        // Residuals exclude sinks, which then take a share of out.
        let sinks = Tensor::<1>::from_data([0.4, -0.7], plain);
        let with_sinks = call(&q, &k, &v).sinks(sinks.clone());
        let (out, lse) = with_sinks.run_from_residuals(altered.clone()).unwrap();
        let total = (altered.lse.clone().exp() + sinks.reshape([1, 2, 1]).exp()).log();
        let share = (altered.lse.clone() - total.clone()).exp();
        let scaled = altered.out.clone() * share.unsqueeze_dim(3);
        let (got, expected) = (outputs((out, lse)), outputs((scaled, total)));
        assert_alike(&format!("{plain:?}, with sinks"), got, expected, 1e-5);
    }
}
