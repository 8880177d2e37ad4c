//! Selection on planted structure: how much of full attention each method keeps, against numbers that were computed elsewhere.

use burn::module::Param;
use burn::tensor::{DType, Device, Tensor};
use burn_sparse_select::{
    BlockEstimator, Budget, EstimateKind, FlexPrefill, MeanPool, VerticalSlash, XAttention,
};
use burn_sparse_transformer::content::{LshOptions, RoutingHeadsConfig, lsh_attention};

use burn_blocksparse_tests::judge::estimate::Estimate;
use burn_blocksparse_tests::judge::planted::{BLOCK, DIM, HEADS, ROWS, mix, structures, uniform};
use burn_blocksparse_tests::judge::recall::{Attention, kept, square_grid};
use burn_blocksparse_tests::prelude::{dot, read_ints, tensor, to_f64};

/// A recall is printed of four digits, a density of three.
fn assert_printed(what: &str, got: f64, printed: f64) {
    let tolerance = if what.contains("density") { 1e-3 } else { 5e-4 };
    let is_near = (got - printed).abs() < tolerance;
    assert!(is_near, "{what}: {got}, {printed}");
}

/// The table's columns, of both heads: recalls, or densities.
type Columns = [[f64; 2]; 3];

const ORACLE: Columns = [[0.8136, 0.8126], [0.8647, 0.7628], [0.6898, 0.6859]];
const MEANS: Columns = [[0.8125, 0.8116], [0.7591, 0.7622], [0.6509, 0.6691]];
const CONTROL: Columns = [[0.3305, 0.3313], [0.1683, 0.2525], [0.4957, 0.4949]];
const LINES: Columns = [[0.1498, 0.1488], [0.2138, 0.3623], [0.6498, 0.6475]];
const LINE_DENSITY: Columns = [[0.064, 0.064], [0.065, 0.076], [0.039, 0.040]];
const DIVERGENCE: Columns = [[0.0935, 0.0947], [0.5073, 0.3286], [0.2952, 0.2832]];
const ANTIDIAGONALS: [(usize, f64, Columns, Columns); 3] = [
    (
        8,
        0.9,
        [[0.9570, 0.9562], [0.9869, 0.9768], [0.9667, 0.9665]],
        [[0.355, 0.355], [0.927, 0.927], [0.906, 0.906]],
    ),
    (
        16,
        0.9,
        [[0.9570, 0.9562], [0.9869, 0.9768], [0.9644, 0.9639]],
        [[0.355, 0.355], [0.927, 0.927], [0.917, 0.917]],
    ),
    (
        8,
        0.8,
        [[0.9526, 0.9521], [0.9659, 0.9428], [0.9198, 0.9199]],
        [[0.334, 0.334], [0.813, 0.823], [0.781, 0.781]],
    ),
];

/// Scores and attention of one head.
struct Head<'a> {
    what: String,
    column: usize,
    head: usize,
    attention: &'a Attention,
}

impl Head<'_> {
    fn check(&self, method: &str, got: f64, expected: &Columns) {
        let what = format!("{}, {method}", self.what);
        assert_printed(&what, got, expected[self.column][self.head]);
    }

    /// Recall and density of the blocks that a rule keeps, the first and the own one forced.
    fn recall(&self, scores: &[f64], kind: EstimateKind, keep: Budget) -> [f64; 2] {
        let grid = square_grid(BLOCK, ROWS);
        let numbers = grid.rows() * grid.blocks();
        let scores = match scores.len() == numbers {
            true => scores,
            false => &scores[self.head * numbers..][..numbers],
        };
        let kept = kept(&grid, scores, kind, keep, [1, 1]);
        self.attention.recall_of_blocks(&kept, BLOCK)
    }
}

#[test]
fn planted_structure_is_found() {
    assert_eq!(mix(1), 1_364_076_727);
    assert!((uniform(1, 0, 5, 7) - 0.282853).abs() < 5e-7);
    let grid = square_grid(BLOCK, ROWS);
    for (column, (name, q, k)) in structures().into_iter().enumerate() {
        let dense = Estimate::of([HEADS, 1, ROWS, DIM], 0.125, q, k);
        let call = dense.entry(0);
        let means = MeanPool { block: BLOCK }.reference(&call);
        let sums = ANTIDIAGONALS.map(|(stride, ..)| {
            let block = BLOCK;
            XAttention { block, stride }.reference(&call)
        });
        let lines = VerticalSlash::new(BLOCK, 32, 32).sinks(4).window(8);
        let flex = FlexPrefill {
            block: BLOCK,
            gamma: 0.9,
            threshold: 0.1,
            min_budget: 0,
        };
        for head in 0..HEADS {
            let attention = dense.attention(head, ROWS / 2);
            let of = Head {
                what: format!("{name}, head {head}"),
                column,
                head,
                attention: &attention,
            };
            let attention_sums = attention.attention_sums(&grid);
            let [oracle, density] =
                of.recall(&attention_sums, EstimateKind::Probability, Budget::TopK(4));
            of.check("oracle", oracle, &ORACLE);
            of.check("density of four blocks", density, &[[0.292; 2]; 3]);
            let [recall, _] = of.recall(&means, EstimateKind::Logit, Budget::TopK(4));
            of.check("means", recall, &MEANS);
            let [control, _] = attention.recall(|i, j| {
                let behind = i / BLOCK - j / BLOCK;
                j < BLOCK || behind < 3
            });
            of.check("control", control, &CONTROL);
            for (sums, (stride, p, recalls, densities)) in sums.iter().zip(&ANTIDIAGONALS) {
                let [recall, density] =
                    of.recall(sums, EstimateKind::Probability, Budget::top_p(*p));
                of.check(&format!("antidiagonals {stride}, {p}"), recall, recalls);
                of.check(&format!("density {stride}, {p}"), density, densities);
            }
            let [columns, distances] = lines.lines_reference(&call, head);
            let [recall, density] = attention.recall(|i, j| columns[j] || distances[i - j]);
            of.check("vertical-slash", recall, &LINES);
            of.check("density of vertical-slash", density, &LINE_DENSITY);
            let divergence = flex.head_reference(&call, head).divergence;
            of.check("√JS", divergence, &DIVERGENCE);
        }
    }
}

fn unit(x: &[f64]) -> Vec<f64> {
    let length = dot(x, x).sqrt();
    x.iter().map(|x| x / length).collect()
}

/// Rows `[1, 1, rows, dim]`.
fn head(x: &[f64], device: &Device) -> Tensor<4> {
    tensor(x, [1, 1, ROWS, DIM], device, DType::F32)
}

#[test]
fn hashes_find_topics() {
    let device = Device::flex();
    let [(_, _, k), ..] = structures();
    // Keys have norm 1 and scores a factor of 1/8: queries of norm 16 have a factor of 2.
    let long: Vec<f64> = k.iter().map(|x| 16.0 * x).collect();
    let qk = head(&long, &device);
    let k: Vec<&[f64]> = k.chunks(DIM).collect();
    let keys: Vec<Vec<f64>> = k.iter().map(|k| unit(k)).collect();
    let full = |i: usize| {
        let weights = (0..i).map(|j| (2.0 * dot(k[i], &keys[j])).exp());
        weights.sum::<f64>().ln()
    };
    let full: Vec<f64> = (0..ROWS).map(full).collect();
    for (rounds, expected) in [(1, 0.2148), (2, 0.4402), (4, 0.6974), (8, 0.8921)] {
        let rotations: Vec<f64> = (0..rounds * DIM * 8)
            .map(|at| uniform(6, at / (DIM * 8), at / 8 % DIM, at % 8))
            .collect();
        let rotations = tensor(&rotations, [rounds, DIM, 8], &device, DType::F32);
        let options = LshOptions::new(BLOCK.try_into().unwrap()).dedup(true);
        let (_, lse) = lsh_attention(qk.clone(), qk.clone(), rotations, options).unwrap();
        let lse = to_f64(lse.into_data());
        let counted = ROWS / 2..ROWS;
        let recall: f64 = counted.map(|i| (lse[i] - full[i]).exp()).sum();
        assert_printed(
            &format!("hashes, {rounds}"),
            recall / (ROWS / 2) as f64,
            expected,
        );
    }
}

/// Ten iterations of k-means are ten updates in which nothing of a mean stays.
#[test]
fn clusters_find_topics() {
    let device = Device::flex().autodiff();
    let [(_, q, k), ..] = structures();
    let dense = Estimate::of([HEADS, 1, ROWS, DIM], 0.125, q.clone(), k.clone());
    let k = head(&k, &device);
    for (of, expected, expected_density) in [(0, 0.8128, 0.244), (1, 0.8010, 0.251)] {
        let q = &q[of * ROWS * DIM..][..ROWS * DIM];
        let config = RoutingHeadsConfig::new(256).with_means_decay(0.0);
        let mut routing = config.init(1, DIM, ROWS, &device);
        let first: Vec<f64> = [0, 64, 128, 256]
            .iter()
            .flat_map(|&i| unit(&q[i * DIM..][..DIM]))
            .collect();
        let first = tensor(&first, [1, 4, DIM], &device, DType::F32);
        routing.means = Param::from_tensor(first).set_require_grad(false);
        let q = head(q, &device);
        for _ in 0..10 {
            let value = k.clone().slice_dim(3, 0..1);
            routing.forward_unshared(q.clone(), k.clone(), value);
            routing.ema_update();
        }
        // Whether each token is in each cluster.
        let members = |x: &Tensor<4>| {
            let tokens = read_ints(routing.clusters(x.clone()).unwrap());
            let mut members = vec![[false; 4]; ROWS];
            for (place, token) in tokens.into_iter().enumerate() {
                members[token as usize][place / 256] = true;
            }
            members
        };
        let [of_queries, of_keys] = [&q, &k].map(members);
        let is_seen = |i: usize, j: usize| (0..4).any(|c| of_queries[i][c] && of_keys[j][c]);
        let [recall, density] = dense.attention(of, ROWS / 2).recall(is_seen);
        assert_printed(&format!("clusters, {of}"), recall, expected);
        assert_printed(&format!("density, {of}"), density, expected_density);
    }
}
