// Which sets a run has: finding the newest complete one, and removing old ones.
#include <sys/statvfs.h>

#include <algorithm>

#include "sharding/checkpoint/checkpoint.h"
#include "sharding/checkpoint/file.h"
#include "sharding/checkpoint/manifest.h"

namespace shardrun {
namespace {

// (step, folder) of everything that is named like a set, by rising step. A folder that cannot be
// listed has none.
std::vector<std::pair<int64_t, std::filesystem::path>> named_sets(
    const std::filesystem::path& parent) {
  std::vector<std::pair<int64_t, std::filesystem::path>> sets;
  std::error_code error;
  std::filesystem::directory_iterator entry(parent, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    if (const auto step = step_of(entry->path().filename().string())) {
      sets.emplace_back(*step, entry->path());
    }
  }
  std::sort(sets.begin(), sets.end());
  return sets;
}

bool is_complete(const std::filesystem::path& folder, int64_t step) {
  try {
    const checkpoint::Manifest manifest = read_manifest(folder);
    return manifest.state().step() == step && file_problems(folder, manifest).empty();
  } catch (const Error&) {
    return false;
  }
}

// What save leaves when it dies: .step-00000100.tmp and .step-00000100.tmp.old
bool is_leftover(const std::string& name) {
  if (name.empty() || name[0] != '.') return false;
  const std::string rest = name.substr(1);
  const size_t dot = rest.find('.');
  if (dot == std::string::npos || !step_of(rest.substr(0, dot))) return false;
  const std::string ending = rest.substr(dot);
  return ending == ".tmp" || ending == ".tmp.old" || ending == ".gone";
}

void remove_leftovers(const std::filesystem::path& parent) {
  std::vector<std::filesystem::path> found;
  std::error_code error;
  std::filesystem::directory_iterator entry(parent, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    if (is_leftover(entry->path().filename().string())) found.push_back(entry->path());
  }
  for (const auto& path : found) remove_tree(path);
}

// Under another name first: a set that is only half removed must not look like a damaged one.
void remove_set(const std::filesystem::path& folder) {
  const std::filesystem::path gone =
      folder.parent_path() / ("." + folder.filename().string() + ".gone");
  remove_tree(gone);
  std::error_code error;
  std::filesystem::rename(folder, gone, error);
  if (error) throw IoError("{}: cannot rename: {}", folder.string(), error.message());
  remove_tree(gone);
}

}  // namespace

std::optional<std::filesystem::path> newest_checkpoint(const std::filesystem::path& out) {
  const auto sets = named_sets(out / "checkpoints");
  for (auto set = sets.rbegin(); set != sets.rend(); ++set) {
    if (is_complete(set->second, set->first)) return set->second;
  }
  return std::nullopt;
}

std::vector<std::filesystem::path> named_checkpoints(const std::filesystem::path& out) {
  std::vector<std::filesystem::path> folders;
  for (const auto& [step, folder] : named_sets(out / "checkpoints")) folders.push_back(folder);
  return folders;
}

std::string latest_name(const std::filesystem::path& out) {
  std::error_code error;
  const auto name = std::filesystem::read_symlink(out / "checkpoints" / "latest", error);
  return error ? "" : name.string();
}

std::vector<std::filesystem::path> list_checkpoints(const std::filesystem::path& out) {
  std::vector<std::filesystem::path> complete;
  for (const auto& [step, folder] : named_sets(out / "checkpoints")) {
    if (is_complete(folder, step)) complete.push_back(folder);
  }
  return complete;
}

void rotate_checkpoints(const std::filesystem::path& out, int64_t keep_last, int64_t keep_every,
                        const std::string& run, int64_t current_step) {
  SHARDRUN_CHECK(keep_last >= 0 && keep_every >= 0, "got keep_last {}, keep_every {}", keep_last,
                 keep_every);
  const std::filesystem::path parent = out / "checkpoints";
  remove_leftovers(parent);
  if (keep_last == 0) return;
  auto sets = named_sets(parent);
  std::erase_if(sets, [&](const auto& set) {
    return (current_step >= 0 && set.first > current_step) ||
           std::filesystem::is_symlink(set.second) || !is_complete(set.second, set.first) ||
           read_manifest(set.second).state().run() != run;
  });
  const auto count = static_cast<int64_t>(sets.size());
  for (int64_t i = 0; i < count - keep_last; ++i) {
    const auto& [step, folder] = sets[static_cast<size_t>(i)];
    if (keep_every == 0 || step % keep_every != 0) remove_set(folder);
  }
}

void probe_checkpoints(const std::filesystem::path& out, int64_t bytes, int rank, int ranks,
                       FunctionRef<void(FunctionRef<void()>)> on_all_ranks) {
  const std::filesystem::path parent = out / "checkpoints";
  const auto probe = [&](int r) { return parent / fmt::format(".probe.{}", r); };
  const auto refuse = [&](const std::string& why) {
    throw CannotCreateError("{}: checkpoints could not be saved here: {}", parent.string(), why);
  };
  on_all_ranks([&] {
    if (rank != 0) return;
    std::error_code error;
    // Before anything is made: a run that is refused leaves nothing behind.
    std::filesystem::path there = std::filesystem::absolute(parent, error);
    while (!std::filesystem::exists(there, error) && there.has_relative_path()) {
      there = there.parent_path();
    }
    struct statvfs status;
    const bool told = ::statvfs(there.c_str(), &status) == 0;
    const double free = static_cast<double>(status.f_bavail) * static_cast<double>(status.f_frsize);
    if (told && status.f_blocks > 0 && free < static_cast<double>(bytes)) {
      refuse(fmt::format("a set takes {} bytes, {:.0f} are free", bytes, free));
    }
    std::filesystem::create_directories(parent, error);
    if (error) refuse(error.message());
  });
  on_all_ranks([&] {
    try {
      std::filesystem::path fresh = probe(rank);
      fresh += ".tmp";
      remove_tree(fresh);
      remove_tree(probe(rank));
      OutputFile file = OutputFile::create(fresh);
      const std::vector<std::byte> content(4096);
      file.write(content);
      file.finish();
      replace_folder(fresh, probe(rank));
    } catch (const IoError& error) {
      refuse(error.what());
    }
  });
  on_all_ranks([&] {
    for (const int r : {0, (rank + 1) % ranks}) {
      std::error_code error;
      if (!std::filesystem::exists(probe(r), error)) {
        refuse(fmt::format("rank {} does not see the file of rank {}: not on a file system that all "
                           "ranks share",
                           rank, r));
      }
    }
  });
  on_all_ranks([&] {
    std::error_code ignored;
    std::filesystem::remove(probe(rank), ignored);
  });
}

}  // namespace shardrun
