// `shardrun checkpoint ls | verify | hash DIR`, on one process.
#include <cstdio>

#include "launch/commands.h"
#include "sharding/checkpoint/checkpoint.h"

namespace shardrun {

static int list(const std::string& dir) {
  const auto sets = list_checkpoints(dir);
  if (sets.empty()) throw NoInputError("{}: no complete checkpoint here", dir);
  for (const auto& set : sets) {
    const CheckpointReader reader = CheckpointReader::open(set);
    const CheckpointState& state = reader.state();
    std::printf("%s  step %lld, %lld applied, %lld tokens, %s, shardrun %s\n", set.c_str(),
                static_cast<long long>(state.step), static_cast<long long>(state.applied_steps),
                static_cast<long long>(state.tokens), state.precision.c_str(),
                state.writer_version.c_str());
  }
  return 0;
}

static int verify(const std::string& dir) {
  const std::vector<std::string> problems = verify_checkpoint(dir);
  for (const std::string& problem : problems) std::printf("%s\n", problem.c_str());
  if (problems.empty()) std::printf("sound\n");
  return problems.empty() ? 0 : static_cast<int>(ExitCode::data);
}

int run_checkpoint(const std::vector<std::string>& words) {
  const std::string usage = "shardrun checkpoint ls | verify | hash DIR";
  if (words.size() == 1 && (words[0] == "--help" || words[0] == "-h")) {
    std::printf("usage: %s\n", usage.c_str());
    return 0;
  }
  if (words.size() != 2) {
    throw UsageError("checkpoint: got {} words, wanted: {}", words.size(), usage);
  }
  if (words[0] == "ls") return list(words[1]);
  if (words[0] == "verify") return verify(words[1]);
  if (words[0] == "hash") {
    std::printf("%s\n", checkpoint_hash(words[1]).c_str());
    return 0;
  }
  if (words[0] == "export" || words[0] == "import") {
    throw UsageError("checkpoint {}: not built yet; {}", words[0], usage);
  }
  throw UsageError("checkpoint: got '{}', wanted: {}", words[0], usage);
}

}  // namespace shardrun
