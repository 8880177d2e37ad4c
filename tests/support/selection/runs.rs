//! Properties of content-based selections with any method: equal bits in every run, graph capture, the bound of outputs by recall, and nested rules.

use burn_blocksparse::graph::{CapturedGraph, StaticInput};
use burn_blocksparse::internal::runs_kernels;
use burn_sparse_select::{
    Always, Budget, Candidates, EstimateInputs, EstimateKind, Rule, Selection,
    attention_selected_with_lse, recall,
};

use crate::device_layout::case::Case;
use crate::prelude::*;

const SEQ: usize = 75;

/// Methods with their own steps on devices, and one within a window.
fn choices() -> Vec<(Selection, Option<BlockLayout>)> {
    let near = Pattern::local(40).layout(4, SEQ, 8).unwrap();
    let of = |text: &str| -> Selection { text.parse().unwrap() };
    vec![
        (of("topk:8,4"), None),
        (of("topk:8,p=0.6"), Some(near)),
        (of("xattention:8,4,0.7"), None),
        (of("sparge:8,0.6,0.1"), None),
        (of("minference:8,4,5,9,sinks=2,window=3"), None),
        (of("moba:8,3,share=mean"), None),
    ]
}

/// Returns out and the gradients of the sum of its squares with respect to queries and keys.
fn step(
    q: Tensor<4>,
    k: Tensor<4>,
    (selection, within): &(Selection, Option<BlockLayout>),
) -> Result<[Tensor<4>; 3], OpError> {
    let [q, k] = [q, k].map(|x| Tensor::from_inner(x).require_grad());
    let options = AttentionOptions::default();
    let (out, _) = match selection.estimator().grid().query_rows {
        1 => attention_selected_with_lse(q.clone(), k.clone(), k.clone(), selection, options)?,
        _ => {
            let mut cut = Candidates::default();
            cut.layout = within.as_ref();
            let call = EstimateInputs::new(q.clone(), k.clone());
            let layout = selection.choose_among(&call, cut)?.layout;
            call_of([&q, &k, &k], &layout, &options).run_with_lse()?
        }
    };
    let gradients = out.clone().square().sum().backward();
    let of = |x: &Tensor<4>| x.grad(&gradients).expect("of an input");
    Ok([out.inner(), of(&q), of(&k)])
}

fn inputs(device: &Device) -> [TensorData; 2] {
    [4, 2].map(|heads| {
        let x = Tensor::<4>::random([2, heads, SEQ, 16], Distribution::Default, device);
        (x - 0.5).into_data()
    })
}

/// Twenty runs give equal bits.
pub fn choices_give_the_same_bits(devices: &[Device]) {
    for device in devices {
        let numbers = inputs(device);
        for choice in choices() {
            let run = || {
                let [q, k] = numbers.clone().map(|x| Tensor::from_data(x, device));
                step(q, k, &choice).unwrap().map(Tensor::into_data)
            };
            let first = run();
            for _ in 1..20 {
                assert_eq!(run(), first, "{} on {device:?}", choice.0);
            }
        }
    }
}

/// A selection, attention over it and the gradients, captured and replayed with other inputs: a capture allows no read-back or upload, and a replay
/// compiles nothing. Without kernels the host reads the selection, so nothing can be captured.
pub fn choices_are_replayed(devices: &[Device]) {
    for device in devices.iter().filter(|device| runs_kernels(device)) {
        for choice in choices() {
            let batches: Vec<_> = (0..6).map(|_| inputs(device)).collect();
            let [q, k] = batches[0].clone();
            let q = StaticInput::<4>::new(q, device).unwrap();
            let k = StaticInput::<4>::new(k, device).unwrap();
            let mut replayed = CapturedGraph::new(device, {
                let (q, k, choice) = (q.clone(), k.clone(), &choice);
                move || step(q.tensor(), k.tensor(), choice)
            })
            .unwrap();
            for (run, batch) in batches.iter().enumerate() {
                let [own_q, own_k] = batch.clone();
                q.write(own_q.clone()).unwrap();
                k.write(own_k.clone()).unwrap();
                let got = replayed.run().unwrap().clone().map(Tensor::into_data);
                let [q, k] = [own_q, own_k].map(|x| Tensor::from_data(x, device));
                let expected = step(q, k, &choice).unwrap().map(Tensor::into_data);
                assert_eq!(got, expected, "{}, run {run} on {device:?}", choice.0);
            }
        }
    }
}

/// `‖o − o_full‖ ≤ 2 (1 − recall) · max‖v‖` for every query.
pub fn outputs_are_bounded_by_recall(devices: &[Device]) {
    for device in devices {
        let [q, k] = inputs(device).map(|x| Tensor::<4>::from_data(x, device) * 4.0);
        let v = Tensor::<4>::random([2, 2, SEQ, 8], Distribution::Default, device);
        let options = AttentionOptions::default;
        let full = Pattern::causal().layout(4, SEQ, 8).unwrap();
        let (whole, lse) = attend_with_lse([&q, &k, &v], &full, &options());
        let lengths = to_f64(v.clone().square().sum_dim(3).sqrt().into_data());
        let longest = lengths.into_iter().fold(0.0, f64::max);
        for text in [
            "topk:8,2,1,0",
            "topk:8,1,1,1",
            "xattention:8,4,0.5",
            "sparge:8,0.3,-1",
        ] {
            let selection: Selection = text.parse().unwrap();
            let call = EstimateInputs::new(q.clone(), k.clone());
            let layout = selection.choose(&call).unwrap().layout;
            let kept = recall(q.clone(), k.clone(), lse.clone(), &layout, options()).unwrap();
            let (out, _) = attend_with_lse([&q, &k, &v], &layout, &options());
            let errors = (out - whole.clone()).square().sum_dim(3).sqrt();
            let (errors, kept) = (to_f64(errors.into_data()), to_f64(kept.into_data()));
            let leaves_out = kept.iter().any(|&kept| kept < 0.7);
            assert!(leaves_out, "{text} leaves nothing out");
            for (row, (error, kept)) in errors.into_iter().zip(kept).enumerate() {
                let bound = 2.0 * (1.0 - kept) * longest + 1e-5;
                let is_right = error <= bound;
                assert!(
                    is_right,
                    "{text} on {device:?}, row {row}: {error} of {bound}"
                );
            }
        }
    }
}

/// A larger budget keeps a superset; all blocks and the share 1 keep everything.
pub fn rules_are_nested(devices: &[Device]) {
    let case = Case::new("nested rules", 70, 90, 8);
    let blocks = case.dims()[3];
    let mut rng = seeded(41);
    // With ties and NaN.
    let scores: Vec<f32> = (0..case.dims().iter().product())
        .map(|_| match rng.random_range(0..9) {
            0 => f32::NAN,
            1 => f32::NEG_INFINITY,
            2 => 0.5,
            _ => rng.random_range(-2.0..2.0),
        })
        .collect();
    let shares = [0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.0];
    let rows: [Vec<Budget>; 4] = [
        (1..=blocks).map(Budget::TopK).collect(),
        shares.map(Budget::Ratio).to_vec(),
        shares.map(Budget::top_p).to_vec(),
        shares.iter().rev().map(|&a| Budget::MinP(a)).collect(),
    ];
    for device in devices {
        for (kind, forced) in [
            (EstimateKind::Logit, Always { first: 1, local: 1 }),
            (EstimateKind::Probability, Always { first: 0, local: 0 }),
        ] {
            for keeps in &rows {
                let of = |keep: Budget| {
                    let scores = floats(&scores, case.dims(), device);
                    let rule = Rule { kind, keep, forced };
                    DeviceLayout::from_scores(scores, rule, case.options()).unwrap()
                };
                let counts = |layout: &DeviceLayout| to_f64(layout.counts().unwrap().into_data());
                let mut before: Option<(Vec<f64>, BlockLayout)> = None;
                for &keep in keeps {
                    let layout = of(keep);
                    let (counts, host) = (counts(&layout), layout.to_host().unwrap());
                    if let Some((fewer, smaller)) = &before {
                        let what = format!("{keep:?} of {kind:?} on {device:?}");
                        let is_more = counts.iter().zip(fewer).all(|(more, less)| more >= less);
                        assert!(is_more, "{what}");
                        assert!(contains(&host, smaller), "{what}");
                    }
                    before = Some((counts, host));
                }
                let last = before.map(|(_, last)| last);
                if !matches!(keeps[0], Budget::MinP(_)) {
                    let shape: LayoutShape = case.shape();
                    let all = BlockLayout::new(&Pattern::causal(), shape).unwrap();
                    let all = BlockLayout::stack_batch(&[all.clone(), all]).unwrap();
                    assert!(last.unwrap() == all, "{:?} keeps not all", keeps.last());
                }
            }
        }
    }
}

fn contains(larger: &BlockLayout, smaller: &BlockLayout) -> bool {
    let all = (0..2).flat_map(|batch| (0..larger.heads()).map(move |head| (batch, head)));
    all.into_iter().all(|(batch, head)| {
        let [larger, smaller] = [larger, smaller].map(|x| x.to_dense_batch(batch, head).concat());
        larger
            .iter()
            .zip(&smaller)
            .all(|(larger, smaller)| *larger || !smaller)
    })
}
