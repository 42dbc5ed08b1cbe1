//! Single tokens are allowed where the mask has them, and what is forced does not depend on the way there.

use std::path::Path;
use std::sync::OnceLock;

use proptest::prelude::*;
use serde_json::json;

use super::*;

const END: u32 = 1;

fn tokenizer() -> Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| Tokenizer::open(Path::new("../fixtures/profile-lm/tokenizer.json")).unwrap()).clone()
}

fn compile(constraint: &Constraint) -> Grammar {
    Grammar::compile(constraint, &tokenizer(), &[END]).unwrap()
}

fn person() -> Constraint {
    Constraint::of_schema(json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "likes": {"type": "array", "items": {"enum": ["drama", "comedy"]}, "maxItems": 3},
            "home": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
        },
        "required": ["name", "age", "likes"],
        "additionalProperties": false
    }))
}

fn constraints() -> [Constraint; 4] {
    [
        person(),
        Constraint::Regex("(yes|no): [a-z ]{3,20}\\.".into()),
        Constraint::Grammar("start: item (\", \" item)*\nitem: /[a-z]{1,8}/ | NUMBER\nNUMBER: /[0-9]{1,3}/\n".into()),
        Constraint::of_schema(json!({"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "number"}}]})),
    ]
}

fn has(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// Goes on by the choices until the text may end, or so many tokens.
fn walk(parser: &mut Parser, choices: impl IntoIterator<Item = u64>) -> Vec<u32> {
    let mut tokens = Vec::new();
    for choice in choices {
        let token = match parser.next_token().unwrap() {
            Next::Forced(token) => token,
            Next::End => break,
            Next::Free => {
                let mask = parser.mask().unwrap();
                let allowed: Vec<u32> =
                    (0..32 * u32::try_from(mask.len()).unwrap()).filter(|t| has(&mask, *t)).collect();
                allowed[usize::try_from(choice % allowed.len() as u64).unwrap()]
            }
        };
        if token == END {
            break;
        }
        parser.push(token).unwrap();
        tokens.push(token);
    }
    tokens
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_token_is_allowed_where_the_mask_has_it(
        which in 0..4_usize,
        choices in prop::collection::vec(any::<u64>(), 0..30),
    ) {
        let grammar = compile(&constraints()[which]);
        let mut parser = grammar.parser();
        walk(&mut parser, choices);
        let mask = parser.mask().unwrap();
        for token in 0..u32::try_from(tokenizer().vocab_size()).unwrap() {
            let text = tokenizer().decode(&[token]).unwrap();
            prop_assert_eq!(parser.allows(token).unwrap(), has(&mask, token), "{} {:?}", token, text);
        }
        prop_assert_eq!(parser.may_end().unwrap(), has(&mask, END));
    }

    #[test]
    fn a_parser_that_went_back_is_as_one_that_never_went_there(
        which in 0..4_usize,
        choices in prop::collection::vec(any::<u64>(), 1..24),
        other in prop::collection::vec(any::<u64>(), 0..12),
        back in 0..24_usize,
    ) {
        let grammar = compile(&constraints()[which]);
        let mut parser = grammar.parser();
        let tokens = walk(&mut parser, choices);
        let away = walk(&mut parser, other).len();
        parser.pop(away).unwrap();
        let back = back.min(tokens.len());
        parser.pop(back).unwrap();
        prop_assert_eq!(parser.length(), tokens.len() - back);
        let mut fresh = grammar.parser();
        for token in &tokens[..tokens.len() - back] {
            // The places before are looked at as well, as a text does that comes this way.
            fresh.next_token().unwrap();
            fresh.push(*token).unwrap();
        }
        prop_assert_eq!(parser.next_token().unwrap(), fresh.next_token().unwrap());
        prop_assert_eq!(parser.mask().unwrap(), fresh.mask().unwrap());
        prop_assert_eq!(parser.may_end().unwrap(), fresh.may_end().unwrap());
        // One that is used again is as a new one.
        parser.pop(parser.length()).unwrap();
        prop_assert_eq!(parser.next_token().unwrap(), grammar.parser().next_token().unwrap());
        prop_assert_eq!(parser.mask().unwrap(), grammar.parser().mask().unwrap());
    }
}

#[test]
fn the_names_of_properties_are_forced() {
    let grammar = compile(&person());
    let mut parser = grammar.parser();
    let mut begun = Vec::new();
    while let Next::Forced(token) = parser.next_token().unwrap() {
        parser.push(token).unwrap();
        begun.push(token);
    }
    let text = grammar.text(&begun);
    assert!(text.starts_with("{\"name\":"), "{text}");
}

#[test]
fn what_is_wrong_with_a_constraint_is_told() {
    let error = |constraint: &Constraint| Grammar::compile(constraint, &tokenizer(), &[END]).unwrap_err().to_string();
    for (constraint, part) in [
        (Constraint::Regex("(".into()), "cannot be compiled"),
        (Constraint::Grammar("start: nothing".into()), "cannot be compiled"),
        (Constraint::of_schema(json!({"type": "objekt"})), "cannot be compiled"),
        (Constraint::of_schema(json!(false)), "compiled"),
        (Constraint::of_schema(json!({"type": "integer", "minimum": 5, "maximum": 3})), "compiled"),
        (Constraint::Regex(String::new()), "no text follows it"),
    ] {
        let error = error(&constraint);
        assert!(error.contains(part), "{constraint:?}: {error}");
        assert!(!error.contains("non-verbose") && !error.contains('\n'), "{error}");
    }
}

#[test]
fn values_that_no_column_holds_are_found_at_the_end() {
    let grammar = compile(&Constraint::of_schema(json!({
        "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]
    })));
    assert_eq!(grammar.check("{\"n\": 5}"), Ok(()));
    assert!(grammar.check("{\"n\": 99999999999999999999}").unwrap_err().contains("64 bits"));
    assert_eq!(compile(&Constraint::Regex("[a-z]+".into())).check("abc"), Ok(()));
    assert!(compile(&constraints()[3]).check("[1e999]").is_err());
}
