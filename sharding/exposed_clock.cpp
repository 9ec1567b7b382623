#include "sharding/exposed_clock.h"

namespace shardrun {

using Clock = std::chrono::steady_clock;

ExposedClock::~ExposedClock() {
  for (const Wait& wait : waits_) {
    stream_.device()->destroy_event(wait.begin);
    stream_.device()->destroy_event(wait.end);
  }
}

void ExposedClock::wait_begins() {
  if (factor_ == 0 || stream_.kind() == DeviceKind::meta) return;
  Device* device = stream_.device();
  if (!device) {
    began_ = Clock::now();
    return;
  }
  if (used_ == waits_.size()) {
    waits_.push_back({device->create_timed_event(), nullptr, 0});
    waits_.back().end = device->create_timed_event();
  }
  waits_[used_].factor = factor_;
  device->record_event(waits_[used_].begin, stream_.handle());
}

void ExposedClock::wait_ends(double) {
  if (factor_ == 0 || stream_.kind() == DeviceKind::meta) return;
  Device* device = stream_.device();
  if (device) {
    device->record_event(waits_[used_++].end, stream_.handle());
  } else {
    on_host_ += factor_ * std::chrono::duration<double>(Clock::now() - began_).count();
  }
}

double ExposedClock::take_seconds() {
  double seconds = on_host_;
  on_host_ = 0;
  for (size_t i = 0; i < used_; ++i) {
    seconds += waits_[i].factor * stream_.device()->seconds_between(waits_[i].begin, waits_[i].end);
  }
  used_ = 0;
  return seconds;
}

}  // namespace shardrun
