//! Blocks that single queries select, the lists of queries per block, and the gather and scatter of queries.

use std::ops::Range;

use burn_sparse_select::{
    Always, BlockEstimator, Budget, EstimateGrid, EstimateInputs, EstimatorTraits, GqaReduction,
    Moba, ReferenceInputs, Rule, Selection, attention_selected,
};

use crate::judge::estimate::Estimate;
use crate::judge::golden::vals;
use crate::judge::moba::{CASE, Case, choices};
use crate::prelude::*;

/// Checks that the lists of queries on a device match the selections.
pub fn check_lists(
    case: &Case,
    problem: &Problem,
    chosen: &[Vec<usize>],
    selection: &Selection,
    device: &Device,
) {
    let [q, k, ..] = inputs(problem, device, DType::F32);
    let lists = selection.query_lists(&EstimateInputs::new(q, k)).unwrap();
    let what = format!("{}, {device:?}", case.name);
    let most = chosen.iter().map(Vec::len).max().unwrap();
    let Some(lists) = lists else {
        assert_eq!(most, 0, "{what}");
        return;
    };
    assert_eq!(lists.blocks.dtype(), DType::I32, "{what}");
    let [blocks, places] = [lists.blocks, lists.places].map(read_ints);
    let (choices, queries) = (read_ints(lists.choices), read_ints(lists.queries));
    let tile_blocks = read_ints(lists.tile_blocks);
    let rows = problem.sizes.seq_q;
    let heads = chosen.len() / rows;
    let (length, tiles) = (choices.len() / heads, tile_blocks.len() / heads);
    for head in 0..heads {
        let chosen = &chosen[head * rows..][..rows];
        let blocks = blocks[head * rows * most..][..rows * most].chunks(most);
        let blocks: Vec<Vec<usize>> = blocks.map(named).collect();
        assert_eq!(blocks, chosen, "{what}, head {head}");
        // The queries of each block, in order, padded to whole tiles.
        let (mut expected, mut expected_tiles) = (Vec::new(), Vec::new());
        for block in 0..case.seq[1].div_ceil(case.block) {
            let list = (0..rows).filter(|&query| chosen[query].contains(&block));
            expected.extend(list.map(|query| query as i32));
            while expected.len() % lists.tile > 0 {
                expected.push(-1);
            }
            expected_tiles.resize(expected.len() / lists.tile, block as i32);
        }
        expected.resize(length, -1);
        expected_tiles.resize(tiles, -1);
        assert_eq!(queries[head * length..][..length], expected, "{what}");
        let got = &tile_blocks[head * tiles..][..tiles];
        assert_eq!(got, expected_tiles, "{what}");
        // `places` and `choices` are inverse index lists.
        let places = &places[head * rows * most..][..rows * most];
        let choices = &choices[head * length..][..length];
        for (choice, &place) in places.iter().enumerate() {
            let has_one = choice % most < chosen[choice / most].len();
            assert_eq!(place >= 0, has_one, "{what}, choice {choice}");
            if has_one {
                assert_eq!(choices[place as usize], choice as i32, "{what}");
            }
        }
        let used = choices.iter().filter(|&&choice| choice >= 0).count();
        assert_eq!(used, chosen.iter().map(Vec::len).sum::<usize>(), "{what}");
    }
}

/// An estimator with fixed scores, `[rows][blocks]` for all heads.
#[derive(Clone, Debug)]
struct Given {
    inner: Moba,
    scores: Vec<f32>,
}

impl BlockEstimator for Given {
    fn text(&self, _rule: &Rule, _sharing: GqaReduction) -> String {
        "given".to_owned()
    }

    fn grid(&self) -> EstimateGrid {
        self.inner.grid()
    }

    fn traits(&self) -> EstimatorTraits {
        self.inner.traits()
    }

    fn scores(&self, call: &EstimateInputs, rows: Range<usize>) -> Result<Tensor<4>, OpError> {
        let device = call.q.device();
        assert!(!device.is_autodiff() && !call.k.device().is_autodiff());
        let [batch, heads, seq_q, _] = call.q.dims();
        let blocks = self.scores.len() / seq_q;
        let scores = floats(&self.scores, [1, 1, seq_q, blocks], &device);
        let scores = scores.slice_dim(2, rows.clone());
        Ok(scores.expand([batch, heads, rows.len(), blocks]))
    }

    fn reference(&self, call: &ReferenceInputs) -> Vec<f64> {
        let scores = self.scores.iter().map(|&score| f64::from(score));
        let scores: Vec<f64> = scores.collect();
        scores.repeat(call.heads)
    }
}

/// Ties, zeros of both signs, infinities and NaN: devices keep the blocks that the rule keeps on the host.
pub fn chosen_blocks_of_any_scores(devices: &[Device]) {
    let (seq, block) = (75usize, 8usize);
    let mut rng = seeded(8600);
    let inner = Moba {
        block,
        full_last_layers: 0,
    };
    let forced = |first, local| Always { first, local };
    let forced = [forced(0, 1), forced(2, 1), forced(1, 3), forced(40, 50)];
    for (keep, forced) in [2, 4, 20].into_iter().flat_map(|k| forced.map(|f| (k, f))) {
        let blocks = seq.div_ceil(block);
        let scores = (0..seq * blocks).map(|_| ODD[rng.random_range(0..ODD.len())]);
        let scores: Vec<f32> = scores.collect();
        let given = Given { inner, scores };
        let selection = Selection::new(given.clone(), Budget::TopK(keep)).with_always(forced);
        for device in devices {
            let device = device.clone().autodiff();
            let x = Tensor::<4>::zeros([1, 2, seq, 4], (&device, DType::F32)).require_grad();
            let call = EstimateInputs::new(x.clone(), x.clone());
            let grid = call.grid(given.grid());
            // Without lists if all kept blocks are forced.
            let lists = selection.query_lists(&call).unwrap();
            assert_eq!(lists.is_none(), keep <= forced.first + forced.local);
            let (most, got) = match lists {
                None => (1, vec![-1; 2 * seq]),
                Some(lists) => {
                    let most = lists.blocks.dims()[3];
                    (most, read(lists.blocks).to_vec().unwrap())
                }
            };
            let got: Vec<i32> = got;
            for (row, got) in got.chunks(most).enumerate() {
                let row = row % seq;
                let scores = &given.scores[row * blocks..][..blocks];
                let scores: Vec<f64> = scores.iter().map(|&x| f64::from(x)).collect();
                let kept = selection.rule().selects(&grid, row, &scores);
                let mut got = named(got);
                got.extend((0..blocks).filter(|&block| grid.is_forced(row, block, forced)));
                got.sort_unstable();
                let expected: Vec<usize> = (0..blocks).filter(|&block| kept[block]).collect();
                let what = format!("{device:?}, k = {keep}, {forced:?}, row {row}");
                assert_eq!(got, expected, "{what}");
            }
            // No gradient reaches the scores, though the estimator's inputs are tracked too.
            let (k, v, options) = (x.clone(), x.clone(), AttentionOptions::default());
            let out = attention_selected(x.clone(), k, v, &selection, options);
            let grads = out.unwrap().sum().backward();
            assert!(x.grad(&grads).is_some());
        }
    }
}

/// Scores are made in several slabs.
pub fn chosen_blocks_in_several_slabs(devices: &[Device]) {
    let case = CASE.with("batch 1, heads 32 1, seq 2100 2100, dims 4 4, block 8, keep 2");
    // Blocks whose first channel grows with their index, so that queries select the first or the last.
    let mut drawn = Problem::random(case.sizes(), 8700, |_, _, _, _| false);
    for (at, k) in drawn.k.iter_mut().enumerate() {
        *k = match at % 4 {
            0 => (at / 4 / 8) as f64 - 100.0,
            _ => 0.0,
        };
    }
    drawn.q.iter_mut().step_by(4).for_each(|q| *q = q.signum());
    let (chosen, least) = choices(&drawn, &case);
    assert!(least >= 1.0);
    for device in devices {
        check_lists(&case, &drawn, &chosen, &case.selection(), device);
    }
}

/// The definition's example, 16 tokens in blocks of 4.
pub fn moba_golden(_: &[Device]) {
    let gates = [
        [-0.4609, -0.8555, -0.0977, 0.3750],
        [0.4688, 0.0352, -0.2461, -0.3750],
        [0.0586, 0.3672, -0.4805, 0.2109],
        [0.1953, 0.8594, 0.5469, -0.2930],
        [-0.3242, -0.2539, 0.2852, 1.2031],
        [-0.3828, -0.6211, 0.7656, 0.9922],
        [0.1953, 0.9688, -0.0977, -1.0273],
        [-0.1172, -0.5156, -0.3281, 0.1758],
    ];
    let past = [
        [0, 0, 0, 0, 1, 1, 1, 0, 2, 0, 1, 1],
        [0, 0, 0, 0, 0, 1, 0, 1, 2, 2, 1, 0],
    ];
    let row_15 = [
        [0.1363, -0.0195, -0.0450, -0.2627],
        [-0.4412, -0.1657, 0.2462, -0.0937],
    ];
    let recalls = [0.5510, 0.6291];
    let estimator = Moba {
        block: 4,
        full_last_layers: 0,
    };
    let sizes = Sizes::new([1, 2, 1], [16; 2], [4; 2]);
    let dense = Estimate::of([2, 1, 16, 4], 0.5, vals(0, 2, 16), vals(1, 1, 16));
    let scores = estimator.reference(&dense.entry(0));
    for (row, gates) in gates.iter().enumerate() {
        let at = (row / 4 * 16 + 12 + row % 4) * 4;
        assert_printed(&format!("gates {row}"), &scores[at..][..4], gates);
    }
    let problem = |allowed: Box<dyn Fn(usize, usize, usize, usize) -> bool>| {
        let mut problem = Problem::random(sizes, 0, allowed);
        let [q, k, v] = [(0, 2), (1, 1), (2, 1)].map(|(of, heads)| vals(of, heads, 16));
        (problem.q, problem.k, problem.v) = (q, k, v);
        problem
    };
    let all = problem(Box::new(|_, _, i, j| j <= i));
    let (chosen, _) = choices(&all, &CASE.with("block 4, keep 2"));
    for (head, past) in past.iter().enumerate() {
        for (i, past) in (4..).zip(past) {
            assert_eq!(chosen[head * 16 + i], [*past], "head {head}, {i}");
        }
    }
    let is_kept = |chosen: &[Vec<usize>], head: usize, i: usize, j: usize| {
        j <= i && (i / 4 == j / 4 || chosen[head * 16 + i].contains(&(j / 4)))
    };
    for (head, printed) in recalls.iter().enumerate() {
        let recall = dense.attention(head, 8);
        let recall = recall.recall(|i, j| is_kept(&chosen, head, i, j));
        assert_printed("recall", &[recall], &[*printed]);
    }
    let kept = problem(Box::new(move |_, head, i, j| is_kept(&chosen, head, i, j)));
    let out = kept.options(Some(0.5), None).solve().out;
    for (head, printed) in row_15.iter().enumerate() {
        assert_printed("row 15", &out[(head * 16 + 15) * 4..][..4], printed);
    }
}
