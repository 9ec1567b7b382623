#include "tests/kernels/gpu_cases.h"

#include <limits>

#include "kernels/adamw.h"
#include "kernels/cuda/table.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/loss.h"
#include "kernels/math/exact.h"
#include "kernels/norm.h"
#include "kernels/reduce.h"
#include "tests/kernels/levels.h"

namespace shardrun {
namespace {

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

// Nothing, one, primes, the edges of vectors, lanes and chunks, more than one block.
constexpr int64_t kCounts[] = {0, 1, 7, 8, 257, 1023, 4099};

std::string text(std::initializer_list<int64_t> sizes, std::initializer_list<Dtype> dtypes) {
  std::string out;
  for (int64_t size : sizes) out += " " + std::to_string(size);
  for (Dtype dtype : dtypes) out += std::string(" ") + name_of(dtype);
  return out;
}

void add_map_cases(std::vector<KernelCase>& cases, int64_t n, Dtype from, Dtype to,
                   int64_t offset) {
  const Array x = numbers(from, {n}, 1, offset), g = numbers(to, {n}, 2);
  const RandomKey key{0x123456789abcdefull, 5, 7};
  const std::string what = text({n, offset}, {from, to});
  const auto add = [&](const char* name, auto call) {
    cases.push_back({name + what, [=](Operands& on) {
                       Array y(to, {n}, offset);
                       call(on.out(y), on);
                       return on.results({&y});
                     }});
  };
  add("fill", [=](Tensor y, Operands& on) { kernels::fill(y, 1.3f, on.stream()); });
  add("cast", [=](Tensor y, Operands& on) { kernels::cast(y, on.in(x), on.stream()); });
  add("add", [=](Tensor y, Operands& on) { kernels::add(y, on.in(x), on.in(g), on.stream()); });
  add("gelu_forward",
      [=](Tensor y, Operands& on) { kernels::gelu_forward(y, on.in(x), on.stream()); });
  add("gelu_backward",
      [=](Tensor y, Operands& on) { kernels::gelu_backward(y, on.in(g), on.in(x), on.stream()); });
  add("dropout",
      [=](Tensor y, Operands& on) { kernels::dropout(y, on.in(x), 0.3f, key, on.stream()); });
  for (int64_t first : {int64_t{0}, int64_t{3}, int64_t{13}, (int64_t{1} << 34) + 6}) {
    add("random_normal", [=](Tensor y, Operands& on) {
      kernels::random_normal(y, 0.5f, 2.0f, key, first, on.stream());
    });
  }
}

}  // namespace

std::vector<KernelCase> elementwise_cases() {
  std::vector<KernelCase> cases;
  for (Dtype from : kFloating) {
    for (Dtype to : kFloating) add_map_cases(cases, 1025, from, to, 0);
    for (int64_t n : kCounts) {
      for (int64_t offset : {0, 1}) add_map_cases(cases, n, from, from, offset);
    }
  }
  for (int64_t n : kCounts) {
    for (int64_t offset : {0, 1}) {
      const Array x = numbers(Dtype::bf16, {n}, 1, offset);
      cases.push_back({"copy_bytes" + text({n, offset}, {}), [=](Operands& on) {
                         Array y(Dtype::bf16, {n});
                         kernels::copy_bytes(on.out(y), on.in(x), on.stream());
                         return on.results({&y});
                       }});
    }
  }
  return cases;
}

namespace {

struct Size {
  int64_t rows, columns;
};
constexpr Size kShapes[] = {{0, 8},     {1, 1},    {3, 7},     {65, 31},  {131, 96},
                            {17, 1024}, {9, 1025}, {11, 2500}, {2, 9001}, {321, 40}};

void add_norm_cases(std::vector<KernelCase>& cases, Size s, Dtype dtype, Dtype weight_dtype,
                    bool special, bool with_bias) {
  const auto make = special ? numbers : normals;
  const auto [rows, columns] = s;
  const Array x = make(dtype, {rows, columns}, 1, 0), dy = make(dtype, {rows, columns}, 2, 0);
  const Array weight = make(weight_dtype, {columns}, 3, 0), bias = make(dtype, {columns}, 4, 0);
  const Array mean = normals(Dtype::fp32, {rows}, 5), rstd = normals(Dtype::fp32, {rows}, 6);
  const Array before = normals(Dtype::fp32, {columns}, 7);
  const std::string what = text({rows, columns, special, with_bias}, {dtype, weight_dtype});
  cases.push_back({"layer_norm_forward" + what, [=](Operands& on) {
                     Array y(dtype, {rows, columns}), m(Dtype::fp32, {rows}), r = m;
                     kernels::layer_norm_forward(on.out(y), on.out(m), on.out(r), on.in(x),
                                                 on.in(weight), on.in(with_bias ? &bias : nullptr),
                                                 1e-5f, on.stream());
                     return on.results({&y, &m, &r});
                   }});
  cases.push_back({"layer_norm_backward" + what,
                   [=](Operands& on) {
                     Array dx(dtype, {rows, columns}), dweight = before, dbias = before;
                     kernels::layer_norm_backward(on.out(dx), on.out(dweight),
                                                  on.out(with_bias ? &dbias : nullptr), on.in(dy),
                                                  on.in(x), on.in(weight), on.in(mean), on.in(rstd),
                                                  with_bias, !special, on.stream());
                     return on.results({&dx, &dweight, &dbias});
                   },
                   cuda::table().layer_norm_backward_workspace(rows, columns)});
  cases.push_back({"column_sum" + what,
                   [=](Operands& on) {
                     Array sum = before;
                     kernels::column_sum(on.out(sum), on.in(x), with_bias, on.stream());
                     return on.results({&sum});
                   },
                   cuda::table().column_sum_workspace(rows, columns)});
}

}  // namespace

std::vector<KernelCase> norm_cases() {
  std::vector<KernelCase> cases;
  for (Size s : kShapes) {
    for (Dtype dtype : kFloating) {
      add_norm_cases(cases, s, dtype, dtype, false, true);
      add_norm_cases(cases, s, dtype, Dtype::fp32, false, false);
    }
    add_norm_cases(cases, s, Dtype::fp32, Dtype::fp16, true, true);
  }
  return cases;
}

namespace {}  // namespace

std::vector<KernelCase> reduce_cases() {
  std::vector<KernelCase> cases;
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
            cases.push_back(
                {"fold" + text({n, offset, add, special}, {dtype}), [=](Operands& on) {
                   Array accumulator = before, place(Dtype::int64, {2});
                   *place.tensor().as<int64_t>() = kernels::kNothingFound;
                   kernels::fold(on.out(accumulator), on.in(leaf),
                                 add ? kernels::FoldMode::add : kernels::FoldMode::assign,
                                 on.out(place).flat(0, 1), kernels::place_tag(3, 500), on.stream());
                   return on.results({&accumulator, &place});
                 }});
          }
        }
      }
    }
  }
  for (int64_t blocks : {0, 1, 7, 37}) {
    const Array gradient = normals(Dtype::fp32, {256 * blocks}, 3);
    cases.push_back({"block_squares" + text({blocks}, {}), [=](Operands& on) {
                       Array squares(Dtype::fp64, {blocks});
                       kernels::block_squares(on.out(squares), on.in(gradient), on.stream());
                       return on.results({&squares});
                     }});
  }
  // Values of one size, of every size, and in between what is not finite; limbs that hold a sum.
  for (int64_t n : {0, 1, 31, 1000, 70001}) {
    for (int spread : {0, 30, 2000}) {
      for (int64_t bad : {0, 7}) {
        std::mt19937_64 random(static_cast<uint64_t>(n + spread));
        Array doubles(Dtype::fp64, {n});
        double* const values = doubles.tensor().as<double>();
        for (int64_t i = 0; i < n; ++i) {
          const int exponent = spread == 0 ? 0 : static_cast<int>(random() % spread) - spread / 2;
          values[i] = std::ldexp(static_cast<double>(random()) - 0x1p63, exponent - 63);
          if (bad != 0 && i % 100 == 5) values[i] = std::numeric_limits<double>::infinity();
        }
        cases.push_back({"add_exact" + text({n, spread, bad}, {}), [=](Operands& on) {
                           Array limbs(Dtype::int64, {math::kExactLimbs + 1});
                           int64_t* limb = limbs.tensor().as<int64_t>();
                           for (int i = 0; i <= math::kExactLimbs; ++i) limb[i] = i - 30;
                           kernels::add_exact(on.out(limbs), on.in(doubles), on.stream());
                           return on.results({&limbs});
                         }});
      }
    }
  }
  return cases;
}

namespace {

// `form`: fp32 for a master alone, bf16 or fp16 for a master and a copy; without `master` the copy
// is the parameter.
void add_adamw_case(std::vector<KernelCase>& cases, const std::string& name, int64_t n, Dtype form,
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
  cases.push_back({name + text({n, offset, master}, {form}), [=](Operands& on) {
                     Array parameter = p, copy = c, moment1 = m, moment2 = v;
                     kernels::adamw(on.out(master ? &parameter : nullptr),
                                    on.out(copies ? &copy : nullptr), on.out(moment1),
                                    on.out(moment2), on.in(g), scalars, ranges, on.stream());
                     return on.results({&parameter, &copy, &moment1, &moment2});
                   }});
}

}  // namespace

std::vector<KernelCase> adamw_cases() {
  std::vector<KernelCase> cases;
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

namespace {

void add_embedding_cases(std::vector<KernelCase>& cases, int64_t batch, int64_t time,
                         int64_t columns, int64_t vocabulary, Dtype dtype, bool flag) {
  Array tokens(Dtype::int32, {batch, time});
  std::mt19937 engine(9);
  for (int64_t i = 0; i < batch * time; ++i) {
    const uint32_t draw = static_cast<uint32_t>(engine());
    tokens.tensor().as<int32_t>()[i] = static_cast<int32_t>(draw % 3 == 0 ? 0 : draw % vocabulary);
  }
  const int64_t rows = time + 2;  // positions past the time
  const Array table = numbers(dtype, {vocabulary, columns}, 1);
  const Array positions = numbers(flag ? Dtype::fp32 : dtype, {rows, columns}, 2);
  const Array dy = numbers(dtype, {batch, time, columns}, 3);
  const Array dtable = numbers(Dtype::fp32, {vocabulary, columns}, 4);
  const Array dpositions = numbers(Dtype::fp32, {rows, columns}, 5);
  const std::string what = text({batch, time, columns, vocabulary, flag}, {dtype});
  for (bool with_positions : {false, true}) {
    cases.push_back({"embedding_forward" + what, [=](Operands& on) {
                       Array y(dtype, {batch, time, columns});
                       kernels::embedding_forward(on.out(y), on.in(tokens), on.in(table),
                                                  on.in(with_positions ? &positions : nullptr),
                                                  on.stream());
                       return on.results({&y});
                     }});
  }
  cases.push_back({"embedding_backward" + what,
                   [=](Operands& on) {
                     Array sum = dtable;
                     kernels::embedding_backward(on.out(sum), on.in(tokens), on.in(dy), flag,
                                                 on.stream());
                     return on.results({&sum});
                   },
                   cuda::table().embedding_backward_workspace(batch * time)});
  cases.push_back({"position_backward" + what, [=](Operands& on) {
                     Array sum = dpositions;
                     kernels::position_backward(on.out(sum), on.in(dy), flag, on.stream());
                     return on.results({&sum});
                   }});
}

}  // namespace

std::vector<KernelCase> embedding_cases() {
  std::vector<KernelCase> cases;
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

namespace {

void add_loss_cases(std::vector<KernelCase>& cases, int64_t rows, int64_t columns,
                    int64_t vocabulary, Dtype dtype, bool special) {
  Array logits = normals(dtype, {rows, columns}, 1);
  // In every third row, so that what is special does not drown the rest.
  const Array others = numbers(dtype, {rows, columns}, 2);
  for (int64_t i = 0; special && i < logits.numel(); ++i) {
    if (i / columns % 3 == 1) logits.set(i, static_cast<float>(others[i]));
  }
  Array targets(Dtype::int32, {rows});
  std::mt19937 engine(2);
  for (int64_t r = 0; r < rows; ++r) {
    int32_t& target = targets.tensor().as<int32_t>()[r];
    target = static_cast<int32_t>(engine() % static_cast<uint32_t>(vocabulary));
    if (r % 5 == 3) target = kernels::kIgnoreTarget;
    // Padding must not be looked at.
    for (int64_t c = vocabulary; c < columns; ++c) {
      logits.set(r * columns + c, std::numeric_limits<float>::quiet_NaN());
    }
  }
  cases.push_back(
      {"cross_entropy" + text({rows, columns, vocabulary, special}, {dtype}), [=](Operands& on) {
         Array loss(Dtype::fp32, {1}), valid(Dtype::int64, {1}), lse(Dtype::fp32, {rows});
         Array gradient = logits;  // in the memory of the logits
         const Tensor in_place = on.out(gradient), lse_N = on.out(lse);
         const ConstTensor targets_N = on.in(targets);
         kernels::cross_entropy_forward(on.out(loss), on.out(valid), lse_N, in_place, targets_N,
                                        vocabulary, on.stream());
         kernels::cross_entropy_backward(in_place, in_place, lse_N, targets_N, vocabulary, 3.5f,
                                         on.stream());
         return on.results({&loss, &valid, &lse, &gradient});
       }});
}

}  // namespace

std::vector<KernelCase> loss_cases() {
  std::vector<KernelCase> cases;
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

namespace {

// Which NaN an operation gives depends on the order of its operands, which compilers choose.
Arrays with_one_nan(Arrays arrays) {
  for (Array& a : arrays) {
    for (int64_t i = 0; a.dtype() <= Dtype::fp16 && i < a.numel(); ++i) {
      if (std::isnan(a[i])) a.set(i, std::numeric_limits<float>::quiet_NaN());
    }
  }
  return arrays;
}

}  // namespace

Arrays run_on_cpu(const KernelCase& c) {
  Runner runner;
  Operands on(runner.stream());
  return with_one_nan(c.run(on));
}

Arrays run_on_gpu(const KernelCase& c, Device& device) {
  Stream stream(device, c.workspace, Priority::compute);
  Operands on(stream);
  return with_one_nan(c.run(on));
}

bool same_bits(const Arrays& a, const Arrays& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].same_bits(b[i])) return false;
  }
  return a.size() == b.size();
}

void expect_same_bits(const std::vector<KernelCase>& cases, Device& device) {
  for (const KernelCase& c : cases) {
    const Arrays want = run_on_cpu(c), got = run_on_gpu(c, device);
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

}  // namespace shardrun
