//! Our attention kernels beneath Burn's own `attention`: an optimization of Burn's fusion, which is asked before Burn's kernels are.

mod call;

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use blocksparse::Pattern;
use blocksparse_cubecl::Tuning;
use burn::backend::fusion::stream::Context;
use burn::backend::fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn::backend::ir::{
    AttentionOpIr, BackendIr, ModuleOperationIr, OperationIr, TensorHandle, TensorIr,
};
use burn_cubecl::fusion::{
    CubeFuser, CubeFusionHandle, CubeOptimization, FallbackOperation, FusedOperation,
    OptimizationProvider, register,
};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};

use crate::accelerated::call::CubeAttention;
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
/// A mask becomes numbers of the mask's own size, a mask and a bias together of what both are broadcast to; nothing else is `seq_q × seq_kv`.
///
/// # Errors
/// [`OpError::Registry`] after the first tensor operation, or the second time; [`OpError::Kernel`] if an environment variable of the kernels has a wrong value.
pub fn accelerate_attention() -> Result<(), OpError> {
    Tuning::of_process()?;
    register(Provider).map_err(|error| OpError::Registry(error.to_string()))
}

/// As [`accelerate_attention`], and calls for which `choose` returns a pattern see the pairs of that alone; those of causality and the mask, too.
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
    /// Whether queries see no later keys.
    pub is_causal: bool,
    /// Whether there is a mask of bools.
    pub has_mask: bool,
    /// Whether there is a bias.
    pub has_bias: bool,
}

/// What became of the calls of Burn's `attention`: launches are lazy, so of those that something has been read from.
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

/// How many calls of this program [`accelerate_attention`] has seen so far.
pub fn accelerated_attention() -> AcceleratedAttention {
    AcceleratedAttention {
        taken: TAKEN.load(Ordering::Relaxed),
        fallen_back: FALLEN_BACK.load(Ordering::Relaxed),
    }
}

struct Provider;

impl OptimizationProvider for Provider {
    type Operation = Attention;

    fn fuser(&self, _device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(AttentionFuser::default())
    }
}

/// Takes one call and nothing else.
#[derive(Clone, Default)]
struct AttentionFuser {
    found: Option<AttentionOpIr>,
    closed: bool,
}

/// More than anything that Burn fuses.
const SCORE: u64 = 1 << 40;

impl OperationFuser<CubeOptimization> for AttentionFuser {
    fn fuse(&mut self, operation: &OperationIr) {
        if self.closed {
            return;
        }
        self.closed = true;
        if let OperationIr::Module(ModuleOperationIr::Attention(op)) = operation {
            self.found = Some(op.clone());
        }
    }

    fn finish(&mut self) -> CubeOptimization {
        let op = self.found.clone();
        CubeOptimization::new(Attention {
            op: op.expect("a fuser without an operation is not ready"),
        })
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn status(&self) -> FuserStatus {
        match self.closed {
            true => FuserStatus::Closed,
            false => FuserStatus::Open,
        }
    }

    fn properties(&self) -> FuserProperties {
        let ready = self.found.is_some();
        FuserProperties {
            score: if ready { SCORE } else { 0 },
            ready,
        }
    }

    fn len(&self) -> usize {
        usize::from(self.found.is_some())
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

/// A call, whose tensors are named as in Burn's graph.
struct Attention {
    op: AttentionOpIr,
}

impl FusedOperation for Attention {
    const NAME: &'static str = "burn-blocksparse attention";

    type State = AttentionOpIr;

    fn num_ops_fused(&self) -> usize {
        1
    }

    fn run(
        &mut self,
        context: &mut Context<CubeFusionHandle>,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        match self.attend(context) {
            Some((out, tensor)) => {
                TAKEN.fetch_add(1, Ordering::Relaxed);
                context.handles.register_handle(out.id, tensor.into());
            }
            None => {
                FALLEN_BACK.fetch_add(1, Ordering::Relaxed);
                fallback(0).run(context);
            }
        }
    }

    fn to_state(&self) -> AttentionOpIr {
        self.op.clone()
    }

    fn from_state(_device: &CubeDevice, op: AttentionOpIr) -> Self {
        Self { op }
    }
}

impl Attention {
    /// The result, if kernels take the call. Nothing is consumed: Burn frees what is not used any more behind the operation.
    fn attend(&self, context: &Context<CubeFusionHandle>) -> Option<(TensorIr, CubeTensor)> {
        let tensor = |of: &TensorIr| {
            let of = context.tensors.get(&of.id)?;
            let handle = context.handles.get_handle_ref(&of.id)?.clone();
            let shape = of.shape.clone();
            Some(CubeBackend::float_tensor(TensorHandle { handle, shape }))
        };
        let given = |of: &Option<TensorIr>| of.as_ref().map(|of| tensor(of).ok_or(())).transpose();
        let op = &self.op;
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
}
