//! The public API of the crates: names of their roots and topic modules, read from the sources and compared with `docs/dev/public-names.txt`, so
//! that every change is a line in a review. `BURN_SPARSE_WRITE_NAMES=1` rewrites the list.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The crates, and the most names that a root may have.
const CRATES: [(&str, usize); 6] = [
    ("crates/blocksparse", 40),
    ("crates/burn-blocksparse", 40),
    ("crates/burn-fused-ops", 45),
    ("crates/burn-sparse-transformer", 50),
    ("contrib/burn-paged-attention", 40),
    ("contrib/burn-sparse-select", 50),
];

/// Modules that are listed without their names, because they are not for users and change with each kernel.
const UNSTABLE: [&str; 7] = [
    "blocksparse::internal",
    "blocksparse::plan",
    "burn_blocksparse::internal",
    "burn_fused_ops::kernels",
    "burn_paged_attention::kernels",
    "burn_sparse_select::kernels",
    "burn_sparse_transformer::internal",
];

const LIST: &str = "docs/dev/public-names.txt";

/// Returns the root of the workspace.
pub(crate) fn root() -> PathBuf {
    // Read at run time, because build folders move.
    let here = std::env::var("CARGO_MANIFEST_DIR").expect("set by cargo");
    Path::new(&here).join("..")
}

#[test]
fn the_public_names_are_those_of_the_list() {
    let mut names = BTreeSet::new();
    for (package, most) in CRATES {
        let source = root().join(package).join("src");
        let path = package
            .split('/')
            .next_back()
            .expect("a name")
            .replace('-', "_");
        let mut listed = BTreeSet::new();
        of_module(&source.join("lib.rs"), &source, &path, &mut listed);
        let at_root: Vec<_> = (listed.iter())
            .filter(|name| name.matches("::").count() == 1)
            .collect();
        assert!(
            at_root.len() <= most,
            "{package} has {} names at its root, at most {most} are allowed; topics have modules: {at_root:#?}",
            at_root.len()
        );
        names.extend(listed);
    }
    let list = root().join(LIST);
    if std::env::var_os("BURN_SPARSE_WRITE_NAMES").is_some() {
        let text: String = names.iter().map(|name| format!("{name}\n")).collect();
        fs::write(&list, text).unwrap();
        return;
    }
    let text = fs::read_to_string(&list).unwrap();
    let known: BTreeSet<_> = text.lines().map(str::to_owned).collect();
    let new: Vec<_> = names
        .difference(&known)
        .map(|name| format!("+{name}"))
        .collect();
    let gone: Vec<_> = known
        .difference(&names)
        .map(|name| format!("-{name}"))
        .collect();
    assert!(
        new.is_empty() && gone.is_empty(),
        "the public names are not those of {LIST}. If that is meant, write it anew with BURN_SPARSE_WRITE_NAMES=1:\n{}\n{}",
        new.join("\n"),
        gone.join("\n")
    );
}

/// Adds the public names of a module's file and of its public modules.
fn of_module(file: &Path, folder: &Path, path: &str, names: &mut BTreeSet<String>) {
    let text =
        fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let found = public_items(&text).unwrap_or_else(|what| panic!("{}: {what}", file.display()));
    for (name, is_module) in found {
        let full = format!("{path}::{name}");
        if is_module && !UNSTABLE.contains(&full.as_str()) {
            let beside = folder.join(format!("{name}.rs"));
            let inside = folder.join(&name).join("mod.rs");
            let file = if beside.exists() { beside } else { inside };
            of_module(&file, &folder.join(&name), &full, names);
        }
        names.insert(full);
    }
}

/// Returns the public items of a file's top level, and whether each is a module with a file.
fn public_items(text: &str) -> Result<BTreeMap<String, bool>, String> {
    let mut items = BTreeMap::new();
    // Items begin at the left margin, as rustfmt writes them; those that `op_values!` declares are indented by one level.
    let mut declared = false;
    for (at, line) in lines_with_places(text) {
        declared = line == "op_values! {" || declared && line != "}";
        let line = match declared {
            true => line.strip_prefix("    ").unwrap_or_default(),
            false => line,
        };
        if let Some(name) = line.strip_prefix("macro_rules! ") {
            if text[..at].ends_with("#[macro_export]\n") {
                items.insert(word(name).to_owned(), false);
            }
            continue;
        }
        let Some(rest) = line.strip_prefix("pub ") else {
            continue;
        };
        if rest.starts_with("use ") {
            let tree = &text[at + "pub use ".len()..];
            let end = tree.find(';').ok_or("a `pub use` without an end")?;
            ends(&tree[..end], &[], &mut |path, behind| {
                let alias = behind.trim_start().strip_prefix("as ");
                let name = alias.map_or(path.last().expect("a name").as_str(), word);
                items.insert(name.to_owned(), false);
            });
            // `*` hides names, and `self` is not a name.
            if items.contains_key("") || items.contains_key("self") {
                return Err(format!("`{line}` must list its names"));
            }
            continue;
        }
        let mut words = rest.split_whitespace();
        let kind = words
            .by_ref()
            .find(|word| !["unsafe", "async"].contains(word))
            .unwrap_or_default();
        let mut name = words.next().unwrap_or_default();
        if kind == "const" && name == "fn" {
            name = words.next().unwrap_or_default();
        }
        match kind {
            "mod" if name.ends_with(';') => items.insert(word(name).to_owned(), true),
            "mod" => return Err(format!("`pub mod {name}` must be in a file of its own")),
            "fn" | "struct" | "enum" | "union" | "trait" | "type" | "const" | "static" => {
                items.insert(word(name).to_owned(), false)
            }
            _ => return Err(format!("`{line}` is no item this test can read")),
        };
    }
    Ok(items)
}

fn lines_with_places(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.split_inclusive('\n').scan(0, |next, line| {
        let at = *next;
        *next += line.len();
        Some((at, line.trim_end()))
    })
}

/// Returns the identifier at the beginning of a text.
fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    &text[..end.unwrap_or(text.len())]
}

/// Calls `found` with each path of a tree of imports, such as `a::{b, c::{d, e}}`, and the text after the path. Returns the text after the tree.
pub(crate) fn ends<'a>(
    tree: &'a str,
    prefix: &[String],
    found: &mut dyn FnMut(Vec<String>, &'a str),
) -> &'a str {
    let end = word(tree).len();
    let (name, mut rest) = tree.split_at(end);
    let path = [prefix, &[name.to_owned()]].concat();
    if let Some(further) = rest.strip_prefix("::").filter(|_| !name.is_empty()) {
        return ends(further, &path, found);
    }
    let Some(list) = rest.strip_prefix('{').filter(|_| name.is_empty()) else {
        found(path, rest);
        return rest;
    };
    rest = list;
    while !rest.is_empty() && !rest.starts_with('}') {
        let behind = ends(rest.trim_start(), prefix, found);
        rest = behind.trim_start_matches(|c| c != ',' && c != '}');
        rest = rest.trim_start_matches(',').trim_start();
    }
    rest.strip_prefix('}').unwrap_or_default()
}

#[test]
fn items_are_read_as_rust_reads_them() {
    let text = "//! pub use not::this;\n\
        use private::A;\n\
        #[cfg(feature = \"x\")]\npub use one::{\n    B, two::{C as D, E},\n};\n\
        pub(crate) use hidden::F;\n\
        pub mod topic;\nmod inner;\n\
        pub const fn g<const N: usize>() {}\n\
        op_values! {\n    /// Values.\n    pub struct V {\n        pub field: FloatTensor,\n    }\n}\n\
        pub const H: usize = 1;\n\
        pub unsafe trait I {}\n\
        pub struct J<T>(T);\nimpl J<u8> {\n    pub fn method() {}\n}\n";
    let items: Vec<_> = public_items(text).unwrap().into_iter().collect();
    let expected = ["B", "D", "E", "H", "I", "J", "V", "g", "topic"];
    assert_eq!(
        items,
        expected.map(|name| (name.to_owned(), name == "topic"))
    );
    for refused in [
        "pub use all::*;\n",
        "pub use a::{self, B};\n",
        "pub mod a {\n}\n",
    ] {
        assert!(public_items(refused).is_err(), "{refused}");
    }
}
