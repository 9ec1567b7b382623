// `shardrun checkpoint ls | verify | hash | export | import`, on one process.
#include <cstdio>

#include "launch/checkpoint/hugging_face.h"
#include "launch/commands.h"
#include "launch/train/job.h"
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

// "5GB", "300MB", "1048576": bytes, in the powers of 1000 that Hugging Face counts in.
static int64_t parse_bytes(const std::string& text) {
  const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  const std::string unit = text.substr(digits);
  int64_t factor = unit.empty() ? 1 : 0;
  for (const auto& [name, value] :
       {std::pair<const char*, int64_t>{"KB", 1000}, {"MB", 1000'000}, {"GB", 1000'000'000}}) {
    if (unit == name) factor = value;
  }
  if (digits == 0 || digits > 9 || factor == 0 || std::stoll(text) == 0) {
    throw UsageError("--max-shard-size: got '{}', wanted a size as 5GB or 300MB", text);
  }
  return std::stoll(text) * factor;
}

// The tokenizer that a run was trained with, as a Hugging Face folder names its files.
static std::vector<std::pair<std::filesystem::path, std::string>> tokenizer_of(
    const std::string& tokenizer) {
  std::vector<std::pair<std::filesystem::path, std::string>> files;
  if (!tokenizer.starts_with("gpt2:")) return files;
  const std::filesystem::path dir = tokenizer.substr(5);
  std::error_code error;
  if (std::filesystem::exists(dir / "encoder.json", error)) {
    return {{dir / "encoder.json", "vocab.json"}, {dir / "vocab.bpe", "merges.txt"}};
  }
  for (const auto& file : tokenizer_files_in(dir)) files.emplace_back(file, file.filename());
  return files;
}

static int export_set(const std::vector<std::string>& words) {
  ExportOptions options;
  std::vector<std::string> operands;
  for (size_t i = 1; i < words.size(); ++i) {
    std::string name = words[i], value;
    const size_t equals = name.find('=');
    if (!name.starts_with("--")) {
      operands.push_back(name);
      continue;
    }
    if (equals != std::string::npos) {
      value = name.substr(equals + 1);
      name.resize(equals);
    } else if (++i < words.size()) {
      value = words[i];
    }
    if (name == "--dtype" || name == "--precision") {
      if (value != "fp32" && value != "bf16" && value != "fp16") {
        throw UsageError("--dtype: got '{}', wanted fp32, bf16 or fp16", value);
      }
      options.dtype = value;
    } else if (name == "--max-shard-size") {
      options.shard_bytes = parse_bytes(value);
    } else {
      throw UsageError("checkpoint export: got '{}', wanted --dtype or --max-shard-size", name);
    }
  }
  if (operands.size() != 2) {
    throw UsageError("checkpoint export: got {} folders, wanted CHECKPOINT and a new DIR",
                     operands.size());
  }
  CheckpointReader reader = CheckpointReader::open(operands[0]);
  const Config trained = parse_textproto(reader.state().config_text, reader.folder().string());
  const GptConfig model = gpt_config(trained, 1);
  const auto tokenizer = tokenizer_of(trained.tokenizer());
  export_gpt2(operands[1], reader, model, options, tokenizer);
  std::printf("%s: step %lld in %s%s%s\n", operands[1].c_str(),
              static_cast<long long>(reader.state().step), options.dtype.c_str(),
              model.bias ? "" : ", zeros for the biases that the model lacks",
              tokenizer.empty() ? ", no tokenizer files" : "");
  return 0;
}

int run_checkpoint(const std::vector<std::string>& words) {
  const std::string usage =
      "shardrun checkpoint ls | verify | hash DIR, export CHECKPOINT DIR [--dtype fp32|bf16|fp16] "
      "[--max-shard-size 5GB], import DIR OUT";
  if (words.size() == 1 && (words[0] == "--help" || words[0] == "-h")) {
    std::printf("usage: %s\n\nexport and import: Hugging Face folders of GPT-2\n", usage.c_str());
    return 0;
  }
  if (!words.empty() && words[0] == "export") return export_set(words);
  if (words.size() == 3 && words[0] == "import") {
    const std::string set = import_gpt2(words[1], words[2]);
    std::printf("%s: start from it by train --init-from %s\n", set.c_str(), words[2].c_str());
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
  throw UsageError("checkpoint: got '{}', wanted: {}", words[0], usage);
}

}  // namespace shardrun
