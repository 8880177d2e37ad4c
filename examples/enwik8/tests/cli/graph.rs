//! Steps that are captured and replayed if the device can.

use crate::support::*;

#[test]
fn a_run_with_a_graph_is_the_same_run() {
    let folder = Folder::new();
    let flags = "--steps 12 --checkpoint-every 6 --eval-every 5";
    let graph = format!("{flags} --graph");
    let plain = folder.train("plain", flags);
    assert!(!plain.contains("steps one by one"), "{plain}");
    // CPUs cannot capture; the program is the same on devices that can.
    let text = folder.train("graph", &graph);
    let lines = text.matches("runs steps one by one: ").count();
    assert_eq!(lines, 1, "{text}");
    // Resumed with and without.
    for (run, more) in [("mixed", "--graph"), ("ended", "")] {
        folder.train(run, &graph);
        std::fs::remove_file(folder.checkpoint(run, 12)).unwrap();
        folder.resume(run, more);
    }
    for run in ["graph", "mixed", "ended"] {
        assert_eq!(folder.losses(run), folder.losses("plain"), "{run}");
        folder.assert_same_state([run, "plain"], 12);
    }
}

#[test]
fn an_iteration_with_a_graph_is_timed() {
    let flags = "--graph --iterations 1 --attention sparse";
    let text = succeed(format!("bench {flags} {}", nano("")));
    says(text, "runs steps one by one: ");
}
