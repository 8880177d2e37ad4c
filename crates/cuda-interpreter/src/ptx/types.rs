//! Fundamental types of PTX (PTX ISA, section 5.2).

/// Type of an instruction's operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    Bits(u32),
    Unsigned(u32),
    Signed(u32),
    F16,
    BF16,
    F32,
    F64,
    F16x2,
    BF16x2,
    Predicate,
}

impl Type {
    /// Returns the type that a modifier names, if any.
    pub fn named(text: &str) -> Option<Self> {
        Some(match text {
            "b8" => Self::Bits(8),
            "b16" => Self::Bits(16),
            "b32" => Self::Bits(32),
            "b64" => Self::Bits(64),
            "u8" => Self::Unsigned(8),
            "u16" => Self::Unsigned(16),
            "u32" => Self::Unsigned(32),
            "u64" => Self::Unsigned(64),
            "s8" => Self::Signed(8),
            "s16" => Self::Signed(16),
            "s32" => Self::Signed(32),
            "s64" => Self::Signed(64),
            "f16" => Self::F16,
            "bf16" => Self::BF16,
            "f32" => Self::F32,
            "f64" => Self::F64,
            "f16x2" => Self::F16x2,
            "bf16x2" => Self::BF16x2,
            "pred" => Self::Predicate,
            _ => return None,
        })
    }

    pub fn bytes(self) -> usize {
        match self {
            Self::Bits(bits) | Self::Unsigned(bits) | Self::Signed(bits) => bits as usize / 8,
            Self::F16 | Self::BF16 => 2,
            Self::F32 | Self::F16x2 | Self::BF16x2 => 4,
            Self::F64 => 8,
            Self::Predicate => 1,
        }
    }

    pub fn is_signed(self) -> bool {
        matches!(self, Self::Signed(_))
    }

    pub fn is_integer(self) -> bool {
        matches!(self, Self::Bits(_) | Self::Unsigned(_) | Self::Signed(_))
    }

    /// Returns the low bits of `value` that belong to the type.
    pub fn truncate(self, value: u64) -> u64 {
        match self.bytes() {
            8 => value,
            bytes => value & ((1 << (8 * bytes)) - 1),
        }
    }

    /// Returns an integer's value, sign-extended to 64 bits if it is signed.
    pub fn widen(self, value: u64) -> i128 {
        let value = self.truncate(value);
        let unused = 64 - 8 * self.bytes() as u32;
        match self.is_signed() {
            true => (((value << unused) as i64) >> unused).into(),
            false => value.into(),
        }
    }
}
