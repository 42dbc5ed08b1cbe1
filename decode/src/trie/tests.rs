//! Trie files and what may be listed, against sorted tables of all identifiers; damage is refused.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::sealed::{BYTE_ORDER, seal};

#[path = "../../fuzz/open_and_read.rs"]
pub(super) mod open_and_read;

mod damage;
mod filters;

/// Items with their identifiers, and how many codes every level has.
#[derive(Debug, Clone)]
pub(super) struct Table {
    pub(super) codes: Vec<usize>,
    pub(super) rows: Vec<(String, Vec<u16>)>,
}

impl Table {
    fn meta(&self) -> TrieMeta {
        let table = |(level, &codes): (char, &usize)| (0..codes).map(|code| format!("<{level}_{code}>")).collect();
        TrieMeta { name: "films".to_owned(), integer_ids: false, codes: ('a'..).zip(&self.codes).map(table).collect() }
    }

    fn items(&self) -> impl Iterator<Item = TrieItem<'_>> {
        self.rows.iter().map(|(id, codes)| TrieItem { id, codes })
    }

    pub(super) fn build(&self) -> Vec<u8> {
        build_trie(&self.meta(), self.items()).unwrap()
    }

    fn trie(&self) -> Trie {
        checked(self.build()).unwrap()
    }

    /// The ids of every identifier.
    fn identifiers(&self) -> BTreeMap<&[u16], Vec<&str>> {
        let mut identifiers: BTreeMap<&[u16], Vec<&str>> = BTreeMap::new();
        for (id, codes) in &self.rows {
            identifiers.entry(codes).or_default().push(id);
        }
        identifiers
    }

    /// The nodes as prefixes, in the order of their numbers.
    fn prefixes(&self) -> Vec<&[u16]> {
        let level = |depth: usize| self.rows.iter().map(move |(_, codes)| &codes[..depth]).collect::<BTreeSet<_>>();
        (0..=self.codes.len()).flat_map(level).collect()
    }
}

/// Tables of at most so many items, many of which share a prefix or all codes.
pub(super) fn any_table(items: usize) -> impl Strategy<Value = Table> {
    let ids = prop::collection::btree_set("[ab\0é]{0,12}", 1..=items);
    let ids = ids.prop_map(Vec::from_iter).prop_shuffle();
    (prop::collection::vec(1..=4usize, 1..=5), ids).prop_flat_map(|(codes, ids)| {
        let identifier = prop::collection::vec(any::<Index>(), codes.len());
        prop::collection::vec(identifier, ids.len()).prop_map(move |identifiers| {
            let number = |(at, &codes): (&Index, &usize)| u16::try_from(at.index(codes)).unwrap();
            let identifier = |places: Vec<Index>| places.iter().zip(&codes).map(number).collect();
            let rows = ids.iter().cloned().zip(identifiers.into_iter().map(identifier)).collect();
            Table { codes: codes.clone(), rows }
        })
    })
}

/// Opens and verifies.
fn checked(bytes: Vec<u8>) -> Result<Trie, TrieError> {
    let trie = Trie::open(bytes.into())?;
    trie.verify().map(|()| trie)
}

/// Four items with three identifiers on two levels.
fn small_table() -> Table {
    let row = |id: &str, codes: [u16; 2]| (id.to_owned(), codes.to_vec());
    Table { codes: vec![2, 3], rows: vec![row("x", [1, 2]), row("y", [0, 1]), row("zz", [1, 2]), row("w", [1, 0])] }
}

pub(super) fn small_trie() -> Vec<u8> {
    small_table().build()
}

/// Bytes of nodes alone: what is neither header nor ids nor their index.
fn node_bytes(trie: &Trie) -> usize {
    let at = trie.header.sections;
    trie.size_bytes() - at[0] - (at[4] - at[2]) - (at[6] - at[5])
}

/// A multiplicative congruential generator: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % end
    }
}

/// Random identifiers.
fn random_table(items: usize, codes: Vec<usize>) -> Table {
    let mut random = Random(7);
    let mut identifier = || codes.iter().map(|&codes| random.below(codes as u64).try_into().unwrap()).collect();
    let rows = (0..items).map(|item| (item.to_string(), identifier())).collect();
    Table { codes: codes.clone(), rows }
}

#[test]
fn what_was_built_is_what_opens() {
    let trie = Trie::open(small_trie().into()).unwrap();
    assert_eq!(trie.meta(), &small_table().meta());
    assert_eq!((trie.levels(), trie.nodes(), trie.leaves(), trie.items()), (2, 6, 3, 4));
    assert_eq!([0, 1, 2, 3, usize::MAX].map(|depth| trie.level(depth)), [0..1, 1..3, 3..6, 6..6, 6..6]);
    assert_eq!([0, 1, 2, 3].map(|node| trie.children(node)), [1..3, 3..4, 4..6, 0..0]);
    assert_eq!([0, 1, 2, 3, 4, 5].map(|node| trie.code(node)), [0, 0, 1, 1, 0, 2]);
    assert_eq!([0, 1, 2].map(|leaf| trie.items_of(leaf)), [0..1, 1..2, 2..4]);
    assert_eq!([0, 1, 2, 3].map(|item| trie.item_id(item)), ["y", "w", "x", "zz"]);
    assert_eq!(
        ["w", "x", "y", "zz", "z", ""].map(|id| trie.find(id)),
        [Some(1), Some(2), Some(0), Some(3), None, None]
    );
    assert_eq!(trie.path(2), [2, 5]);
    assert_eq!(trie.leaves_of([3, 0, 2]), [0, 2]);
    assert_eq!(
        trie.size_bytes(),
        trie.header.sections[0] + 4 * (3 + 1) + 4 * (3 + 1) + 4 * (4 + 1) + 4 * 4 + 2 * 6 + 5
    );
    assert_eq!(trie.digest(), Trie::open(small_trie().into()).unwrap().digest());
    assert_ne!(trie.digest(), random_table(4, vec![2, 3]).trie().digest());
}

#[test]
fn as_many_levels_and_codes_as_fit() {
    let codes = vec![3; LEVELS_MAX];
    let trie = random_table(200, codes).trie();
    assert_eq!((trie.levels(), trie.path(7).len()), (LEVELS_MAX, LEVELS_MAX));
    let codes = vec![u16::MAX; 1];
    let table = Table { codes: vec![CODES_MAX], rows: vec![("last".to_owned(), codes.clone())] };
    assert_eq!(table.trie().find_path(&codes), Some(1));
}

#[test]
fn a_node_takes_six_bytes() {
    for items in [1, 100, 20_000] {
        let trie = random_table(items, vec![256; 4]).trie();
        assert_eq!(node_bytes(&trie), 6 * trie.nodes() + 8);
    }
}

#[test]
fn integer_ids_are_integers() {
    let meta = TrieMeta { integer_ids: true, ..small_table().meta() };
    let built = |id: &str| build_trie(&meta, [TrieItem { id, codes: &[0, 0] }]);
    for id in ["0", "7", "-7", "9223372036854775807", "-9223372036854775808"] {
        assert_eq!(checked(built(id).unwrap()).unwrap().find(id), Some(0), "{id}");
    }
    for id in ["", "x", "7 ", "07", "+7", "-0", "-07", "--7", "00", "9223372036854775808"] {
        let error = built(id).unwrap_err().to_string();
        assert!(error.contains(&format!("row 0 (item {id:?}) has an id that is not an integer")), "{error}");
    }
}

type Change<'a> = &'a dyn Fn(&mut Table);

#[test]
fn what_cannot_be_built_is_refused_by_row() {
    let refused = |change: Change| {
        let mut table = small_table();
        change(&mut table);
        build_trie(&table.meta(), table.items()).unwrap_err().to_string()
    };
    let cases: [(Change, &str); 8] = [
        (&|table| table.rows.clear(), "trie films: no items: a trie needs at least one"),
        (&|table| table.rows[2].1 = vec![1], "row 2 (item \"zz\") has 1 codes, expected 2: one per level"),
        (&|table| table.rows[1].1 = vec![0; 3], "row 1 (item \"y\") has 3 codes, expected 2: one per level"),
        (&|table| table.rows[3].1 = vec![1, 3], "row 3 (item \"w\") has code 3 at level 2, whose table has 3 codes"),
        (&|table| table.rows[3].0 = "x".to_owned(), "row 3 has the id \"x\" of row 0: name it once"),
        (&|table| table.codes.clear(), "0 levels of codes, expected 1 to 16"),
        (&|table| table.codes = vec![2; 17], "17 levels of codes, expected 1 to 16"),
        (&|table| table.codes[1] = CODES_MAX + 1, "level 2 has 65537 codes, expected 1 to 65536"),
    ];
    for (change, expected) in cases {
        let error = refused(change);
        assert!(error.starts_with("trie films: ") && error.contains(expected), "{error}");
    }
}

#[test]
fn the_first_row_with_an_earlier_id_is_named() {
    let row = |id: &str, codes: [u16; 2]| (id.to_owned(), codes.to_vec());
    // In the order of identifiers, and of ids, row 4 comes before the others.
    let rows = [row("q", [1, 1]), row("p", [1, 2]), row("q", [0, 0]), row("q", [0, 1]), row("p", [0, 0])];
    let table = Table { rows: rows.to_vec(), ..small_table() };
    let error = build_trie(&table.meta(), table.items()).unwrap_err().to_string();
    assert!(error.contains("row 2 has the id \"q\" of row 0"), "{error}");
}

#[test]
fn code_tables_without_sense_are_refused() {
    let refused = |codes: [&str; 2]| {
        let meta = TrieMeta { codes: vec![codes.map(str::to_owned).to_vec()], ..small_table().meta() };
        build_trie(&meta, [TrieItem { id: "x", codes: &[0] }]).unwrap_err().to_string()
    };
    let twice = refused(["<a_0>", "<a_0>"]);
    assert!(twice.contains("level 1 has the code \"<a_0>\" twice"), "{twice}");
    let empty = refused(["<a_0>", ""]);
    assert!(empty.contains("level 1 has an empty code"), "{empty}");
    let none = TrieMeta { codes: vec![Vec::new()], ..small_table().meta() };
    let none = build_trie(&none, []).unwrap_err().to_string();
    assert!(none.contains("level 1 has 0 codes"), "{none}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn nodes_are_the_sorted_prefixes(table in any_table(40)) {
        let (trie, prefixes) = (table.trie(), table.prefixes());
        prop_assert_eq!(trie.nodes(), prefixes.len());
        let leaves: Vec<_> = table.identifiers().into_keys().collect();
        prop_assert_eq!(trie.leaves(), leaves.len());
        for (node, &prefix) in (0..).zip(&prefixes) {
            let depth = prefix.len();
            prop_assert_eq!((trie.depth(node), trie.level(depth).contains(&node)), (depth, true));
            prop_assert_eq!(trie.code(node), prefix.last().copied().unwrap_or(0));
            prop_assert_eq!(trie.find_path(prefix), Some(node));
            let parent = prefix.split_last().map(|(_, before)| before);
            prop_assert_eq!(trie.parent(node).map(|parent| prefixes[parent as usize]), parent);
            let children = trie.children(node).map(|child| prefixes[child as usize]);
            let is_child = |child: &&[u16]| child.len() == depth + 1 && child.starts_with(prefix);
            prop_assert!(children.eq(prefixes.iter().copied().filter(is_child)));
            let codes = trie.codes_of(trie.children(node)).iter().copied();
            prop_assert!(codes.eq(trie.children(node).map(|child| trie.code(child))));
            for code in 0..5 {
                let child = prefixes.iter().position(|child| child.strip_prefix(prefix) == Some(&[code]));
                prop_assert_eq!(trie.child(node, code).map(|child| child as usize), child);
            }
            let below = trie.leaves_below(node).map(|leaf| leaves[leaf as usize]);
            prop_assert!(below.eq(leaves.iter().copied().filter(|leaf| leaf.starts_with(prefix))));
            let leaf = trie.leaf_of_node(node).map(|leaf| leaves[leaf as usize]);
            prop_assert_eq!(leaf, (depth == trie.levels()).then_some(prefix));
        }
        prop_assert_eq!(trie.find_path(&[4]), None);
    }

    #[test]
    fn leaves_have_their_items_in_the_order_of_rows(table in any_table(40)) {
        let (trie, prefixes) = (table.trie(), table.prefixes());
        for (leaf, (identifier, ids)) in (0..).zip(table.identifiers()) {
            let items = trie.items_of(leaf);
            prop_assert!(items.clone().map(|item| trie.item_id(item)).eq(ids.iter().copied()));
            prop_assert!(items.clone().all(|item| trie.leaf_of_item(item) == leaf));
            prop_assert!(items.eq(ids.iter().map(|id| trie.find(id).unwrap())));
            let path: Vec<_> = trie.path(leaf).iter().map(|&node| prefixes[node as usize]).collect();
            prop_assert!(path.into_iter().eq((1..=identifier.len()).map(|depth| &identifier[..depth])));
            prop_assert_eq!(trie.leaf_of_node(trie.leaf_node(leaf)), Some(leaf));
        }
        prop_assert_eq!(trie.find("c"), None);
        let items: Vec<u32> = table.rows.iter().map(|(id, _)| trie.find(id).unwrap()).collect();
        prop_assert!(trie.leaves_of(items).into_iter().eq(0..index(trie.leaves())));
    }

    #[test]
    fn only_the_order_of_rows_that_share_an_identifier_matters(table in any_table(40)) {
        prop_assert_eq!(table.build(), table.build());
        let mut sorted = table.clone();
        sorted.rows.sort_by(|(_, a), (_, b)| b.cmp(a));
        prop_assert_eq!(sorted.build(), table.build());
    }

    #[test]
    fn numbers_out_of_range_stand_for_nothing(table in any_table(20), beyond in 0..1u32 << 31) {
        let trie = table.trie();
        let [node, leaf, item] = [trie.nodes(), trie.leaves(), trie.items()].map(|end| index(end) + beyond);
        let ranges = [trie.children(node), trie.leaves_below(node), trie.items_of(leaf)];
        prop_assert!(ranges.iter().all(Range::is_empty), "{:?}", ranges);
        prop_assert_eq!((trie.parent(node), trie.leaf_of_node(node), trie.item_id(item)), (None, None, ""));
        open_and_read::read(&trie);
    }
}

/// Real identifiers, where they are present: `LASER_SHARED`, else `../shared` beside the workspace.
fn beauty() -> Option<Table> {
    let beside = || std::path::absolute(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared")).unwrap();
    let shared = std::env::var_os("LASER_SHARED").map_or_else(beside, std::path::PathBuf::from);
    let path = shared.join("data/atspeed-beauty/items.jsonl");
    let Ok(lines) = std::fs::read_to_string(&path) else {
        // Past the test harness, which shows only what failing tests print; tests/run.sh ends with these lines.
        let skipped = format!("skipped: {} is not there; set LASER_SHARED\n", path.display());
        std::io::Write::write_all(&mut std::io::stderr(), skipped.as_bytes()).unwrap();
        return None;
    };
    // Rows begin with {"recid": 0, "asin": "B000P1S0NI", "sid": ["<a_47>", "<b_103>", "<c_234>", "<d_99>"],
    let row = |line: &str| {
        let id = line.strip_prefix("{\"recid\": ").unwrap().split(',').next().unwrap();
        let sid = line.split("\"sid\": [").nth(1).unwrap().split(']').next().unwrap();
        let number = |code: &str| code.trim_matches(['<', '>', '"']).split('_').nth(1).unwrap().parse().unwrap();
        (id.to_owned(), sid.split(", ").map(number).collect())
    };
    Some(Table { codes: vec![256; 4], rows: lines.lines().map(row).collect() })
}

#[test]
fn beauty_has_the_prefixes_and_the_shared_identifiers_that_are_known() {
    let Some(table) = beauty() else {
        return;
    };
    let meta = TrieMeta { integer_ids: true, ..table.meta() };
    let trie = checked(build_trie(&meta, table.items()).unwrap()).unwrap();
    assert_eq!([1, 2, 3, 4].map(|depth| trie.level(depth).len()), [91, 6_539, 11_172, 12_023]);
    let shared: Vec<usize> =
        (0..index(trie.leaves())).map(|leaf| trie.items_of(leaf).len()).filter(|&items| items > 1).collect();
    assert_eq!((trie.items(), shared.len(), shared.iter().sum::<usize>()), (12_035, 9, 21));
    let nothing = Seen::default();
    let (stock, percent) = (Stock::all(&trie), |part: usize, of: usize| (100 * part + of / 2) / of);
    let allowed = Allowed::new(&trie, &stock, &nothing);
    let forced = [2, 3].map(|depth| {
        let nodes = trie.level(depth);
        percent(nodes.clone().filter(|&node| allowed.only_child(node).is_some()).count(), nodes.len())
    });
    assert_eq!(forced, [65, 94]);
    assert_eq!(node_bytes(&trie), 6 * trie.nodes() + 8);
    for (row, (id, codes)) in table.rows.iter().enumerate() {
        let item = trie.find(id).unwrap();
        assert_eq!(trie.find_path(codes), Some(trie.leaf_node(trie.leaf_of_item(item))), "row {row}");
    }
}
