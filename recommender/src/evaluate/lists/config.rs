//! The `[eval.lists]` section.

use anyhow::{Result, ensure};
use laser_decode::Method;
use serde::{Deserialize, Serialize};

/// The `[eval.lists]` section.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ListsEvalConfig {
    /// The table of the items that users took later: `id` and `items`.
    pub truth: String,
    /// A smaller difference of recall, NDCG or hit rate does not matter.
    pub margin: f64,
    /// The `[[eval.lists.makers]]` sections.
    pub makers: Vec<MakerConfig>,
}

impl Default for ListsEvalConfig {
    fn default() -> Self {
        Self { truth: String::new(), margin: 0.002, makers: Vec::new() }
    }
}

/// `[[eval.lists.makers]]`: lists of one origin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MakerConfig {
    /// The origin, as reports name it.
    pub name: String,
    /// Its lists, a path per seed: the root of an output (its newest complete night is taken), one published folder of
    /// it, or a table with the columns of the truth.
    pub paths: Vec<String>,
}

impl ListsEvalConfig {
    /// Checks what the types leave open.
    ///
    /// # Errors
    /// The first key whose value makes no sense.
    pub fn validate(&self) -> Result<()> {
        let Self { truth, margin, makers } = self;
        ensure!(
            !truth.is_empty(),
            "[eval.lists] truth: not set; give a table of users with the items that they took later (`laser prepare \
             atspeed` writes one)"
        );
        ensure!(
            *margin > 0.0 && *margin < 0.5,
            "[eval.lists] margin = {margin}: expected a difference of recall, such as 0.002"
        );
        for (place, maker) in makers.iter().enumerate() {
            maker.validate()?;
            let name = &maker.name;
            ensure!(
                makers[..place].iter().all(|other| other.name != *name),
                "[[eval.lists.makers]] name = {name:?} is there twice; give the seeds of one maker as its paths"
            );
        }
        Ok(())
    }
}

impl MakerConfig {
    fn validate(&self) -> Result<()> {
        let Self { name, paths } = self;
        ensure!(!name.is_empty(), "[[eval.lists.makers]] name: empty");
        ensure!(
            Method::ALL.iter().all(|method| method.as_str() != name),
            "[[eval.lists.makers]] name = {name:?} is that of a baseline; choose another"
        );
        ensure!(
            !paths.is_empty() && paths.iter().all(|path| !path.is_empty()),
            "[[eval.lists.makers]] {name:?}: set paths to the outputs or folders of its lists, one per seed"
        );
        let twice = (1..paths.len()).find(|&place| paths[..place].contains(&paths[place]));
        ensure!(
            twice.is_none(),
            "[[eval.lists.makers]] {name:?}: paths has {:?} twice; a seed counts once",
            twice.map_or("", |place| &paths[place])
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn maker(name: &str, paths: &[&str]) -> MakerConfig {
        MakerConfig { name: name.to_owned(), paths: paths.iter().map(ToString::to_string).collect() }
    }

    #[test]
    fn what_cannot_be_judged_is_refused_by_its_key() {
        let config = ListsEvalConfig { truth: "truth.parquet".to_owned(), ..ListsEvalConfig::default() };
        assert!(config.validate().is_ok(), "baselines need no maker");
        assert!(ListsEvalConfig::default().validate().unwrap_err().to_string().contains("[eval.lists] truth: not set"));
        let margin = ListsEvalConfig { margin: 0.0, ..config.clone() };
        assert!(margin.validate().unwrap_err().to_string().contains("[eval.lists] margin = 0"));
        for (makers, expected) in [
            (vec![maker("", &["a"])], "name: empty"),
            (vec![maker("item-kNN", &["a"])], "name = \"item-kNN\" is that of a baseline"),
            (vec![maker("m", &[])], "\"m\": set paths"),
            (vec![maker("m", &["a", ""])], "\"m\": set paths"),
            (vec![maker("m", &["a", "b", "a"])], "paths has \"a\" twice"),
            (vec![maker("m", &["a"]), maker("m", &["b"])], "name = \"m\" is there twice"),
        ] {
            let error = ListsEvalConfig { makers, ..config.clone() }.validate().unwrap_err().to_string();
            assert!(error.starts_with("[[eval.lists.makers]]") && error.contains(expected), "{error}");
        }
    }
}
