// A GPU through the interface of runtime/device.h, on the virtual CUDA runtime.
#include "runtime/device.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "kernels/adamw.h"
#include "kernels/elementwise.h"
#include "runtime/memory.h"
#include "tests/virtual_cuda/runtime.h"

namespace shardrun {
namespace {

namespace vc = virtual_cuda;

constexpr int64_t kCount = 1000;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "no error";
}

class DeviceTest : public testing::Test {
 protected:
  void SetUp() override { vc::reset(); }
  void TearDown() override {
    const vc::Living left = vc::living();
    EXPECT_EQ(left.allocations + left.host_allocations + left.streams + left.events, 0);
    vc::reset();
  }
  static void seed(uint64_t value) {
    vc::Settings settings;
    settings.seed = value;
    vc::reset(settings);
  }
};

TEST_F(DeviceTest, Info) {
  vc::Settings settings;
  settings.devices = 2;
  settings.architecture = "sm_80";
  settings.memory_bytes = 1 << 20;
  vc::reset(settings);
  EXPECT_EQ(cuda_device_count(), 2);
  EXPECT_EQ(cuda_unavailable(), "");
  const auto device = make_cuda_device(1);
  const DeviceInfo& info = device->info();
  EXPECT_EQ(device->index(), 1);
  EXPECT_EQ(info.name, "Virtual CUDA sm_80");
  EXPECT_EQ(info.major * 10 + info.minor, 80);
  EXPECT_EQ(info.total_bytes, size_t{1} << 20);
  EXPECT_EQ(info.driver, "13.0");
  EXPECT_EQ(info.toolkit, "13.0");
  EXPECT_EQ(info.uuid, "GPU-76697274-7561-6c20-6375-646120202001");
  EXPECT_NE(info.uuid, make_cuda_device(0)->info().uuid);
}

TEST_F(DeviceTest, ReasonsForNoGpu) {
  vc::Settings settings;
  settings.devices = 0;
  vc::reset(settings);
  EXPECT_EQ(cuda_device_count(), 0);
  EXPECT_EQ(cuda_unavailable(),
            "there is no virtual device (cudaErrorNoDevice; driver for CUDA 13.0, build of CUDA "
            "13.0)");
  settings.driver = 0;
  vc::reset(settings);
  EXPECT_EQ(cuda_unavailable(), "no NVIDIA driver is loaded");
  settings.driver = 12020;
  vc::reset(settings);
  EXPECT_EQ(error_of([] { make_cuda_device(0); }),
            "no GPU: the driver is for CUDA 12.2 and older, this build is of CUDA 13.0; update the "
            "driver or build with an older toolkit");
}

TEST_F(DeviceTest, AnIndexThatIsNotThere) {
  for (int index : {-1, 8}) {
    EXPECT_EQ(error_of([&] { make_cuda_device(index); }),
              fmt::format("GPU {} was asked for; this process sees 8, numbered from 0", index));
  }
}

TEST_F(DeviceTest, OutOfMemorySaysWhatThereIs) {
  vc::Settings settings;
  settings.memory_bytes = 4096;
  vc::reset(settings);
  const auto device = make_cuda_device(2);
  void* some = device->allocate(1024, "some");
  EXPECT_EQ(device->free_bytes(), 3072u);
  EXPECT_EQ(error_of([&] { device->allocate(3073, "the arena"); }),
            "out of memory on GPU 2 (Virtual CUDA sm_90): the arena asked for 3073 bytes; 3072 of "
            "4096 are free");
  device->free(some);
  vc::fail("cudaMallocHost", 1, cudaErrorMemoryAllocation);
  EXPECT_EQ(error_of([&] { HostBuffer(device.get(), 100, "a buffer"); }),
            "out of pinned host memory: a buffer asked for 100 bytes");
  EXPECT_EQ(device->allocate(0, "nothing"), nullptr);
}

// Each call that fails is named, with the library's text; what was made before is given back.
TEST_F(DeviceTest, EveryFailingCallIsNamed) {
  const auto device = make_cuda_device(0);
  const auto use = [&] {
    Stream stream(*device, 256, Priority::compute);
    Event event;
    HostBuffer host(device.get(), 64, "host");
    void* data = device->allocate(64, "data");
    try {
      device->copy(data, host.data(), 64, stream.handle());
      event.record(stream);
      event.wait_on(stream);
      event.synchronize();
      stream.synchronize();
    } catch (...) {
      device->free(data);
      throw;
    }
    device->free(data);
  };
  for (const char* call :
       {"cudaSetDevice", "cudaStreamCreateWithPriority", "cudaMalloc", "cudaMallocHost",
        "cudaEventCreateWithFlags", "cudaMemcpyAsync", "cudaEventRecord", "cudaStreamWaitEvent",
        "cudaEventSynchronize", "cudaStreamSynchronize"}) {
    vc::reset();
    vc::fail(call, 1, cudaErrorUnknown);
    EXPECT_EQ(error_of(use), std::string(call) + ": a planned failure (cudaErrorUnknown)");
    EXPECT_EQ(vc::faults_met(), 1) << call;
    const vc::Living left = vc::living();
    EXPECT_EQ(left.allocations + left.host_allocations + left.streams + left.events, 0) << call;
    EXPECT_EQ(error_of(use), "no error") << call;
  }
}

// Destructors give everything back and throw nothing, which TearDown looks at.
TEST_F(DeviceTest, ABrokenDeviceIsTakenDown) {
  const auto device = make_cuda_device(0);
  {
    Stream stream(*device, 256, Priority::compute);
    Event event;
    event.record(stream);
    HostBuffer host(device.get(), 64, "host");
    vc::submit(static_cast<cudaStream_t>(stream.handle()),
               {vc::Kind::kernel, "bad", 0, [] { throw std::runtime_error("bad"); }, {}});
    EXPECT_EQ(error_of([&] { stream.synchronize(); }),
              "cudaStreamSynchronize: bad (cudaErrorLaunchFailure)");
    EXPECT_EQ(error_of([&] { event.record(stream); }),
              "cudaEventRecord: bad (cudaErrorLaunchFailure)");
  }
}

// What copy_to_host brought may be read after the event, under every seed; and before it, not.
TEST_F(DeviceTest, CopiesAndEvents) {
  bool too_early = false;
  for (uint64_t s = 0; s < 30; ++s) {
    seed(s);
    const auto device = make_cuda_device(0);
    Stream compute(*device, 256, Priority::compute), side(*device, 256, Priority::communication);
    const auto memory = make_heap_memory(device.get());
    const OwnedTensor x = allocate_tensor(*memory, Dtype::fp32, {kCount}, "x");
    HostBuffer from(device.get(), kCount * 4, "from"), to(device.get(), kCount * 4, "to");
    for (int64_t i = 0; i < kCount; ++i) from.as<float>()[i] = static_cast<float>(i);
    Event arrived, back;
    copy_from_host(x.tensor, from.data(), compute);
    arrived.record(compute);
    arrived.wait_on(side);
    copy_to_host(to.data(), x.tensor, side);
    back.record(side);
    too_early = too_early || std::isnan(to.as<float>()[7]);
    back.synchronize();
    EXPECT_EQ(std::memcmp(to.data(), from.data(), kCount * 4), 0) << "seed " << s;
  }
  EXPECT_TRUE(too_early);
}

// Without the wait the numbers are wrong under some seed: it is the instrument that is tested.
TEST_F(DeviceTest, AMissingWaitShows) {
  int wrong = 0;
  for (uint64_t s = 0; s < 30; ++s) {
    seed(s);
    vc::drop("cudaStreamWaitEvent", 1);
    const auto device = make_cuda_device(0);
    Stream compute(*device, 256, Priority::compute), side(*device, 256, Priority::communication);
    const auto memory = make_heap_memory(device.get());
    const OwnedTensor x = allocate_tensor(*memory, Dtype::fp32, {kCount}, "x");
    HostBuffer to(device.get(), kCount * 4, "to");
    Event filled;
    kernels::fill(x.tensor, 3.0f, compute);
    filled.record(compute);
    filled.wait_on(side);
    copy_to_host(to.data(), x.tensor, side);
    side.synchronize();
    wrong += to.as<float>()[0] != 3.0f;
  }
  EXPECT_GT(wrong, 0);
  EXPECT_LT(wrong, 30);
}

TEST_F(DeviceTest, KernelsWantDeviceMemory) {
  const auto device = make_cuda_device(0);
  Stream stream(*device, 256, Priority::compute);
  std::vector<float> host(8);
  try {
    kernels::fill(Tensor(host.data(), Dtype::fp32, {8}), 1.0f, stream);
    FAIL() << "no error";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("is in no allocation"), std::string::npos)
        << error.what();
  }
}

// Also where pointers travel inside of a structure.
TEST_F(DeviceTest, AdamwWantsDeviceMemoryForEachTensor) {
  const auto device = make_cuda_device(0);
  Stream stream(*device, 256, Priority::compute);
  const auto memory = make_heap_memory(device.get());
  std::vector<float> host(kCount);
  kernels::AdamwRange range;
  range.end = kCount;
  for (int wrong = -1; wrong < 4; ++wrong) {
    std::vector<OwnedTensor> owned;
    Tensor tensors[4];  // master, moments, gradient
    for (int k = 0; k < 4; ++k) {
      owned.push_back(allocate_tensor(*memory, Dtype::fp32, {kCount}, "x"));
      kernels::fill(owned.back().tensor, 1.0f, stream);
      tensors[k] = k == wrong ? Tensor(host.data(), Dtype::fp32, {kCount}) : owned.back().tensor;
    }
    std::string error;
    try {
      kernels::adamw(tensors[0], Tensor(), tensors[1], tensors[2], tensors[3], {}, {&range, 1},
                     stream);
    } catch (const std::exception& e) {
      error = e.what();
    }
    stream.synchronize();
    EXPECT_EQ(error.find("kernel adamw: byte") != std::string::npos, wrong >= 0) << error;
  }
}

TEST_F(DeviceTest, ArenaIsOneAllocation) {
  RecordingMemory recorder;
  const auto run = [](Memory& memory) {
    const Buffer kept = memory.allocate(1000, "kept");
    memory.begin("step");
    { const Buffer a = memory.allocate(5000, "a"), b = memory.allocate(300, "b"); }
    { const Buffer c = memory.allocate(7000, "c"); }
    memory.end();
  };
  run(recorder);
  const MemoryPlan plan = recorder.plan();
  const auto device = make_cuda_device(0);
  const auto arena = make_arena_memory(plan, device.get());
  run(*arena);
  EXPECT_EQ(vc::living().allocations, 1);
  EXPECT_EQ(vc::living().bytes, plan.arena_bytes());
  EXPECT_EQ(vc::calls("cudaMalloc"), 1);
}

// Each rank's thread has its own device and finds it current; another thread asks for it.
TEST_F(DeviceTest, RanksAsThreads) {
  const auto rank = [](int index) {
    const auto device = make_cuda_device(index);
    Stream stream(*device, 256, Priority::compute);
    const auto memory = make_heap_memory(device.get());
    const OwnedTensor x = allocate_tensor(*memory, Dtype::fp32, {kCount}, "x");
    HostBuffer host(device.get(), kCount * 4, "host");
    for (int i = 0; i < 20; ++i) {
      const float value = static_cast<float>(100 * index + i);
      kernels::fill(x.tensor, value, stream);
      copy_to_host(host.data(), x.tensor, stream);
      stream.synchronize();
      ASSERT_EQ(host.as<float>()[kCount - 1], value);
    }
    std::jthread([&] {
      device->make_current();
      kernels::fill(x.tensor, -1.0f, stream);
      stream.synchronize();
    });
    EXPECT_EQ(*x.tensor.as<float>(), -1.0f);
  };
  std::vector<std::jthread> ranks;
  for (int r = 0; r < 4; ++r) ranks.emplace_back(rank, r);
}

}  // namespace
}  // namespace shardrun
