use std::path::Path;

use burn::module::Module;
use burn::store::burn_pack::Tensor as Stored;
use burn::store::{ModuleAdapter, ModuleContext, ModuleSnapshot, SafetensorsStore, bridge};
use burn::tensor::Shape;

use super::error::{Result, WeightsError};
use super::{Form, KeyMap};

/// Writes a module's parameters to a safetensors file, under the names and in the forms of `map`. The file appears only when it is complete; with `overwrite`
/// it replaces an existing one.
///
/// # Errors
/// [`WeightsError::OneWay`] if the map reads a parameter from a part of a tensor, [`WeightsError::Write`] if the file cannot be written, or exists and
/// `overwrite` is false.
pub fn save_safetensors<M: Module>(
    module: &M,
    path: impl AsRef<Path>,
    map: &KeyMap,
    overwrite: bool,
) -> Result<()> {
    let path = path.as_ref();
    for parameter in module.collect(None, None, false) {
        let form = form_of(map, &parameter.name);
        if !form.is_reversible() {
            return Err(WeightsError::OneWay {
                parameter: parameter.name,
                form: form.to_string(),
            });
        }
    }
    let mut store = SafetensorsStore::from_file(path)
        .overwrite(overwrite)
        .with_to_adapter(Forward(map.clone()))
        // Readers in PyTorch's ecosystem expect it.
        .metadata("format", "pt");
    let failed = |reason: String| WeightsError::Write {
        path: path.display().to_string(),
        reason,
    };
    let is_new = !path.exists();
    (module.save_into(&mut store)).map_err(|reason| failed(reason.to_string()))?;
    match is_new {
        // A replaced file keeps its mode.
        false => Ok(()),
        true => take_usual_mode(path).map_err(|reason| failed(reason.to_string())),
    }
}

/// Gives a file the mode that this process's umask gives new files: the format's writer creates files that only their owner can read.
#[cfg(unix)]
fn take_usual_mode(path: &Path) -> std::io::Result<()> {
    // The umask can only be read by setting it, which other threads would see.
    let probe = path.with_added_extension(format!("{}.mode", std::process::id()));
    let mode = std::fs::File::create_new(&probe)?.metadata();
    std::fs::remove_file(&probe)?;
    std::fs::set_permissions(path, mode?.permissions())
}

#[cfg(not(unix))]
fn take_usual_mode(_: &Path) -> std::io::Result<()> {
    Ok(())
}

fn form_of(map: &KeyMap, parameter: &str) -> Form {
    let candidates = map.candidates(parameter);
    candidates.first().map_or(Form::Same, |(_, form)| *form)
}

/// Converts parameters to tensors of a file.
#[derive(Clone)]
struct Forward(KeyMap);

impl ModuleAdapter for Forward {
    fn adapt(&self, mut tensor: Stored, _context: ModuleContext<'_>) -> Stored {
        let form = form_of(&self.0, &tensor.name);
        let name = self.0.name_of(&tensor.name);
        let shape: Vec<usize> = tensor.shape.iter().copied().collect();
        match form.in_file(&shape) {
            Some(shape) if form != Form::Same => {
                let dtype = tensor.dtype;
                bridge::map_data(tensor, name, dtype, Shape::from(shape), move |data| {
                    form.put(data)
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
