#!/usr/bin/env python3
"""Writes a Llama of 95.4M parameters with random weights, as the engine is measured with (docs/performance.md).

    pip install numpy safetensors
    tests/random_llama.py DIRECTORY

The tokenizer is that of fixtures/profile-lm, which knows the first 4,096 of its 32,000 tokens.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy
from safetensors.numpy import save_file

HIDDEN, LAYERS, HEADS, INTERMEDIATE, VOCABULARY = 768, 10, 12, 2048, 32_000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def shapes():
    yield "model.embed_tokens", (VOCABULARY, HIDDEN)
    yield "model.norm", (HIDDEN,)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm", (HIDDEN,)
        yield f"{name}.post_attention_layernorm", (HIDDEN,)
        for part in "qkvo":
            yield f"{name}.self_attn.{part}_proj", (HIDDEN, HIDDEN)
        for part in ("gate", "up"):
            yield f"{name}.mlp.{part}_proj", (INTERMEDIATE, HIDDEN)
        yield f"{name}.mlp.down_proj", (HIDDEN, INTERMEDIATE)


def main(directory):
    directory.mkdir(parents=True)
    random = numpy.random.default_rng(1)
    weights = {
        f"{name}.weight": random.normal(0, 0.02, shape).astype("float32") if len(shape) == 2 else numpy.ones(shape, "float32")
        for name, shape in shapes()
    }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2))
    fixture = Path(__file__).parent.parent / "fixtures/profile-lm"
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(fixture / name, directory)
    print(f"{sum(map(numpy.size, weights.values())) / 1e6:.1f}M parameters")


main(Path(sys.argv[1]))
