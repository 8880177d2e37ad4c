//! The code in the README and in the pages, as it is printed there: `build.rs` makes a test of each block. And the chapters of the book.
#![cfg(feature = "flex")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Where the pictures go that the examples draw.
fn in_a_folder_of_its_own() -> std::io::Result<()> {
    std::env::set_current_dir(env!("CARGO_TARGET_TMPDIR"))
}

include!(concat!(env!("OUT_DIR"), "/pages.rs"));

/// Section, title and file of the pages that a list links to, one a line that begins with `item`.
fn chapters(text: &str, heading: &str, item: &str) -> Vec<[String; 3]> {
    let mut section = String::new();
    let mut chapters = Vec::new();
    for line in text.lines() {
        if let Some(title) = line.strip_prefix(heading) {
            section = title.to_owned();
        }
        let link = line
            .strip_prefix(item)
            .and_then(|rest| rest.split_once(')'));
        let Some((title, page)) = link.and_then(|(link, _)| link.split_once("](")) else {
            continue;
        };
        // Not files elsewhere, nor sections of a page.
        if !page.contains(['/', '#']) {
            chapters.push([section.clone(), title.to_owned(), page.to_owned()]);
        }
    }
    chapters
}

/// `docs/SUMMARY.md`, which mdBook reads, has the pages of `docs/README.md`, in its order and by its titles, and these are all there are.
#[test]
fn the_book_has_each_page_once() {
    let here = std::env::var("CARGO_MANIFEST_DIR").expect("set by cargo");
    let docs = Path::new(&here).join("../docs");
    let read = |page: &str| fs::read_to_string(docs.join(page)).unwrap();
    let book = chapters(&read("SUMMARY.md"), "# ", "- [");
    assert_eq!(book, chapters(&read("README.md"), "## ", "| ["));
    let files = fs::read_dir(&docs).unwrap().map(|file| {
        let name = file.unwrap().file_name();
        name.into_string().unwrap()
    });
    let lists = ["README.md", "SUMMARY.md"];
    let pages: BTreeSet<String> = files
        .filter(|name| name.ends_with(".md") && !lists.contains(&name.as_str()))
        .collect();
    let in_book: BTreeSet<String> = book.iter().map(|[_, _, page]| page.clone()).collect();
    assert_eq!((in_book, book.len()), (pages.clone(), pages.len()));
}
