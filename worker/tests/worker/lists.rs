//! Lists: against scoring every item, and whatever is drafted, batched and chunked, the plain search's.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use laser_decode::{
    CodeShares, Method, Neighbours, NeighboursOptions, Normalisation, ROOT_PARENT, Stock, TargetScores, Trie, TrieItem,
    TrieMeta, build_code_pool, build_neighbours, build_trie,
};
use laser_engine::{Engine, EngineOptions, FakeEngine, FakeOptions, Segment};
use laser_worker::cost::StepCost;
use laser_worker::generate::{Generated, Request, TextError, TextGenerator};
use laser_worker::lists::{Catalogue, Counted, ListDraft, ListDraftModel, ListGenerator, ListOptions, ListSampling};

use crate::support::{fake_options, fixture, tokenizer, tokens};

const LEVELS: usize = 4;
const CODES: u16 = 6;
const ITEMS: u32 = 300;

/// 300 items, of which the first two share an identifier.
fn trie() -> Trie {
    let names = |level: usize| (0..CODES).map(|code| format!("<{level}_{code}>")).collect();
    let meta = TrieMeta { name: "items".into(), integer_ids: true, codes: (0..LEVELS).map(names).collect() };
    let rows: Vec<(String, Vec<u16>)> = (0..ITEMS)
        .map(|item| {
            let random = tokens(item.max(1) + 17, LEVELS);
            (item.to_string(), random.iter().map(|token| u16::try_from(token % u32::from(CODES)).unwrap()).collect())
        })
        .collect();
    let rows = rows.iter().map(|(id, codes)| TrieItem { id, codes });
    Trie::open(Bytes::from(build_trie(&meta, rows).unwrap())).unwrap()
}

fn catalogue(trie: &Trie) -> Catalogue {
    let token = |level: usize, code: u16| 200 + u32::try_from(level).unwrap() * 100 + u32::from(code);
    Catalogue {
        trie: trie.clone(),
        tokens: (0..LEVELS).map(|level| (0..CODES).map(|code| token(level, code)).collect()).collect(),
        stock: Stock::all(trie),
        counted: None,
        codes: None,
    }
}

/// What 40 users of this catalogue have.
fn histories() -> Vec<Vec<u32>> {
    let history = |user: u32| (0..6).map(|at| (user * 53 + at * at * 7) % ITEMS).collect();
    (0..40).map(history).collect()
}

/// The catalogue with all that histories say of it.
fn counted(trie: &Trie, histories: &[Vec<u32>]) -> Catalogue {
    let bytes = build_neighbours(NeighboursOptions::default(), ITEMS, histories.iter()).unwrap();
    let counted = Counted::new(trie.clone(), Neighbours::open(bytes.into()).unwrap());
    let codes = CodeShares::open(build_code_pool(trie, histories).unwrap().into(), trie.clone()).unwrap();
    Catalogue { counted: Some(counted), codes: Some(codes), ..catalogue(trie) }
}

/// Every source of drafts but draft models, and the choice among them.
fn drafts() -> Vec<ListDraft> {
    let counted = Method::ALL.map(ListDraft::Counted);
    [ListDraft::Trie, ListDraft::Listed]
        .into_iter()
        .chain(counted)
        .chain([ListDraft::Retrieval, ListDraft::Auto])
        .collect()
}

fn options() -> ListOptions {
    ListOptions {
        items: 5,
        width: 5,
        normalisation: Normalisation::Vocabulary,
        temperature: None,
        sampling: ListSampling::StochasticBeam,
        repeat: false,
        all_ties: true,
        draft: ListDraft::None,
        nodes: 100,
        steps: 3,
        batch: 1,
        step_tokens: 512,
        cost: None,
    }
}

fn model() -> Box<dyn Engine> {
    laser_engine::load(&EngineOptions::new(fixture())).unwrap()
}

fn requests(trie: &Trie) -> Vec<Request> {
    let catalogue = Arc::new(counted(trie, &histories()));
    let request = |id: u32| Request {
        id: u64::from(id),
        prompt: tokens(id + 5, 3 + 11 * id as usize),
        history: (0..4).map(|at| (id * 37 + at * 11) % ITEMS).chain([0]).collect(),
        // The first user is new, and the last item is no more in the catalogue.
        previous_items: (0..id).map(|at| (id * 91 + at * 17) % ITEMS).chain((id > 0).then_some(ITEMS)).collect(),
        catalogue: Some(catalogue.clone()),
        key: u64::from(id) * 1001,
        ..Request::default()
    };
    (0..5).map(request).collect()
}

/// The lists of the requests, in their order.
fn lists(generator: &mut ListGenerator, requests: &[Request]) -> Vec<Result<Generated, TextError>> {
    requests.iter().for_each(|request| generator.submit(request.clone()));
    let mut finished = Vec::new();
    while generator.load() > 0 {
        finished.extend(generator.step().unwrap());
    }
    finished.sort_by_key(|finished| finished.id);
    finished.into_iter().map(|finished| finished.result).collect()
}

fn items(lists: &[Result<Generated, TextError>]) -> Vec<Vec<(u32, f64)>> {
    lists.iter().map(|list| list.as_ref().unwrap().items.clone()).collect()
}

/// The log probability of each code behind the prompt, one token a forward.
fn score(engine: &mut dyn Engine, prompt: &[u32], codes: &[u32]) -> f64 {
    let slot = engine.open(prompt.len() + codes.len()).unwrap();
    let size = engine.info().vocab_size;
    let mut sum = 0.0;
    for (at, &token) in prompt.iter().chain(codes).enumerate() {
        let segment = Segment { slot, tokens: &[token], parents: &[ROOT_PARENT], ..Segment::default() };
        let scores = engine.step(&[segment], size).unwrap();
        engine.commit(slot, &[0]).unwrap();
        if let Some(next) = (at + 1).checked_sub(prompt.len()).and_then(|next| codes.get(next)) {
            let found = scores[0].top(0).iter().find(|candidate| candidate.token == *next).unwrap();
            sum += f64::from(found.log_probability);
        }
    }
    engine.close(slot);
    sum
}

#[test]
fn a_list_as_wide_as_the_catalogue_has_the_best_of_all_items() {
    let trie = trie();
    let wide = ListOptions { items: 20, width: trie.leaves(), draft: ListDraft::Trie, ..options() };
    let request = &requests(&trie)[1];
    let mut generator = ListGenerator::new(model(), tokenizer(), wide.clone());
    let list = items(&lists(&mut generator, std::slice::from_ref(request))).remove(0);
    let mut engine = model();
    let mut expected: Vec<(u32, f64)> = (0..u32::try_from(trie.leaves()).unwrap())
        .map(|leaf| {
            let path = trie.path(leaf);
            let codes: Vec<u32> = path
                .iter()
                .zip(&catalogue(&trie).tokens)
                .map(|(&node, tokens)| tokens[trie.code(node) as usize])
                .collect();
            (leaf, score(engine.as_mut(), &request.prompt, &codes))
        })
        .collect();
    expected.sort_by(|a, b| b.1.total_cmp(&a.1));
    let expected = expected.into_iter().flat_map(|(leaf, score)| trie.items_of(leaf).map(move |item| (item, score)));
    let expected = expected.filter(|(item, _)| !request.history.contains(item));
    for ((item, score), (expected_item, expected_score)) in list.iter().zip(expected) {
        assert!((score - expected_score).abs() < 1e-5, "{item} {score}, expected {expected_item} {expected_score}");
    }
    assert_eq!(list.len(), 20);
}

fn calls(lists: &[Result<Generated, TextError>]) -> usize {
    lists.iter().map(|list| list.as_ref().unwrap().step_accepted.len()).sum()
}

fn cost() -> StepCost {
    StepCost::new(vec![(1.0, 1.0), (1000.0, 2.0)], 0.0)
}

/// The ways to search, and to draw.
fn searches() -> [ListOptions; 4] {
    let [vocabulary, allowed] = [Normalisation::Vocabulary, Normalisation::Allowed];
    [(vocabulary, None), (allowed, None), (allowed, Some(1.0)), (allowed, Some(0.6))]
        .map(|(normalisation, temperature)| ListOptions { normalisation, temperature, ..options() })
}

#[test]
fn lists_are_the_same_whatever_is_drafted_batched_and_chunked() {
    let trie = trie();
    let requests = requests(&trie);
    for plain in searches() {
        let expected = lists(&mut ListGenerator::new(model(), tokenizer(), plain.clone()), &requests);
        for (list, request) in expected.iter().zip(&requests) {
            let list = list.as_ref().unwrap();
            let found: Vec<u32> = list.items.iter().map(|item| item.0).collect();
            assert_eq!(found.len(), 5);
            assert!(found.iter().all(|item| !request.history.contains(item)), "{found:?}");
            let (calls, accepted) = (list.step_accepted.len(), list.step_accepted.iter().sum::<u32>() as usize);
            assert_eq!(calls + accepted, LEVELS);
            assert!(list.drafted == 0 && (accepted == 0 || plain.normalisation == Normalisation::Allowed));
        }
        for (batch, step_tokens) in [(1, 512), (3, 512), (5, 40), (2, 9)] {
            for (nodes, steps, cost) in [(100, 1, None), (100, 3, None), (3, 2, None), (100, 3, Some(cost()))] {
                for draft in drafts() {
                    let cost = cost.clone();
                    let drafted = ListOptions { draft, nodes, steps, batch, step_tokens, cost, ..plain.clone() };
                    let case = format!("{drafted:?}");
                    let found = lists(&mut ListGenerator::new(model(), tokenizer(), drafted), &requests);
                    assert_eq!(items(&found), items(&expected), "{case}");
                    assert!(calls(&found) <= calls(&expected), "{case}");
                    if (nodes, steps, step_tokens) == (100, 1, 512) {
                        assert!(calls(&found) < calls(&expected), "{case}");
                    }
                }
            }
        }
    }
}

#[test]
fn lists_of_different_lengths_share_a_batch() {
    let trie = trie();
    let own = [None, Some(1), Some(12), None, Some(3)];
    let all = requests(&trie).into_iter().zip(own);
    let all: Vec<Request> = all.map(|(request, items)| Request { items, ..request }).collect();
    for plain in searches() {
        // Two beams for each item.
        let plain = ListOptions { width: 10, ..plain };
        let alone = |request: &Request| {
            let items = request.items.unwrap_or(5);
            let options = ListOptions { items, width: 2 * items, ..plain.clone() };
            let request = Request { items: None, ..request.clone() };
            lists(&mut ListGenerator::new(model(), tokenizer(), options), &[request]).remove(0)
        };
        let expected = items(&all.iter().map(alone).collect::<Vec<_>>());
        assert_eq!(expected.iter().map(Vec::len).collect::<Vec<_>>(), [5, 1, 12, 5, 3]);
        for (batch, draft, cost) in
            [(5, ListDraft::None, None), (3, ListDraft::Trie, None), (5, ListDraft::Trie, Some(cost()))]
        {
            let options = ListOptions { batch, draft, cost, ..plain.clone() };
            let case = format!("{options:?}");
            assert_eq!(items(&lists(&mut ListGenerator::new(model(), tokenizer(), options), &all)), expected, "{case}");
        }
        let drafts = ListGenerator::new(model(), tokenizer(), ListOptions { batch: 5, ..plain.clone() });
        let mut drafts = drafts.with_draft_model(draft_model(model(), false));
        assert_eq!(items(&lists(&mut drafts, &all)), expected, "{plain:?}");
    }
}

#[test]
fn sources_in_turns_change_no_list_and_draft_for_many() {
    let trie = trie();
    let requests = requests(&trie);
    // Enough lists for every source to have been watched, and then chosen or not.
    let many: Vec<Request> =
        (0..300).map(|id| Request { id, ..requests[usize::try_from(id).unwrap() % requests.len()].clone() }).collect();
    let plain = ListOptions { batch: 4, ..options() };
    let fake = || Box::new(FakeEngine::new(fake_options()));
    let expected = lists(&mut ListGenerator::new(fake(), tokenizer(), plain.clone()), &many);
    let auto = ListOptions { draft: ListDraft::Auto, cost: Some(cost()), ..plain };
    let found = lists(&mut ListGenerator::new(fake(), tokenizer(), auto.clone()), &many);
    assert_eq!(items(&found), items(&expected));
    assert!(calls(&found) <= calls(&expected));
    // Where forwards are not measured every source drafts as much as there is room for.
    let unmeasured = ListOptions { cost: None, ..auto };
    let found = lists(&mut ListGenerator::new(fake(), tokenizer(), unmeasured), &many);
    assert_eq!(items(&found), items(&expected));
    assert!(found.iter().all(|list| list.as_ref().unwrap().drafted > 0));
}

/// A draft model that has to pay, or does not.
fn draft_model(engine: Box<dyn Engine>, has_cost: bool) -> Option<ListDraftModel> {
    Some(ListDraftModel::new(engine, has_cost.then(cost)))
}

#[test]
fn a_draft_model_changes_no_list() {
    let trie = trie();
    let requests = requests(&trie);
    for plain in searches() {
        let expected = lists(&mut ListGenerator::new(model(), tokenizer(), plain.clone()), &requests);
        for (batch, step_tokens, nodes, has_cost) in [(1, 512, 90, false), (4, 512, 90, true), (3, 30, 12, false)] {
            let cost = has_cost.then(cost);
            let drafted = ListOptions { nodes, batch, step_tokens, cost, ..plain.clone() };
            let stranger = || Box::new(FakeEngine::new(FakeOptions { seed: 9, ..fake_options() })) as Box<dyn Engine>;
            for (name, engine) in [("the target itself", model()), ("a stranger", stranger())] {
                let generator = ListGenerator::new(model(), tokenizer(), drafted.clone());
                let mut generator = generator.with_draft_model(draft_model(engine, has_cost));
                let found = lists(&mut generator, &requests);
                assert_eq!(items(&found), items(&expected), "{name}, {drafted:?}");
                assert!(calls(&found) <= calls(&expected), "{name}, {drafted:?}");
            }
        }
    }
}

#[test]
fn a_draft_model_that_is_the_target_has_every_step_accepted() {
    let trie = trie();
    let requests = requests(&trie);
    for search in searches() {
        let drafted = ListOptions { nodes: 15, ..search };
        let generator = ListGenerator::new(model(), tokenizer(), drafted);
        let mut generator = generator.with_draft_model(draft_model(model(), false));
        for list in lists(&mut generator, &requests) {
            let list = list.unwrap();
            // Five beams for each of three steps are all that is drafted, and one forward is all it takes.
            assert_eq!(list.step_accepted, [3]);
            assert!(list.drafted <= 15, "{}", list.drafted);
        }
    }
}

#[test]
fn relaxed_sampling_accepts_the_targets_own_drafts_and_some_of_a_strangers() {
    let trie = trie();
    let requests = requests(&trie);
    for (sampling, width) in [(ListSampling::AtSpeed, 5), (ListSampling::Published(9), 9)] {
        let drawn = ListOptions { temperature: Some(1.0), sampling, nodes: 3 * width, ..options() };
        let stranger = || Box::new(FakeEngine::new(FakeOptions { seed: 9, ..fake_options() })) as Box<dyn Engine>;
        let run = |options: &ListOptions, draft: Option<Box<dyn Engine>>| {
            let draft = draft.map(|engine| ListDraftModel::new(engine, options.cost.clone()));
            let mut generator = ListGenerator::new(model(), tokenizer(), options.clone()).with_draft_model(draft);
            lists(&mut generator, &requests).into_iter().map(Result::unwrap).collect::<Vec<_>>()
        };
        for list in run(&drawn, Some(model())) {
            // Of more drafts than beams some are left out, and then a later step has too few.
            assert!(list.step_accepted == [3] || sampling != ListSampling::AtSpeed, "{:?}", list.step_accepted);
            assert!(list.step_accepted.len() < LEVELS);
        }
        let counted = ListDraft::Counted(Method::Knn);
        let others = [
            (ListOptions { draft: counted, ..drawn.clone() }, None),
            (ListOptions { draft: ListDraft::Retrieval, ..drawn.clone() }, None),
            (ListOptions { draft: ListDraft::Auto, batch: 4, cost: Some(cost()), ..drawn.clone() }, None),
            (ListOptions { draft: counted, batch: 4, cost: Some(cost()), ..drawn.clone() }, None),
            (ListOptions { batch: 4, cost: Some(cost()), ..drawn.clone() }, Some(stranger as fn() -> _)),
            (drawn.clone(), Some(stranger)),
            (drawn.clone(), None),
        ];
        for (options, draft) in others {
            let found = run(&options, draft.map(|draft| draft()));
            for (list, request) in found.iter().zip(&requests) {
                let items: HashSet<u32> = list.items.iter().map(|item| item.0).collect();
                assert_eq!(items.len(), 5, "{options:?}");
                assert!(request.history.iter().all(|item| !items.contains(item)));
                assert!(list.items.is_sorted_by(|a, b| a.1 >= b.1));
                let (calls, accepted) = (list.step_accepted.len(), list.step_accepted.iter().sum::<u32>() as usize);
                assert_eq!(calls + accepted, LEVELS);
            }
            if options.cost.is_none() {
                let again = run(&options, draft.map(|draft| draft()));
                assert!(found.iter().map(|list| &list.items).eq(again.iter().map(|list| &list.items)), "{options:?}");
            }
        }
    }
}

#[test]
fn a_list_that_its_drafts_decide_depends_on_no_list_before_it() {
    let trie = trie();
    let requests = requests(&trie);
    for (sampling, width) in [(ListSampling::AtSpeed, 5), (ListSampling::Published(9), 9)] {
        let listed = ListOptions { draft: ListDraft::Listed, nodes: 3 * width, ..options() };
        let drawn = ListOptions { temperature: Some(1.0), sampling, ..listed };
        let new = || ListGenerator::new(model(), tokenizer(), drawn.clone());
        let alone = |request: &Request| lists(&mut new(), std::slice::from_ref(request)).remove(0);
        let alone: Vec<_> = requests.iter().map(alone).collect();
        assert!(alone.iter().all(|list| list.as_ref().unwrap().drafted > 0));
        // The second time each user's own list is among those before.
        let mut generator = new();
        for time in 0..2 {
            assert_eq!(items(&lists(&mut generator, &requests)), items(&alone), "{sampling:?}, {time}");
        }
    }
}

#[test]
fn a_draft_model_that_fails_costs_no_list() {
    let trie = trie();
    let requests = requests(&trie);
    let batch = ListOptions { batch: 3, ..options() };
    let expected = lists(&mut ListGenerator::new(model(), tokenizer(), batch.clone()), &requests);
    let failing = FakeOptions { fail_on_token: Some(requests[3].prompt[2]), ..fake_options() };
    let crowded = FakeOptions { max_positions: 8, ..fake_options() };
    for fake in [failing, crowded] {
        let generator = ListGenerator::new(model(), tokenizer(), batch.clone());
        let mut generator = generator.with_draft_model(draft_model(Box::new(FakeEngine::new(fake)), false));
        assert_eq!(items(&lists(&mut generator, &requests)), items(&expected));
    }
}

#[test]
fn a_history_that_is_too_long_for_the_draft_model_leaves_the_others_their_drafts() {
    let trie = trie();
    let (first, longest) = (requests(&trie).remove(0), requests(&trie).remove(4));
    let fake = |max_positions| Box::new(FakeEngine::new(FakeOptions { max_positions, ..fake_options() }));
    let requests = [longest, first];
    let plain = lists(&mut ListGenerator::new(fake(4_096), tokenizer(), options()), &requests);
    let positions = requests[1].prompt.len() + LEVELS;
    assert!(requests[0].prompt.len() + LEVELS > positions);
    let drafted = ListOptions { nodes: 15, ..options() };
    let generator = ListGenerator::new(fake(4_096), tokenizer(), drafted);
    let found = lists(&mut generator.with_draft_model(draft_model(fake(positions), false)), &requests);
    assert_eq!(items(&found), items(&plain));
    let accepted = found.into_iter().map(|list| list.unwrap().step_accepted).collect::<Vec<_>>();
    // By the numbers of the requests: that of the long history, which came first, is the greater one.
    assert_eq!(accepted[0], [3], "the target's own drafts, all in one forward: {accepted:?}");
    assert_ne!(accepted[1], [3]);
}

#[test]
fn completing_the_trie_takes_half_of_the_calls() {
    let trie = trie();
    let all = ListOptions { draft: ListDraft::Trie, nodes: 1000, steps: 1, step_tokens: 4000, ..options() };
    let requests = requests(&trie);
    let lists = lists(&mut ListGenerator::new(model(), tokenizer(), all), &requests);
    for list in lists {
        assert_eq!(list.unwrap().step_accepted, [1, 1]);
    }
}

#[test]
fn where_all_forwards_cost_the_same_drafts_come_to_reach_the_end() {
    let trie = trie();
    let requests = requests(&trie);
    // So dear that ranking counts for nothing, however long the machine takes over it.
    let cost = Some(StepCost::new(vec![(1.0, 1e6), (4096.0, 1e6)], 0.0));
    let options = ListOptions { draft: ListDraft::Trie, nodes: 300, cost, ..options() };
    let mut generator = ListGenerator::new(model(), tokenizer(), options);
    let made: Vec<usize> = (0..3).map(|_| calls(&lists(&mut generator, &requests))).collect();
    // The first one has no drafts. It tells what each step ahead takes: two of them save no forward, for the trie is
    // completed in a second one anyway, and three do.
    assert_eq!(made, [requests.len() + LEVELS - 1, requests.len(), requests.len()]);
}

#[test]
fn a_list_drafts_the_next_one_of_a_like_user_and_an_audit_drafts_none() {
    let trie = trie();
    let listed = ListOptions { draft: ListDraft::Listed, nodes: 18, ..options() };
    // Histories that differ and end alike, behind one prompt, so that lists are the same.
    let request = |id: u32| Request {
        id: u64::from(id),
        prompt: tokens(9, 20),
        history: vec![id * 7, 290, 291, 292],
        previous_items: Vec::new(),
        ..requests(&trie)[2].clone()
    };
    let accepted = |plain: bool| {
        let mut generator = ListGenerator::new(model(), tokenizer(), listed.clone());
        let before: Vec<Request> = (0..4).map(|id| Request { plain, ..request(id) }).collect();
        lists(&mut generator, &before);
        lists(&mut generator, &[request(4)])[0].as_ref().unwrap().step_accepted.clone()
    };
    // All codes but the first come without a forward.
    assert_eq!(accepted(false), [3]);
    let first = &lists(&mut ListGenerator::new(model(), tokenizer(), listed.clone()), &[request(4)])[0];
    assert!(first.as_ref().unwrap().step_accepted.len() > 1);
    assert_eq!(accepted(true), first.as_ref().unwrap().step_accepted);
}

#[test]
fn where_drafts_pay_every_list_drafts_the_next_one_also_those_that_are_not_watched() {
    let trie = trie();
    let cost = |of_all: f64| Some(StepCost::new(vec![(1.0, 1e6), (4096.0, of_all * 1e6)], 0.0));
    let request = |id: u32, of_user: u32| Request {
        id: u64::from(id),
        prompt: tokens(of_user, 20),
        history: vec![id, 290 + of_user],
        previous_items: Vec::new(),
        ..requests(&trie)[2].clone()
    };
    // The first 127 lists are all watched, and from then on every other one.
    let accepted = |of_all: f64| {
        let options = ListOptions { draft: ListDraft::Listed, nodes: 18, cost: cost(of_all), ..options() };
        let mut generator = ListGenerator::new(model(), tokenizer(), options);
        let mut accepted = |id: u32, of_user: u32| -> u32 {
            lists(&mut generator, &[request(id, of_user)])[0].as_ref().unwrap().step_accepted.iter().sum()
        };
        (0..128).for_each(|id| assert!(accepted(id, 9) < 4));
        let accepted: Vec<_> = (0..8).map(|user| [0, 1].map(|of| accepted(128 + 2 * user + of, user))).collect();
        [0, 1].map(|of| accepted.iter().map(|of_user| of_user[of]).sum())
    };
    let [first, second]: [u32; 2] = accepted(1.0);
    assert!(second > first, "{first}, {second}");
    // Where a node costs as much as a forward nothing is drafted.
    assert_eq!(accepted(4096.0), [0, 0]);
}

#[test]
fn a_previous_list_drafts_the_next_one_of_its_user() {
    let trie = trie();
    let listed = ListOptions { draft: ListDraft::Listed, nodes: 18, ..options() };
    let request = Request { previous_items: Vec::new(), ..requests(&trie)[2].clone() };
    let list = |request: Request| {
        lists(&mut ListGenerator::new(model(), tokenizer(), listed.clone()), &[request]).remove(0).unwrap()
    };
    let first = list(request.clone());
    let previous_items: Vec<u32> = first.items.iter().map(|item| item.0).collect();
    let second = list(Request { previous_items, ..request });
    assert_eq!(second.items, first.items);
    let accepted = |list: &Generated| list.step_accepted.iter().sum::<u32>();
    assert!(accepted(&second) > accepted(&first), "{:?}, {:?}", first.step_accepted, second.step_accepted);
}

#[test]
fn items_out_of_stock_and_items_that_share_an_identifier() {
    let trie = trie();
    let of_stock = |stock: Stock, options: ListOptions, history: &[u32]| {
        let catalogue = Arc::new(Catalogue { stock, ..catalogue(&trie) });
        let request = Request { history: history.to_vec(), catalogue: Some(catalogue), ..requests(&trie)[2].clone() };
        lists(&mut ListGenerator::new(model(), tokenizer(), options), &[request]).remove(0)
    };
    let best = |options: ListOptions, history: &[u32]| of_stock(Stock::all(&trie), options, history);
    let wide = ListOptions { items: ITEMS as usize, width: trie.leaves(), ..options() };
    let all = best(wide.clone(), &[]).unwrap().items;
    assert_eq!(all.len(), ITEMS as usize);
    // The first two rows are listed one behind the other, with the same score.
    let shared: Vec<u32> = trie.items_of(trie.leaf_of_item(trie.find("0").unwrap())).collect();
    assert!(shared.len() > 1 && trie.item_id(shared[1]) == "1");
    let place = all.iter().position(|item| shared.contains(&item.0)).unwrap();
    let listed: Vec<(u32, f64)> = shared.iter().map(|&item| (item, all[place].1)).collect();
    assert_eq!(all[place..place + shared.len()], listed);
    let first = best(ListOptions { all_ties: false, ..wide.clone() }, &[]).unwrap().items;
    assert_eq!(first.len(), trie.leaves());
    assert!(first.iter().all(|item| !shared[1..].contains(&item.0)));
    // Of several that share an identifier one may be known.
    let known = best(wide.clone(), &shared[..1]).unwrap().items;
    assert_eq!(known, all.iter().copied().filter(|item| item.0 != shared[0]).collect::<Vec<_>>());
    let repeated = best(ListOptions { repeat: true, ..wide.clone() }, &shared[..1]).unwrap().items;
    assert_eq!(repeated, all);
    let out: Vec<u32> = (0..ITEMS).filter(|item| item % 3 == 0).collect();
    let stock = Stock::without(&trie, out.iter().copied());
    let stocked = of_stock(stock, wide.clone(), &[]).unwrap().items;
    assert_eq!(stocked, all.iter().copied().filter(|item| item.0 % 3 != 0).collect::<Vec<_>>());
    // Where one was had and the others are out of stock, nothing of the identifier is left, and no beam is spent on it.
    let others = || Stock::without(&trie, shared[1..].iter().copied());
    let rest: Vec<(u32, f64)> = all.iter().copied().filter(|item| !shared.contains(&item.0)).collect();
    assert_eq!(of_stock(others(), wide.clone(), &shared[..1]).unwrap().items, rest);
    let only: Vec<u32> = (0..ITEMS).filter(|item| !shared.contains(item)).collect();
    let last = ListOptions { items: 1, width: 1, ..wide.clone() };
    let one_left = Stock::without(&trie, only[1..].iter().chain(&shared[1..]).copied());
    let found = of_stock(one_left, last.clone(), &shared[..1]).unwrap().items;
    assert_eq!(found.iter().map(|item| item.0).collect::<Vec<_>>(), only[..1]);
    let none_left = Stock::without(&trie, only.iter().chain(&shared[1..]).copied());
    assert_eq!(of_stock(none_left, last, &shared[..1]).unwrap_err(), TextError::NothingToList);
    let stock = Stock::without(&trie, 0..ITEMS);
    assert_eq!(of_stock(stock, wide, &[]).unwrap_err(), TextError::NothingToList);
}

#[test]
fn a_list_that_the_engine_fails_for_is_the_only_one_to_fail() {
    let trie = trie();
    let batch = ListOptions { batch: 4, draft: ListDraft::Trie, ..options() };
    let mut requests = requests(&trie);
    let fake = |fail_on_token| Box::new(FakeEngine::new(laser_engine::FakeOptions { fail_on_token, ..fake_options() }));
    let expected = items(&lists(&mut ListGenerator::new(fake(None), tokenizer(), batch.clone()), &requests));
    requests[2].prompt[1] = 4000;
    let found = lists(&mut ListGenerator::new(fake(Some(4000)), tokenizer(), batch.clone()), &requests);
    for (at, list) in found.into_iter().enumerate() {
        match list {
            Ok(list) => assert_eq!(list.items, expected[at]),
            Err(error) => assert!(at == 2 && error.to_string().contains("injected failure"), "{at}: {error}"),
        }
    }
    requests[1].catalogue = None;
    requests[2].prompt.clear();
    let refused = lists(&mut ListGenerator::new(fake(None), tokenizer(), batch), &requests);
    assert_eq!(refused[1], Err(TextError::NoCatalogue));
    assert_eq!(refused[2], Err(TextError::EmptyPrompt));
}
