use std::fmt;

/// Value of a GGUF file's metadata. Integers and floats have 64 bits here, whatever their width in the file.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum GgufValue {
    /// `uint8`, `uint16`, `uint32` or `uint64`.
    Unsigned(u64),
    /// `int8`, `int16`, `int32` or `int64`.
    Signed(i64),
    /// `float32` or `float64`.
    Float(f64),
    /// `bool`.
    Bool(bool),
    /// `string`.
    String(String),
    /// An array of [`Self::Unsigned`].
    UnsignedArray(Vec<u64>),
    /// An array of [`Self::Signed`].
    SignedArray(Vec<i64>),
    /// An array of [`Self::Float`].
    FloatArray(Vec<f64>),
    /// An array of [`Self::Bool`].
    BoolArray(Vec<bool>),
    /// An array of [`Self::String`].
    StringArray(Vec<String>),
}

impl GgufValue {
    /// Returns a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// Returns a non-negative integer of any integer type.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::Unsigned(number) => Some(number),
            Self::Signed(number) => u64::try_from(number).ok(),
            _ => None,
        }
    }

    /// Returns a number of any type.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::Unsigned(number) => Some(number as f64),
            Self::Signed(number) => Some(number as f64),
            Self::Float(number) => Some(number),
            _ => None,
        }
    }

    /// Returns a bool.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Self::Bool(is) => Some(is),
            _ => None,
        }
    }

    /// Returns an array of strings, such as `tokenizer.ggml.tokens`.
    pub fn as_strings(&self) -> Option<&[String]> {
        match self {
            Self::StringArray(texts) => Some(texts),
            _ => None,
        }
    }

    /// Returns an array of any numeric type, such as `tokenizer.ggml.token_type`.
    pub fn as_floats(&self) -> Option<Vec<f64>> {
        match self {
            Self::UnsignedArray(numbers) => Some(numbers.iter().map(|&x| x as f64).collect()),
            Self::SignedArray(numbers) => Some(numbers.iter().map(|&x| x as f64).collect()),
            Self::FloatArray(numbers) => Some(numbers.clone()),
            _ => None,
        }
    }
}

impl fmt::Display for GgufValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = match self {
            Self::Unsigned(number) => return number.fmt(f),
            Self::Signed(number) => return number.fmt(f),
            Self::Float(number) => return number.fmt(f),
            Self::Bool(is) => return is.fmt(f),
            Self::String(text) => return text.fmt(f),
            Self::UnsignedArray(numbers) => numbers.len(),
            Self::SignedArray(numbers) => numbers.len(),
            Self::FloatArray(numbers) => numbers.len(),
            Self::BoolArray(bools) => bools.len(),
            Self::StringArray(texts) => texts.len(),
        };
        write!(f, "an array of {count}")
    }
}
