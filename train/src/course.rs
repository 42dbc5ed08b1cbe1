//! The course of every training: epochs of steps, checkpoints between them, and the best epoch's weights.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use candle_core::{Device, Tensor, Var};
use laser_schema::{DeviceOption, Progress};

use crate::adam::Adam;
use crate::checkpoint::{Checkpoint, State};
use crate::epoch::Epoch;
use crate::network::Network;

/// The file in the output's folder that a stopped training is taken up from.
pub(crate) const CHECKPOINT: &str = "checkpoint.safetensors";

/// The time between two checkpoints within an epoch.
const CHECKPOINT_EVERY: Duration = Duration::from_secs(300);

/// The names of the tensors of a checkpoint: of the weights, their moments, and the best epoch's weights.
const PREFIXES: [&str; 4] = ["weight", "mean", "square", "best"];

/// A trained model.
#[derive(Debug, Clone, PartialEq)]
pub struct Trained {
    /// Its folder.
    pub folder: PathBuf,
    /// The epoch that was kept.
    pub kept: Epoch,
    /// All epochs.
    pub history: Vec<Epoch>,
    /// Whether this call finished it.
    pub is_new: bool,
}

/// How long and how fast a training learns.
#[derive(Debug, Clone)]
pub(crate) struct Plan<'a> {
    /// Where checkpoints are.
    pub(crate) folder: &'a Path,
    /// What the training is a function of.
    pub(crate) identity: String,
    /// What the keys that errors name begin with, such as `[train] `.
    pub(crate) section: &'static str,
    pub(crate) epochs: usize,
    /// Epochs in a row that are not the best so far, after which it ends.
    pub(crate) patience: usize,
    /// The largest one: it rises over the `warm_up`, a share of the training, and falls to 0 as a cosine.
    pub(crate) learning_rate: f64,
    pub(crate) warm_up: f64,
    pub(crate) weight_decay: f64,
}

/// What differs between trainings.
pub(crate) trait Course {
    fn network(&self) -> &Network;

    /// The indices of what each step of an epoch learns from; epochs count from 1.
    fn steps(&self, epoch: usize) -> Vec<Vec<usize>>;

    /// The mean loss over the places of a step, and their number. `steps` were made before, in all epochs.
    fn loss(&mut self, step: &[usize], epoch: usize, steps: u32) -> Result<(Tensor, usize)>;

    /// Measures the network at the end of an epoch, on what was held out.
    fn measure(&mut self) -> Result<Epoch>;
}

/// What a training has come to.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) kept: Epoch,
    pub(crate) history: Vec<Epoch>,
    /// By name, those of the epoch that was kept.
    pub(crate) weights: Vec<(String, Tensor)>,
}

/// Runs a training from its beginning, or from its checkpoint, to its end; none if `is_stopped` said so before: a
/// checkpoint is there then.
///
/// # Errors
/// A folder that cannot be written to or holds another training's checkpoint, tensor operations that fail, and a loss
/// that is not finite.
pub(crate) fn run<C: Course>(
    plan: &Plan<'_>,
    course: &mut C,
    progress: &mut dyn Progress,
    is_stopped: &dyn Fn() -> bool,
) -> Result<Option<Outcome>> {
    fs::create_dir_all(plan.folder).with_context(|| format!("{}output = {:?}", plan.section, plan.folder))?;
    let mut run = Run::open(plan, course)?;
    while !run.is_over() {
        if !run.epoch(progress, is_stopped)? {
            run.save()?;
            return Ok(None);
        }
        run.measure(progress)?;
        run.save()?;
    }
    run.outcome().map(Some)
}

/// Removes what a finished training needs no longer.
pub(crate) fn remove_checkpoint(folder: &Path) -> Result<()> {
    let checkpoint = folder.join(CHECKPOINT);
    fs::remove_file(&checkpoint).with_context(|| checkpoint.display().to_string())
}

/// Where tensors are computed.
pub(crate) fn open_device(option: DeviceOption) -> Result<Device> {
    match option {
        DeviceOption::Cpu => Ok(Device::Cpu),
        DeviceOption::Cuda(index) => Device::new_cuda(index).context("[model] device"),
    }
}

/// A training at work.
struct Run<'a, C: Course> {
    plan: &'a Plan<'a>,
    course: &'a mut C,
    adam: Adam,
    state: State,
    /// The weights of the best epoch.
    best: Vec<Tensor>,
}

impl<'a, C: Course> Run<'a, C> {
    /// At its beginning, or where its checkpoint left it.
    fn open(plan: &'a Plan<'a>, course: &'a mut C) -> Result<Self> {
        let weights: Vec<&Var> = course.network().weights().into_iter().map(|(_, var)| var).collect();
        let (adam, best) = (Adam::new(&weights, plan.weight_decay)?, copies(&weights)?);
        let state = State::new(plan.identity.clone());
        let mut run = Self { plan, course, adam, state, best };
        run.resume()?;
        Ok(run)
    }

    /// Goes on from the checkpoint, if there is one.
    fn resume(&mut self) -> Result<()> {
        let file = self.plan.folder.join(CHECKPOINT);
        let weights = self.course.network().weights();
        let Some(device) = weights.first().map(|(_, var)| var.device().clone()) else {
            return Ok(());
        };
        let Some(checkpoint) = Checkpoint::read(&file, &device)? else {
            return Ok(());
        };
        ensure!(
            checkpoint.state.identity == self.state.identity,
            "{}: of a training with other texts, target or options; give another {}output, or remove it",
            file.display(),
            self.plan.section
        );
        for (at, (name, weight)) in weights.into_iter().enumerate() {
            let [value, mean, square, best] =
                PREFIXES.map(|prefix| checkpoint.tensor(&format!("{prefix}.{name}"), weight));
            weight.set(&value?)?;
            self.adam.moments[at] = [mean?, square?];
            self.best[at] = best?;
        }
        self.adam.steps = checkpoint.state.updates;
        self.state = checkpoint.state;
        Ok(())
    }

    fn save(&mut self) -> Result<()> {
        self.state.updates = self.adam.steps;
        let mut tensors = Vec::new();
        let weights = self.course.network().weights().into_iter();
        for (((name, weight), [mean, square]), best) in weights.zip(&self.adam.moments).zip(&self.best) {
            for (prefix, tensor) in PREFIXES.iter().zip([weight.as_tensor(), mean, square, best]) {
                tensors.push((format!("{prefix}.{name}"), tensor.clone()));
            }
        }
        Checkpoint { state: self.state.clone(), tensors }.write(&self.plan.folder.join(CHECKPOINT))
    }

    /// Whether all epochs are over, or the best is too long ago.
    fn is_over(&self) -> bool {
        let history = &self.state.history;
        let since_best = history.len().saturating_sub(1 + best(history).unwrap_or_default());
        history.len() >= self.plan.epochs || since_best >= self.plan.patience
    }

    /// Makes the rest of the epoch's steps; false if it was stopped before their end.
    fn epoch(&mut self, progress: &mut dyn Progress, is_stopped: &dyn Fn() -> bool) -> Result<bool> {
        let epochs = self.plan.epochs;
        let epoch = self.state.history.len() + 1;
        let steps = self.course.steps(epoch);
        let (mut since, mut saved) = (Instant::now(), Instant::now());
        progress.stage(&format!("epoch {epoch} of {epochs}"));
        for (at, step) in steps.iter().enumerate().skip(self.state.step) {
            if is_stopped() {
                return Ok(false);
            }
            let done = (epoch as f64 - 1.0 + at as f64 / steps.len() as f64) / epochs as f64;
            let (mean, places) = self.step(step, epoch, schedule(done, self.plan.warm_up))?;
            self.state.loss_sum += mean * places as f64;
            self.state.places += places;
            self.state.step = at + 1;
            self.state.seconds += since.elapsed().as_secs_f64();
            since = Instant::now();
            let message =
                format!("steps, loss {mean:.3}; all epochs: {}", time(left(&self.state, steps.len(), epochs)));
            progress.update(self.state.step as u64, Some(steps.len() as u64), &message);
            if saved.elapsed() > CHECKPOINT_EVERY {
                self.save()?;
                saved = Instant::now();
            }
        }
        Ok(true)
    }

    /// One step at this share of the learning rate; returns the mean loss over its places, and their number.
    fn step(&mut self, step: &[usize], epoch: usize, share: f64) -> Result<(f64, usize)> {
        let (loss, places) = self.course.loss(step, epoch, self.adam.steps.unsigned_abs())?;
        let mean = f64::from(loss.to_scalar::<f32>()?);
        ensure!(
            mean.is_finite(),
            "the loss is not finite after {} steps; lower {}learning_rate",
            self.adam.steps,
            self.plan.section
        );
        let weights: Vec<&Var> = self.course.network().weights().into_iter().map(|(_, var)| var).collect();
        self.adam.step(&weights, &loss.backward()?, self.plan.learning_rate * share)?;
        Ok((mean, places))
    }

    /// Ends the epoch: measures it on what was held out, and keeps its weights if it is the best.
    fn measure(&mut self, progress: &mut dyn Progress) -> Result<()> {
        let State { loss_sum, places, seconds, ref history, .. } = self.state;
        let (epoch, loss) = (history.len() + 1, loss_sum / places as f64);
        let measured = Epoch { epoch, loss, seconds, ..self.course.measure()? };
        progress.finish_with(&measured.line());
        self.state.history.push(measured);
        if best(&self.state.history) == Some(self.state.history.len() - 1) {
            let weights = self.course.network().weights().into_iter().map(|(_, var)| var);
            self.best = copies(&weights.collect::<Vec<_>>())?;
        }
        self.state = State { step: 0, loss_sum: 0.0, places: 0, seconds: 0.0, ..self.state.clone() };
        Ok(())
    }

    fn outcome(self) -> Result<Outcome> {
        let history = self.state.history;
        let kept = best(&history).and_then(|at| history.get(at));
        let kept = kept.with_context(|| format!("{}epochs: none", self.plan.section))?.clone();
        let names = self.course.network().weights().into_iter().map(|(name, _)| name);
        Ok(Outcome { kept, history, weights: names.zip(self.best).collect() })
    }
}

/// The seconds until the end of the last epoch, within one of so many steps, at the mean rate so far. Patience may end
/// it before.
fn left(state: &State, steps: usize, epochs: usize) -> f64 {
    let done = state.history.len() as f64 + state.step as f64 / steps as f64;
    let spent = state.seconds + state.history.iter().map(|epoch| epoch.seconds).sum::<f64>();
    spent / done * (epochs as f64 - done)
}

/// A time to wait, to the minute where it is long.
fn time(seconds: f64) -> String {
    if seconds < 60.0 { format!("{seconds:.0} s left") } else { format!("{:.0} min left", (seconds / 60.0).ceil()) }
}

/// Which epoch is the best; of equals the first.
fn best(history: &[Epoch]) -> Option<usize> {
    (0..history.len()).reduce(|a, b| if history[b].score > history[a].score { b } else { a })
}

/// The share of the largest learning rate at this share of the training.
fn schedule(done: f64, warm_up: f64) -> f64 {
    let fall = (done - warm_up) / (1.0 - warm_up);
    // The first step is not of rate 0: it would be lost.
    (done / warm_up + 0.01).min(0.5 * (1.0 + (std::f64::consts::PI * fall.max(0.0)).cos()))
}

fn copies(weights: &[&Var]) -> Result<Vec<Tensor>> {
    Ok(weights.iter().map(|weight| weight.as_tensor().copy()).collect::<candle_core::Result<_>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_learning_rate_rises_and_falls() {
        for warm_up in [0.05, 0.2] {
            let schedule = |done| schedule(done, warm_up);
            assert!(schedule(0.0) > 0.0 && schedule(0.0) < 0.02);
            assert!(schedule(warm_up) > 0.99 && schedule(0.6) < 0.8 && schedule(0.999) < 0.001);
        }
    }

    #[test]
    fn what_is_left_of_all_epochs_follows_from_the_rate_so_far() {
        // Two epochs of 100 s and a quarter of the third in 20: 220 s for 2.25 epochs, and 2.75 are to come.
        let history = vec![Epoch { seconds: 100.0, ..Epoch::default() }; 2];
        let state = State { step: 10, seconds: 20.0, history, ..State::new(String::new()) };
        assert!((left(&state, 40, 5) - 220.0 / 2.25 * 2.75).abs() < 1e-9);
        assert_eq!(left(&State { step: 40, ..state }, 40, 3), 0.0);
        assert_eq!([59.4, 60.0, 61.0].map(time), ["59 s left", "1 min left", "2 min left"]);
    }

    #[test]
    fn of_equal_epochs_the_first_is_the_best() {
        let epoch = |score| Epoch { score, ..Epoch::default() };
        assert_eq!(best(&[]), None);
        assert_eq!(best(&[0.2, 0.5, 0.5, 0.4].map(epoch)), Some(1));
    }
}
