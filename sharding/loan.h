// The two streams of a rank and what one lends to the other, so that communication goes on beside
// computation. ShardedRunner lends; the Communicator's calls do the work.
//
// [Note: lent memory] Memory follows the compute stream's order: what is freed may be handed out again
// at once, to work that the compute stream is given later. The communication stream only borrows:
//
//   begin    it waits for all that compute was given so far: whoever had these bytes before is done,
//            and what is to be sent is written;
//   end      a point on it, after the call;
//   settle   compute waits for that point: what came may be read, what was lent may be freed.
//
// All three stand at fixed places of the program, so the plan of memory, which is recorded where
// streams finish at once, is exact, and no offset is ever reused but along these events.
#pragma once

#include <utility>
#include <vector>

#include "runtime/device.h"
#include "runtime/memory.h"

namespace shardrun {

// Follows how long compute waits for communication: exposed_clock.h by a clock, timeline.h by arithmetic.
class LaneWatch {
 public:
  virtual ~LaneWatch() = default;
  // Where the lanes overlap: a call is about to be given to the communication stream, and was; the
  // answer is when that will be done, which wait_ends() is told.
  virtual void lent() {}
  virtual double given() { return 0; }
  // Around what compute waits for; where nothing overlaps, around the calls themselves.
  virtual void wait_begins() = 0;
  virtual void wait_ends(double point) = 0;
};

// Where a rank computes and where it communicates: the same stream where nothing overlaps, and on meta.
struct Lanes {
  Stream& compute;
  Stream& communication;
  bool overlap = false;
  LaneWatch* watch = nullptr;

  bool apart() const { return &compute != &communication; }
};

class Loan {
 public:
  void begin(const Lanes& lanes) {
    if (lanes.apart()) {
      point_.record(lanes.compute);
      point_.wait_on(lanes.communication);
    }
    if (lanes.watch) lanes.overlap ? lanes.watch->lent() : lanes.watch->wait_begins();
  }
  void end(const Lanes& lanes) {
    open_ = true;
    if (lanes.apart()) point_.record(lanes.communication);
    if (!lanes.watch) return;
    if (lanes.overlap) {
      when_ = lanes.watch->given();
    } else {
      lanes.watch->wait_ends(0);
    }
  }
  // A loan that is not open: nothing to wait for.
  void settle(const Lanes& lanes) {
    if (!std::exchange(open_, false) || !lanes.overlap) return;
    if (lanes.watch) lanes.watch->wait_begins();
    if (lanes.apart()) point_.wait_on(lanes.compute);
    if (lanes.watch) lanes.watch->wait_ends(when_);
  }

 private:
  Event point_;
  double when_ = 0;  // of the watch
  bool open_ = false;
};

// Hands out the memory of another and keeps what comes back, and what it is given, until clear().
class KeepingMemory : public Memory {
 public:
  KeepingMemory(Memory& memory, size_t most) : memory_(memory) { kept_.reserve(most); }
  void keep(Buffer buffer) { kept_.push_back(std::move(buffer)); }
  void clear() { kept_.clear(); }
  void begin(const char*) override {}
  void end() override {}

 private:
  Buffer do_allocate(size_t bytes, const char* label) override {
    kept_.push_back(memory_.allocate(bytes, label));
    const Buffer& buffer = kept_.back();
    return Buffer(this, buffer.data(), buffer.bytes(), buffer.id());
  }
  void do_free(const Buffer&) override {}

  Memory& memory_;
  std::vector<Buffer> kept_;
};

}  // namespace shardrun
