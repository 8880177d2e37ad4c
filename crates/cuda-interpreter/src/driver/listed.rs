//! Lists launches instead of running them. A module may then be any text, such as that of a compiler that compiles nothing.

use std::ffi::{CStr, CString, c_char};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, PoisonError};

/// `CUDA_INTERPRETER_LIST`: a folder for `launches.txt` and the text of each kernel that is requested.
static FOLDER: LazyLock<Option<PathBuf>> =
    LazyLock::new(|| std::env::var_os("CUDA_INTERPRETER_LIST").map(PathBuf::from));

/// Serializes writes.
static WRITING: Mutex<()> = Mutex::new(());

pub fn is_on() -> bool {
    FOLDER.is_some()
}

/// Writes a file of the folder, or appends to it.
fn write(file: &str, append: bool, text: &[u8]) {
    let Some(folder) = &*FOLDER else { return };
    let _writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    let path = folder.join(file);
    let opened = OpenOptions::new()
        .create(true)
        .write(true)
        .append(append)
        .truncate(!append)
        .open(&path);
    if let Err(error) = opened.and_then(|mut file| file.write_all(text)) {
        eprintln!("cuda-interpreter: {}: {error}", path.display());
    }
}

/// Returns a function, which is its name, and writes the text of its module.
pub fn function(name: &CStr, text: &CStr) -> *mut c_char {
    write(
        &format!("{}.cu", name.to_string_lossy()),
        false,
        text.to_bytes(),
    );
    CString::from(name).into_raw()
}

pub fn launch(name: &CStr, cubes: [u32; 3], threads: [u32; 3], shared_bytes: u32) {
    let name = name.to_string_lossy();
    let line = format!("{name} {cubes:?} {threads:?} {shared_bytes}\n");
    write("launches.txt", true, line.as_bytes());
}
