//! What the pattern playground of the book asks of [`blocksparse`]: a request as JSON in, a view of the layout as JSON out.

mod estimate;
mod examples;
mod exports;

use blocksparse::{LayoutError, Pattern};
use serde::{Deserialize, Serialize};

pub use estimate::speed_up;
pub use examples::EXAMPLES;

/// Cells of a picture per side, at most.
const MAX_CELLS: usize = 256;

/// The longest sequence.
const MAX_LENGTH: usize = 1 << 17;

const MAX_HEADS: usize = 128;

/// The most blocks of all heads, kept or not: they are counted in 32 bits.
const MAX_BLOCKS: f64 = (1u64 << 31) as f64;

/// Bytes of a score.
const F32: f64 = 4.0;

/// What the page asks for.
#[derive(Deserialize)]
struct Request {
    pattern: String,
    heads: usize,
    length: usize,
    block: usize,
}

/// What the page gets: a view or an error.
#[derive(Serialize)]
struct Answer {
    notation: &'static [&'static str],
    examples: &'static [&'static str],
    view: Option<View>,
    error: Option<String>,
}

#[derive(Serialize)]
struct View {
    /// The pattern, as it prints.
    name: String,
    causal: bool,
    /// Allowed pairs, of all heads.
    pairs: u64,
    density: f64,
    blocks: usize,
    all_blocks: usize,
    block_density: f64,
    /// Bytes of all scores in f32, and of those in kept blocks.
    score_bytes: [f64; 2],
    speed_up: f64,
    /// Positions of a cell of the pictures, per side.
    cell: usize,
    pictures: Vec<Picture>,
    rust: String,
    command: String,
}

/// The mask of the heads that are alike.
#[derive(Serialize)]
struct Picture {
    users: String,
    blocks: usize,
    /// The share of a cell's pairs, a hexadecimal digit each; only an empty cell is 0.
    rows: Vec<String>,
}

/// Answers a request.
pub fn answer(request: &str) -> String {
    let (view, error) = match view(request) {
        Ok(view) => (Some(view), None),
        Err(error) => (None, Some(error)),
    };
    let answer = Answer {
        notation: Pattern::NOTATION,
        examples: &EXAMPLES,
        view,
        error,
    };
    serde_json::to_string(&answer).expect("names and finite numbers")
}

fn view(request: &str) -> Result<View, String> {
    let request: Request = serde_json::from_str(request).map_err(|error| error.to_string())?;
    request.check()?;
    request.view().map_err(|error| error.to_string())
}

impl Request {
    /// Checks what would take too long in a page.
    fn check(&self) -> Result<(), String> {
        for (argument, value, max) in [
            ("heads", self.heads, MAX_HEADS),
            ("length", self.length, MAX_LENGTH),
        ] {
            if value > max {
                return Err(format!(
                    "{argument} must be at most {max} on this page, got {value}"
                ));
            }
        }
        let blocks = self.length.div_ceil(self.block.max(1)) as f64;
        let blocks = self.heads as f64 * blocks.powi(2);
        match blocks > MAX_BLOCKS {
            true => Err(format!(
                "heads · (length / block size)² must be at most {MAX_BLOCKS} on this page, got {blocks}"
            )),
            false => Ok(()),
        }
    }

    fn view(&self) -> Result<View, LayoutError> {
        let &Self {
            heads,
            length,
            block,
            ..
        } = self;
        let text = self.pattern.trim();
        let pattern: Pattern = text.parse()?;
        let layout = pattern.layout(heads, length, block)?;
        let cell = length.div_ceil(MAX_CELLS).next_power_of_two();
        let pictures = (0..layout.num_patterns()).map(|index| Picture {
            users: layout.users(index),
            blocks: layout.pattern_blocks(index),
            rows: digits(&layout.shades(index, cell)),
        });
        Ok(View {
            name: pattern.to_string(),
            causal: pattern.is_causal(),
            pairs: layout.allowed_pairs(),
            density: layout.density(),
            blocks: layout.blocks(),
            all_blocks: heads * layout.q_blocks() * layout.kv_blocks(),
            block_density: layout.block_density(),
            score_bytes: [
                F32 * heads as f64 * (length as f64).powi(2),
                F32 * layout.blocks() as f64 * (block as f64).powi(2),
            ],
            speed_up: speed_up(&pattern, &layout)?,
            cell,
            pictures: pictures.collect(),
            rust: rust(text, self),
            command: command(text, self),
        })
    }
}

fn digits(shades: &[Vec<f64>]) -> Vec<String> {
    let digit = |&share: &f64| {
        let digit = (share * 15.0).ceil() as u32;
        char::from_digit(digit, 16).expect("a share is at most 1")
    };
    shades
        .iter()
        .map(|row| row.iter().map(digit).collect())
        .collect()
}

fn rust(text: &str, request: &Request) -> String {
    let Request {
        heads,
        length,
        block,
        ..
    } = request;
    format!(
        "use burn_blocksparse::Pattern;\n\nlet pattern: Pattern = {text:?}.parse()?;\n\
         let layout = pattern.layout({heads}, {length}, {block})?; // heads, length, block size\n"
    )
}

fn command(text: &str, request: &Request) -> String {
    let Request {
        heads,
        length,
        block,
        ..
    } = request;
    format!(
        "cargo run -p enwik8 -- draw --pattern '{text}' --heads {heads} --seq {length} --block {block}"
    )
}

#[cfg(test)]
mod tests;
