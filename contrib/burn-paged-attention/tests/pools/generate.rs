//! Text generation.

use burn_paged_attention::generate::{FinishReason, GenerateOutput};

use crate::prelude::*;
use crate::texts::ids;

const VOCAB: usize = 11;
const CONTEXT: usize = 20;

fn model(device: &Device) -> SparseTransformer {
    let config = SparseTransformerConfig::new(16, 2, Factorization::from(Pattern::fixed(8, 2)))
        .with_vocab_size(VOCAB)
        .with_context(CONTEXT)
        .with_n_layers(2)
        .with_embedding_width(Some(8))
        .with_block_size(8);
    randomise(config.try_init(device).unwrap())
}

fn greedy() -> Sampling {
    Sampling::default().temperature(0.0)
}

/// Returns the texts, and the tokens passed to the caller for each.
fn run(
    model: &SparseTransformer,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
) -> (Vec<GenerateOutput>, Vec<Vec<u32>>) {
    let mut given = vec![Vec::new(); prompts.len()];
    let texts = generate(model, prompts, options, &mut |step| {
        assert_eq!(step.index, given[step.prompt].len());
        given[step.prompt].push(step.token);
        ControlFlow::Continue(())
    });
    (texts.unwrap(), given)
}

/// Returns the likeliest next token, by the whole model.
fn likeliest(model: &SparseTransformer, tokens: &[u32]) -> u32 {
    let logits = model.try_forward(ids(tokens, &Device::flex())).unwrap();
    let last = logits.narrow(1, tokens.len() - 1, 1).reshape([VOCAB]);
    last.argmax(0).into_scalar::<i32>() as u32
}

#[test]
fn greedy_text_is_what_the_whole_model_finds_likeliest() {
    let model = model(&Device::flex());
    let prompts = [vec![1, 2, 3], vec![4], vec![5, 6, 0], vec![9, 8, 7, 6, 5]];
    let options = GenerateOptions::default().max_new(9).sampling(greedy());
    let (texts, given) = run(&model, &prompts, &options);
    for ((prompt, text), given) in prompts.iter().zip(texts).zip(given) {
        let mut tokens = prompt.clone();
        for _ in 0..9 {
            tokens.push(likeliest(&model, &tokens));
        }
        assert_eq!(text.tokens, tokens[prompt.len()..]);
        assert_eq!(text.reason, FinishReason::Length);
        assert_eq!(given, text.tokens);
    }
    // The same on an autodiff device.
    let training = self::model(&Device::flex().autodiff());
    assert_eq!(run(&training, &prompts, &options).0.len(), 4);
}

/// A prompt's text depends on its index and the seed, not on the others.
#[test]
fn draws_do_not_depend_on_the_batch() {
    let model = model(&Device::flex());
    let options = |seed| {
        let sampling = Sampling::default().seed(seed).top_p(0.95).repetition(1.1);
        GenerateOptions::default().max_new(12).sampling(sampling)
    };
    let prompts = [vec![1, 2, 3], vec![1, 2, 3], vec![7, 7], vec![3, 2, 1]];
    let (all, _) = run(&model, &prompts, &options(5));
    for count in 1..4 {
        let (some, _) = run(&model, &prompts[..count], &options(5));
        assert_eq!(some, all[..count]);
    }
    assert_ne!(all[0], all[1], "other draws for the same prompt");
    assert_ne!(run(&model, &prompts, &options(6)).0, all);
}

/// Evicting keys that no later token reads changes no text, and prompts of any lengths are continued together.
#[test]
fn what_is_kept_changes_no_text() {
    let model = model(&Device::flex());
    let prompt = |len| {
        (0..len)
            .map(|token| (token * 5 + len) % VOCAB as u32)
            .collect()
    };
    let prompts: [Vec<u32>; 6] = [1, 7, 2, 11, 3, 6].map(prompt);
    let options = GenerateOptions::default().max_new(8).sampling(greedy());
    let (texts, _) = run(&model, &prompts, &options);
    for residency in [KvRetention::All, window(CONTEXT, 0), window(8, CONTEXT)] {
        let options = options.clone().residency(residency).page_size(16);
        assert_eq!(run(&model, &prompts, &options).0, texts, "{residency:?}");
    }
    let (same, _) = run(&model, &prompts, &options.clone().kv_dtype(FloatDType::F32));
    assert_eq!(same, texts);
    // The text may differ or not: weights are random.
    for options in [
        options.clone().residency(window(1, 0)),
        options.clone().kv_dtype(KvDtype::Int8),
        options.kv_dtype(FloatDType::F16),
    ] {
        assert_eq!(run(&model, &prompts, &options).0.len(), prompts.len());
    }
}

/// With drafts a step reads several tokens, and rolls back those that sampling rejects: the texts are the same, greedy or sampled, for any draft
/// length, with stops and full contexts.
#[rstest]
#[case(Pattern::fixed(8, 2))]
#[case(Pattern::local(5))]
#[case(Pattern::strided(4))]
fn drafts_change_no_text(#[case] pattern: Pattern) {
    let config = SparseTransformerConfig::new(16, 2, Factorization::from(pattern))
        .with_vocab_size(VOCAB)
        .with_context(3 * CONTEXT)
        .with_n_layers(1)
        .with_block_size(8);
    let model = randomise(config.try_init(&Device::flex()).unwrap());
    let prompts = [
        vec![1, 2, 3, 1, 2],
        vec![7; 9],
        vec![4],
        (0..58).map(|token| token % 4).collect(),
    ];
    let (mut drafted, mut accepted) = (0, 0);
    for sampling in [greedy(), Sampling::default().seed(3).temperature(0.7)] {
        let plain = GenerateOptions::default()
            .max_new(30)
            .sampling(sampling)
            .stop([vec![5, 5]])
            .page_size(16);
        let (texts, given) = run(&model, &prompts, &plain);
        let reachable = KvRetention::Reachable;
        for (tokens, residency) in [(1, reachable), (3, reachable), (7, KvRetention::All)] {
            let options = plain
                .clone()
                .residency(residency)
                .drafts(PromptLookup::new(tokens).with_match(1, 4));
            let (with_drafts, also_given) = run(&model, &prompts, &options);
            for (plain, text) in texts.iter().zip(&with_drafts) {
                assert_eq!((&text.tokens, text.reason), (&plain.tokens, plain.reason));
                drafted += text.drafted;
                accepted += text.accepted;
            }
            assert_eq!(also_given, given);
        }
    }
    let is_right = 0 < accepted && accepted < drafted;
    assert!(is_right, "{accepted} of {drafted}");
}

/// Tokens that may begin a stop sequence are held back until it is certain that they do not.
#[test]
fn stops_are_not_written() {
    let model = model(&Device::flex());
    let prompt = [vec![1, 2, 3]];
    let options = GenerateOptions::default().max_new(10);
    let options = options.sampling(Sampling::default().seed(2).temperature(3.0));
    let whole = run(&model, &prompt, &options).0.remove(0).tokens;
    let first = |stop: &[u32]| {
        let mut parts = whole.windows(stop.len());
        parts.position(|part| part == stop).unwrap()
    };
    for stop in [&whole[4..6], &whole[2..5], &whole[7..8], &whole[0..1]] {
        let at = first(stop);
        // Another stop sequence that is never completed.
        let never = [stop, &[VOCAB as u32]].concat();
        let options = options.clone().stop([never, stop.to_vec()]);
        let (texts, given) = run(&model, &prompt, &options);
        assert_eq!(texts[0].tokens, whole[..at]);
        assert_eq!(texts[0].reason, FinishReason::Stop);
        assert_eq!(given[0], texts[0].tokens);
    }
    let token = whole[5];
    let (texts, given) = run(&model, &prompt, &options.clone().stop_tokens([token]));
    assert_eq!(texts[0].tokens, whole[..first(&[token])]);
    let expected = (FinishReason::Stop, &texts[0].tokens);
    assert_eq!((texts[0].reason, &given[0]), expected);
    // The beginning of a stop sequence at the end of a text belongs to the text.
    let beginning = vec![whole[9], VOCAB as u32];
    let (texts, given) = run(&model, &prompt, &options.stop([beginning]));
    assert_eq!((&texts[0].tokens, &given[0]), (&whole, &whole));
}

#[test]
fn texts_end_with_the_context_and_the_caller() {
    let model = model(&Device::flex());
    let prompts = [vec![1; 15], vec![2; CONTEXT], vec![3; 15]];
    let options = GenerateOptions::default().max_new(100).sampling(greedy());
    let mut given = 0;
    let texts = generate(&model, &prompts, &options, &mut |step| {
        given += usize::from(step.prompt == 2);
        match (step.prompt, given) {
            (2, 2) => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    });
    let texts = texts.unwrap();
    let ends = |text: &GenerateOutput| (text.tokens.len(), text.reason);
    // The token after the last position is still predicted.
    assert_eq!(ends(&texts[0]), (6, FinishReason::Context));
    assert_eq!(ends(&texts[1]), (1, FinishReason::Context));
    assert_eq!(ends(&texts[2]), (2, FinishReason::Caller));
    let (texts, given) = run(&model, &prompts, &options.max_new(0));
    let expected = (0, FinishReason::Length);
    assert!(texts.iter().all(|text| ends(text) == expected));
    assert!(given.iter().all(Vec::is_empty));
    assert!(run(&model, &[], &GenerateOptions::default()).0.is_empty());
}

#[test]
fn a_model_without_finite_logits_writes_nothing() {
    let mut model = model(&Device::flex());
    model.output.weight = model.output.weight.map(|weight| weight * f32::NAN);
    let (texts, _) = run(&model, &[vec![1, 2]], &GenerateOptions::default());
    assert!(texts[0].tokens.is_empty());
    assert_eq!(texts[0].reason, FinishReason::NotFinite);
}

#[rstest]
#[case(&[], GenerateOptions::default(), "prompts must be of 1 to 20 tokens, the context, got 0 in prompt 1")]
#[case(&[1; 21], GenerateOptions::default(), "prompts must be of 1 to 20 tokens, the context, got 21 in prompt 1")]
#[case(&[1, 11], GenerateOptions::default(), "prompts must be of tokens below 11, the model's vocabulary, got 11 in prompt 1")]
#[case(&[1], GenerateOptions::default().stop([vec![]]), "stop must be sequences of at least one token, got an empty one")]
#[case(&[1], GenerateOptions::default().drafts(PromptLookup::new(0)), "drafts.tokens must be at least 1, got 0")]
#[case(&[1], GenerateOptions::default().sampling(Sampling::default().top_p(2.0)), "top_p must be above 0 and at most 1, got 2")]
fn bad_input(#[case] prompt: &[u32], #[case] options: GenerateOptions, #[case] message: &str) {
    let model = model(&Device::flex());
    let prompts = [vec![1], prompt.to_vec()];
    let texts = generate(&model, &prompts, &options, &mut |_| {
        panic!("nothing is written")
    });
    assert_eq!(texts.unwrap_err().to_string(), message);
}
