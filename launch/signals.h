// SIGINT, SIGTERM and SIGUSR1 of this process. One thread that computes nothing waits for them, because
// a handler must not run on those that do, see [Note: signals] in runtime/signals.h. They end the
// process, as they do by default, until training asks them to stop it in order. One that the process
// was started to ignore (nohup, a shell's background) stays ignored.
#pragma once

namespace shardrun {

// Blocks the three on the calling thread, and so on all that it starts, and at the first call starts
// the thread that waits for them. To be called before any other thread is there: MPI has some.
void take_signals();

// From now on the first signal only makes asked_to_stop() true, and the second leaves at once with
// 128 + its number. All ranks of a process may call it.
void let_signals_ask_to_stop();
bool asked_to_stop();

// From now on they end the process again.
void let_signals_end_process();

}  // namespace shardrun
