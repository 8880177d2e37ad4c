//! End of a run, after the last step.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;

use super::Session;
use crate::data::{Split, thousands};
use crate::log::{Log, Row};
use crate::memory::Resources;
use crate::presets::Task;
use crate::progress::{clock, plain_bar, program, say, warn};
use crate::report::Report;
use crate::{model, run};

impl Session {
    /// Evaluates the whole validation split, draws the final plot, and prints what to do next.
    pub(super) fn finish(&self, log: &mut Log, peak_tflops: Option<f64>) -> Result<()> {
        let bytes = self.corpus.split(Split::Validation).len();
        let began = Instant::now();
        let evaluation = self.evaluate(
            &self.config.model.cut().all(bytes, 0),
            &plain_bar("validation"),
        )?;
        log.write(&Row::Final(evaluation.after(self.step)))?;
        log.sync()?;
        Resources::now(&self.device).merge_into(&self.folder.file(run::RESOURCES))?;
        self.plot();
        let folder = self.folder.path().display();
        say(format!(
            "\nwhole validation split: {:.3} {} over {} bytes ({})",
            evaluation.bits_per_byte(),
            self.config.model.unit(),
            thousands(evaluation.bytes),
            clock(began.elapsed())
        ));
        match self.report(peak_tflops) {
            Ok(path) => say(format!("report:     {}", path.display())),
            // A failure only warns, as with plots.
            Err(error) => warn(format!("there is no report: {error:#}")),
        }
        let program = program();
        let (sample, min_context) = match self.config.model.task() {
            Task::Text => {
                let half = self.config.model.context / 2;
                let sample = format!("sample --checkpoint {folder} --prompt 'The '");
                (sample, format!(" --min-context {half}"))
            }
            Task::Images => (
                format!("sample-images --checkpoint {folder} --out samples.png"),
                String::new(),
            ),
        };
        // Generation byte by byte does not support some kinds of content-based attention.
        if model::check_cached(&self.config.model).is_ok() {
            say(format!("sample:     {program} {sample}"));
        }
        say(format!(
            "evaluate:   {program} eval --checkpoint {folder} --split test{min_context}"
        ));
        Ok(())
    }

    /// Writes the report and returns its path.
    fn report(&self, peak_tflops: Option<f64>) -> Result<PathBuf> {
        let (_, checkpoint) = run::open_checkpoint("run", self.folder.path())?;
        Report {
            folder: self.folder.path(),
            checkpoint: &checkpoint,
            device: &self.device,
            corpus: Some(&self.corpus),
            peak_tflops,
        }
        .write()
    }
}
