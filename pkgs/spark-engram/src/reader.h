// How pages get from the file into memory. A reader is told runs of pages and hands each one,
// once it is complete, to a sink.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include "page.h"

namespace spark_engram {

// A read of consecutive pages, and the sorted keys whose rows lie in them.
struct Run {
  uint64_t page;
  uint32_t pages;
  uint32_t first_key;
  uint32_t keys;
};

struct Failure {
  int status = SE_OK;  // SE_OK, or why the batch failed
  int error = 0;       // errno for SE_SYSTEM
  uint64_t page = 0;   // where
};

struct Histogram {
  std::atomic<uint64_t> bucket[SE_HISTOGRAM_BUCKETS] = {};
  std::atomic<uint64_t> sum_us{0};

  void add(uint64_t microseconds) {
    size_t index = 0;
    while (index + 1 < SE_HISTOGRAM_BUCKETS && microseconds >= (uint64_t{1} << index)) ++index;
    bucket[index].fetch_add(1, std::memory_order_relaxed);
    sum_us.fetch_add(microseconds, std::memory_order_relaxed);
  }
};

using Clock = std::chrono::steady_clock;

inline uint64_t microseconds_since(Clock::time_point start) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start).count());
}

class Sink {
 public:
  virtual ~Sink() = default;
  // Takes the pages of `run` at `data`; returns SE_OK, or SE_CORRUPT with *page set. May be
  // called from several threads at once for different runs.
  virtual int deliver(const Run& run, const uint8_t* data, uint64_t* page) = 0;
};

class Reader {
 public:
  virtual ~Reader() = default;
  virtual const char* name() const = 0;
  // Reads all runs. Returns only when no read is in flight any more, also after a failure.
  virtual Failure read(const Run* runs, size_t count, Sink& sink, Histogram& latency) = 0;
};

struct ReaderOptions {
  int fd;
  uint32_t depth;
  uint32_t threads;
  uint32_t max_run_pages;
  bool sqpoll;
};

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};
using AlignedBuffer = std::unique_ptr<uint8_t[], FreeDeleter>;

// Page-aligned zeroed memory, or null.
inline AlignedBuffer allocate_aligned(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, kPage, bytes) != 0) return nullptr;
  auto* start = static_cast<uint8_t*>(memory);
  for (size_t i = 0; i < bytes; ++i) start[i] = 0;
  return AlignedBuffer(start);
}

inline uint64_t page_offset(uint64_t page) { return (page + 1) * kPage; }

// Null with a reason when the kernel or the build has no io_uring.
std::unique_ptr<Reader> make_uring_reader(const ReaderOptions& options, std::string* reason);
std::unique_ptr<Reader> make_pread_reader(const ReaderOptions& options, std::string* reason);

}  // namespace spark_engram
