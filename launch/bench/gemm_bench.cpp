// `shardrun bench gemm`: the matrix products of a GPT's leaf, each beside what the library reaches on
// a square product of as much work as the largest of them.
#include "kernels/matmul.h"
#include "launch/bench/timing.h"
#include "launch/train/job.h"

namespace shardrun {
namespace {

using kernels::Transpose;

struct Product {
  const char* name;
  int64_t outputs, inputs;  // of the linear layer
};

struct Row {
  std::string name;
  double flops_per_second;
};

// As a linear layer with weight [outputs, inputs] runs: forward with the bias, the gradient of its
// input, and that of its weight, added up in fp32.
void measure_layer(const Product& layer, int64_t rows, Dtype dtype, Memory& memory, Stream& stream,
                   std::vector<Row>& out) {
  const auto [name, outputs, inputs] = layer;
  const OwnedTensor x = random_tensor(memory, dtype, {rows, inputs}, stream);
  const OwnedTensor y = random_tensor(memory, dtype, {rows, outputs}, stream);
  const OwnedTensor weight = random_tensor(memory, dtype, {outputs, inputs}, stream);
  const OwnedTensor bias = random_tensor(memory, dtype, {outputs}, stream);
  const OwnedTensor dx = allocate_tensor(memory, dtype, {rows, inputs}, "dx");
  const OwnedTensor dweight = random_tensor(memory, Dtype::fp32, {outputs, inputs}, stream);
  const OwnedTensor result = allocate_tensor(memory, dtype, {rows, outputs}, "y");
  const auto add = [&](const char* pass, int64_t m, int64_t n, int64_t k, auto call) {
    const Measured measured = measure(stream, call);
    out.push_back({fmt::format("{} {} {}x{}x{}", name, pass, m, n, k),
                   measured.work.flops / measured.seconds});
  };
  add("y", rows, outputs, inputs, [&] {
    kernels::matmul(result.tensor, x.tensor, Transpose::no, weight.tensor, Transpose::yes,
                    bias.tensor, false, stream);
  });
  add("dx", rows, inputs, outputs, [&] {
    kernels::matmul(dx.tensor, y.tensor, Transpose::no, weight.tensor, Transpose::no, {}, false,
                    stream);
  });
  add("dw", outputs, inputs, rows, [&] {
    kernels::matmul(dweight.tensor, y.tensor, Transpose::yes, x.tensor, Transpose::no, {}, true,
                    stream);
  });
}

}  // namespace

int bench_gemm(const Config& given, RankContext& ranks) {
  require_one_rank("gemm", ranks);
  const Config config = with_defaults(given);
  const GptConfig gpt = gpt_config(config, config.has_vocab() ? config.vocab() : 256);
  const Precision precision = precision_from_name(config.precision());
  const Dtype dtype = compute_dtype(precision);
  RankDevice device(config, ranks);
  device.require(precision);
  Stream& stream = device.stream();

  const int64_t rows = (config.has_micro_batch() ? config.micro_batch() : 8) * gpt.context;
  const int64_t c = gpt.channels, v = gpt.padded_vocabulary();
  const Product layers[] = {{"attn.c_attn", 3 * c, c},
                            {"attn.c_proj", c, c},
                            {"mlp.c_fc", 4 * c, c},
                            {"mlp.c_proj", c, 4 * c},
                            {"head", v, c}};
  double most = 0;
  std::vector<Row> measured;
  for (const Product& layer : layers) {
    most = std::max(most, 2.0 * static_cast<double>(rows) * static_cast<double>(layer.outputs) *
                              static_cast<double>(layer.inputs));
    const auto memory = make_heap_memory(stream.device());
    measure_layer(layer, rows, dtype, *memory, stream, measured);
    stream.synchronize();
  }
  const auto memory = make_heap_memory(stream.device());
  const Peak peak = matmul_peak(most, dtype, *memory, stream);
  stream.synchronize();

  std::vector<BenchRow> lines;
  for (const Row& row : measured) {
    lines.push_back({row.name, "GFLOP/s", row.flops_per_second / 1e9, peak.flops_per_second / 1e9,
                     fmt::format("{}^3", peak.size), 0});
  }
  print_rows(fmt::format("gemm: {}, {} rows, {}, {}, {}", config.model(), rows, name_of(dtype),
                         device.name(), kernels::matmul_library(stream.kind())),
             lines, config.json());
  return 0;
}

}  // namespace shardrun
