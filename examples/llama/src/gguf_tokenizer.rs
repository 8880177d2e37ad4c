//! Tokenizer of a GGUF file.

use anyhow::{Context, Result, anyhow, bail};
use burn_sparse_transformer::weights::{Gguf, GgufValue};
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};

/// Token types of special tokens in the format: control, and user-defined.
const SPECIAL: [f64; 2] = [3.0, 4.0];

/// Pre-tokenization of Llama 3.
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Pre-tokenization of Qwen2, which splits digits one by one.
const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Returns the tokenizer of a file with a byte-pair vocabulary.
pub fn read(gguf: &Gguf) -> Result<Tokenizer> {
    let value = |key: &str| {
        let key = format!("tokenizer.ggml.{key}");
        gguf.get(&key).with_context(|| format!("there is no {key}"))
    };
    let strings = |key: &'static str| {
        let strings = value(key)?.as_strings();
        strings.with_context(|| format!("tokenizer.ggml.{key} must be strings"))
    };
    let kind = value("model")?.as_str().unwrap_or("no text");
    if kind != "gpt2" {
        bail!(
            "tokenizer.ggml.model must be gpt2, byte pairs, got {kind}: take a folder with a tokenizer.json"
        );
    }
    let tokens = strings("tokens")?;
    let vocab = (0u32..).zip(tokens).map(|(id, token)| (token.clone(), id));
    let merges = strings("merges")?.iter().map(|merge| {
        let two = merge.split_once(' ');
        let (first, second) = two.with_context(|| format!("{merge:?} is no merge of two"))?;
        Ok((first.to_owned(), second.to_owned()))
    });
    let merges = merges.collect::<Result<Vec<_>>>()?;
    let failed = |error: tokenizers::Error| anyhow!("the vocabulary: {error}");
    let model =
        BPE::builder().vocab_and_merges(vocab.collect::<tokenizers::models::bpe::Vocab>(), merges);
    let mut tokenizer = Tokenizer::new(model.build().map_err(failed)?);
    let name = value("pre").ok().and_then(GgufValue::as_str);
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer(name.unwrap_or("default"))?));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    let types = value("token_type")?.as_floats().unwrap_or_default();
    let special = (tokens.iter().zip(types)).filter(|(_, kind)| SPECIAL.contains(kind));
    let special = special.map(|(token, _)| AddedToken::from(token, true));
    tokenizer.add_special_tokens(&special.collect::<Vec<_>>());
    let begins = value("add_bos_token").ok().and_then(GgufValue::as_bool);
    let bos = value("bos_token_id").ok().and_then(GgufValue::as_u64);
    if let (Some(true), Some(bos)) = (begins, bos) {
        let token = tokens
            .get(bos as usize)
            .context("tokenizer.ggml.bos_token_id is no token")?;
        let beginning = TemplateProcessing::builder()
            .try_single(format!("{token} $A"))
            .map_err(|error| anyhow!("{error}"))?
            .special_tokens(vec![(token.as_str(), bos as u32)])
            .build()?;
        tokenizer.with_post_processor(Some(beginning));
    }
    Ok(tokenizer)
}

/// Returns the pre-tokenizer with this name in the format.
fn pre_tokenizer(name: &str) -> Result<PreTokenizerWrapper> {
    let bytes = |with_regex| ByteLevel::new(false, true, with_regex).into();
    let by = |regex: &str| -> Result<PreTokenizerWrapper> {
        let pattern = SplitPattern::Regex(regex.to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
        let split = split.map_err(|error| anyhow!("{error}"))?;
        Ok(Sequence::new(vec![split.into(), bytes(false)]).into())
    };
    match name {
        "default" | "gpt-2" => Ok(bytes(true)),
        "smollm" => Ok(Sequence::new(vec![Digits::new(true).into(), bytes(true)]).into()),
        "llama-bpe" | "llama3" => by(LLAMA_3),
        "qwen2" => by(QWEN_2),
        _ => bail!(
            "tokenizer.ggml.pre must be default, gpt-2, smollm, llama-bpe or qwen2, got {name}: take a folder with a tokenizer.json"
        ),
    }
}
