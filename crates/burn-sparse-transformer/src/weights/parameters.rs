use burn::module::{Module, ModuleVisitor, Param, Parameter};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType, Device, Int, Tensor};

pub(super) struct Wanted {
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: DType,
}

/// Lists all parameters of a module without initialising them: values that are overwritten need not be drawn.
pub(super) fn wanted<M: Module>(module: &M) -> Vec<Wanted> {
    let mut parameters = Parameters::default();
    module.visit(&mut parameters);
    parameters.found
}

#[derive(Default)]
struct Parameters {
    path: Vec<String>,
    found: Vec<Wanted>,
}

impl Parameters {
    fn add<const D: usize, K: Basic>(
        &mut self,
        param: &Param<Tensor<D, K>>,
        usual: impl FnOnce(&Device) -> DType,
    ) where
        Tensor<D, K>: Parameter,
    {
        let (shape, dtype) = match param.is_initialized() {
            true => {
                let saved = param.transform_for_save().val();
                (saved.shape(), saved.dtype())
            }
            false => (param.lazy_shape(), usual(&param.lazy_device())),
        };
        self.found.push(Wanted {
            name: self.path.join("."),
            shape: shape.iter().copied().collect(),
            dtype,
        });
    }
}

impl ModuleVisitor for Parameters {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.add(param, |device| device.settings().float_dtype.into());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(param, |device| device.settings().int_dtype.into());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(param, |device| device.settings().bool_dtype.into());
    }
}
