// `shardrun data`: text to tokens, and a look at token files. Called by main with the words after
// the subcommand.
//   shardrun data [encode] TEXT --out FILE.bin [--tokenizer T]   writes an llm.c token file
//   shardrun data inspect FILE [--tokenizer T] [--json]          format, counts, ids, first tokens
//   shardrun data check FILE [--vocab N | --tokenizer T]         every token is in the vocabulary
#pragma once

#include <iosfwd>
#include <span>
#include <string>

namespace shardrun {

// Prints to `out`. Throws the typed errors of the readers; returns where all is well.
void data_command(std::span<const std::string> words, std::ostream& out);

}  // namespace shardrun
