use std::fmt;

pub(super) type Result<T, E = WeightsError> = std::result::Result<T, E>;

/// Errors of loading and writing weights.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// A file could not be read.
    #[error("cannot read weights from {path}: {reason}")]
    Read {
        /// Path of the file.
        path: String,
        /// Reason given by the system or the format's reader.
        reason: String,
    },
    /// A file could not be written.
    #[error("cannot write weights to {path}: {reason}")]
    Write {
        /// Path of the file.
        path: String,
        /// Reason given by the system or the format's writer.
        reason: String,
    },
    /// A file's name does not tell its format.
    #[error("the name of a file of weights must end in {expected}, got {path}")]
    Format {
        /// Path of the file.
        path: String,
        /// Supported endings.
        expected: &'static str,
    },
    /// A map that reads a part of a tensor cannot be used to save.
    #[error(
        "weights can only be saved by a map from whole tensors to whole tensors, but {parameter} is {form}"
    )]
    OneWay {
        /// Name of the parameter.
        parameter: String,
        /// Its form in the file.
        form: String,
    },
    /// The file does not match the module. Nothing was loaded.
    #[error("{path} does not fit the model, of which nothing was loaded: {}", mismatch(.missing, .unexpected, .wrong))]
    Mismatch {
        /// Path of the file.
        path: String,
        /// Tensors that the module needs and the file lacks.
        missing: Vec<String>,
        /// Tensors of the file that belong to no parameter.
        unexpected: Vec<String>,
        /// Tensors of the wrong shape or kind.
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

/// Tensor of a file that does not match its parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WrongTensor {
    /// Name in the file.
    pub name: String,
    /// Expected shape or kind.
    pub expected: String,
    /// Actual shape or kind.
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

/// Most names in a message; the error's fields have all.
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
