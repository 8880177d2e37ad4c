//! Our attention kernels beneath Burn's own `attention`: an optimization of Burn's fusion, which is asked before Burn's kernels are.

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

/// Calls that ran on our kernels, and those that ran as before.
static TAKEN: AtomicU64 = AtomicU64::new(0);
static FALLEN_BACK: AtomicU64 = AtomicU64::new(0);

type Choose = dyn Fn(&AttentionCall) -> Option<Pattern> + Send + Sync;

/// What says which calls have a pattern.
static CHOOSE: OnceLock<Box<Choose>> = OnceLock::new();

/// Runs every `burn::tensor::module::attention` of this program on our kernels, where no autodiff follows its tensors: inference. Masks, biases, scale, softcap
/// and causality mean what they do in Burn's, and results are the same up to rounding. Calls that no kernel takes go on as before. Call it once, before the
/// first tensor of the program:
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
/// It works through Burn's fusion, which an application has by default, and only for devices with it (`Device::wgpu`, `Device::cuda`).
///
/// **Training does not reach it**: on a device with autodiff Burn computes attention by operations of its own, so that each has a gradient.
/// [`attention`](crate::module::attention) is a fused forward and backward pass for both. Nor do burn-nn's layers reach it, which call no `attention`.
///
/// # Memory
/// A mask becomes a bias of its own size, a mask and a bias together of what both are broadcast to; nothing else is `seq_q × seq_kv`.
///
/// # Errors
/// [`OpError::Registry`] after the first tensor operation, or the second time; [`OpError::Kernel`] if an environment variable of the kernels has a wrong value.
pub fn accelerate_attention() -> Result<(), OpError> {
    Tuning::of_process()?;
    take::<Attention>()
}

/// As [`accelerate_attention`]; calls for which `choose` returns a pattern are restricted to its pairs, in addition to causality and the mask.
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
/// A pattern without a layout for the call's sizes leaves the call to Burn, dense.
///
/// # Errors
/// As [`accelerate_attention`].
pub fn accelerate_attention_with(
    choose: impl Fn(&AttentionCall) -> Option<Pattern> + Send + Sync + 'static,
) -> Result<(), OpError> {
    accelerate_attention()?;
    // Only a first call gets here.
    let _ = CHOOSE.set(Box::new(choose));
    Ok(())
}

/// A call of Burn's `attention`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AttentionCall {
    /// Entries of the batch.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Queries.
    pub seq_q: usize,
    /// Keys.
    pub seq_kv: usize,
    /// True if queries see no later keys.
    pub is_causal: bool,
    /// True if there is a mask of bools.
    pub has_mask: bool,
    /// True if there is a bias.
    pub has_bias: bool,
}

/// Counts of Burn's `attention` calls by what ran. Launches are lazy: a call counts once its result is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AcceleratedAttention {
    /// Calls that ran on our kernels.
    pub taken: u64,
    /// Calls that ran as before.
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

/// Returns the counts of this program's calls after [`accelerate_attention`].
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
