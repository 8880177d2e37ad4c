//! Decoding token by token from a cache equals the whole call, for all patterns.

use crate::common::*;

/// Not a multiple of the block size.
const SEQ: usize = 21;

#[test]
fn rows_from_a_cache_are_those_of_the_whole_for_every_pattern() {
    for form in Pattern::NOTATION {
        let name = form.split([':', '[']).next().unwrap();
        let known = PATTERNS.iter().any(|text| text.starts_with(name));
        assert!(known, "{form} is missing");
    }
    let device = Device::flex();
    let x = random([2, SEQ, 16], &device);
    for text in PATTERNS {
        let pattern: Pattern = text.parse().unwrap();
        assert!(pattern.is_causal(), "{text}");
        for (norm, pieces) in [
            (None, &[1; SEQ][..]),
            (Some(QkNorm::Rms), &[7, 1, 1, 10, 2]),
        ] {
            let mha = SparseMultiHeadAttentionConfig::new(16, 2, pattern.clone())
                .with_block_size(8)
                .with_n_kv_heads(Some(1))
                .with_qk_norm(norm)
                .with_rope(Some(RotaryEncodingConfig::new(SEQ, 8)));
            let mha = randomise(mha.init(&device));
            println!("{text}");
            assert_pieces(&mha, (&x, &mut SparseMhaCache::new()), pieces, 2e-5);
        }
    }
}

fn attention(pattern: Pattern) -> SparseMultiHeadAttention {
    let config = SparseMultiHeadAttentionConfig::new(16, 2, pattern)
        .with_block_size(8)
        .with_n_kv_heads(Some(1))
        .with_softcap(Some(3.0))
        .with_sinks(true)
        .with_relative_reach(Some(6));
    randomise(config.init(&Device::flex()))
}

/// Returns a piece of a sequence, from its first position and length.
fn piece(x: &Tensor<3>, start: usize, len: usize) -> SparseMhaInput {
    SparseMhaInput::self_attn(x.clone().narrow(1, start, len))
}

/// Pieces between the positions at which a cache may stop, including patterns that see later positions. Some pieces are rolled back and replaced.
#[rstest]
#[case("prefix:5", &[5, 6, 13])]
#[case("chunked:4,1,0", &[4, 12, 20])]
#[case("chunked:6", &[6, 12])]
#[case("documents:0,6,15", &[6, 15])]
#[case("packed:0,9,12(prefix:2)", &[9, 12, 14])]
#[case("chunked:4 / documents:0,8,16", &[8, 16])]
#[case("causal + (prefix:4 & global:0)", &[4, 9])]
#[case("window:2 & chunked:5", &[5, 15])]
#[case("streaming:4,3", &[1, 7, 8, 20])]
fn pieces_between_boundaries_are_rows_of_the_whole(#[case] text: &str, #[case] stops: &[usize]) {
    let pattern: Pattern = text.parse().unwrap();
    let mha = attention(pattern.clone());
    let x = random([2, SEQ, 16], &Device::flex());
    let others = random([2, SEQ, 16], &Device::flex()) * -0.7 + 0.3;
    let whole = mha.forward(SparseMhaInput::self_attn(x.clone()));
    let mut cache = SparseMhaCache::new();
    let mut rows = Vec::new();
    let mut before = 0;
    for &stop in stops {
        assert!(pattern.allows_boundary(2, stop), "{text} at {stop}");
        // Rolled-back tokens leave no trace.
        mha.forward_cache(piece(&others, before, stop - before), &mut cache);
        cache.truncate(before);
        let input = piece(&x, before, stop - before);
        rows.push(mha.forward_cache(input, &mut cache).context);
        before = stop;
    }
    let last = mha.try_forward_cache_last(piece(&x, before, SEQ - before), &mut cache);
    rows.push(last.unwrap().context);
    assert_close(Tensor::cat(rows, 1), whole.context, 1e-5);
}

#[rstest]
#[case(
    "prefix:5",
    3,
    "keys up to position 4; the next position to stop at is 5"
)]
#[case(
    "chunked:4,1,0",
    6,
    "keys up to position 7; the next position to stop at is 8"
)]
#[case(
    "window:2",
    7,
    "keys up to position 8; this pattern has none: it is not causal"
)]
#[case(
    "dense",
    2,
    "keys without an end; this pattern has none: it is not causal"
)]
#[case(
    "documents:0,6",
    9,
    "keys without an end; this pattern has none: it is not causal"
)]
fn a_cache_stops_where_it_may(#[case] text: &str, #[case] stop: usize, #[case] says: &str) {
    let mha = attention(text.parse().unwrap());
    let x = random([2, SEQ, 16], &Device::flex());
    let mut cache = SparseMhaCache::new();
    let error = mha
        .try_forward_cache(piece(&x, 0, stop), &mut cache)
        .unwrap_err();
    assert!(matches!(error, TransformerError::Boundary { position, .. } if position == stop));
    let expected =
        format!("a cache cannot stop at position {stop}: queries before it attend to {says}");
    assert_eq!(error.to_string(), expected);
    assert_eq!(cache.len(), 0);
    // The end of a sequence may be anywhere, but nothing can follow it.
    mha.forward_cache_last(piece(&x, 0, stop), &mut cache);
    refused! { mha.try_forward_cache(piece(&x, stop, 1), &mut cache) => expected; }
    assert_eq!(cache.len(), stop);
}

/// Checks that a model decodes 40 tokens of two sequences from a cache like in one call, including rollbacks, and that other tokens after the 23rd
/// change only later outputs.
pub fn assert_decodes_and_sees_no_future(model: &SparseTransformer, tokens: &Tensor<2, Int>) {
    let whole = model.forward(tokens.clone());
    let mut cache = model.new_cache();
    let rows = [13, 1, 1, 8, 17].map(|count| {
        let new = tokens.clone().narrow(1, cache.position(), count);
        model.forward_cache(new, &mut cache)
    });
    assert_close(Tensor::cat(rows.to_vec(), 1), whole.clone(), 1e-4);
    // A refused call leaves the cache unchanged.
    cache.truncate(20);
    let many = tokens.clone().narrow(1, 0, 30);
    assert!(model.try_forward_cache(many, &mut cache).is_err());
    let new = tokens.clone().narrow(1, 20, 5);
    let again = model.forward_cache(new, &mut cache);
    assert_close(again, whole.clone().narrow(1, 20, 5), 1e-4);

    let zeros = Tensor::<2, Int>::zeros([2, 17], &tokens.device());
    let moved = Tensor::cat(vec![tokens.clone().narrow(1, 0, 23), zeros], 1);
    let moved = model.forward(moved);
    let first = |x: &Tensor<3>| x.clone().narrow(1, 0, 23);
    assert_close(first(&moved), first(&whole), 1e-5);
    let difference = apart(moved, whole);
    assert!(difference > 1e-3, "{difference}");
}

/// Checks that a layer decodes token by token and in pieces, some of which are rolled back, and that it refuses another batch.
pub fn assert_layer_decodes(layer: &SparseMultiHeadAttention, x: &Tensor<3>) {
    let [_, seq, width] = x.dims();
    let whole = attend(layer, x.clone()).unwrap();
    let others = random(x.dims(), &x.device());
    for pieces in [vec![1; seq], vec![10, 1, 1, 5, seq - 17], vec![seq]] {
        let mut cache = SparseMhaCache::new();
        let rows = pieces.into_iter().map(|count| {
            let start = cache.len();
            let piece = |x: &Tensor<3>, count| x.clone().narrow(1, start, count);
            // Rolled-back tokens are forgotten.
            let other = piece(&others, (seq - start).min(9));
            attend_cache(layer, other, &mut cache).unwrap();
            cache.truncate(start);
            attend_cache(layer, piece(x, count), &mut cache).unwrap()
        });
        assert_close(Tensor::cat(rows.collect(), 1), whole.clone(), 1e-5);
        let other = random([1, 1, width], &x.device());
        refused! { attend_cache(layer, other, &mut cache) => "…batch…"; }
        assert_eq!(cache.len(), seq);
    }
}
