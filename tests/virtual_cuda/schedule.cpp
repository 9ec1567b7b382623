// The order in which a virtual device works: one piece at a time, of a stream drawn among those
// that may go on.
#include <fmt/format.h>
#include <xmmintrin.h>

#include <algorithm>

#include "tests/virtual_cuda/state.h"

namespace shardrun::virtual_cuda {

namespace {

// fp32 denormals are zero on a GPU (-ftz=true), whatever the thread that plays it does.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;

 private:
  unsigned before_;
};

bool may_run(const Queued& queued) {
  return (!queued.waits_for || queued.waits_for->reached) &&
         (!queued.work.ready || queued.work.ready());
}

// How soon after it was given work may run, by seed: never before someone waits, seldom, often.
uint64_t eagerness(uint64_t seed) {
  constexpr uint64_t kOneIn[] = {0, 8, 2};
  return seed == 0 ? 0 : kOneIn[seed % 3];
}

// Half of the seeds let one stream go on until it has to wait, for long, before another has its turn;
// the others mix them.
bool runs_far_ahead(uint64_t seed) {
  return seed / 3 % 2 == 1;
}

CUstream_st* pick(VirtualDevice& device) {
  std::vector<CUstream_st*> candidates;
  for (auto& stream : device.streams) {
    if (!stream->queue.empty() && may_run(stream->queue.front())) {
      candidates.push_back(stream.get());
    }
  }
  if (candidates.empty()) return nullptr;
  if (state().settings.seed == 0) {
    return *std::min_element(candidates.begin(), candidates.end(), [](auto* a, auto* b) {
      return a->queue.front().given < b->queue.front().given;
    });
  }
  if (device.draw() % (runs_far_ahead(state().settings.seed) ? 1024 : 32) == 0) {
    for (auto& stream : device.streams) draw_weight(device, *stream);
  }
  uint64_t sum = 0;
  for (const CUstream_st* stream : candidates) sum += stream->weight;
  uint64_t drawn = device.draw() % sum;
  for (CUstream_st* stream : candidates) {
    if (drawn < stream->weight) return stream;
    drawn -= stream->weight;
  }
  return nullptr;
}

bool waits_for_others(const VirtualDevice& device) {
  for (const auto& stream : device.streams) {
    for (const Queued& queued : stream->queue) {
      if (queued.work.ready) return true;
    }
  }
  return false;
}

// Where each stream stands.
std::string standing(const VirtualDevice& device) {
  std::string out;
  for (const auto& stream : device.streams) {
    if (stream->queue.empty()) continue;
    const Queued& head = stream->queue.front();
    out += fmt::format("; stream {} stands at {} '{}'", stream->number, name_of(head.work.kind),
                       head.work.name);
    if (head.waits_for && !head.waits_for->reached) {
      out += fmt::format(", which waits for record {}", head.waits_for->given);
    } else if (head.work.ready && !head.work.ready()) {
      out += ", which waits for other ranks";
    }
  }
  return out;
}

// On a GPU communication goes on while its host is busy or waits for another rank by other means.
// Work that needs no one else stays late: it is nobody's business when it runs.
void help(const std::stop_token& stop) {
  using namespace std::chrono_literals;
  while (!stop.stop_requested()) {
    std::this_thread::sleep_for(5ms);
    const std::lock_guard lock(state().mutex);
    for (auto& device : state().devices) {
      if (Clock::now() - device->touched < 20ms || !waits_for_others(*device)) continue;
      while (!stop.stop_requested() && waits_for_others(*device) && step(*device)) {
      }
    }
  }
}

}  // namespace

void draw_weight(VirtualDevice& device, CUstream_st& stream) {
  const uint64_t seed = state().settings.seed;
  stream.weight =
      uint64_t{1} << (runs_far_ahead(seed) ? device.draw() % 4 * 13 : device.draw() % 8);
}

void begin_schedule(VirtualDevice& device) {
  device.draw.seed(state().settings.seed * 1000003 + static_cast<uint64_t>(device.index));
  device.work_given = 0;
  device.streams_made = static_cast<int>(device.streams.size());
  device.error = cudaSuccess;
  device.error_text.clear();
  device.most_bytes = device.bytes;
  for (auto& stream : device.streams) {
    for (Queued& queued : stream->queue) {
      if (queued.records) queued.records->reach();
    }
    stream->queue.clear();
    draw_weight(device, *stream);
  }
}

bool all_done(const VirtualDevice& device) {
  for (const auto& stream : device.streams) {
    if (!stream->queue.empty()) return false;
  }
  return true;
}

void break_device(VirtualDevice& device, cudaError_t error, const std::string& text) {
  device.error = error;
  device.error_text = text;
  for (auto& stream : device.streams) {
    for (Queued& queued : stream->queue) {
      if (queued.records) queued.records->reach();
    }
    stream->queue.clear();
  }
}

bool step(VirtualDevice& device) {
  CUstream_st* stream = pick(device);
  if (!stream) return false;
  Queued now = std::move(stream->queue.front());
  stream->queue.pop_front();
  if (state().logs) {
    state().log.push_back({device.index, stream->number, now.work.kind, now.work.name,
                           now.work.bytes, now.given,
                           now.waits_for ? now.waits_for->given : int64_t{-1}});
  }
  try {
    const FlushDenormals flush;
    if (now.work.run) now.work.run();
  } catch (const std::exception& e) {
    break_device(device, cudaErrorLaunchFailure, e.what());
  }
  if (now.records) now.records->reach();
  state().progress.notify_all();
  return true;
}

void enqueue(VirtualDevice& device, CUstream_st& stream, Queued queued) {
  queued.given = device.work_given++;
  if (queued.records) queued.records->given = queued.given;
  if (queued.work.ready && !state().helper.joinable()) state().helper = std::jthread(help);
  stream.queue.push_back(std::move(queued));
  const uint64_t one_in = eagerness(state().settings.seed);
  if (one_in == 0 || device.draw() % one_in != 0) return;
  for (uint64_t steps = 1 + device.draw() % 4; steps > 0 && step(device); --steps) {
  }
}

cudaError_t run_until(VirtualDevice& device, const char* call, const std::function<bool()>& done) {
  const auto deadline = Clock::now() + std::chrono::milliseconds(state().settings.deadline_ms);
  while (device.error == cudaSuccess && !done()) {
    device.touched = Clock::now();
    if (step(device)) continue;
    if (Clock::now() > deadline || !waits_for_others(device)) {
      break_device(device, cudaErrorLaunchTimeout,
                   fmt::format("{} waits in vain{}", call, standing(device)));
      break;
    }
    // The caller holds the mutex once.
    state().progress.wait_for(state().mutex, std::chrono::milliseconds(1));
  }
  return device.error;
}

}  // namespace shardrun::virtual_cuda
