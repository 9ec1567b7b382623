"""`shardrun bench`: rows of what was measured beside its limit, as a table and as JSON, on a CPU."""
import json
import unittest

import cli_support as cli

SIZES = [*cli.TINY[:8], "--vocab", 60, "--micro-batch", 2, "--device", "cpu"]

# Of two measurements, either of which the machine may have disturbed.
DIFFERENCES = ["micro-step", "decision and update"]


class Bench(unittest.TestCase):

  def rows(self, *words):
    out = json.loads(cli.succeed("bench", *words, "--json"))
    rows = {row["name"]: row for row in out["rows"]}
    for row in rows.values():
      least = 0 if row["name"] in DIFFERENCES else 1e-12
      self.assertGreaterEqual(row["measured"], least, row)
      if "reference" in row:
        self.assertAlmostEqual(row["ratio"], row["measured"] / row["reference"])
    return out["bench"], rows

  def test_gemm_has_three_products_of_each_layer(self):
    title, rows = self.rows("gemm", *SIZES, "--precision", "bf16")
    self.assertIn("32 rows, bf16, cpu", title)
    self.assertEqual(len(rows), 15)
    for name in ["mlp.c_fc y 32x128x32", "mlp.c_fc dx 32x32x128", "mlp.c_fc dw 128x32x32"]:
      self.assertIn("reference", rows[name])

  def test_kernels_are_beside_a_copy(self):
    _, rows = self.rows("kernels", *SIZES)
    for name in ["copy_bytes", "layer_norm_backward", "cross_entropy_forward", "adamw"]:
      self.assertEqual((rows[name]["against"], rows[name]["unit"]), ("copy", "GB/s"))
    for name in ["attention_forward", "attention_backward"]:
      self.assertEqual(rows[name]["unit"], "GFLOP/s")

  def test_step_tells_its_parts(self):
    for ranks in [1, 2]:
      title, rows = self.rows("step", *SIZES, "--global-batch", 4 * ranks, "--comm",
                              f"thread:{ranks}", "--zero", 3)
      self.assertIn(f"zero 3, fp32, {2 * ranks} x 2 sequences of 16, {ranks} rank", title)
      self.assertAlmostEqual(rows["tokens"]["measured"],
                             4 * ranks * 16 / rows["step"]["measured"] * 1e3)
      self.assertIn("ratio", rows["model arithmetic of a rank"])
      self.assertIn("micro-step", rows)

  def test_a_table(self):
    out = cli.succeed("bench", "gemm", *SIZES).decode()
    self.assertRegex(out, r"head dw 64x32x32 +\d+\.\d GFLOP/s .* ratio +\d")

  def test_what_is_refused(self):
    for words, wanted in [(["bench"], "what to measure"),
                          (["bench", "gem"], "gemm"),
                          (["bench", "memory"], "not built yet"),
                          (["bench", "kernels", "--comm", "thread:2"], "one device")]:
      code, out, err = cli.run(*words)
      self.assertEqual(code, 64, words)
      self.assertIn(wanted, err.decode(), words)
      self.assertEqual(out, b"", words)


if __name__ == "__main__":
  cli.main()
