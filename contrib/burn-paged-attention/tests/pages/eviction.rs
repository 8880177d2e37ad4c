//! Keys that eviction retains: worked examples, with attention computed here in f64.

use burn_paged_attention::pages::{
    EvictionBudget, EvictionConfig, EvictionScore, ScoreSmoothing, adaptive, best, pooled_votes,
    pyramid_budgets,
};
use rstest::rstest;

const N: usize = 10;

/// Returns an element that is exact in every float dtype: of queries (0) or keys (1).
fn val(a: usize, h: usize, i: usize, c: usize) -> f64 {
    let number = 131 * a + 61 * h + 31 * i + 17 * c + 5 * i * c + 7 * i * i;
    ((number % 23) as f64 - 11.0) / 8.0
}

/// Returns the attention of query `i` of a head to some keys of KV head 0.
fn row(head: usize, i: usize, keys: &[usize]) -> Vec<f64> {
    let score = |&j: &usize| {
        let products = (0..4).map(|c| val(0, head, i, c) * val(1, 0, j, c));
        0.5 * products.sum::<f64>()
    };
    let scores: Vec<f64> = keys.iter().map(score).collect();
    let total: f64 = scores.iter().map(|score| score.exp()).sum();
    scores.iter().map(|score| score.exp() / total).collect()
}

fn dense(head: usize, i: usize) -> Vec<f64> {
    row(head, i, &(0..=i).collect::<Vec<_>>())
}

/// Returns the sums over both heads and the last `rows` queries.
fn columns(rows: usize) -> Vec<f64> {
    let mut sums = vec![0.0; N];
    for head in 0..2 {
        for i in N - rows..N {
            for (sum, p) in sums.iter_mut().zip(dense(head, i)) {
                *sum += p;
            }
        }
    }
    sums
}

fn f32s(numbers: &[f64]) -> Vec<f32> {
    numbers.iter().map(|&number| number as f32).collect()
}

#[track_caller]
fn printed(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() <= 5.001e-5, "{got} {expected}");
    }
}

fn choose(config: EvictionConfig, scores: &[f64]) -> Vec<usize> {
    config.validate().unwrap();
    let scores = f32s(scores);
    let mut kept = config.choose(&[&scores], config.capacity()).unwrap();
    kept.remove(0)
}

#[test]
fn after_a_prompt() {
    let sums = columns(N);
    let kept = choose(EvictionConfig::h2o(3, 2), &sums);
    assert_eq!(kept, [0, 1, 2, 8, 9]);
    let means = sums.iter().enumerate();
    let means = means.map(|(j, sum)| sum / (2 * (N - j)) as f64);
    let kept = choose(EvictionConfig::h2o_mean(3, 2), &means.collect::<Vec<_>>());
    assert_eq!(kept, [0, 1, 2, 8, 9]);

    let last: Vec<f64> = columns(1).iter().map(|p| p / 2.0).collect();
    let kept = choose(EvictionConfig::tova(5), &last);
    assert_eq!(kept, [0, 4, 6, 8, 9]);

    let combined = |score| EvictionConfig::combined(score, 1, 2, 2);
    assert_eq!(choose(combined(EvictionScore::Sum), &sums), [0, 1, 2, 8, 9]);
    let expected = [0, 4, 6, 8, 9];
    assert_eq!(choose(combined(EvictionScore::LastRow), &last), expected);
}

/// Returns the key evicted at each token, with its score; and the retained keys.
fn token_by_token(config: EvictionConfig) -> (Vec<(usize, f64)>, Vec<usize>, Vec<f64>) {
    let (mut keys, mut sums): (Vec<usize>, Vec<f64>) = (vec![], vec![]);
    let mut evicted = Vec::new();
    for t in 0..N {
        keys.push(t);
        sums.push(0.0);
        let rows = [0, 1].map(|head| row(head, t, &keys));
        for at in 0..keys.len() {
            let p = rows[0][at] + rows[1][at];
            match config.score {
                EvictionScore::Sum => sums[at] += p,
                _ => sums[at] = p / 2.0,
            }
        }
        if keys.len() > config.capacity() {
            let kept = choose(config, &sums);
            let gone = (0..keys.len()).filter(|at| !kept.contains(at));
            evicted.extend(gone.map(|at| (keys[at], sums[at])));
            keys = kept.iter().map(|&at| keys[at]).collect();
            sums = kept.iter().map(|&at| sums[at]).collect();
        }
    }
    (evicted, keys, sums)
}

#[rstest]
#[case(EvictionConfig::h2o(3, 2), &[(3, 1.2768), (4, 1.0035), (5, 1.2504), (6, 0.9806), (7, 1.1416)], [0, 1, 2, 8, 9])]
#[case(EvictionConfig::tova(5), &[(2, 0.0955), (4, 0.1123), (0, 0.0798), (1, 0.0947), (5, 0.0860)], [3, 6, 7, 8, 9])]
fn steps(#[case] config: EvictionConfig, #[case] gone: &[(usize, f64)], #[case] kept: [usize; 5]) {
    let (evicted, keys, sums) = token_by_token(config);
    assert_eq!(keys, kept);
    let keys = |pairs: &[(usize, f64)]| pairs.iter().map(|pair| pair.0).collect::<Vec<_>>();
    let scores = |pairs: &[(usize, f64)]| pairs.iter().map(|pair| pair.1).collect::<Vec<_>>();
    assert_eq!(keys(&evicted), keys(gone));
    printed(&scores(&evicted), &scores(gone));
    if config.score == EvictionScore::Sum {
        printed(&sums, &[6.3996, 3.6704, 3.0733, 0.8051, 0.3988]);
    }
}

#[test]
fn votes() {
    let votes: Vec<f64> = columns(3).iter().map(|sum| sum / 6.0).collect();
    let expected = [0.1046, 0.0746, 0.1338, 0.0877, 0.0997, 0.1126, 0.1014];
    printed(&votes[..7], &expected);
    let pooled = pooled_votes(&f32s(&votes[..7]), 3, ScoreSmoothing::Average);
    let pooled: Vec<f64> = pooled.into_iter().map(f64::from).collect();
    let expected = [0.0597, 0.1043, 0.0987, 0.1071, 0.1000, 0.1045, 0.0713];
    printed(&pooled, &expected);
    let snapkv = |pool, kind| choose(EvictionConfig::snapkv_with(6, 3, pool, kind), &votes);
    assert_eq!(snapkv(3, ScoreSmoothing::Average), [1, 3, 5, 7, 8, 9]);
    assert_eq!(snapkv(1, ScoreSmoothing::Average), [0, 2, 5, 7, 8, 9]);
    assert_eq!(snapkv(3, ScoreSmoothing::Max), [1, 2, 3, 7, 8, 9]);
}

#[test]
fn best_ones() {
    assert_eq!(best(&[1.2, 2.0, 0.5, 2.5], 2), [1, 3]);
    assert_eq!(best(&[0.1, 0.9, 0.3, 0.8], 2), [1, 3]);
    // Constant importance: the first two.
    assert_eq!(best(&[4.0, 3.0, 2.0, 1.0], 2), [0, 1]);
    // A window of 3 of 5 keys; 2 recent ones and the best, B.
    let kept = |config: EvictionConfig, scores: &[f32]| {
        let kept = config.choose(&[scores], config.capacity());
        kept.unwrap().remove(0)
    };
    let window = EvictionConfig::combined(EvictionScore::Custom, 0, 2, 1);
    assert_eq!(kept(window, &[0.0, 1.0, 2.0, 3.0, 4.0]), [2, 3, 4]);
    assert_eq!(kept(window, &[0.0, 9.0, 2.0, 3.0, 4.0]), [1, 3, 4]);
    // The negative norm.
    let norms = [1.2f32, 2.0, 0.5, 2.5].map(|norm| -norm);
    assert_eq!(kept(EvictionConfig::key_norm(2), &norms), [0, 2]);

    // Ties go to the later one, and NaN is lowest.
    assert_eq!(best(&[1.0; 4], 2), [2, 3]);
    assert_eq!(best(&[0.0, -0.0, 0.0], 1), [2]);
    assert_eq!(best(&[f32::NAN, f32::NEG_INFINITY, f32::NAN], 2), [1, 2]);
    assert_eq!(best(&[f32::NAN, f32::INFINITY, 3.0], 2), [1, 2]);
    assert_eq!(best(&[1.0, 2.0], 5), [0, 1]);
    assert_eq!(best(&[1.0, 2.0], 0), [0usize; 0]);
    assert_eq!(best(&[], 3), [0usize; 0]);
}

#[test]
fn pyramids() {
    let budgets = pyramid_budgets(6, 128, 32, 20.0, 4096).unwrap();
    assert_eq!(budgets, [219, 183, 146, 110, 73, 37]);
    let budgets = pyramid_budgets(6, 128, 32, 20.0, 200).unwrap();
    assert_eq!(budgets, [200, 171, 142, 114, 85, 56]);
    for layers in 1..9 {
        for capacity in [33, 64, 100, 129] {
            for tokens in [capacity + 1, 150, 1000] {
                let budgets = pyramid_budgets(layers, capacity, 32, 20.0, tokens).unwrap();
                let expected = layers * capacity;
                assert_eq!(budgets.iter().sum::<usize>(), expected, "{budgets:?}");
                assert!(budgets.is_sorted_by(|a, b| a >= b), "{budgets:?}");
                let possible = 32..=tokens.max(capacity);
                assert!(budgets.iter().all(|keys| possible.contains(keys)));
            }
        }
    }
    let config = EvictionConfig::combined(EvictionScore::Sum, 4, 28, 96)
        .with_budget(EvictionBudget::Pyramid { beta: 20.0 });
    let capacities = config.layer_capacities(6, 4096).unwrap();
    assert_eq!(capacities, [219, 183, 146, 110, 73, 37]);
    let uniform = config.with_budget(EvictionBudget::Uniform);
    assert_eq!(uniform.layer_capacities(2, 4096).unwrap(), [128, 128]);
}

#[test]
fn adaptive_heads() {
    let scores: [[f32; 8]; 3] = [
        [0.30, 0.02, 0.01, 0.20, 0.05, 0.02, 0.30, 0.10],
        [0.11, 0.13, 0.12, 0.14, 0.10, 0.15, 0.12, 0.13],
        [0.02, 0.90, 0.01, 0.01, 0.02, 0.01, 0.02, 0.01],
    ];
    let heads: Vec<&[f32]> = scores.iter().map(|scores| &scores[..]).collect();
    let assert_sum = |kept: &[Vec<usize>], expected: f64| {
        let pairs = kept.iter().zip(&scores);
        let of_kept = pairs.flat_map(|(kept, scores)| kept.iter().map(|&at| f64::from(scores[at])));
        let sum: f64 = of_kept.sum();
        assert!((sum - expected).abs() < 5e-3, "{sum}");
    };
    let kept = adaptive(&heads, 4, 0.2).unwrap();
    assert_eq!(kept.iter().map(Vec::len).collect::<Vec<_>>(), [4, 7, 1]);
    assert_sum(&kept, 2.70);
    let uniform: Vec<Vec<usize>> = heads.iter().map(|scores| best(scores, 4)).collect();
    assert_sum(&uniform, 2.41);
    let kept = adaptive(&heads, 4, 0.5).unwrap();
    assert_eq!(kept, [vec![0, 3, 6], vec![0, 1, 2, 3, 5, 6, 7], vec![1, 6]]);

    let config = EvictionConfig::importance(4).with_budget(EvictionBudget::Adaptive { alpha: 0.5 });
    assert_eq!(config.choose(&heads, 4).unwrap(), kept);
    // With no guaranteed share, and with everything guaranteed.
    let sizes = |alpha| {
        let kept = adaptive(&heads, 4, alpha).unwrap();
        kept.iter().map(Vec::len).collect::<Vec<_>>()
    };
    assert_eq!(sizes(0.0).iter().sum::<usize>(), 12);
    assert_eq!(sizes(1.0), [4, 4, 4]);
}

/// All KV heads retain the same keys if the score is the layer's.
#[test]
fn heads() {
    let scores: [&[f32]; 2] = [&[0.5, 0.0, 0.3, 0.2], &[0.0, 0.4, 0.3, 0.3]];
    let config = EvictionConfig::tova(3);
    assert_eq!(config.choose(&scores, 3).unwrap(), [[0, 2, 3], [0, 2, 3]]);
    let each = EvictionConfig::h2o(2, 1);
    assert_eq!(each.choose(&scores, 3).unwrap(), [[0, 2, 3], [1, 2, 3]]);
    // Fewer keys than sinks and recent ones.
    let few = EvictionConfig::combined(EvictionScore::Sum, 2, 3, 1);
    let expected = [[0, 1, 2, 3], [0, 1, 2, 3]];
    assert_eq!(few.choose(&scores, 6).unwrap(), expected);
    refused! { config.choose(&[&[0.1, 0.2], &[0.1]], 3) => "scores must be of 2 keys, as those of the first head, got 1"; }
}

#[test]
fn bad_configurations() {
    refused! {
        EvictionConfig::h2o(0, 5).validate() => "capacity must be at least 6: 0 sinks, 5 recent keys and one for its score, got 5";
        EvictionConfig::tova(1).validate() => "capacity must be at least 2: 0 sinks, 1 recent keys and one for its score, got 1";
        EvictionConfig::snapkv(64).validate() => "window must be below the capacity of 64 keys, got 64";
        EvictionConfig::snapkv_with(64, 0, 5, ScoreSmoothing::Max).validate() => "window must be at least 1, got 0";
        EvictionConfig::snapkv_with(64, 8, 4, ScoreSmoothing::Max).validate() => "pool must be an odd number, got 4";
        EvictionConfig::snapkv_with(64, 8, 0, ScoreSmoothing::Average).validate() => "pool must be an odd number, got 0";
        EvictionConfig::combined(EvictionScore::Votes { window: 8, pool: 1, kind: ScoreSmoothing::Max }, 0, 4, 20).validate() => "recent must be at least the 8 queries that vote, got 4";
        EvictionConfig::key_norm(8).with_budget(EvictionBudget::Pyramid { beta: 1.0 }).validate() => "beta must be a number above 1, got 1";
        EvictionConfig::key_norm(8).with_budget(EvictionBudget::Pyramid { beta: f64::NAN }).validate() => "beta must be a number above 1, got NaN";
        EvictionConfig::key_norm(8).with_budget(EvictionBudget::Adaptive { alpha: 1.5 }).validate() => "alpha must be from 0 to 1, got 1.5";
        EvictionConfig::tova(8).with_budget(EvictionBudget::Adaptive { alpha: 0.5 }).validate() => "budget must be uniform or pyramid: all heads keep the same keys, got adaptive";
        EvictionConfig::key_norm(8).with_slack(usize::MAX).validate() => "capacity must be at most 2147483646 with the slack, got 18446744073709551615";
    }
}

#[test]
fn shares_of_a_prompt() {
    let expected = EvictionConfig::h2o(20, 40);
    assert_eq!(EvictionConfig::h2o_shares(200, 0.1, 0.2).unwrap(), expected);
    for (heavy, recent, message) in [
        (0.0, 0.1, "heavy must be above 0, at most 1, got 0"),
        (0.1, 1.5, "recent must be above 0, at most 1, got 1.5"),
        (f64::NAN, 0.1, "heavy must be above 0, at most 1, got NaN"),
    ] {
        refused! { EvictionConfig::h2o_shares(200, heavy, recent) => message; }
    }
    refused! { pyramid_budgets(4, 32, 32, 20.0, 100) => "capacity must be above the window of 32 keys, got 32"; }
    assert!(pyramid_budgets(4, 64, 32, 0.5, 100).is_err());
    assert!(adaptive(&[], 4, -0.1).is_err());
}

#[test]
fn configurations_as_json() {
    let config = EvictionConfig::snapkv(2048)
        .with_sinks(4)
        .with_budget(EvictionBudget::Pyramid { beta: 20.0 });
    assert_eq!(config.capacity(), 2048);
    let text = serde_json::to_string(&config).unwrap();
    let expected = r#"{"score":{"votes":{"window":64,"pool":5,"kind":"average"}},"sinks":4,"recent":64,"heavy":1980,"slack":256,"budget":{"pyramid":{"beta":20.0}}}"#;
    assert_eq!(text, expected);
    let read: EvictionConfig = serde_json::from_str(&text).unwrap();
    assert_eq!(read, config);
}
