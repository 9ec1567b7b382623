// Attention on the CPU. A task is one head of one sequence; it walks over blocks of query rows, forms
// their scores against all keys in scratch memory, and never holds more than a block of the T x T
// matrix. All sums of a head are formed by one thread in one order: the number of threads does not
// change bits.
#include "kernels/cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/onednn.h"
#include "kernels/cpu/tiles.h"

namespace shardrun::cpu {
namespace {

constexpr int64_t kRows = 128;  // of queries in a block

// A matrix inside a tensor or in scratch.
struct View {
  char* data = nullptr;
  Dtype dtype = Dtype::fp32;
  int64_t ld = 0;

  View row(int64_t i) const {
    return {data + i * ld * static_cast<int64_t>(size_of(dtype)), dtype, ld};
  }
  // The same memory with rows of n elements.
  View dense(int64_t n) const { return {data, dtype, n}; }
  float* fp32() const { return reinterpret_cast<float*>(data); }
  Bf16* bf16() const { return reinterpret_cast<Bf16*>(data); }
};

// Hands out a thread's scratch memory piece by piece; a first pass over null memory measures it.
class Scratch {
 public:
  explicit Scratch(char* data) : data_(data) {}
  View take(int64_t rows, int64_t columns, Dtype dtype) {
    View view = {data_ == nullptr ? nullptr : data_ + used_, dtype, columns};
    used_ += static_cast<size_t>(rows * columns) * size_of(dtype);
    used_ = (used_ + 63) / 64 * 64;
    return view;
  }
  size_t used() const { return used_; }

 private:
  char* data_;
  size_t used_ = 0;
};

// What all heads share.
struct Problem {
  int64_t batch, time, heads, size;  // size: of a head
  bool causal;
  float scale;
  Dtype dtype;     // of the tensors
  Dtype operands;  // of matrix products: the tensors' own where there is one, else fp32
  RowDropout dropout;
  Isa isa;
  const Tiles& tiles;

  Problem(ConstTensor qkv, const kernels::AttentionOptions& options, Isa level)
      : batch(qkv.shape()[0]),
        time(qkv.shape()[1]),
        heads(options.heads),
        size(qkv.shape()[2] / (3 * options.heads)),
        causal(options.causal),
        scale(1.0f / std::sqrt(static_cast<float>(size))),
        dtype(qkv.dtype()),
        operands(dtype == Dtype::bf16 && has_gemm_bf16(level) ? Dtype::bf16 : Dtype::fp32),
        isa(level),
        tiles(tiles_of(level)) {
    const double p = options.dropout;
    dropout.key = options.key;
    dropout.threshold = static_cast<uint32_t>(p * 0x1p32);
    dropout.keep_scale = static_cast<float>(1 / (1 - p));
  }

  bool direct() const { return dtype == Dtype::fp32; }  // no copies of heads

  // Part 0, 1, ... of a head in a [B, T, parts x C] tensor.
  View head(ConstTensor t, int64_t b, int64_t h, int64_t part) const {
    const int64_t columns = t.shape()[2];
    View view = {static_cast<char*>(const_cast<void*>(t.data())), t.dtype(), columns};
    view = view.row(b * time);
    view.data += (part * heads + h) * size * static_cast<int64_t>(size_of(t.dtype()));
    return view;
  }

  // A head as an operand: fp32 in place; 16-bit copied into dense `scratch`, which is what oneDNN
  // multiplies fastest, widened where the operands are fp32.
  View operand(View head, View scratch) const {
    if (direct()) return head;
    for (int64_t i = 0; i < time; ++i) {
      if (operands == dtype) {
        std::memcpy(scratch.row(i).data, head.row(i).data,
                    static_cast<size_t>(size) * size_of(dtype));
      } else {
        tiles.widen(scratch.row(i).fp32(), head.row(i).data, dtype, size);
      }
    }
    return scratch;
  }

  // Rounds rows of fp32 into a head.
  void store(View head, View from, int64_t rows) const {
    for (int64_t i = 0; i < rows; ++i) {
      tiles.narrow(head.row(i).data, from.row(i).fp32(), dtype, size);
    }
  }

  // A block of fp32 rows as an operand: itself, or rounded into `scratch`.
  View rounded(View block, View scratch, int64_t rows, int64_t columns) const {
    if (operands == Dtype::fp32) return block;
    scratch.ld = columns;
    for (int64_t i = 0; i < rows; ++i) {
      tiles.narrow(scratch.row(i).data, block.row(i).fp32(), operands, columns);
    }
    return scratch;
  }

  // c[m, n] = op(a) op(b), c in fp32.
  void product(View c, int64_t m, int64_t n, int64_t k, View a, bool transpose_a, View b,
               bool transpose_b, bool accumulate) const {
    const GemmShape shape = {m, n, k, transpose_a, transpose_b, a.ld, b.ld, c.ld};
    if (operands == Dtype::fp32) {
      gemm_fp32(shape, c.fp32(), a.fp32(), b.fp32(), accumulate, isa);
    } else {
      gemm_bf16(shape, c.fp32(), a.bf16(), b.bf16(), accumulate, isa);
    }
  }

  RowDropout row_dropout(int64_t b, int64_t h, int64_t i) const {
    RowDropout out = dropout;
    out.first = static_cast<uint64_t>(((b * heads + h) * time + i) * time);
    return out;
  }

  int64_t keys(int64_t end) const { return causal ? end : time; }
  int64_t valid(int64_t i) const { return causal ? i + 1 : time; }
};

struct ForwardScratch {
  View q, k, v, scores, rounded, out;
  ForwardScratch(Scratch& s, const Problem& p) {
    if (!p.direct()) {
      for (View* view : {&q, &k, &v}) *view = s.take(p.time, p.size, p.operands);
      out = s.take(kRows, p.size, Dtype::fp32);
    }
    scores = s.take(kRows, p.time, Dtype::fp32);
    if (p.operands != Dtype::fp32) rounded = s.take(kRows, p.time, p.operands);
  }
};

void forward_head(const Problem& p, Tensor out, Tensor lse, ConstTensor qkv, int64_t b, int64_t h,
                  const ForwardScratch& s) {
  const View q = p.operand(p.head(qkv, b, h, 0), s.q);
  const View k = p.operand(p.head(qkv, b, h, 1), s.k);
  const View v = p.operand(p.head(qkv, b, h, 2), s.v);
  const View out_head = p.head(out, b, h, 0);
  float* lse_row = lse.as<float>() + (b * p.heads + h) * p.time;
  for (int64_t begin = 0; begin < p.time; begin += kRows) {
    const int64_t rows = std::min(kRows, p.time - begin), keys = p.keys(begin + rows);
    const View scores = s.scores.dense(keys);
    p.product(scores, rows, keys, p.size, q.row(begin), false, k, true, false);
    for (int64_t i = 0; i < rows; ++i) {
      lse_row[begin + i] = p.tiles.softmax_row(scores.row(i).fp32(), p.valid(begin + i), keys,
                                               p.scale, p.row_dropout(b, h, begin + i));
    }
    const View probs = p.rounded(scores, s.rounded, rows, keys);
    const View block = p.direct() ? out_head.row(begin) : s.out;
    p.product(block, rows, p.size, keys, probs, false, v, false, false);
    if (!p.direct()) p.store(out_head.row(begin), s.out, rows);
  }
}

struct BackwardScratch {
  View q, k, v, dout, scores, dprobs, rounded_probs, rounded_dscores, dq, dk, dv, row;
  BackwardScratch(Scratch& s, const Problem& p) {
    if (!p.direct()) {
      for (View* view : {&q, &k, &v, &dout}) *view = s.take(p.time, p.size, p.operands);
      dq = s.take(kRows, p.size, Dtype::fp32);
    }
    for (View* view : {&scores, &dprobs}) *view = s.take(kRows, p.time, Dtype::fp32);
    if (p.operands != Dtype::fp32) {
      rounded_probs = s.take(kRows, p.time, p.operands);
      rounded_dscores = s.take(kRows, p.time, p.operands);
    }
    for (View* view : {&dk, &dv}) *view = s.take(p.time, p.size, Dtype::fp32);
    row = s.take(2, p.size, Dtype::fp32);
  }
};

void backward_head(const Problem& p, Tensor dqkv, ConstTensor dout, ConstTensor out,
                   ConstTensor qkv, ConstTensor lse, int64_t b, int64_t h,
                   const BackwardScratch& s) {
  const View q = p.operand(p.head(qkv, b, h, 0), s.q);
  const View k = p.operand(p.head(qkv, b, h, 1), s.k);
  const View v = p.operand(p.head(qkv, b, h, 2), s.v);
  const View dout_head = p.head(dout, b, h, 0), out_head = p.head(out, b, h, 0);
  const View dout_operand = p.operand(dout_head, s.dout);
  const View dq_head = p.head(dqkv, b, h, 0);
  const float* lse_row = lse.as<float>() + (b * p.heads + h) * p.time;
  std::fill_n(s.dk.fp32(), p.time * p.size, 0.0f);
  std::fill_n(s.dv.fp32(), p.time * p.size, 0.0f);

  for (int64_t begin = 0; begin < p.time; begin += kRows) {
    const int64_t rows = std::min(kRows, p.time - begin), keys = p.keys(begin + rows);
    const View dout_block = dout_operand.row(begin);
    const View scores = s.scores.dense(keys), dprobs = s.dprobs.dense(keys);
    p.product(scores, rows, keys, p.size, q.row(begin), false, k, true, false);
    p.product(dprobs, rows, keys, p.size, dout_block, false, v, true, false);
    for (int64_t i = 0; i < rows; ++i) {
      // sum_j P dP of a row equals dout . out (Dao et al. 2022, FlashAttention, appendix B.2).
      float *x = s.row.row(0).fp32(), *y = s.row.row(1).fp32();
      p.tiles.widen(x, dout_head.row(begin + i).data, p.dtype, p.size);
      p.tiles.widen(y, out_head.row(begin + i).data, p.dtype, p.size);
      const float delta = p.tiles.dot(x, y, p.size);
      p.tiles.softmax_backward_row(scores.row(i).fp32(), dprobs.row(i).fp32(), p.valid(begin + i),
                                   keys, p.scale, lse_row[begin + i], delta,
                                   p.row_dropout(b, h, begin + i));
    }
    const View probs = p.rounded(scores, s.rounded_probs, rows, keys);
    const View dscores = p.rounded(dprobs, s.rounded_dscores, rows, keys);
    p.product(s.dv, keys, p.size, rows, probs, true, dout_block, false, true);
    p.product(s.dk, keys, p.size, rows, dscores, true, q.row(begin), false, true);
    const View dq = p.direct() ? dq_head.row(begin) : s.dq;
    p.product(dq, rows, p.size, keys, dscores, false, k, false, false);
    if (!p.direct()) p.store(dq_head.row(begin), s.dq, rows);
  }
  p.store(p.head(dqkv, b, h, 1), s.dk, p.time);
  p.store(p.head(dqkv, b, h, 2), s.dv, p.time);
}

// Runs body(b, h, pieces of scratch) for every head.
template <typename Pieces, typename Body>
void for_heads(const Problem& p, ThreadPool& pool, Body body) {
  Scratch measure(nullptr);
  Pieces measured(measure, p);
  pool.run(p.batch * p.heads, [&](int64_t task, int thread) {
    Scratch scratch(static_cast<char*>(pool.scratch(thread, measure.used())));
    const Pieces pieces(scratch, p);
    body(task / p.heads, task % p.heads, pieces);
  });
}

}  // namespace

void attention_forward(Tensor out, Tensor lse, ConstTensor qkv,
                       const kernels::AttentionOptions& options, Stream& stream) {
  const Problem p(qkv, options, stream.isa());
  for_heads<ForwardScratch>(p, stream.pool(), [&](int64_t b, int64_t h, const auto& pieces) {
    forward_head(p, out, lse, qkv, b, h, pieces);
  });
}

void attention_backward(Tensor dqkv, ConstTensor dout, ConstTensor out, ConstTensor qkv,
                        ConstTensor lse, const kernels::AttentionOptions& options, Stream& stream) {
  const Problem p(qkv, options, stream.isa());
  for_heads<BackwardScratch>(p, stream.pool(), [&](int64_t b, int64_t h, const auto& pieces) {
    backward_head(p, dqkv, dout, out, qkv, lse, b, h, pieces);
  });
}

}  // namespace shardrun::cpu
