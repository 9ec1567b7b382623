// Which sets a run has: finding the newest complete one, and removing old ones.
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

std::vector<std::filesystem::path> list_checkpoints(const std::filesystem::path& out) {
  std::vector<std::filesystem::path> complete;
  for (const auto& [step, folder] : named_sets(out / "checkpoints")) {
    if (is_complete(folder, step)) complete.push_back(folder);
  }
  return complete;
}

void rotate_checkpoints(const std::filesystem::path& out, int64_t keep_last, int64_t keep_every,
                        int64_t current_step) {
  SHARDRUN_CHECK(keep_last >= 0 && keep_every >= 0, "got keep_last {}, keep_every {}", keep_last,
                 keep_every);
  const std::filesystem::path parent = out / "checkpoints";
  remove_leftovers(parent);
  if (keep_last == 0) return;
  auto sets = named_sets(parent);
  std::erase_if(sets, [&](const auto& set) {
    return (current_step >= 0 && set.first > current_step) ||
           std::filesystem::is_symlink(set.second) || !is_complete(set.second, set.first);
  });
  const auto count = static_cast<int64_t>(sets.size());
  for (int64_t i = 0; i < count - keep_last; ++i) {
    const auto& [step, folder] = sets[static_cast<size_t>(i)];
    if (keep_every == 0 || step % keep_every != 0) remove_set(folder);
  }
}

}  // namespace shardrun
