// Runs an action that must fail, and gives its typed error back for a look at code and message.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <string>

#include "runtime/error.h"

namespace shardrun {

inline void expect_error(ExitCode code, std::initializer_list<std::string> parts,
                         const std::function<void()>& action) {
  try {
    action();
    ADD_FAILURE() << "no error, wanted code " << static_cast<int>(code);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "message: " << error.what() << "\nmissing: " << part;
    }
  }
}

}  // namespace shardrun
