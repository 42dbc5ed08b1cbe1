//! What a draft model learns from: texts, and what the target says at each of their places.

use anyhow::Result;
use laser_decode::{Candidate, TargetScores as _, Token, chain_parents};
use laser_engine::{Engine, EngineError, Segment};
use laser_schema::Progress;

/// The target's most probable tokens that are kept of a place: 128 bytes a token of text.
pub(crate) const LIKELY: usize = 16;

/// Tokens of a forward of the target: more are not faster, and their logits take memory.
pub(crate) const CHUNK: usize = 512;

/// A text that the target wrote, with its prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// The prompt's tokens, at least one.
    pub prompt: Vec<Token>,
    /// The text's tokens, at least one, with the end of the text where it has one.
    pub text: Vec<Token>,
}

/// An example and what the target says of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Lesson {
    /// Prompt and text.
    pub(crate) tokens: Vec<Token>,
    /// Tokens of the prompt.
    pub(crate) prompt: usize,
    /// The target's most probable tokens at each place of the text, [`LIKELY`] of each or as many as there are tokens.
    pub(crate) likely: Vec<Candidate>,
}

impl Lesson {
    /// Tokens of the text.
    pub(crate) fn places(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// The likely tokens of the text's places but the first `skipped`.
    pub(crate) fn likely_from(&self, skipped: usize) -> &[Candidate] {
        let width = self.likely.len() / self.places().max(1);
        &self.likely[skipped * width..]
    }
}

/// The examples without what the target says of them, for an acceptance head: what it learns from is the text itself.
/// Those that have more tokens than `positions` are left out.
#[must_use]
pub fn unread(examples: &[Example], positions: usize) -> Vec<Lesson> {
    let of = |example: &Example| Lesson {
        tokens: [example.prompt.as_slice(), &example.text].concat(),
        prompt: example.prompt.len(),
        likely: Vec::new(),
    };
    examples.iter().map(of).filter(|lesson| lesson.tokens.len() <= positions).collect()
}

/// Lets the target read the examples. Those that have more positions than it are left out.
///
/// # Errors
/// The engine's.
pub fn read(engine: &mut dyn Engine, examples: &[Example], progress: &mut dyn Progress) -> Result<Vec<Lesson>> {
    let positions = engine.info().max_positions;
    let mut lessons = Vec::with_capacity(examples.len());
    for (done, example) in (1..).zip(examples) {
        if example.prompt.len() + example.text.len() <= positions {
            lessons.push(read_one(engine, example)?);
        }
        progress.update(done, Some(examples.len() as u64), "texts");
    }
    Ok(lessons)
}

fn read_one(engine: &mut dyn Engine, example: &Example) -> Result<Lesson, EngineError> {
    let tokens = [example.prompt.as_slice(), &example.text].concat();
    let prompt = example.prompt.len();
    let slot = engine.open(tokens.len())?;
    let mut likely = Vec::with_capacity(example.text.len() * LIKELY);
    let mut begin = 0;
    // The last token is followed by nothing that is learned.
    for chunk in tokens[..tokens.len() - 1].chunks(CHUNK) {
        let parents: Vec<u32> = chain_parents(chunk.len()).collect();
        let scored_from = (prompt - 1).saturating_sub(begin).min(chunk.len());
        let segment = Segment { slot, tokens: chunk, parents: &parents, scored_from, ..Segment::default() };
        let scores = engine.step(&[segment], LIKELY)?;
        for node in scored_from..chunk.len() {
            likely.extend_from_slice(scores[0].top(node));
        }
        engine.commit(slot, &(0..chunk.len()).collect::<Vec<_>>())?;
        begin += chunk.len();
    }
    engine.close(slot);
    Ok(Lesson { tokens, prompt, likely })
}

/// The target's features of a lesson's tokens but the last, one behind the other; the engine keeps features.
pub(crate) fn features(engine: &mut dyn Engine, lesson: &Lesson) -> Result<Vec<f32>, EngineError> {
    let tokens = &lesson.tokens[..lesson.tokens.len() - 1];
    let slot = engine.open(tokens.len())?;
    let mut features = Vec::with_capacity(tokens.len() * engine.info().hidden_size);
    for chunk in tokens.chunks(CHUNK) {
        let parents: Vec<u32> = chain_parents(chunk.len()).collect();
        let segment =
            Segment { slot, tokens: chunk, parents: &parents, scored_from: chunk.len(), ..Segment::default() };
        let scores = engine.step(&[segment], 1)?;
        (0..chunk.len()).for_each(|node| features.extend_from_slice(scores[0].feature(node)));
        engine.commit(slot, &(0..chunk.len()).collect::<Vec<_>>())?;
    }
    engine.close(slot);
    Ok(features)
}

#[cfg(test)]
mod tests {
    use laser_engine::{FakeEngine, FakeOptions};

    use super::*;

    /// A text as the engine writes it, and its most probable tokens one at a time.
    fn written(engine: &mut FakeEngine, prompt: &[Token], length: usize) -> (Vec<Token>, Vec<Candidate>) {
        let slot = engine.open(prompt.len() + length).unwrap();
        let (mut pending, mut text, mut likely) = (prompt.to_vec(), Vec::new(), Vec::new());
        for _ in 0..length {
            let parents: Vec<u32> = chain_parents(pending.len()).collect();
            let last = pending.len() - 1;
            let segment =
                Segment { slot, tokens: &pending, parents: &parents, scored_from: last, ..Segment::default() };
            let scores = engine.step(&[segment], LIKELY).unwrap();
            engine.commit(slot, &(0..=last).collect::<Vec<_>>()).unwrap();
            likely.extend_from_slice(scores[0].top(last));
            text.push(scores[0].top(last)[0].token);
            pending = text[text.len() - 1..].to_vec();
        }
        engine.close(slot);
        (text, likely)
    }

    #[test]
    fn a_lesson_has_what_the_target_says_whatever_the_chunks() {
        let mut engine = FakeEngine::new(FakeOptions::default());
        for (prompt, length) in [(1, 1), (1, 3), (CHUNK - 1, 4), (CHUNK, 2), (CHUNK + 1, 2), (3, 2 * CHUNK)] {
            let prompt: Vec<Token> = (0..).take(prompt).map(|token: Token| 2 + token % 900).collect();
            let (text, likely) = written(&mut engine, &prompt, length);
            let example = Example { prompt: prompt.clone(), text };
            let lessons = read(&mut engine, std::slice::from_ref(&example), &mut ()).unwrap();
            assert_eq!(lessons[0].likely, likely, "{} and {length}", prompt.len());
            assert_eq!((lessons[0].prompt, lessons[0].places()), (prompt.len(), length));
        }
    }

    #[test]
    fn what_the_target_has_no_positions_for_is_left_out() {
        let mut engine = FakeEngine::new(FakeOptions { max_positions: 4, ..FakeOptions::default() });
        let example = |text| Example { prompt: vec![3, 4], text: vec![5; text] };
        let lessons = read(&mut engine, &[example(3), example(2), example(1)], &mut ()).unwrap();
        assert_eq!(lessons.iter().map(Lesson::places).collect::<Vec<_>>(), [2, 1]);
    }
}
