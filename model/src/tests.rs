//! Model directories, tokenizers, chat templates and the hub.

use std::fs;

use super::*;

fn fixture() -> PathBuf {
    std::path::absolute("../fixtures/profile-lm").unwrap()
}

fn open_fixture() -> ModelFiles {
    ModelFiles::open(&fixture()).unwrap()
}

/// A model directory with the fixture's JSON files and a few bytes for weights, then changed by `change`.
fn model_with(change: impl FnOnce(&Path)) -> (tempfile::TempDir, Result<ModelFiles, ModelError>) {
    let directory = tempfile::tempdir().unwrap();
    for file in [CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG] {
        fs::copy(fixture().join(file), directory.path().join(file)).unwrap();
    }
    fs::write(directory.path().join(SAFETENSORS), b"weights").unwrap();
    change(directory.path());
    let opened = ModelFiles::open(directory.path());
    (directory, opened)
}

fn error_of(change: impl FnOnce(&Path)) -> String {
    model_with(change).1.unwrap_err().to_string()
}

fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut json: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    edit(&mut json);
    fs::write(path, json.to_string()).unwrap();
}

#[test]
fn the_fixture_opens() {
    let model = open_fixture();
    assert_eq!(model.weights.files(), [fixture().join(SAFETENSORS)]);
    assert_eq!(model.end_of_text, [1]);
    assert_eq!(model.bos, Some(0));
    assert_eq!(model.max_positions, Some(1024));
    assert_eq!(model.architecture.as_deref(), Some("LlamaForCausalLM"));
    assert_eq!(model.tokenizer.vocab_size(), 4096);
    assert!(model.chat_template.is_some());
}

#[test]
fn a_sliding_window_in_use_bounds_the_positions() {
    for (config, expected) in [
        (r#"{"model_type": "mistral", "max_position_embeddings": 100, "sliding_window": 64}"#, Some(64)),
        (r#"{"model_type": "mistral", "max_position_embeddings": 100, "sliding_window": null}"#, Some(100)),
        (r#"{"model_type": "qwen2", "max_position_embeddings": 100, "sliding_window": 64}"#, Some(100)),
        (r#"{"architectures": ["MistralForCausalLM"], "sliding_window": 64, "use_sliding_window": false}"#, Some(1024)),
    ] {
        let (_directory, model) = model_with(|d| fs::write(d.join(CONFIG), config).unwrap());
        assert_eq!(model.unwrap().max_positions, expected, "{config}");
    }
}

#[test]
fn text_survives_the_tokenizer() {
    let tokenizer = open_fixture().tokenizer;
    let text = "Loves Léon (1994) and 東京 stories 🎬.";
    let ids = tokenizer.encode(text, true).unwrap();
    assert_eq!(ids[0], 0, "<s> comes first");
    assert_eq!(ids[1..], tokenizer.encode(text, false).unwrap());
    assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    let batch = tokenizer.encode_batch(&[text, ""], true).unwrap();
    assert_eq!(batch, [ids, vec![0]]);
}

#[test]
fn fingerprint_ignores_whitespace_and_key_order_but_no_value() {
    let original = open_fixture().tokenizer.fingerprint();
    let tokenizer_with = |edit: &dyn Fn(&mut Value)| {
        let (_directory, model) = model_with(|d| edit_json(&d.join(TOKENIZER), edit));
        model.unwrap().tokenizer.fingerprint()
    };
    assert_eq!(tokenizer_with(&|_| ()), original, "compact form");
    assert_eq!(tokenizer_with(&|json| json.sort_all_objects()), original);
    let changed = tokenizer_with(&|json| json["added_tokens"][2]["content"] = "<pad2>".into());
    assert_ne!(changed, original);
}

#[test]
fn truncation_and_padding_of_the_file_are_off() {
    let (_directory, model) = model_with(|d| {
        edit_json(&d.join(TOKENIZER), |json| {
            json["truncation"] = serde_json::json!({"direction": "Right", "max_length": 4,
                "strategy": "LongestFirst", "stride": 0});
        });
    });
    let ids = model.unwrap().tokenizer.encode(&"film ".repeat(50), true);
    assert!(ids.unwrap().len() > 40);
}

#[test]
fn end_of_text_is_the_union_with_the_generation_config_first() {
    let (_directory, model) = model_with(|d| {
        fs::write(d.join(GENERATION_CONFIG), r#"{"eos_token_id": [7, 9]}"#).unwrap();
        edit_json(&d.join(CONFIG), |json| json["eos_token_id"] = 9.into());
    });
    assert_eq!(model.unwrap().end_of_text, [7, 9, 1]);
}

#[test]
fn a_model_without_end_of_text_is_refused() {
    let error = error_of(|d| {
        fs::remove_file(d.join(GENERATION_CONFIG)).unwrap();
        fs::remove_file(d.join(CONFIG)).unwrap();
        fs::write(d.join(TOKENIZER_CONFIG), "{}").unwrap();
    });
    assert!(error.contains("no end-of-text token"), "{error}");
}

#[test]
fn missing_files_are_named() {
    let remove = |file: &'static str| error_of(move |d| fs::remove_file(d.join(file)).unwrap());
    assert!(remove(TOKENIZER).contains("no tokenizer.json"));
    assert!(remove(SAFETENSORS).contains("no weights"));
    let missing = ModelFiles::open(Path::new("./no/such/model")).unwrap_err();
    assert!(missing.to_string().contains("./no/such/model"), "{missing}");
    let file = ModelFiles::open(&fixture().join(CONFIG)).unwrap_err();
    assert!(matches!(file, ModelError::NotAModel { .. }), "{file}");
}

#[test]
fn corrupt_json_is_named() {
    for file in [CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG] {
        let error = error_of(|d| fs::write(d.join(file), "{\"eos_token_id\": ").unwrap());
        assert!(error.contains(file) && error.contains("line 1"), "{error}");
    }
    let error = error_of(|d| fs::write(d.join(TOKENIZER), "{}").unwrap());
    assert!(error.contains("not a tokenizer"), "{error}");
}

#[test]
fn the_index_names_the_shards() {
    let write_index = |d: &Path, names: [&str; 2]| {
        let map = serde_json::json!({"weight_map": {"b": names[1], "a": names[0], "c": names[0]}});
        fs::write(d.join(SAFETENSORS_INDEX), map.to_string()).unwrap();
    };
    let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let (directory, model) = model_with(|d| {
        write_index(d, shards);
        for shard in shards {
            fs::write(d.join(shard), shard).unwrap();
        }
    });
    let expected = shards.map(|s| directory.path().join(s));
    assert_eq!(model.unwrap().weights.files(), expected);
    let error = error_of(|d| write_index(d, shards));
    assert!(error.contains(shards[0]) && error.contains("missing"), "{error}");
    let error = error_of(|d| write_index(d, ["../secret.safetensors", shards[0]]));
    assert!(error.contains("weight_map"), "{error}");
}

#[test]
fn gguf_is_found_by_path_or_as_the_only_one() {
    let only_gguf = |d: &Path| {
        fs::remove_file(d.join(SAFETENSORS)).unwrap();
        fs::write(d.join("a.gguf"), b"GGUF").unwrap();
    };
    let (directory, model) = model_with(only_gguf);
    let file = directory.path().join("a.gguf");
    assert_eq!(model.unwrap().weights, Weights::Gguf(file.clone()));
    let error = error_of(|d| {
        only_gguf(d);
        fs::write(d.join("b.gguf"), b"GGUF").unwrap();
    });
    assert!(error.contains("a.gguf, b.gguf"), "{error}");
    let by_path = ModelFiles::open(&file).unwrap();
    assert_eq!(by_path.weights, Weights::Gguf(file));
    assert_eq!(by_path.directory, directory.path());
}

#[test]
fn the_digest_changes_with_weights_and_configuration() {
    let digest = |change: &dyn Fn(&Path)| {
        let (_directory, model) = model_with(change);
        model.unwrap().digest().unwrap()
    };
    let original = digest(&|_| ());
    assert_eq!(digest(&|_| ()), original);
    assert_ne!(digest(&|d| fs::write(d.join(SAFETENSORS), b"weightz").unwrap()), original);
    let other_rope = |d: &Path| edit_json(&d.join(CONFIG), |json| json["rope_theta"] = 5.into());
    assert_ne!(digest(&other_rope), original);
}

fn template_of(change: impl FnOnce(&Path)) -> Option<String> {
    let chat_template = model_with(change).1.unwrap().chat_template?;
    let message = Message { role: "user", content: "Hi" };
    Some(chat_template.render(&[message], true).unwrap())
}

#[test]
fn the_chat_template_is_found_wherever_models_keep_it() {
    let set = |template: Value| {
        move |d: &Path| {
            edit_json(&d.join(TOKENIZER_CONFIG), |json| json["chat_template"] = template);
        }
    };
    assert_eq!(template_of(set(Value::Null)), None);
    assert_eq!(template_of(set("{{ bos_token }}one".into())).unwrap(), "<s>one");
    let named = serde_json::json!([
        {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]);
    assert_eq!(template_of(set(named)).unwrap(), "two");
    let file = |d: &Path| fs::write(d.join(CHAT_TEMPLATE), "three").unwrap();
    assert_eq!(template_of(file).unwrap(), "three");
}

#[test]
fn chat_templates_of_the_usual_dialects_render() {
    let chatml = "{%- for m in messages %}\n    {%- if loop.first and m.role != 'system' %}\n        \
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}\n    {%- endif %}\n    \
        {{- '<|im_start|>' + m['role'] + '\\n' + m.content.strip() + '<|im_end|>' + '\\n' }}\n\
        {%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}";
    let thinking = "{%- for m in messages[::-1] %}{%- set i = (messages|length - 1) - loop.index0 %}{{ i }}\
        {%- endfor %}{%- if enable_thinking is defined and enable_thinking is false %}\n{{- '<think></think>' }}{%- endif %}";
    let dated = "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}\
        {%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}{%- endif %}{{ date_string }}\
        {% generation %}{{ messages[0]['content'].split('!')[0] | trim }}{% endgeneration %}";
    let instruct = "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
        {{ raise_exception('roles must alternate') }}{% endif %}[INST] {{ m['content'] }} [/INST]{% endfor %}";
    let user = Message { role: "user", content: "Hi! " };
    for (template, expected) in [
        (chatml, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"),
        (thinking, "0<think></think>"),
        (dated, "<s>26 Jul 2024Hi"),
        (instruct, "[INST] Hi!  [/INST]"),
    ] {
        let rendered = ChatTemplate::new(template, "<s>", "</s>").render(&[user], true);
        assert_eq!(rendered.unwrap(), expected, "{template}");
    }
    let system = Message { role: "system", content: "" };
    let refused = ChatTemplate::new(instruct, "", "").render(&[system, user], true);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("roles must alternate"), "{refused}");
}

#[test]
fn the_chat_digest_changes_with_source_and_special_tokens() {
    let digest = |source, bos| ChatTemplate::new(source, bos, "</s>").digest();
    assert_eq!(digest("a", "<s>"), digest("a", "<s>"));
    assert_ne!(digest("a", "<s>"), digest("b", "<s>"));
    assert_ne!(digest("a", "<s>"), digest("a", "<bos>"));
}
