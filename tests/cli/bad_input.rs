//! Bad input ends with exit code 65 and a message that names what is wrong, before anything is written.

use std::fs;
use std::path::Path;

use laser_model::ModelFiles;
use serde_json::{Map, Value, json};

use crate::server::closed_port;
use crate::{USERS, Workspace, assert_contains, assert_exit, copy_files, fixture, stderr};

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
fn a_hub_that_is_away_is_no_bad_input() {
    let mut workspace = Workspace::new();
    workspace.environment = vec![
        ("HF_ENDPOINT", format!("http://127.0.0.1:{}", closed_port())),
        ("HF_HOME", workspace.path("hub").display().to_string()),
        ("HF_HUB_OFFLINE", String::new()),
    ];
    let mut command = workspace.command("run", &["model.path=org/tiny"]);
    // The hub client asks a proxy for local addresses too.
    for name in ["ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY"] {
        command.env_remove(name).env_remove(name.to_lowercase());
    }
    let output = command.output().unwrap();
    assert_exit(&output, 75);
    assert_contains(&stderr(&output), &["[model] path", "org/tiny", "again later"]);
}

/// Leaves a copy of the fixture with its first tokens alone, in its configuration and in its weights.
fn cut_vocabulary(model: &Path, tokens: usize) {
    let config = model.join("config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    let all = json["vocab_size"].as_u64().unwrap();
    json["vocab_size"] = tokens.into();
    fs::write(config, json.to_string()).unwrap();
    // The header tells where in the rest the tensors are, and eight bytes how long it is.
    let file = model.join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(usize::try_from(u64::from_le_bytes(*length)).unwrap());
    let mut header: Map<String, Value> = serde_json::from_slice(header).unwrap();
    header.remove("__metadata__");
    let mut weights = Vec::new();
    for (name, tensor) in &mut header {
        let [from, to]: [usize; 2] = serde_json::from_value(tensor["data_offsets"].clone()).unwrap();
        let mut values = &data[from..to];
        if name == "model.embed_tokens.weight" {
            tensor["shape"][0] = tokens.into();
            values = &values[..values.len() / usize::try_from(all).unwrap() * tokens];
        }
        tensor["data_offsets"] = json!([weights.len(), weights.len() + values.len()]);
        weights.extend_from_slice(values);
    }
    write_weights(&file, &header, &weights);
}

fn write_weights(file: &Path, header: &Map<String, Value>, values: &[u8]) {
    let mut header = serde_json::to_vec(header).unwrap();
    header.resize(header.len().next_multiple_of(8), b' ');
    let length = u64::try_from(header.len()).unwrap().to_le_bytes();
    fs::write(file, [length.as_slice(), &header, values].concat()).unwrap();
}

/// Writes a single matrix of zeros.
fn write_zeros(file: &Path, name: &str, shape: [usize; 2]) {
    let bytes = 4 * shape[0] * shape[1];
    let tensor = json!({ "dtype": "F32", "shape": shape, "data_offsets": [0, bytes] });
    write_weights(file, &Map::from_iter([(name.to_owned(), tensor)]), &vec![0; bytes]);
}

#[test]
fn a_draft_model_of_a_part_of_the_vocabulary_is_refused() {
    let workspace = Workspace::new();
    let draft = workspace.path("draft");
    copy_files(&fixture(), &draft);
    cut_vocabulary(&draft, 4000);
    let draft = format!("draft.model.path={}", draft.display());
    let expected = "its vocabulary has 4000 tokens, the tokenizer 4096; give a model of the whole vocabulary";
    check(&workspace, &[&draft], expected);
}

#[test]
fn what_drafts_from_features_of_another_width_is_refused_before_anything_is_planned() {
    let workspace = Workspace::new();
    let refused = |folder: &Path, expected: &str| {
        let setting = format!("draft.model.path={}", folder.display());
        check(&workspace, &[&setting], "[draft.model] path = ");
        let remedy = "; train one for this model with `laser train draft`, or take it out of [draft.model]";
        check(&workspace, &[&setting], &format!("{expected}{remedy}"));
        assert!(!workspace.path("out").exists(), "something was planned");
    };
    let folder = |name: &str| {
        let folder = workspace.path(name);
        fs::create_dir(&folder).unwrap();
        folder
    };
    let eagle = folder("eagle");
    write_zeros(&eagle.join("model.safetensors"), "fc.weight", [128, 256]);
    let config = fs::read_to_string(fixture().join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["hidden_size"] = 128.into();
    fs::write(eagle.join("config.json"), config.to_string()).unwrap();
    refused(&eagle, "config.json: hidden_size is 128, that of the model it is to draft for 256");
    let medusa = folder("medusa");
    write_zeros(&medusa.join("medusa_lm_head.safetensors"), "0.0.linear.weight", [128, 128]);
    let shapes = "tensor 0.0.linear.weight has shape [128, 128], and the model it is to draft for needs [256, 256]";
    refused(&medusa, &format!("medusa_lm_head.safetensors: {shapes}"));
}

#[test]
fn a_draft_model_that_was_trained_with_another_tokenizer_or_does_not_tell_it_is_refused() {
    let workspace = Workspace::new();
    let kept = json!({
        "epoch": 1, "loss": 0.0, "held_out_loss": 0.0, "shares": [], "score": 1.0, "seconds": 0.0
    });
    let target = ModelFiles::open(&fixture()).unwrap().digest().unwrap();
    let mut belongs = json!({ "target": target, "tokenizer": "another", "training": "none", "kept": kept });
    // What it says of itself is read first.
    let draft = workspace.path("draft");
    fs::create_dir(&draft).unwrap();
    let describe = |belongs: &Value| {
        fs::write(draft.join("config.json"), json!({ "laser_draft": belongs }).to_string()).unwrap();
    };
    let setting = format!("draft.model.path={}", draft.display());
    describe(&belongs);
    check(&workspace, &[&setting], "was trained with the tokenizer another, not with ");
    check(&workspace, &[&setting], "; train one for it with `laser train draft`");
    belongs.as_object_mut().unwrap().remove("tokenizer").unwrap();
    describe(&belongs);
    check(&workspace, &[&setting], "config.json: not the configuration of a model: \"laser_draft\" is not what this ");
    check(&workspace, &[&setting], "train the model again into another folder: missing field `tokenizer`");
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
