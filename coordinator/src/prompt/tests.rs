//! Prompts: shipped and custom templates, the budget, chat format.

use std::sync::OnceLock;

use laser_schema::EntityId;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::*;

fn fixture() -> PathBuf {
    std::path::absolute("../fixtures/profile-lm").unwrap()
}

/// The fixture's model with its chat template replaced; `None` removes it.
fn model_with(chat_template: Option<&str>) -> ModelFiles {
    let directory = tempfile::tempdir().unwrap();
    for file in ["config.json", "generation_config.json", "tokenizer.json"] {
        std::fs::copy(fixture().join(file), directory.path().join(file)).unwrap();
    }
    let config = std::fs::read(fixture().join("tokenizer_config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["chat_template"] = json!(chat_template);
    let config_path = directory.path().join("tokenizer_config.json");
    std::fs::write(config_path, config.to_string()).unwrap();
    std::fs::write(directory.path().join("model.safetensors"), "weights").unwrap();
    ModelFiles::open(directory.path()).unwrap()
}

fn completion_model() -> &'static ModelFiles {
    static MODEL: OnceLock<ModelFiles> = OnceLock::new();
    MODEL.get_or_init(|| model_with(None))
}

fn map(json: Value) -> Map<String, Value> {
    json.as_object().unwrap().clone()
}

fn entity(kind: Kind, attributes: Value, history: Vec<Value>) -> Entity {
    Entity {
        id: EntityId::Int(12),
        kind,
        attributes: map(attributes),
        interactions: history.len() as u64,
        history: history.into_iter().map(map).collect::<Vec<_>>().into(),
        embedding: None,
    }
}

fn film(index: usize) -> Value {
    json!({"title": format!("Film {index}"), "genres": ["Drama", "War"], "director": "Ana Ek",
        "rating": 4.0, "timestamp": index})
}

fn viewer(films: usize) -> Entity {
    entity(Kind::User, json!({"age": "25-34"}), (0..films).map(film).collect())
}

/// A renderer for a template of the test's own, with plain text.
fn renderer_of(source: &str, config: PromptConfig) -> Result<PromptRenderer, PromptError> {
    renderer_for(completion_model(), "mine.j2", source, config)
}

fn renderer_for(
    model: &ModelFiles,
    file: &str,
    source: &str,
    config: PromptConfig,
) -> Result<PromptRenderer, PromptError> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(file);
    std::fs::write(&path, source).unwrap();
    let path = path.to_str().unwrap().to_owned();
    let config = PromptConfig { user: path.clone(), item: path, ..config };
    PromptRenderer::new(&config, model, 256)
}

fn render_with(source: &str, entity: &Entity) -> Result<String, PromptError> {
    let renderer = renderer_of(source, PromptConfig { max_tokens: Some(1000), ..Default::default() })?;
    Ok(renderer.render(entity)?.text)
}

fn shipped(name: &str) -> PromptRenderer {
    let config = PromptConfig { user: name.into(), item: name.into(), max_tokens: Some(1000), ..Default::default() };
    PromptRenderer::new(&config, completion_model(), 256).unwrap()
}

#[test]
fn shipped_templates_ask_for_what_their_papers_ask_for() {
    let asked = [
        ("kar", ["prefers or avoids", "accurately"]),
        ("trawl", ["recommender", "recommender"]),
        ("once", ["\"Regions:\"", "Summarise"]),
        ("rlmrec", ["\"Reasoning:\"", "\"Reasoning:\""]),
    ];
    let history = json!({"title": "Old One", "genres": ["Drama"], "director": "Ana Ek", "author": "Bo Um",
        "categories": ["Sagas"], "rating": 4.5});
    for (framework, [of_user, of_item]) in asked {
        for (domain, seen) in [("films", "Old One | Drama | Ana Ek"), ("books", "Old One | Bo Um | Sagas")] {
            let renderer = shipped(&format!("{framework}/{domain}"));
            let attributes = json!({"age": "25-34", "favourite_snack": "figs"});
            let user = renderer.render(&entity(Kind::User, attributes, vec![history.clone()])).unwrap();
            for part in [of_user, seen, "rating 4.5\n", "- favourite snack: figs\n"] {
                assert!(user.text.contains(part), "{framework}/{domain}: {part}: {}", user.text);
            }
            let attributes = json!({"title": "New One", "year": 1995.0, "genres": ["A", "B"], "description": "Quiet."});
            let item = renderer.render(&entity(Kind::Item, attributes, vec![])).unwrap();
            for part in [of_item, ": New One\n", "- year: 1995\n", "- genres: A, B\n", "- description: Quiet.\n"] {
                assert!(item.text.contains(part), "{framework}/{domain}: {part}: {}", item.text);
            }
        }
    }
}

#[test]
fn shipped_templates_render_with_the_least_there_can_be() {
    for (name, _) in template::shipped_for(Kind::Item) {
        let renderer = shipped(name);
        let stranger = renderer.render(&entity(Kind::User, json!({}), vec![])).unwrap();
        let plain = name == "plain/films";
        assert!(plain || stranger.text.contains("not known yet"), "{name}: {}", stranger.text);
        let silent = json!({"title": null, "genres": [], "rating": ""});
        let titled = json!({"title": "Seen", "rating": 3});
        let reader = entity(Kind::User, json!({"age": null}), vec![silent, titled]);
        let text = if plain { String::new() } else { renderer.render(&reader).unwrap().text };
        assert!(plain || text.contains("\n- Seen | rating 3\n") && !text.contains("About"), "{name}: {text}");
        let item = renderer.render(&entity(Kind::Item, json!({"title": "Bare"}), vec![])).unwrap();
        assert!(item.text.contains(": Bare\n"), "{name}: {}", item.text);
    }
}

/// Prompts are tokenised line by line, with lines kept from entity to entity and from try to try.
#[test]
fn prompts_have_the_tokens_of_the_whole_text() {
    let model = completion_model();
    for (name, _) in template::shipped_for(Kind::Item) {
        let renderer = shipped(name);
        for films in [0, 1, 30, 300, 30] {
            let prompt = renderer.render(&viewer(films)).unwrap();
            assert_eq!(prompt.tokens, model.tokenizer.encode(&prompt.text, true).unwrap(), "{name}, {films} films");
        }
    }
}

#[test]
fn the_prompt_of_a_list_is_the_identifiers_and_nothing_else() {
    let config = PromptConfig { user: "lists/codes".into(), ..Default::default() };
    let renderer = PromptRenderer::new(&config, completion_model(), 256).unwrap();
    let bought = |code: u32| json!({"title": "Heat", "identifier": format!("<a_{code}><b_{code}>")});
    let buyer = entity(Kind::User, json!({"age": "25-34"}), vec![bought(4), bought(1)]);
    assert_eq!(renderer.render(&buyer).unwrap().text, "<a_4><b_4><a_1><b_1>");
    let stranger = renderer.render(&entity(Kind::User, json!({}), vec![])).unwrap();
    assert_eq!((stranger.text.as_str(), stranger.tokens.as_slice()), ("", [0].as_slice()), "<s> alone");
    let error = renderer.render(&viewer(2)).unwrap_err().to_string();
    assert!(error.contains("lists/codes/user, line 1: user 12 has no interaction.identifier; it has"), "{error}");
    let config = PromptConfig { item: "lists/codes".into(), ..config };
    let error = PromptRenderer::new(&config, completion_model(), 256).unwrap_err().to_string();
    assert!(error.contains("\"lists/codes\" does not exist for items; expected one of kar/films, "), "{error}");
    assert!(!error.contains("plain/films, lists/codes"), "{error}");
}

/// The format is what the fixture's model was trained on, to the last newline.
#[test]
fn plain_prompts_have_the_fixture_models_format() {
    let renderer = shipped("plain/films");
    let fugitive = json!({"title": "Fugitive, The (1993)", "genres": ["Action", "Thriller"],
        "director": "Andrew Davis", "rating": 4.0});
    let unrated = json!({"title": "Unrated", "genres": ["Drama"], "director": "Ana Ek"});
    let user = renderer.render(&entity(Kind::User, json!({"age": 3}), vec![fugitive, unrated])).unwrap();
    let expected = "Viewer history:\n\
        - Fugitive, The (1993) | Action, Thriller | Andrew Davis | 4 stars\nViewer profile:\n";
    assert_eq!(user.text, expected);
    let aliens = json!({"title": "Aliens (1986)", "genres": ["Action", "War"], "director": "James Cameron",
        "actors": ["Sigourney Weaver", "Michael Biehn", "James Remar", "Paul Reiser"]});
    let item = renderer.render(&entity(Kind::Item, aliens, vec![])).unwrap();
    let expected = "Movie: Aliens (1986) | Action, War | James Cameron | \
        Sigourney Weaver, Michael Biehn, James Remar\nMovie description:\n";
    assert_eq!(item.text, expected);
    assert_eq!(item.tokens[0], 0, "<s> comes first");
    let films = renderer.render(&viewer(20)).unwrap().text;
    assert_eq!(films.matches("stars").count(), 7);
    assert!(films.contains("Film 13 ") && films.contains("Film 19 ") && !films.contains("Film 12 "));
}

#[test]
fn an_unknown_field_is_named_with_those_there_are() {
    let entity = viewer(1);
    for (source, field) in [
        ("{{ attributes.gender }}", "attributes.gender"),
        ("\n\n{{ genres }}", "genres"),
        ("{{ attributes.gender | listed }}", "attributes.gender"),
        ("{{ attributes.gender | upper }}", "attributes.gender"),
        ("{{ 'Dear ' ~ attributes['gender'] }}", "attributes['gender']"),
        ("{% for film in history %}{{ film.year }}{% endfor %}", "film.year"),
        ("{% for film in historie %}{{ film }}{% endfor %}", "historie"),
        ("{% if attributes.gender %}x{% endif %}", "attributes.gender"),
        ("{{ attributes.gender.name }}", "attributes.gender"),
        ("{{ history[0] | row('year') }}", "row('year')"),
    ] {
        let error = render_with(source, &entity).unwrap_err();
        let PromptError::UnknownField { field: found, line, ref template, .. } = error else {
            panic!("{source}: {error}");
        };
        assert!(found.contains(field), "{source}: {found}");
        assert_eq!(line, source.matches('\n').count() + 1, "{source}");
        assert!(template.ends_with("mine.j2"), "{template}");
    }
    let error = render_with("{{ attributes.gender }}", &entity).unwrap_err().to_string();
    let fields = "id, kind, interactions, attributes.age, history (each with some of director, genres, rating, \
         timestamp, title)";
    assert!(error.contains("user 12 has no attributes.gender") && error.contains(fields), "{error}");
}

#[test]
fn an_unknown_field_of_a_shipped_part_is_named() {
    let untitled = entity(Kind::Item, json!({"year": 1999}), vec![]);
    let error = shipped("kar/films").render(&untitled).unwrap_err().to_string();
    assert!(error.contains("films/item, line 1: item 12 has no attributes.title"), "{error}");
}

#[test]
fn optional_fields_can_be_tested_and_defaulted() {
    let source = "{% if attributes.gender is defined %}no{% endif %}{{ attributes.gender | default('?') }} \
        {{ id }} {{ kind }} {{ interactions }} {{ history | length }} {{ attributes.age }}";
    assert_eq!(render_with(source, &viewer(2)).unwrap(), "? 12 user 2 2 25-34");
}

#[test]
fn an_interaction_is_to_a_template_what_a_map_is() {
    let fields = json!({"title": " Heat ", "year": 1995.0, "tags": ["crime", "", null], "note": " ", "gone": null,
        "cast": {"lead": "Ana Ek"}});
    let user = entity(Kind::User, fields.clone(), vec![fields]);
    let of = |what: &str| {
        let source = "{{ M }} {{ M | length }} {{ M | list | join }} {{ M.note is defined }} {{ 'gone' in M }} \
            {{ M is mapping }} {{ M['year'] + 1 }} {{ M.cast.lead }} \
            {% for name, value in M | items %}{{ name }}: {{ value }}; {% endfor %}";
        render_with(&source.replace('M', what), &user).unwrap()
    };
    assert_eq!(of("history[0]"), of("attributes"));
    assert!(of("history[0]").ends_with("year: 1995; "), "{}", of("history[0]"));
    assert_eq!(render_with("{{ history[0] == attributes }}", &user).unwrap(), "True");
    assert_eq!(render_with("{{ history | map(attribute='title') | join }}", &user).unwrap(), "Heat");
}

#[test]
fn a_syntax_error_names_file_and_line() {
    let error = render_with("one\n{% for x %}\n", &viewer(0)).unwrap_err().to_string();
    assert!(error.contains("mine.j2, line 2"), "{error}");
    let error = render_with("one\ntwo\n{{ id | nosuch }}", &viewer(0)).unwrap_err().to_string();
    assert!(error.contains("mine.j2, line 3") && error.contains("nosuch"), "{error}");
}

#[test]
fn an_unknown_template_is_refused_with_the_shipped_ones() {
    let refuse = |user: &str| {
        let config = PromptConfig { user: user.into(), max_tokens: Some(500), ..Default::default() };
        PromptRenderer::new(&config, completion_model(), 256).unwrap_err().to_string()
    };
    let error = refuse("kar/movies");
    assert!(error.contains("\"kar/movies\"") && error.contains("rlmrec/books, plain/films"), "{error}");
    assert!(refuse("missing/mine.j2").contains("missing/mine.j2"));
}

#[test]
fn the_oldest_history_is_dropped_first() {
    let source = "{% for film in history %}{{ film.title }}\n{% endfor %}";
    let config = PromptConfig { max_tokens: Some(40), ..Default::default() };
    let prompt = renderer_of(source, config).unwrap().render(&viewer(100)).unwrap();
    assert!(prompt.history_used > 2 && prompt.tokens.len() <= 40, "{prompt:?}");
    let expected: String = (100 - prompt.history_used..100).map(|i| format!("Film {i}\n")).collect();
    assert_eq!(prompt.text, expected);
    let config = PromptConfig { max_tokens: Some(500), max_history: Some(3), ..Default::default() };
    let prompt = renderer_of(source, config).unwrap().render(&viewer(100)).unwrap();
    assert_eq!((prompt.text.as_str(), prompt.history_used), ("Film 97\nFilm 98\nFilm 99\n", 3));
}

#[test]
fn a_prompt_too_long_without_history_is_refused() {
    let config = PromptConfig { max_tokens: Some(3), ..Default::default() };
    let error = renderer_of("A rather long prompt about films.", config).unwrap();
    let error = error.render(&viewer(1)).unwrap_err();
    assert!(matches!(error, PromptError::TooLong { tokens: 4.., budget: 3, .. }), "{error}");
}

#[test]
fn a_budget_must_leave_room_in_the_model() {
    for max_tokens in [0, 1024] {
        let error = renderer_of("", PromptConfig { max_tokens: Some(max_tokens), ..Default::default() }).unwrap_err();
        assert!(error.to_string().contains("1024 positions"), "{error}");
    }
}

#[test]
fn a_budget_must_leave_room_in_a_sliding_window() {
    let directory = tempfile::tempdir().unwrap();
    for file in ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"] {
        std::fs::copy(fixture().join(file), directory.path().join(file)).unwrap();
    }
    let config =
        json!({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 1024, "sliding_window": 64});
    std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    let model = ModelFiles::open(directory.path()).unwrap();
    let config = PromptConfig { max_tokens: Some(100), ..Default::default() };
    let error = PromptRenderer::new(&config, &model, 16).unwrap_err();
    assert!(matches!(error, PromptError::Budget { budget: 100, positions: 64 }), "{error}");
}

#[test]
fn the_default_budget_fits_the_model() {
    let unset = PromptConfig::default();
    for (positions, max_new_tokens, expected) in
        [(usize::MAX, 256, 1024), (1280, 256, 1024), (1024, 256, 768), (1024, 1000, 512), (512, 2000, 256)]
    {
        assert_eq!(unset.budget(positions, max_new_tokens), expected, "of {positions} positions");
    }
    let renderer = PromptRenderer::new(&unset, completion_model(), 256).unwrap();
    assert_eq!(renderer.max_tokens, 768, "the model has 1,024 positions");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn kept_history_fits_and_one_more_interaction_would_not(
        lengths in prop::collection::vec(0usize..30, 0..60), budget in 20usize..200,
    ) {
        let titled = |(i, words): (usize, &usize)| json!({"title": format!("{i}{}", " night".repeat(*words))});
        let history: Vec<Value> = lengths.iter().enumerate().map(titled).collect();
        let user = entity(Kind::User, json!({}), history);
        let source = "Films:\n{% for film in history %}- {{ film.title }}\n{% endfor %}";
        let config = |max_tokens, max_history| {
            PromptConfig { max_tokens: Some(max_tokens), max_history, ..Default::default() }
        };
        let prompt = renderer_of(source, config(budget, None)).unwrap().render(&user).unwrap();
        prop_assert!(prompt.tokens.len() <= budget);
        if prompt.history_used < lengths.len() {
            let one_more = renderer_of(source, config(1023, Some(prompt.history_used + 1))).unwrap();
            prop_assert!(one_more.render(&user).unwrap().tokens.len() > budget);
        }
    }
}

const CHAT_TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}\
    {% if add_generation_prompt %}[assistant]{% endif %}";

fn hello_with(chat: Chat, system: Option<&str>, model: &ModelFiles) -> Result<RenderedPrompt, PromptError> {
    let system = system.map(str::to_owned);
    let config = PromptConfig { chat, system, max_tokens: Some(100), ..Default::default() };
    renderer_for(model, "hello.jinja", "Hello {{ id }}\n", config)?.render(&viewer(0))
}

#[test]
fn beginning_of_text_is_there_once_with_and_without_chat() {
    let (chat_model, plain_model) = (model_with(Some(CHAT_TEMPLATE)), completion_model());
    for (chat, model, expected) in [
        (Chat::Auto, &chat_model, "<s>[user]Hello 12[assistant]"),
        (Chat::Always, &chat_model, "<s>[user]Hello 12[assistant]"),
        (Chat::Never, &chat_model, "Hello 12\n"),
        (Chat::Auto, plain_model, "Hello 12\n"),
    ] {
        let prompt = hello_with(chat, None, model).unwrap();
        assert_eq!(prompt.text, expected);
        assert_eq!(prompt.tokens.iter().filter(|t| **t == 0).count(), 1, "{chat:?}");
        assert_eq!(prompt.tokens[0], 0);
    }
    let error = hello_with(Chat::Always, None, plain_model).unwrap_err();
    assert!(matches!(error, PromptError::NoChatTemplate { .. }), "{error}");
}

#[test]
fn the_system_message_comes_first() {
    let chat = hello_with(Chat::Auto, Some("Be brief."), &model_with(Some(CHAT_TEMPLATE))).unwrap();
    assert_eq!(chat.text, "<s>[system]Be brief.[user]Hello 12[assistant]");
    let plain = hello_with(Chat::Auto, Some("Be brief."), completion_model()).unwrap();
    assert_eq!(plain.text, "Be brief.\n\nHello 12\n");
}

#[test]
fn the_digest_changes_with_all_that_changes_prompts() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mine.j2");
    let digest = |source: &str, chat: Option<&str>, config: PromptConfig| {
        std::fs::write(&path, source).unwrap();
        let config = PromptConfig { user: path.to_str().unwrap().into(), ..config };
        let renderer = PromptRenderer::new(&config, &model_with(chat), 256).unwrap();
        [renderer.digest(Kind::User), renderer.digest(Kind::Item)]
    };
    let config = PromptConfig { max_tokens: Some(500), ..Default::default() };
    let original = digest("a", None, config.clone());
    assert_eq!(digest("a", None, config.clone()), original);
    let [user, item] = digest("b", None, config.clone());
    assert_ne!(user, original[0]);
    assert_eq!(item, original[1], "the item's template is the same");
    for [user, _] in [
        digest("a", Some(CHAT_TEMPLATE), config.clone()),
        digest("a", None, PromptConfig { system: Some("s".into()), ..config.clone() }),
        digest("a", None, PromptConfig { max_tokens: Some(501), ..config.clone() }),
        digest("a", None, PromptConfig { max_history: Some(5), ..config }),
    ] {
        assert_ne!(user, original[0]);
    }
}

#[test]
fn the_configuration_reads_back_and_refuses_what_it_does_not_know() {
    let parse = |json: Value| serde_json::from_value::<PromptConfig>(json);
    assert_eq!(parse(json!({})).unwrap(), PromptConfig::default());
    for chat in [json!(true), json!(false), json!("auto")] {
        let config = parse(json!({"chat": chat, "max_history": 9})).unwrap();
        assert_eq!(json!(config)["chat"], chat);
        assert_eq!(parse(json!(config)).unwrap(), config);
    }
    let error = parse(json!({"chat": "maybe"})).unwrap_err().to_string();
    assert!(error.contains("true, false or \"auto\""), "{error}");
    assert!(parse(json!({"max_token": 5})).unwrap_err().to_string().contains("max_token"));
}
