#!/usr/bin/env python3
"""Tables of what `shardrun bench --json` and pytorch_gpt.py measured, for tests/gpu/run.

figures.py table FILE     the rows of one bench
figures.py summary FOLDER what of a run's figures has a target, and PyTorch beside shardrun
"""
import json
import os
import sys

# Of one NVIDIA H200: (file, model, row, key, wanted, what it says).
TARGETS = [
    ("step", "gpt2-124m", "tokens", "measured", 530e3, "gpt2-124m, tokens/s"),
    ("large", "gpt2-1558m", "tokens", "measured", 58e3, "gpt2-1558m, tokens/s"),
    ("kernels", "gpt2-124m", "adamw", "ratio", 0.85, "AdamW, of copy bandwidth"),
]


def read(folder, name):
    try:
        with open(os.path.join(folder, name + ".json"), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def rows_of(bench):
    return {row["name"]: row for row in bench["rows"]} if bench else {}


def table(path):
    with open(path, encoding="utf-8") as file:
        bench = json.load(file)
    print(bench["bench"])
    for row in bench["rows"]:
        line = f"  {row['name']:<34}{row['measured']:14.1f} {row['unit']:<8}"
        if "ratio" in row:
            line += f" {row['ratio']:7.3f} of {row['reference']:.1f} ({row['against']})"
        print(line)


def summary(folder):
    for name in ("kernels", "gemm", "step", "large"):
        if read(folder, name):
            table(os.path.join(folder, name + ".json"))
    for name, model, row, key, wanted, text in TARGETS:
        bench = read(folder, name)
        got = rows_of(bench).get(row, {}).get(key)
        if got is not None and f": {model}," in bench["bench"]:
            verdict = "met" if got >= wanted else "missed"
            print(f"{text}: {got:.6g}, target of an H200 {wanted:.6g}: {verdict}")
    ours = rows_of(read(folder, "step")).get("tokens", {}).get("measured")
    for kind in ("eager", "compiled"):
        theirs = read(folder, "pytorch-" + kind)
        if ours and theirs:
            rate = theirs["tokens_per_s"]
            print(f"PyTorch {theirs['torch']} {kind}: {rate:.6g} tokens/s; "
                  f"shardrun {ours / rate:.3f} times that")


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ("table", "summary"):
        print(__doc__, file=sys.stderr)
        return 64
    (table if sys.argv[1] == "table" else summary)(sys.argv[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
