//! Keys and values of all sequences of a device, in one pair of tensors a layer.
//!
//! A row is one position of one sequence. A step writes the nodes of all sequences behind the rows in use, with one
//! copy a layer, and attention gathers rows by number. A sequence is a list of rows, so that a commit forgets nodes,
//! a fork shares its prefix and a close gives rows back without touching the device. When no row is left, those that
//! sequences still have move to the front: a copying garbage collection (Cheney 1970) whose roots are the sequences.
//!
//! Memory: rows for what open sequences may grow to and a quarter ([`SLACK`]) of it, or as much as that was before.
//! While rows move, one tensor more.

use candle_core::{DType, Device, Result, Tensor, bail};
use laser_cpu::ModelShape;

/// For so many rows that open sequences may need there is one more: a collection copies at most so many rows for each
/// row written since the last one.
const SLACK: usize = 4;

/// A sequence of an [`Arena`].
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct SequenceId(usize);

#[derive(Debug)]
struct Sequence {
    /// Rows of its positions; behind the committed ones those of the last step's nodes.
    rows: Vec<u32>,
    capacity: usize,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Arena {
    /// Keys and values `[kv_heads, rows, head_dim]`; empty before the first step, and after memory ran out while rows
    /// moved.
    layers: Vec<(Tensor, Tensor)>,
    shape: ModelShape,
    dtype: DType,
    device: Device,
    rows: usize,
    /// The rows before it are in use, or were.
    end: usize,
    sequences: Vec<Option<Sequence>>,
    /// Capacities of all open sequences.
    reserved: usize,
}

impl Arena {
    pub(super) fn new(shape: &ModelShape, dtype: DType, device: &Device) -> Self {
        Self {
            layers: Vec::new(),
            shape: shape.clone(),
            dtype,
            device: device.clone(),
            rows: 0,
            end: 0,
            sequences: Vec::new(),
            reserved: 0,
        }
    }

    /// Of keys and values.
    #[cfg(feature = "cuda")]
    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    #[cfg(feature = "cuda")]
    pub(super) fn kv_heads(&self) -> usize {
        self.shape.kv_heads
    }

    /// Elements of a key.
    #[cfg(feature = "cuda")]
    pub(super) fn head_dim(&self) -> usize {
        self.shape.head_dim
    }

    /// Bytes of a sequence that may grow to `capacity` positions, with its share of [`SLACK`].
    pub(super) fn bytes(&self, capacity: usize) -> usize {
        let ModelShape { layers, kv_heads, head_dim, .. } = self.shape;
        let row = 2 * layers * kv_heads * head_dim * self.dtype.size_in_bytes();
        (capacity + capacity.div_ceil(SLACK)) * row
    }

    /// A sequence that may grow to `capacity` positions, nodes of a step included.
    pub(super) fn open(&mut self, capacity: usize) -> SequenceId {
        self.insert(Vec::new(), capacity)
    }

    /// A sequence that begins with the first `length` positions of another.
    pub(super) fn fork(&mut self, from: SequenceId, length: usize, capacity: usize) -> SequenceId {
        let rows = self.rows_of(from)[..length].to_vec();
        self.insert(rows, capacity)
    }

    fn insert(&mut self, rows: Vec<u32>, capacity: usize) -> SequenceId {
        self.reserved += capacity;
        let sequence = Some(Sequence { rows, capacity });
        let free = self.sequences.iter().position(Option::is_none);
        let id = free.unwrap_or(self.sequences.len());
        match free {
            Some(id) => self.sequences[id] = sequence,
            None => self.sequences.push(sequence),
        }
        SequenceId(id)
    }

    pub(super) fn close(&mut self, id: SequenceId) {
        let closed = self.sequences.get_mut(id.0).and_then(Option::take);
        self.reserved -= closed.map_or(0, |sequence| sequence.capacity);
    }

    /// Keeps of the positions behind the first `length` those at `keep`.
    pub(super) fn commit(&mut self, id: SequenceId, length: usize, keep: &[usize]) {
        if let Some(Some(sequence)) = self.sequences.get_mut(id.0) {
            let nodes = sequence.rows.split_off(length);
            sequence.rows.extend(keep.iter().map(|&node| nodes[node]));
        }
    }

    /// The rows of a sequence's positions.
    pub(super) fn rows_of(&self, id: SequenceId) -> &[u32] {
        let sequence = self.sequences.get(id.0).and_then(Option::as_ref);
        sequence.map_or(&[], |sequence| &sequence.rows)
    }

    /// Room for a step of `count` nodes: the first of its rows. Moves rows if it must.
    pub(super) fn begin(&mut self, count: usize) -> Result<usize> {
        if self.end + count > self.rows {
            let rows = self.reserved + self.reserved.div_ceil(SLACK);
            self.collect(rows.max(self.rows)).inspect_err(|_| self.lose())?;
        }
        Ok(self.end)
    }

    /// Keys and values of a layer, `[kv_heads, rows, head_dim]`.
    pub(super) fn layer(&self, layer: usize) -> &(Tensor, Tensor) {
        &self.layers[layer]
    }

    /// Writes keys and values `[nodes, kv_heads, head_dim]` of a layer from row `start` on.
    pub(super) fn write(&self, layer: usize, start: usize, (keys, values): (&Tensor, &Tensor)) -> Result<()> {
        let all = self.layer(layer);
        let by_head = |tensor: &Tensor| tensor.transpose(0, 1)?.contiguous();
        all.0.slice_set(&by_head(keys)?, 1, start)?;
        all.1.slice_set(&by_head(values)?, 1, start)
    }

    /// Ends a step: a sequence has `nodes` more positions, in the next rows.
    pub(super) fn append(&mut self, id: SequenceId, nodes: usize) {
        let rows = self.end..self.end + nodes;
        self.end = rows.end;
        if let Some(Some(sequence)) = self.sequences.get_mut(id.0) {
            sequence.rows.extend(rows.map(number));
        }
    }

    /// Makes tensors of `rows` rows that begin with those that sequences have.
    fn collect(&mut self, rows: usize) -> Result<()> {
        if self.layers.is_empty() {
            return self.allocate(rows);
        }
        let mut index = self.renumber();
        self.end = index.len();
        if index.is_empty() {
            return self.allocate(rows);
        }
        index.resize(rows, 0);
        let index = Tensor::new(index, &self.device)?;
        for (keys, values) in &mut self.layers {
            *keys = moved(keys, &index, self.end)?;
            *values = moved(values, &index, self.end)?;
        }
        self.rows = rows;
        Ok(())
    }

    fn allocate(&mut self, rows: usize) -> Result<()> {
        let mut sequences = self.sequences.iter().flatten();
        if sequences.any(|sequence| !sequence.rows.is_empty()) {
            bail!("keys and values were lost when memory ran out");
        }
        let shape = (self.shape.kv_heads, rows, self.shape.head_dim);
        let zeros = || Tensor::zeros(shape, self.dtype, &self.device);
        let layers = (0..self.shape.layers).map(|_| Ok((zeros()?, zeros()?)));
        self.layers = layers.collect::<Result<_>>()?;
        self.rows = rows;
        Ok(())
    }

    /// The rows of all sequences, each once, and in the sequences their numbers among these.
    fn renumber(&mut self) -> Vec<u32> {
        let mut kept = Vec::new();
        let mut numbers = vec![u32::MAX; self.end];
        for sequence in self.sequences.iter_mut().flatten() {
            for row in &mut sequence.rows {
                let to = &mut numbers[*row as usize];
                if *to == u32::MAX {
                    *to = number(kept.len());
                    kept.push(*row);
                }
                *row = *to;
            }
        }
        kept
    }

    /// Some tensors have moved and some have not.
    fn lose(&mut self) {
        self.layers.clear();
        (self.rows, self.end) = (0, 0);
    }
}

/// The rows that `index` names, of which the first `kept` are in use; the others of a GPU are whatever memory held.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only a GPU leaves the others as they are"))]
fn moved(from: &Tensor, index: &Tensor, kept: usize) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if from.device().is_cuda() {
        return crate::cuda::rows::move_rows(from, index, kept);
    }
    from.index_select(index, 1)
}

/// A row's number, as devices take it.
#[expect(
    clippy::cast_possible_truncation,
    reason = "2^32 rows, of which the smallest models need 1 kB each, are not in any memory"
)]
pub(super) fn number(row: usize) -> u32 {
    row as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::tests::tiny;

    /// Keys and values of new positions, every element being its number.
    fn numbered(first: usize, count: usize) -> Tensor {
        let model = tiny();
        let row = |row: usize| vec![row as f32; model.kv_heads * model.head_dim];
        let rows: Vec<f32> = (first..).take(count).flat_map(row).collect();
        let shape = (count, model.kv_heads, model.head_dim);
        Tensor::from_vec(rows, shape, &Device::Cpu).unwrap()
    }

    /// Elements that the last layer holds for a sequence.
    fn numbers(arena: &Arena, id: SequenceId) -> Vec<f32> {
        let rows = arena.rows_of(id).to_vec();
        if rows.is_empty() {
            return Vec::new();
        }
        let index = Tensor::new(rows, &Device::Cpu).unwrap();
        let (keys, values) = arena.layers.last().unwrap();
        let found = [keys, values].map(|all| {
            let rows = all.index_select(&index, 1).unwrap();
            let rows = rows.transpose(0, 1).unwrap().flatten_from(1).unwrap();
            rows.to_vec2::<f32>().unwrap()
        });
        assert_eq!(found[0], found[1]);
        let same = |row: &Vec<f32>| row.iter().all(|value| *value == row[0]);
        assert!(found[0].iter().all(same));
        found[0].iter().map(|row| row[0]).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn sequences_keep_what_was_written_whatever_moves(
            actions in proptest::collection::vec((0..4_u8, any::<u32>(), 1..40_usize), 1..80),
        ) {
            let mut arena = Arena::new(&tiny(), DType::F32, &Device::Cpu);
            let mut open: Vec<(SequenceId, usize, Vec<f32>)> = Vec::new();
            let (mut next, mut most) = (0, 0);
            for (action, pick, size) in actions {
                let at = pick as usize % open.len().max(1);
                match action {
                    0 => open.push((arena.open(size), size, Vec::new())),
                    1 if !open.is_empty() => {
                        let (from, _, content) = &open[at];
                        let length = size.min(content.len());
                        let content = content[..length].to_vec();
                        open.push((arena.fork(*from, length, size), size, content));
                    }
                    2 if !open.is_empty() => arena.close(open.swap_remove(at).0),
                    // A step of all sequences that have room, of which every other node is kept.
                    _ => {
                        let room = |(_, capacity, content): &(_, usize, Vec<f32>)| {
                            (capacity - content.len()).min(size)
                        };
                        let counts: Vec<usize> = open.iter().map(room).collect();
                        let total = counts.iter().sum();
                        most = most.max(open.iter().map(|sequence| sequence.1).sum());
                        if total == 0 {
                            continue;
                        }
                        let start = arena.begin(total).unwrap();
                        for layer in 0..tiny().layers {
                            let new = numbered(next, total);
                            arena.write(layer, start, (&new, &new)).unwrap();
                        }
                        for ((id, _, content), nodes) in open.iter_mut().zip(counts) {
                            let length = content.len();
                            arena.append(*id, nodes);
                            let keep: Vec<usize> = (0..nodes).step_by(2).collect();
                            arena.commit(*id, length, &keep);
                            content.extend(keep.iter().map(|&node| (next + node) as f32));
                            next += nodes;
                        }
                    }
                }
                for (id, _, content) in &open {
                    prop_assert_eq!(&numbers(&arena, *id), content);
                }
                prop_assert!(arena.rows <= most + most.div_ceil(SLACK));
            }
        }
    }

    #[test]
    fn after_a_failed_move_nothing_is_read_until_all_is_closed() {
        let mut arena = Arena::new(&tiny(), DType::F32, &Device::Cpu);
        let id = arena.open(8);
        arena.begin(2).unwrap();
        arena.append(id, 2);
        arena.lose();
        let refused = arena.begin(1).unwrap_err().to_string();
        assert!(refused.contains("lost when memory ran out"), "{refused}");
        arena.close(id);
        arena.open(4);
        assert_eq!(arena.begin(4).unwrap(), 0);
    }
}
