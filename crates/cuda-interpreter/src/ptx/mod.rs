//! PTX text: tokens, types and operands, and functions of registers alone.

mod compare;
mod convert;
mod floats;
mod functions;
mod instruction;
mod integers;
mod lanes;
mod lex;
mod numbers;
mod reader;
mod types;

pub use compare::comparison;
pub use convert::conversion;
pub use functions::pure;
pub use instruction::{Address, Binary, Lanes, Place, Pure, Slot, Space, Special};
pub(crate) use lanes::lanes;
pub use lex::{Token, number, stripped, tokens};
pub use numbers::{E4M3, F32, Float};
pub use reader::{Argument, Decoded, Reader};
pub use types::Type;
