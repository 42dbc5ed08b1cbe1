#!/usr/bin/env python3
"""Laser against transformers, llama.cpp and mistral.rs: greedy texts for the same prompts from the same weights, in turns.

    pip install torch transformers gguf mistralrs && pip install --no-binary llama-cpp-python llama-cpp-python
    tests/peers.py --laser-bench target/release/laser-bench --model MODEL --rounds 2 -- BENCH

    tests/peers.py --forwards --model MODEL --type q8_0      # llama.cpp: milliseconds a forward, as of `laser-bench engine`

BENCH are arguments of `laser-bench batch` beside --model, --batches and --output. In every round each engine runs in a process
of its own, and of its rounds the fastest counts. Time is that of generation, prompts included, without loading. A text is as long as
the model makes it; a difference in rounding now and then turns one, so tokens are counted, not texts. Models: Llama with f32 weights in
one file.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MAX_NEW_TOKENS = 256


class Model:
    """What the engines are told of the model, and where its end of text is."""

    def __init__(self, directory, type="f32"):
        self.directory, self.type = Path(directory), type
        self.config = json.loads((self.directory / "config.json").read_text())
        self.end = self.config["eos_token_id"]

    def cut(self, tokens):
        """Up to the end of the text, which is one of its tokens."""
        return tokens[: tokens.index(self.end) + 1] if self.end in tokens else tokens


def transformers(model, threads):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32).eval()

    def generate(prompts, batch):
        tokens = 0
        for start in range(0, len(prompts), batch):
            chunk = prompts[start : start + batch]
            longest = max(map(len, chunk))
            ids = torch.tensor([[model.end] * (longest - len(p)) + p for p in chunk])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in chunk])
            with torch.inference_mode():
                out = network.generate(
                    ids, attention_mask=mask, do_sample=False, max_new_tokens=MAX_NEW_TOKENS,
                    eos_token_id=model.end, pad_token_id=model.end,
                )
            tokens += sum(len(model.cut(row[longest:].tolist())) for row in out)
        return tokens

    return generate


def tensors(path):
    """Names and values in f32."""
    import numpy

    data = numpy.memmap(path, mode="r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    for name, info in json.loads(data[8:start].tobytes()).items():
        if name == "__metadata__":
            continue
        begin, end = info["data_offsets"]
        raw = data[start + begin : start + end]
        match info["dtype"]:
            case "BF16":
                values = (raw.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
            case "F16" | "F32" as dtype:
                values = raw.view({"F16": numpy.float16, "F32": numpy.float32}[dtype]).astype(numpy.float32)
            case other:
                raise ValueError(f"{path}: {name} is {other}, expected BF16, F16 or F32")
        yield name, values.reshape(info["shape"])


def gguf_file(model, path):
    """The model as GGUF of its type. Its vocabulary has no words: prompts and texts are tokens."""
    import gguf

    c = model.config
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_dimension_count(c["hidden_size"] // heads)
    writer.add_rope_freq_base(c.get("rope_theta") or c["rope_parameters"]["rope_theta"])
    size = c["vocab_size"]
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("llama")
    byte_tokens = [b"<0x%02X>" % i for i in range(256)]
    writer.add_token_list([b"<s>", b"</s>", b"<unk>"] + byte_tokens + [b"t%d" % i for i in range(size - 259)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([3, 3, 2] + [6] * 256 + [1] * (size - 259))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(model.end)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }
    kind = gguf.GGMLQuantizationType[model.type.upper()]

    def add(name, tensor):
        if tensor.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)

    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for key, tensor in tensors(model.directory / "model.safetensors"):
        name = key.removesuffix(".weight")
        if name in whole:
            add(f"{whole[name]}.weight", tensor)
            continue
        _, _, layer, name = name.split(".", 3)
        count = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}.get(name)
        if count:  # llama.cpp rotates neighbours, Hugging Face halves.
            rows = tensor.shape[0] // count // 2
            tensor = tensor.reshape(count, 2, rows, -1).swapaxes(1, 2).reshape(tensor.shape)
        add(f"blk.{layer}.{names[name]}.weight", tensor.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp(model, threads, draft_tokens=0):
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        gguf_file(model, file.name)
        draft = LlamaPromptLookupDecoding(num_pred_tokens=draft_tokens) if draft_tokens else None
        llama = llama_cpp.Llama(
            file.name, n_ctx=model.config["max_position_embeddings"], n_threads=threads, n_threads_batch=threads,
            draft_model=draft, logits_all=draft is not None, verbose=False,
        )

    def generate(prompts, batch):
        assert batch == 1, "llama-cpp-python generates one text at a time"
        tokens = 0
        for prompt in prompts:
            llama.reset()
            for token in llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
                tokens += 1
                if token == model.end or llama.n_tokens - len(prompt) + 1 >= MAX_NEW_TOKENS:
                    break
        return tokens

    return generate


def llama_cpp_batched(model, threads):
    """Continuous batching by the C API: a prompt joins as soon as a text ends."""
    import llama_cpp as api
    import numpy

    size, positions = model.config["vocab_size"], model.config["max_position_embeddings"]

    def context(weights, batch):
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = positions * batch, positions * batch, batch
        params.n_threads = params.n_threads_batch = threads
        return api.llama_init_from_model(weights, params)

    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        gguf_file(model, file.name)
        weights = api.llama_model_load_from_file(file.name.encode(), api.llama_model_default_params())

    def generate(prompts, batch):
        ctx = context(weights, batch)
        step = api.llama_batch_init(positions * batch, 0, 1)
        waiting, free, active, tokens = list(reversed(prompts)), list(reversed(range(batch))), {}, 0
        while waiting or active:
            while waiting and free:  # Of each text what is to be fed, the position of that, and how many tokens it has.
                active[free.pop()] = (waiting.pop(), 0, 0)
            step.n_tokens, ends = 0, {}
            for slot, (new, position, _) in sorted(active.items()):  # By slot, or each text is computed apart.
                for i, token in enumerate(new):
                    n = step.n_tokens
                    step.token[n], step.pos[n] = token, position + i
                    step.n_seq_id[n], step.seq_id[n][0] = 1, slot
                    step.logits[n] = i + 1 == len(new)
                    ends[slot] = n
                    step.n_tokens += 1
            assert api.llama_decode(ctx, step) == 0
            for slot, place in ends.items():
                logits = ctypes.cast(api.llama_get_logits_ith(ctx, place), ctypes.POINTER(ctypes.c_float))
                token = int(numpy.ctypeslib.as_array(logits, (size,)).argmax())
                new, position, count = active[slot]
                active[slot] = ([token], position + len(new), count + 1)
                tokens += 1
                if token == model.end or count + 1 >= MAX_NEW_TOKENS:
                    del active[slot]
                    free.append(slot)
                    free.sort(reverse=True)
                    api.llama_memory_seq_rm(api.llama_get_memory(ctx), slot, -1, -1)
        api.llama_batch_free(step)
        api.llama_free(ctx)
        return tokens

    return generate


def llama_cpp_forwards(model, threads, rounds, context=512):
    """Median milliseconds of a forward of T tokens behind `context` cached ones, all of them scored."""
    import statistics

    import llama_cpp as api

    sizes = [1, 2, 4, 8, 16, 32, 64, 128]
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        gguf_file(model, file.name)
        weights = api.llama_model_load_from_file(file.name.encode(), api.llama_model_default_params())
    found = {}
    for flash in (0, 1):
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context + sizes[-1], context, context
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = flash
        ctx = api.llama_init_from_model(weights, params)
        step = api.llama_batch_init(context, 0, 1)

        def forward(count, position):
            for i in range(count):
                step.token[i], step.pos[i] = 300 + (position + i) * 7 % 3000, position + i
                step.n_seq_id[i], step.seq_id[i][0], step.logits[i] = 1, 0, position > 0
            step.n_tokens = count
            start = time.perf_counter()
            assert api.llama_decode(ctx, step) == 0
            api.llama_synchronize(ctx)
            return time.perf_counter() - start

        forward(context, 0)
        times = {size: [] for size in sizes}
        for _ in range(rounds + 1):
            for size in sizes:
                times[size].append(forward(size, context))
                api.llama_memory_seq_rm(api.llama_get_memory(ctx), 0, context, -1)
        found[flash] = [1e3 * statistics.median(times[size][1:]) for size in sizes]
        api.llama_batch_free(step)
        api.llama_free(ctx)
    print(api.llama_print_system_info().decode(), file=sys.stderr)
    print("| " + " | ".join(["T"] + [str(size) for size in sizes]) + " |")
    for flash, row in found.items():
        name = f"llama.cpp {model.type}, {threads} threads, flash attention {'on' if flash else 'off'}"
        print("| " + " | ".join([name] + [f"{ms:.1f}" for ms in row]) + " |")


def mistral_rs(model, _threads):
    from mistralrs import Architecture, CompletionRequest, ModelDType, Runner, Which
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model.directory / "tokenizer.json"))
    which = Which.Plain(model_id=str(model.directory), arch=Architecture.Llama, dtype=ModelDType.F32)
    runner = Runner(which, max_seqs=1, prefix_cache_n=0)

    def text(prompt):
        request = CompletionRequest(
            prompt=tokenizer.decode(prompt), model="default", temperature=0.0, top_k=1, max_tokens=MAX_NEW_TOKENS
        )
        return runner.send_completion_request(request).usage.completion_tokens

    def generate(prompts, batch):
        assert batch == 1, "its Python runner takes one request at a time"
        return sum(map(text, prompts))

    return generate


# Of each what generates, and whether it generates batches of texts.
PEERS = {
    "transformers": (transformers, True),
    "llama.cpp": (llama_cpp, False),
    "llama.cpp, batched": (llama_cpp_batched, True),
    "llama.cpp, prompt lookup of 2": (lambda m, t: llama_cpp(m, t, 2), False),
    "llama.cpp, prompt lookup of 10": (lambda m, t: llama_cpp(m, t, 10), False),
    "mistral.rs": (mistral_rs, False),
}


def run_peer(name, options):
    """In a process of its own: loads, warms up, prints tokens and seconds."""
    prompts = [json.loads(line)["prompt"] for line in open(options.prompts)]
    generate = PEERS[name][0](Model(options.model, options.type), options.threads)
    generate(prompts[:1], options.batch)
    start = time.perf_counter()
    tokens = generate(prompts, options.batch)
    print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - start}))


def measure_peer(name, kind, batch, options):
    command = [
        sys.executable, __file__, "--peer", name, "--model", options.model, "--type", options.type, "--threads", str(options.threads),
        "--prompts", f"{options.output}/prompts-{kind}.jsonl", "--batch", str(batch),
    ]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    found = json.loads(out.splitlines()[-1])
    return found["tokens"] / found["seconds"]


def measure_laser(options):
    command = [options.laser_bench, "batch", "--model", options.model, "--batches", options.batches]
    command += ["--output", options.output]
    subprocess.run(command + options.bench, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    newest = max(Path(options.output).glob("batch-*.json"), key=lambda path: path.stat().st_mtime)
    for part in json.loads(newest.read_text())["kinds"]:
        for row in part["rows"]:
            yield f"Laser, {row['variant']}", part["kind"], part["batch"], row["tokens_per_second"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laser-bench", help="the laser-bench binary")
    parser.add_argument("--model", required=True, help="a directory")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batches", default="1,32", help="texts at a time, separated by commas")
    parser.add_argument("--peers", default=";".join(PEERS), help="which, separated by semicolons")
    parser.add_argument("--threads", type=int, default=2, help="of the other engines; Laser's are RAYON_NUM_THREADS")
    parser.add_argument("--forwards", action="store_true", help="time llama.cpp's forwards alone")
    parser.add_argument("--type", default="f32", help="of llama.cpp's weights: f32, bf16 or q8_0")
    parser.add_argument("--output", default="output/bench", help="where Laser's figures and the prompts are written")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--prompts", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("bench", nargs="*", help="arguments of laser-bench batch, after --")
    options = parser.parse_args()
    if options.peer:
        return run_peer(options.peer, options)
    if options.forwards:
        return llama_cpp_forwards(Model(options.model, options.type), options.threads, options.rounds)
    best = {}
    for turn in range(options.rounds):
        found = list(measure_laser(options))
        places = sorted({(kind, batch) for _, kind, batch, _ in found}, key=lambda place: (place[0] != "user", place[1]))
        for name, (_, is_batched) in ((name, PEERS[name]) for name in options.peers.split(";")):
            for kind, batch in places:
                if is_batched or batch == 1:
                    found.append((name, kind, batch, measure_peer(name, kind, batch, options)))
                    print(f"round {turn + 1}: {name}, {kind}s, batch {batch}: {found[-1][3]:.0f}", file=sys.stderr)
        for name, kind, batch, speed in found:
            row = best.setdefault(name, {})
            row[kind, batch] = max(row.get((kind, batch), 0), speed)
    print("| tokens/s | " + " | ".join(f"{kind}s, batch {batch}" for kind, batch in places) + " |")
    print("|---" * (len(places) + 1) + "|")
    for name, row in best.items():
        print(f"| {name} | " + " | ".join(f"{row[p]:.0f}" if p in row else "–" for p in places) + " |")


if __name__ == "__main__":
    main()
