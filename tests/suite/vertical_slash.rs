//! Vertical-slash layouts from tensors, against those that the host builds.

use burn_sparse_select::{vertical_slash_layout, vertical_slash_layout_async};

use burn_blocksparse_tests::prelude::*;

fn shape([heads, seq_q, seq_kv, block_size]: [usize; 4]) -> LayoutShape {
    LayoutShape::new(heads, [seq_q, seq_kv], block_size)
}

fn tensor(numbers: &[Vec<i32>], device: &Device) -> Tensor<2, Int> {
    let dims = [numbers.len(), numbers[0].len()];
    Tensor::from_data(TensorData::new(numbers.concat(), dims), device)
}

/// Squares, different numbers of queries and keys, and only columns or only diagonals.
#[test]
fn equals_the_hosts() {
    for (sizes, columns, diagonals) in [
        ([3, 75, 75, 8], 4, 6),
        ([2, 21, 130, 16], 3, 5),
        ([2, 90, 40, 32], 2, 3),
        ([2, 64, 64, 16], 0, 4),
        ([2, 64, 64, 16], 4, 0),
    ] {
        check(sizes, columns, diagonals);
    }
}

fn check(sizes: [usize; 4], columns: usize, diagonals: usize) {
    let shape = shape(sizes);
    let mut rng = seeded(5);
    // In any order, with duplicates.
    let mut numbers = |count: usize| -> Vec<Vec<i32>> {
        let mut row = || {
            (0..count)
                .map(|_| rng.random_range(0..shape.seq_kv as i32))
                .collect()
        };
        (0..shape.heads).map(|_| row()).collect()
    };
    let (vertical, slash) = (numbers(columns), numbers(diagonals));
    let host = |row: &[i32]| -> Vec<usize> { row.iter().map(|&x| x as usize).collect() };
    let heads = vertical.iter().zip(&slash);
    let pattern = Pattern::per_head(heads.map(|(v, s)| Pattern::vertical_slash(host(v), host(s))));
    let expected = BlockLayout::new(&pattern, shape).unwrap();
    assert!(expected.blocks() > 0);
    for device in devices() {
        for device in [device.clone(), device.autodiff()] {
            let arguments = || (tensor(&vertical, &device), tensor(&slash, &device));
            let (v, s) = arguments();
            assert_eq!(vertical_slash_layout(v, s, shape).unwrap(), expected);
            let (v, s) = arguments();
            let layout = vertical_slash_layout_async(v, s, shape);
            assert_eq!(futures_lite::future::block_on(layout).unwrap(), expected);
        }
    }
}

#[test]
fn errors() {
    for device in &devices() {
        let call = |sizes, vertical: &[&[i32]], slash: &[&[i32]]| {
            let [vertical, slash] = [vertical, slash].map(|rows| {
                let rows: Vec<_> = rows.iter().map(|row| row.to_vec()).collect();
                tensor(&rows, device)
            });
            vertical_slash_layout(vertical, slash, shape(sizes))
        };
        refused! {
            call([2, 64, 64, 8], &[&[0, 64], &[0, 1]], &[&[0], &[1]]) => "vertical must be at least 0 and less than 64, the shape's seq_kv, got 64";
            call([2, 64, 64, 8], &[&[0], &[1]], &[&[0], &[-1]]) => "slash must be at least 0 and less than 64, the shape's seq_kv, got -1";
            call([3, 64, 64, 8], &[&[0], &[1]], &[&[0], &[1], &[2]]) => "vertical's heads must be 3, the shape's, got 2";
            call([2, 64, 64, 8], &[&[0], &[1]], &[&[0]]) => "slash's heads must be 2, the shape's, got 1";
            call([2, 64, 64, 7], &[&[0], &[1]], &[&[0], &[1]]) => "block_size must be 8, 16, 32, 64 or 128, got 7";
        }
    }
}
