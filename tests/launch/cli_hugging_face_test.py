"""Hugging Face folders: what `checkpoint export` writes holds a run's bits, as a reader of its own
finds them; import takes it back; training starts from it; strange folders are refused.
"""
import json
import math
import re
import shutil
import struct
import unittest

import cli_support as cli

TRAIN = ["--data", "text.txt", *cli.TINY, "--micro-batch", 2, "--global-batch", 8, "--steps", 3,
         "--eval-every", 0]
SIZES = {"F32": 4, "BF16": 2, "F16": 2}


def tensors_of_set(folder):
  """Masters by name as (shape, list of fp32 bit patterns), by the manifest's readable twin."""
  folder = cli.WORK / folder
  text = (folder / "manifest.txt").read_text()
  files = re.findall(r'^files \{\s+name: "([^"]+)"', text, re.M)
  found = {}
  for body in re.findall(r"^tensors \{\n(.*?)^\}", text, re.M | re.S):
    if re.search(r"^  kind: ", body, re.M):
      continue  # a moment: MASTER is the default, which is not printed
    dims = [int(d) for d in re.findall(r"^  dims: (\d+)", body, re.M)]
    values = []
    for chunk in re.findall(r"^  chunks \{\n(.*?)^  \}", body, re.M | re.S):
      field = {k: int(v, 0) for k, v in re.findall(r"(\w+): (\S+)", chunk)}
      data = (folder / files[field.get("file", 0)]).read_bytes()
      count = field["end"] - field.get("begin", 0)
      values += struct.unpack_from(f"<{count}I", data, field.get("offset", 0))
    found[re.search(r'^  name: "([^"]+)"', body, re.M)[1]] = dims, values
  return found


def read_safetensors(path):
  """{name: (dtype, shape, list of bit patterns)}, written from the format's description."""
  data = path.read_bytes()
  (length,) = struct.unpack_from("<Q", data)
  header = json.loads(data[8:8 + length])
  assert header.pop("__metadata__") == {"format": "pt"}
  begin, found = 8 + length, {}
  end = begin
  for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
    first, last = (begin + offset for offset in entry["data_offsets"])
    assert first == end
    end = last
    size = SIZES[entry["dtype"]]
    count = math.prod(entry["shape"])
    assert last - first == size * count
    letter = "I" if size == 4 else "H"
    values = struct.unpack_from(f"<{count}{letter}", data, first)
    found[name] = entry["dtype"], entry["shape"], list(values)
  assert end == len(data)
  return found


def to_bf16(bits):
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16


def to_fp16(bits):
  return struct.unpack("<H", struct.pack("<e", struct.unpack("<f", struct.pack("<I", bits))[0]))[0]


CONVERT = {"fp32": ("F32", lambda bits: bits), "bf16": ("BF16", to_bf16), "fp16": ("F16", to_fp16)}


def transposed(values, rows, columns):
  return [values[r * columns + c] for c in range(columns) for r in range(rows)]


class HuggingFaceTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    cli.write_text("text.txt", words=3000)
    cli.succeed("train", *TRAIN, "--bias", "true", "--comm", "thread:3", "--zero", 3, "--out", "run")

  def check_export(self, folder, masters, dtype):
    folder = cli.WORK / folder
    index = folder / "model.safetensors.index.json"
    if index.exists():
      weight_map = json.loads(index.read_text())["weight_map"]
      found = {}
      for file in sorted(set(weight_map.values())):
        part = read_safetensors(folder / file)
        self.assertEqual({name for name, f in weight_map.items() if f == file}, set(part))
        found.update(part)
    else:
      found = read_safetensors(folder / "model.safetensors")
    self.assertEqual(set(found), {"transformer." + name for name in masters})
    kind, convert = CONVERT[dtype]
    for name, (dims, values) in masters.items():
      if re.search(r"(c_attn|c_proj|c_fc)\.weight$", name):
        values, dims = transposed(values, *dims), dims[::-1]
      self.assertEqual(found["transformer." + name], (kind, dims, [convert(v) for v in values]), name)

  def test_export_holds_the_bits(self):
    masters = tensors_of_set("run/checkpoints/step-00000003")
    self.assertEqual(len(masters), 2 + 12 * 2 + 2)
    for dtype in CONVERT:
      text = cli.succeed("checkpoint", "export", "run", f"hf-{dtype}", "--dtype", dtype)
      self.assertIn(b"no tokenizer files", text)
      self.check_export(f"hf-{dtype}", masters, dtype)
    cli.succeed("checkpoint", "export", "run", "hf-split", "--max-shard-size=20KB")
    parts = list((cli.WORK / "hf-split").glob("model-0*-of-00007.safetensors"))
    self.assertEqual(len(parts), 7)
    for part in parts:  # a tensor is never cut
      self.assertTrue(part.stat().st_size < 22000 or len(read_safetensors(part)) == 1)
    self.check_export("hf-split", masters, "fp32")
    config = json.loads((cli.WORK / "hf-fp32/config.json").read_text())
    self.assertEqual([config[key] for key in ("n_layer", "n_head", "n_embd", "n_positions",
                                              "vocab_size")], [2, 2, 32, 16, 256])

  def test_import_takes_it_back(self):
    for name, words in {"one": [], "split": ["--max-shard-size", "30KB"]}.items():
      cli.succeed("checkpoint", "export", "run", f"there-{name}", *words)
      cli.succeed("checkpoint", "import", f"there-{name}", f"back-{name}")
      self.assertEqual(tensors_of_set(f"back-{name}/checkpoints/step-00000000"),
                       tensors_of_set("run/checkpoints/step-00000003"))
      self.assertEqual(cli.succeed("checkpoint", "verify", f"back-{name}"), b"sound\n")
      cli.succeed("checkpoint", "export", f"back-{name}", f"again-{name}", *words)
      for file in (cli.WORK / f"there-{name}").glob("*.safetensors"):
        self.assertEqual(file.read_bytes(), (cli.WORK / f"again-{name}" / file.name).read_bytes())
    prompt = ["--prompt", "the ", "--tokens", 20]
    self.assertEqual(cli.succeed("generate", "--checkpoint", "back-one", *prompt),
                     cli.succeed("generate", "--checkpoint", "run", *prompt))
    code, _, err = cli.run("checkpoint", "import", "there-one", "back-one")
    self.assertEqual(code, 73, err)

  def test_training_starts_from_it(self):
    """A folder, the set it came from and the set it went to begin alike, on any ranks."""
    cli.succeed("checkpoint", "export", "run", "start")
    cli.succeed("checkpoint", "import", "start", "start-set")
    begin = ["train", *TRAIN, "--bias", "true"]
    cli.succeed(*begin, "--init-from", "run", "--out", "from-run")
    digest = cli.checkpoint_hash("from-run")
    self.assertNotEqual(digest, cli.checkpoint_hash("run"))
    for i, (source, ranks) in enumerate([("start", 1), ("start", 4), ("start-set", 2)]):
      cli.succeed(*begin, "--init-from", source, "--comm", f"thread:{ranks}", "--zero", 3 - i,
                  "--out", f"from-{i}")
      self.assertEqual(cli.checkpoint_hash(f"from-{i}"), digest)
    # Without --model the folder's own is taken; a shorter context, too.
    short = ["--data", "text.txt", "--seq-len", 8, "--micro-batch", 2, "--global-batch", 8, "--steps", 1]
    cli.succeed("train", *short, "--init-from", "start", "--out", "short")
    self.assertEqual(tensors_of_set("short/checkpoints/step-00000001")["wpe.weight"][0], [8, 32])
    code, _, err = cli.run("train", *short, "--model", "gpt-nano", "--init-from", "start", "--out", "x")
    self.assertEqual(code, 65)
    self.assertIn(b"wrong: ", err)
    self.assertFalse((cli.WORK / "x").exists())

  def test_without_biases(self):
    cli.succeed("train", *TRAIN, "--out", "plain")
    self.assertIn(b"zeros for the biases", cli.succeed("checkpoint", "export", "plain", "plain-hf"))
    masters = tensors_of_set("plain/checkpoints/step-00000003")
    found = read_safetensors(cli.WORK / "plain-hf/model.safetensors")
    surplus = {name for name in found if name[len("transformer."):] not in masters}
    self.assertEqual(len(surplus), 2 * 6 + 1)
    for name in surplus:
      self.assertTrue(name.endswith(".bias"))
      self.assertEqual(set(found[name][2]), {0})
    # Zeros change no logit: the text is the same.
    cli.succeed("checkpoint", "import", "plain-hf", "plain-back")
    words = ["--prompt", "a", "--tokens", 12, "--temperature", 0]
    self.assertEqual(cli.succeed("generate", "--checkpoint", "plain-back", *words),
                     cli.succeed("generate", "--checkpoint", "plain", *words))

  def test_tokenizer_files_pass_along(self):
    """A vocabulary of the 256 bytes and one merge, in the published form."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    names, extra = {}, 256
    for b in range(256):
      names[b] = chr(b) if b in printable else chr(extra)
      extra += b not in printable
    vocabulary = {names[b]: b for b in range(256)}
    vocabulary["th"] = 256
    folder = cli.WORK / "bpe"
    folder.mkdir()
    (folder / "encoder.json").write_text(json.dumps(vocabulary))
    (folder / "vocab.bpe").write_text("#version: 0.2\nt h\n")
    cli.succeed("train", *TRAIN, "--vocab", 257, "--tokenizer", "gpt2:bpe", "--out", "with-bpe")
    cli.succeed("checkpoint", "export", "with-bpe", "bpe-hf")
    for ours, theirs in {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}.items():
      self.assertEqual((cli.WORK / "bpe-hf" / theirs).read_bytes(), (folder / ours).read_bytes())
    (cli.WORK / "bpe-hf/tokenizer_config.json").write_text("{}")
    cli.succeed("checkpoint", "import", "bpe-hf", "bpe-back")
    shutil.rmtree(folder)
    words = ["--prompt", "the", "--tokens", 5, "--temperature", 0]
    cli.succeed("generate", "--checkpoint", "bpe-back", *words)
    cli.succeed("checkpoint", "export", "bpe-back", "bpe-again")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
      self.assertEqual((cli.WORK / "bpe-again" / name).read_bytes(),
                       (cli.WORK / "bpe-hf" / name).read_bytes())

  def test_heads_and_masks(self):
    """An lm_head that is wte's copy and the masks of old files are no parameters."""
    cli.succeed("checkpoint", "export", "run", "masks")
    path = cli.WORK / "masks/model.safetensors"
    sound = read_safetensors(path)

    def write(tensors):
      header, body = {"__metadata__": {"format": "pt"}}, b""
      for name, (dtype, shape, values) in tensors.items():
        raw = bytes(values) if dtype == "U8" else struct.pack(f"<{len(values)}I", *values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
      text = json.dumps(header).encode()
      path.write_bytes(struct.pack("<Q", len(text)) + text + body)

    bare = {name[len("transformer."):]: value for name, value in sound.items()}  # no prefix
    head = sound["transformer.wte.weight"]
    old = {**bare, "lm_head.weight": head, "h.0.attn.bias": ("U8", [1, 1, 2, 2], [1, 0, 1, 1]),
           "h.1.attn.masked_bias": ("F32", [], [0])}
    write(old)
    cli.succeed("checkpoint", "import", "masks", "masks-back")
    self.assertEqual(tensors_of_set("masks-back/checkpoints/step-00000000"),
                     tensors_of_set("run/checkpoints/step-00000003"))
    write({**old, "lm_head.weight": (head[0], head[1], [head[2][0] ^ 1, *head[2][1:]])})
    self.refuse(["import", "masks", "no"], 65, b"lm_head.weight")
    write({**old, "h.0.extra": ("F32", [], [0])})
    self.refuse(["import", "masks", "no"], 65, b"not of the model: h.0.extra")

  def refuse(self, words, code, part):
    before = cli.picture()
    got, out, err = cli.run("checkpoint", *words)
    self.assertEqual((got, out, err.count(b"\n")), (code, b"", 1), err.decode())
    self.assertIn(part, err)
    self.assertEqual(cli.picture(), before)

  def test_wrong_words(self):
    cli.succeed("checkpoint", "export", "run", "there-already")
    self.refuse(["export", "run", "there-already"], 73, b"there already")
    self.refuse(["export", "run"], 64, b"CHECKPOINT")
    self.refuse(["export", "run", "new", "--dtype", "int8"], 64, b"int8")
    self.refuse(["export", "run", "new", "--max-shard-size", "5XB"], 64, b"5XB")
    self.refuse(["export", "run", "new", "--size", "5"], 64, b"--size")
    self.refuse(["export", "nowhere", "new"], 66, b"nowhere")
    self.refuse(["import", "run", "new"], 66, b"config.json")


if __name__ == "__main__":
  cli.main()
