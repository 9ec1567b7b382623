// The report: what it reads of a run's files, whole, cut or hostile, and what its page holds.
#include "launch/report/report.h"

#include <gtest/gtest.h>

#include <cmath>

#include "launch/metrics/metrics.h"
#include "launch/report/chart.h"
#include "launch/report/history.h"
#include "tests/launch/data_files.h"
#include "tests/launch/expect_error.h"

namespace shardrun {
namespace {

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(Series, ShortOnesStayAsTheyAre) {
  Series series;
  for (int64_t step = 1; step <= 512; ++step) series.add(step, static_cast<double>(step));
  ASSERT_EQ(series.buckets().size(), 512u);
  EXPECT_FALSE(series.thinned());
  EXPECT_EQ(series.buckets()[9].mean, 10);
}

TEST(Series, LongOnesKeepEverySpike) {
  constexpr int64_t kSteps = 300000;
  Series series;
  for (int64_t step = 1; step <= kSteps; ++step) {
    series.add(step, step == 123456 ? 1000.0 : step == 7 ? -50.0 : 1.0);
  }
  EXPECT_LE(series.buckets().size(), Series::kMaxBuckets);
  EXPECT_GE(series.buckets().size(), Series::kMaxBuckets / 2);
  int64_t counted = 0, last = 0;
  double low = 1, high = 1;
  for (const auto& bucket : series.buckets()) {
    counted += bucket.count;
    EXPECT_EQ(bucket.first, last + 1);
    last = bucket.last;
    low = std::min(low, bucket.low);
    high = std::max(high, bucket.high);
    EXPECT_LE(bucket.low, bucket.mean);
    EXPECT_GE(bucket.high, bucket.mean);
    if (bucket.first > 123456) {
      EXPECT_DOUBLE_EQ(bucket.mean, 1.0);
    }
  }
  EXPECT_EQ(counted, kSteps);
  EXPECT_EQ(last, kSteps);
  EXPECT_EQ(low, -50);
  EXPECT_EQ(high, 1000);
}

TEST(Series, FarApartSteps) {
  Series series;
  int64_t step = 1;
  for (int i = 0; i < 2000; ++i, step += History::kLargestStep / 2001) series.add(step, 1e308);
  EXPECT_LE(series.buckets().size(), Series::kMaxBuckets);
  EXPECT_EQ(series.buckets()[0].high, Series::kLargest);
}

TEST(Ticks, AreRoundAndFew) {
  EXPECT_EQ(round_ticks(0, 10, 5), (std::vector<double>{0, 2, 4, 6, 8, 10}));
  EXPECT_EQ(round_ticks(3, 3, 5), (std::vector<double>{3}));
  for (double span = 1e-150; span < 1e150; span *= 7.3) {
    const auto ticks = round_ticks(-span / 3, span, 5);
    EXPECT_GE(ticks.size(), 2u) << span;
    EXPECT_LE(ticks.size(), 12u) << span;
  }
  EXPECT_EQ(short_number(12500), "12.5k");
  EXPECT_EQ(short_number(0.001), "0.001");
  EXPECT_EQ(short_number(-2e6), "-2M");
}

class Report : public ::testing::Test {
 protected:
  std::string folder() const { return dir_ / ""; }
  std::string metrics() const { return dir_ / "metrics.jsonl"; }
  // A run with an fp16 look: a few skipped steps without a norm.
  void write_run(int64_t steps) const {
    MetricsWriter writer(metrics(), 0);
    for (int64_t step = 1; step <= steps; ++step) {
      StepMetrics m;
      m.step = step;
      m.skipped = step % 40 == 3;
      m.applied_steps = step - (step + 37) / 40;
      m.loss = 1.5 + 4 / std::sqrt(static_cast<double>(step));
      if (!m.skipped) m.grad_norm = 1.0 + 0.1 * static_cast<double>(step % 7);
      m.lr = 1e-3;
      m.loss_scale = 65536;
      m.tokens = step * 1024;
      m.tokens_per_s = 5e4;
      m.step_ms = 20;
      m.mem_bytes = 3 << 20;
      if (step % 20 == 0) m.val_loss = m.loss + 0.1;
      writer.write(m);
    }
  }

  TempDir dir_{"report"};
};

TEST_F(Report, ReadsWhatTheWriterWrites) {
  write_run(100);
  const History history = read_history(metrics());
  EXPECT_EQ(history.lines, 100);
  EXPECT_EQ(history.first_step, 1);
  EXPECT_EQ(history.last_step, 100);
  EXPECT_EQ(history.skipped, 3);
  EXPECT_EQ(history.skips.buckets().size(), 3u);
  EXPECT_EQ(history.grad_norm.buckets().size(), 97u);
  EXPECT_EQ(history.val_loss.buckets().size(), 5u);
  EXPECT_EQ(history.best_val_step, 100);
  EXPECT_EQ(history.tokens, 102400);
  EXPECT_DOUBLE_EQ(history.total_ms, 2000);
}

TEST_F(Report, APageThatStandsAlone) {
  write_run(100);
  dir_.write("config.textproto", "model: \"gpt-nano\"\nprecision: \"fp16\"\nsteps: 100\n");
  dir_.write("env.json", R"({"ranks": 2, "transport": "mpi", "numerics_key": "avx2 & <exact>"})");
  EXPECT_EQ(write_report(folder()), dir_ / "report.html");
  const std::string page = read_all(dir_ / "report.html");
  for (const char* part : {"gpt-nano", "fp16 on 2 ranks", "100 of 100", "avx2 &amp; &lt;exact&gt;",
                           "Gradient norm", "Learning rate", "Loss scale", "Tokens per second",
                           "validation", "skipped step", "prefers-color-scheme: dark", "2¹⁶"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
  for (const char* part :
       {"http:", "https:", "<script", "url(", "@import", "<link", "nan", "inf"}) {
    EXPECT_EQ(count(page, part), part == std::string("nan") ? count(page, "-nano") : 0) << part;
  }
  EXPECT_EQ(count(page, "<svg "), 5u);
  EXPECT_EQ(count(page, "<path class=\"skip\""), 3u);
  EXPECT_EQ(count(page, "<figure>"), count(page, "</figure>"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "report.html.tmp"));
}

TEST_F(Report, LongRunsStaySmall) {
  write_run(50000);
  const std::string page = report_page(folder());
  EXPECT_LT(page.size(), 300000u);
  EXPECT_NE(page.find("class=\"band"), std::string::npos);
}

TEST_F(Report, FewStepsOrNone) {
  expect_error(ExitCode::no_input, {"metrics.jsonl"}, [&] { report_page(folder()); });
  for (int64_t steps : {0, 1, 2}) {
    write_run(steps);
    const std::string page = report_page(folder());
    EXPECT_EQ(page.find("No step is done yet") != std::string::npos, steps == 0);
    EXPECT_EQ(count(page, "nan"), count(page, "-nano"));
    EXPECT_EQ(count(page, "<svg "), steps == 0 ? 0u : 5u);
  }
}

TEST_F(Report, ACutLastLineIsIgnored) {
  write_run(5);
  const std::string whole = read_all(metrics());
  const size_t last = whole.rfind('\n', whole.size() - 2) + 1;
  for (size_t size = last; size < whole.size(); ++size) {
    dir_.write("metrics.jsonl", whole.substr(0, size));
    EXPECT_EQ(read_history(metrics()).last_step, 4);
  }
}

TEST_F(Report, WhatIsNotANumberIsNotDrawn) {
  dir_.write("metrics.jsonl",
             "{\"step\": 1, \"loss\": null, \"grad_norm\": null, \"lr\": null}\n"
             "{\"step\": 2, \"loss\": 1e308, \"grad_norm\": -1e308, \"tokens_per_s\": 1e-320}\n"
             "{\"step\": 3, \"loss\": -1e308, \"grad_norm\": 0, \"loss_scale\": -1}\n");
  const std::string page = report_page(folder());
  EXPECT_EQ(count(page, "Nothing was measured."), 1u);  // the learning rate
  EXPECT_EQ(count(page, "inf"), 0u);
  EXPECT_EQ(count(page, "nan"), count(page, "-nano"));
}

TEST_F(Report, WrongLinesAreNamed) {
  const std::string good = "{\"step\": 1}\n";
  for (const std::string& bad :
       {std::string("x"), std::string(), std::string("[1]"), std::string("{\"step\": 1.5}"),
        std::string("{\"step\": 1}"), std::string("{\"step\": -3}"), std::string("{\"loss\": 2}"),
        std::string("{\"step\": 18446744073709551615}"),
        std::string("{\"step\": 9007199254740993}"), std::string("{\"step\": 2, \"loss\": 1e999}"),
        std::string("{\"step\": 2, \"loss\": NaN}"),
        std::string("{\"step\": 2, \"loss\": \"low\"}"),
        std::string("{\"step\": 2, \"skipped\": 1}"), std::string("{\"step\": 2, \"tokens\": -1}"),
        std::string("{\"step\": 2}\0", 12), std::string(30000, '['), std::string(70000, ' ')}) {
    dir_.write("metrics.jsonl", good + bad + "\n{\"step\": 9}\n");
    expect_error(ExitCode::data, {metrics() + ":2: "}, [&] { read_history(metrics()); });
  }
}

TEST_F(Report, OtherFilesMayBeMissingOrWrong) {
  write_run(3);
  EXPECT_NE(report_page(folder()).find("gpt-nano"), std::string::npos);
  dir_.write("env.json", "[]");
  expect_error(ExitCode::data, {"env.json"}, [&] { report_page(folder()); });
  dir_.write("env.json", R"({"ranks": [1], "host": "<b>", "threads": null})");
  EXPECT_EQ(count(report_page(folder()), "<b>"), 5u);  // the captions' own
  dir_.write("env.json", std::string(2 << 20, ' '));
  expect_error(ExitCode::data, {"env.json"}, [&] { report_page(folder()); });
}

TEST_F(Report, TextOfTheUserIsEscaped) {
  write_run(3);
  dir_.write("config.textproto", "model: \"<script>alert(1)</script>\"\ndata: \"a'b&c\"\n");
  const std::string page = report_page(folder());
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_NE(page.find("a&#39;b&amp;c"), std::string::npos);
}

}  // namespace
}  // namespace shardrun
