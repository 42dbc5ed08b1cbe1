//! Where texts end.

use laser_model::{ModelError, Tokenizer};

/// The text before a stop string, if the last token completes one. A stop string of n bytes ends within the
/// last n tokens, and a few more keep characters of several bytes whole.
pub(crate) fn cut_at_stop(
    tokens: &[u32],
    stop: &[String],
    tokenizer: &Tokenizer,
) -> Result<Option<String>, ModelError> {
    let Some(longest) = stop.iter().map(String::len).max() else {
        return Ok(None);
    };
    let tail = tokenizer.decode(&tokens[tokens.len().saturating_sub(longest + 4)..])?;
    if !stop.iter().any(|s| tail.contains(s.as_str())) {
        return Ok(None);
    }
    let text = tokenizer.decode(tokens)?;
    let cut = stop.iter().filter_map(|s| text.find(s.as_str())).min();
    Ok(cut.map(|cut| text[..cut].to_owned()))
}

/// A text, which may go on, without a last character of which its tokens hold some bytes only: the tokenizer shows it
/// as a replacement.
pub(crate) fn whole_characters(mut text: String) -> String {
    text.truncate(text.trim_end_matches(char::REPLACEMENT_CHARACTER).len());
    text
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn a_stop_string_is_found_at_the_token_that_completes_it() {
        let model = std::path::absolute("../fixtures/profile-lm").unwrap();
        let tokenizer = Tokenizer::open(&model.join("tokenizer.json")).unwrap();
        let text = "Likes 電影 and café noir – a lot.\n\nUser: 2";
        let tokens = tokenizer.encode(text, false).unwrap();
        let ends_within_a_character = |n: &usize| {
            let text = tokenizer.decode(&tokens[..*n]).unwrap();
            text.ends_with(char::REPLACEMENT_CHARACTER)
        };
        assert!((1..tokens.len()).filter(ends_within_a_character).count() >= 4);
        for stop in ["電", "影", "電影 a", "é", "–", "\n\n", "\nUser:", "noir – a lot", ": 2", "Likes"] {
            let stop = [stop.to_owned(), "never".to_owned()];
            let cut = |n: usize| cut_at_stop(&tokens[..n], &stop, &tokenizer).unwrap();
            let whole = |n: usize| tokenizer.decode(&tokens[..n]).unwrap().contains(&stop[0]);
            let first = (1..=tokens.len()).find(|n| whole(*n)).unwrap();
            assert!((1..first).all(|n| cut(n).is_none()), "{stop:?}");
            assert_eq!(cut(first).as_deref(), text.split(&stop[0]).next(), "{stop:?}");
        }
        assert_eq!(cut_at_stop(&tokens, &[], &tokenizer).unwrap(), None);
        // Wherever it is cut, a text ends with a whole character.
        let cuts = (0..=tokens.len()).map(|n| whole_characters(tokenizer.decode(&tokens[..n]).unwrap()));
        let cuts: Vec<String> = cuts.collect();
        assert!(cuts.iter().all(|cut| text.starts_with(cut.as_str())), "{cuts:?}");
        assert!(cuts.is_sorted_by_key(String::len) && cuts.last().is_some_and(|whole| whole == text));
    }
}
