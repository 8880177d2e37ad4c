//! Runs our attention kernels beneath Burn's own `attention`: an optimization of Burn's fusion that is tried before Burn's kernels.

mod call;

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use blocksparse::Pattern;
use blocksparse_cubecl::Tuning;
use burn::backend::ir::{AttentionOpIr, ModuleOperationIr, OperationIr, TensorIr};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;

use crate::accelerated::call::CubeAttention;
use crate::base::taken::{Taken, TakenContext, take, tensor};
use crate::error::OpError;

/// Number of calls that ran on our kernels, and of calls that fell back to Burn.
static TAKEN: AtomicU64 = AtomicU64::new(0);
static FALLEN_BACK: AtomicU64 = AtomicU64::new(0);

type Choose = dyn Fn(&AttentionCall) -> Option<Pattern> + Send + Sync;

/// Callback that chooses the pattern of a call.
static CHOOSE: OnceLock<Box<Choose>> = OnceLock::new();

/// Runs every `burn::tensor::module::attention` of this program on our kernels if autodiff does not track its tensors: inference. Masks, biases, scale, softcap
/// and causality have the same meaning as in Burn, and results are equal up to rounding. Calls that no kernel supports run as before. Call this once, before
/// the first tensor of the program:
///
/// ```no_run
/// use burn_blocksparse::module::{accelerate_attention, accelerated_attention};
///
/// accelerate_attention()?;
/// // Anything that Burn does.
/// println!("{}", accelerated_attention());
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// It works through Burn's fusion, which applications enable by default, and only for devices with fusion (`Device::wgpu`, `Device::cuda`).
///
/// **It does not affect training**: on a device with autodiff Burn computes attention by separate operations so that each has a gradient.
/// Use [`attention`](crate::module::attention), which has a fused forward and backward pass. It does not affect burn-nn's layers either, since they do not call
/// `attention`.
///
/// # Memory
/// A mask becomes a bias of its own size. A mask and a bias together become one bias of their broadcast size. Nothing else has `seq_q × seq_kv` elements.
///
/// # Errors
/// [`OpError::Registry`] if it is called after the first tensor operation or a second time; [`OpError::Kernel`] if an environment variable of the kernels is
/// invalid.
pub fn accelerate_attention() -> Result<(), OpError> {
    Tuning::of_process()?;
    take::<Attention>()
}

/// Does the same as [`accelerate_attention`], and restricts calls for which `choose` returns a pattern to its pairs, in addition to causality and the mask.
///
/// ```no_run
/// use burn_blocksparse::Pattern;
/// use burn_blocksparse::module::accelerate_attention_with;
///
/// // Beyond 8,192 keys: the first 64, and the last 4,096.
/// accelerate_attention_with(|call| (call.seq_kv > 8192).then(|| Pattern::streaming(4096, 64)))?;
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// If a pattern has no layout for the call's sizes, Burn computes the call densely.
///
/// # Errors
/// As [`accelerate_attention`].
pub fn accelerate_attention_with(
    choose: impl Fn(&AttentionCall) -> Option<Pattern> + Send + Sync + 'static,
) -> Result<(), OpError> {
    accelerate_attention()?;
    // Only the first call gets here.
    let _ = CHOOSE.set(Box::new(choose));
    Ok(())
}

/// A call of Burn's `attention`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AttentionCall {
    /// Batch size.
    pub batch: usize,
    /// Number of heads.
    pub heads: usize,
    /// Number of queries.
    pub seq_q: usize,
    /// Number of keys.
    pub seq_kv: usize,
    /// True if queries see no later keys.
    pub is_causal: bool,
    /// True if there is a boolean mask.
    pub has_mask: bool,
    /// True if there is a bias.
    pub has_bias: bool,
}

/// Counts of Burn's `attention` calls by implementation. Launches are lazy: a call is counted once its result is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AcceleratedAttention {
    /// Number of calls that ran on our kernels.
    pub taken: u64,
    /// Number of calls that fell back to Burn.
    pub fallen_back: u64,
}

impl fmt::Display for AcceleratedAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { taken, fallen_back } = self;
        write!(
            f,
            "attention: {taken} calls on block-sparse kernels, {fallen_back} as before"
        )
    }
}

/// Returns the counts of this program's calls since [`accelerate_attention`].
pub fn accelerated_attention() -> AcceleratedAttention {
    AcceleratedAttention {
        taken: TAKEN.load(Ordering::Relaxed),
        fallen_back: FALLEN_BACK.load(Ordering::Relaxed),
    }
}

#[derive(Clone)]
struct Attention;

impl Taken for Attention {
    const NAME: &'static str = "burn-blocksparse attention";

    type Call = AttentionOpIr;

    fn call(operation: &OperationIr, _device: &CubeDevice) -> Option<AttentionOpIr> {
        match operation {
            OperationIr::Module(ModuleOperationIr::Attention(op)) => Some(op.clone()),
            _ => None,
        }
    }

    fn run(op: &AttentionOpIr, context: &TakenContext) -> Option<(TensorIr, CubeTensor)> {
        let made = attend(op, context);
        let count = if made.is_some() { &TAKEN } else { &FALLEN_BACK };
        count.fetch_add(1, Ordering::Relaxed);
        made
    }
}

fn attend(op: &AttentionOpIr, context: &TakenContext) -> Option<(TensorIr, CubeTensor)> {
    let tensor = |of: &TensorIr| tensor(of, context);
    let given = |of: &Option<TensorIr>| of.as_ref().map(|of| tensor(of).ok_or(())).transpose();
    let arguments = CubeAttention {
        query: tensor(&op.query)?,
        key: tensor(&op.key)?,
        value: tensor(&op.value)?,
        mask: given(&op.mask).ok()?,
        bias: given(&op.attn_bias).ok()?,
        options: op.options.clone().into(),
    };
    let out = context.tensors.get(&op.out.id)?.clone();
    let [batch, heads, seq_q, seq_kv] = arguments.pairs()?;
    let call = AttentionCall {
        batch,
        heads,
        seq_q,
        seq_kv,
        is_causal: arguments.options.is_causal,
        has_mask: arguments.mask.is_some(),
        has_bias: arguments.bias.is_some(),
    };
    let pattern = CHOOSE.get().and_then(|choose| choose(&call));
    Some((out, arguments.run(pattern)?))
}
