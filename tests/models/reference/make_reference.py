#!/usr/bin/env python3
"""Writes what gpt_reference_test.cpp compares with: loss and gradients of a tiny GPT-2 in PyTorch.

Run once, by hand, with Debian's python3-torch; its output is committed:

    /usr/bin/python3 tests/models/reference/make_reference.py

Written from the paper and the layout of the published checkpoints, sharing nothing with
models/gpt.cpp but the formulas of tiny() and batch(), which the test repeats. Computed in double
from parameters rounded to fp32. A file is "loss SUM VALID", then for each parameter a line "name
count" and its gradient of the loss sum, in order of elements, linear weights as [out, in].
"""
import math
import pathlib

import torch
import torch.nn.functional as F

LAYERS, HEADS, CHANNELS, CONTEXT, VOCABULARY = 2, 2, 8, 6, 19
BATCH = 2


def tiny(name, shape):
    """Element e is mean + 0.3 sin(1.7 e + sum of the name's bytes): no two parameters alike."""
    mean = 1.0 if ".ln_" in "." + name and name.endswith(".weight") else 0.0
    phase = sum(name.encode())
    count = math.prod(shape)
    values = [mean + 0.3 * math.sin(1.7 * e + phase) for e in range(count)]
    rounded = torch.tensor(values, dtype=torch.float64).to(torch.float32).to(torch.float64)
    return rounded.reshape(shape).requires_grad_(True)


def parameters(bias):
    shapes = {"wte.weight": (VOCABULARY, CHANNELS), "wpe.weight": (CONTEXT, CHANNELS)}

    def affine(name, out, inputs=None):
        shapes[name + ".weight"] = (out,) if inputs is None else (out, inputs)
        if bias:
            shapes[name + ".bias"] = (out,)

    for i in range(LAYERS):
        affine(f"h.{i}.ln_1", CHANNELS)
        affine(f"h.{i}.attn.c_attn", 3 * CHANNELS, CHANNELS)
        affine(f"h.{i}.attn.c_proj", CHANNELS, CHANNELS)
        affine(f"h.{i}.ln_2", CHANNELS)
        affine(f"h.{i}.mlp.c_fc", 4 * CHANNELS, CHANNELS)
        affine(f"h.{i}.mlp.c_proj", CHANNELS, 4 * CHANNELS)
    affine("ln_f", CHANNELS)
    return {name: tiny(name, shape) for name, shape in shapes.items()}


def batch():
    places = range(BATCH * CONTEXT)
    tokens = [(7 * i + 3) % VOCABULARY for i in places]
    targets = [-1 if i % 5 == 4 else (5 * i + 1) % VOCABULARY for i in places]
    return (torch.tensor(tokens).reshape(BATCH, CONTEXT),
            torch.tensor(targets).reshape(BATCH, CONTEXT))


def attention(x, p, prefix):
    b, t, c = x.shape
    qkv = F.linear(x, p[prefix + "c_attn.weight"], p.get(prefix + "c_attn.bias"))
    q, k, v = (part.reshape(b, t, HEADS, c // HEADS).transpose(1, 2)
               for part in qkv.chunk(3, dim=-1))
    scores = q @ k.transpose(-1, -2) / math.sqrt(c // HEADS)
    future = torch.ones(t, t, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
    y = (weights @ v).transpose(1, 2).reshape(b, t, c)
    return F.linear(y, p[prefix + "c_proj.weight"], p.get(prefix + "c_proj.bias"))


def loss_sum(p, tokens, targets):
    def norm(x, name):
        return F.layer_norm(x, (CHANNELS,), p[name + ".weight"], p.get(name + ".bias"), 1e-5)

    x = p["wte.weight"][tokens] + p["wpe.weight"][:tokens.shape[1]]
    for i in range(LAYERS):
        h = f"h.{i}."
        x = x + attention(norm(x, h + "ln_1"), p, h + "attn.")
        hidden = F.linear(norm(x, h + "ln_2"), p[h + "mlp.c_fc.weight"], p.get(h + "mlp.c_fc.bias"))
        hidden = F.gelu(hidden, approximate="tanh")
        x = x + F.linear(hidden, p[h + "mlp.c_proj.weight"], p.get(h + "mlp.c_proj.bias"))
    logits = norm(x, "ln_f") @ p["wte.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1,
                           reduction="sum")


def main():
    folder = pathlib.Path(__file__).parent
    tokens, targets = batch()
    for bias in (False, True):
        p = parameters(bias)
        loss = loss_sum(p, tokens, targets)
        loss.backward()
        lines = [f"loss {loss.item():.12g} {(targets >= 0).sum().item()}"]
        for name, value in p.items():
            gradient = [f"{g:.8g}" for g in value.grad.flatten().tolist()]
            lines.append(f"{name} {len(gradient)}")
            lines += [" ".join(gradient[i:i + 8]) for i in range(0, len(gradient), 8)]
        name = "gpt_bias.txt" if bias else "gpt_no_bias.txt"
        (folder / name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
