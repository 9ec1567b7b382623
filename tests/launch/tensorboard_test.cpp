// Event files as TensorBoard reads them: framing, checksums, tags and values.
#include "launch/metrics/tensorboard.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <optional>

#include "launch/metrics/event.pb.h"
#include "tests/launch/data_files.h"
#include "tests/launch/expect_error.h"

namespace shardrun {
namespace {

using tensorboard::Event;

// The whole events of `bytes`; a record that is cut ends them, one that is wrong gives nothing.
std::optional<std::vector<Event>> read_events(std::string_view bytes) {
  std::vector<Event> events;
  const auto take = [&]<typename T>(T& value, size_t at) {
    std::memcpy(&value, bytes.data() + at, sizeof value);
  };
  while (bytes.size() >= 12) {
    uint64_t length = 0;
    uint32_t length_crc = 0, data_crc = 0;
    take(length, 0);
    take(length_crc, 8);
    if (masked_crc32c(bytes.substr(0, 8)) != length_crc) return std::nullopt;
    if (bytes.size() < 16 || length > bytes.size() - 16) break;
    const std::string_view data = bytes.substr(12, length);
    take(data_crc, 12 + length);
    Event event;
    if (masked_crc32c(data) != data_crc ||
        !event.ParseFromArray(data.data(), static_cast<int>(length))) {
      return std::nullopt;
    }
    events.push_back(event);
    bytes.remove_prefix(16 + length);
  }
  return events;
}

std::map<std::string, float> scalars(const Event& event) {
  std::map<std::string, float> result;
  for (const auto& value : event.summary().value()) result[value.tag()] = value.simple_value();
  return result;
}

StepMetrics sample(int64_t step) {
  StepMetrics m;
  m.step = step;
  m.loss = 2.5;
  m.grad_norm = 0.75;
  m.lr = 0.001;
  m.loss_scale = 65536;
  m.tokens_per_s = 1234;
  m.step_ms = 20;
  m.comm_exposed_ms = 3;
  return m;
}

TEST(Crc32c, KnownAnswers) {
  // RFC 3720, appendix B.4, and the check value of the CRC catalogue.
  std::string up(32, '\0'), down(32, '\0');
  for (int i = 0; i < 32; ++i) {
    up[i] = static_cast<char>(i);
    down[i] = static_cast<char>(31 - i);
  }
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c(up), 0x46dd794eu);
  EXPECT_EQ(crc32c(down), 0x113fdb5cu);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(""), 0u);
}

TEST(Crc32c, Masked) {
  EXPECT_EQ(masked_crc32c(""), 0xa282ead8u);
  const uint32_t crc = 0x8a9136aa;
  EXPECT_EQ(masked_crc32c(std::string(32, '\0')), ((crc >> 15) | (crc << 17)) + 0xa282ead8u);
}

TEST(TfRecord, Framing) {
  const std::string record = tfrecord("abc");
  ASSERT_EQ(record.size(), 8 + 4 + 3 + 4u);
  EXPECT_EQ(record.substr(0, 8), std::string("\3\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(record.substr(12, 3), "abc");
  uint32_t crc = 0;
  std::memcpy(&crc, record.data() + 15, 4);
  EXPECT_EQ(crc, masked_crc32c("abc"));
}

TEST(TensorBoard, ScalarsOfEachStep) {
  const TempDir dir("tb");
  TensorBoardWriter writer(dir / "tb");
  StepMetrics m = sample(1);
  writer.write(m);
  m.step = int64_t{1} << 40;
  m.val_loss = 3.5;
  m.loss = INFINITY;
  m.grad_norm = 1e300;  // not finite as the fp32 that an event holds
  m.tokens_per_s = m.comm_exposed_ms = kNotMeasured;
  writer.write(m);
  // Read while the writer is open: a step is on disk's way when write returns.
  const auto events = read_events(read_all(writer.path()));
  ASSERT_TRUE(events);
  ASSERT_EQ(events->size(), 3u);
  EXPECT_EQ((*events)[0].file_version(), "brain.Event:2");
  EXPECT_GT((*events)[0].wall_time(), 1.6e9);
  EXPECT_EQ((*events)[1].step(), 1);
  EXPECT_EQ(scalars((*events)[1]), (std::map<std::string, float>{{"comm_exposed_ms", 3.f},
                                                                 {"grad_norm", 0.75f},
                                                                 {"loss", 2.5f},
                                                                 {"loss_scale", 65536.f},
                                                                 {"lr", 0.001f},
                                                                 {"step_ms", 20.f},
                                                                 {"tokens_per_s", 1234.f}}));
  EXPECT_EQ((*events)[2].step(), int64_t{1} << 40);
  EXPECT_EQ(scalars((*events)[2]),
            (std::map<std::string, float>{
                {"loss_scale", 65536.f}, {"lr", 0.001f}, {"step_ms", 20.f}, {"val_loss", 3.5f}}));
}

TEST(TensorBoard, ZeroIsWritten) {
  const TempDir dir("tb_zero");
  TensorBoardWriter writer(dir / "tb");
  StepMetrics m = sample(1);
  m.lr = 0;
  writer.write(m);
  const auto events = read_events(read_all(writer.path()));
  ASSERT_TRUE(events && events->size() == 2);
  EXPECT_TRUE((*events)[1].summary().value(2).has_simple_value());
  EXPECT_EQ(scalars((*events)[1]).at("lr"), 0);
}

TEST(TensorBoard, EveryRunHasItsOwnFile) {
  const TempDir dir("tb_runs");
  std::vector<std::string> paths;
  for (int run = 0; run < 3; ++run) {
    TensorBoardWriter writer(dir / "tb");
    writer.write(sample(run + 1));
    paths.push_back(writer.path());
  }
  for (int run = 0; run < 3; ++run) {
    if (run > 0) {
      EXPECT_LT(paths[run - 1], paths[run]);  // in the order in which they are read
    }
    const auto events = read_events(read_all(paths[run]));
    ASSERT_TRUE(events && events->size() == 2);
    EXPECT_EQ((*events)[1].step(), run + 1);
  }
}

TEST(TensorBoard, DamageIsSeen) {
  const TempDir dir("tb_damage");
  TensorBoardWriter writer(dir / "tb");
  writer.write(sample(1));
  const std::string bytes = read_all(writer.path());
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string damaged = bytes;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x10);
    EXPECT_FALSE(read_events(damaged)) << "byte " << i;
    ASSERT_TRUE(read_events(bytes.substr(0, i)));
    EXPECT_LT(read_events(bytes.substr(0, i))->size(), 2u);
  }
}

TEST(TensorBoard, CannotCreate) {
  const TempDir dir("tb_file");
  dir.write("tb", "a file");
  expect_error(ExitCode::cannot_create, {"tb"}, [&] { TensorBoardWriter(dir / "tb"); });
}

}  // namespace
}  // namespace shardrun
