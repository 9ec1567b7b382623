// Reads any range of any tensor from whatever chunks hold it, and what follows from reading: the
// hash of a set and its verification. Memory is one scratch buffer, whatever the size of a set.
#include <algorithm>
#include <bit>
#include <cstring>
#include <map>

#include "kernels/math/convert.h"
#include "runtime/thread_pool.h"
#include "sharding/checkpoint/checkpoint.h"
#include "sharding/checkpoint/file.h"
#include "sharding/checkpoint/hash.h"
#include "sharding/checkpoint/manifest.h"

namespace shardrun {
namespace {

// Read, hashed and converted at once: stays in the processor's cache. A multiple of every element
// size.
constexpr int64_t kScratchBytes = int64_t{256} << 10;

// The set's folder that `path` means.
std::filesystem::path find_set(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) {
    throw NoInputError("{}: no such folder, wanted a checkpoint or a run's output", path.string());
  }
  if (std::filesystem::exists(path / "manifest.pb", error)) return path;
  if (std::filesystem::is_directory(path / "checkpoints", error)) {
    if (const auto newest = newest_checkpoint(path)) return *newest;
    throw NoInputError("{}: no complete checkpoint in it", (path / "checkpoints").string());
  }
  throw NoInputError(
      "{}: neither a checkpoint (no manifest.pb) nor a run's output (no checkpoints/)",
      path.string());
}

// `count` elements that lie in a file as `from`, to out as `to`.
void convert(const std::byte* in, Dtype from, std::byte* out, Dtype to, int64_t count) {
  if (from == to) {
    std::memcpy(out, in, static_cast<size_t>(count) * size_of(from));
  } else if (from == Dtype::bf16) {
    const auto* narrow = reinterpret_cast<const Bf16*>(in);
    auto* wide = reinterpret_cast<float*>(out);
    for (int64_t i = 0; i < count; ++i) wide[i] = math::widen(narrow[i]);
  } else {
    const auto* wide = reinterpret_cast<const float*>(in);
    auto* narrow = reinterpret_cast<Bf16*>(out);
    for (int64_t i = 0; i < count; ++i) math::narrow(wide[i], narrow[i]);
  }
}

bool all_finite(std::span<const std::byte> bytes, Dtype dtype) {
  const auto finite = [](auto words, size_t count, auto exponent) {
    return std::all_of(words, words + count, [&](auto w) { return (w & exponent) != exponent; });
  };
  return dtype == Dtype::fp32 ? finite(reinterpret_cast<const uint32_t*>(bytes.data()),
                                       bytes.size() / 4, uint32_t{0x7f800000})
                              : finite(reinterpret_cast<const uint16_t*>(bytes.data()),
                                       bytes.size() / 2, uint16_t{0x7f80});
}

}  // namespace

struct CheckpointReader::Impl {
  std::filesystem::path folder;
  checkpoint::Manifest manifest;
  CheckpointState state;
  std::vector<TensorInfo> tensors;
  std::vector<std::vector<bool>> verified;  // tensor, chunk
  std::map<std::pair<std::string, TensorKind>, size_t> index;
  InputFile file;  // the one read last
  int file_number = -1;
  std::vector<uint64_t> scratch = std::vector<uint64_t>(kScratchBytes / 8);

  explicit Impl(std::filesystem::path set)
      : folder(std::move(set)), manifest(read_manifest(folder)) {
    state = from_message(manifest.state());
    for (const checkpoint::Tensor& tensor : manifest.tensors()) {
      const auto kind = static_cast<TensorKind>(tensor.kind());
      index[{tensor.name(), kind}] = tensors.size();
      tensors.push_back({tensor.name(), kind, shape_of(tensor), dtype_from(tensor.type())});
      verified.emplace_back(static_cast<size_t>(tensor.chunks_size()), false);
    }
  }

  using Sink = FunctionRef<void(std::span<const std::byte>)>;

  const InputFile& open_file(int number) {
    if (number != file_number) {
      const checkpoint::File& wanted = manifest.files(number);
      file_number = -1;
      file = InputFile::open(folder / wanted.name());
      if (file.bytes() != wanted.bytes()) {
        throw DataError("{}: got {} bytes, wanted {}", file.path().string(), file.bytes(),
                        wanted.bytes());
      }
      file_number = number;
    }
    return file;
  }

  // Gives `sink` the bytes [begin, end) of the chunk in order. A chunk not yet verified is read
  // whole; its digest is held against the manifest after the sink had its bytes. Where the whole
  // chunk is wanted and `direct` is given, the bytes are read to there and the sink is told only.
  void read_chunk(size_t tensor, int number, int64_t begin, int64_t end, Sink sink,
                  std::byte* direct = nullptr) {
    const checkpoint::Chunk& chunk = manifest.tensors(static_cast<int>(tensor)).chunks(number);
    const InputFile& source = open_file(chunk.file());
    const auto size = static_cast<int64_t>(size_of(tensors[tensor].dtype));
    const bool check = !verified[tensor][static_cast<size_t>(number)];
    const int64_t whole = (chunk.end() - chunk.begin()) * size;
    const int64_t stop = check ? whole : end;
    if (check && (begin != 0 || end != whole)) direct = nullptr;
    // This chunk and, as files are read from front to back, the one behind it.
    if (check) source.will_need(chunk.offset(), 2 * whole);
    Hash64 hash;
    for (int64_t at = check ? 0 : begin; at < stop; at += kScratchBytes) {
      const int64_t bytes = std::min(kScratchBytes, stop - at);
      std::byte* place =
          direct ? direct + (at - begin) : std::as_writable_bytes(std::span(scratch)).data();
      const std::span piece(place, static_cast<size_t>(bytes));
      source.read(chunk.offset() + at, piece);
      if (check) hash.add(piece);
      const int64_t from = std::max(at, begin), to = std::min(at + bytes, end);
      if (from < to) {
        sink(piece.subspan(static_cast<size_t>(from - at), static_cast<size_t>(to - from)));
      }
    }
    if (!check) return;
    if (hash.digest() != chunk.xxh3()) {
      throw DataError(
          "{}: bytes [{}, {}) ({} {}, elements [{}, {})) have XXH3-64 {:016x}, wanted "
          "{:016x}: damaged",
          source.path().string(), chunk.offset(), chunk.offset() + stop, tensors[tensor].name,
          name_of(tensors[tensor].kind), chunk.begin(), chunk.end(), hash.digest(), chunk.xxh3());
    }
    verified[tensor][static_cast<size_t>(number)] = true;
  }

  // Elements [begin, end) of the tensor, in order, as they lie in the files.
  // `direct`: room for all of them, in place of the sink's copying.
  void read_range(size_t tensor, int64_t begin, int64_t end, Sink sink,
                  std::byte* direct = nullptr) {
    const auto& chunks = manifest.tensors(static_cast<int>(tensor)).chunks();
    const auto size = static_cast<int64_t>(size_of(tensors[tensor].dtype));
    auto chunk = std::upper_bound(chunks.begin(), chunks.end(), begin,
                                  [](int64_t at, const auto& c) { return at < c.end(); });
    for (; chunk != chunks.end() && chunk->begin() < end; ++chunk) {
      const int64_t from = std::max(begin, chunk->begin()), to = std::min(end, chunk->end());
      read_chunk(tensor, static_cast<int>(chunk - chunks.begin()), (from - chunk->begin()) * size,
                 (to - chunk->begin()) * size, sink,
                 direct ? direct + (from - begin) * size : nullptr);
    }
  }
};

CheckpointReader::CheckpointReader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CheckpointReader::CheckpointReader(CheckpointReader&&) noexcept = default;
CheckpointReader& CheckpointReader::operator=(CheckpointReader&&) noexcept = default;
CheckpointReader::~CheckpointReader() = default;

CheckpointReader CheckpointReader::open(const std::filesystem::path& path) {
  auto impl = std::make_unique<Impl>(find_set(path));
  const std::vector<Error> problems = file_problems(impl->folder, impl->manifest);
  if (!problems.empty()) {
    if (problems[0].code() == ExitCode::no_input) throw NoInputError("{}", problems[0].what());
    throw DataError("{}", problems[0].what());
  }
  return CheckpointReader(std::move(impl));
}

const std::filesystem::path& CheckpointReader::folder() const {
  return impl_->folder;
}

const CheckpointState& CheckpointReader::state() const {
  return impl_->state;
}

const std::vector<CheckpointReader::TensorInfo>& CheckpointReader::tensors() const {
  return impl_->tensors;
}

const CheckpointReader::TensorInfo* CheckpointReader::find(const std::string& name,
                                                           TensorKind kind) const {
  const auto found = impl_->index.find({name, kind});
  return found == impl_->index.end() ? nullptr : &impl_->tensors[found->second];
}

const CheckpointReader::TensorInfo& CheckpointReader::expect(const std::string& name,
                                                             TensorKind kind,
                                                             const Shape& shape) const {
  const TensorInfo* info = find(name, kind);
  if (info == nullptr) {
    throw DataError("{}: has no {} of `{}`: another model, or saved without it",
                    impl_->folder.string(), name_of(kind), name);
  }
  if (!(info->shape == shape)) {
    throw DataError("{}: {} of `{}`: got shape {}, wanted {}", impl_->folder.string(),
                    name_of(kind), name, info->shape.text(), shape.text());
  }
  return *info;
}

void CheckpointReader::read(const std::string& name, TensorKind kind, int64_t begin, Tensor out) {
  const auto found = impl_->index.find({name, kind});
  if (found == impl_->index.end()) {
    throw DataError("{}: has no {} of `{}`: another model, or saved without it",
                    impl_->folder.string(), name_of(kind), name);
  }
  const TensorInfo& info = impl_->tensors[found->second];
  const int64_t count = out.numel();
  const int64_t numel = info.shape.numel();
  if (begin < 0 || begin > numel || count > numel - begin) {
    throw DataError("{}: {} of `{}`: got {} elements, wanted {} from number {}",
                    impl_->folder.string(), name_of(kind), name, numel, count, begin);
  }
  SHARDRUN_CHECK(out.dtype() == Dtype::fp32 || out.dtype() == Dtype::bf16,
                 "checkpoints are read as fp32 or bf16, got {}", name_of(out.dtype()));
  auto* to = static_cast<std::byte*>(out.data());
  const auto take = [&](std::span<const std::byte> bytes) {
    const auto elements = static_cast<int64_t>(bytes.size() / size_of(info.dtype));
    if (bytes.data() != to) convert(bytes.data(), info.dtype, to, out.dtype(), elements);
    to += static_cast<size_t>(elements) * size_of(out.dtype());
  };
  impl_->read_range(found->second, begin, begin + count, take,
                    info.dtype == out.dtype() ? to : nullptr);
}

std::string checkpoint_hash(const std::filesystem::path& path) {
  CheckpointReader reader = CheckpointReader::open(path);
  Hash128 all;
  std::vector<std::byte> buffer(PieceHash::kPieceBytes);
  for (const auto& info : reader.tensors()) {
    PieceHash values;
    const auto size = static_cast<int64_t>(size_of(info.dtype));
    const auto step = static_cast<int64_t>(PieceHash::kPieceBytes) / size;
    for (int64_t begin = 0; begin < info.shape.numel(); begin += step) {
      const int64_t count = std::min(step, info.shape.numel() - begin);
      const Tensor piece(buffer.data(), info.dtype, {count});
      reader.read(info.name, info.kind, begin, piece);
      values.add(std::span(buffer).first(piece.bytes()));
    }
    all.add(info.name);
    all.add(name_of(info.kind));
    all.add(name_of(info.dtype));
    all.add(static_cast<uint64_t>(info.shape.rank()));
    for (int d = 0; d < info.shape.rank(); ++d) all.add(static_cast<uint64_t>(info.shape[d]));
    all.add(values.digest());
  }
  const CheckpointState& state = reader.state();
  const auto add = [&](const std::string& name, uint64_t bits) {
    all.add(name);
    all.add(bits);
  };
  add("step", static_cast<uint64_t>(state.step));
  add("applied_steps", static_cast<uint64_t>(state.applied_steps));
  add("tokens", static_cast<uint64_t>(state.tokens));
  add("skipped", static_cast<uint64_t>(state.skipped));
  add("skipped_in_a_row", static_cast<uint64_t>(state.skipped_in_a_row));
  for (const auto& [name, value] : state.scaler_counts) {
    add("scaler count " + name, static_cast<uint64_t>(value));
  }
  for (const auto& [name, value] : state.scaler_numbers) {
    add("scaler number " + name, std::bit_cast<uint64_t>(value));
  }
  add("seed", state.seed);
  return all.digest().hex();
}

std::vector<std::string> verify_checkpoint(const std::filesystem::path& path) {
  std::vector<std::string> problems;
  std::unique_ptr<CheckpointReader::Impl> impl;
  try {
    impl = std::make_unique<CheckpointReader::Impl>(find_set(path));
  } catch (const Error& error) {
    return {error.what()};
  }
  const auto step = step_of(impl->folder.filename().string());
  if (step && *step != impl->state.step) {
    problems.push_back(fmt::format("{}: holds step {}", impl->folder.string(), impl->state.step));
  }
  // A file that is missing or too short is said once, not for each of its chunks.
  std::vector<bool> sound;
  for (const checkpoint::File& file : impl->manifest.files()) {
    checkpoint::Manifest one;
    *one.add_files() = file;
    const std::vector<Error> found = file_problems(impl->folder, one);
    sound.push_back(found.empty());
    for (const Error& problem : found) problems.push_back(problem.what());
  }
  for (size_t t = 0; t < impl->tensors.size(); ++t) {
    const auto& info = impl->tensors[t];
    const auto& chunks = impl->manifest.tensors(static_cast<int>(t)).chunks();
    bool finite = true;
    for (int c = 0; c < chunks.size(); ++c) {
      const auto bytes =
          (chunks[c].end() - chunks[c].begin()) * static_cast<int64_t>(size_of(info.dtype));
      if (!sound[static_cast<size_t>(chunks[c].file())]) continue;
      try {
        impl->read_chunk(t, c, 0, bytes, [&](std::span<const std::byte> piece) {
          finite = finite && all_finite(piece, info.dtype);
        });
      } catch (const Error& error) {
        problems.push_back(error.what());
      }
    }
    if (!finite && info.kind != TensorKind::buffer) {
      problems.push_back(fmt::format("{}: {} of `{}` is not finite", impl->folder.string(),
                                     name_of(info.kind), info.name));
    }
  }
  return problems;
}

}  // namespace shardrun
