#include "launch/bench/timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "kernels/elementwise.h"
#include "kernels/matmul.h"

namespace shardrun {
namespace {

constexpr int kRounds = 7;
constexpr double kRoundSeconds = 0.02;
constexpr double kMostCalls = 1000;
constexpr double kMostSeconds = 4;  // for all rounds, where one call takes long

using Clock = std::chrono::steady_clock;

class TimedEvent {
 public:
  explicit TimedEvent(Stream& stream) : stream_(stream) {
    handle_ = stream.device()->create_timed_event();
  }
  ~TimedEvent() { stream_.device()->destroy_event(handle_); }
  TimedEvent(const TimedEvent&) = delete;
  void record() { stream_.device()->record_event(handle_, stream_.handle()); }
  void* handle() const { return handle_; }

 private:
  Stream& stream_;
  void* handle_;
};

double seconds_of(Stream& stream, int calls, FunctionRef<void()> call) {
  if (!stream.device()) {
    const auto begin = Clock::now();
    for (int i = 0; i < calls; ++i) call();
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }
  TimedEvent begin(stream), end(stream);
  begin.record();
  for (int i = 0; i < calls; ++i) call();
  end.record();
  stream.synchronize();
  return stream.device()->seconds_between(begin.handle(), end.handle());
}

}  // namespace

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

double time_of(Stream& stream, FunctionRef<void()> call) {
  call();
  stream.synchronize();
  const double once = std::max(seconds_of(stream, 1, call), 1e-9);
  const int calls = static_cast<int>(std::clamp(kRoundSeconds / once, 1.0, kMostCalls));
  const int rounds =
      static_cast<int>(std::clamp(kMostSeconds / (once * calls), 1.0, 1.0 * kRounds));
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) times.push_back(seconds_of(stream, calls, call) / calls);
  return median(std::move(times));
}

Measured measure(Stream& stream, FunctionRef<void()> call) {
  const WorkCount before = stream.work();
  call();
  Measured out;
  out.work.flops = stream.work().flops - before.flops;
  out.work.bytes = stream.work().bytes - before.bytes;
  out.seconds = time_of(stream, call);
  return out;
}

double copy_bandwidth(size_t bytes, Memory& memory, Stream& stream) {
  const Shape shape{static_cast<int64_t>(bytes / sizeof(float))};
  const OwnedTensor from = random_tensor(memory, Dtype::fp32, shape, stream);
  const OwnedTensor to = random_tensor(memory, Dtype::fp32, shape, stream);
  const size_t copied = from.tensor.bytes();
  auto* target = static_cast<std::byte*>(to.tensor.data());
  const auto* source = static_cast<const std::byte*>(from.tensor.data());
  const double seconds = time_of(stream, [&] {
    if (stream.device()) return stream.device()->copy(target, source, copied, stream.handle());
    const size_t piece = size_t{1} << 20;
    stream.pool().run(static_cast<int64_t>((copied + piece - 1) / piece), [&](int64_t i, int) {
      const size_t at = static_cast<size_t>(i) * piece;
      std::memcpy(target + at, source + at, std::min(piece, copied - at));
    });
  });
  return 2 * static_cast<double>(copied) / seconds;
}

Peak matmul_peak(double flops, Dtype dtype, Memory& memory, Stream& stream) {
  const double side = std::cbrt(flops / 2);
  const double multiple = side >= 256 ? 256 : 16;
  const auto n = static_cast<int64_t>(std::ceil(side / multiple) * multiple);
  const OwnedTensor a = random_tensor(memory, dtype, {n, n}, stream);
  const OwnedTensor b = random_tensor(memory, dtype, {n, n}, stream);
  const OwnedTensor c = allocate_tensor(memory, dtype, {n, n}, "product");
  const Measured measured = measure(stream, [&] {
    kernels::matmul(c.tensor, a.tensor, kernels::Transpose::no, b.tensor, kernels::Transpose::yes,
                    {}, false, stream);
  });
  return {n, measured.work.flops / measured.seconds};
}

OwnedTensor random_tensor(Memory& memory, Dtype dtype, const Shape& shape, Stream& stream) {
  OwnedTensor out = allocate_tensor(memory, dtype, shape, "operand");
  const RandomKey key{static_cast<uint64_t>(shape.numel()), 1, 1};
  kernels::random_normal(out.tensor, 0, 1, key, 0, stream);
  return out;
}

OwnedTensor random_tokens(Memory& memory, const Shape& shape, int64_t vocabulary, Stream& stream) {
  OwnedTensor out = allocate_tensor(memory, Dtype::int32, shape, "tokens");
  const HostBuffer host(stream.device(), out.tensor.bytes(), "tokens");
  for (int64_t i = 0; i < shape.numel(); ++i) {
    host.as<int32_t>()[i] = static_cast<int32_t>(mix64(static_cast<uint64_t>(i), 5) %
                                                 static_cast<uint64_t>(vocabulary));
  }
  copy_from_host(out.tensor, host.data(), stream);
  stream.synchronize();
  return out;
}

void require_one_rank(const char* bench, RankContext& ranks) {
  agree(ranks.comm, [&] {
    if (ranks.comm.size() == 1) return;
    throw UsageError("bench {}: measures one device, got {} ranks", bench, ranks.comm.size());
  });
}

}  // namespace shardrun
