//! The feature of a backend enables that backend in all of our crates below: a missing one would run Burn's primitives there, or not compile.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const FOLDERS: [&str; 10] = [
    "crates/blocksparse-cubecl",
    "crates/burn-blocksparse",
    "crates/burn-fused-ops",
    "crates/burn-sparse-transformer",
    "contrib/burn-paged-attention",
    "contrib/burn-sparse-select",
    "examples/enwik8",
    "examples/llama",
    "bench",
    "tests",
];

const BACKENDS: [&str; 4] = ["flex", "ndarray", "wgpu", "cuda"];

/// The features of a `Cargo.toml`.
#[derive(Default)]
struct Package {
    features: BTreeMap<String, Vec<String>>,
    dependencies: BTreeSet<String>,
}

fn read(folder: &str) -> (String, Package) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = std::fs::read_to_string(root.join(folder).join("Cargo.toml")).unwrap();
    let (mut package, mut section, mut name) = (Package::default(), "", String::new());
    for line in text.lines() {
        if let Some(title) = line.strip_prefix('[') {
            section = title.trim_end_matches(']');
            continue;
        }
        let Some((key, value)) = line.split_once(" = ") else {
            continue;
        };
        match section {
            "package" if key == "name" => name = value.trim_matches('"').to_owned(),
            "features" => {
                let parts = value.split('"').skip(1).step_by(2).map(str::to_owned);
                package.features.insert(key.to_owned(), parts.collect());
            }
            "dependencies" => {
                package.dependencies.insert(key.to_owned());
            }
            _ => {}
        }
    }
    (name, package)
}

/// Collects what a feature of a package enables, as `package/feature`.
fn turned_on(
    all: &BTreeMap<String, Package>,
    of: (String, String),
    on: &mut BTreeSet<(String, String)>,
) {
    if !on.insert(of.clone()) {
        return;
    }
    let (package, feature) = of;
    let parts = all
        .get(&package)
        .and_then(|package| package.features.get(&feature));
    for part in parts.into_iter().flatten() {
        let next = match part.replace('?', "").split_once('/') {
            Some((package, feature)) => (package.to_owned(), feature.to_owned()),
            None => (package.clone(), part.clone()),
        };
        turned_on(all, next, on);
    }
}

#[test]
fn a_backend_is_on_in_all_crates_or_in_none() {
    let all: BTreeMap<String, Package> = FOLDERS.into_iter().map(read).collect();
    assert_eq!(all.len(), FOLDERS.len());
    let mut checked = 0;
    for (name, package) in &all {
        for backend in BACKENDS
            .into_iter()
            .filter(|backend| package.features.contains_key(*backend))
        {
            let mut on = BTreeSet::new();
            turned_on(&all, (name.clone(), backend.to_owned()), &mut on);
            let below = package.dependencies.iter().filter(|below| {
                all.get(*below)
                    .is_some_and(|below| below.features.contains_key(backend))
            });
            for below in below {
                checked += 1;
                let wanted = (below.clone(), backend.to_owned());
                let is_right = on.contains(&wanted);
                assert!(
                    is_right,
                    "{name}'s feature {backend} leaves out {below}/{backend}"
                );
            }
        }
    }
    assert!(checked > 30, "{checked}");
}
