// Typed errors: thrown in a rank, caught once in main, which prints the message and leaves with the
// code. A message says what, what was got, and what was wanted.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace shardrun {

// Exit codes of the command line tool (the numbers are sysexits.h's).
enum class ExitCode : int {
  ok = 0,
  usage = 64,        // wrong command line
  data = 65,         // input exists, its content is wrong
  no_input = 66,     // input file missing or unreadable
  unavailable = 69,  // a device, launcher or library is not available
  internal = 70,     // a bug of ours
  cannot_create = 73,
  io = 74,
  run_again = 75,  // checkpoint written, run me again
  config = 78,     // values that do not fit together
};

class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

// One type per exit code; `throw UsageError("--steps: got {}, wanted a number >= 1", got)`.
template <ExitCode Code>
class TypedError : public Error {
 public:
  template <typename... Args>
  explicit TypedError(fmt::format_string<Args...> format, Args&&... args)
      : Error(Code, fmt::format(format, std::forward<Args>(args)...)) {}
};

using UsageError = TypedError<ExitCode::usage>;
using DataError = TypedError<ExitCode::data>;
using NoInputError = TypedError<ExitCode::no_input>;
using InternalError = TypedError<ExitCode::internal>;
using CannotCreateError = TypedError<ExitCode::cannot_create>;
using IoError = TypedError<ExitCode::io>;
using ConfigError = TypedError<ExitCode::config>;

// The device or a library cannot do what was asked.
class DeviceError : public TypedError<ExitCode::unavailable> {
  using TypedError::TypedError;
};

// A collective or a peer failed.
class CommError : public TypedError<ExitCode::unavailable> {
  using TypedError::TypedError;
};

[[noreturn]] void check_failed(const char* file, int line, const char* condition,
                               const std::string& message);

}  // namespace shardrun

// Stays on in release builds. CHECK(n == m, "shard has {} elements, plan says {}", n, m);
#define SHARDRUN_CHECK(condition, ...)                                                     \
  do {                                                                                     \
    if (!(condition)) [[unlikely]]                                                         \
      ::shardrun::check_failed(__FILE__, __LINE__, #condition, ::fmt::format(__VA_ARGS__)); \
  } while (false)
