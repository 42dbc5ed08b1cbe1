//! The items that lists are made of, and what a history is to a run of lists: the items that the catalogue has.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use laser_schema::entity::IdType;
use laser_schema::{EntityId, History, Interaction, Kind};
use laser_store::join::KindIds;
use rayon::prelude::*;

/// The field of an interaction that templates have its item's identifier in.
const IDENTIFIER: &str = "identifier";

/// An item of the catalogue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogueItem {
    /// Its number in the trie.
    pub number: u32,
    /// Its identifier as the model writes it: its codes, one behind the other.
    pub identifier: String,
}

/// The catalogue of a run of lists.
#[derive(Clone, Copy)]
pub struct Catalogue<'a> {
    /// The type of the items' ids.
    pub ids: IdType,
    /// The field of an interaction that holds its item's id.
    pub field: &'a str,
    /// Finds an item by its id as text.
    pub find: &'a (dyn Fn(&str) -> Option<CatalogueItem> + Sync),
}

impl fmt::Debug for Catalogue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Catalogue").field("ids", &self.ids).field("field", &self.field).finish_non_exhaustive()
    }
}

/// Why no lists can be made of an input.
#[derive(Debug, thiserror::Error)]
pub enum CatalogueError {
    /// An item among those who are to get lists.
    #[error(
        "{table}: item {id}: lists are made for users; leave items out of [[input]], and make their texts in a night \
         of their own"
    )]
    Item {
        /// The table.
        table: String,
        /// The first of its items.
        id: EntityId,
    },
    /// Histories do not name their items.
    #[error("[lists] item = {field:?}: no interaction has that field; there is {available}")]
    Field {
        /// The field as configured.
        field: String,
        /// The fields there are.
        available: String,
    },
}

impl Catalogue<'_> {
    /// Refuses an input of others than users.
    pub(crate) fn check(&self, kinds: &BTreeMap<Kind, KindIds>) -> Result<(), CatalogueError> {
        match kinds.get(&Kind::Item) {
            None => Ok(()),
            Some(KindIds { first, table, .. }) => Err(CatalogueError::Item { table: table.clone(), id: first.clone() }),
        }
    }

    /// The numbers of those items of a list that the catalogue has, in their order.
    pub(crate) fn numbers(&self, ids: &[EntityId]) -> Vec<u32> {
        ids.iter().filter_map(|id| Some((self.find)(&id.to_string())?.number)).collect()
    }

    /// The item of an interaction, if it names one and the catalogue has it.
    fn item(&self, interaction: &Interaction) -> Option<CatalogueItem> {
        (self.find)(&interaction.item(self.field)?)
    }

    /// Leaves in a history what the catalogue has, each interaction with its identifier.
    fn keep_known(&self, history: &mut History) -> KnownItems {
        let mut known = KnownItems { numbers: Vec::with_capacity(history.len()), unknown: 0 };
        let mut kept = Vec::with_capacity(history.len());
        for interaction in history.iter() {
            let Some(CatalogueItem { number, identifier }) = self.item(&interaction) else {
                known.unknown += 1;
                continue;
            };
            known.numbers.push(number);
            let mut fields = interaction.fields();
            fields.insert(IDENTIFIER.to_owned(), identifier.into());
            kept.push(fields);
        }
        *history = kept.into();
        known
    }
}

/// What the catalogue has of a history.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct KnownItems {
    /// The items' numbers, oldest first.
    pub(crate) numbers: Vec<u32>,
    /// How many interactions are of other items.
    pub(crate) unknown: u64,
}

/// Looks histories up, one batch after the other.
#[derive(Debug)]
pub(crate) struct Histories<'a> {
    catalogue: Catalogue<'a>,
    /// Whether an interaction has named its item yet.
    named: bool,
}

impl<'a> Histories<'a> {
    pub(crate) fn new(catalogue: Catalogue<'a>) -> Self {
        Self { catalogue, named: false }
    }

    /// Leaves in the histories what the catalogue has, each interaction with its `identifier`, and returns the items of
    /// each. Items leave a catalogue, so that others are no fault.
    ///
    /// # Errors
    /// If up to now no interaction names its item.
    pub(crate) fn keep_known(&mut self, mut histories: Vec<&mut History>) -> Result<Vec<KnownItems>, CatalogueError> {
        let field = self.catalogue.field;
        let interactions = || histories.iter().flat_map(|history| history.iter());
        self.named = self.named || interactions().any(|interaction| interaction.field(field).is_some());
        if !self.named && interactions().next().is_some() {
            let available: BTreeSet<String> =
                interactions().flat_map(|one| one.fields()).map(|(name, _)| name).collect();
            let available = Vec::from_iter(available).join(", ");
            return Err(CatalogueError::Field { field: field.to_owned(), available });
        }
        let catalogue = self.catalogue;
        Ok(histories.par_iter_mut().map(|history| catalogue.keep_known(history)).collect())
    }
}
