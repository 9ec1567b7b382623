// Writes a set: every rank its chunks, rank 0 the manifest. checkpoint.h has the contract and
// [Note: commit].
//
// [Note: agreement] A rank that fails must not leave the others waiting, so no rank throws between
// collectives: each stage runs under a guard, its outcome travels in a Report, and after the gather
// all ranks see the same reports and throw the same error or go on.
#include "sharding/checkpoint/save.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <utility>

#include "sharding/checkpoint/file.h"
#include "sharding/checkpoint/hash.h"
#include "sharding/checkpoint/manifest.h"

namespace shardrun {
namespace {

// [Note: chunks] A chunk is read whole the first time that a rank touches it, to be checked. Small
// ones cost a rank that needs a part of a tensor little; the manifest grows by 30 bytes for each.
constexpr int64_t kChunkBytes = int64_t{4} << 20;
// What is fetched, judged, hashed and written at once stays in the processor's cache.
constexpr int64_t kBlockBytes = PieceSource::kMostBytes;

using Key = std::pair<std::string, TensorKind>;

// Every rank's text, which may differ in length.
std::vector<std::string> gather_texts(Communicator& comm, const std::string& mine) {
  const auto ranks = static_cast<size_t>(comm.size());
  const auto size = static_cast<int64_t>(mine.size());
  std::vector<int64_t> sizes(ranks);
  comm.all_gather_bytes(std::as_writable_bytes(std::span(sizes)),
                        std::as_bytes(std::span(&size, 1)));
  const auto longest = static_cast<size_t>(*std::max_element(sizes.begin(), sizes.end()));
  std::string padded = mine;
  padded.resize(longest);
  std::string all(longest * ranks, '\0');
  comm.all_gather_bytes(std::as_writable_bytes(std::span(all)), std::as_bytes(std::span(padded)));
  std::vector<std::string> texts;
  for (size_t r = 0; r < ranks; ++r) {
    texts.push_back(all.substr(r * longest, static_cast<size_t>(sizes[r])));
  }
  return texts;
}

}  // namespace

checkpoint::Report run_guarded(FunctionRef<void(checkpoint::Report&)> stage) {
  checkpoint::Report mine;
  try {
    stage(mine);
  } catch (const Error& error) {
    mine.set_error_code(static_cast<int>(error.code()));
    mine.set_error(error.what());
  } catch (const std::exception& error) {
    mine.set_error_code(static_cast<int>(ExitCode::io));
    mine.set_error(error.what());
  }
  return mine;
}

std::vector<checkpoint::Report> exchange(Communicator& comm, const checkpoint::Report& mine) {
  std::vector<checkpoint::Report> reports(static_cast<size_t>(comm.size()));
  const std::vector<std::string> texts = gather_texts(comm, mine.SerializeAsString());
  for (size_t r = 0; r < reports.size(); ++r) {
    SHARDRUN_CHECK(reports[r].ParseFromString(texts[r]), "the report of rank {} does not parse", r);
  }
  for (size_t r = 0; r < reports.size(); ++r) {
    if (reports[r].error_code() == 0) continue;
    const std::string text = fmt::format("checkpoint not saved, rank {} of {}: {}", r,
                                         reports.size(), reports[r].error());
    switch (static_cast<ExitCode>(reports[r].error_code())) {
      case ExitCode::data:
        throw DataError("{}", text);
      case ExitCode::internal:
        throw InternalError("{}", text);
      default:
        throw IoError("{}", text);
    }
  }
  return reports;
}

namespace {

// The first element that is infinite or NaN; -1: none.
template <typename Word>
int64_t first_nonfinite(const void* data, int64_t count, Word exponent) {
  const auto* words = static_cast<const Word*>(data);
  constexpr int64_t kBlock = 4096;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    bool found = false;
    for (int64_t i = begin; i < end; ++i) found |= (words[i] & exponent) == exponent;
    if (!found) continue;
    for (int64_t i = begin; i < end; ++i) {
      if ((words[i] & exponent) == exponent) return i;
    }
  }
  return -1;
}

void check_piece(const CheckpointPiece& piece) {
  SHARDRUN_CHECK(!piece.name.empty() && piece.data.present(), "a piece lacks name or data");
  type_of(piece.data.dtype());
  const int64_t end = piece.begin + piece.data.numel();
  SHARDRUN_CHECK(piece.begin >= 0 && end <= piece.shape.numel(),
                 "{} ({}): got elements [{}, {}) of {}", piece.name, name_of(piece.kind),
                 piece.begin, end, piece.shape.text());
}

void check_finite(const CheckpointPiece& piece, const std::byte* data, int64_t begin,
                  int64_t count) {
  if (piece.kind == TensorKind::buffer) return;
  const int64_t at = piece.data.dtype() == Dtype::fp32
                         ? first_nonfinite<uint32_t>(data, count, 0x7f800000u)
                         : first_nonfinite<uint16_t>(data, count, uint16_t{0x7f80});
  if (at >= 0) {
    throw DataError("{} ({}): element {} is not finite, such a set would be of no use", piece.name,
                    name_of(piece.kind), piece.begin + begin + at);
  }
}

// One rank's data file: front to back, a block at a time.
class DataWriter {
 public:
  DataWriter(OutputFile& file, PieceSource* source, FunctionRef<void(int64_t written)> progress)
      : file_(file), source_(source), progress_(progress) {
    if (source_ != nullptr) scratch_.resize(kBlockBytes);
  }

  // Appends the piece; its chunks, with file 0, to the tensor.
  void write(const CheckpointPiece& piece, checkpoint::Tensor& tensor) {
    tensor.set_name(piece.name);
    tensor.set_kind(static_cast<checkpoint::Kind>(piece.kind));
    tensor.set_type(type_of(piece.data.dtype()));
    for (int d = 0; d < piece.shape.rank(); ++d) tensor.add_dims(piece.shape[d]);
    const auto size = static_cast<int64_t>(size_of(piece.data.dtype()));
    const int64_t count = piece.data.numel();
    for (int64_t at = 0; at < count; at += kChunkBytes / size) {
      const int64_t part = std::min(count - at, kChunkBytes / size);
      checkpoint::Chunk& chunk = *tensor.add_chunks();
      chunk.set_begin(piece.begin + at);
      chunk.set_end(piece.begin + at + part);
      chunk.set_offset(file_.bytes());
      chunk.set_xxh3(write_chunk(piece, at, part, size));
    }
  }

 private:
  uint64_t write_chunk(const CheckpointPiece& piece, int64_t begin, int64_t count, int64_t size) {
    Hash64 hash;
    for (int64_t at = begin; at < begin + count; at += kBlockBytes / size) {
      const int64_t part = std::min(begin + count - at, kBlockBytes / size);
      const std::byte* data = source_
                                  ? source_->fetch(piece, at, part, scratch_.data())
                                  : static_cast<const std::byte*>(piece.data.data()) + at * size;
      check_finite(piece, data, at, part);
      const std::span bytes(data, static_cast<size_t>(part * size));
      hash.add(bytes);
      file_.write(bytes);
      progress_(file_.bytes());
    }
    return hash.digest();
  }

  OutputFile& file_;
  PieceSource* source_;
  FunctionRef<void(int64_t)> progress_;
  std::vector<std::byte> scratch_;
};

// Adds what one rank wrote of a tensor.
void merge(const checkpoint::Tensor& part, int file, checkpoint::Tensor& whole) {
  const bool first = whole.name().empty();
  if (!first &&
      (part.type() != whole.type() || !std::equal(part.dims().begin(), part.dims().end(),
                                                  whole.dims().begin(), whole.dims().end()))) {
    throw DataError("{} ({}): ranks bring it as {} {} and {} {}", part.name(),
                    name_of(static_cast<TensorKind>(part.kind())), name_of(dtype_from(part.type())),
                    shape_of(part).text(), name_of(dtype_from(whole.type())),
                    shape_of(whole).text());
  }
  if (first) {
    whole = part;
    whole.clear_chunks();
  }
  for (const checkpoint::Chunk& chunk : part.chunks()) {
    *whole.add_chunks() = chunk;
    whole.mutable_chunks()->rbegin()->set_file(file);
  }
}

checkpoint::Manifest assemble(const CheckpointState& state,
                              const std::vector<checkpoint::Report>& reports) {
  checkpoint::Manifest manifest;
  *manifest.mutable_state() = to_message(state);
  std::map<Key, checkpoint::Tensor> tensors;
  for (const checkpoint::Report& report : reports) {
    if (!report.has_file()) continue;
    const int file = manifest.files_size();
    *manifest.add_files() = report.file();
    for (const checkpoint::Tensor& part : report.tensors()) {
      merge(part, file, tensors[{part.name(), static_cast<TensorKind>(part.kind())}]);
    }
  }
  for (auto& [key, tensor] : tensors) {
    std::sort(tensor.mutable_chunks()->begin(), tensor.mutable_chunks()->end(),
              [](const auto& a, const auto& b) { return a.begin() < b.begin(); });
    check_cover(tensor);
    *manifest.add_tensors() = std::move(tensor);
  }
  return manifest;
}

std::filesystem::path root_of(const std::filesystem::path& out) {
  std::filesystem::path root = out.lexically_normal();
  if (!root.has_filename()) root = root.parent_path();  // "out/": its parent is not itself
  return root.empty() ? "." : root;
}

}  // namespace

// ---- the stages

SaveJob::SaveJob(const std::filesystem::path& out, CheckpointState state,
                 std::vector<CheckpointPiece> mine, int rank, SaveOptions options)
    : parent_(root_of(out) / "checkpoints"),
      building_(parent_ / ("." + step_folder_name(state.step) + ".tmp")),
      final_(parent_ / step_folder_name(state.step)),
      state_(std::move(state)),
      mine_(std::move(mine)),
      rank_(rank),
      options_(std::move(options)) {}

void SaveJob::prepare() {
  for (const CheckpointPiece& piece : mine_) check_piece(piece);
  if (rank_ != 0) return;
  std::error_code error;
  const bool new_parent = std::filesystem::create_directories(parent_, error);
  if (error) throw IoError("{}: cannot create the folder: {}", parent_.string(), error.message());
  if (new_parent) sync_folder(parent_.parent_path());
  remove_tree(building_);
  if (!std::filesystem::create_directory(building_, error)) {
    throw IoError("{}: cannot create the folder: {}", building_.string(), error.message());
  }
}

void SaveJob::write(checkpoint::Report& report) {
  if (mine_.empty()) return;
  const std::string name = fmt::format("data-{:05d}.bin", rank_);
  fault("open");
  OutputFile file = OutputFile::create(building_ / name);
  int64_t bytes = 0;
  for (const CheckpointPiece& piece : mine_) bytes += static_cast<int64_t>(piece.data.bytes());
  bool half = false;
  DataWriter writer(file, options_.source, [&](int64_t written) {
    if (half || 2 * written < bytes) return;
    half = true;
    file.fail_next(fault("write"));
  });
  for (const CheckpointPiece& piece : mine_) writer.write(piece, *report.add_tensors());
  report.mutable_file()->set_name(name);
  report.mutable_file()->set_bytes(file.bytes());
  fault("sync");
  file.finish();
}

void SaveJob::commit(const std::vector<checkpoint::Report>& reports) {
  if (rank_ == 0) {
    checkpoint::Manifest manifest = assemble(state_, reports);
    for (const Error& problem : file_problems(building_, manifest)) {
      throw IoError("{}: is this folder on a file system that all ranks share?", problem.what());
    }
    write_manifest(building_, manifest);
    sync_folder(building_);
  }
  fault("rename");
  if (rank_ == 0) replace_folder(building_, final_);
  fault("commit");
  if (rank_ != 0) return;
  sync_folder(parent_);
  point_latest(parent_, final_.filename());
  if (!options_.after_commit) return;
  try {
    options_.after_commit();
  } catch (const Error& error) {
    throw IoError("{} is written, but what follows failed: {}", final_.string(), error.what());
  }
}

void SaveJob::clean_up() noexcept {
  std::error_code ignored;
  if (rank_ == 0) std::filesystem::remove_all(building_, ignored);
}

FaultKind SaveJob::fault(const char* phase) const {
  return options_.fault ? options_.fault->at(phase, rank_, state_.step) : FaultKind::none;
}

// ---- in one go

std::string save_checkpoint(const std::filesystem::path& out, const CheckpointState& state,
                            std::span<const CheckpointPiece> mine, Communicator& comm,
                            const SaveOptions& options) {
  SaveJob job(out, state, {mine.begin(), mine.end()}, comm.rank(), options);
  try {
    exchange(comm, run_guarded([&](checkpoint::Report&) { job.prepare(); }));
    const auto reports =
        exchange(comm, run_guarded([&](checkpoint::Report& report) { job.write(report); }));
    exchange(comm, run_guarded([&](checkpoint::Report&) { job.commit(reports); }));
  } catch (...) {
    // The cause matters more than what a second failure would say.
    job.clean_up();
    throw;
  }
  return job.folder().string();
}

}  // namespace shardrun
