#!/usr/bin/env python3
"""GPT-2 in PyTorch on one GPU, timed: the yardstick that `tests/gpu/run` puts beside shardrun.

The same network as models/gpt.cpp (learned positions, pre-norm blocks, tanh GELU, biases, head tied
to the token table, vocabulary padded to a multiple of 64), in the way that is fast in PyTorch:
bf16 autocast, flash attention, fused AdamW, clipping at 1, gradients added up over micro-batches.
Tokens are drawn at random. Prints one JSON object; exit code 69 where torch or a GPU is missing.
"""
import argparse
import json
import math
import statistics
import sys
import time

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
except ImportError as error:
    print(f"torch is not there: {error}", file=sys.stderr)
    sys.exit(69)

# layers, heads, channels
MODELS = {
    "gpt2-124m": (12, 12, 768),
    "gpt2-355m": (24, 16, 1024),
    "gpt2-774m": (36, 20, 1280),
    "gpt2-1558m": (48, 25, 1600),
}
VOCABULARY = 50257
PADDED = (VOCABULARY + 63) // 64 * 64


class Block(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(channels)
        self.c_attn = nn.Linear(channels, 3 * channels)
        self.c_proj = nn.Linear(channels, channels)
        self.ln_2 = nn.LayerNorm(channels)
        self.c_fc = nn.Linear(channels, 4 * channels)
        self.mlp_proj = nn.Linear(4 * channels, channels)

    def attend(self, x):
        batch, time_steps, channels = x.shape
        heads = (batch, time_steps, self.heads, channels // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, time_steps, channels))

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, heads, channels, context):
        super().__init__()
        self.wte = nn.Embedding(PADDED, channels)
        self.wpe = nn.Embedding(context, channels)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(channels)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("c_proj.weight", "mlp_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if residual else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)  # padding and all: a slice costs a copy
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def flops_per_token(layers, channels, context):
    products = 12 * layers * channels * channels + VOCABULARY * channels
    return 6 * products + 6 * layers * channels * context


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="gpt2-124m")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    flags = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no GPU", file=sys.stderr)
        return 69
    device = torch.device("cuda")
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    layers, heads, channels = MODELS[flags.model]
    with device:
        model = Gpt(layers, heads, channels, flags.seq_len)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    run = torch.compile(model) if flags.compile else model
    shape = (flags.grad_accum, flags.micro_batch, flags.seq_len)
    tokens = torch.randint(VOCABULARY, shape, device=device)
    targets = torch.randint(VOCABULARY, shape, device=device)

    def step():
        for micro in range(flags.grad_accum):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                with torch.nn.attention.sdpa_kernel(
                        torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                    loss = run(tokens[micro], targets[micro]) / flags.grad_accum
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(3):
        first = step().item()
    seconds = []
    for _ in range(flags.steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        last = step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    if not (math.isfinite(first) and math.isfinite(last.item())):
        print(f"the loss is not finite: {first}, {last.item()}", file=sys.stderr)
        return 70
    median = statistics.median(seconds)
    rate = flags.grad_accum * flags.micro_batch * flags.seq_len / median
    print(json.dumps({
        "torch": torch.__version__,
        "compiled": flags.compile,
        "model": flags.model,
        "step_ms": 1e3 * median,
        "tokens_per_s": rate,
        "gflops_per_s": rate * flops_per_token(layers, channels, flags.seq_len) / 1e9,
        "memory_mib": torch.cuda.max_memory_allocated() / 2**20,
    }))
    return 0


if __name__ == "__main__":
    sys.exit(main())
