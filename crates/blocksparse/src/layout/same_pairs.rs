//! Checks whether parts make up a layout, without enumerating pairs.
//!
//! A row's pairs are represented as a polynomial, `Σ xʲ` over the positions of its keys. A run of blocks is a geometric series of its mask's row, so a row
//! costs as much as it has runs. The row of a layout and its parts' rows together have the same pairs, each once, exactly if the row's polynomial is the sum of
//! the parts' polynomials. Two different polynomials agree at a random point of a field of 2⁶¹ − 1 elements with probability at most seq / 2⁶¹. Each call draws
//! another point, so no data can be crafted to pass.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};

use super::rows::Run;
use super::{BlockLayout, Part, Residue};
use crate::LayoutError;
use crate::error::ensure_sound;

/// The prime modulus of the field.
const FIELD: u64 = (1 << 61) - 1;

fn add(a: u64, b: u64) -> u64 {
    let sum = a + b;
    if sum >= FIELD { sum - FIELD } else { sum }
}

fn multiply(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    add((product & u128::from(FIELD)) as u64, (product >> 61) as u64)
}

fn power(mut base: u64, mut exponent: u64) -> u64 {
    let mut result = 1;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = multiply(result, base);
        }
        base = multiply(base, base);
        exponent >>= 1;
    }
    result
}

fn inverse(a: u64) -> u64 {
    power(a, FIELD - 2)
}

/// Evaluates the rows of a layout's patterns at a point.
struct Rows<'a> {
    layout: &'a BlockLayout,
    residue: Option<Residue>,
    seq_q: usize,
    /// The point, and the power of it that advances by one column.
    x: u64,
    column: u64,
    /// The value of each row, per mask.
    masks: Vec<Vec<u64>>,
    /// `1 / (q − 1)` of the run ratios q, by stride.
    ratios: HashMap<u32, [u64; 2]>,
}

impl<'a> Rows<'a> {
    fn new(layout: &'a BlockLayout, residue: Option<Residue>, seq_q: usize, x: u64) -> Self {
        let column = power(x, residue.map_or(1, |residue| residue.stride as u64));
        let b = layout.block_size();
        let masks = layout.masks().iter().map(|mask| {
            let row = |row: usize| {
                (0..b).rev().fold(0, |sum, at| {
                    add(multiply(sum, column), u64::from(mask.get(row, at)))
                })
            };
            (0..b).map(row).collect()
        });
        Self {
            layout,
            residue,
            seq_q,
            x,
            column,
            masks: masks.collect(),
            ratios: HashMap::new(),
        }
    }

    /// Returns the factor by which a run multiplies the row of its mask, or `None` if its blocks belong to several classes.
    fn series(&mut self, run: &Run) -> Option<u64> {
        let b = self.layout.block_size() as u64;
        let (mut start, mut factor) = (u64::from(run.start) * b, 1);
        if let Some(Residue { class_len, .. }) = self.residue {
            let class = start / class_len as u64;
            if u64::from(run.last()) * b / class_len as u64 != class {
                return None;
            }
            start %= class_len as u64;
            factor = power(self.x, class);
        }
        let first = multiply(factor, power(self.column, start));
        if run.count == 1 {
            return Some(first);
        }
        let column = self.column;
        let [ratio, by] = *self.ratios.entry(run.stride).or_insert_with(|| {
            let ratio = power(column, u64::from(run.stride) * b);
            [ratio, inverse(add(ratio, FIELD - 1))]
        });
        let sum = match ratio {
            1 => u64::from(run.count),
            _ => multiply(add(power(ratio, u64::from(run.count)), FIELD - 1), by),
        };
        Some(multiply(first, sum))
    }

    /// Returns the value of each query of a pattern, by position.
    fn of_pattern(&mut self, pattern: usize) -> Option<Vec<u64>> {
        let layout = self.layout;
        let b = layout.block_size();
        let mut values = vec![0; self.seq_q];
        for q_block in 0..layout.q_blocks() {
            let mut rows = vec![0; b];
            for run in layout.row_runs(pattern, q_block) {
                let series = self.series(run)?;
                for (sum, &row) in rows.iter_mut().zip(&self.masks[run.mask as usize]) {
                    *sum = add(*sum, multiply(series, row));
                }
            }
            for (row, value) in rows
                .into_iter()
                .enumerate()
                .filter(|(_, value)| *value != 0)
            {
                let place = q_block * b + row;
                let position = self
                    .residue
                    .map_or(place, |residue| residue.position(place));
                *values.get_mut(position)? = value;
            }
        }
        Some(values)
    }
}

/// Checks that the parts have exactly a layout's pairs, each once.
pub(super) fn check(whole: &BlockLayout, parts: &[Part]) -> Result<(), LayoutError> {
    for (index, Part { layout, residue }) in parts.iter().enumerate() {
        let alike = [whole.seq_q(), whole.seq_kv()];
        let lists = match residue {
            None => [layout.seq_q(), layout.seq_kv()] == alike,
            Some(residue) => {
                let Residue { stride, class_len } = *residue;
                let places = stride.checked_mul(class_len);
                let covers = |&places: &usize| places >= whole.seq_q();
                stride >= 2
                    && stride < whole.seq_q()
                    && alike[0] == alike[1]
                    && class_len.is_multiple_of(layout.block_size())
                    && places.filter(covers) == Some(layout.seq_q())
                    && places == Some(layout.seq_kv())
            }
        };
        ensure_sound!(
            lists && layout.heads() == whole.heads() && layout.batch() == whole.batch(),
            "part {index}: must be of the layout's sizes"
        );
    }
    let x = RandomState::new().hash_one(0u64) % (FIELD - 2) + 2;
    let mut of_whole = Rows::new(whole, None, whole.seq_q(), x);
    let mut of_parts: Vec<Rows> = (parts.iter())
        .map(|part| Rows::new(&part.layout, part.residue, whole.seq_q(), x))
        .collect();
    let mut seen = HashSet::new();
    for batch in 0..whole.batch().unwrap_or(1) {
        for head in 0..whole.heads() {
            let pattern = whole.pattern_of(batch, head);
            let of_head: Vec<usize> = (parts.iter())
                .map(|part| part.layout.pattern_of(batch, head))
                .collect();
            if !seen.insert((pattern, of_head.clone())) {
                continue;
            }
            let mut left = of_whole.of_pattern(pattern).expect("positions in order");
            for (index, (rows, pattern)) in of_parts.iter_mut().zip(of_head).enumerate() {
                let values = rows.of_pattern(pattern);
                ensure_sound!(
                    values.is_some(),
                    "part {index}: must have runs of one class, of queries that exist"
                );
                for (left, value) in left.iter_mut().zip(values.into_iter().flatten()) {
                    *left = add(*left, (FIELD - value) % FIELD);
                }
            }
            let other = left.iter().position(|&left| left != 0);
            ensure_sound!(
                other.is_none(),
                "parts must have the layout's pairs, each once; those of query {} of head {head} are others",
                other.unwrap_or(0)
            );
        }
    }
    Ok(())
}
