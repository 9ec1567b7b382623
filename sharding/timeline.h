// What a step would take on a GPU of given speeds: two clocks, one for each stream, moved by the work
// and the traffic that the step counts while it runs on the device kind meta. Called by `plan`.
//
// [Note: timeline] Compute takes the sum over kernels of FLOPs and bytes, each over its speed: no kernel
// overlaps its own memory traffic. A call between ranks takes the larger of what is sent and received over
// the link's speed, a start-up time, and the folding of what came; calls follow one another. The host is
// taken to be ahead. A call begins when compute has passed the point where it was lent, and compute stands
// still at a settled loan until the call is done: this is exposed, and so is all that the step sends
// outside of loans.
#pragma once

#include <algorithm>

#include "comm/communicator.h"
#include "sharding/loan.h"

namespace shardrun {

struct Speeds {
  double flops = 0;         // a second
  double memory_bytes = 0;  // a second, read and written
  double link_bytes = 0;    // a second, of a rank, in each direction
  double call_seconds = 0;  // start-up of a call between ranks
};

class Timeline : public LaneWatch {
 public:
  Timeline(const Stream& meta, const Communicator& comm, const Speeds& speeds)
      : stream_(meta), comm_(comm), speeds_(speeds), work_(meta.work()), traffic_(comm.traffic()) {}

  // Up to what was given last.
  double seconds() {
    advance();
    return now_;
  }
  double exposed_seconds() {
    advance();
    return exposed_;
  }
  // All calls, hidden or not.
  double communication_seconds() {
    advance();
    return communication_;
  }

  void lent() override {
    advance();
    link_ = std::max(link_, now_);
  }
  double given() override {
    const double called = call_seconds();
    communication_ += called;
    return link_ += called;
  }
  void wait_begins() override { advance(); }
  void wait_ends(double point) override {
    const double called = call_seconds();
    communication_ += called;
    stand_still(called + std::max(0.0, point - now_));
  }

 private:
  double work_seconds() {
    const WorkCount before = std::exchange(work_, stream_.work());
    return (work_.flops - before.flops) / speeds_.flops +
           (work_.bytes - before.bytes) / speeds_.memory_bytes;
  }
  double traffic_seconds() {
    const Traffic before = std::exchange(traffic_, comm_.traffic());
    const double bytes = std::max(traffic_.sent_bytes - before.sent_bytes,
                                  traffic_.received_bytes - before.received_bytes);
    return bytes / speeds_.link_bytes +
           static_cast<double>(traffic_.calls - before.calls) * speeds_.call_seconds;
  }
  double call_seconds() { return work_seconds() + traffic_seconds(); }

  void advance() {
    now_ += work_seconds();
    const double outside = traffic_seconds();
    communication_ += outside;
    stand_still(outside);
  }
  void stand_still(double seconds) {
    now_ += seconds;
    exposed_ += seconds;
  }

  const Stream& stream_;
  const Communicator& comm_;
  Speeds speeds_;
  WorkCount work_;
  Traffic traffic_;
  double now_ = 0, link_ = 0;  // the streams' clocks
  double exposed_ = 0, communication_ = 0;
};

}  // namespace shardrun
