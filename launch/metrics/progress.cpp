#include "launch/metrics/progress.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>

namespace shardrun {
namespace {

std::string rate(double per_second) {
  if (!std::isfinite(per_second)) return "-";
  if (per_second >= 1e6) return fmt::format("{:.2f}M", per_second / 1e6);
  if (per_second >= 1e4) return fmt::format("{:.1f}k", per_second / 1e3);
  return fmt::format("{:.0f}", per_second);
}

std::string clock_time(double seconds) {
  const auto s = static_cast<int64_t>(std::min(seconds, 3.6e9));
  if (s < 3600) return fmt::format("{}:{:02}", s / 60, s % 60);
  return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

}  // namespace

bool stdout_is_terminal() {
  if (!isatty(STDOUT_FILENO)) return false;
  if (!std::getenv("OMPI_COMM_WORLD_RANK")) return true;
  // The parent is the mpirun that passes our lines on, or on another node its daemon, whose output
  // goes nowhere.
  const std::string path = fmt::format("/proc/{}/fd/1", getppid());
  const int file = open(path.c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) return false;
  const bool terminal = isatty(file) != 0;
  close(file);
  return terminal;
}

std::string progress_line(const StepMetrics& m, int64_t steps, double seconds_left) {
  std::string line = fmt::format("step {}/{}  loss {:.4f}  norm {:.3g}  lr {:.3g}", m.step, steps,
                                 m.loss, m.grad_norm, m.lr);
  if (m.loss_scale != 1) line += fmt::format("  scale {}", m.loss_scale);
  if (m.skipped) line += "  skipped";
  if (m.val_loss) line += fmt::format("  val {:.4f}", *m.val_loss);
  line += fmt::format("  {} tok/s", rate(m.tokens_per_s));
  if (seconds_left >= 0) line += fmt::format("  ETA {}", clock_time(seconds_left));
  return line;
}

Progress::Progress(std::FILE* out, bool terminal, int64_t first_step, int64_t steps,
                   int64_t log_every)
    : out_(out),
      terminal_(terminal),
      first_step_(first_step),
      steps_(steps),
      log_every_(log_every) {}

Progress::~Progress() {
  if (live_) std::fputc('\n', out_);
  std::fflush(out_);
}

void Progress::step(const StepMetrics& m) {
  // The first step of a run pays for allocation and page faults: forgotten with the second.
  if (std::isfinite(m.step_ms)) {
    const bool fresh = mean_step_ms_ == 0 || m.step == first_step_ + 2;
    mean_step_ms_ = fresh ? m.step_ms : 0.9 * mean_step_ms_ + 0.1 * m.step_ms;
  }
  const bool shown = m.step % log_every_ == 0 || m.step == steps_ || m.step == first_step_ + 1 ||
                     m.val_loss || m.skipped;
  if (!shown) return;
  const double left =
      mean_step_ms_ > 0 ? static_cast<double>(steps_ - m.step) * mean_step_ms_ / 1e3 : -1;
  const std::string line = progress_line(m, steps_, left);
  if (!terminal_) {
    fmt::print(out_, "{}\n", line);
  } else {
    // What is worth keeping stays on the screen.
    const bool stays = m.val_loss || m.skipped || m.step == steps_;
    fmt::print(out_, "\r\x1b[K{}{}", line, stays ? "\n" : "");
    live_ = !stays;
  }
  std::fflush(out_);
}

void Progress::message(const std::string& text) {
  fmt::print(out_, "{}{}\n", live_ ? "\r\x1b[K" : "", text);
  live_ = false;
  std::fflush(out_);
}

}  // namespace shardrun
