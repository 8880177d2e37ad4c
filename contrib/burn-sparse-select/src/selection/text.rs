//! Parser and writer of selections as text.

use std::fmt::Display;
use std::str::FromStr;

use blocksparse::{Always, Budget};

use crate::selection::Selection;
use crate::selection::sharing::{GqaReduction, WORDS};
use burn_blocksparse::OpError;

/// Text form of a method of selection.
pub(crate) struct Method {
    /// Name, which starts the text.
    pub name: &'static str,
    pub notation: &'static str,
    /// Parses the arguments after the name.
    pub read: fn(&mut Arguments) -> Result<Selection, OpError>,
}

/// Number types, with their names in errors.
pub(crate) trait Number: FromStr + Display {
    const KIND: &'static str;
}

impl Number for usize {
    const KIND: &'static str = "a whole number";
}

impl Number for f64 {
    const KIND: &'static str = "a number";
}

/// Arguments of a text, consumed one by one. Named arguments may appear anywhere; positional ones have an order.
pub(crate) struct Arguments<'a> {
    text: &'a str,
    notation: &'static str,
    placed: std::vec::IntoIter<&'a str>,
    named: Vec<(&'a str, &'a str)>,
    count: usize,
}

/// Default forced blocks for methods that run on models trained without selection: the first block holds the attention sinks, and the first queries of a block
/// have their nearest keys in the block before.
pub(crate) const SINKS_AND_NEAR: Always = Always { first: 1, local: 2 };

/// Names of the rules that may be given by name.
const RULES: [&str; 4] = ["k", "ratio", "p", "above"];

impl<'a> Arguments<'a> {
    /// Splits the arguments after a method's name in a text.
    pub fn new(text: &'a str, behind: &'a str, notation: &'static str) -> Self {
        let parts = behind.split(',').map(str::trim);
        let parts = parts.filter(|part| !part.is_empty());
        let (named, placed): (Vec<&str>, Vec<&str>) = parts.partition(|part| part.contains('='));
        let named = named.iter().filter_map(|part| part.split_once('='));
        let named = named.map(|(name, value)| (name.trim(), value.trim()));
        Self {
            text,
            notation,
            count: placed.len(),
            placed: placed.into_iter(),
            named: named.collect(),
        }
    }

    fn error(&self, expected: impl Into<String>, got: impl Into<String>) -> OpError {
        OpError::Selection {
            text: self.text.to_owned(),
            expected: expected.into(),
            got: got.into(),
        }
    }

    fn missing(&self) -> OpError {
        let numbers = match self.count {
            1 => "1 number".to_owned(),
            count => format!("{count} numbers"),
        };
        self.error(self.notation, numbers)
    }

    fn number<T: Number>(&self, name: &str, text: &str) -> Result<T, OpError> {
        let error = |_| self.error(format!("{name} to be {}", T::KIND), format!("'{text}'"));
        text.parse().map_err(error)
    }

    /// Parses the next positional number.
    pub fn next<T: Number>(&mut self, name: &str) -> Result<T, OpError> {
        let text = self.placed.next().ok_or_else(|| self.missing())?;
        self.number(name, text)
    }

    /// Parses the next positional number, or returns the default.
    pub fn next_or<T: Number>(&mut self, name: &str, default: T) -> Result<T, OpError> {
        let text = self.placed.next();
        text.map_or(Ok(default), |text| self.number(name, text))
    }

    /// Parses a named number, or returns the default.
    pub fn named<T: Number>(&mut self, name: &str, default: T) -> Result<T, OpError> {
        let text = self.take(name);
        text.map_or(Ok(default), |text| self.number(name, text))
    }

    /// Parses a named flag, 0 or 1, or returns the default.
    pub fn flag(&mut self, name: &str, default: bool) -> Result<bool, OpError> {
        match self.take(name) {
            None => Ok(default),
            Some("0") => Ok(false),
            Some("1") => Ok(true),
            Some(text) => Err(self.error(format!("{name} to be 0 or 1"), format!("'{text}'"))),
        }
    }

    /// Parses the forced blocks, `first=` and `local=`, or returns the defaults.
    pub fn forced(&mut self, default: Always) -> Result<Always, OpError> {
        Ok(Always {
            first: self.named("first", default.first)?,
            local: self.named("local", default.local)?,
        })
    }

    fn take(&mut self, name: &str) -> Option<&'a str> {
        let at = self.named.iter().position(|(named, _)| *named == name)?;
        Some(self.named.remove(at).1)
    }

    /// Parses a named rule (`k=12`, `ratio=0.25`, `p=0.9` with optional `min=` and `max=`, `above=0.01`), or a positional number that `plain` converts to a
    /// rule.
    pub fn keep(&mut self, name: &str, plain: fn(f64) -> Budget) -> Result<Budget, OpError> {
        if let Some(rule) = self.named_keep()? {
            return Ok(rule);
        }
        let text = self.placed.next().ok_or_else(|| self.missing())?;
        let mut rule = plain(self.number(name, text)?);
        if let Budget::TopK(k) = &mut rule {
            *k = self.number(name, text)?;
        }
        self.limits(rule)
    }

    /// Parses a named rule, if there is one.
    pub fn named_keep(&mut self) -> Result<Option<Budget>, OpError> {
        let mut rule = None;
        for key in RULES {
            let Some(text) = self.take(key) else {
                continue;
            };
            if rule.is_some() {
                return Err(self.error("one rule", format!("also {key}={text}")));
            }
            rule = Some(match key {
                "k" => Budget::TopK(self.number(key, text)?),
                "ratio" => Budget::Ratio(self.number(key, text)?),
                "above" => Budget::MinP(self.number(key, text)?),
                _ => Budget::top_p(self.number(key, text)?),
            });
        }
        rule.map(|rule| self.limits(rule)).transpose()
    }

    /// Parses the limits of the number of blocks of a top-p rule.
    fn limits(&mut self, mut rule: Budget) -> Result<Budget, OpError> {
        if let Budget::TopP { min, max, .. } = &mut rule {
            *min = self.named("min", *min)?;
            *max = self.named("max", *max)?;
        }
        Ok(rule)
    }

    /// Parses how heads share a selection, if the text says so.
    pub fn gqa_reduction(&mut self) -> Result<Option<GqaReduction>, OpError> {
        let Some(text) = self.take("share") else {
            return Ok(None);
        };
        match WORDS.iter().find(|(word, _)| *word == text) {
            Some((_, sharing)) => Ok(Some(*sharing)),
            None => Err(self.error("share to be no, sum, mean or max", format!("'{text}'"))),
        }
    }

    pub fn end(&mut self) -> Result<(), OpError> {
        if let Some(text) = self.placed.next() {
            return Err(self.error(self.notation, format!("also '{text}'")));
        }
        match self.named.first() {
            None => Ok(()),
            Some((name, _)) => Err(self.error(self.notation, format!("'{name}='"))),
        }
    }
}

/// Builder of a selection's text: the inverse of [`Arguments`].
pub(crate) struct Written {
    text: String,
    is_first: bool,
}

impl Written {
    /// Starts the text of a method.
    pub fn new(name: &str) -> Self {
        Self {
            text: name.to_owned(),
            is_first: true,
        }
    }

    fn argument(mut self, text: &str) -> Self {
        self.text.push(if self.is_first { ':' } else { ',' });
        self.text.push_str(text);
        self.is_first = false;
        self
    }

    /// Appends a number.
    pub fn number(self, number: impl Number) -> Self {
        self.argument(&number.to_string())
    }

    /// Appends a rule, without its name if it is the method's positional rule.
    pub fn keep(self, keep: Budget, is_plain: impl Fn(Budget) -> bool) -> Self {
        let name = |name: &str| match is_plain(keep) {
            true => String::new(),
            false => format!("{name}="),
        };
        match keep {
            Budget::TopK(k) => self.argument(&format!("{}{k}", name("k"))),
            Budget::Ratio(ratio) => self.argument(&format!("{}{ratio}", name("ratio"))),
            Budget::MinP(above) => self.argument(&format!("{}{above}", name("above"))),
            Budget::TopP { p, min, max } => {
                let mut written = self.argument(&format!("{}{p}", name("p")));
                if min > 0 {
                    written = written.argument(&format!("min={min}"));
                }
                if max < usize::MAX {
                    written = written.argument(&format!("max={max}"));
                }
                written
            }
        }
    }

    /// Appends a named whole number, unless it is the default.
    pub fn named_whole(self, name: &str, number: usize, default: usize) -> Self {
        match number == default {
            true => self,
            false => self.argument(&format!("{name}={number}")),
        }
    }

    /// Appends the forced blocks, unless they are the defaults.
    pub fn forced(self, forced: Always, default: Always) -> Self {
        let written = self.named_whole("first", forced.first, default.first);
        written.named_whole("local", forced.local, default.local)
    }

    /// Returns the text, with how heads share a selection unless that is the default.
    pub fn finish(self, sharing: GqaReduction, default: GqaReduction) -> String {
        match sharing == default {
            true => self.text,
            false => self.argument(&format!("share={sharing}")).text,
        }
    }
}
