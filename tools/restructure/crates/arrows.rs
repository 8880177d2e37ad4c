//! Which modules import which: the arrows of `docs/design.md`, read from the sources.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// What a module at the root of a crate must not import, by crate and module.
const FORBIDDEN: &[(&str, &[&str], &[&str])] = &[
    // The tiers of attention know no other kind of kernel.
    (
        "blocksparse-cubecl",
        &["simt", "mma", "hopper"],
        &["rows", "linear", "paged", "listed", "clusters", "selection", "indexer", "optim"],
    ),
    // What all kernels share knows none of them.
    (
        "blocksparse-cubecl",
        &["arch", "shared"],
        &["simt", "mma", "hopper", "rows", "linear", "paged", "on_device", "selection", "optim"],
    ),
    // Attention knows neither training ops nor pages nor choices by content.
    (
        "burn-blocksparse",
        &["attention", "device_layout", "plan"],
        &["linear", "mlp", "norm", "loss", "optim", "paged", "selection", "nsa", "dsa", "graph"],
    ),
    // Training ops know no attention.
    (
        "burn-blocksparse",
        &["activation", "linear", "mlp", "norm", "loss", "embedding", "gates", "optim"],
        &["attention", "device_layout", "selection", "paged", "nsa", "dsa"],
    ),
];

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates")
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    entries
        .flat_map(|path| match path.is_dir() {
            true => sources(&path),
            false => vec![path],
        })
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect()
}

/// The modules at the root of a crate that each of them imports, with a file that does.
fn imports(name: &str) -> BTreeMap<String, BTreeMap<String, PathBuf>> {
    let root = crates().join(name).join("src");
    let module = |path: &Path| -> Vec<String> {
        let path = path.strip_prefix(&root).expect("below the root").with_extension("");
        let mut parts: Vec<_> = path.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        if parts.last().is_some_and(|last| last == "mod" || last == "lib") {
            parts.pop();
        }
        parts
    };
    let files = sources(&root);
    let roots: BTreeSet<String> = files.iter().filter_map(|path| module(path).into_iter().next()).collect();
    let mut found = BTreeMap::<String, BTreeMap<String, PathBuf>>::new();
    for path in &files {
        let parts = module(path);
        let Some(own) = parts.first() else { continue };
        let text = fs::read_to_string(path).expect("a source");
        let code: String = (text.lines())
            .map(|line| line.split("//").next().unwrap_or_default().to_string() + "\n")
            .collect();
        // `crate::` and as many `super::` as lead to the root; a module in the file itself is one deeper.
        let up = "super::".repeat(parts.len());
        let inner = format!("    use {up}super::");
        for prefix in ["crate::", up.as_str(), inner.as_str()] {
            for (at, _) in code.match_indices(prefix) {
                let before = &code[..at];
                if before.ends_with("super::") || prefix == up && before.ends_with("    use ") {
                    continue;
                }
                let rest = &code[at + prefix.len()..];
                let list = match rest.strip_prefix('{') {
                    Some(group) => group.split(';').next().unwrap_or_default(),
                    None => rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default(),
                };
                for part in list.split(|c: char| !c.is_alphanumeric() && c != '_') {
                    if part != own && roots.contains(part) {
                        found.entry(own.clone()).or_default().insert(part.to_string(), path.clone());
                    }
                }
            }
        }
    }
    found
}

#[test]
fn modules_import_one_way() {
    for name in ["blocksparse", "blocksparse-cubecl", "burn-blocksparse", "burn-sparse-transformer", "cuda-interpreter"] {
        let mut imports = imports(name);
        // Modules that import nothing that is left are taken away, until none is.
        loop {
            let left: BTreeSet<String> = imports.keys().cloned().collect();
            let before = imports.len();
            imports.retain(|_, to| to.keys().any(|to| left.contains(to)));
            if imports.len() == before {
                break;
            }
        }
        for to in imports.values_mut() {
            to.retain(|_, _| true);
        }
        assert!(imports.is_empty(), "circles in {name}: {imports:#?}");
    }
}

#[test]
fn no_arrow_is_forbidden() {
    for (name, from, to) in FORBIDDEN {
        let imports = imports(name);
        for from in *from {
            for (module, path) in imports.get(*from).into_iter().flatten() {
                assert!(!to.contains(&module.as_str()), "{from} imports {module} in {}", path.display());
            }
        }
    }
}
