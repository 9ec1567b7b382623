// Elementwise kernels: each thread reads eight elements, then writes them, so an output may be the
// memory of an input.
#include "kernels/cuda/elements.h"
#include "kernels/math/gelu.h"
#include "kernels/math/philox.h"

namespace shardrun::cuda {

namespace {

// What is done with eight elements of inputs a and b; the result is left in a.
struct Fill {
  static constexpr int kInputs = 0;
  float value;
  __device__ void operator()(Eight& a, const Eight&, int64_t) const {
#pragma unroll
    for (int k = 0; k < kVector; ++k) a.x[k] = value;
  }
};

struct Cast {
  static constexpr int kInputs = 1;
  __device__ void operator()(Eight&, const Eight&, int64_t) const {}
};

struct Add {
  static constexpr int kInputs = 2;
  __device__ void operator()(Eight& a, const Eight& b, int64_t) const {
#pragma unroll
    for (int k = 0; k < kVector; ++k) a.x[k] = a.x[k] + b.x[k];
  }
};

struct GeluForward {
  static constexpr int kInputs = 1;
  __device__ void operator()(Eight& a, const Eight&, int64_t) const {
#pragma unroll
    for (int k = 0; k < kVector; ++k) a.x[k] = math::gelu(a.x[k]);
  }
};

struct GeluBackward {
  static constexpr int kInputs = 2;
  __device__ void operator()(Eight& a, const Eight& b, int64_t) const {
#pragma unroll
    for (int k = 0; k < kVector; ++k) a.x[k] = a.x[k] * math::gelu_derivative(b.x[k]);
  }
};

struct Dropout {
  static constexpr int kInputs = 1;
  RandomKey key;
  uint32_t threshold;
  float scale;
  __device__ void operator()(Eight& a, const Eight&, int64_t begin) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const math::Words4 draw = math::draw_group(key, static_cast<uint64_t>(begin / 4 + half));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float kept = a.x[4 * half + k] * scale;
        a.x[4 * half + k] = draw.word[k] >= threshold ? kept : 0.0f;
      }
    }
  }
};

template <typename F>
__global__ void __launch_bounds__(kThreads) map_kernel(Out out, In a, In b, int64_t n, F f) {
  const int64_t begin = kVector * global_thread();
  if (begin >= n) return;
  const int count = count_from(begin, n);
  Eight x{}, y{};
  if constexpr (F::kInputs >= 1) load(x, a, begin, count);
  if constexpr (F::kInputs >= 2) load(y, b, begin, count);
  f(x, y, begin);
  store(out, begin, x, count);
}

template <typename F>
void map(const char* kernel, Out out, In a, In b, int64_t n, F f, StreamHandle stream) {
  if (n == 0) return;
  launch(per_thread(kernel, quotient_up(n, kVector), stream), map_kernel<F>, out, a, b, n, f);
}

__global__ void __launch_bounds__(kThreads)
    copy_kernel(unsigned char* out, const unsigned char* in, int64_t bytes) {
  constexpr int64_t kWidth = sizeof(uint4);
  const int64_t begin = kWidth * global_thread();
  if (begin >= bytes) return;
  const int64_t end = begin + kWidth < bytes ? begin + kWidth : bytes;
  if (end - begin == kWidth && is_aligned(out + begin) && is_aligned(in + begin)) {
    store_vector(out + begin, load_vector(in + begin));
  } else {
    for (int64_t i = begin; i < end; ++i) out[i] = in[i];
  }
}

// A thread has the eight draws from a multiple of eight on; `lead` of the first thread's come
// before the first element.
__global__ void __launch_bounds__(kThreads)
    random_normal_kernel(Out out, float mean, float std, RandomKey key, int64_t first, int lead,
                         int64_t n) {
  const int64_t begin = kVector * global_thread() - lead;
  if (begin >= n) return;
  Eight z;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const math::Words4 draw =
        math::draw_group(key, static_cast<uint64_t>((first + begin) / 4 + half));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      z.x[4 * half + k] = mean + std * math::normal_from_draw(draw.word[k]);
    }
  }
  if (begin >= 0) return store(out, begin, z, count_from(begin, n));
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    if (begin + k >= 0 && begin + k < n) store(out, begin + k, z.x[k]);
  }
}

}  // namespace

void fill(Out out, float value, int64_t n, StreamHandle stream) {
  map("fill", out, {}, {}, n, Fill{value}, stream);
}

void copy_bytes(void* out, const void* in, int64_t bytes, StreamHandle stream) {
  if (bytes == 0) return;
  launch(per_thread("copy_bytes", quotient_up(bytes, sizeof(uint4)), stream), copy_kernel,
         static_cast<unsigned char*>(out), static_cast<const unsigned char*>(in), bytes);
}

void cast(Out out, In in, int64_t n, StreamHandle stream) {
  map("cast", out, in, {}, n, Cast{}, stream);
}

void add(Out out, In a, In b, int64_t n, StreamHandle stream) {
  map("add", out, a, b, n, Add{}, stream);
}

void gelu_forward(Out out, In x, int64_t n, StreamHandle stream) {
  map("gelu_forward", out, x, {}, n, GeluForward{}, stream);
}

void gelu_backward(Out dx, In dy, In x, int64_t n, StreamHandle stream) {
  map("gelu_backward", dx, dy, x, n, GeluBackward{}, stream);
}

void dropout(Out out, In x, float p, RandomKey key, int64_t n, StreamHandle stream) {
  const uint32_t threshold = static_cast<uint32_t>(static_cast<double>(p) * 0x1p32);
  const float scale = static_cast<float>(1.0 / (1.0 - static_cast<double>(p)));
  map("dropout", out, x, {}, n, Dropout{key, threshold, scale}, stream);
}

void random_normal(Out out, float mean, float std, RandomKey key, int64_t first, int64_t n,
                   StreamHandle stream) {
  if (n == 0) return;
  const int lead = static_cast<int>(first % kVector);
  launch(per_thread("random_normal", quotient_up(n + lead, kVector), stream), random_normal_kernel,
         out, mean, std, key, first, lead, n);
}

}  // namespace shardrun::cuda
