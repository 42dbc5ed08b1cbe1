//! The names of all files in a run's folder. Retention and erasure remove what has one of these names, and nothing
//! else.

/// Constants, and the list of them all: none that is added can be missing from the list.
macro_rules! listed {
    (
        $(#[$doc_of_all:meta])+ $all:ident: $type:ty;
        $($(#[$doc:meta])+ $name:ident = $value:expr;)+
    ) => {
        $($(#[$doc])+ pub const $name: $type = $value;)+

        $(#[$doc_of_all])+
        pub const $all: &[$type] = &[$($name),+];
    };
}

listed! {
    /// The files of which a run has at most one each.
    FILES: &str;

    /// The [pins](laser_schema::layout::Pins).
    PINS = "pins.json";

    /// The [plan](laser_schema::job::Plan).
    PLAN = "plan.json";

    /// The [estimate](laser_schema::estimate::Estimate).
    ESTIMATE = "estimate.json";

    /// The marker that says that the run was cancelled.
    CANCELLED = "cancelled";

    /// What the process at work on the run has locked.
    LOCK = "lock";

    /// The trie of the catalogue.
    TRIE = "items.trie";

    /// The items that are out of stock, by their numbers in the trie.
    OUT_OF_STOCK = "out_of_stock.json";

    /// The titles of the items.
    TITLES = "titles.parquet";

    /// What follows items in the histories, and what users have together.
    COUNTED = "items.counted";

    /// The histories themselves, as codes.
    CODES = "histories.pool";
}

listed! {
    /// The folders of files of which a run may have many.
    SUBFOLDERS: Subfolder;

    /// The inputs of shards.
    SHARDS = Subfolder { name: "shards", ending: ".parquet" };

    /// Prompts that coordinators render for each other.
    PROMPTS = Subfolder { name: "prompts", ending: ".prompts" };

    /// The outputs of audit shards.
    AUDITS = Subfolder { name: "audits", ending: ".json" };

    /// Verdicts on pools.
    GUARDS = Subfolder { name: "guards", ending: ".json" };
}

/// A folder in a run's folder, and how the names of the files in it end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subfolder {
    /// Its name.
    pub name: &'static str,
    /// How the names of its files end.
    pub ending: &'static str,
}

impl Subfolder {
    /// The name of a file in it, relative to the run's folder; `stem` is what comes before the ending.
    pub fn file(&self, stem: &str) -> String {
        format!("{}/{stem}{}", self.name, self.ending)
    }

    /// Whether a name, relative to the run's folder, is that of a file in it.
    pub fn has(&self, name: &str) -> bool {
        let file = name.strip_prefix(self.name).and_then(|rest| rest.strip_prefix('/'));
        file.is_some_and(|file| file.ends_with(self.ending) && !file.contains('/'))
    }
}

/// Whether a name, relative to the run's folder, is that of a file of a run.
pub fn is_file_of_run(name: &str) -> bool {
    FILES.contains(&name) || SUBFOLDERS.iter().any(|folder| folder.has(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_run_are_known_by_their_names_and_no_others_are() {
        for name in FILES {
            assert!(is_file_of_run(name), "{name}");
        }
        for folder in SUBFOLDERS {
            assert!(is_file_of_run(&folder.file("user-all")), "{folder:?}");
        }
        for name in ["notes.txt", "old/plan.json", "plan.json~", "shards", "shards/a.csv", "shards/a/b.parquet"] {
            assert!(!is_file_of_run(name), "{name}");
        }
    }
}
