//! Prompt templates: Jinja text, shipped or from a file, in which an unknown field is an error.
//!
//! Templates have two filters besides Jinja's own. `listed` writes a list with commas (`listed(3)` its first three
//! items) and anything else unchanged. `row("title", "genres")` writes those of an object's fields that exist,
//! separated by ` | `. Custom templates can also include the parts that the shipped templates share.

use std::borrow::Cow;
use std::error::Error as _;
use std::path::Path;

use laser_schema::Kind;
use minijinja::value::{Rest, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior, Value};

use super::PromptError;
use super::fields::Fields;

macro_rules! shipped {
    ($($name:literal),*) => {
        [$(Shipped {
            name: $name,
            user: include_str!(concat!("../../templates/", $name, "/user.j2")),
            item: include_str!(concat!("../../templates/", $name, "/item.j2")),
        }),*]
    };
}

struct Shipped {
    name: &'static str,
    user: &'static str,
    item: &'static str,
}

/// KAR (Xi et al. 2023), TRAWL (Luo et al. 2024), ONCE (Liu et al. 2024) and RLMRec (Ren et al. 2024), in our own
/// words.
const SHIPPED: [Shipped; 9] = shipped![
    "kar/films", "kar/books", "trawl/films", "trawl/books", "once/films", "once/books", "rlmrec/films", "rlmrec/books",
    "plain/films"
];

/// What is shipped for users alone: the identifiers of a history, which lists are made from.
const FOR_USERS: [(&str, &str); 1] = [("lists/codes", include_str!("../../templates/lists/codes/user.j2"))];

/// The shipped templates of a kind by name.
pub(super) fn shipped_for(kind: Kind) -> Vec<(&'static str, &'static str)> {
    let both = SHIPPED.map(|Shipped { name, user, item }| match kind {
        Kind::User => (name, user),
        Kind::Item => (name, item),
    });
    let for_users = FOR_USERS.into_iter().filter(|_| kind == Kind::User);
    both.into_iter().chain(for_users).collect()
}

/// The parts that templates can include, by name.
const PARTS: [(&str, &str); 5] = [
    ("facts", include_str!("../../templates/parts/facts.j2")),
    ("films/user", include_str!("../../templates/parts/films_user.j2")),
    ("films/item", include_str!("../../templates/parts/films_item.j2")),
    ("books/user", include_str!("../../templates/parts/books_user.j2")),
    ("books/item", include_str!("../../templates/parts/books_item.j2")),
];

#[derive(Debug)]
struct Template {
    name: String,
    source: Cow<'static, str>,
}

/// The templates of both kinds, checked for syntax.
#[derive(Debug)]
pub(super) struct Templates {
    environment: Environment<'static>,
    user: Template,
    item: Template,
}

impl Templates {
    pub(super) fn load(user: &str, item: &str) -> Result<Self, PromptError> {
        let mut environment = environment();
        for (name, source) in PARTS {
            let added = environment.add_template(name, source);
            added.map_err(|e| template_error(name, &e))?;
        }
        let (user, item) = (load(user, Kind::User)?, load(item, Kind::Item)?);
        for Template { name, source } in [&user, &item] {
            let added = environment.add_template_owned(name.clone(), source.clone().into_owned());
            added.map_err(|e| template_error(name, &e))?;
        }
        Ok(Self { environment, user, item })
    }

    fn of(&self, kind: Kind) -> &Template {
        match kind {
            Kind::User => &self.user,
            Kind::Item => &self.item,
        }
    }

    /// Renders the text for an entity with its latest `kept` interactions.
    pub(super) fn render(&self, fields: &mut Fields<'_>, kept: usize) -> Result<String, PromptError> {
        let name = &self.of(fields.kind()).name;
        let template = self.environment.get_template(name);
        let rendered = template.and_then(|template| template.render(fields.context(kept)));
        rendered.map_err(|error| {
            let error = innermost(&error);
            if error.kind() != ErrorKind::UndefinedError {
                return template_error(name, error);
            }
            PromptError::UnknownField {
                template: error.name().unwrap_or(name).to_owned(),
                line: error.line().unwrap_or(1),
                entity: fields.entity(),
                field: culprit(error),
                available: fields.available(),
            }
        })
    }

    /// Returns all text that a rendering of a kind can depend on.
    pub(super) fn sources(&self, kind: Kind) -> (&str, [&'static str; PARTS.len()]) {
        (&self.of(kind).source, PARTS.map(|(_, source)| source))
    }
}

fn load(choice: &str, kind: Kind) -> Result<Template, PromptError> {
    let path = Path::new(choice);
    if path.extension().is_some_and(|e| e == "j2" || e == "jinja") {
        let source =
            std::fs::read_to_string(path).map_err(|source| PromptError::Read { path: path.to_owned(), source })?;
        return Ok(Template { name: choice.to_owned(), source: source.into() });
    }
    let shipped = shipped_for(kind);
    let Some(&(_, source)) = shipped.iter().find(|(name, _)| *name == choice) else {
        let names: Vec<&str> = shipped.iter().map(|(name, _)| *name).collect();
        return Err(PromptError::UnknownTemplate { name: choice.to_owned(), kind, shipped: names.join(", ") });
    };
    Ok(Template { name: format!("{choice}/{kind}"), source: source.into() })
}

/// Creates the environment. It keeps a template's last newline, which completion models depend on.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_keep_trailing_newline(true);
    // Without this an error does not know the expression that caused it.
    environment.set_debug(true);
    environment.add_filter("listed", listed);
    environment.add_filter("row", row);
    environment
}

fn listed(value: &Value, most: Option<usize>) -> Result<String, Error> {
    if value.is_undefined() {
        return Err(ErrorKind::UndefinedError.into());
    }
    if value.kind() != ValueKind::Seq {
        return Ok(value.to_string());
    }
    let items = value.try_iter()?.take(most.unwrap_or(usize::MAX));
    Ok(items.map(|item| item.to_string()).collect::<Vec<_>>().join(", "))
}

fn row(object: &Value, names: Rest<String>) -> Result<String, Error> {
    let mut cells = Vec::with_capacity(names.len());
    for name in names.iter() {
        let value = object.get_attr(name)?;
        if !value.is_undefined() {
            cells.push(listed(&value, None)?);
        }
    }
    if cells.is_empty() {
        return Err(ErrorKind::UndefinedError.into());
    }
    Ok(cells.join(" | "))
}

/// Returns the innermost error: one in an included part is wrapped in one about the including template.
fn innermost(error: &Error) -> &Error {
    let mut error = error;
    while let Some(source) = error.source().and_then(|s| s.downcast_ref::<Error>()) {
        error = source;
    }
    error
}

fn template_error(name: &str, error: &Error) -> PromptError {
    let error = innermost(error);
    PromptError::Template {
        template: error.name().unwrap_or(name).to_owned(),
        line: error.line().unwrap_or(1),
        reason: error.detail().map_or_else(|| error.kind().to_string(), str::to_owned),
    }
}

/// Returns the undefined expression as the template has it. The error's range may begin within a chain of fields, and
/// covers only the name of a filter; then the whole tag says more.
fn culprit(error: &Error) -> String {
    let (Some(source), Some(range)) = (error.template_source(), error.range()) else {
        return "such value".into();
    };
    let Some((before, rest)) = source.split_at_checked(range.start) else {
        return "such value".into();
    };
    let (start, end) = if before.trim_end().ends_with('|') {
        let length = rest.find(['}', '%']).unwrap_or(rest.len());
        let brace = before.rfind(['{', '%']);
        (brace.map_or(0, |b| b + 1), before.len() + length)
    } else {
        let chain = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
        (before.trim_end_matches(chain).len(), range.end)
    };
    let expression = source.get(start..end).unwrap_or_default();
    expression.trim_matches(['-', '+', ' ', '\n']).to_owned()
}
