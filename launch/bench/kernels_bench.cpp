// `shardrun bench kernels`: every kernel of a GPT's step but the matrix products, by the bytes that
// its operands hold, beside the plainest copy of as many bytes; attention by its arithmetic, beside a
// square matrix product.
//
// Sizes are those of a leaf. Where --micro-batch is not given the leaf is so large that no cache
// holds its widest activation.
#include "kernels/adamw.h"
#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/loss.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/reduce.h"
#include "launch/bench/timing.h"
#include "launch/train/job.h"

namespace shardrun {
namespace {

constexpr double kUncachedOnGpu = double{1 << 28}, kUncachedOnCpu = double{1 << 26};
constexpr int64_t kMostParameters = int64_t{1} << 27;  // in an update; more shows nothing more

class KernelsBench {
 public:
  KernelsBench(const Config& config, RankDevice& device)
      : gpt_(gpt_config(config, config.has_vocab() ? config.vocab() : 256)),
        dtype_(compute_dtype(precision_from_name(config.precision()))),
        stream_(device.stream()),
        gpu_(stream_.device()) {
    const double row = 4.0 * static_cast<double>(gpt_.channels * gpt_.context) *
                       static_cast<double>(size_of(dtype_));
    const double uncached = gpu_ ? kUncachedOnGpu : kUncachedOnCpu;
    batch_ = config.has_micro_batch() ? config.micro_batch()
                                      : std::max<int64_t>(1, static_cast<int64_t>(uncached / row));
    rows_ = batch_ * gpt_.context;
  }

  std::vector<BenchRow> run() {
    const auto memory = make_heap_memory(gpu_);
    copy_ = copy_bandwidth(static_cast<size_t>(4 * rows_ * gpt_.channels) * size_of(dtype_),
                           *memory, stream_);
    elementwise();
    norms();
    embeddings();
    loss();
    update();
    attention();
    return std::move(out_);
  }

  int64_t batch() const { return batch_; }

 private:
  // Memory of one group of kernels, given back at its end.
  struct Group {
    explicit Group(KernelsBench& bench) : bench(bench), memory(make_heap_memory(bench.gpu_)) {}
    ~Group() { bench.stream_.synchronize(); }
    OwnedTensor make(Dtype dtype, const Shape& shape) {
      return random_tensor(*memory, dtype, shape, bench.stream_);
    }
    KernelsBench& bench;
    std::unique_ptr<Memory> memory;
  };

  template <typename Call>
  void add(const std::string& name, Call call) {
    const Measured measured = measure(stream_, call);
    out_.push_back(
        {name, "GB/s", measured.work.bytes / measured.seconds / 1e9, copy_ / 1e9, "copy", 0});
  }

  void elementwise() {
    Group group(*this);
    const Shape shape{rows_, 4 * gpt_.channels};
    const OwnedTensor a = group.make(dtype_, shape), b = group.make(dtype_, shape),
                      y = group.make(dtype_, shape), wide = group.make(Dtype::fp32, shape);
    add("fill", [&] { kernels::fill(y.tensor, 1.5f, stream_); });
    add("copy_bytes", [&] { kernels::copy_bytes(y.tensor, a.tensor, stream_); });
    add("cast from fp32", [&] { kernels::cast(y.tensor, wide.tensor, stream_); });
    add("add", [&] { kernels::add(y.tensor, a.tensor, b.tensor, stream_); });
    add("gelu_forward", [&] { kernels::gelu_forward(y.tensor, a.tensor, stream_); });
    add("gelu_backward", [&] { kernels::gelu_backward(y.tensor, b.tensor, a.tensor, stream_); });
    add("dropout", [&] { kernels::dropout(y.tensor, a.tensor, 0.1f, {1, 2, 3}, stream_); });
  }

  void norms() {
    Group group(*this);
    const int64_t c = gpt_.channels;
    const OwnedTensor x = group.make(dtype_, {rows_, c}), y = group.make(dtype_, {rows_, c}),
                      dy = group.make(dtype_, {rows_, c}), weight = group.make(dtype_, {c}),
                      bias = group.make(dtype_, {c}), mean = group.make(Dtype::fp32, {rows_}),
                      rstd = group.make(Dtype::fp32, {rows_}),
                      dweight = group.make(Dtype::fp32, {c}), dbias = group.make(Dtype::fp32, {c});
    add("layer_norm_forward", [&] {
      kernels::layer_norm_forward(y.tensor, mean.tensor, rstd.tensor, x.tensor, weight.tensor,
                                  bias.tensor, 1e-5f, stream_);
    });
    add("layer_norm_backward", [&] {
      kernels::layer_norm_backward(y.tensor, dweight.tensor, dbias.tensor, dy.tensor, x.tensor,
                                   weight.tensor, mean.tensor, rstd.tensor, false, false, stream_);
    });
    add("column_sum", [&] { kernels::column_sum(dbias.tensor, dy.tensor, false, stream_); });
  }

  void embeddings() {
    Group group(*this);
    const int64_t c = gpt_.channels, t = gpt_.context;
    const OwnedTensor tokens = random_tokens(*group.memory, {batch_, t}, gpt_.vocabulary, stream_);
    const OwnedTensor table = group.make(dtype_, {gpt_.padded_vocabulary(), c}),
                      positions = group.make(dtype_, {t, c}),
                      y = group.make(dtype_, {batch_, t, c}),
                      dtable = group.make(Dtype::fp32, {gpt_.padded_vocabulary(), c}),
                      dpositions = group.make(Dtype::fp32, {t, c});
    add("embedding_forward", [&] {
      kernels::embedding_forward(y.tensor, tokens.tensor, table.tensor, positions.tensor, stream_);
    });
    add("embedding_backward", [&] {
      kernels::embedding_backward(dtable.tensor, tokens.tensor, y.tensor, true, stream_);
    });
    add("position_backward",
        [&] { kernels::position_backward(dpositions.tensor, y.tensor, false, stream_); });
  }

  void loss() {
    Group group(*this);
    const int64_t v = gpt_.padded_vocabulary();
    const OwnedTensor targets = random_tokens(*group.memory, {rows_}, gpt_.vocabulary, stream_);
    const OwnedTensor logits = group.make(dtype_, {rows_, v}),
                      lse = group.make(Dtype::fp32, {rows_}), sum = group.make(Dtype::fp32, {1});
    const OwnedTensor valid = allocate_tensor(*group.memory, Dtype::int64, {1}, "valid");
    add("cross_entropy_forward", [&] {
      kernels::cross_entropy_forward(sum.tensor, valid.tensor, lse.tensor, logits.tensor,
                                     targets.tensor, gpt_.vocabulary, stream_);
    });
    add("cross_entropy_backward", [&] {
      kernels::cross_entropy_backward(logits.tensor, logits.tensor, lse.tensor, targets.tensor,
                                      gpt_.vocabulary, 1.0f, stream_);
    });
  }

  void update() {
    Group group(*this);
    const int64_t n = std::min(kMostParameters, Gpt(gpt_).parameter_count()) / 256 * 256;
    const OwnedTensor master = group.make(Dtype::fp32, {n}), moment1 = group.make(Dtype::fp32, {n}),
                      moment2 = group.make(Dtype::fp32, {n}),
                      gradient = group.make(Dtype::fp32, {n}), copy = group.make(Dtype::bf16, {n}),
                      squares = allocate_tensor(*group.memory, Dtype::fp64, {n / 256}, "squares"),
                      found = allocate_tensor(*group.memory, Dtype::int64, {1}, "found");
    kernels::fill(moment2.tensor, 1.0f, stream_);
    add("fold of bf16", [&] {
      kernels::fold(gradient.tensor, copy.tensor, kernels::FoldMode::assign, found.tensor, 0,
                    stream_);
    });
    add("block_squares", [&] { kernels::block_squares(squares.tensor, gradient.tensor, stream_); });
    kernels::AdamwScalars scalars;
    scalars.lr = 1e-4;
    scalars.t = 10;
    const kernels::AdamwRange all[] = {{0, n, 1, 0.1f, {1, 2, 3}, 0}};
    add("adamw", [&] {
      kernels::adamw(master.tensor, copy.tensor, moment1.tensor, moment2.tensor, gradient.tensor,
                     scalars, all, stream_);
    });
  }

  void attention() {
    Group group(*this);
    const int64_t c = gpt_.channels, t = gpt_.context;
    kernels::AttentionOptions options;
    options.heads = gpt_.heads;
    const OwnedTensor qkv = group.make(dtype_, {batch_, t, 3 * c}),
                      dqkv = group.make(dtype_, {batch_, t, 3 * c}),
                      o = group.make(dtype_, {batch_, t, c}),
                      dout = group.make(dtype_, {batch_, t, c}),
                      lse = group.make(Dtype::fp32, {batch_, gpt_.heads, t});
    const Measured forward = measure(stream_, [&] {
      kernels::attention_forward(o.tensor, lse.tensor, qkv.tensor, options, stream_);
    });
    const Measured backward = measure(stream_, [&] {
      kernels::attention_backward(dqkv.tensor, dout.tensor, o.tensor, qkv.tensor, lse.tensor,
                                  options, stream_);
    });
    const Peak peak = matmul_peak(forward.work.flops, dtype_, *group.memory, stream_);
    const std::string against = fmt::format("{}^3", peak.size);
    for (const auto& [name, measured] :
         {std::pair{"attention_forward", forward}, std::pair{"attention_backward", backward}}) {
      out_.push_back({name, "GFLOP/s", measured.work.flops / measured.seconds / 1e9,
                      peak.flops_per_second / 1e9, against, 0});
    }
  }

  GptConfig gpt_;
  Dtype dtype_;
  Stream& stream_;
  Device* gpu_;
  int64_t batch_ = 1, rows_ = 1;
  double copy_ = 0;
  std::vector<BenchRow> out_;
};

}  // namespace

int bench_kernels(const Config& given, RankContext& ranks) {
  require_one_rank("kernels", ranks);
  const Config config = with_defaults(given);
  RankDevice device(config, ranks);
  device.require(precision_from_name(config.precision()));
  KernelsBench bench(config, device);
  const std::vector<BenchRow> rows = bench.run();
  print_rows(fmt::format("kernels: {}, {} sequences, {}, {}", config.model(), bench.batch(),
                         config.precision(), device.name()),
             rows, config.json());
  return 0;
}

}  // namespace shardrun
