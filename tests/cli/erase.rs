//! Persons are erased from nights, runs and pools, and everything else stays as it was.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, SystemTime};

use laser_schema::audit::Audit;
use laser_schema::erasure::Erasure;
use laser_schema::guard::Verdict;
use laser_schema::job::Plan;
use laser_store::part::decode_part;
use laser_store::table;
use serde_json::{Value, json};

use crate::distributed::Process;
use crate::faults::start_and_kill;
use crate::feast::python_report;
use crate::proxy::{Fault, Proxy};
use crate::s3::S3;
use crate::server::installed;
use crate::{
    USERS, Workspace, assert_contains, assert_exit, assert_prints, assert_refused, entries, files, fixture, laser,
    only, parts, read_json, stderr, stdout,
};

/// Users with a night's run of four shards, audits of all of them, and Delta tables.
const RUN: &str = "[run]\nshard_rows = 3\naudit_share = 1.0\n[[previous]]\npath = \"latest\"\n";

const TABLE: &str = "output.table=delta";

/// Those who are erased: one with texts, and one whose prompt is too long for one.
pub(crate) const ERASED: [&str; 2] = ["person-007", "person-011"];

/// Nights of twelve persons.
pub(crate) struct Persons(pub(crate) Workspace);

impl Persons {
    pub(crate) fn new() -> Self {
        let mut persons = Self(Workspace::with(&[USERS, RUN]));
        let template = fs::read_to_string("coordinator/templates/plain/films/user.j2").unwrap();
        let facts = "{% if attributes %}{% include \"facts\" %}{% endif %}";
        let path = persons.0.path("user.j2");
        fs::write(&path, facts.to_owned() + &template).unwrap();
        persons.0.environment =
            vec![("LASER_PROMPT__USER", path.display().to_string()), ("LASER_OUTPUT__MIN_COVERAGE", "0.5".to_owned())];
        persons.write("Heat");
        fs::write(persons.0.path("ids.txt"), ERASED.join("\n")).unwrap();
        persons
    }

    /// Those who have last seen a film. The last one's prompt is too long.
    pub(crate) fn write(&self, film: &str) {
        let person = |id: usize| {
            let titles = (0..6).map(|n| format!("Film {}", (id + n) % 5)).chain([film.to_owned()]);
            // Nobody else's text is that of a fan of horror.
            let genres = if id == 7 { json!({"genres": ["Horror"], "director": "John Carpenter"}) } else { json!({}) };
            let seen = |title: String| {
                let mut seen = genres.clone();
                (seen["title"], seen["rating"]) = (title.into(), 5.into());
                seen
            };
            let history: Vec<Value> = titles.map(seen).collect();
            let mut person = json!({"id": format!("person-{id:03}"), "history": history, "embedding": [id % 2, 1]});
            if id == 11 {
                person["occupation"] = "clerk ".repeat(300).into();
            }
            person
        };
        let rows: String = (0..12).map(|id| format!("{}\n", person(id))).collect();
        fs::write(self.0.path("users.jsonl"), rows).unwrap();
    }

    pub(crate) fn command(&self, subcommand: &str, day: u32, settings: &[&str]) -> Command {
        let mut command = self.0.command(subcommand, settings);
        command.args(["--set", &format!("run.date=2026-01-{day:02}")]);
        command
    }

    /// With a night, and a second one of these settings that was killed once it had committed a shard.
    fn with_a_killed_night(settings: &[&str]) -> Self {
        let persons = Self::new();
        persons.night(1, &[]);
        persons.write("Alien");
        start_and_kill(persons.command("run", 2, settings), 1);
        persons
    }

    #[track_caller]
    pub(crate) fn night(&self, day: u32, settings: &[&str]) -> Output {
        let output = self.command("run", day, settings).output().unwrap();
        assert_exit(&output, 0);
        output
    }

    /// `laser erase` of the persons in a file.
    pub(crate) fn erasing(&self, file: &str, args: &[&str]) -> Command {
        let mut command = self.0.command("erase", &["run.date=2026-01-09"]);
        command.args(["--kind", "user", "--ids"]).arg(self.0.path(file)).args(args);
        command
    }

    pub(crate) fn erase(&self, args: &[&str]) -> Output {
        self.erasing("ids.txt", args).output().unwrap()
    }

    fn pools(&self, args: &[&str]) -> Output {
        self.pools_command(args).output().unwrap()
    }

    pub(crate) fn pools_command(&self, args: &[&str]) -> Command {
        let (subcommand, rest) = args.split_at(1);
        let mut command = laser();
        command.arg("pools").args(subcommand).arg(self.0.path("laser.toml")).args(rest);
        command.envs(self.0.environment.clone());
        command
    }

    pub(crate) fn out(&self) -> PathBuf {
        self.0.path("out")
    }

    /// The texts of the erased ones and of all others, by night and person.
    pub(crate) fn texts(&self) -> [BTreeMap<(String, String), String>; 2] {
        let (erased, others) = texts(&self.out()).into_iter().partition(|((_, id), _)| ERASED.contains(&id.as_str()));
        [erased, others]
    }
}

/// All texts of an output, by folder and person.
fn texts(out: &Path) -> BTreeMap<(String, String), String> {
    let mut texts = BTreeMap::new();
    for (path, bytes) in parts(&out.join("profiles")) {
        let folder = path.parent().unwrap().strip_prefix(out).unwrap().display().to_string();
        for row in decode_part("part", bytes.into()).unwrap().0 {
            assert!(texts.insert((folder.clone(), row.entity_id.to_string()), row.text).is_none());
        }
    }
    texts
}

/// All rows of all tables of an output, by the folder and in their order.
fn rows(out: &Path) -> BTreeMap<String, Vec<Value>> {
    let mut rows: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for (path, bytes) in parts(out) {
        let folder = path.parent().unwrap().strip_prefix(out).unwrap().display().to_string();
        rows.entry(folder).or_default().extend(table::decode::<Value>("table", bytes.into()).unwrap());
    }
    rows
}

/// Every file below a folder.
pub(crate) fn files_below(folder: &Path) -> Vec<PathBuf> {
    let below = |path: PathBuf| if path.is_dir() { files_below(&path) } else { vec![path] };
    entries(folder).into_iter().flat_map(below).collect()
}

/// Nothing below a folder was written to for years.
fn make_old(folder: &Path) {
    let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    for file in files_below(folder) {
        fs::File::options().write(true).open(file).unwrap().set_modified(old).unwrap();
    }
}

/// The content of every file below a folder, with its bytes and modification.
fn snapshot(folder: &Path) -> BTreeMap<PathBuf, (Vec<u8>, SystemTime)> {
    let content = |path: &PathBuf| (fs::read(path).unwrap(), path.metadata().unwrap().modified().unwrap());
    files_below(folder).into_iter().map(|path| (path.clone(), content(&path))).collect()
}

/// What a file says: of a table the rows too, of a pool its texts.
fn content(path: &Path) -> String {
    let bytes = fs::read(path).unwrap();
    let mut content = String::from_utf8_lossy(&bytes).into_owned();
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("parquet") if !path.display().to_string().contains("_delta_log") => {
            let rows: Vec<Value> = table::decode("table", bytes.into()).unwrap();
            content += &rows.iter().map(unescaped).collect::<String>();
        }
        Some("json") if path.display().to_string().contains("/audits/") => {
            let audit: Audit = serde_json::from_slice(&bytes).unwrap();
            content += &audit.pairs.iter().map(|pair| pair.text() + "\n" + &pair.plain).collect::<String>();
        }
        Some("json" | "jsonl") => {
            let values = serde_json::Deserializer::from_slice(&bytes).into_iter::<Value>();
            content += &values.map(|value| unescaped(&value.unwrap())).collect::<String>();
        }
        Some("pool") => {
            let tokenizer = laser_model::Tokenizer::open(&fixture().join("tokenizer.json")).unwrap();
            // Tokens are the first section of a pool, behind its name; see docs/formats.md.
            let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            let (end, tokens, name) = (word(116), word(124) as usize, word(144) as usize);
            let start = (148 + name).next_multiple_of(4);
            let tokens: Vec<u32> = (0..tokens).map(|at| word(start + 4 * at)).collect();
            content += &tokens.split(|t| *t == end).map(|t| tokenizer.decode(t).unwrap() + "\n").collect::<String>();
        }
        _ => {}
    }
    content
}

/// All strings of a value.
fn unescaped(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone() + "\n",
        Value::Array(values) => values.iter().map(unescaped).collect(),
        Value::Object(values) => values.values().map(unescaped).collect(),
        _ => String::new(),
    }
}

/// That no file of an output says any of the words.
#[track_caller]
pub(crate) fn assert_absent<'a>(out: &Path, words: impl IntoIterator<Item = &'a str>) {
    let contents: Vec<(PathBuf, String)> =
        files_below(out).into_iter().map(|path| (path.clone(), content(&path))).collect();
    for word in words {
        for (path, content) in &contents {
            assert!(!content.contains(word), "{} says {word:?}", path.display());
        }
    }
}

/// Texts that nobody else has.
pub(crate) fn only_theirs([erased, others]: &[BTreeMap<(String, String), String>; 2]) -> Vec<&str> {
    let theirs = erased.values().filter(|text| !others.values().any(|other| other.contains(text.as_str())));
    theirs.map(String::as_str).collect()
}

pub(crate) fn receipt(out: &Path) -> Erasure {
    read_json(&only(&out.join("erasures")))
}

/// The file sizes of parts.
fn sizes(files: &BTreeMap<PathBuf, (Vec<u8>, SystemTime)>) -> BTreeMap<&PathBuf, usize> {
    let parts = files.iter().filter(|(path, _)| path.display().to_string().contains("/part-"));
    parts.map(|(path, (bytes, _))| (path, bytes.len())).collect()
}

/// Rows without those who are erased.
fn without_erased(rows: BTreeMap<String, Vec<Value>>, erased: &[&str]) -> BTreeMap<String, Vec<Value>> {
    let mut rows = rows;
    for rows in rows.values_mut() {
        rows.retain(|row| !erased.contains(&row["entity_id"].as_str().unwrap_or_default()));
    }
    rows
}

/// Three nights of texts, two of them with ids and one with embeddings of their own, and promoted pools.
fn three_nights() -> (Persons, Vec<String>) {
    let persons = Persons::new();
    let encoder = format!("encoder.path={}", installed("LASER_MINILM", "encoder.sh"));
    let settings: Vec<String> = [TABLE, "encoder.layout=list", &encoder].map(str::to_owned).to_vec();
    for (day, film) in [(1, "Heat"), (2, "Alien")] {
        persons.write(film);
        persons.night(day, &strs(&settings));
        let ids = persons.command("ids", day, &[TABLE, "ids.clusters=3", "ids.levels=2"]).output().unwrap();
        assert_exit(&ids, 0);
    }
    assert_exit(&persons.pools(&["build", "--name", "summer"]), 0);
    assert_exit(&persons.pools(&["promote", "summer"]), 0);
    persons.write("Ran");
    assert_exit(&persons.command("encode", 2, &strs(&settings)).output().unwrap(), 0);
    let settings = [settings, vec!["run.pools=promoted".to_owned()]].concat();
    persons.night(3, &strs(&settings));
    (persons, settings)
}

fn strs(settings: &[String]) -> Vec<&str> {
    settings.iter().map(String::as_str).collect()
}

#[test]
fn an_erased_person_is_nowhere_and_everybody_else_is_as_before() {
    let (persons, settings) = three_nights();
    let (before, values) = (persons.texts(), rows(&persons.out()));
    let theirs = only_theirs(&before);
    assert_eq!((before[0].len(), theirs.len()), (3, 3), "{theirs:?}");
    let untouched = snapshot(&persons.out());
    let dry = persons.erase(&["--dry-run"]);
    assert_prints(&dry, &["2 of 2 users found", "would be written anew", "nothing was changed"]);
    assert!(snapshot(&persons.out()) == untouched, "a dry run has written");

    let erased = persons.erase(&[]);
    assert_prints(&erased, &["2 of 2 users found", "nothing is left of them here", "caches of workers"]);
    assert_absent(&persons.out(), ERASED.into_iter().chain(theirs));
    assert_eq!(rows(&persons.out()), without_erased(values, &ERASED), "in the order and with the values of before");
    let after = snapshot(&persons.out());
    assert_eq!(sizes(&after), sizes(&untouched), "what names parts by name and size is true");
    assert_receipt(&receipt(&persons.out()));
    assert_readers_agree(&persons);

    // Again, it looks everywhere, changes nothing, and says so.
    assert_prints(&persons.erase(&[]), &["nothing is left of these 2 users", &receipt(&persons.out()).name]);
    assert!(snapshot(&persons.out()) == after);
    assert_prints(&persons.night(3, &strs(&settings)), &["complete already"]);
    // The next nights carry the others forward, or draft from the promoted pools.
    let users = fs::read_to_string(persons.0.path("users.jsonl")).unwrap();
    let users = users.lines().filter(|row| !ERASED.iter().any(|id| row.contains(id)));
    let users: String = users.map(|row| format!("{row}\n")).collect();
    fs::write(persons.0.path("users.jsonl"), &users).unwrap();
    assert_prints(&persons.night(4, &strs(&settings)), &["10 unchanged"]);
    fs::write(persons.0.path("users.jsonl"), users.replace("Ran", "Jaws")).unwrap();
    assert_prints(&persons.night(5, &strs(&settings)), &["10 generated"]);
    assert_exit(&persons.0.verify(), 0);
    assert_absent(&persons.out(), ERASED);
}

#[track_caller]
fn assert_receipt(receipt: &Erasure) {
    assert_eq!((receipt.ids, receipt.found), (2, 2));
    let mut objects = receipt.places.iter().flat_map(|place| &place.objects);
    assert!(objects.all(|object| object.after.is_some() && object.after != object.before), "{receipt:?}");
    let found = |prefix: &str| receipt.places.iter().filter(|place| place.folder.starts_with(prefix)).count();
    assert_eq!(
        ["pools/", "runs/", "profiles/", "embeddings/", "knowledge_ids/"].map(found),
        [2, 3, 3, 1, 2],
        "{receipt:?}"
    );
    assert!(receipt.removed.is_empty(), "{receipt:?}");
}

/// `laser verify`, deltalake and Polars see the ten persons who are left, on each night.
#[track_caller]
fn assert_readers_agree(persons: &Persons) {
    let verified = persons.0.verify();
    assert_prints(&verified, &["agrees: the table profiles/kind=user", "agrees: the table knowledge_ids/kind=user"]);
    assert_eq!(stdout(&verified).matches("10 rows").count(), 6, "three nights of texts, two of ids, one of embeddings");
    let (script, examples) = (Path::new("tests/feast/delta.py"), Path::new("docs/examples"));
    let report = python_report(&[script, &persons.out(), examples, Path::new("2026-01-02")], &[]);
    let tokens = |day: u32| {
        let folder = persons.out().join(format!("profiles/kind=user/dt=2026-01-{day:02}"));
        let rows = rows(&folder).into_values().flatten();
        rows.map(|row| row["text_tokens"].as_i64().unwrap()).sum::<i64>()
    };
    assert_eq!(report["deltalake"], json!({"texts": 10, "tokens": tokens(2), "runs": 1}));
    assert_eq!([&report["polars"]["rows"], &report["polars"]["tokens"]], [&json!(20), &json!(tokens(1) + tokens(2))]);
}

/// Before and after the store hears of each kind of write.
#[test]
fn an_erasure_killed_at_any_of_its_writes_ends_as_one_that_was_not() {
    let s3 = S3::start();
    let store = Proxy::http(s3.port());
    let mut persons = Persons::new();
    persons.0.environment.extend(s3.environment());
    persons.0.environment.push(("LASER_OUTPUT__PATH", "s3://laser/out".into()));
    persons.0.environment.push(("LASER_OUTPUT__TABLE", "delta".into()));
    persons.night(1, &[]);
    persons.write("Alien");
    persons.night(2, &[]);
    assert_exit(&persons.pools(&["build", "--name", "summer"]), 0);
    assert_exit(&persons.pools(&["promote", "summer"]), 0);
    s3.copy_all("out", &persons.0);
    let expected = Persons::new();
    copy_tree(&persons.out(), &expected.out());
    let theirs = persons.texts();
    assert_exit(&expected.erase(&[]), 0);
    let at_store = || {
        let mut command = persons.erasing("ids.txt", &[]);
        command.env("AWS_ENDPOINT", format!("http://127.0.0.1:{}", store.port));
        command
    };
    let writes = [
        ".begun.json", ".pool", "/pools.json", "/promotions/", "/audits/", "/shards/", "/plan.json", "/part-",
        "/_errors.jsonl", "/_manifest.json", "/_delta_log/", "/erasures/",
    ];
    for word in writes {
        for heard in [false, true] {
            store.set(Fault::Hold { word, heard });
            let erasing = Process::start(at_store());
            store.wait_held();
            erasing.kill();
            store.set(Fault::None);
            if word != ".begun.json" || heard {
                let night = persons.command("run", 3, &[]).output().unwrap();
                assert_refused(&night, &["an erasure is under way", "`laser erase` again"]);
            }
        }
    }
    assert_exit(&at_store().output().unwrap(), 0);
    assert_exit(&s3.verify("out"), 0);
    fs::remove_dir_all(persons.out()).unwrap();
    s3.copy_all("out", &persons.0);
    assert_absent(&persons.out(), ERASED.into_iter().chain(only_theirs(&theirs)));
    let [found, expected] = [&persons, &expected].map(|persons| {
        let mut files = snapshot(&persons.out());
        // What has times in it: receipts, promotions and commits.
        let has_time = |path: &Path| {
            ["erasures", "promotions", "_delta_log", "/lock"]
                .iter()
                .any(|name| path.display().to_string().contains(name))
        };
        files.retain(|path, _| !has_time(path));
        let relative = |path: PathBuf| path.strip_prefix(persons.out()).unwrap().to_owned();
        files.into_iter().map(|(path, (bytes, _))| (relative(path), bytes)).collect::<BTreeMap<_, _>>()
    });
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (path, bytes) in &found {
        assert!(expected[path] == *bytes, "{} differs", path.display());
    }
    assert_eq!(receipt(&persons.out()).found, 2);
    assert_prints(&persons.night(3, &["run.pools=promoted"]), &["10 unchanged"]);
}

pub(crate) fn copy_tree(from: &Path, to: &Path) {
    for file in files_below(from) {
        let copy = to.join(file.strip_prefix(from).unwrap());
        fs::create_dir_all(copy.parent().unwrap()).unwrap();
        fs::copy(&file, copy).unwrap();
    }
}

#[test]
fn lists_leave_in_either_shape() {
    for (rows, table) in [("user", TABLE), ("item", TABLE)] {
        let night = crate::lists::workspace();
        let shape = format!("lists.rows={rows}");
        assert_exit(&night.run(&[table, &shape, "lists.draft=retrieval"]), 0);
        let histories = only(&night.path("out/runs")).join("histories.pool");
        assert!(histories.exists());
        let values = self::rows(&night.path("out/recommendations"));
        fs::write(night.path("ids.csv"), "id,why\nu7,asked\nu59,asked\n").unwrap();
        let mut erase = night.command("erase", &[]);
        let erased = erase.args(["--kind", "user", "--ids"]).arg(night.path("ids.csv")).output().unwrap();
        assert_prints(&erased, &["2 of 2 users found"]);
        assert_eq!(self::rows(&night.path("out/recommendations")), without_erased(values, &["u7", "u59"]));
        assert_prints(&night.verify(), &["58 rows", "agrees: the table recommendations/kind=user"]);
        assert_absent(&night.path("out"), ["\"u7\"", "u59"]);
        // It names nobody, so nobody's part of it is known.
        assert!(!histories.exists());
    }
}

/// They name nobody, and the user is beyond the run's limit.
#[test]
fn histories_leave_although_their_run_made_no_list_for_the_user() {
    let night = crate::lists::workspace();
    assert_exit(&night.run(&["run.limit=20", "lists.draft=retrieval"]), 0);
    let histories = only(&night.path("out/runs")).join("histories.pool");
    fs::write(night.path("ids.txt"), "u59\n").unwrap();
    let erase = |kind: &str, args: &[&str]| {
        let mut command = night.command("erase", &[]);
        command.args(["--kind", kind, "--ids"]).arg(night.path("ids.txt")).args(args).output().unwrap()
    };
    assert_refused(&erase("item", &[]), &["nothing is there of any of the 1 items"]);
    assert_prints(&erase("user", &["--dry-run"]), &["0 of 1 users found", "histories.pool would be removed"]);
    assert!(histories.exists());
    let lists = snapshot(&night.path("out/recommendations"));
    assert_prints(&erase("user", &[]), &["histories.pool removed: it names nobody", "nothing is left of them here"]);
    assert!(!histories.exists());
    assert!(snapshot(&night.path("out/recommendations")) == lists);
    assert_prints(&erase("user", &[]), &["nothing is left of these 1 users"]);
}

#[test]
fn what_cannot_be_erased_is_refused_and_nothing_is_changed() {
    let persons = Persons::new();
    persons.night(1, &[]);
    let before = snapshot(&persons.out());
    assert_refused(&persons.erasing("nothing.txt", &[]).output().unwrap(), &["--ids", "nothing.txt"]);
    fs::write(persons.0.path("empty.txt"), "\n\n").unwrap();
    assert_refused(&persons.erasing("empty.txt", &[]).output().unwrap(), &["empty.txt", "no id"]);
    fs::write(persons.0.path("strangers.txt"), "person-7\n").unwrap();
    let strangers = persons.erasing("strangers.txt", &[]).output().unwrap();
    assert_refused(&strangers, &["nothing is there of any of the 1 users", "check --kind and --ids"]);
    assert_prints(&persons.erasing("strangers.txt", &["--dry-run"]).output().unwrap(), &["0 of 1 users found"]);
    let mut items = persons.0.command("erase", &[]);
    let items = items.args(["--kind", "item", "--ids"]).arg(persons.0.path("ids.txt")).output().unwrap();
    assert_refused(&items, &["of the 2 items"]);
    assert!(snapshot(&persons.out()) == before);
    // One of the two is known: the other one is told.
    fs::write(persons.0.path("mixed.txt"), "person-007\nperson-7\n").unwrap();
    let mixed = persons.erasing("mixed.txt", &[]).output().unwrap();
    assert_prints(&mixed, &["1 of 2 users found"]);
    assert_contains(&stderr(&mixed), &["nothing of person-7"]);
}

#[test]
fn a_run_under_way_is_not_touched_and_a_forgotten_one_is_removed() {
    let persons = Persons::with_a_killed_night(&[]);
    // As if it had been killed within a write, also of the night before.
    let parts = files_below(&persons.out());
    let parts = parts.iter().filter(|file| file.extension().is_some_and(|ending| ending == "parquet"));
    let parts: Vec<&PathBuf> = parts.filter(|file| file.to_string_lossy().contains("/part-")).collect();
    assert!(["dt=2026-01-01", "dt=2026-01-02"].iter().all(|night| {
        let of_night = parts.iter().find(|part| part.to_string_lossy().contains(night));
        of_night.is_some_and(|part| fs::copy(part, format!("{}#1", part.display())).is_ok())
    }));
    let before = snapshot(&persons.out());
    assert_refused(&persons.erase(&[]), &["is not finished and may be under way", "runs/2026-01-02-"]);
    assert!(snapshot(&persons.out()) == before);
    make_old(&persons.out());
    assert_prints(&persons.erase(&[]), &["it was never finished"]);
    assert_eq!(entries(&persons.out().join("runs")).len(), 1);
    assert!(!persons.out().join("profiles/kind=user/dt=2026-01-02").exists());
    assert_absent(&persons.out(), ERASED);
    assert_exit(&persons.0.verify(), 0);
    // The same command begins it anew.
    persons.night(2, &[]);
}

/// Retention removes what makes a run complete before anything else.
#[test]
fn what_retention_was_killed_over_is_erased() {
    let persons = Persons::with_a_killed_night(&[]);
    let newest = entries(&persons.out().join("runs")).pop().unwrap();
    for head in ["pins.json", "plan.json"] {
        fs::remove_file(newest.join(head)).unwrap();
    }
    fs::remove_dir_all(persons.out().join("profiles/kind=user/dt=2026-01-02")).unwrap();
    make_old(&persons.out());
    assert_prints(&persons.erase(&[]), &["it was never finished"]);
    assert!(!newest.join("shards").exists());
    assert_absent(&persons.out(), ERASED);
}

/// They judged pools that are built anew.
#[test]
fn verdicts_on_pools_go_with_a_forgotten_run() {
    let settings = [
        "verification.policy=relaxed",
        "guards.action=strict",
        "guards.min_texts=1",
        "guards.min_log_probability=-0.0001",
    ];
    let persons = Persons::with_a_killed_night(&settings);
    let newest = || entries(&persons.out().join("runs")).pop().unwrap();
    let guards = newest().join("guards");
    let plan: Plan = read_json(&newest().join("plan.json"));
    fs::create_dir_all(&guards).unwrap();
    // Of more texts than there are.
    let stale = serde_json::to_vec(&Verdict { texts: 1_000, ..Verdict::default() }).unwrap();
    for job in &plan.shards {
        fs::write(guards.join(format!("{}-{}.json", job.kind, job.pool)), &stale).unwrap();
    }
    make_old(&persons.out());
    assert_prints(&persons.erase(&[]), &["it was never finished"]);
    assert!(!guards.exists());
    persons.night(2, &settings);
    let verdicts = files(&newest().join("guards"));
    assert!(!verdicts.is_empty());
    for (path, json) in verdicts {
        let verdict: Verdict = serde_json::from_slice(&json).unwrap();
        assert!((1..=12).contains(&verdict.texts), "{}: {verdict:?}", path.display());
    }
}

/// Of a run that is published, and of one that was never planned.
#[test]
fn prompts_that_coordinators_have_left_are_removed() {
    let persons = Persons::new();
    persons.night(1, &[]);
    let runs = persons.out().join("runs");
    let (published, never_planned) = (entries(&runs).remove(0), runs.join("2026-01-02-0123456789ab"));
    let pins = fs::read(published.join("pins.json")).unwrap();
    for folder in [&published, &never_planned] {
        fs::create_dir_all(folder.join("prompts")).unwrap();
        fs::write(folder.join("prompts/00000000-00.prompts"), "tokens").unwrap();
        fs::write(folder.join("pins.json"), &pins).unwrap();
    }
    make_old(&runs);
    assert_prints(&persons.erase(&[]), &["it was never finished"]);
    assert!(published.join("plan.json").exists() && !never_planned.exists());
    assert!(files_below(&runs).iter().all(|file| file.extension().is_none_or(|ending| ending != "prompts")));
}

#[test]
fn pools_of_a_night_that_is_gone_are_removed_unless_they_are_promoted() {
    let persons = Persons::new();
    for (day, film) in [(1, "Heat"), (2, "Alien"), (3, "Ran"), (4, "Jaws")] {
        persons.write(film);
        persons.night(day, &["output.keep_nights=3"]);
        if day == 2 {
            for name in ["summer", "autumn"] {
                assert_exit(&persons.pools(&["build", "--name", name, "--set", "run.date=2026-01-02"]), 0);
            }
            assert_exit(&persons.pools(&["promote", "summer"]), 0);
        }
    }
    let before = snapshot(&persons.out());
    assert_refused(
        &persons.erase(&[]),
        &["pools/summer", "which is gone", "promoted", "build and promote another set"],
    );
    assert!(snapshot(&persons.out()) == before);
    assert_exit(&persons.pools(&["build", "--name", "winter"]), 0);
    assert_exit(&persons.pools(&["promote", "winter"]), 0);
    let erased = persons.erase(&[]);
    assert_prints(
        &erased,
        &["pools/summer removed: it was built from profiles/kind=user/dt=2026-01-01", "pools/autumn removed"],
    );
    assert!(!persons.out().join("pools/summer").exists());
    assert_prints(&persons.pools(&["inspect", "promoted"]), &["bytes a token"]);
    persons.write("Big");
    persons.night(5, &["run.pools=promoted"]);
}

#[test]
fn json_is_the_receipt() {
    let persons = Persons::new();
    persons.night(1, &[]);
    let printed: Vec<Erasure> = serde_json::from_str(&stdout(&persons.erase(&["--json"]))).unwrap();
    let [printed] = &printed[..] else { panic!("no canaries: {printed:?}") };
    assert_eq!(*printed, receipt(&persons.out()));
    assert!(printed.ended.is_some());
    let text = fs::read_to_string(only(&persons.out().join("erasures"))).unwrap();
    assert!(!text.contains("person-"), "{text}");
}

#[test]
fn canaries_lose_the_erased_ones_too() {
    let persons = Persons::new();
    persons.night(1, &[]);
    persons.write("Alien");
    persons.night(2, &[]);
    persons.night(2, &["canary.share=1.0", "generate.max_new_tokens=12"]);
    let canaries = persons.out().join("canaries");
    let of_canary: Vec<String> =
        texts(&canaries).into_iter().filter_map(|((_, id), text)| (id == ERASED[0]).then_some(text)).collect();
    assert!(of_canary.len() == 1 && !entries(&canaries.join("pools")).is_empty());
    let before = persons.texts();
    let erased = persons.erase(&["--json"]);
    assert_exit(&erased, 0);
    let receipts: Vec<Erasure> = serde_json::from_slice(&erased.stdout).unwrap();
    assert_eq!(receipts.iter().map(|receipt| receipt.found).collect::<Vec<_>>(), [2, 2]);
    assert_absent(&persons.out(), ERASED.into_iter().chain(only_theirs(&before)));
    assert!(entries(&canaries.join("pools")).is_empty(), "nobody can tell whose texts they hold");
    assert_eq!(texts(&canaries).len(), 10);
    assert_exit(&persons.0.verify(), 0);
    assert_prints(&persons.erase(&[]), &["nothing is left of these 2 users"]);
}
