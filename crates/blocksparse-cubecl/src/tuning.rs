//! Environment variables that control the choice of kernels, for measuring and comparing. Read once per process.

use std::ffi::OsString;
use std::str::FromStr;
use std::sync::OnceLock;

/// Prefix of the variables.
const PREFIX: &str = "BLOCKSPARSE_";
/// Former prefix of two variables. A process that still sets them gets an error.
const FORMER_PREFIX: &str = "BURN_BLOCKSPARSE_";

/// Settings for the choice of kernels, with a field per environment variable. An empty variable counts as unset.
///
/// ```
/// use blocksparse_cubecl::{TierLimit, Tuning};
///
/// let tuning = Tuning::parse([("BLOCKSPARSE_TIER", "mma"), ("HOME", "/root")])?;
/// assert_eq!(tuning.tier, TierLimit::Mma);
/// let error = Tuning::parse([("BLOCKSPARSE_COARSE", "no")]).unwrap_err();
/// assert_eq!(error.to_string(), "BLOCKSPARSE_COARSE must be 0 or 1, got \"no\"");
/// # Ok::<(), blocksparse_cubecl::TuningError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tuning {
    /// `BLOCKSPARSE_TIER`: tiers to leave out.
    pub tier: TierLimit,
    /// `BLOCKSPARSE_COARSE`: coarse steps, never or wherever possible. `None` means where they should be faster.
    pub coarse: Option<bool>,
    /// `BLOCKSPARSE_SIMT_TILE`: rows, columns and rows per unit of the `simt` tier's tile.
    pub simt_tile: Option<[usize; 3]>,
    /// `BLOCKSPARSE_SIMT_SUMS`: MiB limit for the sums of dQ in the `simt` tier's fused backward pass.
    pub simt_sums: usize,
    /// `BLOCKSPARSE_MMA_TILE`: warps, 16-row tiles per warp, columns per step and stages of the `mma` tier's forward pass, dQ, and dK with dV.
    pub mma_tile: [Option<[usize; 4]>; 3],
    /// `BLOCKSPARSE_LISTED`: how queries attend to their lists.
    pub listed: Option<ListedWay>,
    /// `BLOCKSPARSE_RECORDS`: MiB of pair records at a time.
    pub records: usize,
    /// `BLOCKSPARSE_UNFENCED`: whether the fused backward pass of the `hopper` tier adds to dQ without fences. That is 3 to 6% faster, but PTX's memory
    /// model does not guarantee the order that the hardware keeps.
    pub unfenced: bool,
    /// `BLOCKSPARSE_REFERENCE`: whether the reference implementation replaces the kernels.
    pub reference: bool,
    /// `BLOCKSPARSE_POISON`: whether outputs are filled with NaN before every launch, so that an unwritten element cannot pass for a result.
    pub poison: bool,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            tier: TierLimit::None,
            coarse: None,
            simt_tile: None,
            simt_sums: 1024,
            mma_tile: [None; 3],
            listed: None,
            records: 512,
            unfenced: false,
            reference: false,
            poison: false,
        }
    }
}

/// Method of attention to lists of single keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ListedWay {
    /// Each query reads its own list.
    Queries,
    /// Neighbouring queries share the union of their lists.
    Neighbours,
    /// In the forward pass, blocks loop over the queries that list them.
    Blocks,
    /// Tiles compute all pairs and mask.
    Tiles,
}

/// An invalid environment variable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TuningError {
    /// Invalid value.
    #[error("{variable} must be {expected}, got {got:?}")]
    Value {
        /// Name of the variable.
        variable: &'static str,
        /// Valid values.
        expected: &'static str,
        /// The given value.
        got: String,
    },
    /// Unknown name with a prefix of the variables.
    #[error(
        "an environment variable that begins with BLOCKSPARSE_ or BURN_BLOCKSPARSE_ must be one of {}, got {got}",
        names().join(", ")
    )]
    Name {
        /// The given name.
        got: String,
    },
}

/// Name, valid values and parser of a variable. The parser returns `None` for an invalid value.
struct Variable {
    name: &'static str,
    expected: &'static str,
    set: fn(&mut Tuning, &str) -> Option<()>,
}

const SWITCH: &str = "0 or 1";
const MIB: &str = "a whole number of MiB";

macro_rules! variables {
    ($($name:expr, $expected:expr => $field:ident: $read:expr;)+) => {
        const VARIABLES: &[Variable] = &[$(Variable {
            name: $name,
            expected: $expected,
            set: |tuning, text| {
                let read: fn(&str) -> Option<_> = $read;
                tuning.$field = read(text)?;
                Some(())
            },
        }),+];
    };
}

variables! {
    "BLOCKSPARSE_COARSE", SWITCH => coarse: |text| switch(text).map(Some);
    "BLOCKSPARSE_LISTED", "queries, neighbours, blocks or tiles" => listed: |text| listed_way(text).map(Some);
    "BLOCKSPARSE_MMA_TILE",
        "WARPSxWARP_TILESxCOLSxSTAGES of forward, or up to three of them with commas between, forward, dQ and dK, dV"
        => mma_tile: shapes;
    "BLOCKSPARSE_POISON", SWITCH => poison: switch;
    "BLOCKSPARSE_RECORDS", MIB => records: number;
    "BLOCKSPARSE_REFERENCE", SWITCH => reference: switch;
    "BLOCKSPARSE_SIMT_SUMS", MIB => simt_sums: number;
    "BLOCKSPARSE_SIMT_TILE", "ROWSxCOLSxUNIT_ROWS, each at least 1" => simt_tile: |text| shape(text).map(Some);
    TIER, TIERS => tier: |text| text.parse().ok();
    "BLOCKSPARSE_UNFENCED", SWITCH => unfenced: switch;
}

const TIER: &str = "BLOCKSPARSE_TIER";
const TIERS: &str =
    "simt, simt-unfused, simt-fused, mma, hopper-forward, hopper-unfused, hopper-alone or mma-bias";

fn names() -> Vec<&'static str> {
    VARIABLES.iter().map(|variable| variable.name).collect()
}

fn switch(text: &str) -> Option<bool> {
    match text {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

fn number(text: &str) -> Option<usize> {
    text.parse().ok()
}

fn listed_way(text: &str) -> Option<ListedWay> {
    match text {
        "queries" => Some(ListedWay::Queries),
        "neighbours" => Some(ListedWay::Neighbours),
        "blocks" => Some(ListedWay::Blocks),
        "tiles" => Some(ListedWay::Tiles),
        _ => None,
    }
}

/// Parses `N` numbers joined by x, each at least 1.
fn shape<const N: usize>(text: &str) -> Option<[usize; N]> {
    let numbers = text
        .split('x')
        .map(|part| number(part).filter(|&number| number > 0));
    let numbers: Option<Vec<usize>> = numbers.collect();
    numbers?.try_into().ok()
}

/// Parses 1 to `M` shapes joined by commas. Missing ones stay `None`.
fn shapes<const N: usize, const M: usize>(text: &str) -> Option<[Option<[usize; N]>; M]> {
    let mut all = [None; M];
    for (index, text) in text.split(',').enumerate() {
        *all.get_mut(index)? = Some(shape(text)?);
    }
    Some(all)
}

impl Tuning {
    /// Parses names and values. Names without one of the prefixes are ignored.
    ///
    /// # Errors
    /// [`TuningError`] for the first unknown name or invalid value.
    pub fn parse<N, V>(variables: impl IntoIterator<Item = (N, V)>) -> Result<Self, TuningError>
    where
        N: Into<OsString>,
        V: Into<OsString>,
    {
        let mut tuning = Self::default();
        for (name, value) in variables {
            let name = name.into().to_string_lossy().into_owned();
            if !(name.starts_with(PREFIX) || name.starts_with(FORMER_PREFIX)) {
                continue;
            }
            let known = VARIABLES.iter().find(|variable| variable.name == name);
            let variable = known.ok_or(TuningError::Name { got: name })?;
            let value = value.into().to_string_lossy().into_owned();
            if value.is_empty() {
                continue;
            }
            if (variable.set)(&mut tuning, &value).is_none() {
                return Err(TuningError::Value {
                    variable: variable.name,
                    expected: variable.expected,
                    got: value,
                });
            }
        }
        Ok(tuning)
    }

    /// Returns the settings of the process's environment, which is read at the first call.
    ///
    /// # Errors
    /// Those of [`parse`](Self::parse), at every call.
    pub fn of_process() -> Result<&'static Self, TuningError> {
        process().as_ref().map_err(|(error, _)| error.clone())
    }

    /// Like [`of_process`](Self::of_process), with errors as refusal reasons for plans.
    pub fn or_reason() -> Result<&'static Self, &'static str> {
        process().as_ref().map_err(|(_, reason)| reason.as_str())
    }

    /// Like [`of_process`](Self::of_process), but returns the default if the environment is invalid. For callers that cannot return an error: the code that
    /// sets up a device has called [`of_process`](Self::of_process) before anything is chosen for it.
    pub fn or_default() -> &'static Self {
        static DEFAULT: OnceLock<Tuning> = OnceLock::new();
        match process() {
            Ok(tuning) => tuning,
            Err(_) => DEFAULT.get_or_init(Self::default),
        }
    }
}

/// Returns the settings of the environment, or the error with its text.
fn process() -> &'static Result<Tuning, (TuningError, String)> {
    static PROCESS: OnceLock<Result<Tuning, (TuningError, String)>> = OnceLock::new();
    PROCESS.get_or_init(|| {
        Tuning::parse(std::env::vars_os()).map_err(|error| {
            let reason = error.to_string();
            (error, reason)
        })
    })
}

/// Tiers that a call leaves out, for measuring and comparing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TierLimit {
    /// Leaves out none.
    #[default]
    None,
    /// Leaves out all tensor-core tiers.
    Simt,
    /// Leaves out all tensor-core tiers, and the fused backward pass of the `simt` tier.
    SimtUnfused,
    /// Leaves out all tensor-core tiers, and the two mainloops of the `simt` tier wherever its fused backward pass can run.
    SimtFused,
    /// Leaves out the `hopper` tier.
    Mma,
    /// Leaves out the backward pass of the `hopper` tier.
    HopperForward,
    /// Leaves out the fused backward pass of the `hopper` tier.
    HopperUnfused,
    /// Leaves out the sharing of a tile's queries by several cubes in the fused pass, and of a tile's steps in the two mainloops.
    HopperAlone,
    /// Leaves out the bias gradient on the `hopper` tier.
    MmaBias,
}

impl TierLimit {
    /// Whether all tensor-core tiers are left out.
    pub fn is_simt(self) -> bool {
        matches!(self, Self::Simt | Self::SimtUnfused | Self::SimtFused)
    }
}

impl FromStr for TierLimit {
    type Err = TuningError;

    fn from_str(text: &str) -> Result<Self, TuningError> {
        Ok(match text {
            "" => Self::None,
            "simt" => Self::Simt,
            "simt-unfused" => Self::SimtUnfused,
            "simt-fused" => Self::SimtFused,
            "mma" => Self::Mma,
            "hopper-forward" => Self::HopperForward,
            "hopper-unfused" => Self::HopperUnfused,
            "hopper-alone" => Self::HopperAlone,
            "mma-bias" => Self::MmaBias,
            _ => {
                return Err(TuningError::Value {
                    variable: TIER,
                    expected: TIERS,
                    got: text.into(),
                });
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, value: &str) -> Result<Tuning, TuningError> {
        Tuning::parse([(name, value)])
    }

    /// Invalid values of each variable, and the expected message.
    const WRONG: [(&str, &str, &str); 15] = [
        ("UNFENCED", "yes", "0 or 1"),
        ("COARSE", "2", "0 or 1"),
        ("LISTED", "query", "queries, neighbours, blocks or tiles"),
        ("MMA_TILE", "4x2x64", "WARPSxWARP_TILESxCOLSxSTAGES"),
        ("MMA_TILE", "4x2x64x2x1", "WARPSxWARP_TILESxCOLSxSTAGES"),
        ("MMA_TILE", "4x2x0x2", "WARPSxWARP_TILESxCOLSxSTAGES"),
        ("MMA_TILE", "4x2x64x2,", "WARPSxWARP_TILESxCOLSxSTAGES"),
        ("POISON", "yes", "0 or 1"),
        ("RECORDS", "512MiB", "a whole number of MiB"),
        ("REFERENCE", "true", "0 or 1"),
        ("SIMT_SUMS", "-1", "a whole number of MiB"),
        ("SIMT_TILE", "64x32", "ROWSxCOLSxUNIT_ROWS"),
        ("SIMT_TILE", "64x32xfour", "ROWSxCOLSxUNIT_ROWS"),
        ("SIMT_TILE", "64x32x0", "ROWSxCOLSxUNIT_ROWS"),
        ("TIER", "hoper", TIERS),
    ];

    #[test]
    fn no_wrong_value_of_any_variable_is_taken() {
        for (name, value, said) in WRONG {
            let name = format!("{PREFIX}{name}");
            let error = of(&name, value).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("{name} must be {said}")),
                "{error}"
            );
            assert!(error.ends_with(&format!("got {value:?}")), "{error}");
        }
        // `WRONG` covers every variable.
        for name in names() {
            let wrong = WRONG
                .iter()
                .any(|(end, ..)| name == format!("{PREFIX}{end}"));
            assert!(wrong, "{name}");
            assert_eq!(of(name, ""), Ok(Tuning::default()));
        }
    }

    #[test]
    fn no_wrong_name_is_taken() {
        for name in [
            "BLOCKSPARSE_TEIR",
            "BURN_BLOCKSPARSE_POISON",
            "BLOCKSPARSE_tier",
        ] {
            let error = of(name, "1").unwrap_err().to_string();
            assert!(
                error.contains("must be one of BLOCKSPARSE_COARSE, "),
                "{error}"
            );
            assert!(error.ends_with(&format!("got {name}")), "{error}");
        }
        assert_eq!(of("BURN_SPARSE_DEVICE", "wgpu"), Ok(Tuning::default()));
    }

    #[test]
    fn values_go_where_they_belong() {
        macro_rules! check {
            ($($name:literal, $value:literal => $field:ident: $set:expr;)+) => {$(
                let expected = Tuning { $field: $set, ..Tuning::default() };
                assert_eq!(of(&format!("{PREFIX}{}", $name), $value), Ok(expected), "{}={}", $name, $value);
            )+};
        }
        check! {
            "UNFENCED", "1" => unfenced: true;
            "COARSE", "0" => coarse: Some(false);
            "COARSE", "1" => coarse: Some(true);
            "LISTED", "queries" => listed: Some(ListedWay::Queries);
            "LISTED", "neighbours" => listed: Some(ListedWay::Neighbours);
            "LISTED", "blocks" => listed: Some(ListedWay::Blocks);
            "LISTED", "tiles" => listed: Some(ListedWay::Tiles);
            "MMA_TILE", "4x2x64x2" => mma_tile: [Some([4, 2, 64, 2]), None, None];
            "POISON", "1" => poison: true;
            "RECORDS", "64" => records: 64;
            "REFERENCE", "1" => reference: true;
            "SIMT_SUMS", "0" => simt_sums: 0;
            "SIMT_TILE", "64x32x4" => simt_tile: Some([64, 32, 4]);
            "TIER", "simt" => tier: TierLimit::Simt;
            "TIER", "simt-unfused" => tier: TierLimit::SimtUnfused;
            "TIER", "simt-fused" => tier: TierLimit::SimtFused;
            "TIER", "mma" => tier: TierLimit::Mma;
            "TIER", "hopper-forward" => tier: TierLimit::HopperForward;
            "TIER", "hopper-unfused" => tier: TierLimit::HopperUnfused;
            "TIER", "hopper-alone" => tier: TierLimit::HopperAlone;
            "TIER", "mma-bias" => tier: TierLimit::MmaBias;
        }
    }

    #[cfg(unix)]
    #[test]
    fn bytes_that_are_no_text_are_wrong_values() {
        use std::os::unix::ffi::OsStringExt;

        let value = OsString::from_vec(vec![b's', 0xff]);
        let error = Tuning::parse([(OsString::from(TIER), value)]).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("BLOCKSPARSE_TIER must be simt, ")
        );
    }
}
