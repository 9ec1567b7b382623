"""What `plan` prints for GPUs that are not here: that gathering ahead costs memory and hides communication."""
import json
import unittest

import cli_support as cli


def plan(*more):
  return json.loads(cli.succeed("plan", "--model", "gpt2-124m", "--world-size", 8, "--zero", 3,
                                "--precision", "bf16", "--micro-batch", 4, "--json", *more))


class PlanTest(unittest.TestCase):
  def test_prefetch(self):
    none, one, two = (plan("--comm", "nccl", "--prefetch", n) for n in range(3))
    for ahead in (one, two):
      self.assertEqual(ahead["flops_per_step"], none["flops_per_step"])
      # The first unit of backward is still there from forward, and with it the owner of its weights.
      self.assertLessEqual(ahead["sent_bytes_per_step"], none["sent_bytes_per_step"])
      self.assertEqual(ahead["persistent_bytes"], none["persistent_bytes"])
      self.assertLess(ahead["timeline"]["comm_exposed_ms"], none["timeline"]["comm_exposed_ms"])
      self.assertLess(ahead["timeline"]["step_ms"], none["timeline"]["step_ms"])
    self.assertGreater(two["arena_bytes"], one["arena_bytes"])
    self.assertAlmostEqual(none["timeline"]["comm_exposed_ms"],
                           none["timeline"]["communication_ms"])

  def test_default(self):
    self.assertEqual(plan("--comm", "nccl"), plan("--comm", "nccl", "--prefetch", 1))
    self.assertEqual(plan("--comm", "staged")["prefetch"], 0)
    host = plan("--comm", "mpi")
    self.assertEqual(host["prefetch"], 0)
    self.assertNotIn("timeline", host)

  def test_text(self):
    text = cli.succeed("plan", "--model", "gpt2-124m", "--world-size", 4, "--zero", 3, "--comm",
                       "nccl", "--overlap-comm", 2).decode()
    self.assertRegex(text, r"[\d.]+ ms, of them [\d.]+ ms communication that nothing hides")
    self.assertIn("prefetch 2", text)


if __name__ == "__main__":
  cli.main()
