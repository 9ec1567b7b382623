// The threads of one rank. Work is cut by the caller into tasks by shape alone, never by the number
// of threads, so that threads change speed and not bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace shardrun {

// A non-owning reference to a callable: no allocation, the callable outlives the call.
template <typename Signature>
class FunctionRef;
template <typename R, typename... Args>
class FunctionRef<R(Args...)> {
 public:
  template <typename F>
  FunctionRef(F&& f)  // NOLINT: implicit on purpose, like a lambda argument
      : object_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* object, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(object))(static_cast<Args>(args)...);
        }) {}
  R operator()(Args... args) const { return call_(object_, static_cast<Args>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

// Sets flush-to-zero and denormals-are-zero for the calling thread. Every thread that computes calls
// it first: fp32 denormals are zero everywhere.
void flush_denormals_on_this_thread();

class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // >= 1; the caller is one of them
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  // Calls body(task, thread) once for each task in [0, tasks); returns when all are done. The thread
  // number is in [0, threads()) and serves to pick scratch memory only. The first exception thrown
  // by a body is rethrown here, after all running tasks have ended. No handler of a signal runs on a
  // thread inside a body, see [Note: signals].
  void run(int64_t tasks, FunctionRef<void(int64_t task, int thread)> body);

  // Scratch memory of one thread: grows to the largest size asked for and stays; 64-byte aligned.
  void* scratch(int thread, size_t bytes);
  size_t scratch_bytes() const;  // what all threads hold now

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shardrun
