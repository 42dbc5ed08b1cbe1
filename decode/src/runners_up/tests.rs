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
    let races: Vec<(u32, Token, f32)> =
        found.iter().flat_map(|text| &text.runners_up).map(|o| (o.place, o.token, o.probability)).collect();
    let expected = [(0, 1, 0.875), (0, 7, 0.09375), (2, 3, 0.3125), (2, 9, 0.625), (40, END, 0.375), (40, 4, 0.625)];
    assert_eq!(races, expected, "the written one first, the nearest of four steps per octave, and not what is below");
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
    let others: Vec<(Token, f32)> = (10..30).map(|token| (token, 1.2_f32.powf(token as f32 - 30.0))).collect();
    let text = PoolText { tokens: vec![1; 4], runners_up: race(0, &[(1, 0.3)]).chain(race(0, &others)).collect() };
    let kept: Vec<Token> = soft(&[text]).contents().next().unwrap().runners_up.iter().map(|o| o.token).collect();
    assert_eq!(kept, [1, 29, 28, 27, 26, 25, 24, 23, 22], "the most probable ones");
}

#[test]
fn a_pool_keeps_the_most_probable_ones_for_which_it_has_room() {
    let others = [(5, 0.5), (6, 0.25), (7, 0.125), (8, 0.0625), (9, 0.03125)];
    let runners_up = (0..40).flat_map(|place| race(place, &[(1, 0.02)]).chain(race(place, &others)));
    let text = PoolText { tokens: vec![1; 40], runners_up: runners_up.collect() };
    let size = build_pool(&meta(), [vec![1; 40]]).unwrap().len();
    // So small a pool takes more than 16 bytes per token without any.
    let (pool, bits) = (soft(std::slice::from_ref(&text)), 41 * LEAST_ROOM);
    assert!(size > 41 * POOL_BITS / 8);
    // A token takes 12 bits of 7 for the vocabulary of 100 and 5 for the level, and a place 8.
    let races = pool.contents().next().unwrap().runners_up;
    assert_eq!(races.len(), 40 * 2, "one runner-up is 20 bits per place, two are 32 of {LEAST_ROOM}");
    assert!(races.iter().all(|other| other.token < 6));
    assert_eq!(pool.size_bytes(), size + 2 * 12 + 40 * 12 / 8 + 40);
    let of = |others: usize| 40 * others * 12 + 40 * 8;
    assert!((of(1)..of(2)).contains(&bits));
}

#[test]
fn a_pool_takes_sixteen_bytes_per_token_where_its_runners_up_would_take_more() {
    // Of all tokens alike, so that nothing is frequent: 8 bytes per token without runners-up.
    let tokens: Vec<Token> = (0..20_000_u32).map(|place| place.wrapping_mul(2_654_435_761) % 90 + 1).collect();
    let others = |place: u32| (91..99).map(move |token| (token, 0.4 / ((7 * place + token) % 37 + 1) as f32));
    let races = (0..).zip(&tokens).flat_map(|(place, &token)| {
        race(place, &[(token, 0.5)]).chain(race(place, &others(place).collect::<Vec<_>>())).collect::<Vec<_>>()
    });
    let text = PoolText { runners_up: races.collect(), tokens };
    let size = |text: PoolText| soft(&[text]).size_bytes() as f64 / 20_001.0;
    assert!(size(text.tokens.clone().into()) < 12.0);
    let size = size(text);
    assert!((15.0..=16.0).contains(&size), "{size}");
}

#[test]
fn a_level_is_an_eighth_off_at_most() {
    assert_eq!([1.0, 0.5, 0.25, 0.0078125].map(|p| level(p).map(probability)), [1.0, 0.5, 0.25, 0.0078125].map(Some));
    assert_eq!([0.0, -1.0, 0.004, f32::NAN].map(level), [None; 4]);
    assert_eq!(level(7.0), Some(0));
    for step in 0..1000_u16 {
        let p = 0.005 + 0.000_99 * f32::from(step);
        let kept = probability(level(p).unwrap());
        assert!((kept / p - 1.0).abs() <= 0.126, "{p} is kept as {kept}");
    }
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
    let probabilities = [(3, 0.4375), (4, 0.375), (5, 0.1875)];
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
    let text = PoolText { tokens: vec![1], runners_up: race(0, &[(1, 0.5), (4, 0.25)]).collect() };
    let pool = soft(&[text]);
    let race = pool.suffixes().runners_up.at(0).unwrap();
    let share = |temperature: f32| {
        let sharpness = Sharpness::new(temperature);
        let (written, others) = sharpness.shares(&race);
        (written, others.map(|(_, share)| share).sum())
    };
    let close = |(a, b): (f32, f32), (c, d): (f32, f32)| (a - c).abs() < 1e-3 && (b - d).abs() < 1e-3;
    // 0.5, 0.25 and 0.25 that are left.
    assert!(close(share(1.0), (0.5, 0.25)), "{:?}", share(1.0));
    assert!(close(share(0.5), (0.6667, 0.1667)), "{:?}", share(0.5));
    assert!(close(share(0.05), (1.0, 0.0)), "{:?}", share(0.05));
    assert!(close(share(2.0), (0.4142, 0.2929)), "{:?}", share(2.0));
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
