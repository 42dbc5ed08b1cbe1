//! Pools with runners-up: what goes in comes out, and a draft of a drawn text takes it into account.

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::pool::tests::{END, any_texts, meta, open_and_draft::draft, pool_of};
use crate::sampling::arrival;
use crate::{DraftContext, DraftTree, Drafter, Draw, Noise, Pool, Sampling, build_pool};

fn race(place: u32, tokens: &[(Token, f32)]) -> impl Iterator<Item = RunnerUp> {
    tokens.iter().map(move |&(token, probability)| RunnerUp { place, token, probability })
}

fn soft(texts: &[PoolText]) -> Pool {
    let pool = Pool::open(Bytes::from(build_pool(&meta(), texts.to_vec()).unwrap())).unwrap();
    pool.verify().unwrap();
    pool
}

fn drawn_by(pool: Pool, key: u64, temperature: f32) -> DraftContext {
    let mut context = DraftContext::new(Drafter::default(), Some(pool), END);
    let sampling = Sampling::new(temperature, None, 1.0).unwrap();
    context.draw_by(Draw { sampling, noise: Noise::new(key) });
    context.extend(&[1, 2]);
    context
}

/// The tokens drafted after the context, most probable first.
fn children(context: &mut DraftContext) -> Vec<(Token, f32)> {
    let mut tree = DraftTree::new();
    context.draft(8, &mut tree);
    let mut found: Vec<(Token, f32)> =
        tree.children(0).map(|child| (tree.tokens()[child], tree.probabilities()[child])).collect();
    found.sort_by(|a, b| b.1.total_cmp(&a.1));
    found
}

#[test]
fn runners_up_come_back_with_their_texts() {
    let first = PoolText {
        tokens: vec![1, 2, 3],
        runners_up: race(0, &[(1, 0.9), (7, 0.1)]).chain(race(2, &[(3, 0.3), (9, 0.6), (8, 0.001)])).collect(),
    };
    let second = PoolText { tokens: vec![4; 40], runners_up: race(40, &[(END, 0.4), (4, 0.6)]).collect() };
    let pool = soft(&[first, vec![5].into(), second]);
    assert_eq!((pool.texts(), pool.tokens(), pool.contested()), (3, 47, 3));
    let found: Vec<PoolText> = pool.contents().collect();
    let tokens: Vec<&[Token]> = found.iter().map(|text| text.tokens.as_slice()).collect();
    assert_eq!(tokens, [&[1, 2, 3][..], &[5], &[4; 40]]);
    let races: Vec<(u32, Token, u8)> =
        found.iter().flat_map(|text| &text.runners_up).map(|o| (o.place, o.token, byte(o.probability))).collect();
    let expected = [(0, 1, 230), (0, 7, 26), (2, 3, 77), (2, 9, 153), (40, END, 102), (40, 4, 153)];
    assert_eq!(races, expected, "the written one first, and what is nothing as a byte is left out");
    let again = soft(&found);
    assert_eq!(again.digest(), pool.digest());
}

/// The places and tokens that a text keeps of these.
fn placed(tokens: &[Token], others: &[(u32, Token)]) -> Vec<(u32, Token)> {
    let runners_up = others.iter().map(|&(place, token)| RunnerUp { place, token, probability: 0.5 }).collect();
    let text = PoolText { tokens: tokens.to_vec(), runners_up }.ended((100, END));
    text.runners_up.iter().map(|other| (other.place, other.token)).collect()
}

#[test]
fn runners_up_of_other_tokens_are_left_out() {
    assert_eq!(placed(&[1, 2], &[(0, 1), (0, 5), (1, 2), (1, 6)]), [(0, 1), (0, 5), (1, 2), (1, 6)]);
    assert_eq!(placed(&[1, 2], &[(0, 1), (0, 5), (1, 3), (1, 2)]), [(0, 1), (0, 5)], "3 was written at place 1");
    assert_eq!(placed(&[1, 2], &[(1, 2), (1, 6), (2, END), (2, 7)]), [(1, 2), (1, 6), (2, END), (2, 7)]);
    assert_eq!(placed(&[1, 2], &[(1, 2), (1, 6), (2, 8), (2, 7)]), [(1, 2), (1, 6)], "it went on with a stop string");
    assert_eq!(
        placed(&[1, 2, END, 3], &[(1, 2), (1, 6), (3, 3), (3, 7)]),
        [(1, 2), (1, 6)],
        "what comes after its end"
    );
    assert_eq!(placed(&[1, 2], &[(1, 2), (1, 100)]), [(1, 2)], "a token that the tokenizer does not know");
}

#[test]
fn runners_up_find_their_places_where_a_text_is_encoded_anew() {
    // Written as 1 20 21 22 3 4 5 9, encoded as 1 2 3 4 5 6 7: three tokens became one, and one became two.
    let races = [1, 20, 21, 22, 3, 4, 5, 9].iter().zip(0..).map(|(&token, place)| (place, token)).collect::<Vec<_>>();
    assert_eq!(placed(&[1, 2, 3, 4, 5, 6, 7], &races), [(0, 1), (2, 3), (3, 4), (4, 5)]);
    let end = [races.as_slice(), &[(8, END)]].concat();
    assert_eq!(placed(&[1, 2, 3, 4, 5, 6, 7], &end).last(), Some(&(7, END)));
    // What recurs is not taken for what it is not: no place comes twice.
    assert_eq!(placed(&[1, 1, 2], &[(0, 1), (1, 1), (2, 1), (3, 2)]), [(0, 1), (1, 1), (2, 2)]);
}

#[test]
fn a_pool_keeps_so_many_runners_up_at_most() {
    let others: Vec<(Token, f32)> = (10..30).map(|token| (token, 0.01 * token as f32)).collect();
    let text = PoolText { tokens: vec![1], runners_up: race(0, &[(1, 0.3)]).chain(race(0, &others)).collect() };
    let kept: Vec<Token> = soft(&[text]).contents().next().unwrap().runners_up.iter().map(|o| o.token).collect();
    assert_eq!(kept, [1, 29, 28, 27, 26, 25, 24, 23, 22], "the most probable ones");
}

#[test]
fn greedy_drafts_count_what_was_written() {
    let texts = [vec![1, 2, 3], vec![1, 2, 4]];
    let contested = texts.clone().map(|tokens| {
        let runners_up = race(2, &[(tokens[2], 0.1), (5, 0.9)]).collect();
        PoolText { tokens, runners_up }
    });
    let drafted = |pool| {
        let mut context = DraftContext::new(Drafter::default(), Some(pool), END);
        context.extend(&[1, 2]);
        children(&mut context)
    };
    assert_eq!(drafted(soft(&contested)), drafted(pool_of(&texts)));
}

/// Where the probabilities are the target's, the draft knows who wins as far as the noise tells.
#[test]
fn what_is_drawn_is_drafted_first_more_often() {
    let probabilities = [(3, 0.4), (4, 0.35), (5, 0.2)];
    let text = PoolText { tokens: vec![1, 2, 3], runners_up: race(2, &probabilities).collect() };
    let (soft, hard) = (soft(std::slice::from_ref(&text)), pool_of(&[text.tokens]));
    let mut first = [0, 0];
    for key in 0..2000 {
        let time = |token: Token, p: f64| arrival(Noise::new(key).word(token), 1.0) / p;
        let drawn = probabilities.iter().map(|&(token, p)| (token, time(token, f64::from(p))));
        let drawn = drawn.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap().0;
        for (pool, first) in [&soft, &hard].into_iter().zip(&mut first) {
            *first += i32::from(children(&mut drawn_by(pool.clone(), key, 1.0)).first().is_some_and(|c| c.0 == drawn));
        }
    }
    assert!((1700..=2000).contains(&first[0]) && (700..1000).contains(&first[1]), "{first:?}");
}

#[test]
fn a_low_temperature_sharpens_and_a_high_one_flattens() {
    let share = |temperature: f32| {
        let (share, factor) = Sharpness::new(temperature).race(153, &[77 << 24 | 4]);
        (share, Sharpness::new(temperature).of(77 << 24 | 4) * factor)
    };
    let close = |(a, b): (f32, f32), (c, d): (f32, f32)| (a - c).abs() < 1e-3 && (b - d).abs() < 1e-3;
    // 0.6, 0.302 and 0.098 that are left.
    assert!(close(share(1.0), (0.6, 0.302)), "{:?}", share(1.0));
    assert!(close(share(0.5), (0.7812, 0.1978)), "{:?}", share(0.5));
    assert!(close(share(0.05), (1.0, 0.0)), "{:?}", share(0.05));
    assert!(close(share(2.0), (0.4731, 0.3356)), "{:?}", share(2.0));
}

proptest! {
    /// Any runners-up, right or wrong, are kept as they are or not at all, and drafts from them are sound.
    #[test]
    fn pools_of_any_runners_up_are_whole(
        texts in any_texts(4, 6, 40),
        others in prop::collection::vec((0..6_usize, 0..42_u32, 0..120_u32, 0.0..1.0_f32), 0..60),
        right: bool,
        temperature in 0.05..3.0_f32,
        key: u64,
    ) {
        let mut made: Vec<PoolText> = texts.into_iter().map(PoolText::from).collect();
        for (text, place, token, probability) in others {
            let Some(PoolText { tokens, runners_up }) = made.get_mut(text) else { continue };
            let written = tokens.get(place as usize).copied().unwrap_or(END);
            let other = RunnerUp { place, token, probability };
            let race = [RunnerUp { token: written, ..other }, RunnerUp { probability: 1.0 - probability, ..other }];
            runners_up.extend(if right { &race[..] } else { &race[1..] });
        }
        made.iter_mut().for_each(|text| text.runners_up.sort_by_key(|other| other.place));
        let pool = soft(&made);
        let tokens: Vec<&[Token]> = made.iter().map(|text| text.tokens.as_slice()).collect();
        let found: Vec<PoolText> = pool.contents().collect();
        prop_assert_eq!(tokens, found.iter().map(|text| text.tokens.as_slice()).collect::<Vec<_>>());
        prop_assert_eq!(soft(&found).digest(), pool.digest());
        draft(&pool, &[1, 2, 3, 1, 2, 4, 1]);
        let mut context = drawn_by(pool, key, temperature);
        let found = children(&mut context);
        prop_assert!(found.iter().all(|(token, p)| *token < 100 && (0.0..=1.0).contains(p)), "{:?}", found);
    }
}
