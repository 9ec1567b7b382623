// How long a rank's compute stream stands still for communication, by its own clock: timed events on
// a GPU, the host's clock where calls finish at once. TrainStep reports it.
#pragma once

#include <chrono>
#include <vector>

#include "sharding/loan.h"

namespace shardrun {

class ExposedClock : public LaneWatch {
 public:
  explicit ExposedClock(Stream& compute) : stream_(compute) {}
  ~ExposedClock() override;
  ExposedClock(const ExposedClock&) = delete;

  // Waits count `factor` times from now on: one micro-step is measured for all, so that their number
  // of events does not grow. 0: not at all.
  void weigh(double factor) { factor_ = factor; }
  void wait_begins() override;
  void wait_ends(double point) override;
  // Since it was last asked. The compute stream has been waited for.
  double take_seconds();

 private:
  struct Wait {
    void* begin = nullptr;
    void* end = nullptr;
    double factor = 0;
  };

  Stream& stream_;
  double factor_ = 1;
  std::vector<Wait> waits_;  // events are kept for the next step
  size_t used_ = 0;
  std::chrono::steady_clock::time_point began_;
  double on_host_ = 0;  // seconds
};

}  // namespace shardrun
