#!/usr/bin/env python3
"""Writes what hugging_face_test.cpp reads: a tiny GPT-2 as Hugging Face's own program saves it, and
the logits that it computes from it.

Run once, by hand, where transformers and torch are (made with transformers 4.30.2, torch 1.13);
its output is committed in gpt2/: config.json, model.safetensors as hex, logits.txt (a line of tokens,
then a line of logits for each place). Weights are drawn wide, so that every part of the network moves
the logits, and biases and norms are drawn, too, which a fresh model's are not.
"""
import pathlib
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(20)
config = GPT2Config(vocab_size=19, n_positions=7, n_embd=12, n_layer=2, n_head=3,
                    bos_token_id=None, eos_token_id=None)
model = GPT2LMHeadModel(config).eval()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        parameter.copy_((1.0 if ".ln_" in name and name.endswith("weight") else 0.0) +
                        0.4 * torch.randn_like(parameter))
tokens = [3, 18, 0, 7, 7, 11, 2]
with torch.no_grad():
    logits = model.double()(torch.tensor([tokens])).logits[0]
model.float()

out = pathlib.Path(__file__).parent / "gpt2"
out.mkdir(exist_ok=True)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder, safe_serialization=True)
    folder = pathlib.Path(folder)
    (out / "config.json").write_text((folder / "config.json").read_text())
    data = (folder / "model.safetensors").read_bytes()
lines = [data[i:i + 48].hex() for i in range(0, len(data), 48)]
(out / "model.safetensors.hex").write_text("\n".join(lines) + "\n")
rows = [" ".join(map(str, tokens))] + [" ".join(f"{v:.9e}" for v in row.tolist()) for row in logits]
(out / "logits.txt").write_text("\n".join(rows) + "\n")
