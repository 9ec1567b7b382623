// A Hugging Face folder as a set of step 0 that `train --init-from` and `generate` read.
#include <algorithm>
#include <cstring>

#include "launch/checkpoint/hugging_face.h"
#include "launch/config/config.h"
#include "launch/train/environment.h"

namespace shardrun {
namespace {

namespace fs = std::filesystem;

// Fetches ranges larger than what is asked for: a transposed tensor is read whole for each.
class FolderSource : public PieceSource {
 public:
  FolderSource(HuggingFaceFolder& folder, const Model& model) : folder_(folder) {
    for (const Unit* unit : model.units()) {
      for (const ParameterSpec& spec : unit->parameters()) specs_[spec.name] = &spec;
    }
  }
  const std::byte* fetch(const CheckpointPiece& piece, int64_t begin, int64_t count,
                         std::byte* scratch) override {
    for (int64_t done = 0; done < count;) {
      const int64_t at = begin + done;
      if (name_ != piece.name || at < begin_ || at >= begin_ + size_) load(piece, at);
      const int64_t part = std::min(count - done, begin_ + size_ - at);
      std::memcpy(scratch + done * 4, values_.data() + (at - begin_),
                  static_cast<size_t>(part) * 4);
      done += part;
    }
    return scratch;
  }

 private:
  void load(const CheckpointPiece& piece, int64_t begin) {
    name_ = piece.name;
    begin_ = begin;
    size_ = std::min(kTransposeBytes / 4, piece.data.numel() - begin);
    values_.resize(static_cast<size_t>(size_));
    folder_.read(*specs_.at(piece.name), piece.begin + begin,
                 Tensor(values_.data(), Dtype::fp32, {size_}));
  }

  HuggingFaceFolder& folder_;
  std::map<std::string, const ParameterSpec*> specs_;
  std::vector<float> values_;
  std::string name_;
  int64_t begin_ = 0, size_ = 0;
};

// The tokenizer's files beside the checkpoints; the value of --tokenizer.
std::string take_tokenizer(const fs::path& from, const fs::path& out) {
  const fs::path to = fs::absolute(out / "tokenizer").lexically_normal();
  for (const fs::path& file : tokenizer_files_in(from)) {
    std::error_code error;
    fs::create_directories(to, error);
    if (!error) {
      fs::copy_file(file, to / file.filename(), fs::copy_options::overwrite_existing, error);
    }
    if (error) {
      throw CannotCreateError("{}: cannot copy to {}: {}", file.string(), to.string(),
                              error.message());
    }
  }
  const bool bpe = fs::exists(to / "vocab.json") && fs::exists(to / "merges.txt");
  return bpe ? "gpt2:" + to.string() : "byte";
}

}  // namespace

void adopt_model(Config& config, const Config& given, const GptConfig& model) {
  if (given.has_model()) return;
  config.set_model("gpt2-124m");  // what is not said below is the same for every GPT-2
  if (!given.has_layers()) config.set_layers(model.layers);
  if (!given.has_heads()) config.set_heads(model.heads);
  if (!given.has_channels()) config.set_channels(model.channels);
  if (!given.has_vocab()) config.set_vocab(model.vocabulary);
  if (!given.has_seq_len()) config.set_seq_len(model.context);
  if (!given.has_bias()) config.set_bias(true);
}

std::string import_gpt2(const fs::path& from, const fs::path& out) {
  HuggingFaceFolder folder = HuggingFaceFolder::open(from);
  const Gpt model(folder.config());
  folder.check(model);
  if (newest_checkpoint(out)) {
    throw CannotCreateError("{}: holds checkpoints already, wanted a new folder", out.string());
  }
  Config config;
  adopt_model(config, Config(), folder.config());
  config.set_tokenizer(take_tokenizer(from, out));
  CheckpointState state;
  state.scaler_policy = "none";
  state.precision = "fp32";
  state.config_text = to_textproto(with_defaults(config));
  state.writer_version = version();
  state.numerics_key = "imported";
  std::vector<CheckpointPiece> pieces;
  for (const Unit* unit : model.units()) {
    for (const ParameterSpec& spec : unit->parameters()) {
      pieces.push_back({spec.name, TensorKind::master, spec.shape, 0,
                        ConstTensor(nullptr, Dtype::fp32, {spec.shape.numel()})});
    }
  }
  FolderSource source(folder, model);
  std::string set;
  run_thread_ranks(1, [&](Communicator& comm) {
    set = save_checkpoint(out, state, pieces, comm, SaveOptions{&source, nullptr, {}});
  });
  return set;
}

}  // namespace shardrun
