//! Text forms of attention and caches: their parsing in flags, and `enwik8 patterns`, which lists them.

use std::fmt::Display;
use std::str::FromStr;

use burn_blocksparse::Pattern;
use burn_paged_attention::pool::CachePolicy;
use burn_sparse_transformer::Selection;
use burn_sparse_transformer::content::ContentAttention;
use clap::Args;

use crate::arguments::MOST;
use crate::presets::AttentionKind;
use crate::progress::program;

/// List the texts that --pattern, --attention, --selection and --cache take
#[derive(Args, Debug)]
#[command(after_help = list())]
pub struct PatternsArgs {}

/// Values of `--attention` besides [`ContentAttention::NOTATION`].
const BY_PATTERN: [&str; 2] = [
    "sparse  the preset's pattern, or --pattern",
    "dense  every earlier byte",
];

/// Policies of `--cache`.
const POLICIES: [&str; 9] = [
    "all",
    "reachable  those that the pattern lets later bytes attend to",
    "window:W,S with W at least 1  the last W and the first S",
    "h2o:H,R  H that got the most attention so far, and R newest",
    "h2o-mean:H,R  the same by the mean attention",
    "tova:C  C by the newest byte's attention",
    "snapkv:C[,M,F]  C by the attention of the last M bytes (64), averaged over F adjacent keys (5)",
    "key-norm:C  C with the shortest keys",
    "combined:S,R,H  the first S, R newest, and H that got the most attention so far",
];

pub fn list() -> String {
    let section = |title: &str, forms: &[&str]| format!("{title}\n  {}", forms.join("\n  "));
    [
        section("--pattern TEXT: the earlier bytes that a byte attends to", Pattern::NOTATION),
        "  They combine with & (pairs that all parts allow), + (pairs that any part allows) and / (heads use\n  \
         the parts in turn); & binds tighter than +, and + tighter than /. Brackets group."
            .to_owned(),
        section("--attention TEXT: a pattern, or content-based heads", &attention_forms()),
        section(
            "--selection TEXT: blocks of keys by content, among those of the pattern",
            Selection::NOTATION,
        ),
        "  KEEP is a number or a rule: k=12, ratio=0.25, p=0.9 (with min=, max=) or above=0.01. share=sum,\n  \
         mean, max or no: with GQA, heads that share keys share a selection or not. first=1, local=2 force\n  \
         the first block, and two blocks up to a byte's own."
            .to_owned(),
        section(
            "--cache TEXT: keys that a cache retains; from h2o on, per layer and KV head, with eviction",
            &POLICIES,
        ),
    ]
    .join("\n\n")
}

fn attention_forms() -> Vec<&'static str> {
    [&BY_PATTERN[..], ContentAttention::NOTATION].concat()
}

pub fn pattern(text: &str) -> Result<Pattern, String> {
    read("pattern", Pattern::NOTATION, text)
}

/// Checks `--pattern` and returns its text, which configurations of runs store.
pub fn pattern_text(text: &str) -> Result<String, String> {
    pattern(text).map(|_| text.to_owned())
}

pub fn selection(text: &str) -> Result<Selection, String> {
    read("selection", Selection::NOTATION, text)
}

pub fn attention(text: &str) -> Result<AttentionKind, String> {
    read("attention", &attention_forms(), text)
}

/// Returns what is wrong with a value of `--cache`.
pub fn policy_expected(text: &str) -> String {
    let unknown = unknown("policy", &POLICIES, text);
    unknown.unwrap_or_else(|| match form_of(text, &POLICIES) {
        Some(form) => format!("must be {form}, with whole numbers up to {MOST}"),
        None => format!("must be {}", CachePolicy::NOTATION),
    })
}

/// Parses a value of one of the forms.
fn read<T: FromStr<Err: Display>>(what: &str, forms: &[&str], text: &str) -> Result<T, String> {
    let error = |error: T::Err| unknown(what, forms, text).unwrap_or_else(|| error.to_string());
    text.parse().map_err(error)
}

/// Returns the error for a text with an unknown name, with the most similar form.
pub fn unknown(what: &str, forms: &[&str], text: &str) -> Option<String> {
    let mut names = text.split(['/', '+', '&', '(', ')']).map(name_of);
    let name = names.find(|name| !name.is_empty() && form_of(name, forms).is_none())?;
    // Similarity and threshold of clap for flags and commands.
    let likeness = |form: &&str| strsim::jaro(&name.to_lowercase(), name_of(form));
    let like = forms.iter().filter(|form| likeness(form) > 0.7);
    let like = like.max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    let tip = like.map_or(String::new(), |form| {
        format!(", did you mean {}?", text_of(form))
    });
    let program = program();
    Some(format!(
        "there is no {what} '{name}'{tip}\n\n  tip: '{program} patterns' lists them all"
    ))
}

/// Returns the form that a text is meant to have.
pub fn form_of<'a>(text: &str, forms: &[&'a str]) -> Option<&'a str> {
    let form = forms.iter().find(|form| name_of(form) == name_of(text))?;
    Some(text_of(form))
}

/// Returns `fixed` for `fixed:STRIDE,COLUMNS[,VERTS]`.
fn name_of(form: &str) -> &str {
    let text = form.trim();
    text.split([':', '[', ' ']).next().unwrap_or(text)
}

/// Returns a form without its description.
fn text_of(form: &str) -> &str {
    form.split("  ").next().unwrap_or(form)
}
