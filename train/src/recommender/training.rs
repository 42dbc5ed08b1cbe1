//! A recommender's training, from histories to its folder.

use anyhow::Result;
use laser_schema::Progress;

use crate::course::{Plan, Trained, remove_checkpoint, run};
use crate::recommender::job::RecommenderJob;
use crate::recommender::learner::Learner;

/// Trains a recommender: a Llama model that writes the codes of the item that comes next in a history. Takes a stopped
/// training up again, and finds one that is finished. None if `is_stopped` said so before the end: a checkpoint is
/// there then.
///
/// # Errors
/// Options that make no sense, items without an identifier, a folder that cannot be written to or holds another
/// training's model or checkpoint, a target that is not a Llama model of the same codes, and a loss that is not finite.
pub fn train_recommender(
    job: &RecommenderJob<'_>,
    progress: &mut dyn Progress,
    is_stopped: &dyn Fn() -> bool,
) -> Result<Option<Trained>> {
    job.check()?;
    if let Some(trained) = job.finished()? {
        return Ok(Some(trained));
    }
    let mut belongs = job.belongs();
    let mut learner = Learner::open(job, progress)?;
    let plan = Plan {
        folder: job.folder,
        identity: belongs.training.clone(),
        section: "",
        epochs: job.options.epochs,
        patience: job.options.patience,
        learning_rate: job.options.learning_rate,
        warm_up: job.options.warm_up,
        weight_decay: job.options.weight_decay,
    };
    let Some(outcome) = run(&plan, &mut learner, progress, is_stopped)? else {
        return Ok(None);
    };
    belongs.kept = outcome.kept.clone();
    job.write(&belongs, &outcome.history, &outcome.weights)?;
    remove_checkpoint(job.folder)?;
    let (kept, history) = (outcome.kept, outcome.history);
    Ok(Some(Trained { folder: job.folder.to_owned(), kept, history, is_new: true }))
}
