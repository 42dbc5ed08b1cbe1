#!/usr/bin/env python3
"""Writes a Llama with random weights, as the engine is measured with (docs/performance.md).

    pip install numpy safetensors
    tests/random_llama.py DIRECTORY                        95.4M parameters in f32
    tests/random_llama.py DIRECTORY --hidden 3072 --layers 28 --heads 24 --kv-heads 8 --intermediate 8192 \\
        --vocabulary 128256 --positions 32768 --dtype f16  3.2B, the shape of Llama 3.2 3B

The tokenizer is that of fixtures/profile-lm, which knows the first 4,096 tokens.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy
from safetensors.numpy import save_file

# Numbers that weights are taken from, over and over: to draw billions would take longer than to write them.
DRAWN = 1 << 24


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hidden", type=int, default=768, help="dimensions of the residual stream")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--heads", type=int, default=12, help="query heads")
    parser.add_argument("--kv-heads", type=int, help="key heads; as many as query heads if not given")
    parser.add_argument("--intermediate", type=int, default=2048, help="neurons of a layer")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--positions", type=int, default=2048, help="the longest text")
    parser.add_argument("--dtype", choices=["f32", "f16"], default="f32")
    return parser.parse_args()


def config(of):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": of.hidden,
        "num_hidden_layers": of.layers,
        "num_attention_heads": of.heads,
        "num_key_value_heads": of.kv_heads or of.heads,
        "intermediate_size": of.intermediate,
        "vocab_size": of.vocabulary,
        "max_position_embeddings": of.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": {"f32": "float32", "f16": "float16"}[of.dtype],
    }


def shapes(of):
    keys = of.hidden // of.heads * (of.kv_heads or of.heads)
    yield "model.embed_tokens", (of.vocabulary, of.hidden)
    yield "model.norm", (of.hidden,)
    for layer in range(of.layers):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm", (of.hidden,)
        yield f"{name}.post_attention_layernorm", (of.hidden,)
        for part, outputs in (("q", of.hidden), ("k", keys), ("v", keys), ("o", of.hidden)):
            yield f"{name}.self_attn.{part}_proj", (outputs, of.hidden)
        for part in ("gate", "up"):
            yield f"{name}.mlp.{part}_proj", (of.intermediate, of.hidden)
        yield f"{name}.mlp.down_proj", (of.hidden, of.intermediate)


def main(of):
    of.directory.mkdir(parents=True)
    dtype = {"f32": "float32", "f16": "float16"}[of.dtype]
    random = numpy.random.default_rng(1)
    drawn = random.normal(0, 0.02, DRAWN).astype(dtype)

    def weight(shape):
        if len(shape) == 1:
            return numpy.ones(shape, dtype)
        return numpy.resize(numpy.roll(drawn, random.integers(DRAWN)), shape)

    weights = {f"{name}.weight": weight(shape) for name, shape in shapes(of)}
    save_file(weights, of.directory / "model.safetensors", {"format": "pt"})
    (of.directory / "config.json").write_text(json.dumps(config(of), indent=2))
    fixture = Path(__file__).parent.parent / "fixtures/profile-lm"
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(fixture / name, of.directory)
    print(f"{sum(map(numpy.size, weights.values())) / 1e6:.1f}M parameters")


main(arguments())
