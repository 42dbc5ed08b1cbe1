//! What may be listed, against counting leaf by leaf.

use super::*;

/// A table, items out of stock, and leaves that were seen.
fn any_user() -> impl Strategy<Value = (Table, Vec<Index>, Vec<Index>)> {
    let some = || prop::collection::vec(any::<Index>(), 0..40);
    (any_table(80), prop_oneof![Just(Vec::new()), some()], prop_oneof![Just(Vec::new()), some()])
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 1000, ..Default::default() })]

    #[test]
    fn nodes_without_a_leaf_that_may_be_listed_do_not_exist((table, out, seen) in any_user()) {
        let trie = table.trie();
        let out: Vec<u32> = out.iter().map(|at| index(at.index(trie.items()))).collect();
        let seen: Vec<u32> = seen.iter().map(|at| index(at.index(trie.leaves()))).collect();
        let stock = Stock::without(&trie, out.iter().copied());
        let of_user = Seen::new(&trie, &stock, &seen);
        let allowed = Allowed::new(&trie, &stock, &of_user);
        let in_stock = |leaf: u32| trie.items_of(leaf).any(|item| !out.contains(&item));
        let listed = |leaf: u32| in_stock(leaf) && !seen.contains(&leaf);
        for leaf in 0..index(trie.leaves()) {
            prop_assert_eq!((stock.contains(leaf), allowed.contains(leaf)), (in_stock(leaf), listed(leaf)));
            for end in leaf..=index(trie.leaves()) {
                prop_assert_eq!(stock.count(leaf..end) as usize, (leaf..end).filter(|&leaf| in_stock(leaf)).count());
            }
        }
        for item in 0..index(trie.items()) {
            prop_assert_eq!(stock.contains_item(&trie, item), !out.contains(&item));
        }
        for node in 0..index(trie.nodes()) {
            let count = |node: u32| trie.leaves_below(node).filter(|&leaf| listed(leaf)).count();
            prop_assert_eq!(allowed.count_below(node) as usize, count(node));
            let children: Vec<u32> = trie.children(node).filter(|&child| count(child) > 0).collect();
            prop_assert_eq!(allowed.children(node).collect::<Vec<_>>(), children.clone());
            let with_codes = children.iter().map(|&child| (trie.code(child), child));
            prop_assert!(allowed.children_with_codes(node).eq(with_codes.clone()));
            let mut by_runs = Vec::new();
            allowed.children_with_codes(node).for_each(|child| by_runs.push(child));
            prop_assert!(by_runs.into_iter().eq(with_codes));
            prop_assert_eq!(allowed.only_child(node), (children.len() == 1).then(|| children[0]));
        }
    }

    #[test]
    fn the_stock_of_all_takes_no_memory_and_leaves_nothing_out(table in any_table(80)) {
        let trie = table.trie();
        let stock = Stock::all(&trie);
        prop_assert_eq!((stock.is_all(), stock.size_bytes()), (true, 0));
        let nothing = Seen::default();
        let allowed = Allowed::new(&trie, &stock, &nothing);
        for node in 0..index(trie.nodes()) {
            prop_assert!(allowed.children(node).eq(trie.children(node)));
            prop_assert_eq!(allowed.count_below(node) as usize, trie.leaves_below(node).len());
        }
    }
}

#[test]
fn an_identifier_is_in_stock_as_long_as_one_of_its_items_is() {
    let trie = small_table().trie();
    let [w, x, z] = ["w", "x", "zz"].map(|id| trie.find(id).unwrap());
    let leaf = trie.leaf_of_item(x);
    let stock = Stock::without(&trie, [x, x]);
    assert!(stock.contains(leaf) && !stock.contains_item(&trie, x) && stock.contains_item(&trie, z));
    let stock = Stock::without(&trie, [z, w, x, u32::MAX]);
    assert_eq!([0, 1, 2].map(|leaf| stock.contains(leaf)), [true, false, false]);
    let seen = Seen::new(&trie, &stock, &[0]);
    let allowed = Allowed::new(&trie, &stock, &seen);
    assert_eq!((allowed.count_below(0), allowed.children(0).next()), (0, None));
}

#[test]
fn a_stock_takes_two_bits_per_leaf_and_one_per_node_and_counts_across_words() {
    let trie = random_table(10_000, vec![64; 4]).trie();
    let out = (0..index(trie.items())).filter(|item| item % 3 == 0);
    let stock = Stock::without(&trie, out);
    let (ranks, nodes) = (16 * (trie.leaves() / 64 + 1), 8 * (trie.nodes() / 64 + 1));
    assert_eq!(stock.size_bytes(), ranks + nodes + 4 * stock_out(&trie));
    let leaves = index(trie.leaves());
    for (start, end) in [(0, leaves), (0, 64), (63, 65), (64, 64), (1, 6_400), (6_400, leaves), (leaves, leaves)] {
        let expected = (start..end).filter(|&leaf| stock.contains(leaf)).count();
        assert_eq!(stock.count(start..end) as usize, expected, "{start}..{end}");
    }
}

/// Items of shared identifiers, every third item being out of stock, that are out when others are not.
fn stock_out(trie: &Trie) -> usize {
    let leaves = (0..index(trie.leaves())).map(|leaf| trie.items_of(leaf));
    leaves.filter(|items| items.clone().any(|item| item % 3 != 0)).flatten().filter(|item| item % 3 == 0).count()
}
