//! PTX text, read into instructions.

mod compare;
mod convert;
mod floats;
mod functions;
mod instruction;
mod integers;
mod lanes;
mod lex;
mod numbers;
mod parse;
mod reader;
mod types;

pub use compare::comparison;
pub use convert::conversion;
pub use functions::pure;
pub use instruction::{Address, Binary, Instruction, Lanes, Place, Pure, Slot, Space, Special};
pub(crate) use lanes::lanes;
pub use numbers::{E4M3, F32, Float, bf16_to_f32, e4m3_to_f32, f16_to_f32, f32_to_f16};
pub use parse::{Kernel, Module};
pub use reader::{Argument, Decoded, Program, Reader};
pub use types::Type;
