//! Losses on CubeCL devices.

use std::ops::Range;

use crate::kernels::rows::cross_entropy::{
    CrossEntropyKind, CrossEntropyRows, cross_entropy_loss, cross_entropy_plan, cross_entropy_rows,
};
use crate::kernels::rows::scaled::scaled;

use crate::linear::cube_products::Kernels;
use crate::loss::compute;
use crate::loss::compute::{Losses, PrimitiveLosses};
use crate::loss::ops::LossOps;
use crate::loss::values::{
    LossDtypes, LossGrads, LossInputs, LossOutput, LossSaved, LossTask, Reduction,
};
use burn_blocksparse::internal::cube::*;
use burn_blocksparse::internal::prelude::*;

fn kind(
    dtype: DType,
    targets: DType,
    vocab: usize,
    gradient: Option<FloatDType>,
    task: &LossTask,
) -> CrossEntropyKind {
    let element = |dtype: FloatDType| dtype_to_elem_type(dtype.into());
    let mut kind = CrossEntropyKind::new(
        vocab,
        element(accumulate_in(dtype.into())),
        dtype_to_elem_type(targets),
        gradient.map(element),
    );
    kind.ignore_index = task.ignore_index;
    kind.smoothing = task.smoothing;
    kind
}

/// Returns the text of the plan for `device`.
pub(crate) fn plan(
    device: &CubeDevice,
    [dtype, targets]: [DType; 2],
    vocab: usize,
    task: &LossTask,
) -> Result<String, KernelError> {
    let gradient = (task.by_x || task.by_weight).then_some(dtype.into());
    cross_entropy_plan(
        &device.client(),
        &kind(dtype, targets, vocab, gradient, task),
    )
}

/// Losses of a chunk's rows by a kernel, which writes the gradient over the logits or into a buffer of its own.
struct KernelLosses {
    kind: CrossEntropyKind,
    gradient: Option<FloatDType>,
    reduction: Reduction,
    targets: CubeTensor,
    /// Softmax statistics, `[positions, 2]`.
    stats: CubeTensor,
}

impl Losses<CubeBackend> for KernelLosses {
    type Products = Kernels;

    fn new(
        x: &CubeTensor,
        targets: CubeTensor,
        vocab: usize,
        gradient: Option<FloatDType>,
        task: LossTask,
    ) -> Self {
        let targets = into_contiguous(targets);
        let positions = targets.meta.shape()[0];
        let dtype: DType = accumulate_in(x.dtype.into()).into();
        Self {
            kind: kind(x.dtype, targets.dtype, vocab, gradient, &task),
            gradient,
            reduction: task.reduction,
            // At least one row: a binding holds at least one vector.
            stats: empty(x, [positions.max(1), 2], dtype),
            targets,
        }
    }

    fn take(&mut self, logits: CubeTensor, positions: Range<usize>) -> Option<CubeTensor> {
        let logits = into_contiguous(logits);
        let shape = [positions.len(), self.kind.vocab];
        let rounded = (self.gradient.map(DType::from))
            .filter(|dtype| *dtype != logits.dtype)
            .map(|dtype| empty(&logits, shape, dtype));
        let buffers = CrossEntropyRows {
            logits: &logits.handle,
            rounded: rounded.as_ref().map(|rounded| &rounded.handle),
            targets: &self.targets.handle,
            stats: &self.stats.handle,
            positions: self.targets.meta.shape()[0],
            first: positions.start,
            rows: positions.len(),
        };
        checked(cross_entropy_rows(&logits.client, &self.kind, buffers));
        self.gradient.map(|_| rounded.unwrap_or(logits))
    }

    fn loss(self) -> [CubeTensor; 2] {
        let (stats, reduction) = (self.stats, self.reduction);
        let positions = self.targets.meta.shape()[0];
        if reduction == Reduction::None {
            return compute::of_positions::<CubeBackend>(stats, positions);
        }
        let made = [(); 2].map(|_| empty(&stats, [1], stats.dtype));
        let [loss, factor] = &made;
        checked(cross_entropy_loss(
            &stats.client,
            (&stats.handle, self.kind.accumulator),
            positions,
            reduction == Reduction::Mean,
            [&loss.handle, &factor.handle],
        ));
        made
    }
}

fn runs_kernels(inputs: &LossInputs<CubeBackend>, task: &LossTask) -> bool {
    let LossInputs { x, weight, targets } = inputs;
    let vocab = weight.meta.shape()[1];
    let plan = plan(&x.device, [x.dtype, targets.dtype], vocab, task);
    !uses_reference() && plan.is_ok()
}

impl LossOps for CubeBackend {
    fn linear_cross_entropy(inputs: LossInputs<Self>, task: LossTask) -> LossOutput<Self> {
        match runs_kernels(&inputs, &task) {
            true => compute::forward::<Self, KernelLosses>(inputs, task),
            false => compute::forward::<Self, PrimitiveLosses<Self>>(inputs, task),
        }
    }

    fn position_cross_entropy_backward(
        inputs: LossInputs<Self>,
        grad: CubeTensor,
        task: LossTask,
        dtypes: LossDtypes,
    ) -> LossGrads<Self> {
        match runs_kernels(&inputs, &task) {
            true => {
                compute::backward_of_positions::<Self, KernelLosses>(inputs, grad, task, dtypes)
            }
            false => compute::backward_of_positions::<Self, PrimitiveLosses<Self>>(
                inputs, grad, task, dtypes,
            ),
        }
    }

    fn linear_cross_entropy_backward(
        saved: LossSaved<Self>,
        dtypes: LossDtypes,
    ) -> LossGrads<Self> {
        if uses_reference() {
            return compute::backward::<Self>(saved, dtypes);
        }
        let [factor, grad] = [saved.factor, saved.grad].map(into_contiguous);
        let scaled = |tensor: Option<CubeTensor>, dtype: FloatDType| {
            let tensor = tensor?;
            let [rows, columns] = tensor.shape().dims();
            let out = empty(&tensor, [rows, columns], dtype.into());
            let by = [&factor.handle, &grad.handle];
            let (client, numbers) = (&tensor.client, rows * columns);
            checked(scaled(client, typed(&tensor), by, typed(&out), numbers));
            Some(out)
        };
        LossGrads {
            x: scaled(contiguous(saved.x), dtypes.x).into(),
            weight: scaled(contiguous(saved.weight), dtypes.weight).into(),
        }
    }
}
