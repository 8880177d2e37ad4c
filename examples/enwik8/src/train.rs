//! `enwik8 train`: the training loop, top-down.
//!
//! Autodiff, modules and records are Burn's; the optimizer reads and writes the records of Burn's AdamW. The loop does not use Burn's `Learner`, which saves
//! model, optimizer and scheduler at the end of an epoch and rebuilds its data loaders. A run here continues from any step, with the same data order and
//! random numbers.

mod describe;
mod finish;
mod stop;

use std::ops::Deref;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use burn::module::Module;
use burn::tensor::Bytes;
use burn_fused_ops::optim::FusedAdamW;
use burn_sparse_transformer::SparseTransformer;
use burn_sparse_transformer::content::ContentAttention;
use clap::Args;
use indicatif::ProgressBar;

use crate::arguments::{self, LOG};
use crate::checkpoint::{Best, Checkpoint, Header};
use crate::config::RunConfig;
use crate::data::{Corpus, Sampler, Split, thousands};
use crate::device::NamedDevice;
use crate::devices::{DEVICE, DeviceArgs, Group, Training};
use crate::devices::{ask_to_stop, hear_of_stops, serve, settled};
use crate::eval::{Evaluation, Evaluator};
use crate::log::{self, Log, Row, Trained};
use crate::memory::Resources;
use crate::model::{self, bits};
use crate::overrides::Overrides;
use crate::plot::Axis;
use crate::presets::{Preset, Task};
use crate::progress::{Progress, program, say, warn};
use crate::run::{self, RunFolder};
use crate::step::{Batch, Change, Measured, Steps};
use crate::tensorboard::EventFile;
use crate::windows::Window;
use crate::{indexers, recall, report};

/// Train a model on the bytes of text or images
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 train                 minutes on a CPU, on an embedded sample
  enwik8 train --resume        continue after Ctrl-C or a crash
  enwik8 train --attention dense --run runs/dense
  enwik8 train --attention msa:16,4,32 --share-every 2 --run runs/shared
  enwik8 train --data enwik8 --preset small --device cuda --precision bf16
  enwik8 train --data enwik8-4mb --preset long --device cuda --precision bf16 --graph
  enwik8 train --data enwik8 --preset paper --devices 0,1,2,3 --precision bf16
  torchrun --nproc-per-node 2 --no-python enwik8 train --processes --data enwik8 --preset paper
  enwik8 train --task images   synthetic images: minutes on a CPU
  enwik8 train --preset cifar --data cifar-10-batches-bin --device cuda --precision bf16

Ctrl-C finishes the step, writes a checkpoint and stops.")]
pub struct TrainArgs {
    /// Kind of data [default: that of the preset; text]
    #[arg(long, value_enum)]
    task: Option<Task>,
    /// Model and recipe [default: tiny, or shapes with --task images]
    #[arg(long, value_enum)]
    preset: Option<Preset>,
    /// A file of raw bytes; enwik8 itself is recognised by its length [default: the first 1,000,000
    /// bytes of enwik8, embedded]. For images: a folder with CIFAR-10's binary files, a file in that format, or 'synthetic'
    /// (the default)
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Folder for checkpoints, log and loss curve [default: runs/PRESET]
    #[arg(long, value_name = "DIR", visible_alias = "checkpoint")]
    run: Option<PathBuf>,
    /// Continue the run in the folder, bit for bit
    #[arg(long)]
    resume: bool,
    /// Replace the run in the folder
    #[arg(long, conflicts_with = "resume")]
    overwrite: bool,
    #[command(flatten)]
    devices: DeviceArgs,
    /// Capture a step in a CUDA graph and replay it: the same results with less work of the host
    #[arg(long, help_heading = DEVICE)]
    graph: bool,
    /// Peak rate of the device, or of all devices together, in the run's precision, in 10¹² operations per second, for the report's MFU
    #[arg(long, value_name = "TFLOPS", value_parser = arguments::above_zero, help_heading = LOG)]
    peak_tflops: Option<f64>,
    /// Write event files for TensorBoard into the folder
    #[arg(long, help_heading = LOG)]
    tensorboard: bool,
    #[command(flatten)]
    overrides: Overrides,
}

impl TrainArgs {
    fn folder(&self) -> PathBuf {
        self.run
            .clone()
            .unwrap_or_else(|| PathBuf::from("runs").join(self.preset().to_string()))
    }

    fn preset(&self) -> Preset {
        let default = match self.task {
            Some(Task::Images) => Preset::Shapes,
            Some(Task::Text) | None => Preset::Tiny,
        };
        self.preset.unwrap_or(default)
    }

    /// Checks that the flags are consistent and the devices can train `config`; returns the first device.
    fn check(&self, config: &RunConfig, group: &Group) -> Result<NamedDevice> {
        let task = config.model.task();
        ensure!(
            self.task.is_none_or(|wanted| wanted == task),
            "--task contradicts the preset {}, which is one of {}",
            config.preset,
            match task {
                Task::Text => "text",
                Task::Images => "images",
            }
        );
        config.check_graph(self.graph)?;
        group.check(config, self.graph)?;
        let device = group.first();
        config.check_memory(Some(&device))?;
        Ok(device)
    }
}

/// Runs `enwik8 train`. The exit code is 130 if Ctrl-C ended it.
pub fn run(args: &TrainArgs) -> Result<ExitCode> {
    let devices = &args.devices;
    if !devices.processes {
        return train(args, Group::open(devices)?);
    }
    let processes = Arc::new(devices.processes()?);
    settled(&processes, || {
        let group = Group::of_processes(&processes, devices)?;
        if processes.rank() == 0 {
            return train(args, group);
        }
        let others = processes.clone();
        stop::on_ctrl_c(move || ask_to_stop(&others))?;
        serve(&group)
    })
}

fn train(args: &TrainArgs, group: Group) -> Result<ExitCode> {
    let session = match args.resume {
        false => Session::begin(args, group)?,
        true => Session::resume(args, group)?,
    };
    session.describe()?;
    if session.is_finished()? {
        say(format!(
            "nothing to do: this run has done all its {} steps; --steps N trains it further",
            thousands(session.steps)
        ));
        return Ok(ExitCode::SUCCESS);
    }
    let mut session = session.spread()?;
    let stop = stop::on_ctrl_c(|| ())?;
    if let Some(processes) = session.group.processes() {
        hear_of_stops(processes, &stop);
    }
    let mut log = session.open_log(args.tensorboard)?;
    session.train(&mut log, &stop)?;
    if session.step < session.steps {
        say(format!(
            "stopped after step {}; continue with: {} train --resume --run {}",
            thousands(session.step),
            program(),
            session.folder.path().display()
        ));
        return Ok(ExitCode::from(130));
    }
    session.finish(&mut log, args.peak_tflops)?;
    Ok(ExitCode::SUCCESS)
}

/// Run in memory.
struct Session {
    /// Metadata for checkpoints; the data position advances in `sampler`.
    header: Header,
    steps: usize,
    corpus: Corpus,
    folder: RunFolder,
    group: Group,
    /// First device of the group, with the names of all.
    device: NamedDevice,
    training: Training,
    sampler: Sampler,
}

impl Deref for Session {
    type Target = Header;

    fn deref(&self) -> &Header {
        &self.header
    }
}

impl Session {
    fn begin(args: &TrainArgs, group: Group) -> Result<Self> {
        let config = RunConfig::new(args.preset(), &args.overrides)?;
        let device = args.check(&config, &group)?;
        let corpus = Corpus::open(args.data.as_deref(), config.model.pictures)?;
        check_lengths(&corpus, &config)?;
        let (seed, device) = (config.recipe.seed, device.device.autodiff());
        let model = indexers::staged(model::new(&config.model, seed, &device)?, &config, 0)?;
        // Nothing is written until all input is checked.
        let folder = RunFolder::create(&args.folder(), args.overwrite)?;
        let optimizer = model::optimizer(&config.recipe);
        let header = Header::new(config, corpus.fingerprint());
        Self::new(args, group, (folder, corpus), header, (model, optimizer))
    }

    fn resume(args: &TrainArgs, group: Group) -> Result<Self> {
        let folder = RunFolder::open(&args.folder())?;
        let (path, checkpoint) = run::latest_checkpoint(folder.path())?;
        let header = &checkpoint.header;
        let config = header.config.resumed(args.preset, &args.overrides)?;
        let device = args.check(&config, &group)?;
        let pictures = config.model.pictures;
        let corpus = Corpus::reopen(&header.data, args.data.as_deref(), pictures)?;
        let data = corpus.fingerprint();
        ensure!(
            (data.bytes, data.crc32) == (header.data.bytes, header.data.crc32),
            "the data are not those of the run in {}: {} bytes with CRC-32 {:08x}, not {} bytes with {:08x}",
            folder.path().display(),
            thousands(data.bytes),
            data.crc32,
            thousands(header.data.bytes),
            header.data.crc32
        );
        check_lengths(&corpus, &config)?;
        let model = model::restore(&checkpoint, &device.device.autodiff())
            .with_context(|| format!("cannot resume from {}", path.display()))?;
        let optimizer = model::optimizer(&config.recipe)
            .from_bytes(Bytes::from_bytes_vec(checkpoint.optimizer))
            .with_context(|| path.display().to_string())?;
        say(format!("resuming from {}", path.display()));
        let Header {
            sampler,
            step,
            best,
            ..
        } = checkpoint.header;
        let header = Header {
            sampler,
            step,
            best,
            ..Header::new(config, data)
        };
        Self::new(args, group, (folder, corpus), header, (model, optimizer))
    }

    fn new(
        args: &TrainArgs,
        group: Group,
        (folder, corpus): (RunFolder, Corpus),
        header: Header,
        (model, optimizer): (SparseTransformer, FusedAdamW),
    ) -> Result<Self> {
        let config = &header.config;
        folder.write_config(config)?;
        let (device, recompute) = (group.first(), config.recipe.recompute);
        let training = Steps::new(model, optimizer, &device.device, recompute, args.graph);
        let (cut, train) = (config.model.cut(), corpus.split(Split::Train).len());
        Ok(Session {
            steps: config.steps(cut.predictions(train)),
            sampler: Sampler::resume(train, cut, header.sampler.clone()),
            training: training.into(),
            header,
            corpus,
            folder,
            group,
            device,
        })
    }

    /// Puts a model on each device, if there are several.
    fn spread(self) -> Result<Self> {
        if !self.group.spreads() {
            return Ok(self);
        }
        let checkpoint = self.checkpoint()?;
        let training = self.training.spread(&self.group, checkpoint)?;
        Ok(Session { training, ..self })
    }

    /// Returns whether the log also has the evaluation after the last step.
    fn is_finished(&self) -> Result<bool> {
        let is_last = |row: &Row| matches!(row, Row::Final(of) if of.step == self.step);
        let rows = log::read(&self.folder.file(run::LOG))?;
        Ok(self.step > self.steps || (self.step == self.steps && rows.iter().any(is_last)))
    }

    fn open_log(&self, tensorboard: bool) -> Result<Log> {
        let path = self.folder.file(run::LOG);
        let mut log = Log::open(&path, self.step)?;
        if tensorboard {
            let rows = log::read(&path)?;
            let events = EventFile::create(self.folder.path(), self.step, &rows)?;
            log.write_events(events);
        }
        Ok(log)
    }

    fn train(&mut self, log: &mut Log, stop: &AtomicBool) -> Result<()> {
        let recipe = self.config.recipe.clone();
        let mut progress = Progress::new(self.step, self.steps, recipe.log_every, self.bits());
        if self.step == self.steps {
            self.validate_last_step(log, &progress)?;
        }
        let mut described = false;
        while self.step < self.steps {
            let done = self.train_step()?;
            log.write(&Row::Train(done))?;
            progress.step(done);
            for note in self.change()?.into_iter().chain(self.recall(log)?) {
                progress.note(note);
            }
            if let (false, Some(how)) = (described, self.training.describe()) {
                progress.note(how);
                described = true;
            }

            let last = self.step == self.steps || stop.load(Ordering::Relaxed);
            if self.step.is_multiple_of(recipe.eval_every) || self.step == self.steps {
                progress.note(self.validate(log)?);
            }
            if self.step.is_multiple_of(recipe.checkpoint_every) || last {
                log.sync()?;
                self.folder.save(&self.checkpoint()?)?;
                self.measure(log)?;
                self.plot();
            }
            if last {
                break;
            }
        }
        Ok(())
    }

    /// Validates after the last step, if that step was not the last one when it was taken.
    fn validate_last_step(&mut self, log: &mut Log, progress: &Progress) -> Result<()> {
        let is_its_own = |row: &Row| matches!(row, Row::Validation(of) if of.step == self.step);
        let rows = log::read(&self.folder.file(run::LOG))?;
        if !rows.iter().any(is_its_own) {
            progress.note(self.validate(log)?);
            log.sync()?;
            self.folder.save(&self.checkpoint()?)?;
        }
        Ok(())
    }

    /// Takes one optimizer step, counted by `self.step`.
    fn train_step(&mut self) -> Result<Trained> {
        let RunConfig { model, recipe, .. } = &self.header.config;
        let began = Instant::now();

        let bytes = self.corpus.split(Split::Train);
        let [tokens, targets] = self.sampler.batch(bytes, recipe.batch);
        // Only before the first step: later the means follow the bytes, and checkpoints store them.
        let has_means = matches!(model.content, Some(ContentAttention::Routing(_)));
        if self.step == 0 && has_means {
            let seed = step_seed(!recipe.seed, 0);
            // Single device: groups reject models with means.
            let steps = self.training.steps();
            steps.kmeans_init(tokens.clone(), seed)?;
        }
        let learning_rate = self.config.learning_rate(self.step, self.steps);
        let Measured {
            loss,
            grad_norm,
            aux_loss,
        } = self.training.take(Batch {
            tokens,
            targets,
            dropout_seed: step_seed(recipe.seed, self.step),
            learning_rate,
        })?;
        self.header.step += 1;

        ensure!(
            loss.is_finite() && grad_norm.is_finite() && aux_loss.is_none_or(f64::is_finite),
            "the loss is no longer finite at step {} (loss {loss}, gradient norm {grad_norm}); the last checkpoint \
             is from before: begin again with a lower --lr or another --seed",
            self.step
        );
        let seconds = began.elapsed().as_secs_f64();
        Ok(Trained {
            step: self.step,
            loss,
            bits_per_byte: bits(loss),
            learning_rate,
            grad_norm,
            indexer_loss: self.config.indexer_loss(aux_loss),
            tokens_per_s: self.config.tokens_per_step() as f64 / seconds,
            ms: seconds * 1_000.0,
        })
    }

    /// Applies the changes due after the step, and returns messages for the user.
    fn change(&mut self) -> Result<Vec<String>> {
        let (config, step) = (&self.config, self.step);
        let density = |step| config.ff_density(step);
        let pruned = density(step).filter(|now| density(step - 1) > Some(*now));
        let pruned = pruned.map(|density| {
            let share = 100.0 * density;
            let note = format!("feed-forward weights keep {share:.1} % of their blocks");
            (Change::Prune(density), note)
        });
        let is_over = config.recipe.selection_until == Some(step);
        let over = is_over.then(|| {
            let note = "from here on layers see all that their pattern keeps".to_owned();
            (Change::SeeEverything, note)
        });
        let stage = (config.stage_begun(step))
            .map(|(stage, what)| (Change::Stage(stage), format!("from here on {what}")));
        let mut notes = Vec::new();
        for (change, mut note) in [pruned, over, stage].into_iter().flatten() {
            self.training.change(change)?;
            if let Change::Prune(_) = change {
                let parameters = self.training.steps().model()?.num_params();
                note += &format!(": {} parameters", thousands(parameters));
            }
            notes.push(format!("step {step}/{}  {note}", self.steps));
        }
        Ok(notes)
    }

    /// Measures the recall of selections, if due after the step, and returns a message for the user.
    fn recall(&self, log: &mut Log) -> Result<Option<String>> {
        let due = (self.config.recipe.recall_every).is_some_and(|n| self.step.is_multiple_of(n));
        if !due || !self.config.chooses(self.step) {
            return Ok(None);
        }
        let context = self.config.model.context;
        let bytes = self.corpus.split(Split::Validation);
        let model = self.training.steps().model()?.valid();
        let layers = recall::measure(&model, &bytes[..context], &self.device.device)?;
        let note = format!(
            "step {}/{}  {}",
            self.step,
            self.steps,
            recall::summary(&layers)
        );
        log.write(&Row::Selection {
            step: self.step,
            layers,
        })?;
        Ok(Some(note))
    }

    /// Returns the unit of the loss, in short.
    fn bits(&self) -> &'static str {
        match self.config.model.task() {
            Task::Text => "bits/byte",
            Task::Images => "bits/dim",
        }
    }

    /// Validates on a fixed set of windows. A new best is stored at once, after the line in the log, because a run may be resumed from it. Returns a message
    /// for the user.
    fn validate(&mut self, log: &mut Log) -> Result<String> {
        let bytes = self.corpus.split(Split::Validation).len();
        let plan = (self.config.model.cut()).spread(bytes, self.config.recipe.eval_windows);
        let evaluation = self.evaluate(&plan, &ProgressBar::hidden())?;
        let bits_per_byte = evaluation.bits_per_byte();
        log.write(&Row::Validation(evaluation.after(self.step)))?;
        let improved = self
            .best
            .is_none_or(|best| bits_per_byte < best.bits_per_byte);
        if improved {
            log.sync()?;
            self.header.best = Some(Best {
                step: self.step,
                bits_per_byte,
            });
            self.folder.save_best(&self.checkpoint()?)?;
        }
        let mark = if improved { "  (best)" } else { "" };
        Ok(format!(
            "step {}/{}  validation {bits_per_byte:.3} {}{mark}",
            self.step,
            self.steps,
            self.bits()
        ))
    }

    fn evaluate(&self, plan: &[Window], bar: &ProgressBar) -> Result<Evaluation> {
        let evaluator = Evaluator {
            model: &self.training.steps().model()?.valid(),
            device: &self.device.device,
            cut: self.config.model.cut(),
            batch: self.config.recipe.batch,
        };
        let evaluation = evaluator.run(self.corpus.split(Split::Validation), plan, bar)?;
        // JSON cannot represent it.
        ensure!(
            evaluation.nats.is_finite(),
            "the validation loss is no longer finite after step {} (loss {}): begin again with a lower --lr or another --seed",
            self.step,
            evaluation.loss()
        );
        Ok(evaluation)
    }

    fn checkpoint(&self) -> Result<Checkpoint> {
        let header = Header {
            sampler: self.sampler.state().clone(),
            ..self.header.clone()
        };
        let model = self.training.steps().model()?.clone();
        Checkpoint::new(header, model, &self.training.steps().optimizer())
    }

    /// Records the memory of this process and the device, for the report and for TensorBoard.
    fn measure(&self, log: &mut Log) -> Result<()> {
        let resources = Resources::now(&self.device);
        if let Some(events) = log.events() {
            events.write_memory(self.step, &resources)?;
        }
        resources.merge_into(&self.folder.file(run::RESOURCES))
    }

    /// Draws the plots; a failure only warns, so that it does not end a run.
    fn plot(&self) {
        let entropy = Some(self.corpus.order_0_entropy());
        let drawn = log::read(&self.folder.file(run::LOG)).and_then(|rows| {
            let axes = [Axis::Steps];
            report::draw(self.folder.path(), &self.config, entropy, &rows, &axes)
        });
        if let Err(error) = drawn {
            warn(format!("{error:#}"));
        }
    }
}

/// Checks that all splits are long enough and the run is not too long.
fn check_lengths(corpus: &Corpus, config: &RunConfig) -> Result<()> {
    let context = config.model.context;
    corpus.split_for(Split::Validation, context)?;
    let train = corpus.split_for(Split::Train, context)?.len();
    config.check_length(config.model.cut().predictions(train))
}

/// Returns a seed for the dropout of one step: SplitMix64's output function over seed and step.
fn step_seed(seed: u64, step: usize) -> u64 {
    let mut z = seed ^ (step as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
