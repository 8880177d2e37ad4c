//! The second check of a random case: an operation besides attention, on the case's pattern and sizes.

use burn_blocksparse::merge_attention;
use burn_sparse_select::vertical_slash_layout;

use crate::attention::attention_sums;
use crate::attention::cases::Case;
use crate::attention::operators::Setup;
use crate::attention::options::with_weights;
use crate::device_layout::chosen::check_random;
use crate::fuzz::attention::{Fuzz, chance, pattern, pick};
use crate::prelude::*;

/// Runs the check that the seed selects.
pub fn more(fuzz: &Fuzz, device: &Device) {
    let rng = &mut seeded(fuzz.seed ^ 0x005e_c00d);
    match rng.random_range(0..8) {
        0 => attention_sums_of(fuzz, rng, device),
        1 => operators_of(fuzz, rng, device),
        2 => weights_of(fuzz, device),
        3 => stacked(fuzz, rng, device),
        4 => merged(fuzz, rng, device),
        5 => check_random(rng, device),
        6 => vertical_slash(fuzz, rng, device),
        // Attention alone.
        _ => {}
    }
}

/// Returns the case's dtype if it is exact, else the first exact one, and the tolerance.
fn exact(fuzz: &Fuzz, device: &Device) -> (DType, f64) {
    let exact = exact_dtypes(device);
    let own = exact.iter().find(|(dtype, _)| *dtype == fuzz.dtype);
    *own.unwrap_or(&exact[0])
}

/// Sums over columns and diagonals of some queries' weights; inputs are rounded in half precision.
fn attention_sums_of(fuzz: &Fuzz, rng: &mut impl Rng, device: &Device) {
    let extras = fuzz.extras.without_dropout();
    let mut problem = extras.apply(fuzz.seed, fuzz.problem());
    problem.round_to(fuzz.dtype);
    let first = rng.random_range(0..fuzz.case.seq_q);
    let end = rng.random_range(first + 1..=fuzz.case.seq_q);
    let call = attention_sums::Call {
        what: "attention sums".into(),
        problem: &problem,
        layout: fuzz.layout(),
        queries: chance(rng, 2).then_some(first..end),
    };
    let tolerance = if fuzz.dtype == DType::F64 {
        1e-12
    } else {
        1e-5
    };
    call.check(device, fuzz.dtype, tolerance);
}

/// nt, nn, tn and softmax, and their gradients.
fn operators_of(fuzz: &Fuzz, rng: &mut impl Rng, device: &Device) {
    let sizes = [
        fuzz.case.batch,
        fuzz.case.kv_heads,
        rng.random_range(1..=fuzz.case.head_dim.min(20)),
    ];
    let setup = Setup::new("operators", &fuzz.layout(), sizes, fuzz.seed);
    if setup.has_blocks() {
        setup.check(device);
    }
}

/// The weights of a call with the case's options.
fn weights_of(fuzz: &Fuzz, device: &Device) {
    let (dtype, tolerance) = exact(fuzz, device);
    let problem = fuzz.extras.apply(fuzz.seed, fuzz.problem());
    let got = with_weights(&problem, &fuzz.layout(), device, dtype);
    let bounds = [Near::Terms(tolerance), Near::Rows(dtype)];
    problem.solve().assert("weights", got, &bounds);
}

/// Makes a problem with a pattern per batch entry.
fn problem_of(case: &Case, seed: u64, patterns: Vec<Pattern>) -> Problem {
    let offset = case.seq_kv as i64 - case.seq_q as i64;
    let problem = Problem::random(case.sizes(), seed, move |batch, head, i, j| {
        let pattern = &patterns[batch % patterns.len()];
        pattern.attends(head, i as i64 + offset, j as i64)
    });
    problem.options(case.scale, case.softcap)
}

/// Batch entries with different patterns.
fn stacked(fuzz: &Fuzz, rng: &mut impl Rng, device: &Device) {
    let case = Case {
        batch: rng.random_range(2..4),
        ..fuzz.case.clone()
    };
    let patterns: Vec<Pattern> = (0..case.batch)
        .map(|_| pattern(rng, case.heads, case.seq_kv, 1))
        .collect();
    let shape = *case.layout().shape();
    let layouts: Vec<BlockLayout> = (patterns.iter())
        .map(|pattern| BlockLayout::new(pattern, shape).unwrap())
        .collect();
    let problem = problem_of(&case, fuzz.seed, patterns);
    let layout = BlockLayout::stack_batch(&layouts).unwrap();
    check(problem, layout, "stacked", fuzz, device);
}

/// Checks outputs and gradients of a call in the case's dtype, with the case's options.
fn check(problem: Problem, layout: BlockLayout, name: &str, fuzz: &Fuzz, device: &Device) {
    let mut problem = fuzz.extras.apply(fuzz.seed, problem);
    problem.round_to(fuzz.dtype);
    let tolerance = match fuzz.dtype {
        DType::F32 => 1e-5,
        DType::F64 => 1e-12,
        dtype => half_tolerance(dtype),
    };
    let call = Call::new(name, &problem, layout).weights(fuzz.mode);
    let got = call.run(device, fuzz.dtype);
    let bounds = [Near::Terms(tolerance), Near::Rows(fuzz.dtype)];
    problem.solve().assert(name, got, &bounds);
}

/// The pattern split into two disjoint parts, merged.
fn merged(fuzz: &Fuzz, rng: &mut impl Rng, device: &Device) {
    let case = &fuzz.case;
    let (modulo, width) = (rng.random_range(2..9), rng.random_range(0..60));
    let near = chance(rng, 2);
    let first = move |i: i64, j: i64| match near {
        true => i - j < width,
        false => j.rem_euclid(modulo) == 0,
    };
    let part = |in_first: bool| {
        let side = Pattern::from_fn(
            format!("{near}, {modulo}, {width}, {in_first}"),
            move |_, i, j| first(i, j) == in_first,
        );
        let pattern = Pattern::intersection([side, case.pattern.clone()]);
        BlockLayout::new(&pattern, *case.layout().shape()).unwrap()
    };
    let problem = problem_of(case, fuzz.seed, vec![case.pattern.clone()]).with_grad_lse(fuzz.seed);
    let (dtype, tolerance) = exact(fuzz, device);
    let got = differentiated(&problem, &device.clone().autodiff(), dtype, |q, k, v| {
        let options = fuzz.case.options().weights(fuzz.mode);
        let [(out_a, lse_a), (out_b, lse_b)] =
            [true, false].map(|in_first| attend_with_lse([&q, &k, &v], &part(in_first), &options));
        merge_attention(out_a, lse_a, out_b, lse_b).unwrap()
    });
    let bounds = [Near::Terms(tolerance), Near::Rows(dtype)];
    problem.solve().assert("merged", got, &bounds);
}

/// Columns and diagonals of each head as tensors.
fn vertical_slash(fuzz: &Fuzz, rng: &mut impl Rng, device: &Device) {
    let case = &fuzz.case;
    let shape = *case.layout().shape();
    let counts = [pick(rng, &[0, 1, 5]), pick(rng, &[1, 4, 9])];
    let numbers = counts.map(|count| -> Vec<Vec<usize>> {
        let mut row = || {
            (0..count)
                .map(|_| rng.random_range(0..case.seq_kv))
                .collect()
        };
        (0..case.heads).map(|_| row()).collect()
    });
    let [vertical, slash] = [0, 1].map(|side| {
        let values: Vec<i32> = numbers[side].concat().iter().map(|&x| x as i32).collect();
        let data = TensorData::new(values, [case.heads, counts[side]]);
        Tensor::<2, Int>::from_data(data, device)
    });
    let layout = vertical_slash_layout(vertical, slash, shape).unwrap();
    let heads = numbers[0].iter().zip(&numbers[1]);
    let pattern =
        Pattern::per_head(heads.map(|(v, s)| Pattern::vertical_slash(v.clone(), s.clone())));
    let problem = problem_of(case, fuzz.seed, vec![pattern]);
    check(problem, layout, "vertical-slash", fuzz, device);
}
