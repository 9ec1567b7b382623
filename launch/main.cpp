// shardrun SUBCOMMAND ...: picks the subcommand, runs it on every rank, leaves with its exit code.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "launch/bench/bench.h"
#include "launch/commands.h"
#include "launch/data/data_command.h"
#include "launch/ranks.h"

namespace shardrun {
namespace {

struct Subcommand {
  const char* name;
  const char* does;
  int (*run)(const Config& config, RankContext& ranks);
  std::span<const std::string_view> hidden;  // groups of flags that have no part in it
};

constexpr std::string_view kNotTrain[] = {"Generation"};
constexpr std::string_view kNotSmoke[] = {"Model", "Numbers", "Batch",      "Optimizer",
                                          "Data",  "Output",  "Trying out", "Generation"};
constexpr std::string_view kNotGenerate[] = {"Model", "Batch", "Optimizer", "Output",
                                             "Trying out"};

constexpr std::string_view kNotDoctor[] = {"Model", "Numbers", "Batch", "Optimizer",
                                           "Data",  "Trying out", "Generation"};

constexpr Subcommand kRanked[] = {
    {"train", "trains; writes OUT/{metrics.jsonl, tb/, checkpoints/, report.html, ...}", run_train,
     kNotTrain},
    {"smoke", "trains a tiny GPT for each stage and precision; a table of passes", run_smoke,
     kNotSmoke},
    {"generate", "continues a prompt from a checkpoint", run_generate, kNotGenerate},
    {"doctor", "looks at launcher, nodes, network and --out; 69 and what to change", run_doctor,
     kNotDoctor},
};

constexpr std::string_view kNotBench[] = {"Data", "Trying out", "Generation", "Optimizer"};

void print_usage() {
  std::puts("usage: shardrun SUBCOMMAND [CONFIG.textproto] [--flag value | --flag=value]...\n");
  for (const Subcommand& sub : kRanked) std::printf("  %-14s%s\n", sub.name, sub.does);
  std::puts(
      "  plan          memory, FLOPs and traffic of a rank for any --world-size and stage\n"
      "  data          text to tokens; inspects and checks token files\n"
      "  checkpoint    ls | verify | hash | export | import: checkpoints, Hugging Face folders\n"
      "  bench         WHAT: measurements as ratios to what the machine does plainly\n"
      "  report        OUT: writes OUT/report.html, one page with the run's curves and numbers\n"
      "  slurm-script  prints a batch script for the given nodes, GPUs and time\n\n"
      "shardrun SUBCOMMAND --help lists the flags.");
}

// Messages about the command line are the same on every rank: under a launcher only the first prints.
bool prints_usage_errors() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    const char* rank = std::getenv(name);
    if (rank) return std::string(rank) == "0";
  }
  return true;
}

const Subcommand& ranked_subcommand(const std::string& name) {
  for (const Subcommand& sub : kRanked) {
    if (name == sub.name) return sub;
  }
  const std::vector<std::string> names{"train", "smoke", "generate", "plan", "data", "checkpoint",
                                       "report", "bench", "doctor", "slurm-script"};
  throw UsageError("unknown subcommand '{}'; the nearest is '{}' (--help lists all)", name,
                   nearest_name(name, names));
}

int run(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  if (words.empty() || words[0] == "--help" || words[0] == "-h" || words[0] == "help") {
    print_usage();
    return words.empty() ? static_cast<int>(ExitCode::usage) : 0;
  }
  const std::string name = words[0];
  words.erase(words.begin());
  if (name == "data") {
    data_command(words, std::cout);
    return 0;
  }
  if (name == "checkpoint") return run_checkpoint(words);
  if (name == "report") return run_report(words);
  if (name == "plan") return run_plan(words);
  if (name == "slurm-script") return run_slurm_script(words);
  CommandLine line;
  std::optional<Error> refused;
  const Subcommand* sub = nullptr;
  Subcommand bench{};
  try {
    if (name == "bench") {
      if (words.empty() || words[0].starts_with("-")) {
        std::string all;
        for (const Bench& each : benches()) {
          all += fmt::format("\n  {:<12}{}{}", each.name, each.does,
                             each.run ? "" : " (not built yet)");
        }
        if (!words.empty() && (words[0] == "--help" || words[0] == "-h")) {
          std::printf("shardrun bench WHAT [--flag value]...%s\n", all.c_str());
          return 0;
        }
        throw UsageError("bench: wanted what to measure first, such as `bench checkpoint`");
      }
      const Bench& found = find_bench(words[0]);
      bench = {found.name, found.does, found.run, kNotBench};
      sub = &bench;
      words.erase(words.begin());
    } else {
      sub = &ranked_subcommand(name);
    }
    line = parse_command_line(words);
    if (!line.operands.empty()) {
      throw UsageError("{}: got '{}', wanted flags or one CONFIG.textproto", name, line.operands[0]);
    }
  } catch (const Error& error) {
    refused = error;
  }
  if (!refused && line.help) {
    std::printf("shardrun %s: %s\n\n%s", sub->name, sub->does,
                flags_help(sub->hidden).c_str());
    return 0;
  }
  return run_on_ranks(line.config, refused, &argc, &argv,
                      [&](RankContext& ranks) { return sub->run(line.config, ranks); });
}

}  // namespace
}  // namespace shardrun

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit is an I/O error with a message, not a death
  try {
    return shardrun::run(argc, argv);
  } catch (const shardrun::Error& error) {
    if (shardrun::prints_usage_errors()) std::fprintf(stderr, "shardrun: %s\n", error.what());
    return static_cast<int>(error.code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "shardrun: internal error: %s\n", error.what());
    return static_cast<int>(shardrun::ExitCode::internal);
  }
}
