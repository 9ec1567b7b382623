// OUT as one job's: who holds it, and which run it is of. Made by the trainer's first rank.
//
// [Note: one job in OUT] OUT/run names the run, and the job that writes here by host and process. The
// job holds an flock on the file as long as it lives; the kernel gives it back whatever the job dies
// of, so a lock that is there means a job that lives, on any node of a file system whose locks reach
// that far (local disks, NFS 4, Lustre, GPFS). Where there are no locks, a process of this host that
// is gone is told by its number and start time; of another host's nothing can be told: it counts as
// alive until the file is removed.
#pragma once

#include <filesystem>
#include <string>

namespace shardrun {

class RunFolder {
 public:
  // `locks` false: as on a file system that has none.
  explicit RunFolder(std::filesystem::path out, bool locks = true);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;

  // Takes OUT where there is a file to hold; changes nothing in it. CannotCreateError names who has
  // it.
  void hold();
  // Takes OUT, which exists, and signs it. A run goes on under its name where `goes_on`, else it
  // gets a new one.
  void sign(bool goes_on);
  const std::string& run() const { return run_; }  // after sign(), or as hold() found it

 private:
  void lock(bool create);

  std::filesystem::path path_;
  bool locks_;
  int descriptor_ = -1;
  bool signed_ = false;
  std::string run_;
};

}  // namespace shardrun
