// Keeps the handlers of signals off the threads that compute.
#pragma once

#include <csignal>

namespace shardrun {

// [Note: signals] The products that oneDNN 2.6 generates for fp32 move the stack pointer into a buffer
// on the heap while they run. The kernel writes the frame of a signal below the stack pointer: a handler
// that starts on that thread then overwrites kilobytes of heap in front of the buffer. So no handler may
// start on a thread while it computes. ThreadPool::run blocks signals on every thread that takes part,
// the caller's too; a thread that is a rank blocks them as long as it is one; shardrun's own signals
// are awaited by a thread that does nothing else (launch/signals.h). A signal that is blocked is not
// lost, it comes a little later or to another thread. Profilers that sample by a signal (SIGPROF)
// therefore see nothing of what the tasks of a pool do; perf, which samples from the kernel, does.
//
// While one lives, the calling thread takes no signals but those it brings on itself: faults, abort,
// and what a write to a closed pipe or beyond a limit on file sizes gives. They nest.
class BlockSignals {
 public:
  BlockSignals();
  ~BlockSignals();
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace shardrun
