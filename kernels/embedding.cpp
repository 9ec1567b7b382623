// Checks, counts, and goes to the table of the device.
#include "kernels/embedding.h"

#include "kernels/arguments.h"

namespace shardrun::kernels {

namespace {

// On a GPU whoever uploads the tokens has looked at them.
void check_tokens(ConstTensor tokens, int64_t vocabulary, const Stream& stream) {
  if (on_gpu(stream)) return;
  const int32_t* token = tokens.as<int32_t>();
  for (int64_t i = 0; i < tokens.numel(); ++i) {
    SHARDRUN_CHECK(token[i] >= 0 && token[i] < vocabulary, "tokens: got {} at {}, wanted 0 .. {}",
                   token[i], i, vocabulary - 1);
  }
}

}  // namespace

void embedding_forward(Tensor y, ConstTensor tokens, ConstTensor table, ConstTensor positions,
                       Stream& stream) {
  check_floating(y, "y");
  check_dtype(tokens, Dtype::int32, "tokens");
  check_floating(table, "table");
  const int64_t time = tokens.shape().columns(), columns = table.shape().columns();
  check_numel(y, tokens.numel() * columns, "y");
  if (positions) {
    check_floating(positions, "positions");
    SHARDRUN_CHECK(positions.shape().rows() >= time && positions.shape().columns() == columns,
                   "positions: got {}, wanted at least [{}, {}]", positions.shape().text(), time,
                   columns);
  }
  // Rows of the table that are read, not the table.
  const double gathered =
      static_cast<double>(y.numel()) * static_cast<double>(size_of(table.dtype()));
  stream.count(positions ? static_cast<double>(y.numel()) : 0,
               bytes_of({y, tokens, positions}) + gathered);
  if (!stream.computes()) return;
  check_tokens(tokens, table.shape().rows(), stream);
  if (on_gpu(stream)) {
    return cuda::table().embedding_forward(out(y), tokens.as<int32_t>(), in(table), in(positions),
                                           tokens.shape().rows(), time, columns, queue(stream));
  }
  cpu::table_for(stream).embedding_forward(out(y), tokens.as<int32_t>(), in(table), in(positions),
                                           tokens.shape().rows(), time, columns, stream.pool());
}

void embedding_backward(Tensor dtable, ConstTensor tokens, ConstTensor dy, bool accumulate,
                        Stream& stream) {
  check_dtype(dtable, Dtype::fp32, "dtable");
  check_dtype(tokens, Dtype::int32, "tokens");
  check_floating(dy, "dy");
  const int64_t columns = dtable.shape().columns();
  check_numel(dy, tokens.numel() * columns, "dy");
  stream.count(static_cast<double>(dy.numel()), bytes_of({dtable, tokens, dy}));
  if (!stream.computes()) return;
  check_tokens(tokens, dtable.shape().rows(), stream);
  if (on_gpu(stream)) {
    SHARDRUN_CHECK(tokens.numel() <= INT32_MAX, "{} tokens at once", tokens.numel());
    void* workspace = stream.workspace(cuda::table().embedding_backward_workspace(tokens.numel()));
    return cuda::table().embedding_backward(dtable.as<float>(), tokens.as<int32_t>(), in(dy),
                                            accumulate, dtable.shape().rows(), tokens.numel(),
                                            columns, workspace, queue(stream));
  }
  cpu::table_for(stream).embedding_backward(dtable.as<float>(), tokens.as<int32_t>(), in(dy),
                                            accumulate, dtable.shape().rows(), tokens.numel(),
                                            columns, stream.pool());
}

void position_backward(Tensor dpositions, ConstTensor dy, bool accumulate, Stream& stream) {
  check_dtype(dpositions, Dtype::fp32, "dpositions");
  check_floating(dy, "dy");
  SHARDRUN_CHECK(dy.shape().rank() == 3, "dy: got {}, wanted [B, T, C]", dy.shape().text());
  const int64_t batch = dy.shape()[0], time = dy.shape()[1], columns = dy.shape()[2];
  SHARDRUN_CHECK(dpositions.shape().rows() >= time && dpositions.shape().columns() == columns,
                 "dpositions: got {}, wanted at least [{}, {}]", dpositions.shape().text(), time,
                 columns);
  stream.count(static_cast<double>(dy.numel()), bytes_of({dpositions, dy}));
  if (!stream.computes()) return;
  if (on_gpu(stream)) {
    return cuda::table().position_backward(dpositions.as<float>(), in(dy), accumulate,
                                           dpositions.shape().rows(), batch, time, columns,
                                           queue(stream));
  }
  cpu::table_for(stream).position_backward(dpositions.as<float>(), in(dy), accumulate,
                                           dpositions.shape().rows(), batch, time, columns,
                                           stream.pool());
}

}  // namespace shardrun::kernels
