// Writes a set: every rank its chunks, rank 0 the manifest. checkpoint.h has the contract and
// [Note: commit].
//
// [Note: agreement] A rank that fails must not leave the others waiting, so no rank throws between
// collectives: each stage runs under a guard, its outcome travels in a Report, and after the gather
// all ranks see the same reports and throw the same error or go on.
#include <algorithm>
#include <cstring>
#include <exception>
#include <map>

#include "sharding/checkpoint/checkpoint.h"
#include "sharding/checkpoint/file.h"
#include "sharding/checkpoint/hash.h"
#include "sharding/checkpoint/manifest.h"

namespace shardrun {
namespace {

constexpr int64_t kChunkBytes = int64_t{64} << 20;

using Key = std::pair<std::string, TensorKind>;

struct Folders {
  std::filesystem::path parent, building, final;

  Folders(const std::filesystem::path& out, int64_t step)
      : parent(out / "checkpoints"),
        building(parent / ("." + step_folder_name(step) + ".tmp")),
        final(parent / step_folder_name(step)) {}
};

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

// Runs `stage` here and returns all ranks' reports, or throws the same error on every rank. See
// [Note: agreement].
std::vector<checkpoint::Report> run_on_all(Communicator& comm,
                                           FunctionRef<void(checkpoint::Report&)> stage) {
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
  if (piece.kind == TensorKind::buffer) return;
  const int64_t at =
      piece.data.dtype() == Dtype::fp32
          ? first_nonfinite<uint32_t>(piece.data.data(), piece.data.numel(), 0x7f800000u)
          : first_nonfinite<uint16_t>(piece.data.data(), piece.data.numel(), uint16_t{0x7f80});
  if (at >= 0) {
    throw DataError("{} ({}): element {} is not finite, such a set would be of no use", piece.name,
                    name_of(piece.kind), piece.begin + at);
  }
}

// Appends the piece to the file; its chunks, with file 0, to the tensor.
void write_piece(const CheckpointPiece& piece, OutputFile& file, checkpoint::Tensor& tensor) {
  tensor.set_name(piece.name);
  tensor.set_kind(static_cast<checkpoint::Kind>(piece.kind));
  tensor.set_type(type_of(piece.data.dtype()));
  for (int d = 0; d < piece.shape.rank(); ++d) tensor.add_dims(piece.shape[d]);
  const auto size = static_cast<int64_t>(size_of(piece.data.dtype()));
  const auto* data = static_cast<const std::byte*>(piece.data.data());
  const int64_t count = piece.data.numel();
  for (int64_t at = 0; at < count; at += kChunkBytes / size) {
    const int64_t part = std::min(count - at, kChunkBytes / size);
    const std::span bytes(data + at * size, static_cast<size_t>(part * size));
    checkpoint::Chunk& chunk = *tensor.add_chunks();
    chunk.set_begin(piece.begin + at);
    chunk.set_end(piece.begin + at + part);
    chunk.set_offset(file.bytes());
    chunk.set_xxh3(hash64(bytes));
    file.write(bytes);
  }
}

void write_data(const std::filesystem::path& folder, int rank,
                std::span<const CheckpointPiece> mine, checkpoint::Report& report) {
  if (mine.empty()) return;
  const std::string name = fmt::format("data-{:05d}.bin", rank);
  OutputFile file = OutputFile::create(folder / name);
  for (const CheckpointPiece& piece : mine) write_piece(piece, file, *report.add_tensors());
  report.mutable_file()->set_name(name);
  report.mutable_file()->set_bytes(file.bytes());
  file.finish();
}

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

void prepare(const Folders& folders) {
  std::error_code error;
  const bool new_parent = std::filesystem::create_directories(folders.parent, error);
  if (error) {
    throw IoError("{}: cannot create the folder: {}", folders.parent.string(), error.message());
  }
  if (new_parent) sync_folder(folders.parent.parent_path());
  remove_tree(folders.building);
  if (!std::filesystem::create_directory(folders.building, error)) {
    throw IoError("{}: cannot create the folder: {}", folders.building.string(), error.message());
  }
}

void commit(const Folders& folders, const CheckpointState& state,
            const std::vector<checkpoint::Report>& reports) {
  checkpoint::Manifest manifest = assemble(state, reports);
  for (const Error& problem : file_problems(folders.building, manifest)) {
    throw IoError("{}: is this folder on a file system that all ranks share?", problem.what());
  }
  write_manifest(folders.building, manifest);
  sync_folder(folders.building);
  replace_folder(folders.building, folders.final);
}

}  // namespace

std::string save_checkpoint(const std::filesystem::path& out, const CheckpointState& state,
                            std::span<const CheckpointPiece> mine, Communicator& comm) {
  std::filesystem::path root = out.lexically_normal();
  if (!root.has_filename()) root = root.parent_path();  // "out/": its parent is not itself
  const Folders folders(root.empty() ? "." : root, state.step);
  const bool leads = comm.rank() == 0;
  try {
    run_on_all(comm, [&](checkpoint::Report&) {
      for (const CheckpointPiece& piece : mine) check_piece(piece);
      if (leads) prepare(folders);
    });
    const auto reports = run_on_all(comm, [&](checkpoint::Report& report) {
      write_data(folders.building, comm.rank(), mine, report);
    });
    run_on_all(comm, [&](checkpoint::Report&) {
      if (leads) commit(folders, state, reports);
    });
  } catch (...) {
    // The cause matters more than what a second failure would say.
    std::error_code ignored;
    if (leads) std::filesystem::remove_all(folders.building, ignored);
    throw;
  }
  return folders.final.string();
}

}  // namespace shardrun
