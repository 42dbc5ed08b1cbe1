//! What `laser eval lists` found, as tables.

use laser_recommender::evaluate::{ListsPair, ListsReport};
use laser_recommender::lists::CUTOFFS;
use laser_recommender::statistics::Comparison;
use laser_terminal::{Style, Table};

use super::{mean, p_value, percent};

/// What lists are compared by; hit rates are in the JSON alone.
const FIGURES: [&str; 2] = ["recall", "NDCG"];

/// The report as text.
pub(super) fn tables(report: &ListsReport<'_>, style: Style) -> String {
    let mut out = heading(report);
    out += &notes(report);
    out += "\n";
    out += &qualities(report).render(style);
    if !report.comparisons.is_empty() {
        out += &comparisons(report).render(style);
    }
    out
}

fn heading(report: &ListsReport<'_>) -> String {
    format!(
        "{} users with {} true items, of a catalogue of {}; baselines count {} items in the histories of {} users and \
         {}; margin {}\n",
        report.users,
        report.true_items,
        report.items,
        report.interactions,
        report.histories,
        if report.repeat { "may list those of a user's history" } else { "list none of a user's history" },
        report.config.margin
    )
}

/// What a reader of the figures should know, one line each.
fn notes(report: &ListsReport<'_>) -> String {
    let mut notes = String::new();
    let (unknown, again) = (report.without_history, report.true_in_history);
    if unknown > 0 {
        notes += &format!("no history of {unknown} of these users: baselines list the most popular items for them\n");
    }
    if again > 0 {
        let missed = if report.repeat { "" } else { ", where no baseline can have them" };
        notes += &format!("true items that are in their users' histories already: {again}{missed}\n");
    }
    let longest = CUTOFFS.into_iter().max().unwrap_or_default();
    for (maker, seed) in report.makers.iter().flat_map(|maker| maker.seeds.iter().map(move |seed| (maker, seed))) {
        let place = format!("{}, {}", maker.name, seed.path);
        let (missing, again) = (seed.without_list, seed.in_history);
        if missing > 0 {
            notes +=
                &format!("{place}: no list for {missing} of {} users, which counts as an empty one\n", report.users);
        }
        if again > 0 && !report.repeat {
            notes += &format!(
                "{place}: listed items that are in their users' histories: {again}; baselines leave these out, see \
                 [lists] repeat\n"
            );
        }
        if (1..longest).contains(&seed.longest) {
            notes += &format!("{place}: lists have {} items at most; what is behind counts as missed\n", seed.longest);
        }
    }
    notes
}

fn qualities(report: &ListsReport<'_>) -> Table {
    let figures = FIGURES.iter().flat_map(|figure| CUTOFFS.map(|cutoff| format!("{figure}@{cutoff}")));
    let last = CUTOFFS.len() - 1;
    let coverage = format!("coverage@{}", CUTOFFS[last]);
    let header: Vec<String> =
        ["lists of".to_owned(), "seeds".to_owned()].into_iter().chain(figures).chain([coverage]).collect();
    let mut table = Table::new(&header.iter().map(String::as_str).collect::<Vec<_>>());
    for maker in &report.makers {
        let seeds = if maker.is_baseline { String::new() } else { maker.seeds.len().to_string() };
        let figures = [maker.measures.recall, maker.measures.ndcg].into_iter().flatten();
        let mut cells = vec![maker.name.clone(), seeds];
        cells.extend(figures.map(|figure| mean(&figure, false)));
        cells.push(percent(maker.coverage[last]));
        table.push(cells);
    }
    table
}

fn comparisons(report: &ListsReport<'_>) -> Table {
    let has_seeds = report.comparisons.iter().any(|pair| pair.over_seeds.is_some());
    let mut header = vec!["compared", "figure"];
    header.extend(["difference by user", "p different", "p as far as the margin", "verdict"]);
    if has_seeds {
        header.extend(["difference by seed", "p different", "p as far as the margin", "verdict"]);
    }
    let mut table = Table::new(&header);
    for pair in &report.comparisons {
        for (figure, by_user, by_seed) in figures(pair) {
            let mut cells = vec![format!("{} less {}", pair.first, pair.second), figure];
            cells.extend(compared(Some(by_user)));
            if has_seeds {
                cells.extend(compared(by_seed));
            }
            table.push(cells);
        }
    }
    table
}

/// The figures of a comparison with their names: by user and, if there are several, by seed.
fn figures(pair: &ListsPair) -> impl Iterator<Item = (String, &Comparison, Option<&Comparison>)> {
    let by_user = [&pair.by_user.recall, &pair.by_user.ndcg];
    let by_seed = pair.over_seeds.as_ref().map(|seeds| [&seeds.recall, &seeds.ndcg]);
    FIGURES.into_iter().enumerate().flat_map(move |(row, figure)| {
        CUTOFFS.into_iter().enumerate().map(move |(cut, cutoff)| {
            let seeds = by_seed.map(|seeds| &seeds[row][cut]);
            (format!("{figure}@{cutoff}"), &by_user[row][cut].comparison, seeds)
        })
    })
}

/// A difference, its two p, and the verdict; all empty if there is none.
fn compared(comparison: Option<&Comparison>) -> [String; 4] {
    comparison.map_or_else(Default::default, |comparison| {
        [
            mean(&comparison.difference, true),
            p_value(comparison.p_different),
            p_value(comparison.p_equivalent),
            comparison.verdict.as_str().to_owned(),
        ]
    })
}

#[cfg(test)]
mod tests {
    use laser_recommender::evaluate::{ListsEvalConfig, MakerRow, SeedRow};
    use laser_recommender::lists::{Measures, Paired, Quality};
    use laser_recommender::statistics::Mean;

    use super::*;

    fn measures<T: Copy>(recall: T, ndcg: T, hit: T) -> Measures<T> {
        Measures { recall: [recall; 3], ndcg: [ndcg; 3], hit: [hit; 3] }
    }

    fn maker(name: &str, recall: &[f64], seeds: Vec<SeedRow>) -> MakerRow {
        let figure = |factor: f64| Mean::of(&recall.iter().map(|recall| factor * recall).collect::<Vec<_>>());
        MakerRow {
            name: name.to_owned(),
            is_baseline: seeds.is_empty(),
            measures: measures(figure(1.0), figure(0.5), figure(2.0)),
            coverage: [0.1, 0.2, 0.3],
            seeds,
        }
    }

    fn seed(path: &str, without_list: usize) -> SeedRow {
        let quality = Quality { users: 40, measures: measures(0.1, 0.05, 0.2), coverage: [0.1, 0.2, 0.3] };
        SeedRow { path: path.to_owned(), quality, without_list, other_lists: 3, in_history: without_list, longest: 20 }
    }

    fn report(config: &ListsEvalConfig) -> ListsReport<'_> {
        ListsReport {
            config,
            repeat: false,
            items: 500,
            histories: 90,
            interactions: 700,
            users: 40,
            without_history: 0,
            true_items: 60,
            true_in_history: 0,
            makers: vec![maker("popularity", &[0.0625], Vec::new())],
            comparisons: Vec::new(),
        }
    }

    #[test]
    fn baselines_alone_are_one_table() {
        let config = ListsEvalConfig::default();
        let found = tables(&report(&config), Style::Markdown);
        let (heading, table) = found.split_once("\n\n").unwrap();
        let expected = "40 users with 60 true items, of a catalogue of 500; baselines count 700 items in the histories \
                        of 90 users and list none of a user's history; margin 0.002";
        assert_eq!(heading, expected);
        let rows: Vec<Vec<&str>> = table.lines().map(|row| row.split('|').map(str::trim).collect()).collect();
        let header = "|lists of|seeds|recall@5|recall@10|recall@20|NDCG@5|NDCG@10|NDCG@20|coverage@20|";
        assert_eq!(rows[0].join("|"), header);
        assert_eq!(rows[2].join("|"), "|popularity||0.0625|0.0625|0.0625|0.0312|0.0312|0.0312|30.0 %|");
        assert_eq!(rows.len(), 4, "{table}");
    }

    #[test]
    fn notes_and_comparisons_name_maker_figure_and_seed() {
        let config = ListsEvalConfig::default();
        let mut report = report(&config);
        report.without_history = 2;
        report.true_in_history = 3;
        report.makers.insert(0, maker("target", &[0.1, 0.2], vec![seed("out-1", 0), seed("out-2", 7)]));
        let by_seed = Comparison::of(&[0.04, 0.14], 0.002);
        let by_user = Paired { error: None, comparison: Comparison::of(&[0.09; 40], 0.002) };
        report.comparisons.push(ListsPair {
            first: "target".to_owned(),
            second: "popularity".to_owned(),
            by_user: measures(by_user, by_user, by_user),
            over_seeds: Some(measures(by_seed, by_seed, by_seed)),
        });
        let found = tables(&report, Style::Markdown);
        for line in [
            "no history of 2 of these users: baselines list the most popular items for them\n",
            "true items that are in their users' histories already: 3, where no baseline can have them\n",
            "target, out-2: no list for 7 of 40 users, which counts as an empty one\n",
            "target, out-2: listed items that are in their users' histories: 7; baselines leave these out",
        ] {
            assert!(found.contains(line), "{found}");
        }
        assert!(!found.contains("out-1"), "nothing is to be said of that seed: {found}");
        let rows = found.lines().filter(|line| line.starts_with("| target less popularity |")).collect::<Vec<_>>();
        assert_eq!(rows.len(), 6, "{found}");
        let cells: Vec<&str> = rows[4].split('|').map(str::trim).collect();
        assert_eq!(cells[2..7], ["NDCG@10", "+0.0900 ± 0.0000", "< 0.001", "1.000", "different"]);
        assert_eq!((cells[7].split(' ').next(), cells[10]), (Some("+0.0900"), "not shown"));
    }
}
