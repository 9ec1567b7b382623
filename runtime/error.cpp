#include "runtime/error.h"

namespace shardrun {

void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  throw InternalError("{}:{}: check `{}` failed: {}", file, line, condition, message);
}

}  // namespace shardrun
