#include "sharding/checkpoint/manifest.h"

#include <google/protobuf/text_format.h>

#include <algorithm>
#include <bit>
#include <charconv>

#include "sharding/checkpoint/file.h"
#include "sharding/checkpoint/hash.h"

namespace shardrun {
namespace {

static_assert(std::endian::native == std::endian::little, "data files are little endian");

constexpr int kFormat = 1;
constexpr int64_t kLargestManifest = int64_t{1} << 30;
// The last field as protobuf writes it: its tag, then 8 bytes in little endian.
constexpr char kDigestTag = (checkpoint::Manifest::kXxh3FieldNumber << 3) | 1;
constexpr size_t kDigestBytes = 9;

std::string digest_field(uint64_t digest) {
  std::string field(1, kDigestTag);
  for (int i = 0; i < 8; ++i) field += static_cast<char>(digest >> (8 * i));
  return field;
}

void write_file(const std::filesystem::path& path, const std::string& content) {
  OutputFile file = OutputFile::create(path);
  file.write(std::as_bytes(std::span(content)));
  file.finish();
}

std::string label(const checkpoint::Tensor& tensor) {
  return fmt::format("{} ({})", tensor.name(), name_of(static_cast<TensorKind>(tensor.kind())));
}

// The elements, or nothing where the dimensions are no shape of ours.
std::optional<int64_t> numel_of(const checkpoint::Tensor& tensor) {
  if (tensor.dims_size() > Shape::kMaxRank) return std::nullopt;
  int64_t numel = 1;
  for (int64_t dim : tensor.dims()) {
    if (dim < 0 || __builtin_mul_overflow(numel, dim, &numel)) return std::nullopt;
  }
  // Room for any element size.
  return numel > (INT64_MAX >> 4) ? std::nullopt : std::optional(numel);
}

void check_chunks(const checkpoint::Tensor& tensor, const checkpoint::Manifest& manifest) {
  const auto size = static_cast<int64_t>(size_of(dtype_from(tensor.type())));
  for (const checkpoint::Chunk& chunk : tensor.chunks()) {
    if (chunk.file() < 0 || chunk.file() >= manifest.files_size()) {
      throw DataError("{}: a chunk lies in file number {}, wanted one of {}", label(tensor),
                      chunk.file(), manifest.files_size());
    }
    const int64_t file_bytes = manifest.files(chunk.file()).bytes();
    const int64_t bytes = (chunk.end() - chunk.begin()) * size;
    if (chunk.offset() < 0 || chunk.offset() > file_bytes || bytes > file_bytes - chunk.offset()) {
      throw DataError("{}: a chunk of {} bytes at {} does not fit into {} of {} bytes",
                      label(tensor), bytes, chunk.offset(), manifest.files(chunk.file()).name(),
                      file_bytes);
    }
  }
}

// A field that this program does not know may change what the others mean.
void check_known(const google::protobuf::Message& message) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  const google::protobuf::UnknownFieldSet& unknown = reflection.GetUnknownFields(message);
  if (!unknown.empty()) {
    throw DataError("{} has an unknown key, number {}: written by a newer version of shardrun",
                    message.GetDescriptor()->name(), unknown.field(0).number());
  }
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const google::protobuf::FieldDescriptor* field : fields) {
    if (field->cpp_type() != google::protobuf::FieldDescriptor::CPPTYPE_MESSAGE) continue;
    if (!field->is_repeated()) {
      check_known(reflection.GetMessage(message, field));
      continue;
    }
    for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
      check_known(reflection.GetRepeatedMessage(message, field, i));
    }
  }
}

void check_manifest(const checkpoint::Manifest& manifest) {
  if (manifest.format() != kFormat) {
    throw DataError("got format {}, wanted {}: written by {} version of shardrun ({})",
                    manifest.format(), kFormat, manifest.format() > kFormat ? "a newer" : "another",
                    manifest.state().writer_version());
  }
  check_known(manifest);
  for (const checkpoint::File& file : manifest.files()) {
    // Also keeps reads inside the folder.
    if (file.name().empty() || file.name()[0] == '.' ||
        file.name().find_first_of(std::string("/\0", 2)) != std::string::npos || file.bytes() < 0) {
      throw DataError("got a data file `{}` of {} bytes, wanted a name in the folder", file.name(),
                      file.bytes());
    }
  }
  const checkpoint::Tensor* before = nullptr;
  for (const checkpoint::Tensor& tensor : manifest.tensors()) {
    if (!checkpoint::Kind_IsValid(tensor.kind()) || !checkpoint::Type_IsValid(tensor.type())) {
      throw DataError("{}: got kind {} and type {}, wanted known ones", tensor.name(),
                      static_cast<int>(tensor.kind()), static_cast<int>(tensor.type()));
    }
    if (before != nullptr &&
        std::pair(before->name(), before->kind()) >= std::pair(tensor.name(), tensor.kind())) {
      throw DataError("{}: follows {}, wanted each tensor once and in order", label(tensor),
                      label(*before));
    }
    check_cover(tensor);
    check_chunks(tensor, manifest);
    before = &tensor;
  }
}

}  // namespace

const char* name_of(TensorKind kind) {
  constexpr const char* kNames[] = {"master", "moment1", "moment2", "buffer"};
  const auto i = static_cast<size_t>(kind);
  return i < std::size(kNames) ? kNames[i] : "unknown kind";
}

checkpoint::State to_message(const CheckpointState& state) {
  checkpoint::State message;
  message.set_step(state.step);
  message.set_applied_steps(state.applied_steps);
  message.set_tokens(state.tokens);
  message.set_skipped(state.skipped);
  message.set_skipped_in_a_row(state.skipped_in_a_row);
  message.set_scaler_policy(state.scaler_policy);
  message.set_seed(state.seed);
  message.set_precision(state.precision);
  message.set_numerics_key(state.numerics_key);
  message.set_config_text(state.config_text);
  message.set_writer_version(state.writer_version);
  message.set_schedule(state.schedule);
  message.set_run(state.run);
  const auto add = [](auto* field, const auto& values) {
    for (const auto& [name, value] : values) {
      auto* entry = field->Add();
      entry->set_name(name);
      entry->set_value(value);
    }
  };
  add(message.mutable_scaler_counts(), state.scaler_counts);
  add(message.mutable_scaler_numbers(), state.scaler_numbers);
  add(message.mutable_data_position(), state.data_position);
  return message;
}

CheckpointState from_message(const checkpoint::State& message) {
  CheckpointState state;
  state.step = message.step();
  state.applied_steps = message.applied_steps();
  state.tokens = message.tokens();
  state.skipped = message.skipped();
  state.skipped_in_a_row = message.skipped_in_a_row();
  state.scaler_policy = message.scaler_policy();
  state.seed = message.seed();
  state.precision = message.precision();
  state.numerics_key = message.numerics_key();
  state.config_text = message.config_text();
  state.writer_version = message.writer_version();
  state.schedule = message.schedule();
  state.run = message.run();
  for (const auto& entry : message.scaler_counts())
    state.scaler_counts[entry.name()] = entry.value();
  for (const auto& entry : message.scaler_numbers()) {
    state.scaler_numbers[entry.name()] = entry.value();
  }
  for (const auto& entry : message.data_position())
    state.data_position[entry.name()] = entry.value();
  return state;
}

checkpoint::Type type_of(Dtype dtype) {
  SHARDRUN_CHECK(dtype == Dtype::fp32 || dtype == Dtype::bf16,
                 "checkpoints hold fp32 and bf16, got {}", name_of(dtype));
  return dtype == Dtype::fp32 ? checkpoint::FP32 : checkpoint::BF16;
}

Dtype dtype_from(checkpoint::Type type) {
  return type == checkpoint::FP32 ? Dtype::fp32 : Dtype::bf16;
}

Shape shape_of(const checkpoint::Tensor& tensor) {
  Shape shape;
  for (int64_t dim : tensor.dims()) shape.append(dim);
  return shape;
}

void write_manifest(const std::filesystem::path& folder, checkpoint::Manifest& manifest) {
  manifest.set_format(kFormat);
  manifest.clear_xxh3();
  std::string content;
  if (!manifest.SerializeToString(&content)) {
    throw InternalError("{}: the manifest does not serialize", folder.string());
  }
  const uint64_t digest = hash64(std::as_bytes(std::span(content)));
  content += digest_field(digest);
  write_file(folder / "manifest.pb", content);

  manifest.set_xxh3(digest);
  google::protobuf::TextFormat::Printer printer;
  printer.SetUseUtf8StringEscaping(true);
  std::string text;
  if (!printer.PrintToString(manifest, &text)) {
    throw InternalError("{}: the manifest does not print", folder.string());
  }
  write_file(folder / "manifest.txt", text);
}

checkpoint::Manifest read_manifest(const std::filesystem::path& folder) {
  const InputFile file = InputFile::open(folder / "manifest.pb");
  const std::string name = file.path().string();
  if (file.bytes() < static_cast<int64_t>(kDigestBytes) || file.bytes() > kLargestManifest) {
    throw DataError("{}: got {} bytes, wanted a manifest of {} to {}", name, file.bytes(),
                    kDigestBytes, kLargestManifest);
  }
  std::string content(static_cast<size_t>(file.bytes()), '\0');
  file.read(0, std::as_writable_bytes(std::span(content)));
  const std::string tail = content.substr(content.size() - kDigestBytes);
  const std::span body = std::span(content).first(content.size() - kDigestBytes);
  if (tail != digest_field(hash64(std::as_bytes(body)))) {
    throw DataError("{}: its XXH3-64 does not match its bytes: damaged or cut off", name);
  }
  checkpoint::Manifest manifest;
  if (!manifest.ParseFromString(content)) throw DataError("{}: not a manifest", name);
  try {
    check_manifest(manifest);
  } catch (const DataError& error) {
    throw DataError("{}: {}", name, error.what());
  }
  return manifest;
}

std::vector<Error> file_problems(const std::filesystem::path& folder,
                                 const checkpoint::Manifest& manifest) {
  std::vector<Error> problems;
  for (const checkpoint::File& wanted : manifest.files()) {
    try {
      const InputFile file = InputFile::open(folder / wanted.name());
      if (file.bytes() != wanted.bytes()) {
        throw DataError("{}: got {} bytes, wanted {}", file.path().string(), file.bytes(),
                        wanted.bytes());
      }
    } catch (const Error& error) {
      problems.push_back(error);
    }
  }
  return problems;
}

void check_cover(const checkpoint::Tensor& tensor) {
  const std::optional<int64_t> numel = numel_of(tensor);
  if (!numel) throw DataError("{}: its dimensions are not a shape", label(tensor));
  int64_t at = 0;
  for (const checkpoint::Chunk& chunk : tensor.chunks()) {
    if (chunk.begin() != at || chunk.end() <= at || chunk.end() > *numel) {
      throw DataError("{}: got elements [{}, {}) where {} of {} come next: a gap or an overlap",
                      label(tensor), chunk.begin(), chunk.end(), at, *numel);
    }
    at = chunk.end();
  }
  if (at != *numel) throw DataError("{}: got {} elements, wanted {}", label(tensor), at, *numel);
}

std::string step_folder_name(int64_t step) {
  return fmt::format("step-{:08d}", step);
}

std::optional<int64_t> step_of(const std::string& folder_name) {
  constexpr std::string_view kPrefix = "step-";
  if (!folder_name.starts_with(kPrefix)) return std::nullopt;
  int64_t step = 0;
  const char* end = folder_name.data() + folder_name.size();
  const auto [stop, error] = std::from_chars(folder_name.data() + kPrefix.size(), end, step);
  if (error != std::errc() || stop != end || step < 0) return std::nullopt;
  // step-7 and step-00000007 would be two sets of one step.
  return folder_name == step_folder_name(step) ? std::optional(step) : std::nullopt;
}

}  // namespace shardrun
