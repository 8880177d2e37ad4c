//! Prefix stability: earlier outputs must not depend on later tokens, whatever selects keys.

use std::ops::Range;

use crate::prelude::*;

/// A function of queries and keys.
type Of<'a, T> = &'a dyn Fn(&[Tensor<4>], &[Tensor<4>]) -> T;

/// A call with selection, on tensors `[batch, heads, rows, width]` with a row per query or key; as many queries as keys.
pub struct Prefix<'a> {
    pub what: String,
    pub queries: Vec<Tensor<4>>,
    pub keys: Vec<Tensor<4>>,
    pub attend: Of<'a, Tensor<4>>,
    /// `[batch, heads, rows, most]`.
    pub choose: Of<'a, Tensor<4, Int>>,
    /// Whether no rounding can change the selection of a row of `[batch · heads · rows]`; products of other sizes may be rounded differently.
    pub is_clear: &'a dyn Fn(usize) -> bool,
    /// Tolerance for rows that are summed in another order.
    pub within: f64,
}

impl Prefix<'_> {
    /// Later tokens change no earlier output, and queries alone see the same as among all.
    pub fn assert_stable(&self) {
        let whole = (self.attend)(&self.queries, &self.keys);
        let [_, _, rows, width] = whole.dims();
        let lists = (self.choose)(&self.queries, &self.keys);
        let numbers =
            |x: &Tensor<4>, range: Range<usize>| to_f64(x.clone().slice_dim(2, range).into_data());
        let last = [1, 7, 40].map(|count| rows - count..rows);
        for range in [0..33, 40..41].into_iter().chain(last) {
            let part = |x: &[Tensor<4>], range: &Range<usize>| -> Vec<Tensor<4>> {
                let parts = x.iter().map(|x| x.clone().slice_dim(2, range.clone()));
                parts.collect()
            };
            let queries = part(&self.queries, &range);
            let keys = part(&self.keys, &(0..range.end));
            let some = (self.attend)(&queries, &keys);
            let clear = |x: Vec<f64>| -> Vec<f64> {
                let of = |at: usize| {
                    let row = at / width;
                    row / range.len() * rows + range.start + row % range.len()
                };
                let numbers = x.into_iter().enumerate();
                let numbers = numbers.map(|(at, x)| if (self.is_clear)(of(at)) { x } else { 0.0 });
                numbers.collect()
            };
            let got = clear(to_f64(some.into_data()));
            let got = TensorData::new(got.clone(), [got.len()]);
            let expected = clear(numbers(&whole, range.clone()));
            let what = format!("{}, queries {range:?} alone", self.what);
            assert_close(&what, got, &expected, self.within);
        }
        for first in [17, 48, 63] {
            let changed = |x: &Tensor<4>| {
                let [before, later] = [0..first, first..rows].map(|of| x.clone().slice_dim(2, of));
                Tensor::cat(vec![before, later * -1.5 + 0.25], 2)
            };
            let [queries, keys] =
                [&self.queries, &self.keys].map(|x| x.iter().map(changed).collect::<Vec<_>>());
            let what = format!("{}, tokens from {first} on changed", self.what);
            let after = (self.attend)(&queries, &keys);
            let kept = after.clone().slice_dim(2, 0..first).into_data();
            assert_close(&what, kept, &numbers(&whole, 0..first), self.within);
            let [after, whole] = [&after, &whole].map(|x| numbers(x, first..rows));
            assert_ne!(after, whole, "{what}");
            let others = (self.choose)(&queries, &keys);
            let before = |x: &Tensor<4, Int>| read_ints(x.clone().slice_dim(2, 0..first));
            assert_eq!(before(&others), before(&lists), "{what}");
            assert_ne!(read_ints(others), read_ints(lists.clone()), "{what}");
        }
    }
}
