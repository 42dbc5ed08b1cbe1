//! `laser train recommender` and `laser train draft --for recommendation`: a model that writes identifiers, from the
//! histories of the input or a table of sequences, and a smaller one that drafts for it.

mod items;
mod target;

use std::path::Path;

use anyhow::{Context, Result};
use laser_schema::Progress;
use laser_store::catalogue;
use laser_train::{RecommenderJob, RecommenderTarget, TargetLists, Trained, train_recommender};
use tokio_util::sync::CancellationToken;

use self::items::{Items, Sets};
use self::target::Target;
use crate::config::Config;

/// Trains the model that `[recommender]` describes, or goes on where an earlier call was stopped; none if it is stopped
/// before the end.
///
/// # Errors
/// Naming the key, the table or the row.
pub async fn train(config: &Config, progress: &mut dyn Progress, drain: &CancellationToken) -> Result<Option<Trained>> {
    config.recommender.check()?;
    let (_, items, sets) = read(config, progress).await?;
    let job = RecommenderJob {
        options: &config.recommender.options,
        folder: Path::new(&config.recommender.output),
        catalogue: &items.catalogue,
        learned: &sets.learned,
        held_out: &sets.measured,
        target: None,
        device: config.model.device,
    };
    tokio::task::block_in_place(|| train_recommender(&job, progress, &|| drain.is_cancelled())).context("[recommender]")
}

/// Trains the draft that `[recommender.draft]` describes for the model in `[recommender] output`, or goes on where an
/// earlier call was stopped; none if it is stopped before the end. For a loss on lists the target makes its lists
/// first; they are kept beside the checkpoint until the draft is complete.
///
/// # Errors
/// Naming the key, the table or the row; a target that is not there, or that does not know the codes of the catalogue.
pub async fn train_draft(
    config: &Config,
    progress: &mut dyn Progress,
    drain: &CancellationToken,
) -> Result<Option<Trained>> {
    let draft = &config.recommender.draft;
    config.recommender.check()?;
    draft.check()?;
    let (table, items, sets) = read(config, progress).await?;
    let target = Target::open(config, (&table, &items.catalogue)).context("[recommender] output")?;
    let (folder, alignment, made_by) = (Path::new(&draft.output), draft.alignment(), target::made_by(config));
    let none = TargetLists { alignment: &alignment, made_by: &made_by, learned: &[], held_out: &[] };
    let of_target = RecommenderTarget { folder: target.folder(), digest: target.digest(), lists: Some(none) };
    let mut job = RecommenderJob {
        options: &draft.options,
        folder,
        catalogue: &items.catalogue,
        learned: &sets.learned,
        held_out: &sets.measured,
        target: Some(of_target),
        device: config.model.device,
    };
    if let Some(trained) = job.finished().context("[recommender.draft]")? {
        return Ok(Some(trained));
    }
    let lists;
    if draft.options.loss.has_lists() {
        let Some(made) = target.lists(config, (&table, &items, &sets), progress, drain).await? else {
            return Ok(None);
        };
        lists = made;
        let of_lists = TargetLists { learned: &lists.learned, held_out: &lists.measured, ..none };
        job.target = Some(RecommenderTarget { lists: Some(of_lists), ..of_target });
    }
    let trained = tokio::task::block_in_place(|| train_recommender(&job, progress, &|| drain.is_cancelled()));
    let trained = trained.context("[recommender.draft]")?;
    if trained.is_some() {
        target::forget(folder).await?;
    }
    Ok(trained)
}

/// The catalogue as its table has it and as a model reads it, and what is learned from.
async fn read(config: &Config, progress: &mut dyn Progress) -> Result<(catalogue::Catalogue, Items, Sets)> {
    progress.stage("reading histories");
    let lists = config.lists.as_ref().context("[lists.catalogue]: not set; give the items' identifiers")?;
    let table = catalogue::Catalogue::read(&lists.catalogue).await.context("[lists.catalogue]")?;
    let items = Items::new(&table)?;
    let sets = items.sets(config, progress).await?;
    progress.finish_with(&format!("{} users with {} items to learn from", sets.learned.len(), sets.count()));
    Ok((table, items, sets))
}
