//! Pieces have the ids of the whole text, of tokenizers in which words that go across a line break show: all pairs of
//! some characters merge, white space and punctuation included.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::json;

use super::*;
use crate::{PieceTokenizer, Tokenizer};

/// The characters by which BPE writes the bytes.
fn byte_characters() -> Vec<char> {
    let printed = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut others = (0x100..).filter_map(char::from_u32);
    (0..=255).map(|byte| if printed(byte) { char::from(byte) } else { others.next().unwrap() }).collect()
}

/// A tokenizer.json: bytes, all pairs of these characters, added tokens, and `<s>` before and `</s>` behind a text.
fn file(pre_tokenizer: Value, normalizer: Value) -> Value {
    let bytes = byte_characters();
    let pairing: Vec<char> = b"\n\r\t ./aL1'".iter().map(|byte| bytes[usize::from(*byte)]).collect();
    let merges: Vec<[String; 2]> =
        pairing.iter().flat_map(|a| pairing.iter().map(|b| [a.to_string(), b.to_string()])).collect();
    let words = bytes.iter().map(char::to_string).chain(merges.iter().map(|pair| pair.concat()));
    let vocabulary: serde_json::Map<String, Value> = words.zip((0u32..).map(Value::from)).collect();
    let token = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": content == "word", "lstrip": false,
            "rstrip": content == "<|r|>", "normalized": content == "word", "special": content != "word"})
    };
    let special = |id: u32, name: &str| json!({"id": name, "ids": [id], "tokens": [name]});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "decoder": null,
        "added_tokens": [token(900, "<s>"), token(901, "</s>"), token(902, "<|r|>"), token(903, "word")],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": {"type": "Sequence", "processors": [
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
            {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                    {"SpecialToken": {"id": "</s>", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": special(900, "<s>"), "</s>": special(901, "</s>")}},
        ]},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": merges},
    })
}

fn open(file: &Value) -> Tokenizer {
    let written = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(written.path(), file.to_string()).unwrap();
    Tokenizer::open(written.path()).unwrap()
}

fn byte_level(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

fn split(pattern: &str) -> Value {
    let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    json!({"type": "Sequence", "pretokenizers": [split, byte_level(false)]})
}

/// Of all pre-tokenizers that are known, as they are and behind NFC.
fn files() -> Vec<Value> {
    let digits = json!({"type": "Digits", "individual_digits": true});
    let digits = json!({"type": "Sequence", "pretokenizers": [digits, byte_level(true)]});
    let known = PATTERNS.map(split).into_iter().chain([byte_level(true), digits]);
    known.flat_map(|known| [Value::Null, json!({"type": "NFC"})].map(|normal| file(known.clone(), normal))).collect()
}

/// The ids of a text's pieces, without what is put around it.
fn in_pieces(tokenizer: &Tokenizer, text: &str, cuts: impl Iterator<Item = usize>) -> Vec<u32> {
    pieces(text, cuts).flat_map(|piece| tokenizer.encode(piece, false).unwrap()).collect()
}

fn texts() -> impl Strategy<Value = String> {
    let parts = prop_oneof![
        4 => Just("\n"),
        6 => prop::sample::select(vec![
            "a", "La", "1", "11", ".", "/", "'", "'s", " ", "  ", "\t", "\r", "\r\n", "\n\n", "\n\n\n", "<s>", "</s>",
            "<|r|>", "<|", "word", "aword", "é", "e\u{301}", "\u{301}", "\u{327}\u{301}", "\u{344}", "\u{85}", "\u{a0}",
            "\u{2028}", "\u{200d}", "\u{feff}", "日", "가", "\u{1100}", "\u{1161}", "🎬", "Ⅷ", "²", "\u{1c}", "\u{b}",
        ]),
    ]
    .prop_map(str::to_owned);
    let any = any::<char>().prop_map(String::from);
    prop::collection::vec(prop_oneof![9 => parts, 1 => any], 0..30).prop_map(|parts| parts.concat())
}

fn runner() -> TestRunner {
    TestRunner::new(Config { cases: 3000, failure_persistence: None, ..Config::default() })
}

#[test]
fn pieces_have_the_ids_of_the_whole() {
    for file in files() {
        let whole = open(&file);
        assert_eq!(whole.ends(), Some(&Ends { before: vec![900], after: vec![901] }));
        let tokenizer = PieceTokenizer::new(whole.clone());
        let same = |text: String| {
            for special in [false, true] {
                prop_assert_eq!(tokenizer.encode(&text, special).unwrap(), whole.encode(&text, special).unwrap());
            }
            Ok(())
        };
        runner().run(&texts(), same).unwrap();
    }
}

/// Every character on either side of a line break, but for the blocks that hold neither white space nor marks that
/// patterns or NFC treat by themselves.
#[test]
fn no_character_beside_a_cut_matters() {
    for file in files() {
        let tokenizer = open(&file);
        for start in (0..0x3100).chain(0xF900..0x1_0000).step_by(64) {
            let characters: Vec<char> = (start..start + 64).filter_map(char::from_u32).collect();
            let behind: String = characters.iter().map(|c| format!(".\n{c}a\n1\n{c}.")).collect();
            let before: String = characters.iter().map(|c| format!("a{c}\na.{c}\n1")).collect();
            for text in [behind, before] {
                let whole = tokenizer.encode(&text, false).unwrap();
                assert_eq!(in_pieces(&tokenizer, &text, cuts(&text)), whole, "{text:?}");
            }
        }
    }
}

/// The test of pieces finds cuts that are not safe: at every line break, and before `/`.
#[test]
fn unsafe_cuts_are_found() {
    let every = |text: &str| text.match_indices('\n').map(|(at, _)| at + 1).collect::<Vec<_>>();
    for file in files() {
        let tokenizer = open(&file);
        let same = |text: String| {
            prop_assert_eq!(
                in_pieces(&tokenizer, &text, every(&text).into_iter()),
                tokenizer.encode(&text, false).unwrap()
            );
            Ok(())
        };
        assert!(runner().run(&texts(), same).is_err(), "{}", file["pre_tokenizer"]);
    }
    let o200k = open(&file(split(PATTERNS[2]), Value::Null));
    assert_ne!(in_pieces(&o200k, "a.\n/a", [3].into_iter()), o200k.encode("a.\n/a", false).unwrap());
    assert_eq!(cuts("a.\n/a").count(), 0);
}

#[test]
fn what_is_not_known_is_tokenised_whole() {
    let known = file(byte_level(true), Value::Null);
    let refused: [(&str, Value); 12] = [
        ("/normalizer", json!({"type": "Lowercase"})),
        ("/normalizer", json!({"type": "Prepend", "prepend": "_"})),
        ("/added_tokens/1/lstrip", json!(true)),
        ("/added_tokens/3/content", json!("a\nb")),
        ("/pre_tokenizer/add_prefix_space", json!(true)),
        ("/pre_tokenizer/use_regex", json!(false)),
        ("/pre_tokenizer", split(r"\n[a-z]|.")),
        ("/pre_tokenizer", Value::Null),
        ("/model/dropout", json!(0.1)),
        ("/model/type", json!("Unigram")),
        ("/post_processor", json!({"type": "BertProcessing", "sep": ["</s>", 901], "cls": ["<s>", 900]})),
        ("/post_processor/processors/1/special_tokens", json!({})),
    ];
    assert!(Ends::of(&known).is_some());
    for (place, value) in refused {
        let mut file = known.clone();
        *file.pointer_mut(place).unwrap() = value;
        assert_eq!(Ends::of(&file), None, "{place}");
    }
}

#[test]
fn a_text_is_cut_behind_single_line_breaks() {
    let text = "Viewer:\n\n- Heat | 4\n- Big\r\n- Ran\n Old\n/x\n";
    let found: Vec<&str> = pieces(text, cuts(text)).collect();
    assert_eq!(found, ["Viewer:\n\n- Heat | 4\n", "- Big\r\n- Ran\n Old\n/x\n"]);
    assert_eq!(pieces("", cuts("")).count(), 0);
}
