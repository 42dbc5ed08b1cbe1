//! Where values come from: the file, over it the environment, over that `--set`.

use std::path::Path;

use anyhow::{Result, anyhow, ensure};
use figment::error::Kind as FigmentKind;
use figment::providers::{Env, Format, Serialized, Toml};
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};
use serde::de::DeserializeOwned;

/// Reads a configuration of type `T`. `defaults` are those of sections that differ from their type's.
///
/// # Errors
/// Naming the file, variable or option, the key, and the nearest key where one does not exist.
pub(super) fn read<T: DeserializeOwned>(path: &Path, settings: &[String], defaults: impl Provider) -> Result<T> {
    ensure!(path.is_file(), "{}: no such configuration file", path.display());
    let env = Env::prefixed("LASER_").filter(|key| key.as_str().contains("__")).split("__");
    let mut figment = Figment::from(defaults).merge(Toml::file_exact(path)).merge(env);
    for setting in settings {
        figment = figment.merge(Setting::parse(setting)?);
    }
    figment.extract().map_err(|error| explain(&error))
}

/// A `--set` option.
struct Setting {
    key: String,
    value: Value,
}

impl Setting {
    /// `a.b=value`, the value in TOML or else taken as text.
    fn parse(setting: &str) -> Result<Self> {
        let (key, text) = setting
            .split_once('=')
            .ok_or_else(|| anyhow!("--set {setting}: expected KEY=VALUE, such as run.limit=100"))?;
        let parsed: Option<Dict> = Toml::from_str(&format!("value = {text}")).ok();
        // A date is a date in TOML, and in the file it is text.
        let is_date = |value: &Value| value.as_dict().is_some() && !text.starts_with('{');
        let value = parsed
            .and_then(|mut dict| dict.remove("value"))
            .filter(|value| !is_date(value))
            .unwrap_or_else(|| Value::from(text));
        Ok(Self { key: key.to_owned(), value })
    }
}

impl Provider for Setting {
    fn metadata(&self) -> Metadata {
        Metadata::named(format!("--set {}", self.key))
    }

    fn data(&self) -> figment::Result<Map<Profile, Dict>> {
        Serialized::from(&self.value, Profile::Default).key(&self.key).data()
    }
}

/// One line: where, which key, what is wrong, and the nearest key where one does not exist.
fn explain(error: &figment::Error) -> anyhow::Error {
    let source = error.metadata.as_ref().map_or_else(
        || "configuration".to_owned(),
        |m| m.source.as_ref().map_or_else(|| m.name.to_string(), ToString::to_string),
    );
    let key = error.path.join(".");
    match &error.kind {
        FigmentKind::UnknownField(field, known) => {
            let full = match key.is_empty() || key.ends_with(field.as_str()) {
                true if key.is_empty() => field.clone(),
                true => key,
                false => format!("{key}.{field}"),
            };
            let nearest =
                known.iter().map(|name| (strsim::jaro_winkler(field, name), *name)).max_by(|a, b| a.0.total_cmp(&b.0));
            let hint = nearest.map_or_else(String::new, |(_, name)| format!("; did you mean {name:?}?"));
            anyhow!("{source}: there is no key {full:?}{hint} The keys here: {}", known.join(", "))
        }
        kind => anyhow!("{source}: {key}: {kind}"),
    }
}
