// Scalars for TensorBoard, written by the rank that reports beside metrics.jsonl:
// OUT/tb/events.out.tfevents.<seconds>.<host>. An event file is a row of TFRecords, each one Event
// message (event.proto). A resumed run starts a new file; TensorBoard shows a folder's files as
// one.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "launch/metrics/metrics.h"

namespace shardrun {

// CRC-32C (Castagnoli), RFC 3720 section 12.1.
uint32_t crc32c(std::string_view bytes);

// As TFRecords hold it: rotated right by 15 bits, plus 0xa282ead8, so that the CRC of data that has
// CRCs inside stays a useful one.
uint32_t masked_crc32c(std::string_view bytes);

// u64 length, u32 masked CRC of the length, data, u32 masked CRC of the data; little-endian.
std::string tfrecord(std::string_view data);

class TensorBoardWriter {
 public:
  // A new file in `folder`, which is created. CannotCreateError.
  explicit TensorBoardWriter(const std::string& folder);
  TensorBoardWriter(const TensorBoardWriter&) = delete;
  TensorBoardWriter& operator=(const TensorBoardWriter&) = delete;
  ~TensorBoardWriter();
  // loss, val_loss, grad_norm, lr, loss_scale, tokens_per_s, step_ms; what is not finite is left
  // out. Flushed when it returns. IoError.
  void write(const StepMetrics& metrics);
  const std::string& path() const { return path_; }

 private:
  void append(const std::string& record);

  std::string path_;
  std::FILE* file_ = nullptr;
};

}  // namespace shardrun
