//! Describes what attends to what: a predicate of your own, combined with built-in patterns, as a picture and by its density.
//!
//! ```sh
//! cargo run -p burn-blocksparse --example pattern
//! ```

use std::error::Error;

use burn::tensor::{Device, Distribution, Tensor};
use burn_blocksparse::{Pattern, sparse_attention};

const HEADS: usize = 4;
const SEQ: usize = 256;

fn main() -> Result<(), Box<dyn Error>> {
    // Any predicate of head, query position and key position. Here: three documents packed into one sequence.
    let starts = [0, 90, 170];
    let document = move |position: i64| starts.iter().filter(|&&start| start <= position).count();
    let documents = Pattern::from_fn("same document", move |_head, query, key| {
        document(query) == document(key)
    });

    // Even heads see a window of 32 keys, odd heads every 32nd key; all see the first 4 keys of the sequence.
    let near_or_far = Pattern::per_head([Pattern::local(32), Pattern::strided(32)]);
    let views = Pattern::union([near_or_far, Pattern::global_keys(0..4)]);
    let pattern = Pattern::intersection([documents, views]).and_causal();
    println!("{pattern}\n");

    // One character per block of 16 × 16 pairs: `.` is skipped, `#` computed whole, `-=+*` computed and masked inside.
    let layout = pattern.layout(HEADS, SEQ, 16)?;
    println!("{layout}");

    // Time follows the blocks. If their share is much larger than that of the pairs, try smaller blocks.
    println!("block size  blocks  pairs");
    for block_size in [8, 16, 32, 64] {
        let layout = pattern.layout(HEADS, SEQ, block_size)?;
        let (blocks, pairs) = (layout.block_density(), layout.density());
        println!(
            "{block_size:>10}  {:>5.1}%  {:>4.1}%",
            100.0 * blocks,
            100.0 * pairs
        );
        assert!(pairs <= blocks);
    }

    // Compare the layout, pair by pair, with the rule in plain code.
    for head in 0..HEADS {
        for (query, row) in layout.to_dense(head).into_iter().enumerate() {
            for (key, kept) in row.into_iter().enumerate() {
                let distance = query as i64 - key as i64;
                let seen = match head % 2 {
                    0 => distance < 32,
                    _ => distance % 32 == 0,
                };
                let same = document(query as i64) == document(key as i64);
                let expected = distance >= 0 && same && (seen || key < 4);
                assert_eq!(kept, expected, "head {head}, query {query}, key {key}");
            }
        }
    }

    // A query that sees itself alone returns its own value: the first of each document in even heads.
    let [q, k, v] = [(); 3].map(|_| {
        let shape = [1, HEADS, SEQ, 16];
        Tensor::<4>::random(shape, Distribution::Default, &Device::flex())
    });
    let out = sparse_attention(q, k, v.clone(), &layout)?;
    let first = |x: Tensor<4>| x.slice([0..1, 0..1, 90..91, 0..16]);
    let difference: f32 = (first(out) - first(v)).abs().max().into_scalar();
    println!("\nfirst token of document 2: differs from its value by {difference:.1e}");
    assert!(difference < 1e-6);
    Ok(())
}

#[test]
fn it_runs() {
    main().unwrap();
}
