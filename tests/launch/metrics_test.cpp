// metrics.jsonl reads back to the same bits, goes on after a resume, and progress is readable.
#include "launch/metrics/metrics.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>

#include "launch/metrics/progress.h"
#include "tests/launch/data_files.h"
#include "tests/launch/expect_error.h"

namespace shardrun {
namespace {

TEST(Metrics, NumbersReadBackToTheSameBits) {
  std::mt19937_64 random(5);
  for (int trial = 0; trial < 5000; ++trial) {
    StepMetrics m;
    m.loss = trial == 0 ? -0.0 : std::bit_cast<double>(random());
    m.grad_norm = std::bit_cast<float>(static_cast<uint32_t>(random()));
    m.loss_scale = std::ldexp(1.0, static_cast<int>(random() % 40));
    m.step = static_cast<int64_t>(random() >> 1);
    const auto object = nlohmann::json::parse(to_json(m));
    const auto same = [&](const char* name, double value) {
      if (!std::isfinite(value)) {
        EXPECT_TRUE(object[name].is_null()) << name;
        return;
      }
      EXPECT_EQ(std::bit_cast<uint64_t>(object[name].get<double>()), std::bit_cast<uint64_t>(value))
          << to_json(m);
    };
    same("loss", m.loss);
    same("grad_norm", m.grad_norm);
    same("loss_scale", m.loss_scale);
    EXPECT_EQ(object["step"].get<int64_t>(), m.step);
  }
}

TEST(Metrics, HasTheFields) {
  StepMetrics m;
  const auto object = nlohmann::json::parse(to_json(m));
  for (const char* name :
       {"step", "applied_steps", "loss", "grad_norm", "lr", "loss_scale", "skipped", "tokens",
        "tokens_per_s", "step_ms", "mfu", "comm_exposed_ms", "mem_bytes"}) {
    EXPECT_TRUE(object.contains(name)) << name;
  }
  EXPECT_EQ(object.size(), 13u);
  EXPECT_TRUE(object["loss"].is_null());
  EXPECT_FALSE(object["skipped"].get<bool>());
  m.val_loss = 1.5;
  EXPECT_EQ(nlohmann::json::parse(to_json(m))["val_loss"].get<double>(), 1.5);
}

TEST(Metrics, GoesOnAfterAResume) {
  const TempDir dir("metrics");
  const std::string path = dir / "metrics.jsonl";
  const auto write = [&](int64_t after, std::vector<int64_t> steps) {
    MetricsWriter writer(path, after);
    for (int64_t step : steps) {
      StepMetrics m;
      m.step = step;
      writer.write(m);
    }
  };
  const auto steps = [&] {
    std::vector<int64_t> result;
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);) {
      result.push_back(nlohmann::json::parse(line)["step"].get<int64_t>());
    }
    return result;
  };
  using Steps = std::vector<int64_t>;
  write(0, {1, 2, 3, 4});
  std::ofstream(path, std::ios::app) << R"({"step": 2, "lo)";
  write(2, {3});
  EXPECT_EQ(steps(), (Steps{1, 2, 3}));
  write(0, {1});
  EXPECT_EQ(steps(), Steps{1});
  expect_error(ExitCode::cannot_create, {"/nowhere"}, [] { MetricsWriter("/nowhere/m.jsonl", 0); });
}

StepMetrics sample(int64_t step) {
  StepMetrics m;
  m.step = step;
  m.loss = 3.25;
  m.grad_norm = 1.5;
  m.lr = 1e-3;
  m.tokens_per_s = 12345;
  m.step_ms = 1000;
  return m;
}

TEST(Progress, Line) {
  StepMetrics m = sample(12);
  EXPECT_EQ(progress_line(m, 100, 3723),
            "step 12/100  loss 3.2500  norm 1.5  lr 0.001  12.3k tok/s  ETA 1:02:03");
  m.loss_scale = 65536;
  m.skipped = true;
  m.val_loss = 2;
  m.tokens_per_s = kNotMeasured;
  EXPECT_EQ(
      progress_line(m, 100, -1),
      "step 12/100  loss 3.2500  norm 1.5  lr 0.001  scale 65536  skipped  val 2.0000  - tok/s");
}

std::string shown(bool terminal) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* out = open_memstream(&text, &size);
  {
    Progress progress(out, terminal, 0, 6, 2);
    for (int64_t step = 1; step <= 5; ++step) progress.step(sample(step));
    progress.message("saved");
    progress.step(sample(6));
  }
  std::fclose(out);
  std::string result(text, size);
  std::free(text);
  return result;
}

TEST(Progress, PlainLinesElsewhere) {
  const std::string text = shown(false);
  EXPECT_EQ(text.find('\r'), std::string::npos);
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 5);  // steps 1, 2, 4, 6 and the message
  EXPECT_NE(text.find("step 4/6"), std::string::npos);
  EXPECT_NE(text.find("ETA 0:02"), std::string::npos);
  EXPECT_EQ(text.find("step 5/6"), std::string::npos);
}

TEST(Progress, ALiveLineOnATerminal) {
  const std::string text = shown(true);
  EXPECT_NE(text.find("\r\x1b[Kstep 4/6"), std::string::npos);
  EXPECT_NE(text.find("\r\x1b[Ksaved\n"), std::string::npos);
  EXPECT_EQ(text.back(), '\n');
}

}  // namespace
}  // namespace shardrun
