//! Content-based layouts, against selection in plain f64 loops.

use burn_blocksparse::layout::TopKOptions;
use burn_sparse_select::{top_k_blocks, top_k_blocks_on_device};

use burn_blocksparse_tests::prelude::*;

fn random(shape: [usize; 4], rng: &mut ChaCha8Rng) -> Vec<f64> {
    let numbers = drawn(rng, shape.iter().product(), -1.0f32..1.0);
    numbers.into_iter().map(f64::from).collect()
}

/// Returns the mean of rows `from..to` of a head.
fn mean(x: &[f64], [_, heads, seq, dim]: [usize; 4], at: [usize; 2], rows: [usize; 2]) -> Vec<f64> {
    let first = (at[0] * heads + at[1]) * seq;
    let end = rows[1].min(seq);
    (0..dim)
        .map(|c| {
            let sum: f64 = (rows[0]..end).map(|row| x[(first + row) * dim + c]).sum();
            sum / (end - rows[0]) as f64
        })
        .collect()
}

/// Causal and not, with all kinds of forced blocks, and different sizes.
#[test]
fn keeps_the_highest_scores() {
    for (options, seq) in [
        (TopKOptions::new(8, 5), [70, 70]),
        (TopKOptions::new(8, 4).first(2).local(1), [64, 64]),
        (TopKOptions::new(16, 2).local(0).first(0), [90, 90]),
        (TopKOptions::new(8, 4).causal(false), [70, 50]),
        (TopKOptions::new(8, 2).local(4), [70, 70]),
        (TopKOptions::new(8, 5).local(3), [21, 75]),
        (TopKOptions::new(8, 2).first(0).local(1), [75, 21]),
        (TopKOptions::new(8, 2).local(usize::MAX), [50, 50]),
        (TopKOptions::new(16, 100), [50, 50]),
    ] {
        check(&options, seq);
    }
}

fn check(options: &TopKOptions, seq: [usize; 2]) {
    let [seq_q, seq_kv] = seq;
    let (q_shape, k_shape) = ([2, 4, seq_q, 6], [2, 2, seq_kv, 6]);
    let mut rng = seeded(3);
    let (q, k) = (random(q_shape, &mut rng), random(k_shape, &mut rng));
    let b = options.block_size;
    let offset = seq_kv as i64 - seq_q as i64;
    for device in devices() {
        let tensor = |x: &[f64], shape| tensor(x, shape, &device, DType::F32);
        let (q_tensor, k_tensor) = (tensor(&q, q_shape), tensor(&k, k_shape));
        let layout = top_k_blocks(q_tensor, k_tensor, options.clone()).unwrap();
        assert_eq!(layout.batch(), Some(2));
        for (entry, head) in (0..2).flat_map(|entry| (0..4).map(move |head| (entry, head))) {
            let allowed = layout.to_dense_batch(entry, head);
            for q_block in 0..seq_q.div_ceil(b) {
                let (first, end) = (q_block * b, (q_block * b + b).min(seq_q));
                let q_mean = mean(&q, q_shape, [entry, head], [first, end]);
                let last = end as i64 - 1 + offset;
                let mut candidates: Vec<(bool, f64, usize)> = (0..seq_kv.div_ceil(b))
                    .filter(|kv_block| !options.causal || (kv_block * b) as i64 <= last)
                    .map(|kv_block| {
                        let keys = [kv_block * b, kv_block * b + b];
                        let k_mean = mean(&k, k_shape, [entry, head / 2], keys);
                        let score = q_mean.iter().zip(k_mean).map(|(x, y)| x * y).sum();
                        let near = (first..end).any(|i| {
                            let own = (i as i64 + offset).div_euclid(b as i64);
                            let behind = usize::try_from(own - kv_block as i64);
                            behind.is_ok_and(|behind| behind < options.local)
                        });
                        let forced = kv_block < options.first || near;
                        (forced, score, kv_block)
                    })
                    .collect();
                candidates.sort_by(|x, y| y.0.cmp(&x.0).then(y.1.total_cmp(&x.1)));
                let forced = candidates.iter().filter(|c| c.0).count();
                let kept = options.k.max(forced);
                for (rank, (_, _, kv_block)) in candidates.into_iter().enumerate() {
                    for (i, line) in allowed.iter().enumerate().take(end).skip(first) {
                        for (j, &on) in line.iter().enumerate().skip(kv_block * b).take(b) {
                            let seen = !options.causal || j as i64 <= i as i64 + offset;
                            let what =
                                format!("{device:?}, {options:?}, {entry}, {head}, ({i}, {j})");
                            assert_eq!(on, rank < kept && seen, "{what}");
                        }
                    }
                }
            }
            let pairs = allowed.iter().flatten().filter(|&&on| on).count();
            assert!(pairs > 0, "{device:?}: nothing is kept");
        }
    }
}

#[test]
fn errors() {
    for device in &devices() {
        let of = TopKOptions::new;
        let call =
            |k, options| top_k_blocks(zeros([2, 4, 30, 4], device), zeros(k, device), options);
        refused! {
            call([2, 3, 30, 4], of(8, 2)) => "k's kv_heads must be a divisor of the 4 heads of q, got 3";
            call([1, 2, 30, 4], of(8, 2)) => "k's batch must be 2, q's, got 1";
            call([2, 2, 30, 5], of(8, 2)) => "k's head_dim must be 4, q's, got 5";
            call([2, 2, 30, 4], of(8, 0)) => "options.k must be at least 1, got 0";
            call([2, 2, 30, 4], of(7, 2)) => "block_size must be 8, 16, 32, 64 or 128, got 7";
        }
    }
}

/// The straight-through term in the documentation of `top_k_blocks_on_device`: it adds nothing to the output, and adds the gradient of its coarse
/// attention to that of the selected blocks, even for keys that were not selected.
#[test]
fn straight_through_terms_teach_what_was_not_chosen() {
    const B: usize = 16;
    const N: usize = 128;
    let shape = [1, 2, N, 8];
    let mut rng = seeded(9);
    let values = [(); 3].map(|_| random(shape, &mut rng));
    let options = AttentionOptions::default();
    let ended = Pattern::from_fn("blocks that have ended", |_head, i, block| {
        (block + 1) * B as i64 <= i + (N - N / B) as i64 + 1
    });
    let coarse_shape = LayoutShape::new(2, [N, N / B], 8);
    let ended = BlockLayout::new(&ended, coarse_shape).unwrap();
    let dense = ended.to_dense(0);
    let seen = dense.iter().map(|row| row.iter().filter(|&&on| on).count());
    assert!(seen.eq((0..N).map(|i| (i + 1) / B)));
    let means = |x: Tensor<4>| {
        let blocks = x.reshape([2, N / B, B, 8]).mean_dim(2);
        blocks.reshape([1, 2, N / B, 8])
    };
    for device in devices() {
        let device = device.autodiff();
        // Gradients with respect to the keys, of a loss of the last block of queries.
        let run = |exact: bool, straight_through: bool| {
            let [q, k, v] =
                (values.each_ref()).map(|x| tensor(x, shape, &device, DType::F32).require_grad());
            let choice = TopKOptions::new(B, 3);
            let layout = top_k_blocks_on_device(q.clone(), k.clone(), choice).unwrap();
            let mut out = attend([&q, &k, &v], &layout, &options);
            if straight_through {
                let coarse = attend([&q, &means(k.clone()), &means(v)], &ended, &options);
                let term = coarse.clone() - coarse.clone().detach();
                out = if exact { out + term } else { coarse };
            }
            let last = out.clone().slice([0..1, 0..2, N - B..N, 0..8]);
            let gradients = last.sum().backward();
            (out.into_data(), k.grad(&gradients).unwrap())
        };
        let (out, of_chosen) = run(true, false);
        let (with_term, of_both) = run(true, true);
        let (_, of_coarse) = run(false, true);
        assert_eq!(out, with_term, "{device:?}");
        // The last row of blocks selects the first block, its own and the one before it.
        let not_chosen = |k: Tensor<4>| {
            let keys = k.slice([0..1, 0..2, B..N - 2 * B, 0..8]);
            keys.abs().max().into_scalar::<f32>()
        };
        assert_eq!(not_chosen(of_chosen.clone()), 0.0, "{device:?}");
        assert!(not_chosen(of_both.clone()) > 1e-6, "{device:?}");
        let rest = (of_both - of_chosen - of_coarse).abs().max();
        assert!(rest.into_scalar::<f32>() < 1e-6, "{device:?}");
    }
}
