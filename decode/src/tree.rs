//! The draft tree, which one forward of the target verifies.
//!
//! Node 0 is the root, the last token of the context, whose key and value are not computed yet. Every other node is a
//! drafted token. Parents precede their children, so one pass from front to back visits the tree from the top down. It
//! is stored as a struct of arrays (17 bytes per node) that is reused from step to step: a tree that has reached its
//! size allocates nothing.

use crate::Token;

/// The parent of the root.
pub const ROOT_PARENT: u32 = u32::MAX;

/// The parents of a chain of nodes: each one's is the node before it, the first one's [`ROOT_PARENT`].
pub fn chain_parents(length: usize) -> impl Iterator<Item = u32> {
    (0..).map(|node: u32| node.wrapping_sub(1)).take(length)
}

/// The source of a drafted token: the one that contributes most of its probability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The pool: permanent branches, earlier texts of the group.
    Pool,
    /// The entity's own previous text, a temporary branch.
    Previous,
    /// The prompt and the text generated so far, a temporary branch. Also the root's source.
    Context,
    /// The prompt alone: no other source has the token there, however rarely.
    Prompt,
    /// The draft model.
    Model,
}

/// A tree of drafted tokens, a struct of arrays in which parents precede children.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DraftTree {
    tokens: Vec<Token>,
    parents: Vec<u32>,
    depths: Vec<u32>,
    probabilities: Vec<f32>,
    sources: Vec<Source>,
}

impl DraftTree {
    /// Creates a tree without any node, not even the root; see [`DraftTree::reset`].
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a tree of one branch with `tokens[0]` as the root: a chunk of prompt to prefill.
    #[must_use]
    pub fn chain(tokens: &[Token]) -> Self {
        let mut tree = Self::new();
        let mut rest = tokens.iter();
        if let Some(&root) = rest.next() {
            tree.reset(root);
        }
        for (parent, &token) in rest.enumerate() {
            tree.push(parent, token, 1.0, Source::Context);
        }
        tree
    }

    /// Drops all but the root and the first `drafted` nodes. Parents precede children, so the rest is still a tree.
    pub fn truncate(&mut self, drafted: usize) {
        let nodes = drafted + 1;
        self.tokens.truncate(nodes);
        self.parents.truncate(nodes);
        self.depths.truncate(nodes);
        self.probabilities.truncate(nodes);
        self.sources.truncate(nodes);
    }

    /// Drops the nodes that are not to be kept and all below them. The root is always kept.
    ///
    /// # Panics
    /// If there are fewer answers than nodes.
    pub fn retain(&mut self, keep: &[bool]) {
        let mut kept: Vec<Option<u32>> = Vec::with_capacity(self.len());
        let mut nodes = 0;
        for (node, &keep) in keep[..self.len()].iter().enumerate() {
            let parent = self.parents[node];
            let above = if parent == ROOT_PARENT { Some(ROOT_PARENT) } else { kept[parent as usize] };
            let above = above.filter(|_| keep || node == 0);
            kept.push(above.and_then(|_| u32::try_from(nodes).ok()));
            let Some(above) = above else { continue };
            self.tokens[nodes] = self.tokens[node];
            self.parents[nodes] = above;
            self.depths[nodes] = self.depths[node];
            self.probabilities[nodes] = self.probabilities[node];
            self.sources[nodes] = self.sources[node];
            nodes += 1;
        }
        self.truncate(nodes.saturating_sub(1));
    }

    /// Drops every node and keeps the allocations.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.parents.clear();
        self.depths.clear();
        self.probabilities.clear();
        self.sources.clear();
    }

    /// Resets the tree to a root of probability 1 and depth 0.
    pub fn reset(&mut self, root: Token) {
        self.clear();
        self.append(ROOT_PARENT, root, 0, 1.0, Source::Context);
    }

    /// Appends a child of `parent` and returns its node. `probability` is that of the whole path.
    ///
    /// # Panics
    /// If there is no node `parent`.
    pub fn push(&mut self, parent: usize, token: Token, probability: f32, source: Source) -> usize {
        let depth = self.depths[parent] + 1;
        let parent = u32::try_from(parent).expect("a tree has fewer than 2^32 nodes");
        self.append(parent, token, depth, probability, source);
        self.len() - 1
    }

    fn append(&mut self, parent: u32, token: Token, depth: u32, probability: f32, source: Source) {
        self.tokens.push(token);
        self.parents.push(parent);
        self.depths.push(depth);
        self.probabilities.push(probability);
        self.sources.push(source);
    }

    /// Number of nodes, including the root.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there is no node, not even a root.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Number of drafted nodes: all except the root.
    #[must_use]
    pub fn drafted(&self) -> usize {
        self.len().saturating_sub(1)
    }

    /// The token of each node.
    #[must_use]
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// The parent of each node, which is less than the node itself; [`ROOT_PARENT`] for the root.
    #[must_use]
    pub fn parents(&self) -> &[u32] {
        &self.parents
    }

    /// The distance of each node from the root. A node's position in its text is the root's position plus its depth.
    #[must_use]
    pub fn depths(&self) -> &[u32] {
        &self.depths
    }

    /// The estimated probability per node that it and all its ancestors are accepted.
    #[must_use]
    pub fn probabilities(&self) -> &[f32] {
        &self.probabilities
    }

    /// The source of each node.
    #[must_use]
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// Iterates over the children of `node` in ascending order. Costs a pass over the nodes after it.
    pub fn children(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        (node + 1..self.len()).filter(move |&child| self.parents[child] as usize == node)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Any tree of up to 24 drafted nodes over `alphabet` tokens.
    pub(crate) fn any_tree(alphabet: Token) -> impl Strategy<Value = DraftTree> {
        let source = prop_oneof![Just(Source::Pool), Just(Source::Prompt)];
        prop::collection::vec((any::<prop::sample::Index>(), 0..alphabet, source), 0..24).prop_map(|nodes| {
            let mut tree = DraftTree::new();
            tree.reset(0);
            for (parent, token, source) in nodes {
                let parent = parent.index(tree.len());
                let siblings: Vec<_> = tree.children(parent).map(|c| tree.tokens[c]).collect();
                if !siblings.contains(&token) {
                    tree.push(parent, token, 1.0, source);
                }
            }
            tree
        })
    }

    pub(crate) fn path_of(tree: &DraftTree, node: usize) -> Vec<usize> {
        let mut path = vec![node];
        while tree.parents[path[0]] != ROOT_PARENT {
            path.insert(0, tree.parents[path[0]] as usize);
        }
        path
    }

    #[test]
    fn chain_is_one_branch_with_rising_depths() {
        let tree = DraftTree::chain(&[7, 8, 9]);
        assert_eq!(tree.tokens(), [7, 8, 9]);
        assert_eq!(tree.parents(), [ROOT_PARENT, 0, 1]);
        assert_eq!(tree.depths(), [0, 1, 2]);
        assert_eq!(tree.drafted(), 2);
        assert!(DraftTree::chain(&[]).is_empty());
    }

    #[test]
    fn reset_leaves_the_root_alone() {
        let mut tree = DraftTree::chain(&[7, 8, 9]);
        tree.reset(4);
        assert_eq!(tree, DraftTree::chain(&[4]));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn what_is_kept_of_a_tree_are_the_paths_of_kept_nodes(tree in any_tree(3), bits in any::<u32>()) {
            let keep: Vec<bool> = (0..tree.len()).map(|node| bits >> node & 1 == 1).collect();
            let of = |tree: &DraftTree, node: usize| {
                let tokens: Vec<Token> = path_of(tree, node).iter().map(|&node| tree.tokens()[node]).collect();
                (tokens, tree.depths()[node], tree.sources()[node])
            };
            let is_kept = |node: &usize| path_of(&tree, *node).iter().all(|&above| above == 0 || keep[above]);
            let expected: Vec<_> = (0..tree.len()).filter(is_kept).map(|node| of(&tree, node)).collect();
            let mut kept = tree.clone();
            kept.retain(&keep);
            prop_assert_eq!((0..kept.len()).map(|node| of(&kept, node)).collect::<Vec<_>>(), expected);
        }

        #[test]
        fn children_and_depths_agree_with_the_paths(tree in any_tree(3)) {
            for node in 0..tree.len() {
                let path = path_of(&tree, node);
                prop_assert_eq!(tree.depths()[node] as usize, path.len() - 1);
                for other in 0..tree.len() {
                    let is_child = tree.parents()[other] as usize == node && other != 0;
                    prop_assert_eq!(tree.children(node).any(|child| child == other), is_child);
                }
            }
        }
    }
}
