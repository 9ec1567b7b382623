#include "kernels/initialize.h"

#include "kernels/elementwise.h"

namespace shardrun::kernels {

void initialize_range(Tensor out, const ParameterSpec& spec, int64_t begin, uint64_t seed,
                      Stream& stream) {
  if (spec.init_std == 0) {
    fill(out, spec.init_mean, stream);
    return;
  }
  const RandomKey key = random_key(seed, Purpose::init, hash_name(spec.name), 0, 0);
  random_normal(out, spec.init_mean, spec.init_std, key, begin, stream);
}

}  // namespace shardrun::kernels
