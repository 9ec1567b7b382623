// A training step's state through a checkpoint: saved by four ranks it is on any number of ranks, at
// any stage, what it was; a copy of it stays while training goes on.
#include "sharding/snapshot.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <optional>

#include "sharding/peer_snapshot.h"
#include "tests/sharding/step_fixture.h"

namespace shardrun::test {
namespace {

namespace fs = std::filesystem;

class Folder {
 public:
  Folder() {
    static int count = 0;
    path_ = fs::temp_directory_path() / fmt::format("snapshot_test.{}.{}", getpid(), count++);
    fs::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

struct Case {
  int world = 1;
  int zero = 3;
  Precision precision = Precision::fp32;
};

// Calls body(step, comm, stream) on every rank.
void on_ranks(const Case& c, FunctionRef<void(TrainStep&, Communicator&, Stream&, Memory&)> body) {
  GptConfig gpt = tiny_gpt();
  run_thread_ranks(c.world, [&](Communicator& comm) {
    const Gpt model(gpt);
    ThreadPool pool(1);
    Stream stream(DeviceKind::cpu, detect_isa(), &pool);
    const auto memory = make_heap_memory();
    StepOptions options;
    options.shard.world_size = c.world;
    options.shard.zero = c.zero;
    options.shard.precision = c.precision;
    options.micro_batch = 1;
    options.global_batch = 5;
    options.seq_len = gpt.context;
    const std::string policy = c.precision == Precision::fp16 ? "default" : "none";
    TrainStep step(model, options, policy, comm, *memory, stream);
    step.initialize();
    body(step, comm, stream, *memory);
  });
}

void save_now(TrainStep& step, int64_t done, const fs::path& out, Communicator& comm) {
  save_checkpoint(out, state_of(step, done), pieces_of(step), comm);
}

// Bits of every tensor of a set.
std::map<std::string, std::vector<std::byte>> content(const fs::path& set) {
  CheckpointReader reader = CheckpointReader::open(set);
  std::map<std::string, std::vector<std::byte>> bytes;
  for (const auto& info : reader.tensors()) {
    auto& to = bytes[info.name + " " + name_of(info.kind)];
    to.resize(static_cast<size_t>(info.shape.numel()) * size_of(info.dtype));
    reader.read(info.name, info.kind, 0, Tensor(to.data(), info.dtype, {info.shape.numel()}));
  }
  return bytes;
}

TEST(Snapshot, SavedByFourIsTheSameOnAnyRanksAndStage) {
  for (const Precision precision : {Precision::fp32, Precision::fp16, Precision::bf16_true}) {
    Folder four;
    on_ranks({4, 3, precision}, [&](TrainStep& step, Communicator& comm, Stream&, Memory&) {
      SyntheticLeaves leaves(tiny_gpt().vocabulary);
      for (int64_t s = 0; s < 2; ++s) step(s, 1e-2, leaves);
      save_now(step, 2, four.path(), comm);
    });
    const auto wanted = content(four.path());
    const std::string digest = checkpoint_hash(four.path());
    for (const int world : {1, 2, 3, 5, 8}) {
      for (const int zero : {0, 1, 2, 3}) {
        SCOPED_TRACE(fmt::format("{} ranks, stage {}, {}", world, zero, name_of(precision)));
        Folder other;
        on_ranks({world, zero, precision},
                 [&](TrainStep& step, Communicator& comm, Stream&, Memory&) {
                   CheckpointReader reader = CheckpointReader::open(four.path());
                   restore(step, reader);
                   save_now(step, 2, other.path(), comm);
                 });
        EXPECT_EQ(content(other.path()), wanted);
        EXPECT_EQ(checkpoint_hash(other.path()), digest);
      }
    }
  }
}

TEST(Snapshot, ASaveBesideTrainingHoldsTheStepThatItBeganAt) {
  for (const int world : {1, 3}) {
    Folder beside, at_once;
    on_ranks({world, 3}, [&](TrainStep& step, Communicator& comm, Stream& stream, Memory& memory) {
      StateCopy copy(step, memory, nullptr);
      SyntheticLeaves leaves(tiny_gpt().vocabulary);
      step(0, 1e-2, leaves);
      save_now(step, 1, at_once.path(), comm);
      BackgroundSave save(beside.path(), state_of(step, 1), copy.take(step, stream), comm);
      bool through = false;
      for (int64_t s = 1; s < 200 && !through; ++s) {
        const StepReport report = step(s, 1e-2, leaves, false, save.quiet());
        if (report.decision.writers_quiet) through = save.advance();
      }
      EXPECT_TRUE(through);
      EXPECT_EQ(save.folder(), beside.path() / "checkpoints" / "step-00000001");
    });
    EXPECT_EQ(checkpoint_hash(beside.path()), checkpoint_hash(at_once.path()));
  }
}

TEST(Snapshot, AFailedSaveBesideTrainingIsEveryRanksError) {
  for (const char* phase : {"open", "write", "sync", "rename", "commit"}) {
    Folder out;
    std::vector<std::string> errors(3);
    on_ranks({3, 2}, [&](TrainStep& step, Communicator& comm, Stream& stream, Memory& memory) {
      StateCopy copy(step, memory, nullptr);
      save_now(step, 1, out.path(), comm);
      const Fault fault = Fault::parse(fmt::format("rank=2,step=2,phase={},kind=throw", phase));
      try {
        BackgroundSave save(out.path(), state_of(step, 2), copy.take(step, stream), comm,
                            {nullptr, &fault, {}});
        save.wait();
      } catch (const InternalError& error) {
        errors[static_cast<size_t>(comm.rank())] = error.what();
      }
    });
    for (const std::string& error : errors) {
      EXPECT_NE(error.find("rank 2 of 3: fault on demand in phase"), std::string::npos) << error;
    }
    const auto sets = list_checkpoints(out.path());
    ASSERT_FALSE(sets.empty());
    EXPECT_EQ(sets[0].filename(), "step-00000001");
    // Before the rename nothing of it is there; after it all of it.
    const bool renamed = std::string(phase) == "rename" || std::string(phase) == "commit";
    EXPECT_EQ(sets.size(), renamed ? 2u : 1u) << phase;
    for (const auto& set : sets) EXPECT_EQ(verify_checkpoint(set), std::vector<std::string>());
  }
}

// A save that is dropped half-way leaves nothing and no thread.
TEST(Snapshot, ADroppedSaveLeavesNothing) {
  Folder out;
  on_ranks({2, 1}, [&](TrainStep& step, Communicator& comm, Stream& stream, Memory& memory) {
    StateCopy copy(step, memory, nullptr);
    { BackgroundSave save(out.path(), state_of(step, 1), copy.take(step, stream), comm); }
    comm.barrier();
  });
  EXPECT_TRUE(named_checkpoints(out.path()).empty());
}

TEST(Snapshot, TheCopyIsInThePlan) {
  GptConfig gpt = tiny_gpt();
  const Gpt model(gpt);
  ThreadPool pool(1);
  Stream meta(DeviceKind::meta, detect_isa(), &pool);
  const auto comm = make_meta_communicator(0, 3, "thread");
  const auto kept = [&](bool with_copy) {
    RecordingMemory recorder;
    StepOptions options;
    options.shard.world_size = 3;
    options.seq_len = gpt.context;
    SyntheticLeaves leaves(gpt.vocabulary);
    TrainStep step(model, options, "none", *comm, recorder, meta);
    std::optional<StateCopy> copy;
    if (with_copy) copy.emplace(step, recorder, nullptr);
    step.initialize();
    return static_cast<double>(recorder.plan().persistent_bytes);
  };
  // Master and moments of a third; pieces are rounded up to 64 bytes, and slices leave room.
  EXPECT_NEAR(kept(true) - kept(false), 12.0 * static_cast<double>(model.parameter_count()) / 3,
              12 * 256 * 8);
}

CheckpointState named_state(const TrainStep& step, int64_t done) {
  CheckpointState state = state_of(step, done);
  state.config_text = "anything";
  return state;
}

// What four ranks keep for each other is, on any ranks and stage, what they had.
TEST(PeerSnapshot, ComesBackOnAnyRanksAndStage) {
  const Fault none;
  for (const Precision precision : {Precision::fp32, Precision::bf16_true}) {
    Folder memory_folder, disk;
    on_ranks({4, 2, precision}, [&](TrainStep& step, Communicator& comm, Stream& stream, Memory&) {
      PeerSnapshot peers(step, comm, "run", 1 + static_cast<int>(precision) % 2, none,
                         memory_folder.path());
      SyntheticLeaves leaves(tiny_gpt().vocabulary);
      for (int64_t s = 0; s < 3; ++s) {
        step(s, 1e-2, leaves);
        peers.take(named_state(step, s + 1), stream);
      }
      save_now(step, 3, disk.path(), comm);
    });
    for (const auto& [world, zero] : {std::pair{4, 2}, {1, 0}, {3, 3}, {6, 1}}) {
      SCOPED_TRACE(fmt::format("{} ranks, stage {}", world, zero));
      Folder again;
      on_ranks({world, zero, precision},
               [&](TrainStep& step, Communicator& comm, Stream& stream, Memory&) {
                 // Every rank looks: what several offer counts once.
                 const PeerSet set = find_peer_snapshot("run", true, comm, memory_folder.path());
                 ASSERT_EQ(set.step, 3);
                 ASSERT_EQ(set.parts.size(), 4u);
                 const CheckpointState state = restore(step, set, comm, stream);
                 EXPECT_EQ(state, named_state(step, 3));
                 save_now(step, 3, again.path(), comm);
               });
      EXPECT_EQ(checkpoint_hash(again.path()), checkpoint_hash(disk.path()));
    }
    on_ranks({2, 3}, [&](TrainStep&, Communicator& comm, Stream&, Memory&) {
      EXPECT_EQ(find_peer_snapshot("other", true, comm, memory_folder.path()).step, -1);
      EXPECT_EQ(find_peer_snapshot("run", false, comm, memory_folder.path()).step, -1);
    });
    remove_peer_snapshots("run", memory_folder.path());
    EXPECT_TRUE(fs::is_empty(memory_folder.path()));
  }
}

// The newest step that is whole: a part that is damaged, half-written or gone takes its step away.
TEST(PeerSnapshot, AStepCountsOnlyWhole) {
  const Fault none;
  Folder folder;
  on_ranks({3, 3}, [&](TrainStep& step, Communicator& comm, Stream& stream, Memory&) {
    PeerSnapshot peers(step, comm, "run", 1, none, folder.path());
    for (int64_t s = 6; s <= 7; ++s) peers.take(named_state(step, s), stream);
  });
  const auto newest = [&] {
    int64_t found = 0;
    on_ranks({2, 3}, [&](TrainStep&, Communicator& comm, Stream&, Memory&) {
      const PeerSet set = find_peer_snapshot("run", comm.rank() == 0, comm, folder.path());
      if (comm.rank() == 1) found = set.step;
    });
    return found;
  };
  const auto flip = [&](const std::string& name, int64_t byte) {
    const int descriptor = ::open((folder.path() / name).c_str(), O_RDWR);
    char value = 0;
    ASSERT_EQ(::pread(descriptor, &value, 1, byte), 1);
    value = static_cast<char>(value ^ 1);
    ASSERT_EQ(::pwrite(descriptor, &value, 1, byte), 1);
    ::close(descriptor);
  };
  EXPECT_EQ(newest(), 7);
  flip("shardrun-run-00001.1", 8);  // a step being written
  EXPECT_EQ(newest(), 6);
  flip("shardrun-run-00001.1", 8);
  EXPECT_EQ(newest(), 7);
  const auto size = static_cast<int64_t>(fs::file_size(folder.path() / "shardrun-run-00002.1"));
  for (const int64_t byte : {int64_t{0}, int64_t{17}, int64_t{4100}, size / 2}) {
    flip("shardrun-run-00002.1", byte);
    EXPECT_EQ(newest(), 6) << byte;
    flip("shardrun-run-00002.1", byte);
  }
  fs::resize_file(folder.path() / "shardrun-run-00000.1", static_cast<uintmax_t>(size / 2));
  EXPECT_EQ(newest(), 6);
  fs::remove(folder.path() / "shardrun-run-00002.0");
  EXPECT_EQ(newest(), -1);
}

}  // namespace
}  // namespace shardrun::test
