//! Imports among modules, read from the sources: no cycles, and the arrows of `docs/dev/design.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::public_names::{ends, root};

/// Forbidden imports of modules at the root of a crate: crate, importing modules, imported modules.
const FORBIDDEN: &[(&str, &[&str], &[&str])] = &[
    // Code that all kernels share imports no kernel.
    (
        "crates/blocksparse-cubecl",
        &["arch", "shared"],
        &["hopper", "mma", "on_device", "primitives", "rows", "simt"],
    ),
    (
        "crates/blocksparse-cubecl",
        &["primitives"],
        &["hopper", "mma", "on_device", "rows", "simt"],
    ),
    // The tiers of attention import no other kind of kernel.
    (
        "crates/blocksparse-cubecl",
        &["simt", "mma", "hopper"],
        &["on_device", "rows"],
    ),
];

/// Crates in dependency order: none depends on a later one.
const CRATES: &[&str] = &[
    "crates/blocksparse",
    "crates/blocksparse-cubecl",
    "crates/burn-blocksparse",
    "crates/burn-fused-ops",
    "contrib/burn-sparse-select",
    "crates/burn-sparse-transformer",
    "contrib/burn-paged-attention",
];

/// Modules with their imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// Returns the modules of a crate with their imports, as paths from the crate's root.
fn files(name: &str) -> BTreeMap<Vec<String>, Vec<Vec<String>>> {
    let root = root().join(name).join("src");
    (sources(&root).iter())
        .map(|path| {
            let code = fs::read_to_string(path).expect("a source");
            let code: Vec<_> = (code.lines().take_while(|line| *line != "#[cfg(test)]"))
                .map(|line| line.split("//").next().unwrap_or_default())
                .collect();
            let module = module(path.strip_prefix(&root).expect("below it"));
            let paths = paths(&code.join("\n"), &module);
            (module, paths)
        })
        .collect()
}

/// Returns the paths in a file's code that begin with `crate::`, or with `super::` of an ancestor module.
fn paths(code: &str, module: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let first = |word| code.match_indices(word);
    for (at, word) in first("crate::").chain(first("super::")) {
        if code[..at].ends_with("::") {
            continue;
        }
        let mut rest = &code[at..];
        let mut above = module;
        while let Some(further) = rest.strip_prefix("super::") {
            (rest, above) = (further, &above[..above.len().saturating_sub(1)]);
        }
        let prefix = if word == "crate::" { &[] } else { above };
        let path = rest.trim_start_matches("crate::");
        ends(path, prefix, &mut |path, _| found.push(path));
    }
    found
}

/// Returns the modules at the root of a crate with their imports.
fn imports(name: &str) -> Imports {
    let files = files(name);
    let known: Imports = (files.keys())
        .filter_map(|module| Some((module.first()?.clone(), BTreeSet::new())))
        .collect();
    let mut found = known.clone();
    for (module, paths) in &files {
        let Some(own) = module.first() else { continue };
        let others = (paths.iter().filter_map(|path| path.first()))
            .filter(|other| *other != own && known.contains_key(*other));
        found.get_mut(own).expect("known").extend(others.cloned());
    }
    found
}

/// Returns the files of a crate with their imports, except folders' `mod.rs`, which re-export.
fn imports_of_files(name: &str) -> Imports {
    let files = files(name);
    let is_folder = |module: &[String]| {
        let mut others = files.keys();
        others.any(|other| other.len() > module.len() && other.starts_with(module))
    };
    let known: BTreeSet<_> = (files.keys())
        .filter(|module| !is_folder(module))
        .cloned()
        .collect();
    let of_file = |module: &Vec<String>| {
        let paths = files[module].iter();
        let others = paths.filter_map(|path| {
            let mut parts = (1..=path.len()).map(|count| &path[..count]);
            parts.find(|part| known.contains(*part))
        });
        let others = others.filter(|other| other != module);
        others.map(|other| other.join("::")).collect()
    };
    (known.iter())
        .map(|module| (module.join("::"), of_file(module)))
        .collect()
}

/// Returns the sources in a folder, except test code.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths
        .filter(|path| {
            !path
                .file_stem()
                .is_some_and(|name| name.to_string_lossy().ends_with("tests"))
        })
        .flat_map(|path| match path.is_dir() {
            true => sources(&path),
            false => vec![path],
        })
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect()
}

/// Returns the module path of a file, from the root of its crate.
fn module(file: &Path) -> Vec<String> {
    let path = file.with_extension("");
    let mut parts: Vec<_> = path
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    if parts
        .last()
        .is_some_and(|last| last == "mod" || last == "lib")
    {
        parts.pop();
    }
    parts
}

/// Returns the transitive imports of a module.
fn reached(imports: &Imports, module: &str) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut next = vec![module.to_owned()];
    while let Some(module) = next.pop() {
        let new = imports[&module]
            .difference(&reached)
            .cloned()
            .collect::<Vec<_>>();
        reached.extend(new.iter().cloned());
        next.extend(new);
    }
    reached
}

#[test]
fn modules_import_one_way() {
    for name in CRATES.iter().copied().chain(["crates/cuda-interpreter"]) {
        for imports in [imports(name), imports_of_files(name)] {
            let is_right = imports.values().any(|to| !to.is_empty());
            assert!(is_right, "no imports read in {name}");
            let circles: BTreeSet<_> = (imports.iter())
                .flat_map(|(from, to)| to.iter().map(move |to| (from, to)))
                .filter(|(from, to)| reached(&imports, to).contains(*from))
                .collect();
            assert!(circles.is_empty(), "circles in {name}: {circles:?}");
        }
    }
}

#[test]
fn no_arrow_is_forbidden() {
    for (name, from, to) in FORBIDDEN {
        let imports = imports(name);
        for from in *from {
            let there = imports
                .get(*from)
                .unwrap_or_else(|| panic!("{name} has no {from}"));
            let wrong: Vec<_> = to.iter().filter(|to| there.contains(**to)).collect();
            assert!(wrong.is_empty(), "in {name}, {from} imports {wrong:?}");
        }
    }
}

#[test]
fn crates_depend_one_way() {
    let name = |path: &str| path.split('/').next_back().expect("a name").to_owned();
    for (at, path) in CRATES.iter().enumerate() {
        let manifest = root().join(path).join("Cargo.toml");
        let text = fs::read_to_string(manifest).expect("a manifest");
        for other in &CRATES[at + 1..] {
            let line = format!("\n{} = ", name(other));
            assert!(!text.contains(&line), "{path} depends on {other}");
        }
    }
    // Training ops do not use attention: of the crate below they use only what all ops share.
    for path in sources(&root().join("crates/burn-fused-ops/src")) {
        let text = fs::read_to_string(&path).expect("a source");
        for word in ["Attention", "BlockLayout", "DeviceLayout"] {
            let mut code = text
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"));
            let found = code.find(|line| line.contains(word));
            assert_eq!(found, None, "{} knows of attention", path.display());
        }
    }
}
