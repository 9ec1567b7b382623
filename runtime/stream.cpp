#include "runtime/stream.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "runtime/error.h"

namespace shardrun {

static constexpr const char* kIsaNames[] = {"baseline", "avx2", "avx512", "avx512_bf16", "amx"};

const char* name_of(DeviceKind kind) {
  static constexpr const char* kNames[] = {"cpu", "meta", "cuda"};
  return kNames[static_cast<int>(kind)];
}
const char* name_of(Isa isa) { return kIsaNames[static_cast<int>(isa)]; }

#if defined(__x86_64__)
// Bits of CPUID leaf 7: (subleaf, register, bit), as the processor's manual numbers them.
static bool has_leaf7(unsigned subleaf, bool edx, int bit) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, subleaf, &a, &b, &c, &d)) return false;
  return ((edx ? d : a) >> bit & 1) != 0;
}

Isa detect_isa() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!avx2) return Isa::baseline;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx512) return Isa::avx2;
  if (!has_leaf7(1, false, 5)) return Isa::avx512;  // AVX512_BF16
  const bool amx = has_leaf7(0, true, 22) && has_leaf7(0, true, 24);  // AMX-BF16, AMX-TILE
  return amx ? Isa::amx : Isa::avx512_bf16;
}
#else
Isa detect_isa() { return Isa::baseline; }
#endif

Isa isa_from_name(const std::string& name) {
  const Isa best = detect_isa();
  if (name == "auto") return best;
  for (int i = 0; i < 5; ++i) {
    if (name != kIsaNames[i]) continue;
    if (i > static_cast<int>(best)) {
      throw DeviceError("--isa {}: this processor has {} at most", name, name_of(best));
    }
    return static_cast<Isa>(i);
  }
  throw UsageError("--isa: got '{}', wanted auto, baseline, avx2, avx512, avx512_bf16 or amx", name);
}

}  // namespace shardrun
