// The manifest of a set: between its file, the generated messages and our types. Used inside this
// folder only.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "manifest.pb.h"
#include "sharding/checkpoint/checkpoint.h"

namespace shardrun {

checkpoint::State to_message(const CheckpointState& state);
CheckpointState from_message(const checkpoint::State& state);

// The types that checkpoints hold. InternalError for others.
checkpoint::Type type_of(Dtype dtype);
Dtype dtype_from(checkpoint::Type type);
Shape shape_of(const checkpoint::Tensor& tensor);  // of a checked manifest

// Writes and syncs manifest.pb and manifest.txt; fills in format and xxh3.
void write_manifest(const std::filesystem::path& folder, checkpoint::Manifest& manifest);

// Reads manifest.pb and checks all that can be checked without the data files. NoInputError where
// it is missing, DataError where it is not what write_manifest wrote.
checkpoint::Manifest read_manifest(const std::filesystem::path& folder);

// Each data file that is missing or has another size than the manifest says: code and sentence.
std::vector<Error> file_problems(const std::filesystem::path& folder,
                                 const checkpoint::Manifest& manifest);

// DataError where chunks leave a gap, overlap, or leave the tensor. They are sorted.
void check_cover(const checkpoint::Tensor& tensor);

std::string step_folder_name(int64_t step);                      // step-00000100
std::optional<int64_t> step_of(const std::string& folder_name);  // nothing: not a set's name

}  // namespace shardrun
