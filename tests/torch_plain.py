"""Plain greedy decoding of a Llama in PyTorch, as one writes it by hand for speed: keys and values in a cache of fixed
size, joined products, and one CUDA graph for a step. What docs/performance.md holds Laser's plain decoding against.

    python3 tests/torch_plain.py MODEL 1,16,64

Prompts are random, and every text has the same length, so that no place of a batch is ever empty.
"""

import glob
import json
import sys
import time

import torch
import torch.nn.functional as F
from safetensors import safe_open

PROMPT, NEW, ROUNDS = 110, 131, 2
DTYPE = torch.bfloat16


class Llama:
    def __init__(self, path):
        config = json.load(open(f"{path}/config.json"))
        tensors = {}
        for file in glob.glob(f"{path}/*.safetensors"):
            with safe_open(file, "pt", device="cuda") as shard:
                tensors |= {name: shard.get_tensor(name).to(DTYPE) for name in shard.keys()}
        self.hidden, self.heads, self.kv_heads = (
            config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
        )
        self.dim = config.get("head_dim", self.hidden // self.heads)
        self.eps = config["rms_norm_eps"]
        self.embedding = tensors["model.embed_tokens.weight"]
        self.head = tensors.get("lm_head.weight", self.embedding)
        self.norm = tensors["model.norm.weight"]
        self.layers = [self.layer(tensors, at) for at in range(config["num_hidden_layers"])]
        self.positions = PROMPT + NEW + ROUNDS
        frequencies = config["rope_theta"] ** -(torch.arange(0, self.dim, 2, device="cuda") / self.dim)
        angles = torch.outer(torch.arange(self.positions, device="cuda").float(), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)

    @staticmethod
    def layer(tensors, at):
        def weight(part):
            return tensors.pop(f"model.layers.{at}.{part}.weight")

        def joined(block, parts):
            return torch.cat([weight(f"{block}.{part}_proj") for part in parts])

        return (
            weight("input_layernorm"),
            joined("self_attn", "qkv"),
            weight("self_attn.o_proj"),
            weight("post_attention_layernorm"),
            joined("mlp", ("gate", "up")),
            weight("mlp.down_proj"),
        )

    def cache(self, batch):
        shape = (batch, self.kv_heads, self.positions, self.dim)
        return [[torch.zeros(shape, device="cuda", dtype=DTYPE) for _ in range(2)] for _ in self.layers]

    def next(self, tokens, positions, cache, mask):
        """The next token of every text `[batch]` after `tokens` [batch, length]; without a mask the prompt's."""
        x = F.embedding(tokens, self.embedding)
        batch, length, _ = x.shape
        cos, sin = self.cos[positions], self.sin[positions]

        def rotated(part):
            a, b = part.chunk(2, -1)
            return part * cos + torch.cat((-b, a), -1) * sin

        for (norm, qkv, out, mlp_norm, gate_up, down), (keys, values) in zip(self.layers, cache):
            y = F.linear(F.rms_norm(x, (self.hidden,), norm, self.eps), qkv)
            y = y.view(batch, length, self.heads + 2 * self.kv_heads, self.dim).transpose(1, 2)
            q, k, v = y.split([self.heads, self.kv_heads, self.kv_heads], 1)
            q, k = rotated(q), rotated(k)
            keys.index_copy_(2, positions, k)
            values.index_copy_(2, positions, v)
            if mask is None:
                a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                # The queries of a group are rows, so that its keys and values are read once.
                group = (batch, self.kv_heads, self.heads // self.kv_heads)
                seen = mask.expand(*group, self.positions)
                a = F.scaled_dot_product_attention(q.view(*group, self.dim), keys, values, attn_mask=seen)
                a = a.reshape(batch, self.heads, 1, self.dim)
            x = x + F.linear(a.transpose(1, 2).reshape(batch, length, self.heads * self.dim), out)
            gate, up = F.linear(F.rms_norm(x, (self.hidden,), mlp_norm, self.eps), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(x[:, -1], (self.hidden,), self.norm, self.eps), self.head).argmax(-1)


def measure(model, batch):
    cache, every = model.cache(batch), torch.arange(model.positions, device="cuda")
    token, position = torch.zeros(batch, dtype=torch.long, device="cuda"), torch.full((1,), PROMPT, device="cuda")

    def step():
        mask = (every <= position)[None, None, None]
        token.copy_(model.next(token[:, None], position, cache, mask))
        position.add_(1)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    best = float("inf")
    for _ in range(ROUNDS):
        prompts = torch.randint(5, len(model.embedding), (batch, PROMPT), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        token.copy_(model.next(prompts, torch.arange(PROMPT, device="cuda"), cache, None))
        position.fill_(PROMPT)
        for _ in range(NEW - 1):
            graph.replay()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return batch * NEW / best


def main():
    path, batches = sys.argv[1], [int(batch) for batch in sys.argv[2].split(",")]
    with torch.inference_mode():
        model = Llama(path)
        for batch in batches:
            print(f"PyTorch {torch.__version__}, batch {batch}: {measure(model, batch):.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
