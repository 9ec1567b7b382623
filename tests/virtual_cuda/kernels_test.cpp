// Every CUDA kernel, run on the virtual device, against the CPU kernel: the same bits. Each case
// runs the same call on either side, on its own copies of its operands; memory behind an operand
// counts.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "kernels/adamw.h"
#include "kernels/cuda/kernels.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/loss.h"
#include "kernels/math/exact.h"
#include "kernels/norm.h"
#include "kernels/reduce.h"
#include "tests/kernels/levels.h"
#include "tests/virtual_cuda/device.h"

namespace shardrun {
namespace {

using Arrays = std::vector<Array>;

// A null stream asks for the virtual device.
struct Case {
  std::string name;
  std::function<Arrays(Stream*)> run;
};

// Normal numbers, with what is special between them; `offset` elements off an aligned address.
Array numbers(Dtype dtype, const Shape& shape, uint32_t seed, int64_t offset = 0) {
  constexpr float kSpecial[] = {0.0f,
                                -0.0f,
                                1e-40f,
                                -1e-40f,
                                6e-8f,
                                65504.0f,
                                65520.0f,
                                -3e38f,
                                0x1p-126f,
                                11.0f,
                                -88.0f,
                                std::numeric_limits<float>::infinity(),
                                std::numeric_limits<float>::quiet_NaN()};
  Array out(dtype, shape, offset);
  std::mt19937 engine(seed);
  std::normal_distribution<float> draw;
  for (int64_t i = 0; i < out.numel(); ++i) {
    const float x = draw(engine);
    out.set(i, i % 19 == 5 ? kSpecial[static_cast<size_t>(i / 19) % std::size(kSpecial)] : x);
  }
  return out;
}

Array normals(Dtype dtype, const Shape& shape, uint32_t seed, int64_t offset = 0) {
  Array out(dtype, shape, offset);
  const Array values = Array::normal(dtype, shape, seed);
  for (int64_t i = 0; i < out.numel(); ++i) out.set(i, static_cast<float>(values[i]));
  return out;
}

cuda::In in(const Array& a) {
  return {a.tensor().data(), a.dtype()};
}
cuda::In in(const Array* a) {
  return a ? in(*a) : cuda::In{nullptr, Dtype::fp32};
}
cuda::Out out(Array& a) {
  return {a.tensor().data(), a.dtype()};
}
float* floats(Array& a) {
  return a.tensor().as<float>();
}
const float* floats(const Array& a) {
  return a.tensor().as<float>();
}

// Temporary memory of the size asked for and not a byte more, full of what must not be read.
std::vector<std::byte> workspace(size_t bytes) {
  return {bytes, std::byte{0xff}};
}

// Nothing, one, primes, the edges of vectors, lanes and chunks, more than one block.
constexpr int64_t kCounts[] = {0, 1, 7, 8, 257, 1023, 4099};

std::string text(std::initializer_list<int64_t> sizes, std::initializer_list<Dtype> dtypes) {
  std::string out;
  for (int64_t size : sizes) out += " " + std::to_string(size);
  for (Dtype dtype : dtypes) out += std::string(" ") + name_of(dtype);
  return out;
}

void add_map_cases(std::vector<Case>& cases, int64_t n, Dtype from, Dtype to, int64_t offset) {
  const Array x = numbers(from, {n}, 1, offset), g = numbers(to, {n}, 2);
  const RandomKey key{0x123456789abcdefull, 5, 7};
  const std::string what = text({n, offset}, {from, to});
  const auto add = [&](const char* name, auto call) {
    cases.push_back({name + what, [=](Stream* cpu) {
                       Array y(to, {n}, offset);
                       call(y, cpu);
                       return Arrays{y};
                     }});
  };
  add("fill", [=](Array& y, Stream* cpu) {
    cpu ? kernels::fill(y.tensor(), 1.3f, *cpu) : cuda::fill(out(y), 1.3f, n, nullptr);
  });
  add("cast", [=](Array& y, Stream* cpu) {
    cpu ? kernels::cast(y.tensor(), x.tensor(), *cpu) : cuda::cast(out(y), in(x), n, nullptr);
  });
  add("add", [=](Array& y, Stream* cpu) {
    cpu ? kernels::add(y.tensor(), x.tensor(), g.tensor(), *cpu)
        : cuda::add(out(y), in(x), in(g), n, nullptr);
  });
  add("gelu_forward", [=](Array& y, Stream* cpu) {
    cpu ? kernels::gelu_forward(y.tensor(), x.tensor(), *cpu)
        : cuda::gelu_forward(out(y), in(x), n, nullptr);
  });
  add("gelu_backward", [=](Array& y, Stream* cpu) {
    cpu ? kernels::gelu_backward(y.tensor(), g.tensor(), x.tensor(), *cpu)
        : cuda::gelu_backward(out(y), in(g), in(x), n, nullptr);
  });
  add("dropout", [=](Array& y, Stream* cpu) {
    cpu ? kernels::dropout(y.tensor(), x.tensor(), 0.3f, key, *cpu)
        : cuda::dropout(out(y), in(x), 0.3f, key, n, nullptr);
  });
  for (int64_t first : {int64_t{0}, int64_t{3}, int64_t{13}, (int64_t{1} << 34) + 6}) {
    add("random_normal", [=](Array& y, Stream* cpu) {
      cpu ? kernels::random_normal(y.tensor(), 0.5f, 2.0f, key, first, *cpu)
          : cuda::random_normal(out(y), 0.5f, 2.0f, key, first, n, nullptr);
    });
  }
}

std::vector<Case> elementwise_cases() {
  std::vector<Case> cases;
  for (Dtype from : kFloating) {
    for (Dtype to : kFloating) add_map_cases(cases, 1025, from, to, 0);
    for (int64_t n : kCounts) {
      for (int64_t offset : {0, 1}) add_map_cases(cases, n, from, from, offset);
    }
  }
  for (int64_t n : kCounts) {
    for (int64_t offset : {0, 1}) {
      const Array x = numbers(Dtype::bf16, {n}, 1, offset);
      cases.push_back({"copy_bytes" + text({n, offset}, {}), [=](Stream* cpu) {
                         Array y(Dtype::bf16, {n});
                         cpu ? kernels::copy_bytes(y.tensor(), x.tensor(), *cpu)
                             : cuda::copy_bytes(y.tensor().data(), x.tensor().data(), 2 * n,
                                                nullptr);
                         return Arrays{y};
                       }});
    }
  }
  return cases;
}

struct Size {
  int64_t rows, columns;
};
constexpr Size kShapes[] = {{0, 8},     {1, 1},    {3, 7},     {65, 31},  {131, 96},
                            {17, 1024}, {9, 1025}, {11, 2500}, {2, 9001}, {321, 40}};

void add_norm_cases(std::vector<Case>& cases, Size s, Dtype dtype, Dtype weight_dtype, bool special,
                    bool with_bias) {
  const auto make = special ? numbers : normals;
  const auto [rows, columns] = s;
  const Array x = make(dtype, {rows, columns}, 1, 0), dy = make(dtype, {rows, columns}, 2, 0);
  const Array weight = make(weight_dtype, {columns}, 3, 0), bias = make(dtype, {columns}, 4, 0);
  const Array mean = normals(Dtype::fp32, {rows}, 5), rstd = normals(Dtype::fp32, {rows}, 6);
  const Array before = normals(Dtype::fp32, {columns}, 7);
  const std::string what = text({rows, columns, special, with_bias}, {dtype, weight_dtype});
  cases.push_back({"layer_norm_forward" + what, [=](Stream* cpu) {
                     Array y(dtype, {rows, columns}), m(Dtype::fp32, {rows}), r = m;
                     if (cpu) {
                       kernels::layer_norm_forward(
                           y.tensor(), m.tensor(), r.tensor(), x.tensor(), weight.tensor(),
                           with_bias ? bias.tensor() : ConstTensor(), 1e-5f, *cpu);
                     } else {
                       cuda::layer_norm_forward(out(y), floats(m), floats(r), in(x), in(weight),
                                                in(with_bias ? &bias : nullptr), 1e-5f, rows,
                                                columns, nullptr);
                     }
                     return Arrays{y, m, r};
                   }});
  cases.push_back(
      {"layer_norm_backward" + what, [=](Stream* cpu) {
         Array dx(dtype, {rows, columns}), dweight = before, dbias = before;
         if (cpu) {
           kernels::layer_norm_backward(dx.tensor(), dweight.tensor(),
                                        with_bias ? dbias.tensor() : Tensor(), dy.tensor(),
                                        x.tensor(), weight.tensor(), mean.tensor(), rstd.tensor(),
                                        with_bias, !special, *cpu);
         } else {
           const cuda::LayerNormGradients gradients{
               out(dx), floats(dweight), with_bias ? floats(dbias) : nullptr, with_bias, !special};
           auto memory = workspace(cuda::layer_norm_backward_workspace(rows, columns));
           cuda::layer_norm_backward(gradients, in(dy), in(x), in(weight), floats(mean),
                                     floats(rstd), rows, columns, memory.data(), nullptr);
         }
         return Arrays{dx, dweight, dbias};
       }});
  cases.push_back({"column_sum" + what, [=](Stream* cpu) {
                     Array sum = before;
                     if (cpu) {
                       kernels::column_sum(sum.tensor(), x.tensor(), with_bias, *cpu);
                     } else {
                       auto memory = workspace(cuda::column_sum_workspace(rows, columns));
                       cuda::column_sum(floats(sum), in(x), with_bias, rows, columns, memory.data(),
                                        nullptr);
                     }
                     return Arrays{sum};
                   }});
}

std::vector<Case> norm_cases() {
  std::vector<Case> cases;
  for (Size s : kShapes) {
    for (Dtype dtype : kFloating) {
      add_norm_cases(cases, s, dtype, dtype, false, true);
      add_norm_cases(cases, s, dtype, Dtype::fp32, false, false);
    }
    add_norm_cases(cases, s, Dtype::fp32, Dtype::fp16, true, true);
  }
  return cases;
}

std::vector<Case> reduce_cases() {
  std::vector<Case> cases;
  for (Dtype dtype : kFloating) {
    for (int64_t n : kCounts) {
      for (int64_t offset : {0, 1}) {
        for (bool add : {false, true}) {
          for (bool special : {false, true}) {
            const auto make = special ? numbers : normals;
            const Array leaf = make(dtype, {n}, 1, offset);
            Array before = make(Dtype::fp32, {n}, 2, 0);
            // Infinity less infinity: the sum is a NaN, and the leaf to blame is none.
            for (int64_t i = 5; special && offset == 1 && i < n; i += 19) {
              before.set(i, static_cast<float>(-leaf[i]));
            }
            cases.push_back({"fold" + text({n, offset, add, special}, {dtype}), [=](Stream* cpu) {
                               Array accumulator = before, place(Dtype::int64, {2});
                               int64_t* found = place.tensor().as<int64_t>();
                               *found = kernels::kNothingFound;
                               const int64_t tag = kernels::place_tag(3, 500);
                               if (cpu) {
                                 kernels::fold(
                                     accumulator.tensor(), leaf.tensor(),
                                     add ? kernels::FoldMode::add : kernels::FoldMode::assign,
                                     place.tensor().flat(0, 1), tag, *cpu);
                               } else {
                                 cuda::fold(floats(accumulator), in(leaf), add, n, found, tag,
                                            nullptr);
                               }
                               return Arrays{accumulator, place};
                             }});
          }
        }
      }
    }
  }
  for (int64_t blocks : {0, 1, 7, 37}) {
    const Array gradient = normals(Dtype::fp32, {256 * blocks}, 3);
    cases.push_back({"block_squares" + text({blocks}, {}), [=](Stream* cpu) {
                       Array squares(Dtype::fp64, {blocks});
                       cpu ? kernels::block_squares(squares.tensor(), gradient.tensor(), *cpu)
                           : cuda::block_squares(squares.tensor().as<double>(), floats(gradient),
                                                 blocks, nullptr);
                       return Arrays{squares};
                     }});
  }
  // Values of one size, of every size, and in between what is not finite; limbs that hold a sum.
  for (int64_t n : {0, 1, 31, 1000, 70001}) {
    for (int spread : {0, 30, 2000}) {
      for (int64_t bad : {0, 7}) {
        std::mt19937_64 random(static_cast<uint64_t>(n + spread));
        std::vector<double> values(static_cast<size_t>(n));
        for (size_t i = 0; i < values.size(); ++i) {
          const int exponent = spread == 0 ? 0 : static_cast<int>(random() % spread) - spread / 2;
          values[i] = std::ldexp(static_cast<double>(random()) - 0x1p63, exponent - 63);
          if (bad != 0 && i % 100 == 5) values[i] = std::numeric_limits<double>::infinity();
        }
        cases.push_back({"add_exact" + text({n, spread, bad}, {}), [=](Stream* cpu) {
                           Array limbs(Dtype::int64, {math::kExactLimbs + 1});
                           int64_t* limb = limbs.tensor().as<int64_t>();
                           for (int i = 0; i <= math::kExactLimbs; ++i) limb[i] = i - 30;
                           const ConstTensor in(values.data(), Dtype::fp64, {n});
                           cpu ? kernels::add_exact(limbs.tensor(), in, *cpu)
                               : cuda::add_exact(limb, values.data(), n, nullptr);
                           return Arrays{limbs};
                         }});
      }
    }
  }
  return cases;
}

// `form`: fp32 for a master alone, bf16 or fp16 for a master and a copy; without `master` the copy
// is the parameter.
void add_adamw_case(std::vector<Case>& cases, const std::string& name, int64_t n, Dtype form,
                    bool master, const std::vector<kernels::AdamwRange>& ranges, int64_t offset) {
  const Array p = normals(Dtype::fp32, {n}, 1, offset), m = normals(Dtype::fp32, {n}, 2, offset);
  const Array g = numbers(Dtype::fp32, {n}, 4, offset);
  Array v = normals(Dtype::fp32, {n}, 3, offset);
  for (int64_t i = 0; i < n; ++i) v.set(i, static_cast<float>(v[i] * v[i]));
  const bool copies = form != Dtype::fp32;
  const Array c = normals(copies ? form : Dtype::bf16, {n}, 5, offset);
  kernels::AdamwScalars scalars;
  scalars.lr = 1e-2;
  scalars.t = 3;
  scalars.gradient_factor = 1.0 / 7;
  cases.push_back({name + text({n, offset, master}, {form}), [=](Stream* cpu) {
                     Array parameter = p, copy = c, moment1 = m, moment2 = v;
                     if (cpu) {
                       kernels::adamw(master ? parameter.tensor() : Tensor(),
                                      copies ? copy.tensor() : Tensor(), moment1.tensor(),
                                      moment2.tensor(), g.tensor(), scalars, ranges, *cpu);
                     } else {
                       cuda::adamw({master ? floats(parameter) : nullptr,
                                    copies ? out(copy) : cuda::Out{nullptr, Dtype::fp32},
                                    floats(moment1), floats(moment2), floats(g), &scalars,
                                    ranges.data(), static_cast<int64_t>(ranges.size())},
                                   nullptr);
                     }
                     return Arrays{parameter, copy, moment1, moment2};
                   }});
}

std::vector<Case> adamw_cases() {
  std::vector<Case> cases;
  // Gaps, an empty range, a range that starts inside its parameter.
  const std::vector<kernels::AdamwRange> ranges = {{0, 300, 1.0f, 0.1f, {11, 1, 0}, 0},
                                                   {300, 301, 3.0f, 0.2f, {21, 1, 0}, 1},
                                                   {512, 3300, 0.5f, 0.0f, {12, 1, 0}, 0},
                                                   {3300, 3300, 0.5f, 0.0f, {12, 1, 0}, 0},
                                                   {3301, 4001, 2.0f, 0.01f, {13, 1, 0}, 777}};
  // More than one launch takes, none with a length that vectors like.
  std::vector<kernels::AdamwRange> many;
  int64_t end = 2;
  for (int64_t r = 0; r < 200; ++r) {
    const int64_t begin = end + r % 3;
    end = begin + r % 23;
    const float factor = 1.0f + static_cast<float>(r);
    many.push_back({begin, end, factor, 0.01f, {static_cast<uint64_t>(r), 2, 3}, 5 * r});
  }
  for (Dtype form : kFloating) {
    for (int64_t offset : {0, 1}) {
      for (bool master : {true, false}) {
        if (!master && form != Dtype::bf16) continue;
        add_adamw_case(cases, "adamw", 4099, form, master, ranges, offset);
        add_adamw_case(cases, "adamw, many ranges", end + 5, form, master, many, offset);
        add_adamw_case(cases, "adamw", 1, form, master, {{0, 1, 1, 0.1f, {7, 1, 1}, 9}}, offset);
        add_adamw_case(cases, "adamw", 0, form, master, {}, offset);
      }
    }
  }
  return cases;
}

void add_embedding_cases(std::vector<Case>& cases, int64_t batch, int64_t time, int64_t columns,
                         int64_t vocabulary, Dtype dtype, bool flag) {
  std::vector<int32_t> tokens;
  std::mt19937 engine(9);
  for (int64_t i = 0; i < batch * time; ++i) {
    const uint32_t draw = static_cast<uint32_t>(engine());
    tokens.push_back(static_cast<int32_t>(draw % 3 == 0 ? 0 : draw % vocabulary));
  }
  const int64_t rows = time + 2;  // positions past the time
  const Array table = numbers(dtype, {vocabulary, columns}, 1);
  const Array positions = numbers(flag ? Dtype::fp32 : dtype, {rows, columns}, 2);
  const Array dy = numbers(dtype, {batch, time, columns}, 3);
  const Array dtable = numbers(Dtype::fp32, {vocabulary, columns}, 4);
  const Array dpositions = numbers(Dtype::fp32, {rows, columns}, 5);
  const std::string what = text({batch, time, columns, vocabulary, flag}, {dtype});
  const auto tensor = [](const std::vector<int32_t>& t, int64_t b, int64_t n) {
    return ConstTensor(t.data(), Dtype::int32, {b, n});
  };
  for (bool with_positions : {false, true}) {
    cases.push_back({"embedding_forward" + what, [=](Stream* cpu) {
                       Array y(dtype, {batch, time, columns});
                       if (cpu) {
                         kernels::embedding_forward(
                             y.tensor(), tensor(tokens, batch, time), table.tensor(),
                             with_positions ? positions.tensor() : ConstTensor(), *cpu);
                       } else {
                         cuda::embedding_forward(out(y), tokens.data(), in(table),
                                                 in(with_positions ? &positions : nullptr), batch,
                                                 time, columns, nullptr);
                       }
                       return Arrays{y};
                     }});
  }
  cases.push_back({"embedding_backward" + what, [=](Stream* cpu) {
                     Array sum = dtable;
                     if (cpu) {
                       kernels::embedding_backward(sum.tensor(), tensor(tokens, batch, time),
                                                   dy.tensor(), flag, *cpu);
                     } else {
                       auto memory = workspace(cuda::embedding_backward_workspace(batch * time));
                       cuda::embedding_backward(floats(sum), tokens.data(), in(dy), flag,
                                                vocabulary, batch * time, columns, memory.data(),
                                                nullptr);
                     }
                     return Arrays{sum};
                   }});
  cases.push_back({"position_backward" + what, [=](Stream* cpu) {
                     Array sum = dpositions;
                     cpu ? kernels::position_backward(sum.tensor(), dy.tensor(), flag, *cpu)
                         : cuda::position_backward(floats(sum), in(dy), flag, rows, batch, time,
                                                   columns, nullptr);
                     return Arrays{sum};
                   }});
}

std::vector<Case> embedding_cases() {
  std::vector<Case> cases;
  for (Dtype dtype : kFloating) {
    for (bool flag : {false, true}) {
      add_embedding_cases(cases, 0, 3, 8, 5, dtype, flag);
      add_embedding_cases(cases, 1, 1, 1, 1, dtype, flag);
      add_embedding_cases(cases, 3, 5, 33, 7, dtype, flag);
      add_embedding_cases(cases, 2, 301, 7, 101, dtype, flag);
      add_embedding_cases(cases, 2, 3, 1030, 4, dtype, flag);
      // Tokens of three digits, places of several tiles.
      add_embedding_cases(cases, 5, 1001, 3, dtype == Dtype::bf16 ? 70000 : 300, dtype, flag);
    }
  }
  return cases;
}

void add_loss_cases(std::vector<Case>& cases, int64_t rows, int64_t columns, int64_t vocabulary,
                    Dtype dtype, bool special) {
  Array logits = normals(dtype, {rows, columns}, 1);
  // In every third row, so that what is special does not drown the rest.
  const Array others = numbers(dtype, {rows, columns}, 2);
  for (int64_t i = 0; special && i < logits.numel(); ++i) {
    if (i / columns % 3 == 1) logits.set(i, static_cast<float>(others[i]));
  }
  std::vector<int32_t> targets;
  std::mt19937 engine(2);
  for (int64_t r = 0; r < rows; ++r) {
    targets.push_back(static_cast<int32_t>(engine() % static_cast<uint32_t>(vocabulary)));
    if (r % 5 == 3) targets.back() = kernels::kIgnoreTarget;
    // Padding must not be looked at.
    for (int64_t c = vocabulary; c < columns; ++c) {
      logits.set(r * columns + c, std::numeric_limits<float>::quiet_NaN());
    }
  }
  cases.push_back(
      {"cross_entropy" + text({rows, columns, vocabulary, special}, {dtype}), [=](Stream* cpu) {
         Array loss(Dtype::fp32, {1}), valid(Dtype::int64, {1}), lse(Dtype::fp32, {rows});
         Array gradient = logits;  // in the memory of the logits
         const ConstTensor targets_N(targets.data(), Dtype::int32, {rows});
         if (cpu) {
           kernels::cross_entropy_forward(loss.tensor(), valid.tensor(), lse.tensor(),
                                          logits.tensor(), targets_N, vocabulary, *cpu);
           kernels::cross_entropy_backward(gradient.tensor(), gradient.tensor(), lse.tensor(),
                                           targets_N, vocabulary, 3.5f, *cpu);
         } else {
           cuda::cross_entropy_forward(floats(loss), valid.tensor().as<int64_t>(), floats(lse),
                                       in(logits), targets.data(), vocabulary, rows, columns,
                                       nullptr);
           cuda::cross_entropy_backward(out(gradient), in(gradient), floats(lse), targets.data(),
                                        vocabulary, 3.5f, rows, columns, nullptr);
         }
         return Arrays{loss, valid, lse, gradient};
       }});
}

std::vector<Case> loss_cases() {
  std::vector<Case> cases;
  for (Dtype dtype : kFloating) {
    for (bool special : {false, true}) {
      add_loss_cases(cases, 0, 8, 8, dtype, special);
      add_loss_cases(cases, 1, 1, 1, dtype, special);
      add_loss_cases(cases, 5, 16, 13, dtype, special);
      add_loss_cases(cases, 37, 1280, 1250, dtype, special);
      add_loss_cases(cases, 2100, 32, 31, dtype, special);
      add_loss_cases(cases, 9001, 3, 2, dtype, special);
      add_loss_cases(cases, 3, 5120, 5000, dtype, special);
      add_loss_cases(cases, 2, 20003, 20001, dtype, special);
    }
  }
  return cases;
}

// Which NaN an operation gives depends on the order of its operands, which compilers choose.
Arrays with_one_nan(Arrays arrays) {
  for (Array& a : arrays) {
    for (int64_t i = 0; a.dtype() <= Dtype::fp16 && i < a.numel(); ++i) {
      if (std::isnan(a[i])) a.set(i, std::numeric_limits<float>::quiet_NaN());
    }
  }
  return arrays;
}

bool same_bits(const Arrays& a, const Arrays& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].same_bits(b[i])) return false;
  }
  return true;
}

void expect_same_bits(const std::vector<Case>& cases) {
  Runner runner;
  for (const Case& c : cases) {
    const Arrays want = with_one_nan(c.run(&runner.stream()));
    const Arrays got = with_one_nan(c.run(nullptr));
    for (size_t i = 0; i < want.size(); ++i) {
      if (got[i].same_bits(want[i])) continue;
      ADD_FAILURE() << c.name << ": output " << i << " differs";
      for (int64_t e = 0; is_floating(got[i].dtype()) && e < got[i].numel(); ++e) {
        if (got[i][e] == want[i][e]) continue;
        ADD_FAILURE() << "element " << e << ": " << got[i][e] << ", wanted " << want[i][e];
        break;
      }
    }
  }
}

TEST(VirtualCuda, Elementwise) {
  expect_same_bits(elementwise_cases());
}
TEST(VirtualCuda, Norm) {
  expect_same_bits(norm_cases());
}
TEST(VirtualCuda, Reduce) {
  expect_same_bits(reduce_cases());
}
TEST(VirtualCuda, Adamw) {
  expect_same_bits(adamw_cases());
}
TEST(VirtualCuda, Embedding) {
  expect_same_bits(embedding_cases());
}
TEST(VirtualCuda, Loss) {
  expect_same_bits(loss_cases());
}

// Each barrier of each kernel is needed: without it a case fails or gives other bits.
TEST(VirtualCuda, EveryBarrierIsNeeded) {
  Runner runner;
  virtual_cuda::Device& device = virtual_cuda::device();
  std::vector<Case> cases;
  for (auto make :
       {elementwise_cases, norm_cases, reduce_cases, adamw_cases, embedding_cases, loss_cases}) {
    for (Case& c : make()) {
      const int64_t before = device.barriers_passed();
      c.run(nullptr);
      if (device.barriers_passed() > before) cases.push_back(std::move(c));
    }
  }
  const std::set<virtual_cuda::Site> barriers = device.barriers();
  EXPECT_GE(barriers.size(), 8u);
  for (const virtual_cuda::Site& site : barriers) {
    device.skip_barrier(&site);
    bool noticed = false;
    for (size_t i = 0; i < cases.size() && !noticed; ++i) {
      try {
        const Arrays got = with_one_nan(cases[i].run(nullptr));
        device.skip_barrier(nullptr);
        noticed = !same_bits(got, with_one_nan(cases[i].run(&runner.stream())));
        device.skip_barrier(&site);
      } catch (const virtual_cuda::Violation&) {
        noticed = true;
      }
    }
    device.skip_barrier(nullptr);
    EXPECT_TRUE(noticed) << "nothing misses the barrier at " << site.file << ":" << site.line;
  }
}

}  // namespace
}  // namespace shardrun
