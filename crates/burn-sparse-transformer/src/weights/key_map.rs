use super::Form;

/// Names and forms of a module's parameters in a file.
///
/// A rule gives the names of parameters, the names of their tensors in the file, and the form there. In both names `{}` stands for a number, the same in
/// both. A parameter without a rule has its own name in the file. Several rules for one parameter are tried in order: the first whose tensor is in the file
/// applies.
///
/// ```
/// use burn_sparse_transformer::weights::{Form, KeyMap};
///
/// let map = KeyMap::default()
///     .rule("layers.{}.mha.query.weight", "encoder.{}.q.kernel", Form::Transposed)
///     .ignore("encoder.{}.position_ids");
/// assert_eq!(map.name_of("layers.11.mha.query.weight"), "encoder.11.q.kernel");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "a map does nothing until weights are loaded or saved by it"]
pub struct KeyMap {
    rules: Vec<Rule>,
    ignored: Vec<String>,
    prefixes: Vec<String>,
    kept: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    parameter: String,
    tensor: String,
    form: Form,
}

impl KeyMap {
    /// Adds a rule: parameters of this name are read from tensors of that name, which have this form.
    pub fn rule(
        mut self,
        parameter: impl Into<String>,
        tensor: impl Into<String>,
        form: Form,
    ) -> Self {
        self.rules.push(Rule {
            parameter: parameter.into(),
            tensor: tensor.into(),
            form,
        });
        self
    }

    /// Adds tensors of a file that are ignored, such as buffers of masks.
    pub fn ignore(mut self, tensor: impl Into<String>) -> Self {
        self.ignored.push(tensor.into());
        self
    }

    /// Adds parameters, by their names in the module, that files may lack. They keep their values then: for additions to a trained model.
    pub fn keep(mut self, parameter: impl Into<String>) -> Self {
        self.kept.push(parameter.into());
        self
    }

    /// Applies [`Self::keep`] to the indexers of a model with `dsa` or `msa`, for files of dense models, which have none.
    pub fn without_indexers(self) -> Self {
        let parts = [
            (
                "dsa.indexer",
                "query.weight key.weight norm.gamma norm.beta weights.weight",
            ),
            (
                "msa",
                "query.weight key.weight query_norm.gamma key_norm.gamma",
            ),
        ];
        let names = parts.iter().flat_map(|(part, names)| {
            (names.split(' ')).map(move |name| format!("blocks.{{}}.mha.content.{part}.{name}"))
        });
        names.fold(self, Self::keep)
    }

    /// Adds a prefix that names in a file may have; it is removed from names that have it. Names in rules may have it too; saved files have it then.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefixes.push(prefix.into());
        self
    }

    /// Returns the name of a parameter's tensor, by the first rule for it.
    pub fn name_of(&self, parameter: &str) -> String {
        let [(name, _), ..] = &self.candidates(parameter)[..] else {
            return parameter.to_owned();
        };
        name.clone()
    }

    /// Returns the tensors that a parameter may be read from, at least one.
    pub(super) fn candidates(&self, parameter: &str) -> Vec<(String, Form)> {
        let named = self.rules.iter().filter_map(|rule| {
            let numbers = numbers(&rule.parameter, parameter)?;
            Some((filled(&rule.tensor, &numbers), rule.form))
        });
        let named: Vec<_> = named.collect();
        match named.is_empty() {
            true => vec![(parameter.to_owned(), Form::Same)],
            false => named,
        }
    }

    /// Returns whether files may lack a parameter.
    pub(super) fn is_kept(&self, parameter: &str) -> bool {
        let mut kept = self.kept.iter();
        kept.any(|pattern| numbers(pattern, parameter).is_some())
    }

    pub(super) fn is_ignored(&self, tensor: &str) -> bool {
        let mut ignored = self.ignored.iter();
        ignored.any(|pattern| numbers(pattern, tensor).is_some())
    }

    /// Removes the prefix of a name, if it has one.
    pub(super) fn without_prefix<'a>(&self, name: &'a str) -> &'a str {
        let mut prefixes = self.prefixes.iter();
        prefixes
            .find_map(|prefix| name.strip_prefix(prefix.as_str()))
            .unwrap_or(name)
    }
}

/// Returns the numbers in `name` in place of `{}` in `pattern`, if the rest is equal.
fn numbers<'a>(pattern: &str, name: &'a str) -> Option<Vec<&'a str>> {
    let mut parts = pattern.split("{}");
    let mut rest = name.strip_prefix(parts.next()?)?;
    let mut numbers = Vec::new();
    for part in parts {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        if digits == 0 {
            return None;
        }
        let (number, after) = rest.split_at(digits);
        numbers.push(number);
        rest = after.strip_prefix(part)?;
    }
    rest.is_empty().then_some(numbers)
}

/// Replaces the `{}` of `pattern` by `numbers`.
fn filled(pattern: &str, numbers: &[&str]) -> String {
    let mut parts = pattern.split("{}");
    let mut name = parts.next().unwrap_or_default().to_owned();
    for (index, part) in parts.enumerate() {
        name += numbers.get(index).unwrap_or(&"{}");
        name += part;
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_taken_over() {
        let map = KeyMap::default()
            .rule("a.{}.b.{}.w", "x.{}.{}", Form::Transposed)
            .rule("a.{}.b.{}.w", "y.{}", Form::Same);
        let expected = [
            ("x.10.2".to_owned(), Form::Transposed),
            ("y.10".to_owned(), Form::Same),
        ];
        assert_eq!(map.candidates("a.10.b.2.w"), expected);
        for other in ["a..b.2.w", "a.1.b.2.ww", "aa.1.b.2.w", "a.1.b.x.w"] {
            assert_eq!(map.name_of(other), other);
        }
    }

    #[test]
    fn prefixes_may_be_there() {
        let map = KeyMap::default()
            .prefix("transformer.")
            .ignore("h.{}.attn.bias");
        assert_eq!(map.without_prefix("transformer.h.0.w"), "h.0.w");
        assert_eq!(map.without_prefix("h.0.w"), "h.0.w");
        assert!(map.is_ignored("h.3.attn.bias") && !map.is_ignored("h.3.attn.c_attn.bias"));
    }
}
