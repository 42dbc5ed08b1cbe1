//! Last night's knowledge of an entity, as the join holds it: bytes, of which no more is decoded than is needed.
//!
//! ```text
//! text:    0, then the text
//! record:  1, then the text, the prompt's digest and the record's other fields, in the order of `Known::of_record`
//! list:    2, then the items
//! ```
//!
//! A number is a LEB128 varint (of a signed one its zigzag form), a float its 8 bytes, little-endian; texts and lists
//! stand behind their length. A record lacks what whoever reads it knows: the entity, and the digest of the
//! specification, which is tonight's. The bytes live as long as the process, so they carry no version.

use jiff::Timestamp;
use laser_schema::knowledge::{KnowledgeRecord, RunnerUp};
use laser_schema::{Digest, EntityId};

const TEXT: u8 = 0;
const RECORD: u8 = 1;
const LIST: u8 = 2;

/// Last night's knowledge of an entity.
#[derive(Debug, Clone, Copy)]
pub(super) struct Known<'a>(&'a [u8]);

impl<'a> Known<'a> {
    /// A text that may be drafted from.
    pub(super) fn of_text(text: &str) -> Vec<u8> {
        [&[TEXT], text.as_bytes()].concat()
    }

    /// The items of a list that may be drafted from.
    pub(super) fn of_list(items: &[EntityId]) -> Vec<u8> {
        let mut to = Writer(vec![LIST]);
        to.list(items, Writer::id);
        to.0
    }

    /// A record that may be carried forward.
    pub(super) fn of_record(record: &KnowledgeRecord) -> Vec<u8> {
        let mut to = Writer(vec![RECORD]);
        to.text(&record.text);
        to.text(record.prompt_digest.as_str());
        to.list(&record.items, Writer::id);
        to.list(&record.scores, |to, score| to.float(*score));
        for number in [record.prompt_tokens, record.text_tokens, record.forwards, record.drafted_tokens] {
            to.signed(number);
        }
        to.signed(record.accepted_tokens);
        to.signed(record.relaxed_tokens);
        to.list(&record.step_accepted, |to, accepted| to.signed(*accepted));
        for float in [record.mean_log_probability, record.draft_seconds, record.engine_seconds] {
            to.float(float);
        }
        for text in [&record.pool, &record.policy, &record.stop_reason, &record.pool_digest, &record.generated_by] {
            to.text(text);
        }
        to.text(record.model_digest.as_str());
        to.time(record.event_timestamp);
        to.time(record.created_timestamp);
        to.list(&record.samples, |to, sample| to.text(sample));
        to.number(u64::from(record.runners_up.is_some()));
        to.list(record.runners_up.as_deref().unwrap_or_default(), Writer::runner_up);
        to.0
    }

    /// What [`Self::of_text`], [`Self::of_list`] or [`Self::of_record`] made.
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The text; none of a list, and an empty one of a list's record.
    pub(super) fn text(self) -> Option<String> {
        match self.0.split_first()? {
            (&TEXT, text) => String::from_utf8(text.to_vec()).ok(),
            (&RECORD, rest) => Reader(rest).text(),
            _ => None,
        }
    }

    /// The items of a list, best first; none of a text.
    pub(super) fn items(self) -> Option<Vec<EntityId>> {
        let (tag, rest) = self.0.split_first()?;
        let mut from = Reader(rest);
        match *tag {
            LIST => {}
            RECORD => {
                let (_text, _prompt_digest) = (from.bytes()?, from.bytes()?);
            }
            _ => return None,
        }
        from.list(Reader::id)
    }

    /// The record, if it is one of this prompt. `entity` is whose it is, and `spec_digest` tonight's specification.
    pub(super) fn record(self, entity: &EntityId, digests: (&Digest, &Digest)) -> Option<KnowledgeRecord> {
        let (prompt_digest, spec_digest) = digests;
        let (&RECORD, rest) = self.0.split_first()? else {
            return None;
        };
        let mut from = Reader(rest);
        let text = from.bytes()?;
        if from.bytes()? != prompt_digest.as_str().as_bytes() {
            return None;
        }
        let mut record = from.fields(entity, prompt_digest, spec_digest)?;
        record.text = String::from_utf8(text.to_vec()).ok()?;
        Some(record)
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn number(&mut self, mut number: u64) {
        while number > 0x7f {
            self.0.push(0x80 | number.to_le_bytes()[0]);
            number >>= 7;
        }
        self.0.push(number.to_le_bytes()[0]);
    }

    fn signed(&mut self, number: i64) {
        self.number(((number << 1) ^ (number >> 63)).cast_unsigned());
    }

    fn float(&mut self, float: f64) {
        self.0.extend(float.to_le_bytes());
    }

    fn runner_up(&mut self, other: &RunnerUp) {
        self.number(other.place.into());
        self.number(other.token.into());
        self.0.extend(other.probability.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.extend(text.as_bytes());
    }

    fn id(&mut self, id: &EntityId) {
        match id {
            EntityId::Int(id) => {
                self.0.push(0);
                self.signed(*id);
            }
            EntityId::Text(id) => {
                self.0.push(1);
                self.text(id);
            }
        }
    }

    fn time(&mut self, time: Timestamp) {
        self.signed(time.as_second());
        self.signed(time.subsec_nanosecond().into());
    }

    fn list<T>(&mut self, list: &[T], write: impl Fn(&mut Self, &T)) {
        self.number(list.len() as u64);
        list.iter().for_each(|item| write(self, item));
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u64> {
        let (mut number, mut shift) = (0, 0);
        loop {
            let byte = u64::from(self.take(1)?[0]);
            number |= (byte & 0x7f).checked_shl(shift)?;
            if byte < 0x80 {
                return Some(number);
            }
            shift += 7;
        }
    }

    fn signed(&mut self) -> Option<i64> {
        let number = self.number()?;
        Some((number >> 1).cast_signed() ^ -(number & 1).cast_signed())
    }

    fn float(&mut self) -> Option<f64> {
        Some(f64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = usize::try_from(self.number()?).ok()?;
        self.take(length)
    }

    fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }

    fn id(&mut self) -> Option<EntityId> {
        match self.take(1)? {
            [0] => self.signed().map(EntityId::Int),
            _ => self.text().map(EntityId::Text),
        }
    }

    fn time(&mut self) -> Option<Timestamp> {
        Timestamp::new(self.signed()?, i32::try_from(self.signed()?).ok()?).ok()
    }

    fn runner_up(&mut self) -> Option<RunnerUp> {
        let (place, token) = (self.number()?.try_into().ok()?, self.number()?.try_into().ok()?);
        Some(RunnerUp { place, token, probability: f32::from_le_bytes(self.take(4)?.try_into().ok()?) })
    }

    fn list<T>(&mut self, read: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        (0..self.number()?).map(|_| read(self)).collect()
    }

    /// The fields behind the prompt's digest, which stand in the order in which they are written; the text is empty.
    fn fields(&mut self, entity: &EntityId, prompt_digest: &Digest, spec_digest: &Digest) -> Option<KnowledgeRecord> {
        Some(KnowledgeRecord {
            entity_id: entity.clone(),
            text: String::new(),
            prompt_digest: prompt_digest.clone(),
            spec_digest: spec_digest.clone(),
            items: self.list(Self::id)?,
            scores: self.list(Self::float)?,
            prompt_tokens: self.signed()?,
            text_tokens: self.signed()?,
            forwards: self.signed()?,
            drafted_tokens: self.signed()?,
            accepted_tokens: self.signed()?,
            relaxed_tokens: self.signed()?,
            step_accepted: self.list(Self::signed)?,
            mean_log_probability: self.float()?,
            draft_seconds: self.float()?,
            engine_seconds: self.float()?,
            pool: self.text()?,
            policy: self.text()?,
            stop_reason: self.text()?,
            pool_digest: self.text()?,
            generated_by: self.text()?,
            model_digest: Digest::from(self.text()?),
            event_timestamp: self.time()?,
            created_timestamp: self.time()?,
            samples: self.list(Self::text)?,
            runners_up: match (self.number()?, self.list(Self::runner_up)?) {
                (0, _) => None,
                (_, known) => Some(known),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id() -> impl Strategy<Value = EntityId> {
        prop_oneof![any::<i64>().prop_map(EntityId::Int), any::<String>().prop_map(EntityId::Text)]
    }

    fn time() -> impl Strategy<Value = Timestamp> {
        let seconds = Timestamp::MIN.as_second() + 1..Timestamp::MAX.as_second();
        (seconds, -999_999_999..1_000_000_000)
            .prop_map(|(seconds, nanoseconds)| Timestamp::new(seconds, nanoseconds).unwrap())
    }

    fn runners_up() -> impl Strategy<Value = Option<Vec<RunnerUp>>> {
        let other = (any::<u32>(), any::<u32>(), any::<f32>()).prop_map(|(place, token, probability)| RunnerUp {
            place,
            token,
            probability,
        });
        prop::option::of(prop::collection::vec(other, 0..5))
    }

    fn records() -> impl Strategy<Value = KnowledgeRecord> {
        let numbers = prop::array::uniform6(prop_oneof![any::<i64>(), -200..200i64]);
        let floats = prop::array::uniform3(any::<f64>());
        let texts = prop::array::uniform6(any::<String>());
        let list = (prop::collection::vec(id(), 0..5), prop::collection::vec(any::<f64>(), 0..5));
        let lists = (prop::collection::vec(any::<i64>(), 0..40), prop::collection::vec(any::<String>(), 0..3));
        (id(), numbers, floats, texts, list, lists, (time(), time(), runners_up())).prop_map(
            |(entity_id, numbers, floats, texts, (items, scores), (step_accepted, samples), last)| {
                let [prompt_tokens, text_tokens, forwards, drafted_tokens, accepted_tokens, relaxed_tokens] = numbers;
                let [mean_log_probability, draft_seconds, engine_seconds] = floats;
                let [text, pool, policy, stop_reason, pool_digest, generated_by] = texts;
                let [prompt_digest, spec_digest, model_digest] =
                    [b"prompt", b"specif", b"model "].map(|b| Digest::of(b));
                let (event_timestamp, created_timestamp, runners_up) = last;
                KnowledgeRecord {
                    entity_id,
                    text,
                    items,
                    scores,
                    prompt_tokens,
                    text_tokens,
                    pool,
                    policy,
                    stop_reason,
                    forwards,
                    drafted_tokens,
                    accepted_tokens,
                    relaxed_tokens,
                    step_accepted,
                    mean_log_probability,
                    draft_seconds,
                    engine_seconds,
                    prompt_digest,
                    spec_digest,
                    model_digest,
                    pool_digest,
                    generated_by,
                    event_timestamp,
                    created_timestamp,
                    samples,
                    runners_up,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn a_record_comes_back_whole_and_only_for_its_prompt(record in records()) {
            let bytes = Known::of_record(&record);
            let known = Known::new(&bytes);
            let (prompt, spec) = (&record.prompt_digest, &record.spec_digest);
            prop_assert_eq!(known.record(&record.entity_id, (spec, spec)), None);
            prop_assert_eq!(known.text(), Some(record.text.clone()));
            for length in 0..bytes.len() {
                prop_assert_eq!(Known::new(&bytes[..length]).record(&record.entity_id, (prompt, spec)), None);
            }
            prop_assert_eq!(known.record(&record.entity_id, (prompt, spec)), Some(record));
        }

        #[test]
        fn a_text_comes_back_and_is_no_record(text: String, digest: [u8; 32]) {
            let bytes = Known::of_text(&text);
            let digest = Digest::from_bytes(digest);
            prop_assert_eq!(Known::new(&bytes).record(&EntityId::Int(1), (&digest, &digest)), None);
            prop_assert_eq!(Known::new(&bytes).items(), None);
            prop_assert_eq!(Known::new(&bytes).text(), Some(text));
        }

        #[test]
        fn items_come_back_of_a_list_and_of_its_record(record in records()) {
            let bytes = [Known::of_list(&record.items), Known::of_record(&record)];
            for bytes in &bytes {
                prop_assert_eq!(Known::new(bytes).items(), Some(record.items.clone()));
            }
            let digests = (&record.prompt_digest, &record.spec_digest);
            prop_assert_eq!(Known::new(&bytes[0]).record(&record.entity_id, digests), None);
            prop_assert_eq!(Known::new(&bytes[0]).text(), None);
        }

        #[test]
        fn damage_is_no_panic(bytes: Vec<u8>) {
            let digest = Digest::of(b"");
            for tag in [RECORD, LIST] {
                let bytes = [&[tag], &bytes[..]].concat();
                Known::new(&bytes).text();
                Known::new(&bytes).items();
                Known::new(&bytes).record(&EntityId::Int(1), (&digest, &digest));
            }
        }
    }
}
