//! Optimizer steps on CubeCL devices. There is no autodiff implementation: the public functions strip autodiff from the tensors first.

use crate::kernels::optim;
use crate::kernels::optim::{AdamWTensors, FlatTensor};
use blocksparse_cubecl::recording;
use blocksparse_cubecl::recording::Failure;

use crate::optim::ops::OptimOps;
use crate::optim::reference;
use crate::optim::values::{AdamWHyper, AdamWInputs, AdamWOutput, GradNorm, LIMIT, TensorList};
use burn_blocksparse::internal::cube::*;

// Both count partial sums; the public functions do so without the kernels too.
const _: () = {
    let part = crate::optim::PART;
    assert!(optim::partial_sums(part) == 1 && optim::partial_sums(part + 1) == 2);
};

impl OptimOps for CubeBackend {
    fn sum_of_squares(tensors: TensorList<Self>, partials: CubeTensor, first: usize) -> CubeTensor {
        let tensors = tensors.into_vec();
        if !kernels_take(&tensors) {
            let tensors = TensorList::new(tensors);
            return reference::sum_of_squares::<Self>(tensors, partials, first, false);
        }
        let tensors: Vec<_> = tensors.into_iter().map(into_contiguous).collect();
        let partials = writable(partials);
        checked(optim::sum_of_squares(
            &partials.client,
            &tensors.iter().map(flat).collect::<Vec<_>>(),
            (&partials.handle, elements(&partials)),
            first,
            dtype_to_elem_type(partials.dtype),
        ));
        partials
    }

    fn clip_factor(partials: CubeTensor, control: CubeTensor) -> GradNorm<Self> {
        if !kernels_take([&partials]) {
            return reference::clip_factor::<Self>(partials, control);
        }
        let [partials, control] = [partials, control].map(into_contiguous);
        let [norm, factor] = [(); 2].map(|()| empty(&partials, [1], partials.dtype));
        checked(optim::clip_factor(
            &partials.client,
            (&partials.handle, elements(&partials)),
            (&control.handle, LIMIT),
            [&norm.handle, &factor.handle],
            dtype_to_elem_type(partials.dtype),
        ));
        GradNorm { norm, factor }
    }

    fn adamw(
        inputs: AdamWInputs<Self>,
        control: CubeTensor,
        numbers: AdamWHyper,
    ) -> AdamWOutput<Self> {
        let ([parameters, gradients, first, second], factor) = inputs.into_lists();
        if !kernels_take(&parameters) {
            if let Some(tensor) = parameters.first() {
                let what = "parameters of a size that no kernel takes";
                recording::fails(&tensor.client, Failure::NotInPlace(what));
            }
            let lists = [parameters, gradients, first, second];
            let inputs = AdamWInputs::of_lists(lists, factor);
            return reference::adamw::<Self>(inputs, control, numbers);
        }
        let owned = |tensors: Vec<CubeTensor>| -> Vec<CubeTensor> {
            tensors.into_iter().map(in_place).collect()
        };
        let [parameters, first, second] = [parameters, first, second].map(owned);
        let gradients: Vec<_> = gradients.into_iter().map(into_contiguous).collect();
        let (control, factor) = (into_contiguous(control), contiguous(factor));
        let tensors: Vec<_> = (0..parameters.len())
            .map(|i| AdamWTensors {
                parameter: flat(&parameters[i]),
                gradient: flat(&gradients[i]),
                moments: [flat(&first[i]), flat(&second[i])],
            })
            .collect();
        checked(optim::adamw(
            &control.client,
            &tensors,
            &control.handle,
            factor.as_ref().map(|factor| &factor.handle),
            optim::AdamWHyper {
                betas: numbers.betas,
                epsilon: numbers.epsilon,
                weight_decay: numbers.weight_decay,
            },
            dtype_to_elem_type(control.dtype),
        ));
        AdamWOutput::of_lists([parameters, first, second])
    }

    fn concat(tensors: TensorList<Self>, output: CubeTensor, first: usize) -> CubeTensor {
        let tensors = tensors.into_vec();
        if !kernels_take([&output]) {
            return reference::concat::<Self>(TensorList::new(tensors), output, first);
        }
        let tensors: Vec<_> = tensors.into_iter().map(into_contiguous).collect();
        let output = writable(output);
        let tensors: Vec<_> = tensors.iter().map(flat).collect();
        let result = optim::concat(&output.client, &tensors, &flat(&output), first);
        checked(result);
        output
    }

    fn scale(tensors: TensorList<Self>, factor: CubeTensor) -> TensorList<Self> {
        let tensors = tensors.into_vec();
        if !kernels_take(&tensors) {
            return reference::scale::<Self>(TensorList::new(tensors), factor);
        }
        let tensors: Vec<_> = tensors.into_iter().map(writable).collect();
        let factor = into_contiguous(factor);
        checked(optim::scale(
            &factor.client,
            &tensors.iter().map(flat).collect::<Vec<_>>(),
            &factor.handle,
            dtype_to_elem_type(factor.dtype),
        ));
        TensorList::new(tensors)
    }
}

/// Returns whether the kernels support tensors of these sizes and the reference is not forced.
fn kernels_take<'a>(tensors: impl IntoIterator<Item = &'a CubeTensor>) -> bool {
    let largest = tensors.into_iter().max_by_key(|tensor| elements(tensor));
    let takes = |tensor: &CubeTensor| optim::check(&tensor.client, elements(tensor)).is_ok();
    !uses_reference() && largest.is_none_or(takes)
}

fn elements(tensor: &CubeTensor) -> usize {
    tensor.meta.shape().num_elements()
}

fn flat(tensor: &CubeTensor) -> FlatTensor {
    let dtype = dtype_to_elem_type(tensor.dtype);
    FlatTensor::new(tensor.handle.clone(), elements(tensor), dtype)
}

/// Like [`writable`], but fails a recording that would copy: replays would read the tensor as it was before, not the updated copy.
fn in_place(tensor: CubeTensor) -> CubeTensor {
    let own = (tensor.can_mut() && tensor.is_contiguous()) || elements(&tensor) == 0;
    if !own {
        let what = "parameters and moments of a step of the optimizer";
        recording::fails(&tensor.client, Failure::NotInPlace(what));
    }
    writable(tensor)
}
