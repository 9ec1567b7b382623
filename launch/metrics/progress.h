// What a person sees of a run: on a terminal one line that is rewritten, elsewhere (a log file, a
// pipe) plain lines. Fed by the reporting rank after each step.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "launch/metrics/metrics.h"

namespace shardrun {

class Progress {
 public:
  // `first_step`: steps done before this run; `log_every`: steps between lines.
  Progress(std::FILE* out, bool terminal, int64_t first_step, int64_t steps, int64_t log_every);
  // Closes the live line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const StepMetrics& metrics);
  // A line that stays, above the live one.
  void message(const std::string& text);

 private:
  std::FILE* out_;
  bool terminal_;
  bool live_ = false;  // a line without its newline stands on the terminal
  int64_t first_step_, steps_, log_every_;
  double mean_step_ms_ = 0;
};

// Whether a person's terminal is where this process's standard output ends. mpirun gives its ranks
// pseudo-terminals whatever its own output is.
bool stdout_is_terminal();

// "step 12/100  loss 3.2101  norm 1.31  lr 0.001  scale 65536  12.3k tok/s  ETA 1:02:03".
// `seconds_left` < 0 hides the ETA; the scale is shown where it is not 1.
std::string progress_line(const StepMetrics& metrics, int64_t steps, double seconds_left);

}  // namespace shardrun
