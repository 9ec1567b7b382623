#include "launch/signals.h"

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <initializer_list>
#include <system_error>
#include <thread>

#include "runtime/error.h"

namespace shardrun {
namespace {

// The thread that waits is there until the process is gone: what it touches has no destructor.
std::atomic<bool> ends_process{true};
std::atomic<int> stop_signal{0};

void end_process_by(int number) {
  std::signal(number, SIG_DFL);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, number);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  std::raise(number);
}

void wait_for_signals(sigset_t set) {
  for (;;) {
    int number = 0;
    if (sigwait(&set, &number) != 0) continue;
    if (ends_process) end_process_by(number);
    if (stop_signal.exchange(number) != 0) std::_Exit(128 + number);
  }
}

sigset_t start_waiting() {
  sigset_t set;
  sigemptyset(&set);
  for (int number : {SIGINT, SIGTERM, SIGUSR1}) {
    struct sigaction now;
    sigaction(number, nullptr, &now);
    if (now.sa_handler != SIG_IGN) sigaddset(&set, number);
  }
  pthread_sigmask(SIG_BLOCK, &set, nullptr);  // the new thread inherits it
  try {
    std::thread(wait_for_signals, set).detach();
  } catch (const std::system_error& error) {
    throw DeviceError("a thread that waits for signals: the system gives none ({})", error.what());
  }
  return set;
}

}  // namespace

void take_signals() {
  static const sigset_t set = start_waiting();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

void let_signals_ask_to_stop() {
  take_signals();
  ends_process = false;
}

bool asked_to_stop() { return stop_signal != 0; }

void let_signals_end_process() { ends_process = true; }

}  // namespace shardrun
