//! Bad input ends with exit code 65 and a message that names what is wrong, before anything is written.

use std::fs;

use crate::{USERS, Workspace, assert_exit, copy_files, fixture, stderr};

/// Runs with a JSONL table in place of the demo.
fn check_table(rows: &str, settings: &[&str], expected: &str) {
    let workspace = Workspace::with(&[USERS]);
    fs::write(workspace.path("users.jsonl"), rows).unwrap();
    check(&workspace, settings, expected);
}

#[track_caller]
fn check(workspace: &Workspace, settings: &[&str], expected: &str) {
    let output = workspace.run(settings);
    assert_exit(&output, 65);
    let message = stderr(&output);
    let message = message.lines().find(|l| l.starts_with("error:")).unwrap_or_default();
    assert!(message.contains(expected), "expected {expected:?} in {message:?}");
    assert!(workspace.parts().is_empty(), "something was published");
}

const ROW: &str =
    r#"{"id": 1, "history": [{"title": "A", "genres": ["Drama"], "rating": 4}], "embedding": [0.1, 0.2]}"#;

#[test]
fn wrong_rows_are_refused_with_file_and_row() {
    let cases = [
        (String::new(), "no entities"),
        ("{\"name\": \"x\"}".to_owned(), "users.jsonl, row 1: column \"id\" is empty"),
        (format!("{ROW}\n{ROW}"), "row 2: user id 1 appears twice"),
        (ROW.replace("[{\"title\"", "7, \"x\": [{\"title\""), "row 1: column \"history\" holds 7"),
        (ROW.replace("0.2", "null"), "row 1: column \"embedding\" holds NaN or null at position 1"),
        ("not json".to_owned(), "row 1: not a JSON object"),
    ];
    for (rows, expected) in cases {
        check_table(&rows, &[], expected);
    }
}

#[test]
fn impossible_groupings_are_refused() {
    check_table(ROW, &["pools.user.grouping=collaborative", "pools.user.clusters=9"], "clusters");
    let missing = ["pools.user.grouping=attribute", "pools.user.attributes=[\"zodiac\"]"];
    check_table(ROW, &missing, "zodiac");
}

#[test]
fn a_template_with_an_unknown_field_is_refused() {
    let workspace = Workspace::new();
    let template = workspace.path("mine.j2");
    fs::write(&template, "Profile of {{ attributes.shoe_size }}").unwrap();
    let setting = format!("prompt.user={}", template.display());
    check(&workspace, &[&setting], "shoe_size");
}

#[test]
fn unusable_models_are_refused() {
    let workspace = Workspace::new();
    let broken = |name: &str, change: &dyn Fn(&std::path::Path)| {
        let dir = workspace.path(name);
        copy_files(&fixture(), &dir);
        change(&dir);
        format!("model.path={}", dir.display())
    };
    let no_tokenizer = broken("no-tokenizer", &|dir| fs::remove_file(dir.join("tokenizer.json")).unwrap());
    check(&workspace, &[&no_tokenizer], "no tokenizer.json");
    let other = broken("other", &|dir| {
        let config = fs::read_to_string(dir.join("config.json")).unwrap();
        fs::write(
            dir.join("config.json"),
            config.replace("LlamaForCausalLM", "MambaForCausalLM").replace("\"llama\"", "\"mamba\""),
        )
        .unwrap();
    });
    check(&workspace, &[&other], "MambaForCausalLM is not supported by the tree engine");
    let truncated = broken("truncated", &|dir| {
        let file = dir.join("model.safetensors");
        let bytes = fs::read(&file).unwrap();
        fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    });
    check(&workspace, &[&truncated], "model.safetensors");
    check(&workspace, &["model.path=./nowhere"], "nowhere");
}

#[test]
fn an_output_that_cannot_be_written_is_refused() {
    let workspace = Workspace::new();
    fs::write(workspace.path("file"), "x").unwrap();
    let setting = format!("output.path={}/inside", workspace.path("file").display());
    check(&workspace, &[&setting], "not writable");
}

#[test]
fn wrong_options_are_refused_by_key() {
    let workspace = Workspace::new();
    let relaxed = "verification.policy=relaxed";
    check(&workspace, &[relaxed, "verification.p=1.5"], "p must be in 0..=1, got 1.5");
    check(&workspace, &[relaxed, "verification.k=0"], "k must be at least 1");
    let conditional = "verification.policy=conditional";
    check(&workspace, &[conditional, "verification.alpha=-1"], "alpha must be 0 or more, got -1");
    check(&workspace, &[conditional, "verification.beta=0.01"], "beta must be in 0.02..=1, got 0.01");
    check(&workspace, &[conditional, "verification.sources=pool"], "expected ``prompt` or `all``");
    let drawn = "generate.temperature=0.8";
    let greedy_only = "policy = \"relaxed\" is for greedy texts; choose \"strict\" or \"typical\"";
    check(&workspace, &[drawn, relaxed], greedy_only);
    check(&workspace, &[drawn, conditional], "policy = \"conditional\" is for greedy texts");
    check(&workspace, &["verification.policy=typical"], "set [generate] temperature");
    let typical = "verification.policy=typical";
    check(&workspace, &[drawn, typical, "verification.epsilon=2"], "epsilon must be in 0..=1, got 2");
    check(&workspace, &[drawn, typical, "verification.delta=-1"], "delta must be 0 or more, got -1");
    check(&workspace, &[drawn, "model.engine=mistralrs"], "engine = \"mistralrs\" writes greedy texts only");
    check(&workspace, &["generate.temperature=-1"], "temperature must be in 0.01..=100, got -1");
    check(&workspace, &[drawn, "generate.top_p=0"], "top_p must be above 0 and at most 1, got 0");
    check(&workspace, &[drawn, "generate.top_k=0"], "top_k must be at least 1");
    check(&workspace, &[drawn, "generate.samples=0"], "[generate] samples: expected 1 to 64");
    check(&workspace, &["generate.samples=2"], "[generate] samples: greedy texts are not drawn");
    check(&workspace, &["generate.seed=3"], "[generate] seed: greedy texts are not drawn; set temperature above 0");
    check(&workspace, &["draft.alignment=9"], "[draft] alignment = 9: expected 0 to 8");
    check(&workspace, &["output.runners_up=9"], "[output] runners_up = 9: expected 0 to 8");
    let not_told = "[output] runners_up: engine = \"mistralrs\" does not tell them";
    check(&workspace, &["output.runners_up=2", "model.engine=mistralrs"], not_told);
    let nothing_copied = "method = \"lookahead\" copies nothing from the prompt; choose \"blended\"";
    check(&workspace, &["draft.alignment=2", "draft.method=lookahead"], nothing_copied);
    check(&workspace, &["draft.alignment=2", "model.engine=mistralrs"], "engine = \"mistralrs\" does not draft");
    check(&workspace, &["pools.user.clusters=0"], "[pools.user] clusters");
    check(&workspace, &["run.shard_row=3"], "did you mean \"shard_rows\"");
}
