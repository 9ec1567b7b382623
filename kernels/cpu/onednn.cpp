// The one file that knows oneDNN, versions 2.6 and 3. Called from the tiles of matmul and attention,
// on any thread of any rank; each thread has its own engine, stream, primitives and scratch, so calls
// share nothing and need no lock.
#include "kernels/cpu/onednn.h"

#include <dnnl.h>
#include <omp.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <unordered_map>

#include "runtime/error.h"
#include "runtime/random.h"

namespace shardrun::cpu {
namespace {

void check(dnnl_status_t status, const char* call) {
  if (status != dnnl_success) [[unlikely]] {
    throw DeviceError("oneDNN {}.{}: {} returned status {}", dnnl_version()->major,
                      dnnl_version()->minor, call, static_cast<int>(status));
  }
}

// Owners of the C handles.
template <typename Handle, dnnl_status_t (*Destroy)(Handle)>
struct Destroyer {
  using pointer = Handle;
  void operator()(Handle handle) const { Destroy(handle); }
};
template <typename Handle, dnnl_status_t (*Destroy)(Handle)>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroyer<Handle, Destroy>>;
using Engine = Owned<dnnl_engine_t, dnnl_engine_destroy>;
using Queue = Owned<dnnl_stream_t, dnnl_stream_destroy>;
using Memory = Owned<dnnl_memory_t, dnnl_memory_destroy>;
using Primitive = Owned<dnnl_primitive_t, dnnl_primitive_destroy>;
using PrimitiveDesc = Owned<dnnl_primitive_desc_t, dnnl_primitive_desc_destroy>;
using Attributes = Owned<dnnl_primitive_attr_t, dnnl_primitive_attr_destroy>;
using PostOps = Owned<dnnl_post_ops_t, dnnl_post_ops_destroy>;

// Calls a creator that returns its handle through the first argument.
template <typename T, typename Create, typename... Args>
T make(const char* name, Create create, Args... args) {
  typename T::pointer handle = nullptr;
  check(create(&handle, args...), name);
  return T(handle);
}

// A [rows, columns] view with strides. Version 3 made descriptors opaque handles.
class MemoryDesc {
 public:
  MemoryDesc(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride,
             dnnl_data_type_t dtype) {
    const dnnl_dims_t dims = {rows, columns};
    const dnnl_dims_t strides = {row_stride, column_stride};
#if DNNL_VERSION_MAJOR >= 3
    check(dnnl_memory_desc_create_with_strides(&desc_, 2, dims, dtype, strides), "memory_desc");
#else
    check(dnnl_memory_desc_init_by_strides(&desc_, 2, dims, dtype, strides), "memory_desc");
#endif
  }
  MemoryDesc(const MemoryDesc&) = delete;
  MemoryDesc& operator=(const MemoryDesc&) = delete;
#if DNNL_VERSION_MAJOR >= 3
  ~MemoryDesc() {
    dnnl_memory_desc_destroy(desc_);
  }
  const_dnnl_memory_desc_t get() const {
    return desc_;
  }
#else
  const dnnl_memory_desc_t* get() const {
    return &desc_;
  }
#endif

 private:
  dnnl_memory_desc_t desc_{};
};

// [Note: one instruction set per process] oneDNN's limit on instruction sets belongs to the process
// and is fixed by the first use of the library. The first stream that comes here sets it; a stream of
// another level is refused, because its results would depend on who came first.
dnnl_status_t limit_isa(Isa isa) {
  switch (isa) {
    case Isa::baseline:
      return dnnl_set_max_cpu_isa(dnnl_cpu_isa_sse41);
    case Isa::avx2:
      return dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx2);
    case Isa::avx512:
      return dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx512_core);
    case Isa::avx512_bf16:
      return dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx512_core_bf16);
    case Isa::amx:
      return dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx512_core_amx);
  }
  return dnnl_invalid_arguments;
}

void require_isa(Isa isa) {
  struct First {
    Isa isa;
    dnnl_status_t status;
  };
  static const First first = {isa, limit_isa(isa)};
  // A library built without the limit says unimplemented and uses the best there is.
  if (first.status != dnnl_unimplemented) check(first.status, "set_max_cpu_isa");
  if (first.isa != isa) {
    throw DeviceError(
        "matrix product with instruction set {}: oneDNN takes one per process, and this process "
        "began with {}",
        name_of(isa), name_of(first.isa));
  }
}

struct MatmulKey {
  GemmShape shape;
  bool accumulate;
  bool operator==(const MatmulKey&) const = default;
};

struct MatmulKeyHash {
  size_t operator()(const MatmulKey& key) const {
    const GemmShape& s = key.shape;
    uint64_t h = mix64(static_cast<uint64_t>(s.m), static_cast<uint64_t>(s.n));
    h = mix64(h, static_cast<uint64_t>(s.k));
    h = mix64(h, static_cast<uint64_t>(s.lda));
    h = mix64(h, static_cast<uint64_t>(s.ldb));
    h = mix64(h, static_cast<uint64_t>(s.ldc));
    return mix64(h, static_cast<uint64_t>(s.transpose_a + 2 * s.transpose_b + 4 * key.accumulate));
  }
};

struct Matmul {
  Primitive primitive;
  Memory a, b, c, scratch;
  size_t scratch_bytes = 0;
};

Matmul make_matmul(const MatmulKey& key, dnnl_engine_t engine) {
  const GemmShape& s = key.shape;
  const MemoryDesc a(s.m, s.k, s.transpose_a ? 1 : s.lda, s.transpose_a ? s.lda : 1, dnnl_bf16);
  const MemoryDesc b(s.k, s.n, s.transpose_b ? 1 : s.ldb, s.transpose_b ? s.ldb : 1, dnnl_bf16);
  const MemoryDesc c(s.m, s.n, s.ldc, 1, dnnl_f32);

  auto attributes = make<Attributes>("primitive_attr", dnnl_primitive_attr_create);
  check(dnnl_primitive_attr_set_scratchpad_mode(attributes.get(), dnnl_scratchpad_mode_user),
        "scratchpad_mode");
  if (key.accumulate) {
    auto post_ops = make<PostOps>("post_ops", dnnl_post_ops_create);
#if DNNL_VERSION_MAJOR >= 3
    check(dnnl_post_ops_append_sum(post_ops.get(), 1.0f, 0, dnnl_data_type_undef), "append_sum");
#else
    check(dnnl_post_ops_append_sum(post_ops.get(), 1.0f), "append_sum");
#endif
    check(dnnl_primitive_attr_set_post_ops(attributes.get(), post_ops.get()), "set_post_ops");
  }

#if DNNL_VERSION_MAJOR >= 3
  auto desc = make<PrimitiveDesc>("matmul_primitive_desc", dnnl_matmul_primitive_desc_create,
                                  engine, a.get(), b.get(), nullptr, c.get(), attributes.get());
#else
  dnnl_matmul_desc_t matmul;
  check(dnnl_matmul_desc_init(&matmul, a.get(), b.get(), nullptr, c.get()), "matmul_desc");
  auto desc = make<PrimitiveDesc>("matmul_primitive_desc", dnnl_primitive_desc_create, &matmul,
                                  attributes.get(), engine, nullptr);
#endif
  const auto* scratch = dnnl_primitive_desc_query_md(desc.get(), dnnl_query_scratchpad_md, 0);

  const auto memory = [&](const auto* memory_desc) {
    return make<Memory>("memory", dnnl_memory_create, memory_desc, engine,
                        static_cast<void*>(nullptr));
  };
  Matmul out;
  out.primitive = make<Primitive>("primitive", dnnl_primitive_create, desc.get());
  out.a = memory(a.get());
  out.b = memory(b.get());
  out.c = memory(c.get());
  out.scratch = memory(scratch);
  out.scratch_bytes = dnnl_memory_desc_get_size(scratch);
  return out;
}

// What one thread keeps. Lives as long as the thread, so that a step creates nothing after its first.
class ThreadState {
 public:
  ThreadState() {
    // The number belongs to the calling thread: oneDNN's loops run on it alone.
    omp_set_num_threads(1);
    engine_ = make<Engine>("engine", dnnl_engine_create, dnnl_cpu, size_t{0});
    queue_ = make<Queue>("stream", dnnl_stream_create, engine_.get(),
                         static_cast<unsigned>(dnnl_stream_default_flags));
  }

  const Matmul& matmul(const MatmulKey& key) {
    auto found = matmuls_.find(key);
    if (found != matmuls_.end()) return found->second;
    // Decoding meets a new shape at every token; start again rather than grow without end.
    if (matmuls_.size() >= kMaxMatmuls) matmuls_.clear();
    return matmuls_.emplace(key, make_matmul(key, engine_.get())).first->second;
  }

  void* scratch(size_t bytes) {
    if (bytes > scratch_bytes_) {
      scratch_bytes_ = (bytes + 63) / 64 * 64;
      scratch_.reset(std::aligned_alloc(64, scratch_bytes_));
      if (!scratch_) throw std::bad_alloc();
    }
    return scratch_.get();
  }

  dnnl_stream_t queue() const { return queue_.get(); }

 private:
  static constexpr size_t kMaxMatmuls = 1024;
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  Engine engine_;
  Queue queue_;
  std::unordered_map<MatmulKey, Matmul, MatmulKeyHash> matmuls_;
  std::unique_ptr<void, Free> scratch_;
  size_t scratch_bytes_ = 0;
};

ThreadState& this_thread(Isa isa) {
  require_isa(isa);
  static thread_local ThreadState state;
  return state;
}

dnnl_exec_arg_t argument(int index, const Memory& memory, const void* data) {
  check(dnnl_memory_set_data_handle(memory.get(), const_cast<void*>(data)), "set_data_handle");
  return {index, memory.get()};
}

}  // namespace

void gemm_fp32(const GemmShape& s, float* c, const float* a, const float* b, bool accumulate,
               Isa isa) {
  this_thread(isa);
  check(dnnl_sgemm(s.transpose_a ? 'T' : 'N', s.transpose_b ? 'T' : 'N', s.m, s.n, s.k, 1.0f, a,
                   s.lda, b, s.ldb, accumulate ? 1.0f : 0.0f, c, s.ldc),
        "sgemm");
}

// Without the instructions oneDNN emulates bf16, slower than widening to fp32.
bool has_gemm_bf16(Isa isa) {
  return isa >= Isa::avx512_bf16;
}

void gemm_bf16(const GemmShape& shape, float* c, const Bf16* a, const Bf16* b, bool accumulate,
               Isa isa) {
  ThreadState& thread = this_thread(isa);
  const Matmul& matmul = thread.matmul({shape, accumulate});
  const dnnl_exec_arg_t arguments[] = {
      argument(DNNL_ARG_SRC, matmul.a, a), argument(DNNL_ARG_WEIGHTS, matmul.b, b),
      argument(DNNL_ARG_DST, matmul.c, c),
      argument(DNNL_ARG_SCRATCHPAD, matmul.scratch, thread.scratch(matmul.scratch_bytes))};
  check(dnnl_primitive_execute(matmul.primitive.get(), thread.queue(), 4, arguments), "matmul");
}

std::string onednn_version() {
  const dnnl_version_t* version = dnnl_version();
  return fmt::format("oneDNN-{}.{}.{}", version->major, version->minor, version->patch);
}

}  // namespace shardrun::cpu
