#include "runtime/signals.h"

#include <initializer_list>

namespace shardrun {

static sigset_t signals_from_outside() {
  sigset_t set;
  sigfillset(&set);
  for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPIPE, SIGXFSZ}) {
    sigdelset(&set, own);
  }
  return set;
}

// Only the outermost asks the system: small kernels are too short for two calls each.
static thread_local int depth = 0;

BlockSignals::BlockSignals() {
  static const sigset_t set = signals_from_outside();
  if (depth++ == 0) pthread_sigmask(SIG_BLOCK, &set, &before_);
}

BlockSignals::~BlockSignals() {
  if (--depth == 0) pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

}  // namespace shardrun
