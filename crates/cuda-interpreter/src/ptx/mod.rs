//! PTX text, read into instructions.

mod compare;
mod convert;
mod copies;
mod decode;
mod floats;
mod functions;
mod instruction;
mod integers;
mod lanes;
mod lex;
mod numbers;
mod parse;
mod products;
mod reader;
mod types;

pub use instruction::{
    Address, Bulk, Effect, Element, Fragment, FragmentPlace, FragmentProduct, GroupProduct,
    Instruction, Lanes, Left, Op, Outside, Place, Product, Shuffle, Slot, Space, Special, Together,
    Vector, Vote, Way,
};
pub use numbers::{bf16_to_f32, e4m3_to_f32, f16_to_f32, f32_to_f16};
pub use parse::{Kernel, Module};
pub use types::Type;
