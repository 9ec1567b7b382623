// Fibers, barriers and warp operations of the virtual device.
#include "tests/virtual_cuda/device.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <exception>

#include "tests/virtual_cuda/sites.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Leaves the running stack, whose pointer it stores, for another: what a function call must
// preserve is pushed and popped. The floating-point modes stay as they are. (swapcontext would ask
// the kernel for the signal mask each time.)
extern "C" void shardrun_virtual_cuda_switch(void** save, void* to);
asm(R"(
.text
.globl shardrun_virtual_cuda_switch
.type shardrun_virtual_cuda_switch, @function
shardrun_virtual_cuda_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size shardrun_virtual_cuda_switch, .-shardrun_virtual_cuda_switch
)");

namespace shardrun::virtual_cuda {

namespace {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kStackStride = kStackBytes + 320;  // lanes that lie apart in the cache
constexpr int kMostThreads = 1024;

enum class State : uint8_t { ready, at_barrier, at_warp, done };

const char* name_of(WarpOp op) {
  constexpr const char* kNames[] = {"shuffle by xor",   "shuffle down", "shuffle up",
                                    "shuffle by index", "vote",         "warp barrier",
                                    "matrix operation"};
  return kNames[static_cast<int>(op)];
}

bool same(const std::source_location& a, const std::source_location& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

std::string text(const std::source_location& at) {
  const std::string file = at.file_name();
  return fmt::format("{}:{}", file.substr(file.rfind('/') + 1), at.line());
}

std::string text(dim3 d) {
  return fmt::format("({}, {}, {})", d.x, d.y, d.z);
}

}  // namespace

struct Device::Fiber {
  void* stack_pointer = nullptr;
  void* fake_stack = nullptr;  // the address sanitizer's
  State state = State::done;
  std::source_location at;
  // Of a barrier:
  Vote vote = Vote::none;
  bool value = false;
  int barrier_result = 0;
  // Of a warp operation:
  WarpOp op = WarpOp::sync;
  unsigned mask = 0;
  uint64_t payload = 0, result = 0;
  int argument = 0, width = kWarp;
  Exchange exchange = nullptr;
};

// One stack per thread of a block, used again by each block, and the place of the scheduler.
struct Device::Stacks {
  char* memory;
  void* scheduler = nullptr;
  void* scheduler_fake_stack = nullptr;
  const void* scheduler_bottom = nullptr;
  size_t scheduler_size = 0;
  bool from_scheduler = false;  // a fiber that arrives learns where the scheduler's stack is
  std::exception_ptr error;

  Stacks() {
    void* p = mmap(nullptr, kStackStride * kMostThreads, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    memory = static_cast<char*>(p);
  }
  ~Stacks() { munmap(memory, kStackStride * kMostThreads); }
  char* bottom(int thread) const { return memory + static_cast<size_t>(thread) * kStackStride; }
};

Limits limits_of(const std::string& architecture) {
  constexpr unsigned kMostX = 0x7fffffffu, kMostYZ = 65535;
  Limits limits{"", 1024, 1024, 1024, 64, kMostX, kMostYZ, kMostYZ, 0, 48 * 1024};
  constexpr std::pair<const char*, size_t> kShared[] = {
      {"sm_70", 96}, {"sm_75", 64}, {"sm_80", 163}, {"sm_90", 227}, {"sm_100", 227}};
  for (const auto& [name, kibibytes] : kShared) {
    if (architecture != name) continue;
    limits.architecture = name;
    limits.shared = kibibytes * 1024;
    return limits;
  }
  throw std::invalid_argument("no such architecture: " + architecture);
}

Device::Device()
    : limits_(limits_of("sm_80")),
      left_out_(left_out_of_kernels()),
      stacks_(std::make_unique<Stacks>()) {}
Device::~Device() = default;

dim3 Device::index_of(int thread) const {
  const unsigned t = static_cast<unsigned>(thread);
  return {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
}

void Device::fail_at(int thread, const std::string& what) const {
  throw Violation(fmt::format("kernel {}, block {}, thread {}: {}", kernel_, text(blockIdx),
                              text(index_of(thread)), what));
}

void Device::fail(const std::string& what) const {
  fail_at(current_, what);
}

void Device::check_launch(const char* kernel, dim3 grid, dim3 block, size_t shared_bytes) const {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const Limits& l = limits_;
  const auto refuse = [&](const std::string& what) {
    throw Violation(fmt::format("kernel {}: launch with {} on {}", kernel, what, l.architecture));
  };
  if (threads == 0 || threads > l.threads || block.x > l.block_x || block.y > l.block_y ||
      block.z > l.block_z) {
    refuse(fmt::format("blocks of {} threads", text(block)));
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > l.grid_x || grid.y > l.grid_y ||
      grid.z > l.grid_z) {
    refuse(fmt::format("a grid of {} blocks", text(grid)));
  }
  if (shared_bytes > l.shared) refuse(fmt::format("{} bytes of shared memory", shared_bytes));
}

void Device::run(const char* kernel, dim3 grid, dim3 block, size_t shared_bytes,
                 const std::function<void()>& body) {
  check_launch(kernel, grid, block, shared_bytes);
  const size_t threads = size_t{block.x} * block.y * block.z;
  kernel_ = kernel;
  body_ = &body;
  dynamic_bytes_ = shared_bytes;
  dynamic_.assign(shared_bytes, 0xa5);
  gridDim = grid;
  blockDim = block;
  fibers_.assign(threads, Fiber{});
  index_.resize(threads);
  for (size_t t = 0; t < threads; ++t) index_[t] = index_of(static_cast<int>(t));
#ifdef __SANITIZE_ADDRESS__
  // A violation leaves fibers where they are, and the marks of their frames on stacks used again.
  __asan_unpoison_memory_region(stacks_->memory, kStackStride * threads);
#endif
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        run_block();
      }
    }
  }
}

void Device::enter() {
  Device& d = device();
  d.arrive(nullptr);
  try {
    (*d.body_)();
  } catch (...) {
    d.stacks_->error = std::current_exception();
  }
  int next = -1;
  try {
    d.fibers_[static_cast<size_t>(d.current_)].state = State::done;
    if (!d.stacks_->error) next = d.next_of_warp();
  } catch (...) {
    d.stacks_->error = std::current_exception();
  }
  d.go(d.fibers_[static_cast<size_t>(d.current_)], next);
  __builtin_unreachable();
}

// From a fiber to another thread's, or to the scheduler (-1). Returns when `from` goes on, never where
// it is done.
void Device::go(Fiber& from, int to) {
  const bool over = from.state == State::done;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(over ? nullptr : &from.fake_stack,
                                 to < 0 ? stacks_->scheduler_bottom : stacks_->bottom(to),
                                 to < 0 ? stacks_->scheduler_size : kStackBytes);
#endif
  if (to >= 0) {
    current_ = to;
    threadIdx = index_[static_cast<size_t>(to)];
  }
  shardrun_virtual_cuda_switch(
      &from.stack_pointer,
      to < 0 ? stacks_->scheduler : fibers_[static_cast<size_t>(to)].stack_pointer);
  if (!over) arrive(from.fake_stack);
}

void Device::arrive([[maybe_unused]] void* fake_stack) {
#ifdef __SANITIZE_ADDRESS__
  const void* bottom = nullptr;
  size_t size = 0;
  __sanitizer_finish_switch_fiber(fake_stack, &bottom, &size);
  if (stacks_->from_scheduler) {
    stacks_->scheduler_bottom = bottom;
    stacks_->scheduler_size = size;
  }
#endif
  stacks_->from_scheduler = false;
}

// The running thread, whose state says what it waits for, lets others go on.
void Device::wait() {
  Fiber& fiber = fibers_[static_cast<size_t>(current_)];
  const int next = next_of_warp();
  if (next != current_) go(fiber, next);
}

// A thread of the running thread's warp that can go on, after an operation that is now complete; -1:
// none can. The running thread is one of them no longer.
int Device::next_of_warp() {
  ready_ &= ~(1u << current_ % kWarp);
  if (ready_ == 0 && !release_warp()) return -1;
  const int turned = std::countr_zero(std::rotr(ready_, first_));
  return current_ / kWarp * kWarp + (turned + first_) % kWarp;
}

// SplitMix64.
uint64_t Device::draw() {
  if (draw_ == 0) return 0;
  uint64_t x = draw_ += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The scheduler: until no lane can go on.
void Device::run_warp(int warp) {
  const int begin = warp * kWarp, end = std::min(begin + kWarp, threads());
  ready_ = 0;
  for (int t = begin; t < end; ++t) {
    if (fibers_[static_cast<size_t>(t)].state == State::ready) ready_ |= 1u << (t - begin);
  }
  if (ready_ == 0) return;
  first_ = static_cast<int>(draw() % kWarp);
  current_ = begin + (std::countr_zero(std::rotr(ready_, first_)) + first_) % kWarp;
  threadIdx = index_[static_cast<size_t>(current_)];
  stacks_->from_scheduler = true;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&stacks_->scheduler_fake_stack, stacks_->bottom(current_),
                                 kStackBytes);
#endif
  shardrun_virtual_cuda_switch(&stacks_->scheduler,
                               fibers_[static_cast<size_t>(current_)].stack_pointer);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(stacks_->scheduler_fake_stack, nullptr, nullptr);
#endif
  if (stacks_->error) std::rethrow_exception(std::exchange(stacks_->error, nullptr));
}

void Device::run_block() {
  ++block_serial_;
  epoch_ = 0;
  static_bytes_ = 0;
  const int warps = (threads() + kWarp - 1) / kWarp;
  warp_epoch_.assign(static_cast<size_t>(warps), 0);
  for (int t = 0; t < threads(); ++t) {
    // As if enter() had been called: a return address of its own, six registers, its address.
    void** top = reinterpret_cast<void**>(stacks_->bottom(t) + kStackBytes);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&Device::enter);
    for (int k = 0; k < 6; ++k) *--top = nullptr;
    fibers_[static_cast<size_t>(t)] = Fiber{};
    fibers_[static_cast<size_t>(t)].stack_pointer = top;
    fibers_[static_cast<size_t>(t)].state = State::ready;
  }
  for (;;) {
    const int first = static_cast<int>(draw() % static_cast<uint64_t>(warps));
    for (int k = 0; k < warps; ++k) run_warp((first + k) % warps);
    const auto done = [](const Fiber& fiber) { return fiber.state == State::done; };
    if (std::all_of(fibers_.begin(), fibers_.end(), done)) return;
    if (!release_barrier()) fail_stuck();
  }
}

void Device::note(const std::source_location& at) {
  const Site site{at.file_name(), at.line()};
  if (site.file.data() == noted_.file.data() && site.line == noted_.line) return;
  noted_ = site;
  if (sites_.insert(site).second) list_site(site);
}

int Device::barrier(Vote vote, bool value, const std::source_location& at) {
  if (is_left_out(at)) return value;
  Fiber& fiber = fibers_[static_cast<size_t>(current_)];
  fiber.state = State::at_barrier;
  fiber.at = at;
  fiber.vote = vote;
  fiber.value = value;
  wait();
  return fiber.barrier_result;
}

bool Device::release_barrier() {
  int votes = 0;
  for (const Fiber& fiber : fibers_) {
    if (fiber.state != State::at_barrier || !same(fiber.at, fibers_[0].at)) return false;
    votes += fiber.value ? 1 : 0;
  }
  for (Fiber& fiber : fibers_) {
    fiber.state = State::ready;
    fiber.barrier_result = fiber.vote == Vote::count ? votes
                           : fiber.vote == Vote::any ? votes > 0
                                                     : votes == threads();
  }
  ++epoch_;
  note(fibers_[0].at);
  return true;
}

uint64_t Device::warp(WarpOp op, unsigned mask, uint64_t value, int argument, int width,
                      const std::source_location& at) {
  const int lane = current_ % kWarp;
  if ((mask >> lane & 1u) == 0) {
    fail(fmt::format("{} at {} with a mask ({:08x}) that lacks the own lane", name_of(op), text(at),
                     mask));
  }
  if (width < 1 || width > kWarp || (width & (width - 1)) != 0) {
    fail(fmt::format("{} at {} with width {}", name_of(op), text(at), width));
  }
  if (is_left_out(at) && op != WarpOp::exchange) {
    return op == WarpOp::ballot ? (value != 0 ? mask : 0) : value;
  }
  Fiber& fiber = fibers_[static_cast<size_t>(current_)];
  fiber.state = State::at_warp;
  fiber.at = at;
  fiber.op = op;
  fiber.mask = mask;
  fiber.payload = value;
  fiber.argument = argument;
  fiber.width = width;
  wait();
  return fiber.result;
}

void Device::exchange(void* mine, Exchange run, const std::source_location& at) {
  fibers_[static_cast<size_t>(current_)].exchange = run;
  warp(WarpOp::exchange, 0xffffffffu, reinterpret_cast<uint64_t>(mine), 0, kWarp, at);
}

void Device::run_exchange(int first) {
  void* lanes[kWarp];
  for (int k = 0; k < kWarp; ++k) {
    const Fiber& fiber = fibers_[static_cast<size_t>(first + k)];
    if (fiber.exchange != fibers_[static_cast<size_t>(first)].exchange) {
      fail_at(first + k, fmt::format("another matrix operation at {} than thread {}",
                                     text(fiber.at), text(index_of(first))));
    }
    lanes[k] = reinterpret_cast<void*>(fiber.payload);
  }
  fibers_[static_cast<size_t>(first)].exchange(lanes);
}

// Of the running warp: whether an operation is complete, whose lanes are then ready.
bool Device::release_warp() {
  const int first = current_ / kWarp * kWarp;
  const int lanes = threads() - first < kWarp ? threads() - first : kWarp;
  Fiber* warp = &fibers_[static_cast<size_t>(first)];
  for (int l = 0; l < lanes; ++l) {
    if (warp[l].state != State::at_warp) continue;
    const Fiber leader = warp[l];
    bool complete = true;
    for (int k = 0; k < kWarp; ++k) {
      if ((leader.mask >> k & 1u) == 0) continue;
      complete = complete && k < lanes && warp[k].state == State::at_warp &&
                 warp[k].op == leader.op && warp[k].mask == leader.mask &&
                 same(warp[k].at, leader.at);
    }
    if (!complete) continue;
    if (leader.op == WarpOp::exchange) run_exchange(first);
    unsigned ballot = 0;
    for (int k = 0; k < lanes; ++k) {
      if ((leader.mask >> k & 1u) != 0 && warp[k].payload != 0) ballot |= 1u << k;
    }
    for (int k = 0; k < lanes; ++k) {
      if ((leader.mask >> k & 1u) == 0) continue;
      Fiber& fiber = warp[k];
      const int segment = k / fiber.width * fiber.width;
      int source = k;
      if (fiber.op == WarpOp::shuffle_xor) source = k ^ fiber.argument;
      if (fiber.op == WarpOp::shuffle_down) source = k + fiber.argument;
      if (fiber.op == WarpOp::shuffle_up) source = k - fiber.argument;
      if (fiber.op == WarpOp::shuffle_index) {
        source = segment + (fiber.argument & (fiber.width - 1));
      }
      // Past the end of a segment a lane keeps its own; xor may look into earlier segments.
      const int lowest = fiber.op == WarpOp::shuffle_xor ? 0 : segment;
      if (source < lowest || source >= segment + fiber.width) source = k;
      if (fiber.op != WarpOp::ballot && (leader.mask >> source & 1u) == 0) {
        fail_at(first + k, fmt::format("{} at {} reads lane {}, which is not in the mask ({:08x})",
                                       name_of(fiber.op), text(fiber.at), source, leader.mask));
      }
      fiber.result = fiber.op == WarpOp::ballot ? ballot : warp[source].payload;
      fiber.state = State::ready;
      ready_ |= 1u << k;
    }
    if (leader.op != WarpOp::exchange) note(leader.at);
    if (leader.op == WarpOp::sync) ++warp_epoch_[static_cast<size_t>(first / kWarp)];
  }
  first_ = static_cast<int>(draw() % kWarp);
  return ready_ != 0;
}

// No thread can go on: names one that waits and one that it waits for.
void Device::fail_stuck() {
  int waiting = -1;
  for (int t = 0; t < threads() && waiting < 0; ++t) {
    if (fibers_[static_cast<size_t>(t)].state == State::at_warp) waiting = t;
  }
  for (int t = 0; t < threads() && waiting < 0; ++t) {
    if (fibers_[static_cast<size_t>(t)].state == State::at_barrier) waiting = t;
  }
  const Fiber& fiber = fibers_[static_cast<size_t>(waiting)];
  const bool at_warp = fiber.state == State::at_warp;
  const std::string what = fmt::format("waits in vain at the {} at {}",
                                       at_warp ? name_of(fiber.op) : "barrier", text(fiber.at));
  const int first = at_warp ? waiting / kWarp * kWarp : 0;
  const int last = at_warp ? first + kWarp : threads();
  for (int t = first; t < last; ++t) {
    if (at_warp && (fiber.mask >> (t - first) & 1u) == 0) continue;
    if (t >= threads()) fail_at(waiting, what + ", whose mask names lanes that do not exist");
    const Fiber& other = fibers_[static_cast<size_t>(t)];
    const std::string who = text(index_of(t));
    if (other.state == State::done) fail_at(waiting, what + ": thread " + who + " has left");
    if (other.state != fiber.state || !same(other.at, fiber.at)) {
      fail_at(waiting, what + ": thread " + who + " is at " + text(other.at));
    }
    if (at_warp && other.mask != fiber.mask) {
      fail_at(waiting, what + ": thread " + who + " is there with another mask");
    }
  }
  fail_at(waiting, what);
}

void Device::check_index(int index, int64_t count) const {
  if (index < 0 || index >= count) {
    fail(fmt::format("element {} of shared memory with {} elements", index, count));
  }
}

void Device::count_static_shared(uint64_t& seen_in, size_t bytes) {
  if (seen_in == block_serial_) return;
  seen_in = block_serial_;
  static_bytes_ += bytes;
  if (static_bytes_ > limits_.static_shared || static_bytes_ + dynamic_bytes_ > limits_.shared) {
    fail(fmt::format("{} bytes of static and {} of dynamic shared memory are more than {} has",
                     static_bytes_, dynamic_bytes_, limits_.architecture));
  }
}

std::vector<Device::Touched>& Device::dynamic_map(size_t elements) {
  if (dynamic_block_ != block_serial_) dynamic_touched_.resize(elements);  // of earlier blocks
  dynamic_block_ = block_serial_;
  if (dynamic_touched_.size() != elements) fail("dynamic shared memory used as two types at once");
  return dynamic_touched_;
}

void Device::on_read(Touched& touched, int index) {
  if (touched.block != block_serial_) {
    fail(fmt::format("reads element {} of shared memory, which no one wrote", index));
  }
  const int warp = current_ / kWarp;
  const uint64_t warp_epoch = warp_epoch_[static_cast<size_t>(warp)];
  const bool ordered = touched.writer == current_ || touched.write_epoch < epoch_ ||
                       (touched.writer / kWarp == warp && touched.write_warp_epoch < warp_epoch);
  if (!ordered) {
    fail(
        fmt::format("reads element {} of shared memory, written by thread {} without a barrier "
                    "in between",
                    index, text(index_of(touched.writer))));
  }
  const bool first = touched.reader < 0 || touched.read_epoch < epoch_;
  touched.many_warps = !first && (touched.many_warps || touched.reader / kWarp != warp);
  touched.many_readers = !first && (touched.many_readers || touched.reader != current_);
  touched.reader = current_;
  touched.read_epoch = epoch_;
  touched.read_warp_epoch = warp_epoch;
}

void Device::on_write(Touched& touched, int index) {
  const int warp = current_ / kWarp;
  const uint64_t warp_epoch = warp_epoch_[static_cast<size_t>(warp)];
  if (touched.block == block_serial_) {
    const bool after_write =
        touched.writer == current_ || touched.write_epoch < epoch_ ||
        (touched.writer / kWarp == warp && touched.write_warp_epoch < warp_epoch);
    const bool after_reads = touched.reader < 0 || touched.read_epoch < epoch_ ||
                             (touched.reader == current_ && !touched.many_readers) ||
                             (touched.reader / kWarp == warp && !touched.many_warps &&
                              touched.read_warp_epoch < warp_epoch);
    if (!after_write || !after_reads) {
      fail(
          fmt::format("writes element {} of shared memory, {} by thread {} without a barrier in "
                      "between",
                      index, after_write ? "read" : "written",
                      text(index_of(after_write ? touched.reader : touched.writer))));
    }
  }
  touched = Touched{};
  touched.block = block_serial_;
  touched.writer = current_;
  touched.write_epoch = epoch_;
  touched.write_warp_epoch = warp_epoch;
}

}  // namespace shardrun::virtual_cuda
