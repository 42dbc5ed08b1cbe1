//! Models by hub id: fetched once into the cache that all Hugging Face tools share, then read from there.
//!
//! A branch is pinned to one commit before anything is fetched, and is recorded only when all files are there, so
//! a half-fetched or moved branch is never mistaken for a model. An interrupted file goes on where it stopped.

use std::io;
use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use ureq::ErrorKind;

use super::{
    CHAT_TEMPLATE, CONFIG, GENERATION_CONFIG, HEADS, ModelError, PYTORCH, SAFETENSORS, SAFETENSORS_INDEX, TOKENIZER,
    TOKENIZER_CONFIG, heads_in, shard_names, weights_in,
};

/// The small files.
const FILES: [&str; 9] = [
    CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    GENERATION_CONFIG,
    CHAT_TEMPLATE,
    // What makes a text encoder of a model (sentence-transformers).
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
];

/// What a repository is fetched for, which tells the files that it must have.
#[derive(Debug, Clone, Copy)]
enum Use {
    /// A whole model.
    Model,
    /// A whole model, or what drafts from the features of another one and has no tokenizer.
    Drafts,
}

impl Use {
    fn required(self) -> &'static [&'static str] {
        match self {
            Self::Model => &[CONFIG, TOKENIZER],
            Self::Drafts => &[CONFIG],
        }
    }

    /// The file of the weights, or the index of their files, of which the first that is there counts.
    fn weights(self) -> Vec<&'static str> {
        let whole = [SAFETENSORS_INDEX, SAFETENSORS];
        match self {
            Self::Model => whole.to_vec(),
            Self::Drafts => [&HEADS[..], &whole, &[PYTORCH]].concat(),
        }
    }

    fn is_complete(self, directory: &Path) -> bool {
        let has_weights = weights_in(directory).is_ok();
        match self {
            Self::Model => directory.join(TOKENIZER).is_file() && has_weights,
            Self::Drafts => has_weights || heads_in(directory).is_some() || directory.join(PYTORCH).is_file(),
        }
    }
}

/// Where hub ids are fetched from and kept.
#[derive(Debug, Clone)]
pub struct Hub {
    /// The hub's address (`HF_ENDPOINT`).
    pub endpoint: String,
    /// The folder of fetched models (`HF_HOME` + `/hub`).
    pub cache: PathBuf,
    /// The access token (`HF_TOKEN`, or the one that `hf auth login` stored).
    pub token: Option<String>,
    /// Never ask the hub, use what is cached (`HF_HUB_OFFLINE`).
    pub offline: bool,
    /// Draw a bar for each file on a terminal's standard error.
    pub progress: bool,
}

impl Hub {
    /// The hub as the usual environment variables describe it.
    pub fn from_env() -> Self {
        let home = std::env::home_dir().unwrap_or_default();
        Self::from_vars(|name| std::env::var(name).ok(), &home)
    }

    fn from_vars(var: impl Fn(&str) -> Option<String>, home: &Path) -> Self {
        let set = |name: &str| var(name).filter(|value| !value.is_empty());
        let hf_home = set("HF_HOME").map_or(home.join(".cache/huggingface"), PathBuf::from);
        let cache = hf_home.join("hub");
        let offline = set("HF_HUB_OFFLINE").map(|value| value.to_uppercase());
        Self {
            endpoint: set("HF_ENDPOINT").unwrap_or("https://huggingface.co".into()),
            token: set("HF_TOKEN").or_else(|| Cache::new(cache.clone()).token()),
            offline: offline.is_some_and(|v| ["1", "ON", "YES", "TRUE"].contains(&v.as_str())),
            progress: true,
            cache,
        }
    }

    fn repo(&self, id: &str, revision: &str) -> Result<ApiRepo, ApiError> {
        let api = ApiBuilder::from_cache(Cache::new(self.cache.clone()))
            .with_endpoint(self.endpoint.trim_end_matches('/').to_owned())
            .with_token(self.token.clone())
            .with_progress(self.progress)
            .build()?;
        Ok(api.repo(model_repo(id, revision)))
    }

    fn cached(&self, id: &str, revision: &str) -> CacheRepo {
        Cache::new(self.cache.clone()).repo(model_repo(id, revision))
    }
}

/// Why a model was not fetched.
struct Unfetched {
    reason: String,
    may_pass: bool,
}

impl From<String> for Unfetched {
    fn from(reason: String) -> Self {
        Self { reason, may_pass: false }
    }
}

impl From<ApiError> for Unfetched {
    fn from(error: ApiError) -> Self {
        Self { reason: error.to_string(), may_pass: may_pass(&error) }
    }
}

/// Whether the hub did not answer or asks to be left alone, a transfer broke off, or another process fetches the file.
fn may_pass(error: &ApiError) -> bool {
    match error {
        ApiError::RequestError(error) => match &**error {
            ureq::Error::Status(status, _) => matches!(*status, 408 | 429 | 500..=599),
            ureq::Error::Transport(transport) => matches!(
                transport.kind(),
                ErrorKind::Dns | ErrorKind::ConnectionFailed | ErrorKind::Io | ErrorKind::ProxyConnect
            ),
        },
        ApiError::IoError(error) => matches!(
            error.kind(),
            io::ErrorKind::TimedOut
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::UnexpectedEof
        ),
        ApiError::LockAcquisition(_) => true,
        ApiError::TooManyRetries(error) => may_pass(error),
        _ => false,
    }
}

fn model_repo(id: &str, revision: &str) -> Repo {
    Repo::with_revision(id.into(), RepoType::Model, revision.into())
}

/// The local path of a model: `model` itself where it exists, else a hub id `org/name`, optionally with `@revision`
/// (a branch, tag or commit; `main` if not given), fetched unless it is complete in the cache.
///
/// A branch that is cached is not looked up again: name another revision for a newer one. Blocks: from
/// async code, call it on a thread for blocking work.
///
/// # Errors
/// [`ModelError::NotFound`] for a path that does not exist (starts with `.`, `/` or `~`, or not exactly one slash),
/// [`ModelError::Hub`], [`ModelError::HubAway`], [`ModelError::Offline`].
pub fn resolve(model: &str, hub: &Hub) -> Result<PathBuf, ModelError> {
    resolve_for(Use::Model, model, hub)
}

/// The same of what drafts for a model: a whole model, or an EAGLE layer or heads as they are published, without a
/// tokenizer.
///
/// # Errors
/// Those of [`resolve`].
pub fn resolve_drafts(drafts: &str, hub: &Hub) -> Result<PathBuf, ModelError> {
    resolve_for(Use::Drafts, drafts, hub)
}

fn resolve_for(purpose: Use, model: &str, hub: &Hub) -> Result<PathBuf, ModelError> {
    if Path::new(model).exists() {
        return Ok(PathBuf::from(model));
    }
    let Some((id, revision)) = parse_id(model) else {
        return Err(ModelError::NotFound { model: model.to_owned() });
    };
    let cached = hub.cached(id, revision);
    if let Some(config) = cached.get(CONFIG)
        && let Some(directory) = config.parent()
        && purpose.is_complete(directory)
    {
        return Ok(directory.to_owned());
    }
    if hub.offline {
        return Err(ModelError::Offline { model: model.to_owned(), cache: hub.cache.clone() });
    }
    fetch(purpose, hub, id, revision).map_err(|Unfetched { reason, may_pass }| {
        let (model, endpoint) = (model.to_owned(), hub.endpoint.clone());
        match may_pass {
            true => ModelError::HubAway { model, endpoint, reason },
            false => ModelError::Hub { model, endpoint, reason },
        }
    })
}

/// `org/name` and the revision, `None` for what can only be a path.
fn parse_id(model: &str) -> Option<(&str, &str)> {
    let (id, revision) = model.split_once('@').unwrap_or((model, "main"));
    let (organisation, name) = id.split_once('/')?;
    let named = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let revision_ok = !revision.is_empty() && !revision.contains("..");
    (named(organisation) && named(name) && revision_ok).then_some((id, revision))
}

/// Weights come last, so that a complete cache has all the small files too.
fn fetch(purpose: Use, hub: &Hub, id: &str, revision: &str) -> Result<PathBuf, Unfetched> {
    let info = hub.repo(id, revision).and_then(|r| r.info())?;
    let has = |file: &str| info.siblings.iter().any(|s| s.rfilename == file);
    if let Some(missing) = purpose.required().iter().find(|file| !has(file)) {
        return Err(format!("the repository has no {missing}").into());
    }
    let Some(weights) = purpose.weights().into_iter().find(|file| has(file)) else {
        let reason = format!("the repository has no {SAFETENSORS}; fetch another format by hand and give its path");
        return Err(reason.into());
    };
    let pinned = hub.repo(id, &info.sha)?;
    for file in FILES.iter().filter(|file| has(file)) {
        pinned.get(file)?;
    }
    let found = pinned.get(weights)?;
    if weights == SAFETENSORS_INDEX {
        for shard in shard_names(&found).map_err(|e| e.to_string())? {
            pinned.get(&shard)?;
        }
    }
    hub.cached(id, revision).create_ref(&info.sha).map_err(|e| format!("{}: {e}", hub.cache.display()))?;
    let config = pinned.get(CONFIG)?;
    Ok(config.parent().unwrap_or(&config).to_owned())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::{BufRead, BufReader, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};

    use super::*;

    const SHARD: &str = "model-00001-of-00001.safetensors";
    const SHA: &str = "5e1f";

    /// Plays the hub for one repository, `org/tiny`, from memory and notes the requests.
    struct FakeHub {
        endpoint: String,
        requests: Arc<Mutex<Vec<String>>>,
        cache: tempfile::TempDir,
    }

    impl FakeHub {
        fn start(files: &[(&str, &str)]) -> Self {
            let requests = Arc::new(Mutex::new(Vec::new()));
            let files: BTreeMap<String, String> =
                files.iter().map(|(name, content)| (name.to_string(), content.to_string())).collect();
            let noted = requests.clone();
            Self { requests, ..Self::serve(move |stream| answer(stream, &files, &noted)) }
        }

        fn serve(serve: impl Fn(TcpStream) + Send + 'static) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let endpoint = format!("http://{}", listener.local_addr().unwrap());
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    serve(stream.unwrap());
                }
            });
            Self { endpoint, requests: Arc::default(), cache: tempfile::tempdir().unwrap() }
        }

        fn hub(&self) -> Hub {
            Hub {
                endpoint: self.endpoint.clone(),
                cache: self.cache.path().to_owned(),
                token: Some("secret".into()),
                offline: false,
                progress: false,
            }
        }

        fn take_requests(&self) -> Vec<String> {
            std::mem::take(&mut self.requests.lock().unwrap())
        }
    }

    /// The lines of a request.
    fn request(stream: &TcpStream) -> Vec<String> {
        BufReader::new(stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty()).collect()
    }

    /// Answers with this status, to whatever is asked.
    fn fail(mut stream: TcpStream, status: &str) {
        request(&stream);
        write!(stream, "HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").unwrap();
    }

    fn answer(stream: TcpStream, files: &BTreeMap<String, String>, requests: &Mutex<Vec<String>>) {
        let lines = request(&stream);
        let path = lines[0].split(' ').nth(1).unwrap().to_owned();
        let header = |name: &str| {
            let line = lines.iter().find(|l| l.to_lowercase().starts_with(&format!("{name}:")))?;
            Some(line.split_once(": ")?.1.to_owned())
        };
        assert_eq!(header("authorization").as_deref(), Some("Bearer secret"));
        let file = path.strip_prefix(&format!("/org/tiny/resolve/{SHA}/"));
        let (status, headers, body) = if path == "/api/models/org/tiny/revision/main" {
            let siblings: Vec<_> = files.keys().map(|f| serde_json::json!({"rfilename": f})).collect();
            let info = serde_json::json!({"siblings": siblings, "sha": SHA});
            ("200 OK", String::new(), info.to_string())
        } else if let Some((name, content)) = file.and_then(|f| files.get_key_value(f)) {
            let range = header("range").unwrap();
            let (start, end) = range["bytes=".len()..].split_once('-').unwrap();
            let start: usize = start.parse().unwrap();
            let end = end.parse().map_or(content.len(), |end: usize| end + 1);
            let headers = format!(
                "etag: \"{name}\"\r\nx-repo-commit: {SHA}\r\ncontent-range: bytes {start}-{}/{}\r\n",
                end - 1,
                content.len()
            );
            ("206 Partial Content", headers, content[start..end].to_owned())
        } else {
            ("404 Not Found", String::new(), String::new())
        };
        requests.lock().unwrap().push(path);
        write!(
            &stream,
            "HTTP/1.1 {status}\r\n{headers}content-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
    }

    fn tiny() -> Vec<(&'static str, &'static str)> {
        vec![
            (CONFIG, "{}"),
            (TOKENIZER, "{\"version\": \"1.0\"}"),
            (TOKENIZER_CONFIG, "{}"),
            (CHAT_TEMPLATE, "{{ messages }}"),
            ("modules.json", "[]"),
            ("1_Pooling/config.json", "{\"pooling_mode\": \"cls\"}"),
            (SAFETENSORS_INDEX, r#"{"weight_map": {"a": "model-00001-of-00001.safetensors"}}"#),
            (SHARD, "weights"),
            ("pytorch_model.bin", "not wanted"),
        ]
    }

    /// ureq sends local addresses to a proxy too.
    fn behind_proxy() -> bool {
        let set = ["ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY"]
            .into_iter()
            .flat_map(|name| [name.to_owned(), name.to_lowercase()])
            .find(|name| std::env::var_os(name).is_some());
        if let Some(name) = &set {
            // Past the test harness, which shows only what failing tests print; tests/run.sh ends with these lines.
            let skipped = format!("skipped: {name} is set, so the fake hub on 127.0.0.1 is out of reach\n");
            std::io::stderr().write_all(skipped.as_bytes()).unwrap();
        }
        set.is_some()
    }

    #[test]
    fn a_hub_id_is_fetched_once_and_then_read_from_the_cache() {
        if behind_proxy() {
            return;
        }
        let server = FakeHub::start(&tiny());
        let directory = resolve("org/tiny", &server.hub()).unwrap();
        for (file, content) in tiny() {
            let found = std::fs::read_to_string(directory.join(file)).ok();
            let wanted = (file != "pytorch_model.bin").then_some(content);
            assert_eq!(found.as_deref(), wanted, "{file}");
        }
        assert!(server.take_requests().last().unwrap().ends_with(SHARD));
        let offline = Hub { offline: true, ..server.hub() };
        for hub in [server.hub(), offline] {
            assert_eq!(resolve("org/tiny", &hub).unwrap(), directory);
        }
        assert_eq!(server.take_requests(), [""; 0], "the cache is complete");
    }

    #[test]
    fn what_drafts_is_fetched_without_a_tokenizer_and_with_the_weights_that_are_read() {
        if behind_proxy() {
            return;
        }
        let [heads, pickled, single] = ["medusa_lm_head.safetensors", "medusa_lm_head.pt", SAFETENSORS];
        let whole: Vec<&str> = tiny().into_iter().map(|(file, _)| file).filter(|file| *file != PYTORCH).collect();
        let repositories: [(&[&str], &[&str]); 6] = [
            (&[CONFIG, heads, pickled, single], &[CONFIG, heads]),
            (&[CONFIG, pickled], &[CONFIG, pickled]),
            (&[CONFIG, "acceptance_head.safetensors"], &[CONFIG, "acceptance_head.safetensors"]),
            (&[CONFIG, single, PYTORCH], &[CONFIG, single]),
            (&[CONFIG, PYTORCH], &[CONFIG, PYTORCH]),
            (&[&whole[..], &[PYTORCH]].concat(), &whole),
        ];
        for (files, fetched) in repositories {
            let content =
                |file: &str| tiny().into_iter().find(|(name, _)| *name == file).map_or("weights", |(_, text)| text);
            let files: Vec<(&str, &str)> = files.iter().map(|file| (*file, content(file))).collect();
            let server = FakeHub::start(&files);
            let directory = resolve_drafts("org/tiny", &server.hub()).unwrap();
            for (file, _) in &files {
                assert_eq!(directory.join(file).is_file(), fetched.contains(file), "{file} of {files:?}");
            }
            let offline = Hub { offline: true, ..server.hub() };
            assert_eq!(resolve_drafts("org/tiny", &offline).unwrap(), directory);
            if !fetched.contains(&TOKENIZER) {
                let error = resolve("org/tiny", &server.hub()).unwrap_err().to_string();
                assert!(error.contains("no tokenizer.json"), "{error}");
            }
        }
    }

    #[test]
    fn an_interrupted_fetch_goes_on_with_what_is_missing() {
        if behind_proxy() {
            return;
        }
        let mut files = tiny();
        files.retain(|(name, _)| *name != SHARD);
        let server = FakeHub::start(&files);
        let error = resolve("org/tiny", &server.hub()).unwrap_err().to_string();
        assert!(error.contains("404") && error.contains(SHARD), "{error}");
        let complete = FakeHub::start(&tiny());
        let hub = Hub { endpoint: complete.endpoint.clone(), ..server.hub() };
        assert!(resolve("org/tiny", &hub).unwrap().join(SHARD).exists());
        let again = complete.take_requests();
        assert!(again.iter().all(|r| r.starts_with("/api") || r.ends_with(SHARD)), "{again:?}");
    }

    #[test]
    fn a_hub_that_is_away_is_told_apart_from_one_that_refuses() {
        if behind_proxy() {
            return;
        }
        let failing = |status: &'static str| FakeHub::serve(move |stream| fail(stream, status));
        for (status, is_away) in [
            ("503 Service Unavailable", true),
            ("429 Too Many Requests", true),
            ("500 Internal Server Error", true),
            ("401 Unauthorized", false),
        ] {
            let error = resolve("org/tiny", &failing(status).hub()).unwrap_err();
            assert_eq!(matches!(error, ModelError::HubAway { .. }), is_away, "{error}");
            assert!(error.to_string().contains(&status[..3]), "{error}");
        }
        let server = failing("503 Service Unavailable");
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let hub = Hub { endpoint: format!("http://{closed}"), ..server.hub() };
        let error = resolve("org/tiny", &hub).unwrap_err();
        assert!(matches!(error, ModelError::HubAway { .. }), "{error}");
    }

    #[test]
    fn a_repository_without_safetensors_or_tokenizer_is_refused() {
        if behind_proxy() {
            return;
        }
        for (file, reason) in [(TOKENIZER, "no tokenizer.json"), (SAFETENSORS_INDEX, "no model.safetensors")] {
            let mut files = tiny();
            files.retain(|(name, _)| *name != file);
            let error = resolve("org/tiny", &FakeHub::start(&files).hub()).unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
        }
        let error = resolve("org/other", &FakeHub::start(&tiny()).hub()).unwrap_err();
        assert!(error.to_string().contains("404"), "{error}");
    }

    #[test]
    fn paths_never_go_to_the_hub() {
        let server = FakeHub::start(&tiny());
        let hub = server.hub();
        let words = r"./org/name /org/name ../name ~/name a/b/c name org/ /name org/name@ org/name@../../main org\name";
        for path in words.split(' ').chain(["org/na me", ""]) {
            let error = resolve(path, &hub).unwrap_err();
            assert!(matches!(error, ModelError::NotFound { .. }), "{path}: {error}");
        }
        let local = server.cache.path();
        assert_eq!(resolve(local.to_str().unwrap(), &hub).unwrap(), local);
        assert_eq!(server.take_requests(), [""; 0]);
    }

    #[test]
    fn offline_never_asks() {
        let server = FakeHub::start(&tiny());
        let hub = Hub { offline: true, ..server.hub() };
        let error = resolve("org/tiny@v2", &hub).unwrap_err();
        assert!(matches!(error, ModelError::Offline { .. }), "{error}");
        assert_eq!(server.take_requests(), [""; 0]);
    }

    #[test]
    fn a_revision_may_hold_slashes() {
        assert_eq!(parse_id("org/name"), Some(("org/name", "main")));
        assert_eq!(parse_id("org/name@refs/pr/1"), Some(("org/name", "refs/pr/1")));
    }

    #[test]
    fn the_usual_variables_are_honoured() {
        let home = Path::new("home");
        let default = Hub::from_vars(|_| None, home);
        assert_eq!(default.endpoint, "https://huggingface.co");
        assert_eq!(default.cache, home.join(".cache/huggingface/hub"));
        assert!(!default.offline && default.token.is_none());
        let set = Hub::from_vars(
            |name| {
                let value = match name {
                    "HF_HOME" => "hf",
                    "HF_TOKEN" => "secret",
                    "HF_ENDPOINT" => "http://mirror",
                    "HF_HUB_OFFLINE" => "true",
                    _ => return None,
                };
                Some(value.to_owned())
            },
            home,
        );
        assert_eq!(set.endpoint, "http://mirror");
        assert_eq!(set.cache, Path::new("hf/hub"));
        assert_eq!(set.token.as_deref(), Some("secret"));
        assert!(set.offline);
    }
}
