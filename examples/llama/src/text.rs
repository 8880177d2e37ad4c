//! Text and tokens: a checkpoint's tokenizer, its chat template and its stop tokens.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use burn_sparse_transformer::weights::{Gguf, GgufValue};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, context};
use serde_json::Value;
use tokenizers::Tokenizer;

use crate::gguf_tokenizer;

/// Tokens at the end of a cut part of a text that are not reliable.
const AT_A_CUT: usize = 64;

/// Tokenizer and chat template of a checkpoint.
pub struct Text {
    pub tokenizer: Tokenizer,
    pub template: Option<String>,
    /// Tokens that templates refer to.
    pub bos: Option<String>,
    pub eos: Option<String>,
    /// Tokens that end an answer.
    pub stop: Vec<u32>,
}

impl Text {
    /// Reads the files of a Hugging Face folder.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let tokenizer =
            Tokenizer::from_file(&path).map_err(|error| anyhow!("{}: {error}", path.display()))?;
        let json = |name: &str| -> Result<Value> {
            let path = folder.join(name);
            if !path.exists() {
                return Ok(Value::Null);
            }
            let read = || anyhow::Ok(serde_json::from_slice(&fs::read(&path)?)?);
            read().with_context(|| path.display().to_string())
        };
        let config = json("tokenizer_config.json")?;
        // A token is a string, or an object with its string.
        let token = |key: &str| {
            let value = &config[key];
            let text = value.as_str().or_else(|| value["content"].as_str());
            text.map(str::to_owned)
        };
        let template = fs::read_to_string(folder.join("chat_template.jinja")).ok();
        let template = template.or_else(|| template_of(&config["chat_template"]));
        let mut text = Self {
            tokenizer,
            template,
            bos: token("bos_token"),
            eos: token("eos_token"),
            stop: Vec::new(),
        };
        // A number, or several.
        for file in ["generation_config.json", "config.json"] {
            let ends = json(file)?["eos_token_id"].take();
            let several = ends.as_array().cloned().unwrap_or_else(|| vec![ends]);
            let several = several.iter().filter_map(Value::as_u64);
            text.stop.extend(several.map(|id| id as u32));
        }
        let eos = text.eos.as_ref();
        let eos = eos.and_then(|eos| text.tokenizer.token_to_id(eos));
        text.stop.extend(eos);
        Ok(text)
    }

    /// Reads a GGUF file with a byte-pair vocabulary, as Llama 3's, Qwen's and SmolLM2's.
    pub fn of_gguf(gguf: &Gguf) -> Result<Self> {
        let tokenizer = gguf_tokenizer::read(gguf)?;
        let token = |key: &str| {
            let id = gguf.get(key).and_then(GgufValue::as_u64)?;
            tokenizer.id_to_token(u32::try_from(id).ok()?)
        };
        let [bos, eos, end] = ["bos_token_id", "eos_token_id", "eot_token_id"]
            .map(|key| token(&format!("tokenizer.ggml.{key}")));
        let ends = eos.iter().chain(&end);
        let ends = ends.filter_map(|token| tokenizer.token_to_id(token));
        let template = gguf.get("tokenizer.chat_template");
        Ok(Self {
            template: template.and_then(GgufValue::as_str).map(str::to_owned),
            stop: ends.collect(),
            bos,
            eos,
            tokenizer,
        })
    }

    /// Tokenizes a prompt to be continued, with a start token if the tokenizer has one.
    pub fn tokens(&self, prompt: &str) -> Result<Vec<u32>> {
        self.encode(prompt, true)
    }

    /// Tokenizes a question in the model's chat template, up to the beginning of the answer.
    pub fn chat(&self, question: &str) -> Result<Vec<u32>> {
        self.encode(&self.rendered(question)?, false)
    }

    /// Returns the text of a chat up to the beginning of the answer.
    pub fn rendered(&self, question: &str) -> Result<String> {
        let Some(template) = &self.template else {
            bail!(
                "the checkpoint has no chat template: say --raw to let the model go on with the text"
            );
        };
        let mut environment = Environment::new();
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |reason: String| -> Result<String, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, reason))
            },
        );
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?;
        environment.set_syntax(syntax);
        let rendered = environment.render_str(
            template,
            context! {
                messages => [context! { role => "user", content => question }],
                add_generation_prompt => true,
                bos_token => self.bos.as_deref().unwrap_or_default(),
                eos_token => self.eos.as_deref().unwrap_or_default(),
            },
        );
        rendered.context("the checkpoint's chat template")
    }

    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode_fast(text, special);
        let encoding = encoding.map_err(|error| anyhow!("tokens of the text: {error}"))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns the tokens of a text and their end offsets in bytes. Tokenizes only the beginning of the text, if that has `needed` tokens.
    pub fn encode_with_ends(&self, text: &str, needed: usize) -> Result<(Vec<u32>, Vec<usize>)> {
        let mut bytes = 8 * needed;
        loop {
            let part = &text[..text.floor_char_boundary(bytes)];
            let encoding = self.tokenizer.encode(part, false);
            let encoding = encoding.map_err(|error| anyhow!("tokens of the text: {error}"))?;
            // Tokens at the cut may differ from the text's.
            if part.len() == text.len() || encoding.len() >= needed + AT_A_CUT {
                let ends = encoding.get_offsets().iter().map(|&(_, end)| end);
                return Ok((encoding.get_ids().to_vec(), ends.collect()));
            }
            bytes *= 2;
        }
    }

    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        let text = self.tokenizer.decode(tokens, true);
        text.map_err(|error| anyhow!("text of tokens: {error}"))
    }
}

/// Returns the template, or the first of several named ones, which is the chat's.
fn template_of(value: &Value) -> Option<String> {
    let text = value.as_str().or_else(|| value[0]["template"].as_str());
    text.map(str::to_owned)
}

/// Decodes text token by token; a character split over several tokens is output with the last of them.
#[derive(Default)]
pub struct Stream {
    tokens: Vec<u32>,
    given: usize,
}

impl Stream {
    pub fn push(&mut self, token: u32, text: &Text) -> Result<String> {
        self.tokens.push(token);
        let all = text.decode(&self.tokens)?;
        if all.ends_with('\u{fffd}') || all.len() < self.given {
            return Ok(String::new());
        }
        let new = all[self.given..].to_owned();
        self.given = all.len();
        Ok(new)
    }
}
