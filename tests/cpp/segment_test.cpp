#include "shm/segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "base/errors.h"
#include "shm/memory.h"
#include "shm/server.h"

namespace psrl {
namespace {

namespace fs = std::filesystem;

std::shared_ptr<Segment> make(const std::string& name, uint64_t size) {
  return Segment::create(name, size, "transfer_queue.arena_bytes");
}

// The text of the StorageError that `call` raises.
template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const StorageError& error) {
    return error.what();
  }
  return "nothing was raised";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A directory of its own, removed at the end.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (fs::temp_directory_path() / "psrl-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryDirectory() { fs::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  void write(const std::string& name, const std::string& text) const {
    fs::create_directories(fs::path(path_ + name).parent_path());
    std::ofstream(path_ + name) << text;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(Segment, IsSharedAndStartsAsZeroes) {
  const auto ours = make("queue", 100'000);
  EXPECT_EQ(ours->bytes().size(), 100'000u);
  for (const std::byte byte : ours->bytes()) ASSERT_EQ(byte, std::byte{0});
  const auto theirs = Segment::attach(ours->fd());
  theirs->bytes()[99'999] = std::byte{7};
  EXPECT_EQ(ours->bytes()[99'999], std::byte{7});
  EXPECT_EQ(theirs->name(), "queue");
  EXPECT_EQ(theirs->size(), ours->size());
  EXPECT_EQ(theirs->generation(), ours->generation());
}

TEST(Segment, GenerationTellsLivesOfOneNameApart) {
  EXPECT_NE(make("queue", 64)->generation(), make("queue", 64)->generation());
}

TEST(Segment, SizeIsSealed) {
  const auto segment = make("queue", 4096);
  EXPECT_NE(::ftruncate(segment->fd(), 0), 0);
  EXPECT_NE(::ftruncate(segment->fd(), 1 << 20), 0);
}

TEST(Segment, ReadOnlyCannotBeWritten) {
  const auto segment = make("queue", 4096);
  const auto reader = Segment::attach(segment->fd(), Access::kReadOnly);
  EXPECT_THROW(reader->bytes(), StorageError);
  EXPECT_EQ(reader->const_bytes().size(), 4096u);
  // Not even by a mapping of its descriptor.
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_WRITE, MAP_SHARED, reader->fd(), 0), MAP_FAILED);
}

TEST(Segment, OutlivesItsCreator) {
  auto first = make("queue", 4096);
  first->bytes()[0] = std::byte{9};
  const auto second = Segment::attach(first->fd());
  first.reset();
  EXPECT_EQ(second->bytes()[0], std::byte{9});
}

TEST(Segment, RefusesWhatIsNotOne) {
  const Fd plain(::memfd_create("plain", MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(plain.get(), 8192), 0);
  EXPECT_TRUE(contains(error_of([&] { Segment::attach(plain.get()); }), "not sealed"));
  ::fcntl(plain.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  EXPECT_TRUE(contains(error_of([&] { Segment::attach(plain.get()); }), "wrong magic"));
  EXPECT_THROW(Segment::attach(-1), StorageError);

  const auto segment = make("queue", 8192);
  EXPECT_THROW(segment->bytes(8000, 193), StorageError);
  EXPECT_THROW(segment->bytes(UINT64_MAX, 2), StorageError);
  EXPECT_EQ(segment->bytes(8000, 192).size(), 192u);
}

TEST(Segment, RefusesAChangedHeader) {
  const auto segment = make("queue", 8192);
  const Fd writer(::open(("/proc/self/fd/" + std::to_string(segment->fd())).c_str(), O_RDWR));
  const uint64_t size = 1 << 20;
  ASSERT_EQ(::pwrite(writer.get(), &size, sizeof(size), 16), 8);
  EXPECT_TRUE(contains(error_of([&] { Segment::attach(segment->fd()); }), "header says 1048576"));
}

TEST(Segment, SaysWhatIsMissingWhenMemoryIsShort) {
  const uint64_t size = uint64_t{1} << 50;
  const std::string text = error_of([&] { make("queue", size); });
  EXPECT_TRUE(contains(text, std::to_string(size))) << text;
  EXPECT_TRUE(contains(text, "available")) << text;
  EXPECT_TRUE(contains(text, "transfer_queue.arena_bytes")) << text;
}

TEST(Segment, SaysWhatToRaiseWithoutDescriptors) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizers' own check of an object's type opens a pipe, for which nothing "
                  "is left here";
#endif
  const TemporaryDirectory directory;
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &old), 0);
  rlimit none = old;
  none.rlim_cur = 3;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const std::string making = error_of([&] { make("queue", 8192); });
  const std::string serving = error_of([&] { SegmentServer(directory / "segments"); });
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &old), 0);
  for (const std::string& text : {making, serving}) {
    EXPECT_TRUE(contains(text, "Too many open files")) << text;
    EXPECT_TRUE(contains(text, "ulimit -n")) << text;
  }
}

TEST(Memory, IsTheTightestOfHostAndCgroups) {
  const TemporaryDirectory root;
  root.write("/proc/meminfo", "MemTotal:  100 kB\nMemAvailable:  90 kB\n");
  EXPECT_EQ(memory_available(root.path()), 90u * 1024);

  root.write("/proc/self/cgroup", "0::/job/step\n");
  root.write("/sys/fs/cgroup/job/step/memory.max", "max\n");
  root.write("/sys/fs/cgroup/job/step/memory.current", "5000\n");
  EXPECT_EQ(memory_available(root.path()), 90u * 1024);

  root.write("/sys/fs/cgroup/job/memory.max", "50000\n");
  root.write("/sys/fs/cgroup/job/memory.current", "30000\n");
  EXPECT_EQ(memory_available(root.path()), 20000u);
  root.write("/sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 10000\n");
  EXPECT_EQ(memory_available(root.path()), 30000u);
  root.write("/sys/fs/cgroup/job/memory.current", "70000\n");  // over its limit
  EXPECT_EQ(memory_available(root.path()), 0u);
}

TEST(Memory, KnowsCgroupVersionOne) {
  const TemporaryDirectory root;
  root.write("/proc/meminfo", "MemAvailable:  90 kB\n");
  root.write("/proc/self/cgroup", "12:cpu,cpuacct:/a\n5:memory:/a\n");
  root.write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "4000\n");
  root.write("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "1000\n");
  EXPECT_EQ(memory_available(root.path()), 3000u);
}

TEST(SegmentServer, HandsOutDescriptorsByName) {
  const TemporaryDirectory directory;
  const std::string path = directory / "segments";
  std::shared_ptr<Segment> fetched;
  {
    SegmentServer server(path);
    const auto segment = make("queue", 4096);
    server.add(segment);
    fetched = fetch_segment(path, "queue", std::chrono::seconds(60));
    segment->bytes()[3] = std::byte{3};
    EXPECT_EQ(fetched->bytes()[3], std::byte{3});
    EXPECT_THROW(fetch_segment(path, "queue", std::chrono::seconds(60), Access::kReadOnly)->bytes(),
                 StorageError);
    const std::string text =
        error_of([&] { fetch_segment(path, "weights", std::chrono::seconds(60)); });
    EXPECT_TRUE(contains(text, "no segment named weights; there are: queue")) << text;
  }
  EXPECT_FALSE(fs::exists(path));
  EXPECT_EQ(fetched->bytes()[3], std::byte{3});  // the server's end does not matter
}

TEST(SegmentServer, IsWaitedFor) {
  const TemporaryDirectory directory;
  const std::string path = directory / "segments";
  EXPECT_TRUE(contains(error_of([&] { fetch_segment(path, "q", std::chrono::milliseconds(30)); }),
                       "nobody served segments at"));
  std::unique_ptr<SegmentServer> server;
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    server = std::make_unique<SegmentServer>(path);
    server->add(make("q", 64));
  });
  // Served or "no segment" if it comes between the two lines above: not a time-out.
  try {
    fetch_segment(path, "q", std::chrono::seconds(60));
  } catch (const UnknownKey&) {
  }
  late.join();
}

TEST(SegmentServer, ServesManyAtOnce) {
  const TemporaryDirectory directory;
  const std::string path = directory / "segments";
  SegmentServer server(path);
  server.add(make("q", 64));
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 20; ++k) fetch_segment(path, "q", std::chrono::seconds(60));
    });
  }
  for (std::thread& thread : threads) thread.join();
  server.close();
  server.close();
}

TEST(SegmentServer, RefusesLongOrTakenPaths) {
  const TemporaryDirectory directory;
  EXPECT_TRUE(
      contains(error_of([&] { SegmentServer(directory / std::string(120, 'x')); }), "at most 107"));
  SegmentServer server(directory / "s");
  EXPECT_THROW(SegmentServer(directory / "s"), StorageError);
}

}  // namespace
}  // namespace psrl
