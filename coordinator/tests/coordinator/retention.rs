//! What is outdated, what never is, and that a removal may be killed anywhere.

use std::collections::BTreeSet;

use jiff::civil::Date;
use jiff::{SignedDuration, Timestamp, ToSpan};
use laser_coordinator::retention::{Keep, Outdated, outdated, remove};
use laser_schema::guard::Verdict;
use laser_schema::layout::{DataSet, Pins, dated_name};
use laser_schema::manifest::Profiles;
use laser_schema::{Digest, Kind};
use laser_store::Location;
use laser_store::data_set::{self, verify};
use laser_store::previous::latest;
use laser_store::run_store::{FILES, RunStore, SUBFOLDERS, run_folder};

use crate::support::*;

fn first() -> Date {
    jiff::civil::date(2026, 11, 1)
}

fn keep(nights: usize) -> Keep {
    Keep { nights, pools: BTreeSet::new(), now: Timestamp::now() }
}

/// Begins a run of the `n`th night, which takes the newest night before it as previous knowledge.
async fn begin(night: &mut Night, output: &Location, n: i64) {
    night.date = first().checked_add(n.days()).unwrap();
    night.run = dated_name(night.date, &Digest::of(&n.to_le_bytes()));
    let pools = format!("pools/{}", night.run);
    for name in ["pools.json", "user-0.pool", "item-0.pool"] {
        let file = output.join(&pools).join(name);
        file.write("{}".into()).await.unwrap();
    }
    let previous = latest(output, night.spec.data_set(), night.date).await.unwrap();
    let pins = Pins { previous, pools };
    let store = RunStore::new(output, &night.run);
    store.begin(pins).await.unwrap();
    store.write_prompts(0, &Digest::of(b"entities"), &[]).await.unwrap();
}

/// Makes a run of the `n`th night.
async fn make(night: &mut Night, output: &Location, n: i64) {
    begin(night, output, n).await;
    finish(output, &night.plan(output).await).await;
}

/// An output with `nights` complete nights, and their runs.
async fn output(nights: i64) -> (Night, Location, Vec<String>) {
    let mut night = Night::new();
    let (output, mut runs) = (night.output("out"), Vec::new());
    for n in 0..nights {
        make(&mut night, &output, n).await;
        runs.push(night.run.clone());
    }
    (night, output, runs)
}

async fn names(output: &Location, keep: &Keep) -> Vec<String> {
    let outdated = outdated(output, keep).await.unwrap();
    outdated.into_iter().map(|o| o.run).collect()
}

async fn remove_all(output: &Location, keep: &Keep) {
    for outdated in outdated(output, keep).await.unwrap() {
        remove(output, &outdated).await.unwrap();
    }
}

/// The objects that bear the name of a run.
async fn objects_of(output: &Location, run: &str) -> Vec<String> {
    let listed = output.list().await.unwrap().into_iter().map(|l| l.name);
    listed.filter(|name| name.contains(run)).collect()
}

#[tokio::test]
async fn the_newest_nights_stay_whole_and_nothing_is_left_of_the_others() {
    let (_night, output, runs) = output(5).await;
    assert!(names(&output, &keep(6)).await.is_empty());
    assert_eq!(names(&output, &keep(3)).await, runs[..2]);
    remove_all(&output, &keep(3)).await;
    for run in &runs[..2] {
        assert_eq!(objects_of(&output, run).await, [""; 0]);
        assert!(!output.join(&run_folder(run)).local_path().unwrap().exists());
    }
    let night = output.join("profiles/kind=user/dt=2026-11-01");
    assert!(!night.local_path().unwrap().exists());
    for run in &runs[2..] {
        for kind in Kind::ALL {
            let date = run[..10].parse().unwrap();
            let folder = output.join(&DataSet::Profiles.folder(kind, date, run));
            assert_eq!(verify(&folder).await.unwrap().faults, [""; 0]);
        }
        assert!(output.join(&run_folder(run)).join("plan.json").exists().await.unwrap());
    }
    assert!(names(&output, &keep(3)).await.is_empty());
    // The night that tonight is made from stays, whatever is asked for.
    assert_eq!(names(&output, &keep(0)).await, runs[2..3]);
}

/// Two nights of texts, then four of lists.
#[tokio::test]
async fn nights_of_lists_are_kept_as_those_of_texts_are() {
    let (_texts, output, mut runs) = output(2).await;
    let mut lists = Night::of_lists();
    for n in 2..6 {
        make(&mut lists, &output, n).await;
        runs.push(lists.run.clone());
    }
    // The newest two nights of texts stay, however old they are.
    assert_eq!(names(&output, &keep(3)).await, runs[2..3]);
    remove_all(&output, &keep(3)).await;
    assert_eq!(objects_of(&output, &runs[2]).await, [""; 0]);
    assert!(!output.join("recommendations/kind=user/dt=2026-11-03").local_path().unwrap().exists());
    for run in &runs[3..] {
        let folder = DataSet::Recommendations.folder(Kind::User, run[..10].parse().unwrap(), run);
        assert_eq!(verify(&output.join(&folder)).await.unwrap().faults, [""; 0]);
    }
}

#[tokio::test]
async fn promoted_pools_and_what_is_not_ours_stay() {
    let (_night, output, runs) = output(4).await;
    let mut keep = keep(2);
    keep.pools.insert(format!("pools/{}", runs[0]));
    let part = format!("profiles/kind=user/dt=2026-11-02/run={}/embeddings.npy", runs[1]);
    let foreign = [part.as_str(), "runs/mine/plan.json", "pools/mine/pools.json", "notes.txt"];
    for name in foreign {
        output.join(name).write("x".into()).await.unwrap();
    }
    remove_all(&output, &keep).await;
    let kept = objects_of(&output, &runs[0]).await;
    assert_eq!(kept.len(), 3, "{kept:?}");
    assert!(kept.iter().all(|name| name.starts_with("pools/")), "{kept:?}");
    assert_eq!(objects_of(&output, &runs[1]).await, [part.as_str()]);
    for name in foreign {
        assert!(output.join(name).exists().await.unwrap(), "{name}");
    }
}

/// Writes every file that a run may have, unless it is there.
async fn write_all_files(output: &Location, run: &str) {
    let below = SUBFOLDERS.iter().map(|folder| folder.file("user-all"));
    for name in FILES.iter().map(|&name| name.to_owned()).chain(below) {
        output.join(&run_folder(run)).join(&name).create("{}".into()).await.unwrap();
    }
}

#[tokio::test]
async fn nothing_is_left_in_a_runs_folder_but_foreign_files() {
    let (_night, output, runs) = output(4).await;
    for run in &runs[..2] {
        write_all_files(&output, run).await;
    }
    // As a process leaves it that is killed while it writes.
    let folder = output.join(&run_folder(&runs[0])).local_path().unwrap();
    std::fs::write(folder.join("items.trie#1"), "half").unwrap();
    let foreign = ["guards/notes.txt", "notes.txt"].map(|name| format!("{}/{name}", run_folder(&runs[1])));
    for name in &foreign {
        output.join(name).write("x".into()).await.unwrap();
    }
    remove_all(&output, &keep(2)).await;
    assert!(!folder.exists());
    assert_eq!(objects_of(&output, &runs[1]).await, foreign);
    for name in &foreign {
        output.join(name).remove().await.unwrap();
    }
    remove_all(&output, &keep(2)).await;
    // `laser status` lists what is left.
    assert!(names(&output, &keep(2)).await.is_empty());
    assert_eq!(RunStore::names(&output).await.unwrap(), [runs[3].as_str(), &runs[2]]);
}

#[tokio::test]
async fn a_run_that_is_begun_again_judges_its_pools_again() {
    let mut night = Night::new();
    let output = night.output("out");
    begin(&mut night, &output, 0).await;
    let store = RunStore::new(&output, &night.run);
    let before = Verdict { texts: 1, ..Verdict::default() };
    store.judge(Kind::User, "user-all", before).await.unwrap();
    let folders = vec![run_folder(&night.run), format!("pools/{}", night.run)];
    remove(&output, &Outdated { run: night.run.clone(), folders }).await.unwrap();
    assert_eq!(store.verdict(Kind::User, "user-all").await.unwrap(), None);
    let after = Verdict { texts: 2, strict: true, ..Verdict::default() };
    assert_eq!(store.judge(Kind::User, "user-all", after.clone()).await.unwrap(), after);
}

#[tokio::test]
async fn a_run_under_way_keeps_itself_and_what_it_was_begun_with() {
    let (mut night, output, runs) = output(2).await;
    // A run of an older night that goes on while newer nights are published.
    begin(&mut night, &output, 2).await;
    night.plan(&output).await;
    let under_way = night.run.clone();
    for n in 3..7 {
        make(&mut night, &output, n).await;
    }
    let mut keep = keep(2);
    let removed = names(&output, &keep).await;
    assert!(removed.contains(&runs[0]), "{removed:?}");
    assert!(!removed.contains(&runs[1]) && !removed.contains(&under_way), "{removed:?}");
    // Two days later nobody takes it up any more.
    keep.now += SignedDuration::from_hours(49);
    let removed = names(&output, &keep).await;
    assert!(removed.contains(&runs[1]) && removed.contains(&under_way), "{removed:?}");
    remove_all(&output, &keep).await;
    assert_eq!(objects_of(&output, &under_way).await, [""; 0]);
}

/// Drops the future once it has been polled a number of times: each poll is about one request to the store.
async fn kill_after(polls: usize, future: impl Future) {
    let mut future = std::pin::pin!(future);
    let mut left = polls;
    std::future::poll_fn(|context| {
        left -= 1;
        match left == 0 || future.as_mut().poll(context).is_ready() {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
}

#[tokio::test]
async fn a_removal_killed_anywhere_shows_no_half_night_and_is_finished_by_the_next() {
    let (_night, output, runs) = output(3).await;
    let mut kills = 0;
    while let Some(outdated) = outdated(&output, &keep(2)).await.unwrap().pop() {
        assert_eq!(outdated.run, runs[0]);
        kills += 1;
        kill_after(kills, remove(&output, &outdated)).await;
        // What a reader takes for a complete night has all its parts.
        for folder in latest(&output, DataSet::Profiles, first().checked_add(1.day()).unwrap()).await.unwrap() {
            let folder = output.join(&folder);
            let manifest = data_set::read::<Profiles>(&folder).await.unwrap().unwrap();
            for part in manifest.parts {
                assert!(folder.join(&part.name).exists().await.unwrap(), "after {kills} steps");
            }
        }
    }
    assert!(kills > 10, "it was done after {kills} steps");
    assert_eq!(objects_of(&output, &runs[0]).await, [""; 0]);
}

#[tokio::test]
async fn ids_go_with_their_nights_but_for_the_newest_two() {
    let (_night, output, _) = output(4).await;
    let mut runs = Vec::new();
    for n in 0..3_i64 {
        let date = first().checked_add(n.days()).unwrap();
        let run = dated_name(date, &Digest::of(b"ids"));
        let folder = DataSet::KnowledgeIds.folder(Kind::User, date, &run);
        for name in ["part-00000.parquet", "_codebook.safetensors", "_manifest.json", "_SUCCESS"] {
            let file = output.join(&folder).join(name);
            file.write("{}".into()).await.unwrap();
        }
        runs.push(run);
    }
    // The two newest nights of texts are the third and the fourth; the two newest of ids the second and the third.
    remove_all(&output, &keep(2)).await;
    let left: Vec<usize> = vec![0, 4, 4];
    for (run, left) in runs.iter().zip(left) {
        assert_eq!(objects_of(&output, run).await.len(), left, "{run}");
    }
    let removed = output.join("knowledge_ids/kind=user/dt=2026-11-01");
    assert!(!removed.local_path().unwrap().exists());
}
