#include "launch/report/report.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "launch/commands.h"
#include "launch/report/chart.h"
#include "launch/report/history.h"
#include "launch/train/job.h"

namespace shardrun {
namespace {

namespace fs = std::filesystem;
using Rows = std::vector<std::pair<std::string, std::string>>;  // name, value; both plain text

constexpr size_t kMaxSmallFile = size_t{1} << 20;

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --page: #f7f7f5; --card: #ffffff; --ink: #1d1f23; --soft: #666b73;
  --line: #dfe1e4; --blue: #2166c9; --orange: #c8580a; --teal: #0b7d6b; --violet: #7a45b8;
  --red: #c4283c; }
@media (prefers-color-scheme: dark) { :root { --page: #131518; --card: #1c1f24; --ink: #e6e8eb;
  --soft: #9aa1ab; --line: #343941; --blue: #6ea8ff; --orange: #ffa25c; --teal: #4fd0b8;
  --violet: #c39bff; --red: #ff7b8a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 28px 20px 48px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 26px; }
h2 { margin: 28px 0 10px; font-size: 17px; }
.lead { margin: 2px 0 20px; color: var(--soft); }
.key { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr));
  gap: 16px; }
.card, figure { margin: 0; padding: 14px 18px; background: var(--card);
  border: 1px solid var(--line); border-radius: 10px; min-width: 0; }
.wide { margin-bottom: 16px; }
table { width: 100%; border-collapse: collapse; }
td { padding: 4px 0; border-top: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
tr:first-child td { border-top: 0; }
td:first-child { width: 45%; padding-right: 12px; color: var(--soft); }
td:last-child { font-variant-numeric: tabular-nums; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 18px; margin-bottom: 6px; }
figcaption span { color: var(--soft); font-size: 13px; line-height: 22px; }
figcaption i { display: inline-block; width: 16px; height: 3px; margin-right: 6px;
  vertical-align: middle; background: currentColor; }
figcaption i.skip { width: 2px; height: 11px; }
svg { display: block; width: 100%; height: auto; }
@media (max-width: 700px) { .wide figure { overflow-x: auto; } .wide svg { width: 860px; } }
svg text { fill: var(--soft); font-size: 12px; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); }
.curve { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round; }
.band { fill: currentColor; opacity: .22; } .dot { fill: currentColor; }
path.skip { stroke: currentColor; stroke-width: 1.5; }
.blue { color: var(--blue); } .orange { color: var(--orange); } .teal { color: var(--teal); }
.violet { color: var(--violet); } .skip { color: var(--red); }
.none, .note { color: var(--soft); font-size: 13px; }
pre { margin: 10px 0 0; overflow-x: auto; font: 13px/1.5 ui-monospace, monospace; }
summary { cursor: pointer; }
)";

// Empty where there is no such file.
std::string small_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::string text(kMaxSmallFile + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(in.gcount()));
  if (text.size() > kMaxSmallFile) {
    throw DataError("{}: longer than {} bytes", path.string(), kMaxSmallFile);
  }
  return text;
}

// The scalars of env.json as text.
class Environment {
 public:
  explicit Environment(const fs::path& path) {
    const std::string text = small_file(path);
    if (text.empty()) return;
    json_ = nlohmann::json::parse(text, nullptr, false);
    if (!json_.is_object()) throw DataError("{}: not a JSON object", path.string());
  }
  std::string operator[](const char* name) const {
    const auto found = json_.find(name);
    if (found == json_.end() || found->is_structured() || found->is_null()) return "";
    if (found->is_string()) return found->get<std::string>();
    return found->dump();
  }

 private:
  nlohmann::json json_ = nlohmann::json::object();
};

std::string table(const Rows& rows) {
  std::string html = "<table>\n";
  for (const auto& [name, value] : rows) {
    if (value.empty()) continue;
    html +=
        fmt::format("<tr><td>{}</td><td>{}</td></tr>\n", html_escaped(name), html_escaped(value));
  }
  return html + "</table>\n";
}

std::string text_of(const std::optional<double>& value) {
  return value ? fmt::format("{:.4f}", *value) : "";
}

std::string duration_text(double ms) {
  if (!(ms < 1e15)) return "";
  const auto s = static_cast<int64_t>(ms / 1000);
  if (s < 60) return fmt::format("{:.1f} s", ms / 1000);
  return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

Rows final_numbers(const History& h, const Config& config) {
  const double steps = static_cast<double>(h.lines);
  Rows rows{{"steps done", fmt::format("{} of {}", h.last_step, config.steps())},
            {"of these applied", fmt::format("{}", h.applied_steps)},
            {"skipped", fmt::format("{}", h.skipped)},
            {"tokens", short_number(static_cast<double>(h.tokens))},
            {"last loss", text_of(h.last_loss)},
            {"last validation loss", text_of(h.last_val_loss)}};
  if (h.best_val_loss) {
    rows.push_back({"best validation loss",
                    fmt::format("{:.4f}, at step {}", *h.best_val_loss, h.best_val_step)});
  }
  if (h.total_ms > 0) {
    rows.push_back({"time in steps", duration_text(h.total_ms)});
    rows.push_back({"mean step", fmt::format("{:.4g} ms", h.total_ms / steps)});
  }
  if (h.mem_bytes > 0) {
    rows.push_back({"memory of a rank", bytes_text(static_cast<double>(h.mem_bytes))});
  }
  return rows;
}

Rows run_rows(const Config& config, const Environment& env) {
  return {{"model", config.model()},
          {"precision", config.precision()},
          {"ranks", env["ranks"]},
          {"transport", env["transport"]},
          {"MPI", env["mpi"]},
          {"zero stage", fmt::format("{}", config.zero())},
          {"threads of a rank", env["threads"]},
          {"sequences a step",
           config.has_global_batch() ? fmt::format("{}", config.global_batch()) : ""},
          {"tokens in a sequence", config.has_seq_len() ? fmt::format("{}", config.seq_len()) : ""},
          {"data", config.data()},
          {"host", env["host"]},
          {"shardrun", env["shardrun"]},
          {"compiler", env["compiler"]}};
}

std::string charts(const History& h) {
  const auto half = [&](const char* title, const Series& series, const char* colour,
                        AxisScale scale, const Series* skips = nullptr) {
    return chart_html(
        {title, {{&series, "scale", colour}}, scale, h.first_step, h.last_step, skips});
  };
  std::string html = "<div class=\"wide\">";
  html += chart_html(
      {.title = "Loss",
       .curves = {{&h.loss, "training", "blue"}, {&h.val_loss, "validation", "orange", true}},
       .first_step = h.first_step,
       .last_step = h.last_step,
       .width = 1120,
       .height = 340});
  html += "</div>\n<div class=\"two\">\n";
  html += half("Gradient norm before clipping", h.grad_norm, "teal", AxisScale::automatic);
  html += half("Learning rate", h.lr, "violet", AxisScale::from_zero);
  html += half("Loss scale", h.loss_scale, "orange", AxisScale::log2, &h.skips);
  html += half("Tokens per second", h.tokens_per_s, "blue", AxisScale::from_zero);
  html += "</div>\n";
  if (h.loss.thinned()) {
    html +=
        "<p class=\"note\">Neighbouring steps share a point: the line is their mean, the band "
        "reaches from the lowest to the highest.</p>\n";
  }
  return html;
}

}  // namespace

std::string report_page(const std::string& out) {
  const fs::path folder = out;
  const History history = read_history((folder / "metrics.jsonl").string());
  const std::string config_text = small_file(folder / "config.textproto");
  const Config config =
      with_defaults(parse_textproto(config_text, (folder / "config.textproto").string()));
  const Environment env(folder / "env.json");

  const std::string ranks = env["ranks"];
  std::string lead = config.precision();
  if (!ranks.empty()) lead += fmt::format(" on {} rank{}", ranks, ranks == "1" ? "" : "s");
  lead += fmt::format(", {} of {} steps", history.last_step, config.steps());
  std::string html = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{0}: {1}</title>\n<style>{2}</style>\n</head>\n<body>\n<h1>{0}</h1>\n"
      "<p class=\"lead\">{1}</p>\n",
      html_escaped(config.model()), html_escaped(lead), kStyle);
  if (history.lines == 0) {
    html += "<p class=\"card wide none\">No step is done yet.</p>\n";
  } else {
    html += charts(history);
  }
  html += "<div class=\"two\">\n<section><h2>Final numbers</h2><div class=\"card\">\n";
  html += table(final_numbers(history, config));
  html += "</div></section>\n<section><h2>The run</h2><div class=\"card\">\n";
  html += table(run_rows(config, env));
  html += "</div></section>\n</div>\n";
  if (const std::string key = env["numerics_key"]; !key.empty()) {
    html += "<h2>Numerics key</h2>\n<div class=\"card key\">" + html_escaped(key) + "</div>\n";
  }
  if (!config_text.empty()) {
    html +=
        "<h2>Configuration</h2>\n<details class=\"card\"><summary>config.textproto</summary><pre>" +
        html_escaped(config_text) + "</pre></details>\n";
  }
  return html + "</body>\n</html>\n";
}

std::string write_report(const std::string& out) {
  const std::string html = report_page(out);
  const std::string path = (fs::path(out) / "report.html").string();
  // Beside it first: a reader never sees half a page.
  const std::string unfinished = path + ".tmp";
  std::FILE* file = std::fopen(unfinished.c_str(), "wbe");
  if (!file) throw CannotCreateError("{}: cannot create: {}", unfinished, std::strerror(errno));
  const bool written = std::fwrite(html.data(), 1, html.size(), file) == html.size();
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed || std::rename(unfinished.c_str(), path.c_str()) != 0) {
    const int error = errno;
    std::remove(unfinished.c_str());
    throw IoError("{}: cannot write: {}", path, std::strerror(error));
  }
  return path;
}

int run_report(const std::vector<std::string>& words) {
  const std::string usage = "shardrun report OUT";
  if (words.size() == 1 && (words[0] == "--help" || words[0] == "-h")) {
    std::printf("usage: %s\nwrites OUT/report.html from the files that train left in OUT\n",
                usage.c_str());
    return 0;
  }
  if (words.size() != 1 || words[0].starts_with('-')) {
    throw UsageError(
        "report: got {}, wanted: {}",
        words.size() == 1 ? "'" + words[0] + "'" : fmt::format("{} words", words.size()), usage);
  }
  std::printf("%s\n", write_report(words[0]).c_str());
  return 0;
}

}  // namespace shardrun
