//! The settings of a sentence-transformers directory beyond config.json: pooling, normalisation, lengths, prompts.

use std::path::Path;

use laser_model::read_json;
use laser_schema::Pooling;
use serde_json::Value;

use super::EncoderError;
use super::bert::unsupported;

const MODULES: &str = "modules.json";
const SENTENCE_BERT: &str = "sentence_bert_config.json";
const PROMPTS: &str = "config_sentence_transformers.json";

/// The settings of the directory; empty for a plain model.
#[derive(Debug, Default)]
pub(super) struct Settings {
    /// The pooling's file and its content.
    pub(super) pooling: Option<(std::path::PathBuf, Value)>,
    pub(super) normalise: bool,
    pub(super) max_tokens: Option<usize>,
    pub(super) lower_case: bool,
    pub(super) prefix: Option<String>,
}

impl Settings {
    pub(super) fn read(directory: &Path) -> Result<Self, EncoderError> {
        let mut settings = Self::default();
        settings.read_modules(directory)?;
        let sentence_bert = read_json(&directory.join(SENTENCE_BERT))?;
        let length = sentence_bert["max_seq_length"].as_u64();
        settings.max_tokens = length.and_then(|n| usize::try_from(n).ok());
        settings.lower_case = sentence_bert["do_lower_case"] == true;
        let prompts = read_json(&directory.join(PROMPTS))?;
        if let Some(name) = prompts["default_prompt_name"].as_str() {
            let prompt = prompts["prompts"][name].as_str();
            settings.prefix = prompt.map(str::to_owned);
        }
        Ok(settings)
    }

    fn read_modules(&mut self, directory: &Path) -> Result<(), EncoderError> {
        let file = directory.join(MODULES);
        let modules = read_json(&file)?;
        for (index, module) in modules.as_array().into_iter().flatten().enumerate() {
            let path = module["path"].as_str().unwrap_or_default();
            let kind = module["type"].as_str().unwrap_or_default();
            let wrong = |key: &str, expected: &str| {
                let name = format!("[{index}].{key}");
                unsupported(&file, &name, &module[key], expected)
            };
            match kind.rsplit('.').next() {
                Some("Transformer") if path.is_empty() => {}
                Some("Transformer") => {
                    let expected = "expected \"\": move its files beside modules.json";
                    return Err(wrong("path", expected));
                }
                Some("Pooling") => {
                    let file = directory.join(path).join("config.json");
                    if !file.is_file() {
                        return Err(EncoderError::MissingFile {
                            directory: directory.to_owned(),
                            file: format!("{path}/config.json"),
                            remedy: "modules.json names it: fetch the model again, with all its folders",
                        });
                    }
                    self.pooling = Some((file.clone(), read_json(&file)?));
                }
                Some("Normalize") => self.normalise = true,
                _ => {
                    let expected =
                        "the encoder knows Transformer, Pooling and Normalize; choose a model without others";
                    return Err(wrong("type", expected));
                }
            }
        }
        Ok(())
    }

    /// Returns the pooling that the directory sets; `None` if it sets none.
    pub(super) fn pooling(&self) -> Result<Option<Pooling>, EncoderError> {
        let Some((file, json)) = &self.pooling else {
            return Ok(None);
        };
        // Older files have one flag per mode, newer ones a name.
        let flags = json.as_object().into_iter().flatten();
        let on: Vec<&str> = flags
            .filter(|(_, value)| **value == true)
            .filter_map(|(key, _)| key.strip_prefix("pooling_mode_"))
            .collect();
        let mode = json["pooling_mode"].as_str();
        match mode.map_or(on, |mode| vec![mode]).as_slice() {
            ["mean" | "mean_tokens"] => Ok(Some(Pooling::Mean)),
            ["cls" | "cls_token"] => Ok(Some(Pooling::Cls)),
            others => Err(unsupported(
                file,
                "pooling_mode",
                &others.join(" and ").into(),
                "the encoder knows mean and cls; choose one with [encoder] pooling, or another model",
            )),
        }
    }

    /// Whether a prefix counts in the mean, as all tokens do here.
    pub(super) fn pools_prompt(&self) -> bool {
        let said = self.pooling.as_ref().map(|(_, json)| &json["include_prompt"]);
        said.is_none_or(|include| *include != false)
    }
}
