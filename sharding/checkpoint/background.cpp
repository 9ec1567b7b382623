// A save beside training: the stages of save.cpp, the long ones on a thread of this rank's own.
//
// [Note: who talks] Only the thread of the training step calls the communicator. The writer leaves
// its report and goes quiet; that every rank's writer is quiet is part of a step's decision; then all
// exchange reports between two steps. So a failed write is the same error on every rank, one step
// after it happened.
#include <atomic>
#include <chrono>
#include <thread>

#include "runtime/signals.h"
#include "sharding/checkpoint/save.h"

namespace shardrun {

struct BackgroundSave::Impl {
  Impl(const std::filesystem::path& out, const CheckpointState& state,
       std::vector<CheckpointPiece> pieces, Communicator& comm, const SaveOptions& options)
      : comm(comm), job(out, state, std::move(pieces), comm.rank(), options) {}

  // What every rank's job does next; quiet until it is done.
  void start(std::function<void(checkpoint::Report&)> stage) {
    if (writer.joinable()) writer.join();
    quiet = false;
    writer = std::thread([this, stage = std::move(stage)] {
      const BlockSignals block;
      const auto begin = std::chrono::steady_clock::now();
      report = run_guarded([&](checkpoint::Report& r) { stage(r); });
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
      seconds += spent.count();
      quiet.store(true, std::memory_order_release);
      quiet.notify_all();
    });
  }

  Communicator& comm;
  SaveJob job;
  std::thread writer;
  std::atomic<bool> quiet = true;
  checkpoint::Report report;                // of the last stage, once it is quiet
  std::vector<checkpoint::Report> reports;  // of all ranks' writing
  double seconds = 0;
  bool committing = false, committed = false;
};

BackgroundSave::BackgroundSave(const std::filesystem::path& out, const CheckpointState& state,
                               std::vector<CheckpointPiece> pieces, Communicator& comm,
                               const SaveOptions& options)
    : impl_(std::make_unique<Impl>(out, state, std::move(pieces), comm, options)) {
  try {
    exchange(comm, run_guarded([&](checkpoint::Report&) { impl_->job.prepare(); }));
  } catch (...) {
    impl_->job.clean_up();
    throw;
  }
  impl_->start([job = &impl_->job](checkpoint::Report& report) { job->write(report); });
}

BackgroundSave::~BackgroundSave() {
  if (impl_->writer.joinable()) impl_->writer.join();
  if (!impl_->committed) impl_->job.clean_up();
}

bool BackgroundSave::quiet() const {
  return impl_->quiet.load(std::memory_order_acquire);
}

bool BackgroundSave::advance() {
  impl_->quiet.wait(false);
  if (impl_->committed) return true;
  auto reports = exchange(impl_->comm, impl_->report);
  if (impl_->committing) {
    impl_->committed = true;
    return true;
  }
  impl_->committing = true;
  impl_->reports = std::move(reports);
  impl_->start([impl = impl_.get()](checkpoint::Report&) { impl->job.commit(impl->reports); });
  return false;
}

double BackgroundSave::seconds() const {
  return impl_->seconds;
}

const std::filesystem::path& BackgroundSave::folder() const {
  return impl_->job.folder();
}

}  // namespace shardrun
