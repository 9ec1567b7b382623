// What a tokenizer's splitting rules ask about a character. Called by tokenizer.cpp.
#pragma once

#include <cstddef>
#include <string_view>

namespace shardrun {

enum class CharacterClass { space, letter, number, other };

// White_Space, L*, N* of Unicode, and the rest.
CharacterClass character_class(char32_t c);

inline constexpr char32_t kInvalidCharacter = 0x110000;

struct Character {
  char32_t code = 0;
  size_t bytes = 0;
};

// The first character of a text that is not empty, read as UTF-8. A byte that begins no valid
// character is a kInvalidCharacter of its own, so that any text is cut without loss.
Character next_character(std::string_view text);

}  // namespace shardrun
