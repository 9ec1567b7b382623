// `shardrun slurm-script`: prints a batch script for sbatch. The scripts of this folder are what it
// prints; a test holds them to it, so that there is one text to keep.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iterator>

#include "launch/commands.h"
#include "launch/config/config.h"
#include "runtime/error.h"

namespace shardrun {
namespace {

// @NAME@ is filled in; a line that begins with @if NAME@ is left out where NAME is empty.
constexpr std::string_view kTemplate = R"bash(#!/bin/bash
# @what@: sbatch SCRIPT@usage@
# Printed by: shardrun slurm-script@flags@
#SBATCH --job-name=@job-name@
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=@tasks@
#SBATCH --cpus-per-task=@cpus@
@if gpus@#SBATCH --gpus-per-node=@gpus@
@if array@#SBATCH --array=@array@
#SBATCH --time=@time@
# Two minutes before the end every rank is told: they stop after the same step, save, leave with 75.
#SBATCH --signal=USR1@120
# A job that is queued again goes on writing where it was.
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --output=@log@

# ---- Modules: the MPI must be the one that shardrun was built with. Yours, for instance:
# modules=(gcc/12 openmpi/4.1 cuda/12.4)
modules=(@modules@)
if [ ${#modules[@]} -gt 0 ]; then
  module purge
  module load "${modules[@]}"
fi

@if gpus@# ---- NCCL and UCX find their way on most clusters. Where they do not:
@if gpus@# export NCCL_DEBUG=INFO               # prints what is chosen
@if gpus@# export NCCL_SOCKET_IFNAME=ib0        # the interface for the first contact
@if gpus@# export NCCL_IB_HCA=mlx5              # the InfiniBand adapters
@if gpus@# export UCX_NET_DEVICES=mlx5_0:1      # the same for MPI over UCX
@if gpus@# export OMPI_MCA_pml=ucx              # no silent fall-back to TCP

# What shardrun is to do is in the words after this script's name@else@.
@if words@[ $# -gt 0 ] || set -- @words@
@if no words@if [ $# -eq 0 ]; then
@if no words@  echo "usage: sbatch SCRIPT@usage@" >&2
@if no words@  exit 64
@if no words@fi
@if array@# Each member has its own folder and seed.
@if array@set -- "$@" --out "${OUT:-out}/$SLURM_ARRAY_TASK_ID" --seed "$SLURM_ARRAY_TASK_ID"

srun --mpi=pmix --gpu-bind=none --cpu-bind=cores --kill-on-bad-exit=1 \
  --cpus-per-task="$SLURM_CPUS_PER_TASK" "${SHARDRUN:-shardrun}" "$@"
code=$?

# 75: a checkpoint is written, run me again. A cancelled job saved, too, but stays cancelled.
job=@job@
if [ "$code" -eq 75 ]; then
  case "$(scontrol --oneliner show job "$job")" in
    *" JobState=CANCELLED"*) echo "cancelled; the checkpoint is kept" ;;
    *) scontrol requeue "$job" || exit ;;
  esac
fi
exit "$code"
)bash";

struct Options {
  int64_t nodes = 1, gpus = 0, tasks = 0, cpus = 0;
  std::string time = "01:00:00", array, name = "shardrun";
  std::vector<std::string> modules;
};

// As bash reads it back to the same word.
std::string quoted(const std::string& word) {
  const bool plain =
      !word.empty() &&
      word.find_first_not_of(
          "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:=,+-") == word.npos;
  if (plain) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

std::string quoted(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + quoted(word);
  return text;
}

using Values = std::vector<std::pair<std::string, std::string>>;

std::string filled(std::string_view line, const Values& values) {
  std::string text;
  while (!line.empty()) {
    const auto value = std::ranges::find_if(
        values, [&](const auto& each) { return line.starts_with("@" + each.first + "@"); });
    if (value == values.end()) {
      text += line.front();
      line.remove_prefix(1);
    } else {
      text += value->second;
      line.remove_prefix(value->first.size() + 2);
    }
  }
  return text;
}

std::string filled_template(const Values& values) {
  std::string text;
  std::string_view rest = kTemplate;
  while (!rest.empty()) {
    const size_t end = rest.find('\n') + 1;
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(end);
    const bool given = std::ranges::all_of(values, [&](const auto& each) {
      const std::string condition = "@if " + each.first + "@";
      if (!line.starts_with(condition)) return true;
      line.remove_prefix(condition.size());
      return !each.second.empty();
    });
    if (given) text += filled(line, values);
  }
  return text;
}

std::string what(const Options& options) {
  const std::string gpus =
      options.gpus == 0 ? fmt::format("{} rank{}", options.tasks, options.tasks == 1 ? "" : "s")
                        : fmt::format("{} GPU{}", options.gpus, options.gpus == 1 ? "" : "s");
  const std::string node = options.nodes == 1
                               ? fmt::format("One node with {}", gpus)
                               : fmt::format("{} nodes with {} each", options.nodes, gpus);
  return (options.array.empty() ? "" : "Many runs, each: ") + node +
         (options.gpus > 0 ? ", a rank for each" : "");
}

void require_slurm_word(const char* flag, const std::string& text, const char* allowed,
                        const char* wanted) {
  if (!text.empty() && text.find_first_not_of(allowed) == text.npos) return;
  throw UsageError("slurm-script: --{}: got '{}', wanted {}", flag, text, wanted);
}

// For the words after `shardrun slurm-script`.
std::string slurm_script(std::span<const std::string> words) {
  const auto dashes = std::ranges::find(words, "--");
  // CLI11 takes the last word first.
  std::vector<std::string> flags(std::make_reverse_iterator(dashes),
                                 std::make_reverse_iterator(words.begin()));
  std::vector<std::string> command(dashes == words.end() ? dashes : dashes + 1, words.end());

  Options options;
  CLI::App app(
      "prints a batch script: shardrun slurm-script [FLAGS] [-- SUBCOMMAND...] >job.sbatch\n"
      "What the job does is given after `--`, or as words after the script's name to sbatch",
      "shardrun slurm-script");
  app.allow_extras();
  const CLI::Range positive(int64_t{1}, int64_t{1} << 30);
  app.add_option("--nodes,-N", options.nodes, "nodes [1]")->check(positive);
  app.add_option("--gpus-per-node", options.gpus, "GPUs of a node, each with a rank [none]")
      ->check(positive);
  app.add_option("--tasks-per-node", options.tasks, "ranks of a node [its GPUs, or 1]")
      ->check(positive);
  app.add_option("--cpus-per-task", options.cpus, "cores of a rank [8 with GPUs, else 1]")
      ->check(positive);
  app.add_option("--time", options.time, "as sbatch takes it [01:00:00]");
  app.add_option("--array", options.array, "as sbatch takes it, such as 0-9%4: many runs [none]");
  app.add_option("--job-name", options.name, "[shardrun]");
  app.add_option("--module", options.modules, "a module to load; may be given again");
  try {
    app.parse(std::vector<std::string>(flags));
  } catch (const CLI::CallForHelp&) {
    return app.help();
  } catch (const CLI::ParseError& error) {
    throw UsageError("slurm-script: {}", error.what());
  }
  if (const std::vector<std::string> unknown = app.remaining(); !unknown.empty()) {
    const std::vector<std::string> names{"--nodes",         "--gpus-per-node", "--tasks-per-node",
                                         "--cpus-per-task", "--time",          "--array",
                                         "--job-name",      "--module"};
    throw UsageError(
        "slurm-script: got '{}'; the nearest flag is {}, and the job's words come after --",
        unknown[0], nearest_name(unknown[0], names));
  }
  require_slurm_word("time", options.time, "0123456789:-", "a time as 04:00:00 or 1-12:00:00");
  if (!options.array.empty()) {
    require_slurm_word("array", options.array, "0123456789,-:%", "members as 0-9%4");
  }
  require_slurm_word("job-name", options.name,
                     "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-",
                     "letters, digits, and _ . -");
  if (options.tasks == 0) options.tasks = options.gpus > 0 ? options.gpus : 1;
  if (options.gpus > 0 && options.tasks != options.gpus) {
    throw UsageError(
        "slurm-script: --tasks-per-node {}: got {} GPUs per node, wanted a rank for each",
        options.tasks, options.gpus);
  }
  if (options.cpus == 0) options.cpus = options.gpus > 0 ? 8 : 1;

  const bool words_given = !command.empty(), array = !options.array.empty();
  std::vector<std::string> printed(words.begin(), words.end());
  return filled_template({
      {"what", what(options)},
      {"usage", words_given ? ""
                : array     ? " train --data FILE ..."
                            : " train --data FILE --out OUT ..."},
      {"flags", printed.empty() ? "" : " " + quoted(printed)},
      {"job-name", options.name},
      {"nodes", std::to_string(options.nodes)},
      {"tasks", std::to_string(options.tasks)},
      {"cpus", std::to_string(options.cpus)},
      {"gpus", options.gpus > 0 ? std::to_string(options.gpus) : ""},
      {"array", options.array},
      {"time", options.time},
      {"log", array ? "%x-%A_%a.log" : "%x-%j.log"},
      {"modules", quoted(options.modules)},
      {"words", quoted(command)},
      {"else", words_given ? ", or else here" : ""},
      {"no words", words_given ? "" : "yes"},
      {"job", array ? "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" : "$SLURM_JOB_ID"},
  });
}

}  // namespace

int run_slurm_script(const std::vector<std::string>& words) {
  std::fputs(slurm_script(words).c_str(), stdout);
  return 0;
}

}  // namespace shardrun
