// Faults on demand: tests and drills make a rank die, hang or fail to write at a named place. Made in
// launch/ from SHARDRUN_FAULT and passed down; an empty plan, which is the rule, does nothing. It is
// always compiled in, so that what is drilled is what runs.
//
//   SHARDRUN_FAULT="rank=2,step=5,phase=write,kind=kill"
//
//   rank, step   where and when; left out: on every rank, at every step
//   phase        a place in the program; required. Saving a checkpoint has open, write (half of a
//                rank's bytes are out), sync, rename, commit (renamed, not yet on the disk); training
//                has step (it is done, nothing of it is kept yet), peer (half of it is at the peer)
//   kind         exit | abort | kill | stop   this process: _Exit(1), SIGABRT, SIGKILL, SIGSTOP
//                throw                        an InternalError, as a bug would be
//                delay                        sleeps `seconds` (default 1)
//                nospace | short-write        of a phase that writes: the disk is full; one write()
//                                             takes half of what it was given
//
// To add a phase: call at() there and name it in fault.cpp's list.
#pragma once

#include <cstdint>
#include <string>

namespace shardrun {

enum class FaultKind : uint8_t {
  none,
  exit,
  abort,
  kill,
  stop,
  throw_error,
  delay,
  nospace,
  short_write
};

class Fault {
 public:
  Fault() = default;
  // UsageError for what is not as above; "" is the empty plan.
  static Fault parse(const std::string& text);

  bool empty() const { return kind_ == FaultKind::none; }
  // Where rank, step and phase are the plan's: does it. Returns what the caller has to act out
  // itself, nospace or short_write; else none. Any thread.
  FaultKind at(const char* phase, int rank, int64_t step) const;

 private:
  FaultKind kind_ = FaultKind::none;
  std::string phase_;
  int64_t rank_ = -1, step_ = -1;  // -1: any
  double seconds_ = 1;
};

}  // namespace shardrun
