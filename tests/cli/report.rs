//! The run report, read in a real browser: its figures are the manifest's, it asks nothing of the network, nothing in
//! it is run, and it fits wide, narrow and dark screens.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use laser_schema::Digest;
use laser_schema::audit::AuditReport;
use laser_schema::entity::{EntityId, IdType, Kind};
use laser_schema::job::{Policy, Spec};
use laser_schema::knowledge::{Content, Figures, KnowledgeRecord, PartInfo};
use laser_schema::layout::DataSet;
use laser_schema::lists::{ListRows, ListSpec, Normalisation, Ties};
use laser_schema::manifest::{Manifest, Profiles};
use laser_store::Location;
use laser_store::data_set::{self, PartWriter};
use laser_store::part::encode_part;
use serde_json::Value;
use tempfile::TempDir;

use crate::server::installed;
use crate::{
    USERS, Workspace, assert_contains, assert_exit, assert_prints, assert_refused, copy_files, laser, read_json,
    stderr, stdout,
};

fn report(dir: &Path, file: &Path) -> Output {
    laser().arg("report").arg(dir).arg("-o").arg(file).output().unwrap()
}

/// The page of a folder, written beside a workspace's files.
pub(crate) fn page(workspace: &Workspace, dir: &Path) -> String {
    let file = workspace.path("report.html");
    let output = report(dir, &file);
    assert_exit(&output, 0);
    assert_eq!(stdout(&output).trim(), file.to_str().unwrap());
    fs::read_to_string(file).unwrap()
}

/// The browser, with a profile of its own.
fn chromium(profile: &TempDir, args: &[String]) -> Output {
    let output = Command::new(installed("LASER_CHROMIUM", "chromium.sh"))
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(args)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    output
}

/// What the browser makes of a page.
fn dom(page: &str) -> String {
    let profile = tempfile::tempdir().unwrap();
    let file = profile.path().join("page.html");
    fs::write(&file, page).unwrap();
    let args = ["--dump-dom".to_owned(), format!("file://{}", file.display())];
    stdout(&chromium(&profile, &args))
}

/// Measures the page and tells the frame around it. Of the test, not of the page, whose policy would refuse it.
const PROBE: &str = r##"<script>
const boxes = [...document.querySelectorAll("svg")].map(svg => {
  const box = svg.getBoundingClientRect();
  const drawn = [...svg.querySelectorAll("rect, polyline")].filter(e => {
    const size = e.getBBox();
    return size.width > 0 && size.height > 0 && getComputedStyle(e).fill + getComputedStyle(e).stroke !== "nonenone";
  });
  return {label: svg.getAttribute("aria-label"), width: box.width, height: box.height, drawn: drawn.length};
});
const contrast = (a, b) => {
  const light = color => {
    const [r, g, b] = color.match(/[\d.]+/g).map(Number).map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [x, y] = [light(a), light(b)].sort((x, y) => y - x);
  return (x + 0.05) / (y + 0.05);
};
const behind = e => {
  for (; e; e = e.parentElement) {
    const color = getComputedStyle(e).backgroundColor;
    if (color !== "rgba(0, 0, 0, 0)") return color;
  }
};
const texts = [...document.querySelectorAll("body *")].filter(e =>
  !e.closest("svg") && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()));
const faint = texts.filter(e => contrast(getComputedStyle(e).color, behind(e)) < 4.5)
  .map(e => e.outerHTML.slice(0, 120));
const found = {
  window: innerWidth, page: document.documentElement.scrollWidth, boxes, faint, texts: texts.length,
  background: getComputedStyle(document.body).backgroundColor,
};
parent.postMessage(encodeURIComponent(JSON.stringify(found)), "*");
</script></body>"##;

/// Shows the page in a frame, since no window of the browser is narrower than 500 pixels.
const FRAME: &str = r#"<body><script>
addEventListener("message", event => document.body.setAttribute("data-found", event.data));
</script><iframe src="page.html" style="border: 0; height: 900px; width: WIDTHpx"></iframe></body>"#;

/// The probe's findings at a width.
fn probe(page: &str, width: u32, dark: bool) -> Value {
    let policy = page.find("<meta http-equiv=\"Content-Security-Policy\"").unwrap();
    let end = policy + page[policy..].find('>').unwrap() + 1;
    let page = format!("{}{}", &page[..policy], &page[end..]).replace("</body>", PROBE);
    let profile = tempfile::tempdir().unwrap();
    let frame = profile.path().join("frame.html");
    fs::write(profile.path().join("page.html"), page).unwrap();
    fs::write(&frame, FRAME.replace("WIDTH", &width.to_string())).unwrap();
    let dom = stdout(&chromium(
        &profile,
        &[
            "--hide-scrollbars".to_owned(),
            "--window-size=1300,1000".to_owned(),
            format!("--blink-settings=preferredColorScheme={}", i32::from(!dark)),
            // Until the frame's message has come: the browser's own time, which does not pass while it is at work.
            "--virtual-time-budget=10000".to_owned(),
            "--dump-dom".to_owned(),
            format!("file://{}", frame.display()),
        ],
    ));
    let found = dom.split("data-found=\"").nth(1).unwrap_or_else(|| panic!("{dom}"));
    serde_json::from_str(&percent_decoded(found.split('"').next().unwrap())).unwrap()
}

fn percent_decoded(text: &str) -> String {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap().as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(&part[..2], 16).unwrap());
        bytes.extend(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).unwrap()
}

fn manifests(workspace: &Workspace) -> Vec<(PathBuf, Value)> {
    let folders = workspace.published("2026-01-02").into_iter();
    folders.map(|folder| (folder.clone(), read_json(&folder.join("_manifest.json")))).collect()
}

#[test]
fn the_page_has_the_nights_figures_and_fits_every_screen() {
    let workspace = Workspace::new();
    let settings = ["verification.policy=relaxed", "price.gpu_hour=2.5", "run.audit_share=0.6"];
    assert_exit(&workspace.run(&settings), 0);
    let page = page(&workspace, &workspace.path("out"));
    for reference in ["http:", "https:", "<script", "src=", "url(", "@import", "<link"] {
        assert!(!page.contains(reference), "the page has {reference:?}");
    }
    assert!(page.contains("default-src 'none'"));

    let dom = dom(&page);
    let manifests = manifests(&workspace);
    assert_eq!(manifests.len(), 2);
    let mut wanted = vec!["relaxed(k=2,p=0.1)".to_owned(), ">Complete<".to_owned()];
    for (_, manifest) in &manifests {
        wanted.push(manifest["run"].as_str().unwrap().to_owned());
        wanted.push(manifest["spec_digest"].as_str().unwrap().to_owned());
        assert_eq!(manifest["rows"], manifest["entities"]);
        for (pool, audit) in manifest["audit"].as_object().unwrap() {
            let number = |key: &str| audit[key].as_f64().unwrap();
            let speedup = (number("tokens") / number("seconds")) / (number("plain_tokens") / number("plain_seconds"));
            wanted.extend([format!(">{pool}<"), format!(">{speedup:.2}×<")]);
        }
        for figures in manifest["figures"].as_object().unwrap().values() {
            let aal = figures["accepted"].as_f64().unwrap() / figures["forwards"].as_f64().unwrap();
            wanted.push(format!(">{aal:.2}<"));
        }
    }
    wanted.extend([">44<", "all of 44 entities", "class=\"from-pool"].map(str::to_owned));
    assert_contains(&dom, &wanted.iter().map(String::as_str).collect::<Vec<_>>());

    let light = probe(&page, 1200, false);
    let narrow = probe(&page, 400, false);
    assert_eq!((&light["window"], &narrow["window"]), (&1200.into(), &400.into()));
    let dark = probe(&page, 1200, true);
    for found in [&light, &narrow, &dark] {
        assert_eq!(found["page"], found["window"], "scrolls sideways: {found}");
        assert_eq!(found["faint"], serde_json::json!([]));
        assert!(found["texts"].as_u64().unwrap() > 200);
        let charts = found["boxes"].as_array().unwrap();
        assert!(charts.len() >= 12, "{found}");
        for chart in charts {
            assert!(chart["width"].as_f64().unwrap() > 250.0, "{chart}");
            assert!(chart["height"].as_f64().unwrap() > 15.0, "{chart}");
            assert!(chart["drawn"].as_u64().unwrap() > 0, "{chart}");
        }
    }
    assert_ne!(dark["background"], light["background"]);
    check_prints(&workspace);
}

fn check_prints(workspace: &Workspace) {
    let profile = tempfile::tempdir().unwrap();
    let (html, pdf) = (workspace.path("report.html"), workspace.path("report.pdf"));
    let print = [format!("--print-to-pdf={}", pdf.display()), format!("file://{}", html.display())];
    chromium(&profile, &print);
    assert!(fs::read(pdf).unwrap().starts_with(b"%PDF-"));
}

#[test]
fn one_published_folder_is_a_page_of_its_own_kind() {
    let workspace = Workspace::new();
    assert_exit(&workspace.run(&[]), 0);
    let (folder, manifest) = manifests(&workspace).remove(0);
    let of_users = page(&workspace, &folder);
    assert_eq!(manifest["kind"], "user");
    assert!(of_users.contains("of users, verification strict"), "{of_users}");
    assert!(of_users.contains("id=\"samples\""));
    // Copied away from its run, it still has what its own files tell.
    let copy = workspace.path("copy");
    copy_files(&folder, &copy);
    let copied = page(&workspace, &copy);
    assert!(copied.contains("id=\"acceptance\"") && !copied.contains("id=\"samples\""));
    assert!(copied.contains("own folder is not beside these texts"));
    // A night without _SUCCESS is told, and that it is withheld.
    fs::remove_file(copy.join("_SUCCESS")).unwrap();
    assert!(page(&workspace, &copy).contains("_SUCCESS is withheld for users"));
}

const RUN: &str = "2026-01-02-0123456789ab";

/// A user's list of 12 items, found in two forwards.
fn list(user: i64) -> KnowledgeRecord {
    let digest = Digest::of(b"x");
    KnowledgeRecord {
        entity_id: EntityId::Int(user),
        text: String::new(),
        items: (1..=12).map(|rank| EntityId::Text(format!("<b>item {rank} of {user}</b>"))).collect(),
        scores: (1..=12).map(|rank| -0.5 * f64::from(rank)).collect(),
        prompt_tokens: 9,
        text_tokens: 0,
        pool: String::new(),
        policy: "strict".into(),
        stop_reason: String::new(),
        forwards: 2,
        drafted_tokens: 66,
        accepted_tokens: 2,
        relaxed_tokens: 0,
        step_accepted: vec![2, 0],
        mean_log_probability: 0.0,
        draft_seconds: 0.001,
        engine_seconds: 0.25,
        prompt_digest: digest.clone(),
        spec_digest: digest.clone(),
        model_digest: digest,
        pool_digest: String::new(),
        generated_by: RUN.into(),
        event_timestamp: "2026-01-02T00:00:00Z".parse().unwrap(),
        created_timestamp: "2026-01-02T03:00:00Z".parse().unwrap(),
        samples: Vec::new(),
        runners_up: None,
    }
}

fn spec_of_lists() -> Spec {
    Spec {
        engine: "tree".into(),
        model: Digest::of(b"m"),
        tokenizer: Digest::of(b"t"),
        end_of_text: Vec::new(),
        precision: "f32".into(),
        prompts: [].into(),
        verification: Policy::Strict,
        sampling: None,
        max_new_tokens: 4,
        stop: Vec::new(),
        constraint: None,
        lists: Some(ListSpec {
            trie: Digest::of(b"trie"),
            out_of_stock: None,
            items: 12,
            items_from: None,
            width: 20,
            normalisation: Normalisation::Vocabulary,
            repeat: false,
            ties: Ties::All,
        }),
    }
}

/// Publishes two parts of three lists below an output.
async fn publish_lists(output: &str) {
    let (spec, date) = (spec_of_lists(), "2026-01-02".parse().unwrap());
    let folder = DataSet::Recommendations.folder(Kind::User, date, RUN);
    let folder = Location::parse(output).unwrap().join(&folder);
    let (mut writer, mut figures) = (PartWriter::new(&folder), Figures::default());
    for shard in 0..2 {
        let rows: Vec<KnowledgeRecord> = (0..3).map(|user| list(10 * i64::from(shard) + user)).collect();
        rows.iter().for_each(|row| figures.add_record(row));
        let info = PartInfo::new(RUN, shard, Kind::User, "w/1/1", &rows);
        let info = info.with_content(Content::Lists { items: IdType::String, rows: ListRows::User });
        let bytes = encode_part(&writer.name(), IdType::Int64, &rows, None, &info).unwrap();
        let bytes = writer.create(bytes).await.unwrap();
        writer.add(3, &bytes);
    }
    let audit = AuditReport { texts: 3, identical: 3, plain_seconds: 3.0, seconds: 1.5, ..AuditReport::default() };
    let details = Profiles {
        spec_digest: spec.digest(),
        spec,
        pool_digest: Digest::of(b"no pools"),
        entities: 6,
        carried: 0,
        errors: 0,
        value: None,
        figures: [(String::new(), figures)].into(),
        audit: [(String::new(), audit)].into(),
        guards: None,
        cost: None,
        embedding: None,
        canary: None,
    };
    let created = "2026-01-02T03:00:00Z".parse().unwrap();
    let manifest = Manifest::new(RUN, (Kind::User, date), created, writer.finish(), details);
    data_set::publish(&folder, &manifest).await.unwrap();
}

#[test]
fn a_page_of_lists_shows_lists_and_nothing_that_only_texts_have() {
    let workspace = Workspace::with(&[USERS]);
    let output = workspace.path("out");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(publish_lists(output.to_str().unwrap()));
    assert_prints(&workspace.verify(), &["whole: ", "recommendations/kind=user", "(2 parts, 6 rows)"]);
    let folder = output.join(format!("recommendations/kind=user/dt=2026-01-02/run={RUN}"));
    for dir in [&output, &folder] {
        let page = page(&workspace, dir);
        let dom = dom(&page);
        let wanted = [
            "of users, verification strict",
            ">Lists<",
            ">2.00×<",
            ">Forwards per list</th><td class=\"text\">2.00<",
            ">Accepted steps per list</th><td class=\"text\">2.00<",
            ">Drafted prefixes per list</th><td class=\"text\">66.0<",
            ">Lists per second of an engine</th><td class=\"text\">4.0<",
            ">Items per list, at most</th><td class=\"text\">12<",
            // Of both parts, and of each list the best ten.
            "user 12<",
            "&lt;b&gt;item 10 of 0&lt;/b&gt;",
            "<p>The best 10 of 12.</p>",
            ">-5.000<",
        ];
        assert_contains(&dom, &wanted);
        let dom = dom.split("</style>").nth(1).unwrap();
        for absent in ["item 11 of", "Texts", "texts", "Tokens", "tokens", "Pool", "Relaxed", "<b>"] {
            assert!(!dom.contains(absent), "{absent} in {dom}");
        }
        assert_eq!(dom.matches(">Rank<").count(), 6);
    }
    let narrow = probe(&page(&workspace, &output), 400, false);
    assert_eq!(narrow["page"], narrow["window"], "scrolls sideways: {narrow}");
}

#[test]
fn markup_in_ids_texts_and_errors_is_text() {
    const HOSTILE: &str = "<script>document.body.setAttribute('data-hacked', 1)</script><img src=x onerror=alert(1)>";
    let workspace = Workspace::with(&[USERS]);
    let user = |id: usize, about: String| {
        let title = format!("{HOSTILE} {}", id % 3);
        let history: Vec<Value> = (0..4).map(|_| serde_json::json!({"title": title, "rating": 5})).collect();
        let id = format!("{HOSTILE}&amp;{id}");
        serde_json::json!({"id": id, "history": history, "about": about, "embedding": [1, 0]})
    };
    let mut rows: String = (0..8).map(|id| format!("{}\n", user(id, String::new()))).collect();
    rows += &format!("{}\n", user(8, format!("{HOSTILE} ").repeat(300)));
    fs::write(workspace.path("users.jsonl"), rows).unwrap();
    fs::write(
        workspace.path("echo.j2"),
        "{% if attributes.about is defined %}{{ attributes.about }}{% endif %}{% for film in history %}{{ film.title \
         }}, {% endfor %}",
    )
    .unwrap();
    let settings = [
        "run.audit_share=1.0",
        "run.date=2026-01-02",
        "output.min_coverage=0.5",
        "prompt.max_tokens=400",
        "generate.max_new_tokens=40",
        "pools.user.grouping=global",
        &format!("prompt.user={}", workspace.path("echo.j2").display()),
    ];
    assert_exit(&workspace.run(&settings), 0);
    let page = page(&workspace, &workspace.path("out"));
    let unguarded = page.replace("Content-Security-Policy", "x");
    for page in [&page, &unguarded] {
        let dom = dom(page);
        assert!(!dom.contains("<script") && !dom.contains("<img"), "{dom}");
        assert!(!dom.contains("data-hacked=\""), "{dom}");
        assert!(dom.contains("&lt;script&gt;document.body"), "{dom}");
        assert!(dom.contains("id=\"errors\""), "{dom}");
    }
}

#[test]
fn what_is_no_published_night_is_refused_with_what_to_do() {
    let workspace = Workspace::new();
    let check = |dir: &Path, expected: &str| {
        let file = workspace.path("none.html");
        assert_refused(&report(dir, &file), &[expected]);
        assert!(!file.exists());
    };
    fs::create_dir(workspace.path("empty")).unwrap();
    check(&workspace.path("empty"), "not an output of Laser's");
    check(&workspace.path("nowhere"), "not an output of Laser's");
    assert_exit(&workspace.run(&[]), 0);
    let (folder, mut manifest) = manifests(&workspace).remove(0);
    manifest["version"] = 7.into();
    fs::write(folder.join("_manifest.json"), manifest.to_string()).unwrap();
    check(&folder, "_manifest.json: schema version 7, this Laser reads 2");
    check(&workspace.path("out"), "_manifest.json: schema version 7");
    fs::write(folder.join("_manifest.json"), "{}").unwrap();
    check(&folder, "_manifest.json: not a manifest of Laser's");
    fs::remove_dir_all(workspace.path("out/profiles")).unwrap();
    check(&workspace.path("out"), "is not published: 4 of 18 shards are committed");
}
