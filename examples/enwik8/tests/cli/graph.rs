//! Steps that are recorded and replayed where the device can.

use std::fs;

use crate::support::*;

#[test]
fn a_run_with_a_graph_is_the_same_run() {
    let folder = Folder::new();
    let flags = words("--steps 12 --checkpoint-every 6 --eval-every 5");
    let graph = [&flags[..], &["--graph"]].concat();
    let plain = folder.train("plain", &flags);
    assert!(!plain.contains("steps one by one"), "{plain}");
    // What CPUs say; it is the same program where steps are replayed.
    let text = folder.train("graph", &graph);
    let lines = text.matches("runs steps one by one: ").count();
    assert_eq!(lines, 1, "{text}");
    // Continued with and without.
    folder.train("mixed", &graph);
    fs::remove_file(folder.checkpoint("mixed", 12)).unwrap();
    folder.resume("mixed", &["--graph"]);
    folder.train("ended", &graph);
    fs::remove_file(folder.checkpoint("ended", 12)).unwrap();
    folder.resume("ended", &[]);
    for run in ["graph", "mixed", "ended"] {
        assert_eq!(folder.losses(run), folder.losses("plain"), "{run}");
        let [a, b] = [run, "plain"].map(|run| state_of(&folder.checkpoint(run, 12)));
        assert!(a == b, "{run}: another model or optimizer");
    }
}

#[test]
fn an_iteration_with_a_graph_is_timed() {
    let arguments = words("bench --graph --iterations 1 --attention sparse");
    let text = succeed(&[&arguments[..], &nano()].concat());
    assert!(text.contains("runs steps one by one: "), "{text}");
}
