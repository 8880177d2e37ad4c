//! The program as its users meet it: a process with arguments, files, signals and exit codes.

mod checkpoints;
mod choices;
mod content;
mod devices;
mod flags;
mod graph;
mod images;
mod measurements;
mod reports;
mod resume;
mod search;
mod support;
mod weights;
