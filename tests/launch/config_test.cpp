// The command line: every name, every alias, what wrong input is answered with, and that a config
// written is a config read.
#include "launch/config/config.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>

#include "tests/launch/expect_error.h"

namespace shardrun {
namespace {

Config parse(const std::vector<std::string>& words) {
  return parse_config(words);
}

std::string value_of(const Config& config, const std::string& name) {
  const auto* field = Config::descriptor()->FindFieldByName(name);
  EXPECT_NE(field, nullptr) << name;
  EXPECT_TRUE(config.GetReflection()->HasField(config, field)) << name;
  switch (field->cpp_type()) {
    case google::protobuf::FieldDescriptor::CPPTYPE_STRING:
      return config.GetReflection()->GetString(config, field);
    case google::protobuf::FieldDescriptor::CPPTYPE_BOOL:
      return config.GetReflection()->GetBool(config, field) ? "true" : "false";
    case google::protobuf::FieldDescriptor::CPPTYPE_INT64:
      return fmt::to_string(config.GetReflection()->GetInt64(config, field));
    default:
      return fmt::to_string(config.GetReflection()->GetDouble(config, field));
  }
}

std::string temp_file(const std::string& name, const std::string& text) {
  const auto path = std::filesystem::temp_directory_path() /
                    fmt::format("shardrun_config_test_{}_{}", getpid(), name);
  std::ofstream(path, std::ios::binary) << text;
  return path.string();
}

TEST(Config, EveryAliasMeansItsFlag) {
  const std::vector<std::array<std::string, 4>> table = {
      {"dtype", "bf16", "precision", "bf16"},
      {"mixed-precision", "fp16", "precision", "fp16"},
      {"zero-stage", "2", "zero", "2"},
      {"sharding", "full-shard", "zero", "3"},
      {"micro-batch-size", "3", "micro_batch", "3"},
      {"device-batch-size", "3", "micro_batch", "3"},
      {"per-device-train-batch-size", "3", "micro_batch", "3"},
      {"global-batch-size", "3", "global_batch", "3"},
      {"batch-size", "3", "global_batch", "3"},
      {"gradient-accumulation-steps", "3", "grad_accum", "3"},
      {"accumulate-grad-batches", "3", "grad_accum", "3"},
      {"block-size", "3", "seq_len", "3"},
      {"seq-length", "3", "seq_len", "3"},
      {"max-seq-len", "3", "seq_len", "3"},
      {"max-steps", "3", "steps", "3"},
      {"max-iters", "3", "steps", "3"},
      {"train-iters", "3", "steps", "3"},
      {"num-iterations", "3", "steps", "3"},
      {"learning-rate", "0.5", "lr", "0.5"},
      {"warmup-steps", "3", "warmup", "3"},
      {"warmup-iters", "3", "warmup", "3"},
      {"max-norm", "0.5", "grad_clip", "0.5"},
      {"clip-grad", "0.5", "grad_clip", "0.5"},
      {"gradient-clip-val", "0.5", "grad_clip", "0.5"},
      {"eval-interval", "3", "eval_every", "3"},
      {"eval-iters", "3", "eval_steps", "3"},
      {"eval-steps", "all", "eval_steps", "-1"},
      {"save-interval", "3", "save_every", "3"},
      {"keep-interval", "3", "keep_every", "3"},
      {"log-interval", "3", "log_every", "3"},
      {"save-total-limit", "3", "keep_last", "3"},
      {"out-dir", "o", "out", "o"},
      {"output-dir", "o", "out", "o"},
      {"resume-from-checkpoint", "no", "resume", "no"},
      {"load", "c", "init_from", "c"},
      {"n-layer", "3", "layers", "3"},
      {"n-head", "3", "heads", "3"},
      {"n-embd", "3", "channels", "3"},
      {"train-data", "d", "data", "d"},
      {"device-type", "cpu", "device", "cpu"},
      {"activation-checkpointing", "unit", "recompute", "unit"},
      {"gradient-checkpointing", "2", "recompute", "2"},
      {"overlap-comm", "2", "prefetch", "2"},
      {"forward-prefetch", "true", "prefetch", "1"},
      {"backward-prefetch", "0", "prefetch", "0"},
      {"fast-dev-run", "true", "dry_run", "true"},
  };
  for (const auto& [alias, written, field, value] : table) {
    std::string underscored = alias;
    std::replace(underscored.begin(), underscored.end(), '-', '_');
    EXPECT_EQ(value_of(parse({"--" + alias, written}), field), value) << alias;
    EXPECT_EQ(value_of(parse({"--" + underscored, written}), field), value) << alias;
    EXPECT_EQ(value_of(parse({"--" + alias + "=" + written}), field), value) << alias;
  }
}

TEST(Config, EveryValueAlias) {
  const std::vector<std::array<std::string, 3>> table = {
      {"precision", "32", "fp32"},
      {"precision", "32-true", "fp32"},
      {"precision", "float32", "fp32"},
      {"precision", "no", "fp32"},
      {"precision", "bf16-mixed", "bf16"},
      {"precision", "bfloat16", "bf16"},
      {"precision", "BF16", "bf16"},
      {"precision", "mixed_bfloat16", "bf16"},
      {"precision", "16", "fp16"},
      {"precision", "16-mixed", "fp16"},
      {"precision", "float16", "fp16"},
      {"precision", "mixed_float16", "fp16"},
      {"precision", "bf16-true", "bf16-true"},
      {"zero", "none", "0"},
      {"zero", "ddp", "0"},
      {"zero", "1", "1"},
      {"zero", "shard-grad-op", "2"},
      {"zero", "SHARD_GRAD_OP", "2"},
      {"zero", "full", "3"},
      {"zero", "full-shard", "3"},
      {"zero", "FULL_SHARD", "3"},
      {"zero", "fsdp", "3"},
      {"recompute", "true", "unit"},
      {"recompute", "none", "none"},
      {"resume", "true", "auto"},
      {"eval_steps", "all", "-1"},
      {"steps", "1e3", "1000"},
      {"steps", "1_000", "1000"},
      {"loss_scale_policy", "megatron", "megatron"},
  };
  for (const auto& [field, written, value] : table) {
    EXPECT_EQ(value_of(parse({"--" + field, written}), field), value) << field << ' ' << written;
  }
  EXPECT_EQ(parse({"--bf16"}).precision(), "bf16");
  EXPECT_EQ(parse({"--fp16"}).precision(), "fp16");
  EXPECT_EQ(parse({"--bf16", "true", "--steps", "2"}).precision(), "bf16");
  EXPECT_FALSE(parse({"--bf16", "false"}).has_precision());
  EXPECT_EQ(parse({"--gradient-checkpointing", "--steps", "2"}).recompute(), "unit");
  EXPECT_TRUE(parse({"--dry-run", "--steps", "2"}).dry_run());
  EXPECT_FALSE(parse({"--bias=no"}).bias());
}

TEST(Config, WrongInputIsAnsweredWithTheRightName) {
  const auto usage = [](std::initializer_list<std::string> parts, std::vector<std::string> words) {
    expect_error(ExitCode::usage, parts, [&] { parse(words); });
  };
  usage({"--stpes", "nearest is --steps"}, {"--stpes", "3"});
  usage({"--micro_bacth", "nearest is --micro-batch"}, {"--micro_bacth=3"});
  usage({"-steps", "nearest is --steps"}, {"-steps", "3"});
  usage({"--steps", "got many", "whole number"}, {"--steps", "many"});
  usage({"--steps", "got 1.5", "whole number"}, {"--steps", "1.5"});
  usage({"--steps", "got 99999999999999999999"}, {"--steps", "99999999999999999999"});
  usage({"--max-iters", "got 0", ">= 1"}, {"--max-iters", "0"});
  usage({"--lr", "got fast", "wanted a number"}, {"--lr", "fast"});
  usage({"--lr", "finite"}, {"--lr", "nan"});
  usage({"--lr", "> 0"}, {"--lr", "-1"});
  usage({"--micro-batch", "got -2", ">= 1"}, {"--micro-batch", "-2"});
  usage({"--bias", "got maybe", "true or false"}, {"--bias=maybe"});
  usage({"--steps", "wanted a value"}, {"--steps"});
  usage({"--steps", "wanted a value, got --lr"}, {"--steps", "--lr", "3"});
  usage({"16-true", "nearest is fp16"}, {"--precision", "16-true"});
  usage({"64-true", "nearest is fp32"}, {"--precision", "64-true"});
  usage({"got bf61", "nearest is bf16"}, {"--precision", "bf61"});
  usage({"got cosin", "nearest is cosine"}, {"--schedule", "cosin"});
  usage({"hybrid", "not built"}, {"--zero", "hybrid"});
  usage({"--zero", "<= 3"}, {"--zero", "4"});
  usage({"--prefetch", ">= 0"}, {"--prefetch", "-1"});
  usage({"--cuda-graph", "not built"}, {"--cuda-graph"});
  usage({"--watchdog", "not built"}, {"--watchdog", "30"});
  usage({"--trace", "not built"}, {"--trace", "t.json"});
  usage({"--shard-group", "not built"}, {"--shard-group", "node"});
  usage({"sp:x", "not built"}, {"--tokenizer", "sp:x"});
  usage({"hf:x", "not built"}, {"--tokenizer", "hf:x"});
  usage({"--tokenizer", "gpt2:DIR"}, {"--tokenizer", "gpt2"});
  usage({"got dynamc", "static:S"}, {"--loss-scale-policy", "dynamc"});
  usage({"static:0"}, {"--loss-scale-policy", "static:0"});
  usage({"--loss-scale", "one of the two"}, {"--loss-scale", "8", "--loss-scale-policy", "torch"});
  usage({"--recompute", "got sometimes"}, {"--recompute", "sometimes"});
  usage({"--comm", "thread:N"}, {"--comm", "thread"});
  usage({"--comm", "thread:0"}, {"--comm", "thread:0"});
  usage({"--max-time", "HH:MM:SS"}, {"--max-time", "1:2:3:4"});
  usage({"--min-lr", "at most"}, {"--min-lr", "1", "--lr", "0.1"});
  usage({"extra"}, {"extra"});
  usage({"--device", "cuda:N"}, {"--device", "cuda:"});
  usage({"--device", "got tpu"}, {"--device", "tpu"});
  // Whether a build has them is the run's business, not the plan's.
  EXPECT_EQ(parse({"--comm", "nccl"}).comm(), "nccl");
  EXPECT_EQ(parse({"--comm", "staged"}).comm(), "staged");
  expect_error(ExitCode::no_input, {"nowhere.json"}, [] { parse({"nowhere.json"}); });
}

TEST(Config, FlagsOverrideTheFileWhereverTheyStand) {
  const std::string file = temp_file("a.textproto", "steps: 7 precision: '16-mixed'\nlr: 0.25");
  const Config config = parse({"--steps", "9", file, "--bf16", "--steps=11"});
  EXPECT_EQ(config.steps(), 11);
  EXPECT_EQ(config.precision(), "bf16");
  EXPECT_EQ(config.lr(), 0.25);
  EXPECT_EQ(parse({file}).precision(), "fp16");
  std::remove(file.c_str());
}

TEST(Config, OperandsAndHelp) {
  const std::vector<std::string> words{"inspect", "a.bin", "--out", "x", "--", "--b"};
  const CommandLine line = parse_command_line(words);
  EXPECT_EQ(line.operands, (std::vector<std::string>{"inspect", "a.bin", "--b"}));
  EXPECT_FALSE(line.help);
  EXPECT_TRUE(parse_command_line(std::vector<std::string>{"-h"}).help);
  const std::string help = flags_help();
  const auto* schema = Config::descriptor();
  for (int i = 0; i < schema->field_count(); ++i) {
    std::string name = schema->field(i)->name();
    std::replace(name.begin(), name.end(), '_', '-');
    EXPECT_NE(help.find("--" + name), std::string::npos) << name;
    EXPECT_FALSE(schema->field(i)->options().GetExtension(flag).help().empty()) << name;
    EXPECT_FALSE(schema->field(i)->options().GetExtension(flag).group().empty()) << name;
  }
}

TEST(Config, DefaultsPassTheirOwnChecks) {
  EXPECT_NO_THROW(validate(Config::default_instance()));
  const Config filled = with_defaults(Config());
  EXPECT_EQ(parse_textproto(to_textproto(filled), "f").SerializeAsString(),
            filled.SerializeAsString());
}

TEST(Config, TextprotoErrors) {
  const auto usage = [](std::initializer_list<std::string> parts, const std::string& text) {
    expect_error(ExitCode::usage, parts, [&] { parse_textproto(text, "run.textproto"); });
  };
  usage({"run.textproto:2:", "no field stepz", "nearest is steps"}, "lr: 1\nstepz: 3");
  usage({"run.textproto:1:", "nearest is micro_batch"}, "micro_bach: 3");
  usage({"run.textproto:1:", "abc"}, "steps: 'abc'");
  usage({"run.textproto: steps", "got 0", ">= 1"}, "steps: 0");
  usage({"run.textproto: precision", "got fp8"}, "precision: 'fp8'");
  usage({"run.textproto:1:"}, "steps 3");
  usage({"run.textproto:1:"}, "{");
}

TEST(Config, Json) {
  const Config config = parse_json(
      R"({"steps": 5, "learning-rate": 0.125, "zero": "full-shard", "precision": 16, "bias": false,
          "resume": "no", "eval_steps": "all"})",
      "c.json");
  EXPECT_EQ(config.steps(), 5);
  EXPECT_EQ(config.lr(), 0.125);
  EXPECT_EQ(config.zero(), 3);
  EXPECT_EQ(config.precision(), "fp16");
  EXPECT_TRUE(config.has_bias());
  EXPECT_FALSE(config.bias());
  EXPECT_EQ(config.eval_steps(), -1);
  EXPECT_TRUE(parse_json(R"({"bf16": true})", "c").precision() == "bf16");
  const auto usage = [](std::initializer_list<std::string> parts, const std::string& text) {
    expect_error(ExitCode::usage, parts, [&] { parse_json(text, "c.json"); });
  };
  usage({"c.json: stepz", "nearest is steps"}, R"({"stepz": 5})");
  usage({"c.json: steps", "got \"5\"", "wanted a number"}, R"({"steps": "5"})");
  usage({"c.json: steps", "got true"}, R"({"steps": true})");
  usage({"c.json: steps", "got null"}, R"({"steps": null})");
  usage({"c.json: steps", "got 1.5", "whole number"}, R"({"steps": 1.5})");
  usage({"c.json: model", "got 5", "a string"}, R"({"model": 5})");
  usage({"c.json: bias", "got 1", "true or false"}, R"({"bias": 1})");
  usage({"hybrid", "not built"}, R"({"zero": "hybrid"})");
  usage({"c.json", "wanted an object"}, "[1]");
  usage({"c.json", "not JSON"}, "{");
}

TEST(Config, BatchNumbersFitOrShowTheSum) {
  const auto plan = [](const std::vector<std::string>& words, int64_t world) {
    return resolve_batch(parse(words), world);
  };
  const BatchPlan full = plan({"--micro-batch", "4", "--global-batch", "64"}, 4);
  EXPECT_EQ(full.leaves, 16);
  EXPECT_EQ(full.micro_steps, 4);
  EXPECT_EQ(plan({"--micro-batch", "4", "--global-batch", "20"}, 4).micro_steps, 2);
  EXPECT_EQ(plan({"--micro-batch", "4", "--grad-accum", "3"}, 2).global_batch, 24);
  EXPECT_EQ(plan({"--global-batch", "12"}, 2).micro_batch, 6);
  EXPECT_EQ(plan({"--global-batch", "13"}, 2).micro_batch, 1);
  for (int64_t world : {1, 2, 3, 64}) {
    EXPECT_EQ(plan({}, world).global_batch, 64);
    EXPECT_EQ(plan({"--micro-batch", "12"}, world).global_batch, 96);
  }
  expect_error(ExitCode::config,
               {"4 x grad-accum 3 x 2 ranks = 24", "global-batch 32", "grad-accum 4"}, [&] {
                 plan({"--micro-batch=4", "--grad-accum=3", "--global-batch=32"}, 2);
               });
  expect_error(ExitCode::config, {"got 30", "30 = 7 x 4 + 2"}, [&] {
    plan({"--micro-batch=4", "--global-batch=30"}, 2);
  });
}

TEST(Config, Durations) {
  EXPECT_EQ(parse_duration("01:02:03"), 3723);
  EXPECT_EQ(parse_duration("100:00:00"), 360000);
  EXPECT_EQ(parse_duration("02:03"), 123);
  EXPECT_EQ(parse_duration("90"), 90);
  for (const char* bad : {"", ":", "1:", ":1", "1:60", "1:2:3:4", "-1", "a", "1:-2", "1:60:00"}) {
    expect_error(ExitCode::usage, {"HH:MM:SS"}, [&] { parse_duration(bad); });
  }
}

// A random message of allowed values survives print and read, and so do its bits.
TEST(Config, RandomRoundTrips) {
  std::mt19937_64 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    Config config;
    const auto real = [&] {
      return std::ldexp(1 + double(random() >> 12), -int(random() % 90) - 52);
    };
    if (random() % 2) config.set_steps(1 + int64_t(random() % (1ull << 62)));
    if (random() % 2) config.set_lr(real());
    if (random() % 2) config.set_eps(real());
    if (random() % 2) config.set_weight_decay(real());
    if (random() % 2) config.set_bias(random() % 2);
    if (random() % 2) config.set_zero(int64_t(random() % 4));
    if (random() % 2) {
      std::string prompt;
      for (uint64_t i = random() % 20; i > 0; --i) prompt += char(1 + random() % 126);
      config.set_prompt(prompt);
    }
    const Config again = parse_textproto(to_textproto(config), "t");
    ASSERT_EQ(again.SerializeAsString(), config.SerializeAsString()) << to_textproto(config);
    const Config filled = with_defaults(config);
    ASSERT_EQ(parse_textproto(to_textproto(filled), "t").SerializeAsString(),
              filled.SerializeAsString());
  }
}

}  // namespace
}  // namespace shardrun
