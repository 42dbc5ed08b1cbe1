//! What a target lists, as lessons: a history without its last item, and behind it the codes of a listed one.

use std::collections::{BTreeSet, HashMap};

use candle_core::{DType, Device, Result, Tensor};
use laser_decode::Token;
use rand::SeedableRng as _;
use rand::seq::SliceRandom as _;
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::atspeed::FORBIDDEN;
use crate::lesson::Lesson;
use crate::recommender::catalogue::Catalogue;

/// What a target lists in place of the last item of a lesson.
#[derive(Debug, Clone)]
pub(crate) struct List {
    /// The tokens of each listed item, best first.
    pub(crate) items: Vec<Vec<Token>>,
    /// The log probabilities that the target gives the codes of the last one, one a level; empty if no loss asks.
    pub(crate) log_p_k: Vec<f32>,
}

/// Lessons of a step that were drawn from lists.
#[derive(Debug, Default)]
pub(crate) struct Drawn {
    pub(crate) lessons: Vec<Lesson>,
    /// By place, the `log_p_k` of the list that it is from.
    pub(crate) log_p_k: Vec<f32>,
}

/// Lessons with the lists of some.
#[derive(Debug)]
pub(crate) struct LessonSet {
    pub(crate) lessons: Vec<Lesson>,
    /// By lesson.
    pub(crate) lists: Vec<Option<List>>,
}

impl LessonSet {
    /// Lessons of histories without lists.
    pub(crate) fn new(lessons: Vec<Lesson>) -> Self {
        let lists = vec![None; lessons.len()];
        Self { lessons, lists }
    }

    /// The same with the list of each history at the lesson that has its last item, whose number is in `last`.
    /// Histories with an empty list have none.
    pub(crate) fn with_lists(
        mut self,
        lists: &[Vec<u32>],
        last: &[usize],
        catalogue: &Catalogue,
    ) -> anyhow::Result<Self> {
        for (list, &lesson) in lists.iter().zip(last).filter(|(list, _)| !list.is_empty()) {
            let items = list.iter().map(|&item| Ok(catalogue.identifier(item)?.to_vec()));
            let items = items.collect::<anyhow::Result<_>>()?;
            self.lists[lesson] = Some(List { items, log_p_k: Vec::new() });
        }
        Ok(self)
    }

    /// Up to `count` listed items for each lesson of a step that has a list; the seed says which.
    pub(crate) fn draw(&self, step: &[usize], count: usize, seed: u64) -> Drawn {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut drawn = Drawn::default();
        for &lesson in step {
            let Some(list) = &self.lists[lesson] else { continue };
            for item in list.items.choose_multiple(&mut rng, count) {
                drawn.lessons.push(listed(&self.lessons[lesson], item));
                drawn.log_p_k.extend_from_slice(&list.log_p_k);
            }
        }
        drawn
    }

    /// The lessons that end with the last item of their list, and which ones they stand for.
    pub(crate) fn last_listed(&self) -> (Vec<usize>, Vec<Lesson>) {
        let lists = self.lists.iter().zip(&self.lessons).enumerate();
        let last = lists.filter_map(|(at, (list, lesson))| Some((at, listed(lesson, list.as_ref()?.items.last()?))));
        last.unzip()
    }
}

/// A lesson with these codes in place of its last item, of which nothing else is learned.
fn listed(lesson: &Lesson, codes: &[Token]) -> Lesson {
    let prompt = lesson.tokens.len() - codes.len();
    Lesson { tokens: [&lesson.tokens[..prompt], codes].concat(), prompt, likely: Vec::new() }
}

/// The codes that follow each prefix of identifiers: the trie of a catalogue.
#[derive(Debug)]
pub(crate) struct Continuations {
    of: HashMap<Vec<Token>, BTreeSet<Token>>,
    /// Tokens of the vocabulary.
    size: usize,
}

impl Continuations {
    pub(crate) fn new(catalogue: &Catalogue) -> Self {
        let mut of: HashMap<Vec<Token>, BTreeSet<Token>> = HashMap::new();
        for codes in catalogue.identifiers() {
            for (level, &code) in codes.iter().enumerate() {
                of.entry(codes[..level].to_vec()).or_default().insert(code);
            }
        }
        Self { of, size: catalogue.vocabulary().size() }
    }

    /// `[N, V]`, to be added to logits at the places of lessons whose texts are identifiers: 0 for the codes that the
    /// prefix before the place allows, [`FORBIDDEN`] for all others.
    pub(crate) fn mask(&self, lessons: &[Lesson], device: &Device) -> Result<Tensor> {
        let places: usize = lessons.iter().map(Lesson::places).sum();
        let mut mask = vec![FORBIDDEN; places * self.size];
        let prefixes = lessons.iter().flat_map(|lesson| {
            let codes = &lesson.tokens[lesson.prompt..];
            (0..codes.len()).map(move |level| &codes[..level])
        });
        for (row, prefix) in mask.chunks_exact_mut(self.size).zip(prefixes) {
            for &code in self.of.get(prefix).into_iter().flatten() {
                row[code as usize] = 0.0;
            }
        }
        Tensor::from_vec(mask, (places, self.size), device)
    }

    /// The same where all tokens are allowed.
    pub(crate) fn no_mask(&self, lessons: &[Lesson], device: &Device) -> Result<Tensor> {
        Tensor::zeros((lessons.iter().map(Lesson::places).sum(), self.size), DType::F32, device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recommender::vocabulary::CodeVocabulary;

    /// Three items of two levels, of which two begin alike.
    fn catalogue() -> Catalogue {
        let names = [["<a_0>", "<b_0>"], ["<a_0>", "<b_2>"], ["<a_1>", "<b_1>"]];
        let names: Vec<Vec<String>> = names.iter().map(|codes| codes.map(str::to_owned).to_vec()).collect();
        let vocabulary = CodeVocabulary::of_identifiers(names.iter().map(Vec::as_slice)).unwrap();
        let identifiers = names.iter().map(|codes| vocabulary.tokens(codes).unwrap()).collect();
        Catalogue::new(vocabulary, identifiers).unwrap()
    }

    fn lesson(items: &[u32], prompt: usize) -> Lesson {
        Lesson { tokens: catalogue().prompt(items, items.len()).unwrap(), prompt, likely: Vec::new() }
    }

    #[test]
    fn a_mask_allows_what_follows_the_prefix() {
        let mask = Continuations::new(&catalogue()).mask(&[lesson(&[2, 0], 3), lesson(&[2], 1)], &Device::Cpu).unwrap();
        let allowed: Vec<Vec<usize>> = mask.to_vec2::<f32>().unwrap().iter().map(|row| zeros(row)).collect();
        // Three special tokens, <a_0>, <a_1>, <b_0>, <b_1> and <b_2>.
        assert_eq!(allowed, [vec![3, 4], vec![5, 7], vec![3, 4], vec![6]]);
    }

    fn zeros(row: &[f32]) -> Vec<usize> {
        (0..row.len()).filter(|&at| row[at] == 0.0).collect()
    }

    #[test]
    fn listed_items_stand_in_place_of_the_last_and_are_drawn_anew_by_seed() {
        let lessons = vec![lesson(&[1, 2, 0], 1), lesson(&[2, 1], 3), lesson(&[0], 1)];
        let lists = [vec![0, 1, 2], Vec::new(), vec![2]];
        let set = LessonSet::new(lessons).with_lists(&lists, &[0, 1, 2], &catalogue()).unwrap();
        let drawn = set.draw(&[0, 1, 2], 2, 5);
        let items = |lessons: &[Lesson]| lessons.iter().map(|l| l.tokens[l.prompt..].to_vec()).collect::<Vec<_>>();
        let (found, catalogue) = (items(&drawn.lessons), catalogue());
        assert!(drawn.lessons.iter().take(2).all(|lesson| lesson.tokens[..5] == lesson_of(&[1, 2])));
        assert!(found.len() == 3 && found[0] != found[1] && found[2] == catalogue.identifier(2).unwrap());
        assert_eq!(items(&set.draw(&[0, 1, 2], 2, 5).lessons), found);
        assert!((0..20).any(|seed| items(&set.draw(&[0, 1, 2], 2, seed).lessons) != found));
        let (owners, last) = set.last_listed();
        assert_eq!(owners, [0, 2]);
        assert_eq!(items(&last), [2, 2].map(|item| catalogue.identifier(item).unwrap().to_vec()));
    }

    fn lesson_of(items: &[u32]) -> Vec<Token> {
        catalogue().prompt(items, items.len()).unwrap()
    }
}
