//! Weight layouts by name and density, one table row for each.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::WeightLayout;
use crate::LayoutError;

/// Probability that a block of a small world moves: low enough that most neighbours stay, high enough that any two blocks are a few steps apart.
const REWIRING: f64 = 0.1;

/// Pattern of a weight's kept blocks, as named in flags and configurations. The density is separate.
///
/// ```
/// use blocksparse::WeightPattern;
///
/// let pattern: WeightPattern = "small-world".parse()?;
/// let layout = pattern.layout([256, 1024], 64, 0.25, 1)?;
/// assert_eq!(layout.len(), 16);
///
/// let (pattern, density) = WeightPattern::with_density("random:0.5")?;
/// assert_eq!((pattern, density), (WeightPattern::Random, 0.5));
/// # Ok::<(), blocksparse::LayoutError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum WeightPattern {
    /// [`WeightLayout::dense`], whatever the density.
    Dense,
    /// [`WeightLayout::random`].
    Random,
    /// [`WeightLayout::small_world`] with a rewiring of 0.1.
    SmallWorld,
    /// [`WeightLayout::barabasi_albert`].
    BarabasiAlbert,
    /// [`WeightLayout::banded_of_density`], whatever the seed.
    Banded,
}

/// Constructor from `[inputs, outputs]`, a block size, a density and a seed.
type Make = fn([usize; 2], usize, f64, u64) -> Result<WeightLayout, LayoutError>;

/// Name and constructor of each pattern.
const PATTERNS: &[(WeightPattern, &str, Make)] = &[
    (WeightPattern::Dense, "dense", |shape, block, _, _| {
        WeightLayout::dense(shape, block)
    }),
    (WeightPattern::Random, "random", WeightLayout::random),
    (
        WeightPattern::SmallWorld,
        "small-world",
        |shape, block, density, seed| {
            WeightLayout::small_world(shape, block, density, REWIRING, seed)
        },
    ),
    (
        WeightPattern::BarabasiAlbert,
        "barabasi-albert",
        WeightLayout::barabasi_albert,
    ),
    (
        WeightPattern::Banded,
        "banded",
        |shape, block, density, _| WeightLayout::banded_of_density(shape, block, density),
    ),
];

impl WeightPattern {
    /// Returns every pattern.
    pub fn all() -> impl Iterator<Item = Self> {
        PATTERNS.iter().map(|(pattern, ..)| *pattern)
    }

    fn row(self) -> &'static (Self, &'static str, Make) {
        let row = PATTERNS.iter().find(|(pattern, ..)| *pattern == self);
        row.expect("every pattern has its row")
    }

    /// Returns the name, which [`FromStr`] parses.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Builds the layout of a weight `[inputs, outputs]`. Patterns without randomness ignore the seed.
    ///
    /// # Errors
    /// As the [`WeightLayout`] constructor that the pattern names.
    pub fn layout(
        self,
        shape: [usize; 2],
        block: usize,
        density: f64,
        seed: u64,
    ) -> Result<WeightLayout, LayoutError> {
        (self.row().2)(shape, block, density, seed)
    }

    /// Parses a pattern and a density: `random:0.25`.
    ///
    /// # Errors
    /// [`LayoutError::Notation`] if the text is not a name and a number separated by a colon, and [`LayoutError::Argument`] if the number is not in
    /// `(0, 1]`.
    pub fn with_density(text: &str) -> Result<(Self, f64), LayoutError> {
        let wrong = |got: &str| notation(text, "NAME:DENSITY, such as random:0.25", got);
        let (name, density) = text.split_once(':').ok_or_else(|| wrong("no colon"))?;
        let pattern = name.trim().parse()?;
        let density = density.trim();
        let density: f64 = density.parse().map_err(|_| wrong(density))?;
        crate::ensure! { LayoutError; density > 0.0 && density <= 1.0 => "density", "above 0 and at most 1", density; }
        Ok((pattern, density))
    }
}

fn notation(part: &str, expected: impl Into<String>, got: &str) -> LayoutError {
    LayoutError::Notation {
        part: part.to_owned(),
        expected: expected.into(),
        got: got.to_owned(),
    }
}

impl fmt::Display for WeightPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for WeightPattern {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<Self, LayoutError> {
        let row = PATTERNS.iter().find(|(_, name, _)| *name == text);
        row.map(|(pattern, ..)| *pattern).ok_or_else(|| {
            let names: Vec<&str> = PATTERNS.iter().map(|(_, name, _)| *name).collect();
            notation(text, format!("one of {}", names.join(", ")), text)
        })
    }
}
