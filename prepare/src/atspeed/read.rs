//! The four files of a data set.

use std::path::Path;

use serde::Deserialize;

use super::{AtSpeed, Item, Sequence};
use crate::delimited::for_each_line;
use crate::table::{filled, known};
use crate::{PrepareError, Result};

const ITEMS: &str = "items.jsonl";

/// The part that has every user.
const TRAIN: &str = "sequential_train.txt";

/// The parts in the order of time.
const PARTS: [&str; 3] = [TRAIN, "sequential_valid.txt", "sequential_test.txt"];

#[derive(Debug, Deserialize)]
struct ItemLine {
    recid: usize,
    sid: Vec<String>,
    title: Option<String>,
    brand: Option<String>,
    category: Option<Vec<String>>,
}

/// Reads the data set in `dir`.
pub(super) fn read(dir: &Path) -> Result<AtSpeed> {
    let missing: Vec<&str> = [ITEMS].into_iter().chain(PARTS).filter(|name| !dir.join(name).is_file()).collect();
    if !missing.is_empty() {
        let (missing, parts) = (missing.join(", "), PARTS.join(", "));
        let reason = format!("no {missing} here; give a directory that holds {ITEMS}, {parts}");
        return Err(PrepareError::at(dir, reason));
    }
    let mut data = AtSpeed::default();
    let path = dir.join(ITEMS);
    for_each_line(&path, |line| data.add_item(line))?;
    if data.items.is_empty() {
        return Err(PrepareError::at(&path, "there is no item in this file"));
    }
    for (part, name) in PARTS.into_iter().enumerate() {
        let path = dir.join(name);
        for_each_line(&path, |line| data.add_sequence(part, line))?;
        data.check_part(part, &path)?;
    }
    Ok(data)
}

impl AtSpeed {
    fn add_item(&mut self, line: &str) -> Result<(), String> {
        let line: ItemLine =
            serde_json::from_str(line).map_err(|error| format!("not a JSON object with recid and sid: {error}"))?;
        let next = self.items.len();
        if line.recid != next {
            return Err(format!(
                "recid {}; expected {next}: sort the items by recid, which counts from 0 without gaps",
                line.recid
            ));
        }
        if line.sid.is_empty() || line.sid.iter().any(|code| code.trim().is_empty()) {
            return Err("sid has no code, or an empty one; expected one for each level, such as <a_47>".to_owned());
        }
        let (found, expected) = (line.sid.len(), self.items.first().map_or(line.sid.len(), |i| i.identifier.len()));
        if found != expected {
            return Err(format!("sid has {found} codes; those before have {expected}, and all need the same number"));
        }
        self.items.push(Item {
            identifier: line.sid,
            title: filled(line.title),
            brand: filled(line.brand),
            categories: line.category.and_then(known),
        });
        Ok(())
    }

    fn add_sequence(&mut self, part: usize, line: &str) -> Result<(), String> {
        let mut cells = line.split_ascii_whitespace();
        let user: i64 = number(cells.next().unwrap_or_default())?;
        let items = cells.map(|cell| self.item(cell)).collect::<Result<_, _>>()?;
        let Sequence(parts) = match part {
            0 => self.users.entry(user).or_default(),
            _ => self.users.get_mut(&user).ok_or_else(|| {
                format!("user {user} is not in {TRAIN}; add a line {user} there if it has no item to train on")
            })?,
        };
        match parts.get_mut(part).and_then(|known| known.replace(items)) {
            None => Ok(()),
            Some(_) => Err(format!("user {user} is there twice; put all its items in one line")),
        }
    }

    /// The number of an item that is in the list.
    fn item(&self, cell: &str) -> Result<u32, String> {
        let item: u32 = number(cell)?;
        match (1..=self.items.len()).contains(&(item as usize)) {
            true => Ok(item),
            false => Err(format!(
                "item {item} is not in {ITEMS}, which has items 1 to {}: an item's number is its recid + 1",
                self.items.len()
            )),
        }
    }

    /// That every user has its line, so that a file that ends too early is not taken for users without items.
    fn check_part(&self, part: usize, path: &Path) -> Result<()> {
        let missing = self.users.iter().find(|(_, Sequence(parts))| parts.get(part).is_none_or(Option::is_none));
        let Some((user, _)) = missing else {
            return Ok(());
        };
        let reason = format!(
            "user {user} of {TRAIN} is missing; add a line {user} if it has no item in this part, or get the whole file"
        );
        Err(PrepareError::at(path, reason))
    }
}

fn number<T: std::str::FromStr<Err = std::num::ParseIntError>>(cell: &str) -> Result<T, String> {
    cell.parse().map_err(|error| format!("{cell:?} is not a number here ({error}); expected user item item …"))
}
