//! Entities with what other tables know of them: their embeddings and their earlier texts.
//!
//! A grace hash join. [`Join`] reads the ids of the entities, takes embeddings and texts in any order, and spreads all
//! over partitions by id; [`Join::finish`] matches partition after partition and spreads what matches over ranges of
//! rows; [`Joined::reader`] then reads the tables again, in their order, with one range in memory. So the outcome does
//! not depend on what was spilled, and memory is bounded by the budget, a partition and a range (a thousandth of all
//! that was given, each).
//!
//! This is also where ids are checked: each once in its kind over all tables, and all of a kind of one type.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;

use crate::entities::{EntityReader, TablesReader};
use crate::rows::RowError;
use crate::spill::{PARTITIONS, Records, Spill, SpillError, partition_of};
use laser_schema::entity::{Entity, EntityId, EntityTable, IdType, Kind};

/// Why entities could not be joined.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// An entity table.
    #[error(transparent)]
    Entity(#[from] RowError),
    /// The local disk.
    #[error(transparent)]
    Spill(#[from] SpillError),
    /// One id has two embeddings.
    #[error("{file}, row {row}: id {id} appears twice; ids must be unique")]
    DuplicateEmbedding {
        /// The file of their ids.
        file: String,
        /// Counted from 1.
        row: u64,
        /// The id.
        id: EntityId,
    },
    /// A table has other rows than when its ids were read.
    #[error("{file}: was changed while it was read; run again")]
    Changed {
        /// The table.
        file: String,
    },
}

/// The ids of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KindIds {
    /// How many entities there are.
    pub entities: u64,
    /// The first of the ids, whose type all have.
    pub first: EntityId,
    /// The table that has it.
    pub table: String,
}

/// Embeddings that are not in the entity tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExternalEmbeddings {
    /// The file.
    pub file: String,
    /// The file of their ids, which may be the same.
    pub ids: String,
    /// How many there are.
    pub rows: u64,
}

/// The first byte of a record's value, which tells entities, embeddings and texts apart.
const ENTITY: u8 = 0;
const EMBEDDING: u8 = 1;
const TEXT: u8 = 2;

/// A join that is being filled.
#[derive(Debug)]
pub struct Join {
    memory: usize,
    tables: Vec<EntityTable>,
    /// Rows up to the end of each table.
    ends: Vec<u64>,
    kinds: BTreeMap<Kind, KindIds>,
    embeddings: BTreeMap<Kind, ExternalEmbeddings>,
    by_id: Spill,
}

impl Join {
    /// Reads the ids of the entities of `tables`; of Parquet no other column but the kind. About `memory` bytes are
    /// held before anything is spilled.
    ///
    /// # Errors
    /// [`JoinError::Entity`], [`JoinError::Spill`].
    pub async fn new(tables: &[EntityTable], memory: usize) -> Result<Self, JoinError> {
        let mut join = Self {
            memory,
            tables: tables.to_vec(),
            ends: Vec::new(),
            kinds: BTreeMap::new(),
            embeddings: BTreeMap::new(),
            by_id: Spill::new(memory),
        };
        let mut rows = 0;
        for table in tables {
            let start = rows;
            let mut reader = EntityReader::open_ids(table).await?;
            while let Some(entities) = reader.next_batch().await? {
                for entity in entities {
                    rows += 1;
                    join.push_entity(entity, rows, (table, rows - start))?;
                }
            }
            join.ends.push(rows);
        }
        Ok(join)
    }

    /// Adds the entity of a row, counted over all tables; `place` is its table and its row there.
    fn push_entity(&mut self, entity: Entity, row: u64, place: (&EntityTable, u64)) -> Result<(), JoinError> {
        let Entity { id, kind, .. } = entity;
        let new = || KindIds { entities: 0, first: id.clone(), table: place.0.path.clone() };
        let ids = self.kinds.entry(kind).or_insert_with(new);
        ids.entities += 1;
        let (this, first) = (id.id_type(), ids.first.id_type());
        if this != first {
            let reason = format!(
                "{kind} id {id} is {this}, but the {kind}s before have {first} ids; set [input.columns] id_type"
            );
            return Err(wrong_id(place, reason));
        }
        let value: &[&[u8]] = &[&[ENTITY], &row.to_le_bytes()];
        Ok(self.push(kind, &id, value)?)
    }

    fn push(&mut self, kind: Kind, id: &EntityId, value: &[&[u8]]) -> Result<(), SpillError> {
        let key = encode_key(kind, id);
        self.by_id.push(partition_of(&key), &key, value)
    }

    /// The entities' tables.
    pub fn tables(&self) -> &[EntityTable] {
        &self.tables
    }

    /// The kinds of which there are entities.
    pub fn kinds(&self) -> &BTreeMap<Kind, KindIds> {
        &self.kinds
    }

    /// From now on the entities of a kind have the embeddings of a file, and not those of their table.
    pub fn use_embeddings(&mut self, kind: Kind, file: &str, ids: &str) {
        let external = ExternalEmbeddings { file: file.to_owned(), ids: ids.to_owned(), rows: 0 };
        self.embeddings.insert(kind, external);
    }

    /// Gives a row, counted from 1, of the file of embeddings; nothing without [`Self::use_embeddings`]. Ids match by
    /// their text, so that `7` of a list is the int64 7 of a table.
    pub fn push_embedding(&mut self, kind: Kind, row: u64, id: &str, embedding: &[f32]) -> Result<(), SpillError> {
        let Some(external) = self.embeddings.get_mut(&kind) else {
            return Ok(());
        };
        external.rows += 1;
        let this = self.kinds.get(&kind).map(|ids| ids.first.id_type());
        let text = EntityId::Text(id.to_owned());
        let typed = text.clone().into_type(this).ok();
        let id = typed.filter(|typed| typed.to_string() == id).unwrap_or(text);
        let values: Vec<u8> = embedding.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.push(kind, &id, &[&[EMBEDDING], &row.to_le_bytes(), &values])
    }

    /// Gives an earlier text of an entity, in the caller's form. Ids match if their type does, too.
    pub fn push_text(&mut self, kind: Kind, id: &EntityId, text: &[u8]) -> Result<(), SpillError> {
        self.push(kind, id, &[&[TEXT], text])
    }

    /// Matches all. Texts of no entity are given to `stranger`, in an order that depends on their ids alone.
    ///
    /// # Errors
    /// An id that is there twice: of entities the first such row.
    pub fn finish(mut self, stranger: &mut (dyn FnMut(Kind, EntityId, Bytes) + Send)) -> Result<Joined, JoinError> {
        let rows = self.ends.last().copied().unwrap_or(0);
        let mut matching =
            Matching { rows, by_row: Spill::new(self.memory), twice: None, twice_embedded: BTreeMap::new(), stranger };
        self.by_id.finish()?;
        for partition in 0..PARTITIONS {
            matching.partition(self.by_id.take(partition)?)?;
        }
        let (twice, embedded) = (matching.twice, matching.twice_embedded);
        let mut by_row = matching.by_row;
        by_row.finish()?;
        if let Some((row, kind, id)) = twice {
            return Err(self.duplicate(row, kind, &id));
        }
        if let Some((kind, (row, id))) = embedded.into_iter().next() {
            let file = self.embeddings[&kind].ids.clone();
            return Err(JoinError::DuplicateEmbedding { file, row, id });
        }
        let Self { tables, kinds, embeddings, .. } = self;
        Ok(Joined(Arc::new(Matched { tables: tables.into(), kinds, embeddings, rows, by_row })))
    }

    fn duplicate(&self, row: u64, kind: Kind, id: &EntityId) -> JoinError {
        let table = self.ends.partition_point(|&end| end < row);
        let start = table.checked_sub(1).map_or(0, |before| self.ends[before]);
        let reason = format!("{kind} id {id} appears twice; ids must be unique over all tables");
        wrong_id((&self.tables[table], row - start), reason)
    }
}

fn wrong_id((table, row): (&EntityTable, u64), reason: String) -> JoinError {
    RowError::Row { file: table.path.clone(), row, reason }.into()
}

/// Kind and type, then the id's text.
fn encode_key(kind: Kind, id: &EntityId) -> Vec<u8> {
    let kind = match kind {
        Kind::User => b'u',
        Kind::Item => b'i',
    };
    let id_type = match id.id_type() {
        IdType::Int64 => b'i',
        IdType::String => b's',
    };
    let mut key = vec![kind, id_type];
    key.extend_from_slice(id.to_string().as_bytes());
    key
}

fn decode_key(key: &[u8]) -> (Kind, EntityId) {
    let kind = match key[0] {
        b'u' => Kind::User,
        _ => Kind::Item,
    };
    let text = String::from_utf8_lossy(&key[2..]);
    let id = match key[1] {
        b'i' => text.parse().map(EntityId::Int).ok(),
        _ => None,
    };
    (kind, id.unwrap_or_else(|| EntityId::Text(text.into_owned())))
}

/// A row's number at the start of a value.
fn decode_row(bytes: &[u8]) -> u64 {
    let row = bytes.get(..8).and_then(|row| row.try_into().ok());
    row.map_or(0, u64::from_le_bytes)
}

struct Matching<'a> {
    rows: u64,
    by_row: Spill,
    /// The first entity whose id was there before.
    twice: Option<(u64, Kind, EntityId)>,
    twice_embedded: BTreeMap<Kind, (u64, EntityId)>,
    stranger: &'a mut (dyn FnMut(Kind, EntityId, Bytes) + Send),
}

impl Matching<'_> {
    /// Entities were written before all else, so they are known when the others come.
    fn partition(&mut self, records: Records) -> Result<(), JoinError> {
        let mut entities: HashMap<Bytes, u64> = HashMap::new();
        let mut embedded: HashMap<Bytes, u64> = HashMap::new();
        for (key, mut value) in records {
            let what = value.split_to(1)[0];
            let row = entities.get(&key).copied();
            match what {
                ENTITY => self.entity(&mut entities, key, decode_row(&value)),
                EMBEDDING => {
                    self.embedding(&mut embedded, &key, decode_row(&value));
                    if let Some(row) = row {
                        self.keep(row, &key, &[&[EMBEDDING], &value[8..]])?;
                    }
                }
                _ => match row {
                    Some(row) => self.keep(row, &key, &[&[TEXT], &value])?,
                    None => {
                        let (kind, id) = decode_key(&key);
                        (self.stranger)(kind, id, value);
                    }
                },
            }
        }
        Ok(())
    }

    fn entity(&mut self, entities: &mut HashMap<Bytes, u64>, key: Bytes, row: u64) {
        let (kind, id) = decode_key(&key);
        let known = entities.insert(key, row).is_some();
        if known && self.twice.as_ref().is_none_or(|(first, ..)| row < *first) {
            self.twice = Some((row, kind, id));
        }
    }

    fn embedding(&mut self, embedded: &mut HashMap<Bytes, u64>, key: &Bytes, row: u64) {
        if embedded.insert(key.clone(), row).is_none() {
            return;
        }
        let (kind, id) = decode_key(key);
        let first = self.twice_embedded.get(&kind);
        if first.is_none_or(|(first, _)| row < *first) {
            self.twice_embedded.insert(kind, (row, id));
        }
    }

    /// The id travels with the row's number, so that a table that has changed since is found out.
    fn keep(&mut self, row: u64, key: &[u8], value: &[&[u8]]) -> Result<(), SpillError> {
        let mut row_key = row.to_le_bytes().to_vec();
        row_key.extend_from_slice(key);
        self.by_row.push(range_of(row, self.rows), &row_key, value)
    }
}

/// The range that holds a row of 1 to `rows`.
fn range_of(row: u64, rows: u64) -> usize {
    let range = u128::from(row.saturating_sub(1)) * PARTITIONS as u128 / u128::from(rows.max(1));
    usize::try_from(range).map_or(PARTITIONS - 1, |range| range.min(PARTITIONS - 1))
}

/// Entities with what belongs to them, to be read any number of times. Cloning is cheap.
#[derive(Debug, Clone)]
pub struct Joined(Arc<Matched>);

#[derive(Debug)]
struct Matched {
    tables: Arc<[EntityTable]>,
    kinds: BTreeMap<Kind, KindIds>,
    embeddings: BTreeMap<Kind, ExternalEmbeddings>,
    rows: u64,
    by_row: Spill,
}

/// An entity with what belongs to it.
#[derive(Debug, Clone, PartialEq)]
pub struct JoinedEntity {
    /// The entity, with the embedding that was given where [`Join::use_embeddings`] said so.
    pub entity: Entity,
    /// Its texts, in the order given.
    pub texts: Vec<Bytes>,
}

impl Joined {
    /// The kinds of which there are entities.
    pub fn kinds(&self) -> &BTreeMap<Kind, KindIds> {
        &self.0.kinds
    }

    /// The entities' tables.
    pub fn tables(&self) -> &[EntityTable] {
        &self.0.tables
    }

    /// The embeddings that were given for a kind.
    pub fn embeddings(&self, kind: Kind) -> Option<&ExternalEmbeddings> {
        self.0.embeddings.get(&kind)
    }

    /// All entities, over all tables.
    pub fn rows(&self) -> u64 {
        self.0.rows
    }

    /// Reads all entities in the order of the tables.
    pub fn reader(&self) -> JoinReader {
        self.read(TablesReader::new(self.0.tables.clone()))
    }

    /// Reads all entities but for what histories tell, see [`EntityReader::open_counting`].
    pub fn counting_reader(&self) -> JoinReader {
        self.read(TablesReader::counting(self.0.tables.clone()))
    }

    fn read(&self, tables: TablesReader) -> JoinReader {
        JoinReader { joined: self.0.clone(), tables, row: 0, range: None, records: HashMap::new() }
    }
}

/// Reads joined entities in batches.
#[derive(Debug)]
pub struct JoinReader {
    joined: Arc<Matched>,
    tables: TablesReader,
    row: u64,
    range: Option<usize>,
    /// The embeddings and texts of the range's rows.
    records: HashMap<u64, Vec<(Bytes, Bytes)>>,
}

impl JoinReader {
    /// The table of the batch that came last.
    pub fn table(&self) -> &str {
        self.tables.table()
    }

    /// The next entities, or `None` at the end.
    ///
    /// # Errors
    /// The first row that is wrong; [`JoinError::Changed`].
    pub async fn next_batch(&mut self) -> Result<Option<Vec<JoinedEntity>>, JoinError> {
        match self.tables.next_batch().await? {
            Some(entities) => entities.into_iter().map(|entity| self.join(entity)).collect::<Result<_, _>>().map(Some),
            None if self.row == self.joined.rows => Ok(None),
            None => Err(self.changed()),
        }
    }

    fn changed(&self) -> JoinError {
        JoinError::Changed { file: self.table().to_owned() }
    }

    fn join(&mut self, mut entity: Entity) -> Result<JoinedEntity, JoinError> {
        self.row += 1;
        let range = range_of(self.row, self.joined.rows);
        if self.range.replace(range) != Some(range) {
            self.records.clear();
            for (mut key, value) in self.joined.by_row.read(range)? {
                let row = decode_row(&key.split_to(8));
                self.records.entry(row).or_default().push((key, value));
            }
        }
        if self.joined.embeddings.contains_key(&entity.kind) {
            entity.embedding = None;
        }
        let mut texts = Vec::new();
        for (key, mut value) in self.records.remove(&self.row).unwrap_or_default() {
            if *key != *encode_key(entity.kind, &entity.id) {
                return Err(self.changed());
            }
            match value.split_to(1)[0] {
                EMBEDDING => entity.embedding = Some(decode_embedding(&value)),
                _ => texts.push(value),
            }
        }
        Ok(JoinedEntity { entity, texts })
    }
}

fn decode_embedding(bytes: &[u8]) -> Vec<f32> {
    let (values, _) = bytes.as_chunks();
    values.iter().map(|value| f32::from_le_bytes(*value)).collect()
}
