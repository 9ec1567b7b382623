#include "sharding/peer_snapshot.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <system_error>
#include <utility>

#include "sharding/checkpoint/file.h"
#include "sharding/checkpoint/hash.h"
#include "sharding/checkpoint/manifest.h"

namespace shardrun {
namespace {

namespace fs = std::filesystem;

constexpr size_t kPage = 4096;
constexpr size_t kBlockBytes = size_t{4} << 20;
constexpr char kMagic[8] = {'s', 'h', 'r', 'd', 'p', 'e', 'e', 'r'};

// The first page of a file: a manifest follows on the next one, then the data.
struct Header {
  char magic[8];
  uint64_t valid;  // written last, cleared first
  int64_t step;
  int32_t owner, world;
  uint64_t manifest_bytes, data_begin, data_bytes;
  uint64_t xxh3;  // of manifest and data
};

size_t pages(size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

fs::path file_of(const fs::path& folder, const std::string& run, int owner, int slot) {
  return folder / fmt::format("shardrun-{}-{:05d}.{}", run, owner, slot);
}

// A file of a memory file system, mapped whole.
class MappedSlot {
 public:
  MappedSlot(const fs::path& path, size_t bytes) : path_(path), bytes_(bytes) {
    const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (descriptor < 0) fail(errno);
    const FileHandle handle(path, descriptor);
    // Room is taken now: a page that is not there when it is written to would be SIGBUS. The content
    // of a file that is there stays, it may be the newest step.
    if (const int error = ::posix_fallocate(descriptor, 0, static_cast<off_t>(bytes))) fail(error);
    data_ = static_cast<std::byte*>(
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0));
    if (data_ == MAP_FAILED) fail(errno);
  }
  ~MappedSlot() { ::munmap(data_, bytes_); }
  MappedSlot(const MappedSlot&) = delete;

  std::byte* data() const { return data_; }
  const fs::path& path() const { return path_; }

 private:
  [[noreturn]] void fail(int error) const {
    throw CannotCreateError("--peer-snapshot: {}: cannot take {} bytes of memory: {}",
                            path_.string(), bytes_, std::generic_category().message(error));
  }
  fs::path path_;
  size_t bytes_;
  std::byte* data_ = nullptr;
};

// What this rank owns, as it lies: master and moments of each segment. All ranks' are as long.
std::vector<ConstTensor> own_slices(TrainStep& step) {
  std::vector<ConstTensor> slices;
  const bool whole = step.options().shard.zero == 0;
  for (UnitState& unit : step.state().units()) {
    for (const SegmentState& part : unit.segments) {
      const int64_t at = step.state().rank() * part.plan->slice - part.state_begin;
      for (const Tensor& tensor : {truth_of(part, whole), part.moment1, part.moment2}) {
        slices.push_back(tensor.flat(at, part.plan->slice));
      }
    }
  }
  return slices;
}

// Where the parameters of rank `owner` lie in its slices, one after another.
checkpoint::Manifest describe(TrainStep& step, int owner) {
  checkpoint::Manifest manifest;
  std::map<std::pair<std::string, TensorKind>, checkpoint::Tensor> tensors;
  const bool whole = step.options().shard.zero == 0;
  int64_t base = 0;
  for (UnitState& unit : step.state().units()) {
    for (size_t s = 0; s < unit.segments.size(); ++s) {
      const SegmentState& part = unit.segments[s];
      for (const auto& [kind, tensor] : {std::pair{TensorKind::master, truth_of(part, whole)},
                                         std::pair{TensorKind::moment1, part.moment1},
                                         std::pair{TensorKind::moment2, part.moment2}}) {
        const auto size = static_cast<int64_t>(size_of(tensor.dtype()));
        ShardState::for_each_piece(
            *unit.plan, static_cast<int>(s), owner * part.plan->slice, part.plan->slice,
            [&, kind = kind, type = type_of(tensor.dtype())](
                const ParameterPlace& place, int64_t in_parameter, int64_t at, int64_t count) {
              checkpoint::Tensor& to = tensors[{place.spec->name, kind}];
              to.set_name(place.spec->name);
              to.set_kind(static_cast<checkpoint::Kind>(kind));
              to.set_type(type);
              checkpoint::Chunk& chunk = *to.add_chunks();
              chunk.set_begin(in_parameter);
              chunk.set_end(in_parameter + count);
              chunk.set_offset(base + at * size);
            });
        base += part.plan->slice * size;
      }
    }
  }
  for (auto& [key, tensor] : tensors) *manifest.add_tensors() = std::move(tensor);
  return manifest;
}

uint64_t digest_of(const std::byte* file, const Header& header) {
  Hash64 hash;
  hash.add({file + kPage, header.manifest_bytes});
  hash.add({file + header.data_begin, header.data_bytes});
  return hash.digest();
}

// Reads the header of a file that may be anything, or half-written.
bool read_header(const InputFile& file, Header& header) {
  if (file.bytes() < static_cast<int64_t>(kPage)) return false;
  file.read(0, std::as_writable_bytes(std::span(&header, 1)));
  const auto bytes = static_cast<uint64_t>(file.bytes());
  return std::memcmp(header.magic, kMagic, sizeof(kMagic)) == 0 && header.valid == 1 &&
         header.world > 0 && header.owner >= 0 && header.owner < header.world &&
         header.manifest_bytes <= bytes - kPage && header.data_begin <= bytes &&
         header.data_begin >= kPage + header.manifest_bytes &&
         header.data_bytes <= bytes - header.data_begin;
}

bool is_sound(const InputFile& file, const Header& header) {
  Hash64 hash;
  std::vector<std::byte> block(kBlockBytes);
  const auto add = [&](uint64_t begin, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += kBlockBytes) {
      const auto part = static_cast<size_t>(std::min<uint64_t>(kBlockBytes, bytes - at));
      file.read(static_cast<int64_t>(begin + at), std::span(block).first(part));
      hash.add(std::span(block).first(part));
    }
  };
  add(kPage, header.manifest_bytes);
  add(header.data_begin, header.data_bytes);
  return hash.digest() == header.xxh3;
}

struct Offer {
  int64_t step = 0;
  int32_t owner = 0, world = 0, holder = 0, slot = 0;
};

}  // namespace

struct PeerSnapshot::Impl {
  TrainStep& step;
  Communicator& comm;
  int distance, owner;  // whose shard is kept here
  const Fault& fault;
  checkpoint::Manifest manifest;
  size_t manifest_room = 0, data_bytes = 0;
  std::unique_ptr<MappedSlot> slots[2];
  HostBuffer staging;  // on a GPU a block on its way
};

PeerSnapshot::PeerSnapshot(TrainStep& step, Communicator& comm, const std::string& run,
                           int distance, const Fault& fault, const fs::path& folder)
    : impl_(new Impl{step,
                     comm,
                     distance,
                     (comm.rank() + comm.size() - distance) % comm.size(),
                     fault,
                     {},
                     0,
                     0,
                     {},
                     {}}) {
  impl_->manifest = describe(step, impl_->owner);
  *impl_->manifest.mutable_state() = to_message(CheckpointState());
  // Counters grow, names and texts come with the first state: room for that.
  impl_->manifest_room = pages(impl_->manifest.ByteSizeLong() + 16 * kPage);
  for (const ConstTensor& slice : own_slices(step)) impl_->data_bytes += slice.bytes();
  for (int slot = 0; slot < 2; ++slot) {
    impl_->slots[slot] =
        std::make_unique<MappedSlot>(file_of(folder, run, impl_->owner, slot),
                                     kPage + impl_->manifest_room + pages(impl_->data_bytes));
  }
}

PeerSnapshot::~PeerSnapshot() = default;

size_t PeerSnapshot::bytes() const {
  return 2 * (kPage + impl_->manifest_room + pages(impl_->data_bytes));
}

void PeerSnapshot::take(const CheckpointState& state, Stream& stream) {
  Impl& impl = *impl_;
  std::byte* file = impl.slots[state.step % 2]->data();
  auto* header = reinterpret_cast<Header*>(file);
  // From here to the end of this function the other slot is the one that counts.
  header->valid = 0;
  std::atomic_thread_fence(std::memory_order_seq_cst);

  if (stream.device() != nullptr && impl.staging.bytes() == 0) {
    impl.staging = HostBuffer(stream.device(), kBlockBytes, "peer snapshot");
  }
  *impl.manifest.mutable_state() = to_message(state);
  const size_t manifest_bytes = impl.manifest.ByteSizeLong();
  SHARDRUN_CHECK(manifest_bytes <= impl.manifest_room, "a manifest of {} bytes, room for {}",
                 manifest_bytes, impl.manifest_room);
  impl.manifest.SerializeToArray(file + kPage, static_cast<int>(manifest_bytes));
  const size_t data_begin = kPage + impl.manifest_room;
  std::byte* to = file + data_begin;
  bool half = false;
  for (const ConstTensor& slice : own_slices(impl.step)) {
    const auto* bytes = static_cast<const std::byte*>(slice.data());
    for (size_t at = 0; at < slice.bytes(); at += kBlockBytes) {
      const size_t part = std::min(kBlockBytes, slice.bytes() - at);
      const std::byte* mine = bytes + at;
      if (stream.device() != nullptr) {
        copy_to_host(impl.staging.data(),
                     ConstTensor(mine, Dtype::uint8, {static_cast<int64_t>(part)}), stream);
        stream.synchronize();
        mine = impl.staging.data();
      }
      impl.comm.shift_bytes({to, part}, {mine, part}, impl.distance);
      to += part;
      if (!half && 2 * static_cast<size_t>(to - file - data_begin) >= impl.data_bytes) {
        half = true;
        impl.fault.at("peer", impl.comm.rank(), state.step);
      }
    }
  }
  Header fresh{};
  std::memcpy(fresh.magic, kMagic, sizeof(kMagic));
  fresh.step = state.step;
  fresh.owner = impl.owner;
  fresh.world = impl.comm.size();
  fresh.manifest_bytes = manifest_bytes;
  fresh.data_begin = data_begin;
  fresh.data_bytes = impl.data_bytes;
  fresh.xxh3 = digest_of(file, fresh);
  *header = fresh;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  header->valid = 1;
}

void remove_peer_snapshots(const std::string& run, const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  fs::directory_iterator entry(folder, error);
  for (; !run.empty() && !error && entry != fs::directory_iterator(); entry.increment(error)) {
    if (entry->path().filename().string().starts_with("shardrun-" + run + "-")) {
      found.push_back(entry->path());
    }
  }
  for (const fs::path& path : found) fs::remove(path, error);
}

PeerSet find_peer_snapshot(const std::string& run, bool looks, Communicator& comm,
                           const fs::path& folder) {
  std::vector<Offer> mine;
  std::error_code error;
  fs::directory_iterator entry(folder, error);
  const std::string prefix = "shardrun-" + run + "-";
  for (; looks && !run.empty() && !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(prefix) || name.size() < 2) continue;
    try {
      Header header;
      const InputFile file = InputFile::open(entry->path());
      const int slot = name.back() - '0';
      if (read_header(file, header) && is_sound(file, header) &&
          entry->path() == file_of(folder, run, header.owner, slot)) {
        mine.push_back({header.step, header.owner, header.world, comm.rank(), slot});
      }
    } catch (const Error&) {
      // Not one of ours, or it went: there is nothing to offer.
    }
  }
  // Everyone's offers: as many rooms as the largest needs.
  int64_t most = static_cast<int64_t>(mine.size());
  comm.all_reduce_max({&most, 1});
  mine.resize(static_cast<size_t>(most), Offer{-1, -1, 0, 0, 0});
  std::vector<Offer> all(static_cast<size_t>(most * comm.size()));
  comm.all_gather_bytes(std::as_writable_bytes(std::span(all)), std::as_bytes(std::span(mine)));

  std::map<std::pair<int64_t, int32_t>, std::map<int32_t, Offer>> sets;  // (step, world): by owner
  for (const Offer& offer : all) {
    if (offer.owner >= 0) sets[{offer.step, offer.world}].try_emplace(offer.owner, offer);
  }
  PeerSet found;
  for (auto set = sets.rbegin(); set != sets.rend() && found.parts.empty(); ++set) {
    if (static_cast<int32_t>(set->second.size()) != set->first.second) continue;
    for (const auto& [owner, offer] : set->second) {
      found.parts.push_back({offer.holder, file_of(folder, run, owner, offer.slot)});
    }
    found.step = set->first.first;
  }
  return found;
}

namespace {

// A piece of this rank's state that waits for its values.
struct Wanted {
  int64_t begin;
  Tensor to;
};
using WantedPieces = std::map<std::pair<std::string, TensorKind>, std::vector<Wanted>>;

// Takes from a block of the part's data, which begins at `at` there, what this rank wants of it.
void take_block(const checkpoint::Manifest& manifest, const WantedPieces& wanted, int64_t at,
                std::span<const std::byte> block, Stream& stream) {
  const auto block_end = at + static_cast<int64_t>(block.size());
  for (const checkpoint::Tensor& tensor : manifest.tensors()) {
    const auto found = wanted.find({tensor.name(), static_cast<TensorKind>(tensor.kind())});
    if (found == wanted.end()) continue;
    const auto size = static_cast<int64_t>(size_of(dtype_from(tensor.type())));
    for (const checkpoint::Chunk& chunk : tensor.chunks()) {
      const int64_t first = std::max(at, chunk.offset());
      const int64_t last =
          std::min(block_end, chunk.offset() + (chunk.end() - chunk.begin()) * size);
      if (first >= last) continue;
      const int64_t begin = chunk.begin() + (first - chunk.offset()) / size;
      const int64_t end = begin + (last - first) / size;
      for (const Wanted& piece : found->second) {
        const int64_t from = std::max(begin, piece.begin);
        const int64_t to = std::min(end, piece.begin + piece.to.numel());
        if (from >= to) continue;
        copy_from_host(piece.to.flat(from - piece.begin, to - from),
                       block.data() + (first - at) + (from - begin) * size, stream);
      }
    }
  }
  stream.synchronize();  // the block is used again
}

void check_fits(const checkpoint::Manifest& manifest, const WantedPieces& wanted) {
  for (const checkpoint::Tensor& tensor : manifest.tensors()) {
    const auto found = wanted.find({tensor.name(), static_cast<TensorKind>(tensor.kind())});
    if (found == wanted.end()) continue;
    if (found->second[0].to.dtype() != dtype_from(tensor.type())) {
      throw DataError("the peer snapshot holds {} as {}, wanted {}", tensor.name(),
                      name_of(dtype_from(tensor.type())), name_of(found->second[0].to.dtype()));
    }
  }
}

}  // namespace

CheckpointState restore(TrainStep& step, const PeerSet& set, Communicator& comm, Stream& stream) {
  WantedPieces wanted;
  int64_t missing = 0;  // elements
  for_each_state_piece(step, true,
                       [&](const ParameterSpec& spec, TensorKind kind, int64_t begin, Tensor to) {
                         wanted[{spec.name, kind}].push_back({begin, to});
                         missing += to.numel();
                       });
  const HostBuffer block(stream.device(), kBlockBytes, "peer snapshot");
  CheckpointState state;
  for (const PeerSet::Part& part : set.parts) {
    const bool holds = part.holder == comm.rank();
    InputFile file;
    Header header{};
    if (holds) {
      file = InputFile::open(part.path);
      SHARDRUN_CHECK(read_header(file, header), "{} changed", part.path.string());
    }
    comm.broadcast(std::as_writable_bytes(std::span(&header, 1)), part.holder);
    std::string text(header.manifest_bytes, '\0');
    if (holds) file.read(kPage, std::as_writable_bytes(std::span(text)));
    comm.broadcast(std::as_writable_bytes(std::span(text)), part.holder);
    checkpoint::Manifest manifest;
    if (!manifest.ParseFromString(text)) throw DataError("{}: no manifest", part.path.string());
    state = from_message(manifest.state());
    check_fits(manifest, wanted);
    for (const checkpoint::Tensor& tensor : manifest.tensors()) {
      const auto found = wanted.find({tensor.name(), static_cast<TensorKind>(tensor.kind())});
      if (found == wanted.end()) continue;
      for (const checkpoint::Chunk& chunk : tensor.chunks()) {
        for (const Wanted& piece : found->second) {
          missing -= std::max<int64_t>(0, std::min(chunk.end(), piece.begin + piece.to.numel()) -
                                              std::max(chunk.begin(), piece.begin));
        }
      }
    }
    for (uint64_t at = 0; at < header.data_bytes; at += kBlockBytes) {
      const auto bytes =
          static_cast<size_t>(std::min<uint64_t>(kBlockBytes, header.data_bytes - at));
      const std::span piece(block.data(), bytes);
      if (holds) file.read(static_cast<int64_t>(header.data_begin + at), piece);
      comm.broadcast(piece, part.holder);
      take_block(manifest, wanted, static_cast<int64_t>(at), piece, stream);
    }
  }
  comm.all_reduce_max({&missing, 1});
  if (missing != 0)
    throw DataError("the peer snapshot holds another model: {} values lack", missing);
  restore_counters(step, state, "the peer snapshot");
  return state;
}

}  // namespace shardrun
