use std::fmt;

pub(super) type Result<T, E = WeightsError> = std::result::Result<T, E>;

/// Why weights were not loaded or not written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// A file could not be read.
    #[error("cannot read weights from {path}: {reason}")]
    Read {
        /// The file.
        path: String,
        /// What the system or the format's reader says.
        reason: String,
    },
    /// A file could not be written.
    #[error("cannot write weights to {path}: {reason}")]
    Write {
        /// The file.
        path: String,
        /// What the system or the format's writer says.
        reason: String,
    },
    /// A file's name does not say its format.
    #[error("the name of a file of weights must end in {expected}, got {path}")]
    Format {
        /// The file.
        path: String,
        /// The endings.
        expected: &'static str,
    },
    /// A map that takes a part of a tensor cannot be gone backwards.
    #[error(
        "weights can only be saved by a map from whole tensors to whole tensors, but {parameter} is {form}"
    )]
    OneWay {
        /// The parameter.
        parameter: String,
        /// How it lies in the file.
        form: String,
    },
    /// The file is not one of this module. Nothing was loaded.
    #[error("{path} does not fit the model, of which nothing was loaded: {}", mismatch(.missing, .unexpected, .wrong))]
    Mismatch {
        /// The file.
        path: String,
        /// Tensors that the module needs and the file lacks.
        missing: Vec<String>,
        /// Tensors of the file that are no parameter's.
        unexpected: Vec<String>,
        /// Tensors of another shape or kind.
        wrong: Vec<WrongTensor>,
    },
}

impl WeightsError {
    pub(super) fn read(path: &str, reason: impl fmt::Display) -> Self {
        Self::Read {
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }
}

/// A tensor of a file that is not what its parameter needs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WrongTensor {
    /// Its name in the file.
    pub name: String,
    /// The shape or kind that it had to have.
    pub expected: String,
    /// The shape or kind that it has.
    pub got: String,
}

impl fmt::Display for WrongTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} must be {}, got {}",
            self.name, self.expected, self.got
        )
    }
}

/// As many as a reader looks through; the error's fields have all of them.
const SHOWN: usize = 10;

fn mismatch(missing: &[String], unexpected: &[String], wrong: &[WrongTensor]) -> String {
    let wrong: Vec<String> = wrong.iter().map(WrongTensor::to_string).collect();
    let parts = [
        ("missing", missing),
        ("unexpected", unexpected),
        ("wrong", &wrong[..]),
    ];
    let parts = parts.iter().filter(|(_, names)| !names.is_empty());
    let parts: Vec<String> = parts
        .map(|(kind, names)| {
            let shown = names[..names.len().min(SHOWN)].join(", ");
            match names.len().saturating_sub(SHOWN) {
                0 => format!("{kind}: {shown}"),
                more => format!("{kind}: {shown} and {more} more"),
            }
        })
        .collect();
    parts.join("; ")
}
