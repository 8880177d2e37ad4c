use std::path::Path;

use burn::module::Module;
use burn::store::burn_pack::Tensor as Stored;
use burn::store::{ModuleAdapter, ModuleContext, ModuleSnapshot, SafetensorsStore, bridge};
use burn::tensor::Shape;

use super::error::WeightsError;
use super::{Form, KeyMap};

/// Writes a module's parameters as a safetensors file, under the names and in the forms of `map`. The file appears only when it is complete; with
/// `overwrite` it takes the place of one that is there.
///
/// # Errors
/// [`WeightsError::OneWay`] if the map takes a parameter from a part of a tensor, [`WeightsError::Write`] if the file cannot be written, or is there.
pub fn save_safetensors<M: Module>(
    module: &M,
    path: impl AsRef<Path>,
    map: &KeyMap,
    overwrite: bool,
) -> Result<(), WeightsError> {
    let path = path.as_ref();
    for parameter in module.collect(None, None, false) {
        let form = form_of(map, &parameter.name);
        if !matches!(form, Form::Same | Form::Transposed) {
            return Err(WeightsError::OneWay {
                parameter: parameter.name,
                form: form.to_string(),
            });
        }
    }
    let mut store = SafetensorsStore::from_file(path)
        .overwrite(overwrite)
        .with_to_adapter(Forward(map.clone()))
        // Readers of PyTorch's world ask for it.
        .metadata("format", "pt");
    let saved = module.save_into(&mut store);
    saved.map_err(|reason| WeightsError::Write {
        path: path.display().to_string(),
        reason: reason.to_string(),
    })
}

/// The form of a parameter by the first rule for it.
fn form_of(map: &KeyMap, parameter: &str) -> Form {
    let candidates = map.candidates(parameter);
    candidates.first().map_or(Form::Same, |(_, form)| *form)
}

/// Parameters to tensors of a file.
#[derive(Clone)]
struct Forward(KeyMap);

impl ModuleAdapter for Forward {
    fn adapt(&self, mut tensor: Stored, _context: ModuleContext<'_>) -> Stored {
        let form = form_of(&self.0, &tensor.name);
        let name = self.0.name_of(&tensor.name);
        let shape: Vec<usize> = tensor.shape.iter().copied().collect();
        match form.in_file(&shape) {
            // A transposition is its own inverse.
            Some(shape) if form == Form::Transposed => {
                let dtype = tensor.dtype;
                bridge::map_data(tensor, name, dtype, Shape::from(shape), move |data| {
                    form.take(data)
                })
            }
            _ => {
                tensor.name = name;
                tensor
            }
        }
    }

    fn clone_box(&self) -> Box<dyn ModuleAdapter> {
        Box::new(self.clone())
    }
}
