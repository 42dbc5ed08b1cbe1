//! Erasures while something else is written.

use std::fs;
use std::process::Command;

use crate::distributed::Process;
use crate::encode::encoder;
use crate::erase::{ERASED, Persons, assert_absent, copy_tree, only_theirs, receipt};
use crate::proxy::{Fault, Proxy};
use crate::s3::S3;
use crate::{assert_contains, assert_exit, assert_prints, assert_refused};

/// Persons whose output is on an object store, with a night.
fn on_s3() -> (S3, Persons) {
    let (s3, mut persons) = (S3::start(), Persons::new());
    persons.0.environment.extend(s3.environment());
    persons.0.environment.push(("LASER_OUTPUT__PATH", "s3://laser/out".into()));
    persons.night(1, &[]);
    (s3, persons)
}

/// Starts a command that reaches the store by a proxy, and waits until its first write of an object whose name has the
/// word. The store does not hear of it, and the command waits for as long as it takes.
fn hold(mut command: Command, store: &Proxy, word: &'static str) -> Process {
    store.set(Fault::Hold { word, heard: false });
    command.env("AWS_ENDPOINT", format!("http://127.0.0.1:{}", store.port)).env("AWS_TIMEOUT", "300s");
    let process = Process::start(command);
    store.wait_held();
    process
}

/// That no object below the output names those who are erased.
#[track_caller]
fn assert_erased(s3: &S3, persons: &Persons) {
    assert_exit(&s3.verify("out"), 0);
    s3.copy_all("out", &persons.0);
    assert_absent(&persons.out(), ERASED);
}

/// They have read the persons, and the store has nothing of theirs but that they have begun.
#[test]
fn an_erasure_sees_what_is_made_of_nights_before_its_first_part_is_there() {
    let (s3, persons) = on_s3();
    let store = Proxy::http(s3.port());
    let encode = persons.command("encode", 1, &[&encoder(&persons.0)]);
    let build = persons.pools_command(&["build", "--name", "summer"]);
    for (command, word, folder) in [(encode, "/part-", "embeddings/"), (build, ".pool", "pools/summer")] {
        let making = hold(command, &store, word);
        assert_refused(&persons.erase(&[]), &["is not finished and may be under way", folder]);
        store.set(Fault::None);
        making.assert_ends(0);
    }
    assert_prints(&persons.erase(&[]), &["nothing is left of them here", "embeddings/", "pools/summer"]);
    assert_erased(&s3, &persons);
}

/// They have looked for an erasure, and have not yet said that they begin.
#[test]
fn what_is_made_of_nights_looks_for_an_erasure_once_it_has_begun() {
    let (s3, persons) = on_s3();
    let [encoding, building, erasing] = [(); 3].map(|()| Proxy::http(s3.port()));
    let encode = persons.command("encode", 1, &[&encoder(&persons.0)]);
    let build = persons.pools_command(&["build", "--name", "summer"]);
    let makings = [hold(encode, &encoding, "/_begun"), hold(build, &building, "/sources.json")];
    hold(persons.erasing("ids.txt", &[]), &erasing, "/plan.json").kill();
    for proxy in [&erasing, &encoding, &building] {
        proxy.set(Fault::None);
    }
    for making in makings {
        let log = making.assert_ends(65);
        assert_contains(&log.join("\n"), &["an erasure is under way"]);
    }
    assert_prints(&persons.erase(&[]), &["nothing is left of them here"]);
    assert_erased(&s3, &persons);
}

/// It has searched, and has not yet said that it begins.
#[test]
fn what_ends_between_the_search_of_an_erasure_and_its_beginning_is_erased() {
    let (s3, persons) = on_s3();
    let store = Proxy::http(s3.port());
    let erasing = hold(persons.erasing("ids.txt", &[]), &store, ".begun.json");
    assert_exit(&persons.pools_command(&["build", "--name", "summer"]).output().unwrap(), 0);
    persons.write("Alien");
    persons.night(2, &[]);
    let before = Persons::new();
    s3.copy_all("out", &before.0);
    store.set(Fault::None);
    erasing.assert_ends(0);
    assert_erased(&s3, &persons);
    let texts = before.texts();
    assert_eq!(texts[0].len(), 2, "one for each night");
    assert_absent(&persons.out(), only_theirs(&texts));
    assert_prints(&persons.erase(&[]), &["nothing is left of these 2 users"]);
}

/// It was stopped before it changed anything, and what it left does not tell of everything that is there.
#[test]
fn an_erasure_takes_in_what_it_does_not_know_of() {
    let (persons, other) = (Persons::new(), Persons::new());
    persons.night(1, &[]);
    copy_tree(&persons.out(), &other.out());
    assert_exit(&other.erase(&[]), 0);
    let mut begun = receipt(&other.out());
    begun.ended = None;
    let encode = persons.command("encode", 1, &[&encoder(&persons.0)]).output().unwrap();
    assert_exit(&encode, 0);
    let file = persons.out().join(format!("erasures/{}.begun.json", begun.name));
    fs::create_dir(file.parent().unwrap()).unwrap();
    fs::write(&file, serde_json::to_vec(&begun).unwrap()).unwrap();
    assert_refused(&persons.command("run", 2, &[]).output().unwrap(), &["an erasure is under way"]);
    assert_prints(&persons.erase(&[]), &["nothing is left of them here", "embeddings/kind=user/dt=2026-01-01"]);
    assert!(!file.exists());
    assert_absent(&persons.out(), ERASED);
    assert_exit(&persons.0.verify(), 0);
}
