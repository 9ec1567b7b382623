// GPT-2 folders: one that Hugging Face's own program wrote gives that program's logits, at any
// number of ranks; files made by a stranger are refused with a message, whatever is in them.
#include "launch/checkpoint/hugging_face.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <random>
#include <sstream>

#include "tests/launch/expect_error.h"

namespace shardrun {
namespace {

namespace fs = std::filesystem;

// A folder that goes with the test.
class Folder {
 public:
  Folder() {
    static int count = 0;
    path_ = fs::temp_directory_path() / fmt::format("hugging_face_test.{}.{}", getpid(), count++);
    fs::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

void write_file(const fs::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// reference/gpt2, which make_gpt2_folder.py wrote.
std::string reference_weights() {
  std::string bytes;
  std::istringstream in(read_file(fs::path(SHARDRUN_REFERENCE_DIR) / "model.safetensors.hex"));
  for (std::string line; std::getline(in, line);) {
    for (size_t i = 0; i + 1 < line.size(); i += 2) {
      bytes += static_cast<char>(std::stoi(line.substr(i, 2), nullptr, 16));
    }
  }
  return bytes;
}

void write_reference(const fs::path& folder) {
  fs::copy_file(fs::path(SHARDRUN_REFERENCE_DIR) / "config.json", folder / "config.json");
  write_file(folder / "model.safetensors", reference_weights());
}

TEST(HuggingFace, AFolderOfTheirsGivesTheirLogits) {
  Folder folder;
  write_reference(folder.path());
  const GptConfig config = HuggingFaceFolder::open(folder.path()).config();
  EXPECT_EQ(config.layers, 2);
  EXPECT_EQ(config.heads, 3);
  EXPECT_EQ(config.channels, 12);
  std::ifstream golden(fs::path(SHARDRUN_REFERENCE_DIR) / "logits.txt");
  std::vector<int32_t> tokens(static_cast<size_t>(config.context));
  for (int32_t& token : tokens) golden >> token;
  std::vector<double> wanted(tokens.size() * static_cast<size_t>(config.vocabulary));
  for (double& value : wanted) golden >> value;
  ASSERT_TRUE(golden.good());

  for (const int ranks : {1, 3}) {
    run_thread_ranks(ranks, [&](Communicator& comm) {
      HuggingFaceFolder hf = HuggingFaceFolder::open(folder.path());
      const Gpt model(hf.config());
      hf.check(model);
      ThreadPool pool(1);
      Stream stream(DeviceKind::cpu, detect_isa(), &pool);
      const auto memory = make_heap_memory();
      StepOptions options;
      options.shard.world_size = ranks;
      options.seq_len = config.context;
      TrainStep step(model, options, "none", comm, *memory, stream);
      step.initialize();
      restore_parameters(step, hf);
      step.state().refresh_compute(comm, stream);
      std::vector<float> got(wanted.size());
      const int64_t T = config.context;
      step.predict(Tensor(got.data(), Dtype::fp32, {1, T, config.vocabulary}),
                   Tensor(tokens.data(), Dtype::int32, {1, T}));
      for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 2e-5) << i;
    });
  }
}

TEST(HuggingFace, AnyRangeOfAParameterIsWhatTheWholeSays) {
  Folder folder;
  // Wide enough for rows to be read in runs and for more than one block.
  const int64_t inputs = 300, outputs = 5000;
  std::vector<SafetensorsEntry> entries{{"h.0.mlp.c_fc.weight", "F32", {inputs, outputs}}};
  std::string file = safetensors_header(entries);
  std::vector<float> values(static_cast<size_t>(inputs * outputs));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  file.append(reinterpret_cast<const char*>(values.data()), values.size() * 4);
  write_file(folder.path() / "model.safetensors", file);
  fs::copy_file(fs::path(SHARDRUN_REFERENCE_DIR) / "config.json", folder.path() / "config.json");
  HuggingFaceFolder hf = HuggingFaceFolder::open(folder.path());
  const ParameterSpec spec{.name = "h.0.mlp.c_fc.weight", .shape = {outputs, inputs}};
  std::mt19937 random(3);
  std::vector<float> got;
  for (int n = 0; n < 60; ++n) {
    const auto begin = static_cast<int64_t>(random() % static_cast<uint64_t>(outputs * inputs));
    const int64_t most = std::min<int64_t>(outputs * inputs - begin, n % 8 ? 70000 : 1500000);
    const auto count = static_cast<int64_t>(random() % static_cast<uint64_t>(most + 1));
    got.assign(static_cast<size_t>(count), -1);
    hf.read(spec, begin, Tensor(got.data(), Dtype::fp32, {count}));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t o = (begin + i) / inputs, k = (begin + i) % inputs;
      ASSERT_EQ(got[static_cast<size_t>(i)], static_cast<float>(k * outputs + o))
          << begin << " " << i;
    }
  }
}

std::string with_length(const std::string& header, const std::string& data = "") {
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i));
  return length + header + data;
}

TEST(Safetensors, StrangeFilesAreRefused) {
  Folder folder;
  const fs::path path = folder.path() / "x.safetensors";
  const auto refuse = [&](const std::string& content, const std::string& part) {
    write_file(path, content);
    expect_error(ExitCode::data, {path.string(), part}, [&] { SafetensorsFile::open(path); });
  };
  const auto tensor = [](const std::string& shape, const std::string& offsets,
                         const std::string& dtype = "F32") {
    return "{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
  };
  const std::string good = tensor("[2]", "[0,8]");
  write_file(path,
             with_length("{\"__metadata__\":{\"a\":\"b\"},\"t\":" + good + "}  ", "12345678"));
  const SafetensorsFile file = SafetensorsFile::open(path);
  ASSERT_EQ(file.entries().size(), 1u);
  EXPECT_EQ(file.entries()[0].name, "t");
  EXPECT_EQ(file.entries()[0].end - file.entries()[0].begin, 8);

  refuse("", "0 bytes");
  refuse("1234567", "7 bytes");
  refuse(std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8) + "{}", "header of");
  refuse(std::string("\x00\x00\x00\x00\x00\x00\x00\x80", 8) + "{}", "header of");
  refuse(with_length("{}").substr(0, 9), "header of 2 bytes");
  refuse(with_length(""), "begin with {");
  refuse(with_length("[]"), "begin with {");
  refuse(with_length("{\"t\":" + good), "no JSON");
  refuse(with_length("{\"t\":" + good + "}{"), "no JSON");
  refuse(with_length("{\"t\":\xff\xfe}"), "no JSON");
  refuse(with_length("{" + std::string(1000000, '[')), "no JSON");
  std::string deep = "{\"t\":";
  for (int i = 0; i < 500000; ++i) deep += "{\"a\":";
  refuse(with_length(deep), "got the key `a`");
  refuse(with_length("{\"t\":" + std::string(1000000, '[')), "got an array");
  std::string dims = "{\"t\":{\"shape\":[1";
  for (int i = 0; i < 1000000; ++i) dims += ",1";
  refuse(with_length(dims), "one number more");
  refuse(with_length("{\"t\":" + good + ",\"t\":" + good + "}", "12345678"), "twice");
  refuse(with_length("{\"" + std::string(5000, 'n') + "\":" + good + "}"), "4096");
  refuse(with_length("{\"t\":7}"), "got a number");
  refuse(with_length("{\"t\":null}"), "got null");
  refuse(with_length("{\"t\":{}}"), "not all of");
  refuse(with_length("{\"t\":{\"dtype\":\"F32\",\"shape\":[]}}"), "not all of");
  refuse(with_length("{\"t\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}"), "`dtype` twice");
  refuse(with_length("{\"__metadata__\":{\"a\":{}},\"t\":" + good + "}"), "got an object");
  refuse(with_length("{\"__metadata__\":7}"), "got a number");
  refuse(with_length("{\"t\":" + tensor("[-2]", "[0,8]") + "}"), "negative");
  refuse(with_length("{\"t\":" + tensor("[2.5]", "[0,8]") + "}"), "2.5");
  refuse(with_length("{\"t\":" + tensor("[18446744073709551615]", "[0,8]") + "}"), "2^63");
  refuse(with_length("{\"t\":" + tensor("[99999999999999999999999]", "[0,8]") + "}"), "number");
  refuse(with_length("{\"t\":" + tensor("[2]", "[0,8]", "F23") + "}", "12345678"), "F23");
  refuse(with_length("{\"t\":" + tensor("[4611686018427387904,8]", "[0,8]") + "}", "12345678"),
         "overflows");
  refuse(with_length("{\"t\":" + tensor("[2]", "[0,4]") + "}", "1234"), "wanted 8 bytes");
  refuse(with_length("{\"t\":" + tensor("[2]", "[8,0]") + "}", "12345678"), "gap or an overlap");
  refuse(with_length("{\"t\":" + tensor("[2]", "[0,8]") + "}", "1234567"), "of 7");
  refuse(with_length("{\"t\":" + tensor("[2]", "[0,8]") + "}", "123456789"), "9 bytes of data");
  refuse(with_length("{\"t\":" + tensor("[2]", "[0,8]") + ",\"u\":" + tensor("[1]", "[4,8]") + "}",
                     "12345678"),
         "overlap");
  refuse(with_length("{\"t\":" + tensor("[1]", "[0,4]") + ",\"u\":" + tensor("[1]", "[8,12]") + "}",
                     "123456789012"),
         "gap");
}

// Whatever the bytes, the answer is a set of tensors or a DataError, and no crash.
TEST(Safetensors, RandomDamageIsAnErrorOrHarmless) {
  Folder folder;
  const fs::path path = folder.path() / "x.safetensors";
  const std::string sound = reference_weights();
  std::mt19937 random(9);
  int refused = 0;
  for (int n = 0; n < 600; ++n) {
    std::string content = sound;
    const size_t header = 8 + 2500;
    for (uint32_t k = 1 + random() % 3; k > 0; --k) {
      content[random() % header] = static_cast<char>(random());
    }
    if (n % 7 == 0) content.resize(random() % content.size());
    write_file(path, content);
    try {
      SafetensorsFile::open(path);
    } catch (const DataError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 450);
}

TEST(HuggingFace, OtherModelsAndDamagedFoldersAreNamed) {
  const auto refuse = [&](ExitCode code, std::initializer_list<std::string> parts,
                          FunctionRef<void(const fs::path&)> change) {
    Folder folder;
    write_reference(folder.path());
    change(folder.path());
    expect_error(code, parts, [&] {
      HuggingFaceFolder hf = HuggingFaceFolder::open(folder.path());
      const Gpt model(hf.config());
      hf.check(model);
    });
  };
  const auto replace = [](const std::string& file, const std::string& from, const std::string& to) {
    return [=](const fs::path& folder) {
      std::string text = read_file(folder / file);
      const size_t at = text.find(from);
      ASSERT_NE(at, std::string::npos) << from;
      write_file(folder / file, text.replace(at, from.size(), to));
    };
  };
  const std::string config = "config.json", weights = "model.safetensors";
  refuse(ExitCode::no_input, {"config.json"},
         [](const fs::path& f) { fs::remove(f / "config.json"); });
  refuse(ExitCode::no_input, {"neither model.safetensors"},
         [](const fs::path& f) { fs::remove(f / "model.safetensors"); });
  refuse(ExitCode::no_input, {"pytorch_model.bin is a program"},
         [](const fs::path& f) { fs::rename(f / "model.safetensors", f / "pytorch_model.bin"); });
  refuse(ExitCode::data, {"model_type", "gpt3"}, replace(config, "gpt2", "gpt3"));
  refuse(ExitCode::data, {"activation_function", "relu"}, replace(config, "gelu_new", "relu"));
  refuse(ExitCode::data, {"layer_norm_epsilon"}, replace(config, "1e-05", "1e-06"));
  refuse(ExitCode::data, {"n_inner"}, replace(config, "\"n_inner\": null", "\"n_inner\": 7"));
  refuse(ExitCode::data, {"n_layer", "missing"}, replace(config, "n_layer", "n_lager"));
  refuse(ExitCode::data, {"n_layer", "-2"}, replace(config, "\"n_layer\": 2", "\"n_layer\": -2"));
  refuse(ExitCode::data, {"config.json", "not a JSON object"}, replace(config, "{", ""));
  refuse(ExitCode::data, {"deeper"}, [](const fs::path& f) {
    write_file(f / "config.json", "{\"a\":" + std::string(100000, '['));
  });
  refuse(ExitCode::data, {"missing", "h.2.ln_1.weight", "and 7 more"},
         replace(config, "\"n_layer\": 2", "\"n_layer\": 3"));
  refuse(ExitCode::data, {"not of the model", "h.1.attn.c_attn.bias", "and 7 more"},
         replace(config, "\"n_layer\": 2", "\"n_layer\": 1"));
  refuse(ExitCode::data, {"wte.weight: got [19, 12], wanted [20, 12]"},
         replace(config, "\"vocab_size\": 19", "\"vocab_size\": 20"));
  refuse(ExitCode::data, {"missing: h.0.ln_1.bias", "not of the model: h.0.ln_9.bias"},
         replace(weights, "h.0.ln_1.bias", "h.0.ln_9.bias"));
  refuse(ExitCode::data, {"ln_f.bias: got I32"},
         replace(weights, "ln_f.bias\":{\"dtype\":\"F32\"", "ln_f.bias\":{\"dtype\":\"I32\""));
  refuse(ExitCode::data, {"cut off", "model.safetensors"}, [](const fs::path& f) {
    fs::resize_file(f / "model.safetensors", fs::file_size(f / "model.safetensors") + 1);
  });
  // An index must be right about every tensor, and stay in its folder.
  const auto index = [&](const std::string& map) {
    return [=](const fs::path& f) {
      write_file(f / "model.safetensors.index.json", "{\"weight_map\":{" + map + "}}");
    };
  };
  refuse(ExitCode::data, {"weight_map"}, index(""));
  refuse(ExitCode::data, {"wanted a name in the folder"}, index("\"a\":\"../model.safetensors\""));
  refuse(ExitCode::data, {"wanted a name in the folder"}, index("\"a\":7"));
  refuse(ExitCode::no_input, {"other.safetensors"}, index("\"a\":\"other.safetensors\""));
  refuse(ExitCode::data, {"does not say"}, index("\"a\":\"model.safetensors\""));
}

// A shorter context takes the first positions; any other size must fit.
TEST(HuggingFace, AShorterContextFits) {
  Folder folder;
  write_reference(folder.path());
  HuggingFaceFolder hf = HuggingFaceFolder::open(folder.path());
  GptConfig config = hf.config();
  config.context = 5;
  hf.check(Gpt(config));
  std::vector<float> all(7 * 12), first(5 * 12);
  const ParameterSpec whole{.name = "wpe.weight", .shape = {7, 12}};
  hf.read(whole, 0, Tensor(all.data(), Dtype::fp32, {7 * 12}));
  hf.read({.name = "wpe.weight", .shape = {5, 12}}, 0, Tensor(first.data(), Dtype::fp32, {5 * 12}));
  EXPECT_TRUE(std::equal(first.begin(), first.end(), all.begin()));
  config.context = 8;
  expect_error(ExitCode::data, {"wpe.weight", "[7, 12]"}, [&] { hf.check(Gpt(config)); });
}

}  // namespace
}  // namespace shardrun
