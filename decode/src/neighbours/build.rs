//! Building a neighbours file: the inverse of [`Neighbours::open`](super::Neighbours::open), deterministic.
//!
//! Pairs are never stored. The users of an item and the items of a user are two lists, and one array counts, item by
//! item, what its users have. So the time is linear in the interactions plus the sum over histories of the square of
//! their windows, and the peak of memory is about 12 bytes per interaction (up to 16 while the histories arrive), 40
//! per item, and the file, whose size is at most 16 bytes per item and 16 per item and [`NeighboursOptions::most`].

use super::{
    CHECKED_FROM, HEADER, Header, MAGIC, NeighboursError, NeighboursOptions, VERSION, check_recency, strongest_first,
};
use crate::sealed::{BYTE_ORDER, seal};

/// Builds the bytes of the neighbours file of these histories, each the items of a user, oldest first. Items are
/// numbered from 0 to below `items`. The order of the histories does not matter.
///
/// # Errors
/// If a history has an item that is not below `items`, the recency is not a weight, or there are more interactions,
/// histories or entries than 32 bits can count.
pub fn build_neighbours(
    options: NeighboursOptions,
    items: u32,
    sequences: impl Iterator<Item = impl AsRef<[u32]>>,
) -> Result<Vec<u8>, NeighboursError> {
    let NeighboursOptions { most, window, recency } = options;
    check_recency(recency)?;
    let histories = Histories::collect(items, sequences)?;
    let mut header = Header { items, histories: histories.count()?, most, window, recency, ..Header::default() };
    let mut bytes = vec![0; HEADER];
    let counts = histories.counts(items);
    bytes.extend_from_slice(bytemuck::cast_slice(&by_popularity(&counts)));
    bytes.extend_from_slice(bytemuck::cast_slice(&counts));
    let mut followers = histories.followers(items);
    header.successors = append_rows(&mut bytes, items, most, |item, row| followers.shares(item, row))?;
    drop(followers);
    let mut together = Together::new(items, histories.sets(window));
    header.neighbours = append_rows(&mut bytes, items, most, |item, row| together.cosines(item, row))?;
    write_header(&mut bytes, &header);
    Ok(bytes)
}

/// Writes the header with its checksums: the content's first, because the header's covers it.
pub(super) fn write_header(bytes: &mut [u8], header: &Header) {
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&BYTE_ORDER.to_le_bytes());
    for (place, word) in bytes[Header::WORDS..HEADER].chunks_exact_mut(4).zip(header.words()) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    seal(bytes, CHECKED_FROM, HEADER);
}

/// Appends what `fill` says of every item, cut to the strongest entries, and the starts of the items' rows. Returns the
/// number of entries.
fn append_rows(
    bytes: &mut Vec<u8>,
    items: u32,
    most: u32,
    mut fill: impl FnMut(u32, &mut Vec<[u32; 2]>),
) -> Result<u32, NeighboursError> {
    let (mut starts, mut row) = (vec![0u32], Vec::new());
    let mut total = 0;
    for item in 0..items {
        row.clear();
        fill(item, &mut row);
        cut(&mut row, most as usize);
        total += row.len();
        let hint = "keep fewer entries of an item";
        let end = u32::try_from(total).map_err(|_| NeighboursError::TooLarge { what: "entries", hint })?;
        starts.push(end);
        bytes.extend_from_slice(bytemuck::cast_slice(&row));
    }
    bytes.extend_from_slice(bytemuck::cast_slice(&starts));
    Ok(starts.last().copied().unwrap_or(0))
}

/// Keeps the strongest entries, in order.
fn cut(row: &mut Vec<[u32; 2]>, most: usize) {
    if row.len() > most {
        row.select_nth_unstable_by(most, strongest_first);
        row.truncate(most);
    }
    row.sort_unstable_by(strongest_first);
}

/// Items by descending counts, ties by number.
fn by_popularity(counts: &[u32]) -> Vec<u32> {
    let mut popular: Vec<u32> = (0u32..).zip(counts).map(|(item, _)| item).collect();
    popular.sort_by_key(|&item| std::cmp::Reverse(counts[item as usize]));
    popular
}

/// All histories, one after the other.
struct Histories {
    items: Vec<u32>,
    /// Where each history ends.
    ends: Vec<usize>,
}

impl Histories {
    fn collect(catalogue: u32, sequences: impl Iterator<Item = impl AsRef<[u32]>>) -> Result<Self, NeighboursError> {
        let mut histories = Self { items: Vec::new(), ends: Vec::new() };
        for (history, sequence) in sequences.enumerate() {
            let sequence = sequence.as_ref();
            if let Some(index) = sequence.iter().position(|&item| item >= catalogue) {
                return Err(NeighboursError::Item { history, index, item: sequence[index], items: catalogue });
            }
            histories.items.extend_from_slice(sequence);
            histories.ends.push(histories.items.len());
        }
        // An item's occurrences must fit the file.
        match u32::try_from(histories.items.len()) {
            Ok(_) => Ok(histories),
            Err(_) => Err(NeighboursError::TooLarge { what: "interactions", hint: "build from a sample of the users" }),
        }
    }

    fn count(&self) -> Result<u32, NeighboursError> {
        let hint = "build from a sample of the users";
        u32::try_from(self.ends.len()).map_err(|_| NeighboursError::TooLarge { what: "histories", hint })
    }

    fn iter(&self) -> impl Iterator<Item = &[u32]> + Clone {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(move |(start, &end)| &self.items[start..end])
    }

    /// How often each item occurs.
    fn counts(&self, items: u32) -> Vec<u32> {
        let mut counts = vec![0; items as usize];
        for &item in &self.items {
            counts[item as usize] += 1;
        }
        counts
    }

    /// What follows each item directly, once for each time that it does.
    fn followers(&self, items: u32) -> Grouped {
        let pairs = self.iter().flat_map(|history| history.windows(2).map(|pair| (pair[0], pair[1])));
        Grouped::new(items, pairs)
    }

    /// The distinct items of each history's window.
    fn sets(self, window: u32) -> Grouped {
        let mut sets = Grouped { starts: vec![0], values: Vec::with_capacity(self.items.len()) };
        let mut set = Vec::new();
        for history in self.iter() {
            set.clear();
            set.extend_from_slice(&history[history.len().saturating_sub(window as usize)..]);
            set.sort_unstable();
            set.dedup();
            sets.values.extend_from_slice(&set);
            sets.starts.push(sets.values.len());
        }
        sets
    }
}

/// Lists of numbers.
struct Grouped {
    /// The list of `key` is `values[starts[key]..starts[key + 1]]`.
    starts: Vec<usize>,
    values: Vec<u32>,
}

impl Grouped {
    /// Groups values by keys below `keys`, in their order.
    fn new(keys: u32, pairs: impl Iterator<Item = (u32, u32)> + Clone) -> Self {
        let mut starts = vec![0; keys as usize + 1];
        for (key, _) in pairs.clone() {
            starts[key as usize + 1] += 1;
        }
        for key in 1..starts.len() {
            starts[key] += starts[key - 1];
        }
        let (mut next, mut values) = (starts.clone(), vec![0; starts[keys as usize]]);
        for (key, value) in pairs {
            values[next[key as usize]] = value;
            next[key as usize] += 1;
        }
        Self { starts, values }
    }

    fn len(&self) -> usize {
        self.starts.len() - 1
    }

    fn list(&self, key: u32) -> &[u32] {
        &self.values[self.starts[key as usize]..self.starts[key as usize + 1]]
    }

    /// Writes each value of a list but for the key itself, with its share of the list.
    fn shares(&mut self, key: u32, row: &mut Vec<[u32; 2]>) {
        let list = &mut self.values[self.starts[key as usize]..self.starts[key as usize + 1]];
        list.sort_unstable();
        let all = list.len() as f64;
        let values = list.chunk_by(|a, b| a == b).filter(|same| same[0] != key);
        row.extend(values.map(|same| [same[0], weight(same.len() as f64 / all)]));
    }
}

/// Counts which items the same users have.
struct Together {
    /// Distinct items by user.
    sets: Grouped,
    /// Users by item.
    users: Grouped,
    /// By item, how many users have it and the one at hand; 0 in between.
    counts: Vec<u32>,
    /// Items whose count is not 0.
    touched: Vec<u32>,
}

impl Together {
    fn new(items: u32, sets: Grouped) -> Self {
        let users = (0u32..).take(sets.len());
        let users = Grouped::new(items, users.flat_map(|user| sets.list(user).iter().map(move |&item| (item, user))));
        Self { sets, users, counts: vec![0; items as usize], touched: Vec::new() }
    }

    /// Writes every other item that users of `item` have, with the cosine of both items' sets of users.
    fn cosines(&mut self, item: u32, row: &mut Vec<[u32; 2]>) {
        let users = self.users.list(item);
        for &other in users.iter().flat_map(|&user| self.sets.list(user)) {
            let count = &mut self.counts[other as usize];
            if *count == 0 {
                self.touched.push(other);
            }
            *count += 1;
        }
        for other in self.touched.drain(..) {
            let both = f64::from(std::mem::take(&mut self.counts[other as usize]));
            if other != item {
                let others = self.users.list(other).len() as f64;
                row.push([other, weight(both / (users.len() as f64 * others).sqrt())]);
            }
        }
    }
}

/// The bits of a weight above 0 and at most 1.
#[expect(clippy::cast_possible_truncation, reason = "rounded to what the file holds")]
fn weight(value: f64) -> u32 {
    (value as f32).to_bits()
}
