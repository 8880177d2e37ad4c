//! Modules and kernel launches.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};

use super::memory::regions;
use super::{Answer, INVALID_PTX, INVALID_VALUE, LAUNCH_FAILED, NOT_FOUND, SUCCESS, listed};
use crate::machine::{Kernel, Launch, Module, Settings, run};

/// A kernel with its module, which lives as long as the program.
struct Function {
    module: &'static Module,
    kernel: &'static Kernel,
}

/// Serializes launches.
static RUNNING: Mutex<()> = Mutex::new(());

/// # Safety
///
/// `image` is null-terminated PTX, and the result pointer is writable.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_char) -> Answer {
    // SAFETY: guaranteed by the caller.
    let text = unsafe { CStr::from_ptr(image) };
    if listed::is_on() {
        // SAFETY: guaranteed by the caller.
        unsafe { module.write(CString::from(text).into_raw().cast()) };
        return SUCCESS;
    }
    let text = text.to_string_lossy();
    match Module::parse(&text) {
        Ok(parsed) => {
            keep(&text, &parsed);
            // SAFETY: guaranteed by the caller.
            unsafe { module.write(Box::into_raw(Box::new(parsed)).cast()) };
            SUCCESS
        }
        Err(unread) => {
            eprintln!(
                "cuda-interpreter: {unread}: {}",
                text.lines().nth(unread.line as usize - 1).unwrap_or("")
            );
            INVALID_PTX
        }
    }
}

/// Writes a module's text to the folder that `CUDA_INTERPRETER_KEEP` names, if it is set.
fn keep(text: &str, module: &Module) {
    let Some(folder) = std::env::var_os("CUDA_INTERPRETER_KEEP") else {
        return;
    };
    for kernel in &module.kernels {
        let path = std::path::Path::new(&folder)
            .join(&kernel.name)
            .with_extension("ptx");
        if let Err(error) = std::fs::write(&path, text) {
            eprintln!("cuda-interpreter: {}: {error}", path.display());
        }
    }
}

answering! {
    // A module is never freed, since its functions may still be in use.
    cuModuleUnload(_module: *mut c_void) = SUCCESS;
    cuFuncSetAttribute(_function: *mut c_void, _attribute: c_int, _value: c_int) = SUCCESS;
}

/// # Safety
///
/// The module was loaded by this library, `name` is null-terminated, and the result pointer is writable.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> Answer {
    if listed::is_on() {
        // SAFETY: guaranteed by the caller, and a module is its text.
        unsafe {
            let [name, text] = [name, module.cast_const().cast()].map(|text| CStr::from_ptr(text));
            function.write(listed::function(name, text).cast());
        }
        return SUCCESS;
    }
    // SAFETY: guaranteed by the caller, and modules are never freed.
    let (module, name) = unsafe { (&*module.cast::<Module>(), CStr::from_ptr(name)) };
    let kernel = module
        .kernels
        .iter()
        .find(|kernel| kernel.name.as_bytes() == name.to_bytes());
    match kernel {
        Some(kernel) => {
            // SAFETY: guaranteed by the caller.
            unsafe { function.write(Box::into_raw(Box::new(Function { module, kernel })).cast()) };
            SUCCESS
        }
        None => NOT_FOUND,
    }
}

fn settings() -> Settings {
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .and_then(|text| text.parse::<u64>().ok())
    };
    let default = Settings::default();
    Settings {
        seed: number("CUDA_INTERPRETER_SEED").unwrap_or(default.seed),
        resident: number("CUDA_INTERPRETER_RESIDENT")
            .map_or(default.resident, |count| count.max(1) as usize),
        watches_races: number("CUDA_INTERPRETER_RACES").is_some_and(|watches| watches > 0),
        ..default
    }
}

/// # Safety
///
/// The function comes from this library, and `parameters` has a pointer for each of its parameters.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    cubes_x: u32,
    cubes_y: u32,
    cubes_z: u32,
    threads_x: u32,
    threads_y: u32,
    threads_z: u32,
    shared_bytes: u32,
    _stream: *mut c_void,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Answer {
    if !extra.is_null() {
        return INVALID_VALUE;
    }
    let cubes = [cubes_x, cubes_y, cubes_z];
    let threads = [threads_x, threads_y, threads_z];
    if listed::is_on() {
        // SAFETY: guaranteed by the caller, and a function is its name.
        let name = unsafe { CStr::from_ptr(function.cast_const().cast()) };
        listed::launch(name, cubes, threads, shared_bytes);
        return SUCCESS;
    }
    // SAFETY: guaranteed by the caller, and functions are never freed.
    let Function { module, kernel } = unsafe { &*function.cast::<Function>() };
    let bytes = kernel
        .parameters
        .last()
        .map_or(0, |last| last.offset + last.bytes);
    let mut held = vec![0; bytes];
    for (index, parameter) in kernel.parameters.iter().enumerate() {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let from = *parameters.add(index);
            std::ptr::copy_nonoverlapping(
                from.cast::<u8>(),
                held[parameter.offset..].as_mut_ptr(),
                parameter.bytes,
            );
        }
    }
    let _running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    let arrays = module.arrays.iter().map(|array| {
        let start = array.as_ptr() as u64;
        (start, start + array.len() as u64)
    });
    let launch = Launch {
        kernel,
        cubes,
        threads,
        dynamic_shared: shared_bytes as usize,
        parameters: held,
        regions: &regions(arrays),
    };
    match run(&launch, settings()) {
        Ok(()) => SUCCESS,
        Err(stopped) => {
            eprintln!("cuda-interpreter: {stopped}");
            LAUNCH_FAILED
        }
    }
}
