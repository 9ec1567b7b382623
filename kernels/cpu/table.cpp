// Gathers the kernels of this instruction set.
#include "kernels/cpu/block.h"

namespace shardrun::cpu::SHARDRUN_ISA {

const Table& table() {
  static const Table table = [] {
    Table t{};
    fill_elementwise(t);
    fill_norm(t);
    fill_embedding(t);
    fill_loss(t);
    fill_reduce(t);
    fill_adamw(t);
    return t;
  }();
  return table;
}

}  // namespace shardrun::cpu::SHARDRUN_ISA
