#include "launch/metrics/tensorboard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "launch/metrics/event.pb.h"
#include "runtime/error.h"

namespace shardrun {
namespace {

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0u);
    table[byte] = crc;
  }
  return table;
}

template <typename T>
void append_little_endian(std::string& bytes, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) bytes += static_cast<char>(value >> (8 * i) & 0xff);
}

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string short_host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0) return "host";
  return std::string(name, std::strcspn(name, "./"));
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  static constexpr std::array<uint32_t, 256> kTable = crc_table();
  uint32_t crc = ~0u;
  for (char byte : bytes) crc = (crc >> 8) ^ kTable[(crc ^ static_cast<uint8_t>(byte)) & 0xff];
  return ~crc;
}

uint32_t masked_crc32c(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xa282ead8u;
}

std::string tfrecord(std::string_view data) {
  std::string record;
  append_little_endian<uint64_t>(record, data.size());
  append_little_endian<uint32_t>(record, masked_crc32c(record));
  record += data;
  append_little_endian<uint32_t>(record, masked_crc32c(data));
  return record;
}

TensorBoardWriter::TensorBoardWriter(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw CannotCreateError("{}: cannot create the folder: {}", folder, error.message());
  // Runs within one second take the seconds that follow: TensorBoard reads files by name, and an
  // earlier run's file is not to be overwritten.
  for (auto seconds = static_cast<int64_t>(now()); !file_; ++seconds) {
    path_ = fmt::format("{}/events.out.tfevents.{:010}.{}", folder, seconds, short_host_name());
    file_ = std::fopen(path_.c_str(), "wbxe");
    if (!file_ && errno != EEXIST) {
      throw CannotCreateError("{}: cannot create: {}", path_, std::strerror(errno));
    }
  }
  tensorboard::Event version;
  version.set_wall_time(now());
  version.set_file_version("brain.Event:2");
  try {
    append(tfrecord(version.SerializeAsString()));
  } catch (const Error&) {
    std::fclose(file_);
    throw;
  }
}

TensorBoardWriter::~TensorBoardWriter() {
  std::fclose(file_);
}

void TensorBoardWriter::write(const StepMetrics& m) {
  tensorboard::Event event;
  event.set_wall_time(now());
  event.set_step(m.step);
  const auto add = [&](const char* tag, double value) {
    const float stored = static_cast<float>(value);
    if (!std::isfinite(stored)) return;
    tensorboard::Summary::Value* scalar = event.mutable_summary()->add_value();
    scalar->set_tag(tag);
    scalar->set_simple_value(stored);
  };
  add("loss", m.loss);
  if (m.val_loss) add("val_loss", *m.val_loss);
  add("grad_norm", m.grad_norm);
  add("lr", m.lr);
  add("loss_scale", m.loss_scale);
  add("tokens_per_s", m.tokens_per_s);
  add("step_ms", m.step_ms);
  add("comm_exposed_ms", m.comm_exposed_ms);
  append(tfrecord(event.SerializeAsString()));
}

void TensorBoardWriter::append(const std::string& record) {
  if (std::fwrite(record.data(), 1, record.size(), file_) != record.size() ||
      std::fflush(file_) != 0) {
    throw IoError("{}: cannot write: {}", path_, std::strerror(errno));
  }
}

}  // namespace shardrun
