//! `laser eval lists`: published lists against what users took later, beside the lists of recommenders that only count.

mod config;
mod read;

#[cfg(test)]
mod tests;

use anyhow::{Context, Result};
use laser_decode::{Method, Neighbours, NeighboursOptions, build_neighbours};
use laser_schema::{EntityTable, Progress};
use laser_store::catalogue::CatalogueTable;
use serde::Serialize;

use self::read::{Histories, Items, Lists, Truth, both};
use crate::lists::{CUTOFFS, Judged, Measures, Paired, Quality, Seen, baseline, over_seeds};
use crate::statistics::{Comparison, Mean};

pub use config::{ListsEvalConfig, MakerConfig};

/// What lists are judged on beside `[eval.lists]`: what a night of lists reads.
#[derive(Debug, Clone, Copy)]
pub struct ListsSource<'a> {
    /// The items.
    pub catalogue: &'a CatalogueTable,
    /// The users with their histories, which the baselines count.
    pub input: &'a [EntityTable],
    /// The field of a history's interactions that names the item.
    pub item: &'a str,
    /// Whether baselines may list items of the user's history.
    pub repeat: bool,
}

/// The findings of `laser eval lists`.
#[derive(Debug, Serialize)]
pub struct ListsReport<'a> {
    /// The `[eval.lists]` section.
    pub config: &'a ListsEvalConfig,
    /// Whether baselines may list items of the user's history.
    pub repeat: bool,
    /// Items of the catalogue.
    pub items: usize,
    /// Users whose histories were counted.
    pub histories: usize,
    /// Items in these histories.
    pub interactions: usize,
    /// Users with true items, whom lists are judged by.
    pub users: usize,
    /// Of these, users without a history: baselines list the most popular items for them.
    pub without_history: usize,
    /// True items of all users.
    pub true_items: usize,
    /// Of these, items that the user's history has already.
    pub true_in_history: usize,
    /// Makers as they are configured, then the baselines.
    pub makers: Vec<MakerRow>,
    /// Every maker against each maker behind it and against each baseline.
    pub comparisons: Vec<ListsPair>,
}

/// A maker of lists.
#[derive(Debug, Serialize)]
pub struct MakerRow {
    /// Its name.
    pub name: String,
    /// Whether it only counts.
    pub is_baseline: bool,
    /// Means over users, with their means over seeds.
    #[serde(flatten)]
    pub measures: Measures<Mean>,
    /// Share of the catalogue's items that are among the first K of any list, at each of [`CUTOFFS`]; the mean over
    /// seeds.
    pub coverage: [f64; CUTOFFS.len()],
    /// By path; a baseline has none.
    pub seeds: Vec<SeedRow>,
}

/// One seed of a maker.
#[derive(Debug, Clone, Serialize)]
pub struct SeedRow {
    /// Where its lists are.
    pub path: String,
    /// How good they are.
    #[serde(flatten)]
    pub quality: Quality,
    /// Users with true items who have no list, which counts as an empty one.
    pub without_list: usize,
    /// Lists of users without true items, which are passed over.
    pub other_lists: usize,
    /// Listed items that the user's history has already.
    pub in_history: usize,
    /// Items of the longest list.
    pub longest: usize,
}

/// Two makers: the first less the second.
#[derive(Debug, Serialize)]
pub struct ListsPair {
    /// A maker.
    pub first: String,
    /// Another one, or a baseline.
    pub second: String,
    /// Users' differences, each the mean over seeds.
    pub by_user: Measures<Paired>,
    /// Differences of means, paired by seed; none unless the first has several seeds, and the second as many or is a
    /// baseline.
    pub over_seeds: Option<Measures<Comparison>>,
}

/// Judges the lists of every maker and those of the baselines by what users took later.
///
/// # Errors
/// Naming the key, the table and the row, or the user, of what cannot be read: unknown items, users who come twice, a
/// truth without users, and lists that are not there.
pub async fn lists<'a>(
    source: ListsSource<'_>,
    config: &'a ListsEvalConfig,
    progress: &mut dyn Progress,
) -> Result<ListsReport<'a>> {
    config.validate()?;
    progress.stage("reading histories");
    let items = Items::read(source.catalogue).await.context("[lists.catalogue]")?;
    let truth = Truth::read(&config.truth, &items).await.context("[eval.lists] truth")?;
    let histories = Histories::read(&source, &items, &truth, progress).await?;
    progress.finish_with(&format!("{} users with a history, {} with a truth", histories.all.len(), truth.users()));
    progress.stage("judging lists");
    let mut made = Vec::new();
    for maker in &config.makers {
        made.push(Made::read(maker, &items, &truth, &histories).await?);
    }
    made.extend(Made::baselines(source.repeat, &items, &truth, &histories)?);
    progress.finish_with(&format!("{} makers of lists", made.len()));
    Ok(ListsReport {
        config,
        repeat: source.repeat,
        items: items.len(),
        histories: histories.all.len(),
        interactions: histories.all.iter().map(Vec::len).sum(),
        users: truth.users(),
        without_history: histories.judged.iter().filter(|history| history.is_empty()).count(),
        true_items: truth.items.iter().map(Vec::len).sum(),
        true_in_history: both(&truth.items, &histories.judged),
        makers: made.iter().map(Made::row).collect(),
        comparisons: comparisons(&made, config.margin)?,
    })
}

/// A maker whose lists were judged.
struct Made {
    name: String,
    is_baseline: bool,
    seeds: Vec<SeedRow>,
    /// The mean over seeds.
    judged: Judged,
}

impl Made {
    async fn read(maker: &MakerConfig, items: &Items, truth: &Truth, histories: &Histories) -> Result<Self> {
        let (mut seeds, mut judged) = (Vec::new(), Vec::new());
        for path in &maker.paths {
            let key = || format!("[[eval.lists.makers]] {:?}", maker.name);
            let read = Lists::read(path, items, truth).await.with_context(key)?;
            let seed = Judged::new(&read.lists, &truth.items, items.len())?;
            seeds.push(SeedRow {
                path: path.clone(),
                quality: seed.quality(),
                without_list: read.missing(),
                other_lists: read.others,
                in_history: read.in_histories(histories),
                longest: read.longest(),
            });
            judged.push(seed);
        }
        Ok(Self { name: maker.name.clone(), is_baseline: false, seeds, judged: Judged::mean(&judged)? })
    }

    fn baselines(repeat: bool, items: &Items, truth: &Truth, histories: &Histories) -> Result<Vec<Self>> {
        let counted =
            build_neighbours(NeighboursOptions::default(), u32::try_from(items.len())?, histories.all.iter())?;
        let counted = Neighbours::open(counted.into())?;
        let seen = if repeat { Seen::Listed } else { Seen::LeftOut };
        let length = CUTOFFS.into_iter().max().unwrap_or_default();
        let made = |method: Method| {
            let lists = baseline(&counted, method, &histories.judged, seen, length);
            Ok(Self {
                name: method.as_str().to_owned(),
                is_baseline: true,
                seeds: Vec::new(),
                judged: Judged::new(&lists, &truth.items, items.len())?,
            })
        };
        Method::ALL.into_iter().map(made).collect()
    }

    /// The quality of every seed; a baseline's is that of as many seeds as it is asked for.
    fn qualities(&self, seeds: usize) -> Vec<Quality> {
        match self.is_baseline {
            true => vec![self.judged.quality(); seeds],
            false => self.seeds.iter().map(|seed| seed.quality).collect(),
        }
    }

    fn row(&self) -> MakerRow {
        let qualities = self.qualities(1);
        let mean = |figure: &crate::lists::Figure<'_>| {
            Mean::of(&qualities.iter().map(|quality| figure(&quality.measures)).collect::<Vec<_>>())
        };
        MakerRow {
            name: self.name.clone(),
            is_baseline: self.is_baseline,
            measures: Measures::each(mean),
            coverage: self.judged.quality().coverage,
            seeds: self.seeds.clone(),
        }
    }
}

fn comparisons(made: &[Made], margin: f64) -> Result<Vec<ListsPair>> {
    let mut pairs = Vec::new();
    for (place, first) in made.iter().enumerate().filter(|(_, first)| !first.is_baseline) {
        let seeds = first.qualities(1);
        for second in &made[place + 1..] {
            let others = second.qualities(seeds.len());
            let is_paired = seeds.len() > 1 && others.len() == seeds.len();
            pairs.push(ListsPair {
                first: first.name.clone(),
                second: second.name.clone(),
                by_user: first.judged.compare(&second.judged, margin)?,
                over_seeds: is_paired.then(|| over_seeds(&seeds, &others, margin)).transpose()?,
            });
        }
    }
    Ok(pairs)
}
