//! Drafts of a recommender that knows its walks.

use super::*;
use crate::lesson::Lesson;
use crate::recommender::lists::LessonSet;
use crate::softmax::log_probabilities;

const LISTED: usize = 3;

fn target() -> TempDir {
    let target = tempfile::tempdir().unwrap();
    run(&target, &RecommenderOptions { epochs: 80, ..options() }, None, usize::MAX).unwrap().unwrap();
    target
}

fn small(loss: RecommenderLoss, constrained: bool) -> RecommenderOptions {
    RecommenderOptions { layers: 1, heads: 2, kv_heads: 1, epochs: 60, loss, constrained, ..options() }
}

fn alignment() -> Alignment {
    Alignment { lists: LISTED, list_items: 2, alpha: 0.5, constrained: true }
}

/// The most probable items in place of the last one of each history, by the scores of all items.
fn lists(target: &TempDir, histories: &[History]) -> Vec<Vec<u32>> {
    let catalogue = catalogue();
    let network = super::super::target::open(target.path(), catalogue.vocabulary(), 16, &Device::Cpu).unwrap();
    let lessons = lessons(histories, &catalogue, 4).unwrap();
    let last = super::super::history::last_lessons(histories, 4);
    let list = |lesson: usize| {
        let all = LessonSet::new(vec![lessons[lesson].clone()])
            .with_lists(&[(0..ITEMS).collect()], &[0], &catalogue)
            .unwrap();
        // All of them, in the order of the draw: its tokens say which.
        let drawn = all.draw(&[0], ITEMS as usize, 0).lessons;
        let mut scored: Vec<(f32, u32)> = scores(&network, &drawn).into_iter().zip(items(&drawn, &catalogue)).collect();
        scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        scored.into_iter().take(LISTED).map(|(_, item)| item).collect()
    };
    last.into_iter().map(list).collect()
}

fn items(lessons: &[Lesson], catalogue: &Catalogue) -> Vec<u32> {
    let item = |lesson: &Lesson| {
        (0..ITEMS).find(|&item| catalogue.identifier(item).unwrap() == &lesson.tokens[lesson.prompt..]).unwrap()
    };
    lessons.iter().map(item).collect()
}

fn scores(network: &Network, lessons: &[Lesson]) -> Vec<f32> {
    let batch = Batch::new(lessons, &Device::Cpu).unwrap();
    let logits = &network.forward(&batch, 1).unwrap()[0].logits;
    let log_p = log_probabilities(logits, &batch.labels.text).unwrap().flatten_all().unwrap();
    log_p.to_vec1::<f32>().unwrap().chunks_exact(3).map(|codes| codes.iter().sum()).collect()
}

/// A target with its lists.
struct Listing {
    target: TempDir,
    lists: [Vec<Vec<u32>>; 2],
    alignment: Alignment,
}

impl Listing {
    fn new() -> Self {
        let target = target();
        let lists = sets().map(|histories| lists(&target, &histories));
        Self { target, lists, alignment: alignment() }
    }

    fn run(&self, folder: &TempDir, options: &RecommenderOptions, steps: usize) -> anyhow::Result<Option<Trained>> {
        let [learned, held_out] = &self.lists;
        let lists = TargetLists { alignment: &self.alignment, made_by: "the test", learned, held_out };
        let target = RecommenderTarget { folder: self.target.path(), digest: "the target", lists: Some(lists) };
        run_for(folder, options, Some(target), steps)
    }
}

#[test]
fn lists_of_a_target_that_knows_its_walks_begin_with_what_follows() {
    let Listing { lists: [learned, _], .. } = Listing::new();
    let [histories, _] = sets();
    let right = learned.iter().zip(&histories).filter(|(list, history)| list[0] == *history.items.last().unwrap());
    assert_eq!(right.count(), histories.len());
}

#[test]
fn a_draft_learns_what_its_target_says_by_every_loss() {
    let listing = Listing::new();
    // Where the two hardly overlap, total variation has next to no slope: it learns more slowly.
    for (loss, least) in [
        (RecommenderLoss::Sft, 0.9),
        (RecommenderLoss::WordKd, 0.9),
        (RecommenderLoss::TvdKd, 0.5),
        (RecommenderLoss::SeqKd, 0.5),
        (RecommenderLoss::AtSpeedS, 0.8),
        (RecommenderLoss::AtSpeedSEntropy, 0.8),
        (RecommenderLoss::ReverseKl, 0.8),
        (RecommenderLoss::AtSpeedR, 0.8),
    ] {
        // Of what learns on lists only the part on histories asks for it.
        for &constrained in if loss.has_lists() { &[true][..] } else { &[false, true] } {
            let folder = tempfile::tempdir().unwrap();
            let trained = listing.run(&folder, &small(loss, constrained), usize::MAX).unwrap().unwrap();
            let overlaps = [&trained.history[0], &trained.kept].map(|epoch| epoch.share("overlap").unwrap());
            assert!(overlaps[1] > least && overlaps[1] > 0.1 + overlaps[0], "{loss}, {constrained}: {overlaps:?}");
        }
    }
}

#[test]
fn a_draft_that_is_stopped_again_and_again_has_the_same_weights() {
    let listing = Listing::new();
    for loss in [RecommenderLoss::SeqKd, RecommenderLoss::AtSpeedS] {
        let options = RecommenderOptions { dropout: 0.1, epochs: 2, ..small(loss, false) };
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        listing.run(&folders[0], &options, usize::MAX).unwrap().unwrap();
        while listing.run(&folders[1], &options, 5).unwrap().is_none() {}
        let [whole, stopped] = folders.each_ref().map(weights);
        assert!(whole == stopped, "{loss}");
    }
}

#[test]
fn another_way_to_learn_from_lists_is_another_training() {
    let mut listing = Listing::new();
    let (folder, options) = (tempfile::tempdir().unwrap(), RecommenderOptions { epochs: 1, ..options() });
    let options = RecommenderOptions { loss: RecommenderLoss::SeqKd, ..options };
    assert!(listing.run(&folder, &options, usize::MAX).unwrap().unwrap().is_new);
    assert!(!listing.run(&folder, &options, usize::MAX).unwrap().unwrap().is_new);
    listing.alignment.alpha = 0.25;
    let error = listing.run(&folder, &options, usize::MAX).unwrap_err().to_string();
    assert!(error.contains("holds a recommender of another training"), "{error}");
    listing.alignment.list_items = 4;
    let error = listing.run(&folder, &options, usize::MAX).unwrap_err().to_string();
    assert!(error.contains("list_items = 4: expected 1 to lists = 3"), "{error}");
    listing.alignment = Alignment { constrained: false, ..alignment() };
    let error = listing.run(&folder, &options, usize::MAX).unwrap_err().to_string();
    assert!(error.contains("holds a recommender of another training"), "{error}");
    listing.alignment = alignment();
    listing.lists[1].pop();
    let error = listing.run(&folder, &options, usize::MAX).unwrap_err().to_string();
    assert!(error.contains("29 lists for 30 histories"), "{error}");
}
