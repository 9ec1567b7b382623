// OUT is one job's: by lock where there are locks, by what the file says where there are none.
#include "launch/train/run_folder.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "launch/ranks.h"
#include "tests/launch/expect_error.h"

namespace shardrun {
namespace {

namespace fs = std::filesystem;

class RunFolderTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    out_ = fs::temp_directory_path() / fmt::format("run_folder_test.{}.{}", getpid(), GetParam());
    fs::remove_all(out_);
    fs::create_directories(out_);
  }
  void TearDown() override { fs::remove_all(out_); }
  void write(const std::string& text) { std::ofstream(out_ / "run") << text; }
  std::string text() const {
    std::ifstream in(out_ / "run");
    return {std::istreambuf_iterator<char>(in), {}};
  }

  fs::path out_;
};

TEST_P(RunFolderTest, HoldingChangesNothing) {
  RunFolder folder(out_, GetParam());
  folder.hold();
  EXPECT_TRUE(fs::is_empty(out_));
  EXPECT_EQ(folder.run(), "");
}

TEST_P(RunFolderTest, ARunKeepsItsNameWhileItGoesOn) {
  std::string first;
  {
    RunFolder folder(out_, GetParam());
    folder.sign(false);
    first = folder.run();
    EXPECT_EQ(first.size(), 16u);
    EXPECT_NE(text().find(fmt::format("process {}", getpid())), std::string::npos);
  }
  EXPECT_EQ(text(), "run " + first + "\n");
  {
    RunFolder folder(out_, GetParam());
    folder.hold();
    EXPECT_EQ(folder.run(), first);
    folder.sign(true);
    EXPECT_EQ(folder.run(), first);
  }
  RunFolder folder(out_, GetParam());
  folder.hold();
  folder.sign(false);
  EXPECT_NE(folder.run(), first);
}

TEST_P(RunFolderTest, AnotherProcessIsNamed) {
  RunFolder folder(out_, GetParam());
  folder.sign(false);
  const pid_t child = fork();
  if (child == 0) {
    try {
      RunFolder(out_, GetParam()).hold();
    } catch (const CannotCreateError& error) {
      const std::string wanted = fmt::format("process {} on {}", getppid(), host_name());
      _exit(std::string(error.what()).find(wanted) == std::string::npos ? 2 : 0);
    }
    _exit(1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_P(RunFolderTest, AProcessThatIsGoneHoldsNothing) {
  const pid_t child = fork();
  if (child == 0) {
    RunFolder folder(out_, GetParam());
    folder.sign(false);
    raise(SIGKILL);
  }
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_NE(text().find("process"), std::string::npos);
  RunFolder folder(out_, GetParam());
  folder.hold();
  EXPECT_EQ(folder.run().size(), 16u);
}

// The number of a process that is gone comes again; its start time does not.
TEST_P(RunFolderTest, ANumberThatCameAgainIsAnotherProcess) {
  write(fmt::format("run 0123\nhost {}\nprocess {}\nstarted 1\n", host_name(), getpid()));
  RunFolder folder(out_, GetParam());
  folder.hold();
  EXPECT_EQ(folder.run(), "0123");
}

TEST_P(RunFolderTest, OfAnotherHostOnlyALockTells) {
  write("run 0123\nhost elsewhere\nprocess 17\nstarted 1\n");
  RunFolder folder(out_, GetParam());
  if (GetParam()) return folder.hold();
  expect_error(ExitCode::cannot_create, {"process 17 on elsewhere", "remove", "/run"},
               [&] { folder.hold(); });
}

TEST_P(RunFolderTest, AFileOfAnythingIsNoHolder) {
  write(std::string("\0\xff run run run process x\n", 24));
  RunFolder folder(out_, GetParam());
  folder.hold();
  folder.sign(false);
  EXPECT_EQ(folder.run().size(), 16u);
}

INSTANTIATE_TEST_SUITE_P(Locks, RunFolderTest, testing::Bool());

}  // namespace
}  // namespace shardrun
