//! `laser doctor` finds what is wrong before a night does, and says what to mend.

use std::process::Output;

use crate::distributed::{Cluster, Nats};
use crate::proxy::{Fault, Proxy};
use crate::s3::S3;
use crate::server::{closed_port, greet};
use crate::{
    Workspace, assert_contains, assert_exit, assert_prints, copy_files, entries, fixture, flip_bit, stderr, stdout,
};

fn doctor(workspace: &Workspace, settings: &[&str]) -> Output {
    workspace.output("doctor", settings)
}

/// One thing is wrong, and its line says these words.
#[track_caller]
fn assert_wrong(output: &Output, words: &[&str]) {
    assert_exit(output, 65);
    let text = stdout(output);
    let wrong: Vec<&str> = text.lines().filter(|l| l.starts_with("WRONG ")).collect();
    assert_eq!(wrong.len(), 1, "{text}");
    assert_contains(wrong[0], words);
}

#[test]
fn all_is_well_before_a_night_and_after() {
    let cluster = Cluster::on_s3("LASER_NATS_OLD");
    let before = doctor(&cluster.tonight, &[]);
    assert_prints(&before, &["ok    model", "ok    input", "ok    previous", "ok    queue", "ok    run: none yet"]);
    assert_contains(&stdout(&before), &["conditional puts have one winner, clocks "]);
    cluster.finish(cluster.start("coordinator", &[]), cluster.worker());
    assert_exit(&doctor(&cluster.tonight, &[]), 0);
}

#[test]
fn the_device_is_tested_in_the_configured_precision() {
    let workspace = Workspace::new();
    let selftest = |settings: &[&str]| workspace.output("selftest", settings);
    assert_prints(
        &doctor(&workspace, &[]),
        &["ok    device cpu: cpu, f32: ", " nodes agree with the CPU in f32 within "],
    );
    for (settings, said) in
        [(&["model.dtype=bf16", "model.threads=1"][..], "cpu, bf16: "), (&["model.isq=q4k"], "cpu, q4k: ")]
    {
        let output = selftest(settings);
        assert_exit(&output, 0);
        assert_prints(&output, &[said, "(tolerance "]);
    }
    for (setting, words) in [
        ("model.engine=mistralrs", "has no self-test"),
        ("model.threads=0", "option threads = \"0\": expected at least 1"),
    ] {
        let output = selftest(&[setting]);
        assert_exit(&output, 65);
        assert_contains(&stderr(&output), &[words]);
    }
}

#[test]
fn prompts_that_cut_texts_short_are_told() {
    let workspace = Workspace::new();
    // The model has 1,024 positions.
    let words = ["texts of the longest prompts end after 24 tokens; lower [prompt] max_tokens"];
    let long = doctor(&workspace, &["prompt.max_tokens=1000", "generate.max_new_tokens=25"]);
    assert_exit(&long, 0);
    assert_contains(&stderr(&long), &words);
    let short = doctor(&workspace, &["prompt.max_tokens=1000", "generate.max_new_tokens=24"]);
    assert_exit(&short, 0);
    assert!(!stderr(&short).contains("longest prompts"), "{}", stderr(&short));
}

#[test]
fn a_queue_that_will_not_do_is_told() {
    let workspace = Workspace::new();
    let at = |port: u16| format!("queue.url=nats://127.0.0.1:{port}");
    let absent = doctor(&workspace, &[&at(closed_port())]);
    assert_wrong(&absent, &["cannot connect to nats at 127.0.0.1", "check that the server runs"]);
    let old = doctor(&workspace, &[&at(greet("2.8.4", true))]);
    assert_wrong(&old, &["nats server granny has version 2.8.4, expected 2.9.0 or later", "upgrade it"]);
    let user = "authorization { users: [{ user: a, password: b, permissions: { publish: nothing } }] }";
    let server = Nats::start("LASER_NATS_NEW", user);
    let url = format!("queue.url=nats://a:b@127.0.0.1:{}", server.port());
    let forbidden = doctor(&workspace, &[&url]);
    assert_wrong(&forbidden, &["neither coordinator", "nor worker", "deploy/nats/laser.conf"]);
}

#[test]
fn a_store_that_will_not_do_is_told() {
    let (s3, mut workspace) = (S3::start(), Workspace::new());
    workspace.environment = s3.environment();
    let proxy = Proxy::http(s3.port());
    let at = |port: u16| {
        let mut command = workspace.command("doctor", &["output.path=s3://laser/out", "previous=[]"]);
        command.env("AWS_ENDPOINT", format!("http://127.0.0.1:{port}"));
        command.output().unwrap()
    };
    assert_wrong(&at(closed_port()), &["output s3://laser/out", "did not answer", "endpoint"]);
    proxy.set(Fault::Answer(403));
    assert_wrong(&at(proxy.port), &["output s3://laser/out", "403"]);
    proxy.set(Fault::Unconditional);
    assert_wrong(&at(proxy.port), &["it knows no conditional put", "use a store that does"]);
    proxy.set(Fault::Modified("Mon, 05 Jan 2026 10:00:00 GMT"));
    assert_wrong(&at(proxy.port), &["its clock and this machine's are", "synchronise them (NTP)"]);
    proxy.set(Fault::None);
    assert_exit(&at(proxy.port), 0);
}

#[test]
fn a_worker_with_another_model_or_a_damaged_pool_is_told() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    cluster.coordinator(&[]).kill();
    let run = cluster.run_id();
    assert_prints(&doctor(&cluster.tonight, &[]), &[&format!("{run} can be worked on")]);
    let model = cluster.tonight.path("model");
    copy_files(&fixture(), &model);
    flip_bit(&model.join("model.safetensors"));
    let other = doctor(&cluster.tonight, &[&format!("model.path={}", model.display())]);
    assert_wrong(&other, &[&run, "it wants model = ", "work with the coordinator's [model]"]);
    let mut files = entries(&cluster.tonight.path(&format!("out/pools/{run}"))).into_iter();
    let pool = files.find(|file| file.extension().is_some_and(|e| e == "pool")).unwrap();
    flip_bit(&pool);
    assert_wrong(&doctor(&cluster.tonight, &[]), &[&run, pool.file_name().unwrap().to_str().unwrap()]);
}
