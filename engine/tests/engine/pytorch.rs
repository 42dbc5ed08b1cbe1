//! Weights in files as PyTorch saves them: drafts as published, written here opcode by opcode.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::Write,
    path::Path,
};

use candle_core::{DType, Tensor};
use laser_engine::{EngineOptions, Segment, check_drafts, load, reads_features};
use serde_json::json;
use tempfile::TempDir;
use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};

use crate::{
    eagle::{self, features, folder, options},
    medusa::heads,
    models::{Random, TinyModel},
    support::{TOP_K, chain},
};

const ORDERED_DICT: &[u8] = b"ccollections\nOrderedDict\n)R";
const MARK: u8 = b'(';
const TUPLE: u8 = b't';

fn push_string(pickle: &mut Vec<u8>, text: &str) {
    pickle.push(b'X');
    pickle.extend((text.len() as u32).to_le_bytes());
    pickle.extend(text.as_bytes());
}

fn push_integer(pickle: &mut Vec<u8>, number: usize) {
    pickle.push(b'J');
    pickle.extend((number as i32).to_le_bytes());
}

fn push_tuple(pickle: &mut Vec<u8>, numbers: &[usize]) {
    pickle.push(MARK);
    numbers.iter().for_each(|&number| push_integer(pickle, number));
    pickle.push(TUPLE);
}

/// `torch._utils._rebuild_tensor_v2(storage, 0, shape, stride, False, OrderedDict())`, where the storage's values are
/// the archive's file `data/AT`.
fn push_tensor(pickle: &mut Vec<u8>, tensor: &Tensor, at: usize) {
    let storage = match tensor.dtype() {
        DType::F16 => "HalfStorage",
        DType::F32 => "FloatStorage",
        other => panic!("{other:?}"),
    };
    pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n");
    pickle.extend([MARK, MARK]);
    push_string(pickle, "storage");
    pickle.extend(format!("ctorch\n{storage}\n").as_bytes());
    push_string(pickle, &at.to_string());
    push_string(pickle, "cpu");
    push_integer(pickle, tensor.elem_count());
    pickle.extend([TUPLE, b'Q']);
    push_integer(pickle, 0);
    push_tuple(pickle, tensor.dims());
    push_tuple(pickle, tensor.stride());
    pickle.push(0x89);
    pickle.extend(ORDERED_DICT);
    pickle.extend([TUPLE, b'R']);
}

/// Writes what `torch.save` does of a state dict.
pub(crate) fn save(tensors: &HashMap<String, Tensor>, file: &Path) {
    let mut archive = ZipWriter::new(File::create(file).unwrap());
    let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    let mut pickle = [&[0x80, 2][..], ORDERED_DICT].concat();
    for (at, (name, tensor)) in tensors.iter().enumerate() {
        push_string(&mut pickle, name);
        push_tensor(&mut pickle, tensor, at);
        pickle.push(b's');
        archive.start_file(format!("archive/data/{at}"), stored).unwrap();
        let mut values = Vec::new();
        tensor.write_bytes(&mut values).unwrap();
        archive.write_all(&values).unwrap();
    }
    pickle.push(b'.');
    archive.start_file("archive/data.pkl", stored).unwrap();
    archive.write_all(&pickle).unwrap();
    archive.finish().unwrap();
}

/// What they say of a chain of nodes.
fn scores(options: &EngineOptions) -> Vec<Vec<(u32, f32)>> {
    let mut engine = load(options).unwrap();
    let mut random = Random::new(2);
    let (tokens, before) = (random.tokens(6), features(&mut random, 6));
    let slot = engine.open(6).unwrap();
    let parents = chain(6);
    let segment =
        Segment { slot, tokens: &tokens, parents: &parents, scored_from: 0, before: &before, ..Segment::default() };
    let scores = engine.step(&[segment], TOP_K).unwrap();
    let places = (0..6).flat_map(|node| (0..engine.info().ahead()).map(move |head| (node, head)));
    let candidates = |(node, head)| scores[0].ahead(node, head).iter().map(|c| (c.token, c.log_probability)).collect();
    places.map(candidates).collect()
}

/// In 16 bits, as drafts are published.
fn published(tensors: HashMap<String, Tensor>) -> HashMap<String, Tensor> {
    tensors.into_iter().map(|(name, tensor)| (name, tensor.to_dtype(DType::F16).unwrap())).collect()
}

fn refused(target: &Path, drafts: &Path, words: &[&str]) {
    let options = options(target, drafts);
    let error = check_drafts(&options).and_then(|_| load(&options).map(drop)).unwrap_err().to_string();
    words.iter().for_each(|words| assert!(error.contains(words), "{error}"));
}

#[test]
fn published_heads_say_what_they_say_as_safetensors() {
    let target = folder(&TinyModel::new("Llama", json!({})));
    for tensors in [heads(3, 1, false), published(heads(2, 2, true))] {
        let folders: [TempDir; 2] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        candle_core::safetensors::save(&tensors, folders[0].path().join("medusa_lm_head.safetensors")).unwrap();
        save(&tensors, &folders[1].path().join("medusa_lm_head.pt"));
        assert!(reads_features(folders[1].path()).unwrap());
        let heads = tensors.keys().filter(|name| name.ends_with(".0.linear.weight")).count();
        assert_eq!(check_drafts(&options(target.path(), folders[1].path())).unwrap(), Some(heads));
        let [expected, found] = folders.each_ref().map(|folder| scores(&options(target.path(), folder.path())));
        assert_eq!(found, expected);
        // Safetensors are read where both are there.
        fs::write(folders[0].path().join("medusa_lm_head.pt"), "damaged").unwrap();
        assert_eq!(scores(&options(target.path(), folders[0].path())), expected);
    }
}

#[test]
fn a_published_layer_says_what_it_says_as_safetensors() {
    let target = folder(&TinyModel::new("Llama", json!({})));
    let mut layer = eagle::layer(true);
    layer.tensors = published(layer.tensors);
    let (safetensors, pytorch) = (folder(&layer), folder(&layer));
    fs::remove_file(pytorch.path().join("model.safetensors")).unwrap();
    assert!(!reads_features(pytorch.path()).unwrap());
    save(&layer.tensors, &pytorch.path().join("pytorch_model.bin"));
    assert!(reads_features(pytorch.path()).unwrap());
    assert_eq!(check_drafts(&options(target.path(), pytorch.path())).unwrap(), None);
    let expected = scores(&options(target.path(), safetensors.path()));
    assert_eq!(scores(&options(target.path(), pytorch.path())), expected);
    fs::write(safetensors.path().join("pytorch_model.bin"), "damaged").unwrap();
    assert_eq!(scores(&options(target.path(), safetensors.path())), expected);
    // A whole model is none.
    save(&TinyModel::new("Llama", json!({})).tensors, &pytorch.path().join("pytorch_model.bin"));
    assert!(!reads_features(pytorch.path()).unwrap());
}

#[test]
fn published_drafts_that_do_not_fit_or_are_damaged_are_refused() {
    let target = folder(&TinyModel::new("Llama", json!({})));
    let drafts = tempfile::tempdir().unwrap();
    let file = drafts.path().join("medusa_lm_head.pt");
    let refused = |words: &[&str]| refused(target.path(), drafts.path(), words);
    let mut tensors = heads(2, 1, true);
    let fitting = tensors.insert("1.0.linear.weight".into(), Random::new(1).tensor(&[32, 32], 1.0)).unwrap();
    save(&tensors, &file);
    refused(&["medusa_lm_head.pt", "1.0.linear.weight has shape [32, 32]", "needs [64, 64]", "laser train draft"]);
    tensors.insert("1.0.linear.weight".into(), fitting);
    tensors.remove("1.1.weight");
    save(&tensors, &file);
    refused(&["medusa_lm_head.pt: tensor 1.1.weight is missing"]);
    save(&HashMap::new(), &file);
    refused(&["medusa_lm_head.pt: no tensors by name in it", "state dict"]);
    save(&heads(2, 1, true), &file);
    let whole = fs::read(&file).unwrap();
    for bytes in [&whole[..whole.len() / 2], b"", b"version https://git-lfs.github.com/spec/v1\n"] {
        fs::write(&file, bytes).unwrap();
        refused(&["medusa_lm_head.pt: unreadable weights: ", "; fetch the file again", "PyTorch 1.6"]);
    }
}
