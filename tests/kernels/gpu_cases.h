// Calls of every kernel but matmul and attention that a GPU has, with odd sizes and special numbers:
// the same call on the CPU and on a GPU must give the same bits, memory behind an operand included.
// Taken by the tests of the virtual device and of real ones.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/kernels/operands.h"

namespace shardrun {

using Arrays = std::vector<Array>;

struct KernelCase {
  std::string name;
  std::function<Arrays(Operands&)> run;
  // Scratch memory of the stream: what the kernel asks for and not a byte more, or plenty.
  size_t workspace = size_t{1} << 20;
};

std::vector<KernelCase> elementwise_cases();
std::vector<KernelCase> norm_cases();
std::vector<KernelCase> reduce_cases();
std::vector<KernelCase> adamw_cases();
std::vector<KernelCase> embedding_cases();
std::vector<KernelCase> loss_cases();

// Results with all NaNs alike.
Arrays run_on_cpu(const KernelCase& c);
Arrays run_on_gpu(const KernelCase& c, Device& device);
bool same_bits(const Arrays& a, const Arrays& b);
void expect_same_bits(const std::vector<KernelCase>& cases, Device& device);

}  // namespace shardrun
