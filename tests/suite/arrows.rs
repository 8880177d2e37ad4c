//! Which modules import which, read from the sources: no circles, and the arrows of `docs/dev/design.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::public_names::root;

/// What modules at the root of a crate must not import: crate, these, those.
const FORBIDDEN: &[(&str, &[&str], &[&str])] = &[
    // What all kernels share knows none of them.
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
    // The tiers of attention know no other kind of kernel.
    (
        "crates/blocksparse-cubecl",
        &["simt", "mma", "hopper"],
        &["on_device", "rows"],
    ),
];

/// Crates from below to above: none depends on one that stands behind it.
const CRATES: &[&str] = &[
    "crates/blocksparse",
    "crates/blocksparse-cubecl",
    "crates/burn-blocksparse",
    "crates/burn-fused-ops",
    "contrib/burn-sparse-select",
    "crates/burn-sparse-transformer",
    "contrib/burn-paged-attention",
];

/// Modules at the root of a crate, with those that each of them imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

fn imports(name: &str) -> Imports {
    let root = root().join(name).join("src");
    let files: Vec<_> = (sources(&root).iter())
        .map(|path| {
            let code = fs::read_to_string(path).expect("a source");
            let code: Vec<_> = (code.lines().take_while(|line| *line != "#[cfg(test)]"))
                .map(|line| line.split("//").next().unwrap_or_default())
                .collect();
            (
                module(path.strip_prefix(&root).expect("below it")),
                code.join("\n"),
            )
        })
        .collect();
    let mut found: Imports = (files.iter())
        .filter_map(|(module, _)| Some((module.first()?.clone(), BTreeSet::new())))
        .collect();
    let known: BTreeSet<_> = found.keys().cloned().collect();
    let of_name = |c: char| c.is_alphanumeric() || c == '_';
    for (module, code) in &files {
        let Some(own) = module.first() else { continue };
        // `crate::`, and as many `super::` as lead to the root.
        for prefix in ["crate::", &"super::".repeat(module.len())] {
            for (at, _) in code.match_indices(prefix) {
                let rest = &code[at + prefix.len()..];
                if code[..at].ends_with("super::") || rest.starts_with("super::") {
                    continue;
                }
                let list = match rest.starts_with('{') {
                    true => rest.split(';').next().unwrap_or_default(),
                    false => rest.split(|c| !of_name(c)).next().unwrap_or_default(),
                };
                let words = list.split(|c| !of_name(c));
                let others = words.filter(|word| word != own && known.contains(*word));
                let of_own = found.get_mut(own).expect("known");
                of_own.extend(others.map(str::to_owned));
            }
        }
    }
    found
}

/// The sources in a folder but for what only tests read.
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

/// The module of a file, from the root of its crate on.
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

/// What a module imports, and what that imports, and so on.
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
        let imports = imports(name);
        assert!(
            imports.values().any(|to| !to.is_empty()),
            "no imports read in {name}"
        );
        let circles: BTreeSet<_> = (imports.iter())
            .flat_map(|(from, to)| to.iter().map(move |to| (from, to)))
            .filter(|(from, to)| reached(&imports, to).contains(*from))
            .collect();
        assert!(circles.is_empty(), "circles in {name}: {circles:?}");
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
    // Training ops have no attention: of the crate below them they take what all ops share.
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
