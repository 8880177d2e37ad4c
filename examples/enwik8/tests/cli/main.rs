//! The program from its users' view: a process with arguments, files, signals and exit codes.

mod checkpoints;
mod choices;
mod content;
mod devices;
mod examples;
mod files;
mod flags;
mod graph;
mod images;
mod limits;
mod measurements;
mod processes;
mod reports;
mod resume;
mod search;
mod shell;
mod support;
mod weights;
