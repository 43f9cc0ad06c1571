// Row store: from row ids to page reads, and from pages to rows in the caller's staging.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cinttypes>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "page.h"
#include "reader.h"
#include "row_cache.h"

using namespace spark_engram;

namespace {

// A wanted row: its page in the high half, so that sorting brings rows of one page together,
// then its place in the page (4 bits) and its position in the batch (28 bits). An id is read
// once, to make its key: what follows cannot be confused by ids that change meanwhile.
using Key = uint64_t;
constexpr unsigned kPositionBits = 28;
constexpr uint64_t kMaxIds = uint64_t{1} << kPositionBits;
constexpr uint64_t kMaxPages = uint64_t{1} << 32;
inline Key make_key(uint64_t local_row, uint64_t position) {
  return local_row / kRowsPerPage << 32 | local_row % kRowsPerPage << kPositionBits | position;
}
inline uint64_t page_of(Key key) { return key >> 32; }
inline uint64_t slot_of(Key key) { return key >> kPositionBits & 0xF; }
inline uint64_t position_of(Key key) { return key & (kMaxIds - 1); }
static_assert(kRowsPerPage <= 16);

// Below this many keys std::sort beats the passes over 2048 buckets.
constexpr size_t kRadixThreshold = 1024;
constexpr unsigned kDigitBits = 11;
constexpr size_t kDigits = size_t{1} << kDigitBits;

// Sorts by page with std::sort or a least-significant-digit radix sort; no allocation.
void sort_keys(std::vector<Key>& keys, std::vector<Key>& scratch, size_t count, uint64_t pages) {
  if (count < kRadixThreshold) {
    std::sort(keys.begin(), keys.begin() + static_cast<ptrdiff_t>(count));
    return;
  }
  uint32_t counts[kDigits];
  for (unsigned shift = 32; shift < 64 && (pages >> (shift - 32)) != 0; shift += kDigitBits) {
    std::fill(std::begin(counts), std::end(counts), 0);
    for (size_t i = 0; i < count; ++i) ++counts[(keys[i] >> shift) & (kDigits - 1)];
    uint32_t sum = 0;
    for (uint32_t& entry : counts) {
      const uint32_t here = entry;
      entry = sum;
      sum += here;
    }
    for (size_t i = 0; i < count; ++i) {
      scratch[counts[(keys[i] >> shift) & (kDigits - 1)]++] = keys[i];
    }
    keys.swap(scratch);
  }
}

void format_failure(const Failure& failure, char* message, size_t bytes) {
  if (message == nullptr || bytes == 0) return;
  switch (failure.status) {
    case SE_SYSTEM:
      std::snprintf(message, bytes, "reading page %" PRIu64 " failed: %s", failure.page,
                    std::strerror(failure.error));
      break;
    case SE_SHORT:
      std::snprintf(message, bytes, "the file ended before page %" PRIu64 ": truncated file",
                    failure.page);
      break;
    case SE_CORRUPT:
      std::snprintf(message, bytes,
                    "page %" PRIu64 " failed its check (checksum, page number or file id)",
                    failure.page);
      break;
    default:
      std::snprintf(message, bytes, "invalid arguments");
  }
}

}  // namespace

struct se_store final : Sink {
  se_options options{};
  int fd = -1;
  uint64_t pages = 0;
  std::string note;
  std::unique_ptr<Reader> reader;
  RowCache cache;

  std::mutex turn;  // one batch at a time: the ring, the plan and the cache are shared
  std::vector<Key> keys;
  std::vector<Key> scratch;
  std::vector<Run> runs;
  // Of the batch being read.
  uint8_t* weights = nullptr;
  uint8_t* scales = nullptr;

  std::atomic<uint64_t> batches{0};
  std::atomic<uint64_t> lookups{0};
  std::atomic<uint64_t> owned{0};
  std::atomic<uint64_t> hits{0};
  std::atomic<uint64_t> pages_read{0};
  std::atomic<uint64_t> reads{0};
  std::atomic<uint64_t> errors{0};
  Histogram batch_latency;
  Histogram read_latency;

  ~se_store() override {
    reader.reset();
    if (fd >= 0) close(fd);
  }

  int deliver(const Run& run, const uint8_t* data, uint64_t* page) override {
    uint64_t checked = UINT64_MAX;
    for (size_t i = run.first_key; i < run.first_key + run.keys; ++i) {
      const uint64_t here = page_of(keys[i]);
      const uint8_t* start = data + (here - run.page) * kPage;
      if (here != checked) {
        if (!page_is_good(start, here, options.file_id)) {
          *page = here;
          return SE_CORRUPT;
        }
        checked = here;
      }
      const uint64_t position = position_of(keys[i]);
      const uint8_t* row = start + slot_of(keys[i]) * kRow;
      std::memcpy(weights + position * kWeight, row, kWeight);
      std::memcpy(scales + position * kScale, row + kWeight, kScale);
    }
    return SE_OK;
  }

  // At most max_ids ids; `turn` is held.
  Failure gather_piece(const int64_t* piece, size_t count) {
    size_t wanted = 0;
    uint64_t found = 0;
    uint64_t here = 0;
    for (size_t i = 0; i < count; ++i) {
      const int64_t id = piece[i];
      if (id < 0 || static_cast<uint64_t>(id) < options.row_start ||
          static_cast<uint64_t>(id) >= options.row_end) {
        continue;
      }
      ++here;
      const uint64_t row = static_cast<uint64_t>(id);
      if (cache.enabled() && cache.find(row, weights + i * kWeight, scales + i * kScale)) {
        ++found;
        continue;
      }
      keys[wanted++] = make_key(row - options.row_start, i);
    }
    owned.fetch_add(here, std::memory_order_relaxed);
    hits.fetch_add(found, std::memory_order_relaxed);
    sort_keys(keys, scratch, wanted, pages);
    const size_t count_runs = plan(wanted);
    const Failure failure = reader->read(runs.data(), count_runs, *this, read_latency);
    if (failure.status == SE_OK && cache.enabled()) {
      for (size_t i = 0; i < wanted; ++i) {
        const uint64_t at = position_of(keys[i]);
        const uint64_t row = options.row_start + page_of(keys[i]) * kRowsPerPage + slot_of(keys[i]);
        cache.insert(row, weights + at * kWeight, scales + at * kScale);
      }
    }
    return failure;
  }

  // Turns the sorted keys into reads of distinct pages, neighbours together.
  size_t plan(size_t wanted) {
    size_t count = 0;
    uint64_t distinct = 0;
    for (size_t i = 0; i < wanted;) {
      Run run{page_of(keys[i]), 1, static_cast<uint32_t>(i), 0};
      for (; i < wanted; ++i) {
        const uint64_t page = page_of(keys[i]);
        const uint64_t last = run.page + run.pages - 1;
        if (page > last + 1 || (page == last + 1 && run.pages == options.max_run_pages)) break;
        if (page == last + 1) ++run.pages;
        ++run.keys;
      }
      distinct += run.pages;
      runs[count++] = run;
    }
    pages_read.fetch_add(distinct, std::memory_order_relaxed);
    reads.fetch_add(count, std::memory_order_relaxed);
    return count;
  }

  Failure gather(const int64_t* all, uint64_t n, uint8_t* to_weights, uint8_t* to_scales) {
    const std::lock_guard<std::mutex> lock(turn);
    const Clock::time_point started = Clock::now();
    Failure failure;
    for (uint64_t at = 0; at < n && failure.status == SE_OK; at += options.max_ids) {
      weights = to_weights + at * kWeight;
      scales = to_scales + at * kScale;
      failure = gather_piece(all + at, std::min(options.max_ids, n - at));
    }
    batches.fetch_add(1, std::memory_order_relaxed);
    lookups.fetch_add(n, std::memory_order_relaxed);
    batch_latency.add(microseconds_since(started));
    if (failure.status != SE_OK) errors.fetch_add(1, std::memory_order_relaxed);
    return failure;
  }
};

struct se_job {
  void run() {
    const Failure failure = store->gather(ids, n, weights, scales);
    if (failure.status == SE_OK) return;
    status.store(failure.status, std::memory_order_relaxed);
    char text[256] = "";
    format_failure(failure, text, sizeof text);
    std::fprintf(stderr,
                 "spark-engram: fatal: %s; ending this process so that no wrong row is used\n",
                 text);
    if (abort_on_error) std::abort();
  }

  se_store* store;
  se_queue* queue;
  const int64_t* ids;
  uint64_t n;
  uint8_t* weights;
  uint8_t* scales;
  bool abort_on_error;
  std::atomic<int> status{SE_OK};
  // Guarded by the queue's mutex.
  uint64_t started = 0;
  uint64_t finished = 0;
};

struct se_queue {
  se_queue() : worker([this] { work(); }) {}

  ~se_queue() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    worker.join();
  }

  void start(se_job* job) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return waiting < jobs.size(); });
    jobs[waiting++] = job;
    ++job->started;
    changed.notify_all();
  }

  void wait(se_job* job) {
    std::unique_lock<std::mutex> lock(mutex);
    const uint64_t until = job->started;
    changed.wait(lock, [&] { return job->finished >= until; });
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return stopping || waiting > 0; });
      if (stopping) return;
      se_job* job = jobs[0];
      std::copy(jobs.begin() + 1, jobs.end(), jobs.begin());
      --waiting;
      lock.unlock();
      job->run();
      lock.lock();
      ++job->finished;
      changed.notify_all();
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::array<se_job*, 16> jobs{};  // oldest first; fixed, as starting must not allocate
  size_t waiting = 0;
  bool stopping = false;
  std::thread worker;  // last: it uses the members above
};

namespace {

int open_store(const se_options& options, se_store& store, std::string* message) {
  const auto invalid = [&](const char* text) {
    *message = text;
    return SE_INVALID;
  };
  if (options.row_end < options.row_start) return invalid("row_end is below row_start");
  if (options.depth < 1 || options.depth > 4096) return invalid("depth must be 1 to 4096");
  if (options.threads < 1 || options.threads > 1024) return invalid("threads must be 1 to 1024");
  if (options.max_run_pages < 1 || options.max_run_pages > 64) {
    return invalid("max_run_pages must be 1 to 64");
  }
  if (options.max_ids < 1 || options.max_ids > kMaxIds) {
    return invalid("max_ids must be 1 to 2^28");
  }
  if (options.cache_ways < 1 || options.cache_ways > 16) {
    return invalid("cache_ways must be 1 to 16");
  }
  const uint64_t rows = options.row_end - options.row_start;
  store.pages = rows / kRowsPerPage + (rows % kRowsPerPage != 0 ? 1 : 0);
  if (store.pages > kMaxPages) return invalid("the file is too large");
  struct stat status {};
  if (fstat(options.fd, &status) != 0) {
    *message = std::string("cannot examine the file: ") + std::strerror(errno);
    return SE_SYSTEM;
  }
  // Page reads must end inside the file, whatever the caller says.
  if (static_cast<uint64_t>(status.st_size) != (store.pages + 1) * kPage) {
    return invalid("the file's size does not fit its row range");
  }
  store.options = options;
  store.fd = dup(options.fd);
  if (store.fd < 0) {
    *message = std::string("cannot duplicate the descriptor: ") + std::strerror(errno);
    return SE_SYSTEM;
  }
  if (options.cache_bytes > 0 && !store.cache.setup(options.cache_bytes, options.cache_ways)) {
    return invalid("the row cache is smaller than one set or does not fit in memory");
  }
  store.keys.resize(options.max_ids);
  store.scratch.resize(options.max_ids);
  store.runs.resize(options.max_ids);
  const ReaderOptions reading{store.fd, options.depth, options.threads, options.max_run_pages,
                              options.sqpoll != 0};
  if (options.backend != SE_BACKEND_PREAD) {
    store.reader = make_uring_reader(reading, &store.note);
    if (store.reader == nullptr && options.backend == SE_BACKEND_IO_URING) {
      *message = store.note;
      return SE_SYSTEM;
    }
  }
  if (store.reader == nullptr) {
    std::string reason;
    store.reader = make_pread_reader(reading, &reason);
    if (store.reader == nullptr) {
      *message = reason;
      return SE_SYSTEM;
    }
  }
  return SE_OK;
}

}  // namespace

extern "C" {

const char* se_backends(void) {
#ifdef SPARK_ENGRAM_HAVE_URING
  return "io_uring,pread";
#else
  return "pread";
#endif
}

int se_store_open(const se_options* options, se_store** out, char* message,
                  size_t message_bytes) {
  *out = nullptr;
  std::string text;
  int status = SE_INVALID;
  try {
    auto store = std::make_unique<se_store>();
    status = open_store(*options, *store, &text);
    if (status == SE_OK) *out = store.release();
  } catch (const std::bad_alloc&) {
    status = SE_SYSTEM;
    text = "not enough memory";
  }
  if (status != SE_OK && message_bytes > 0) {
    std::snprintf(message, message_bytes, "%s", text.c_str());
  }
  return status;
}

void se_store_close(se_store* store) { delete store; }

const char* se_store_backend(const se_store* store) { return store->reader->name(); }

const char* se_store_note(const se_store* store) { return store->note.c_str(); }

int se_store_gather(se_store* store, const int64_t* ids, uint64_t n, uint8_t* weights,
                    uint8_t* scales, char* message, size_t message_bytes) {
  const Failure failure = store->gather(ids, n, weights, scales);
  if (failure.status != SE_OK) format_failure(failure, message, message_bytes);
  return failure.status;
}

void se_store_stats(const se_store* store, se_stats* out) {
  constexpr auto relaxed = std::memory_order_relaxed;
  *out = {};
  out->batches = store->batches.load(relaxed);
  out->lookups = store->lookups.load(relaxed);
  out->owned = store->owned.load(relaxed);
  out->cache_hits = store->hits.load(relaxed);
  out->pages = store->pages_read.load(relaxed);
  out->reads = store->reads.load(relaxed);
  out->read_bytes = out->pages * kPage;
  out->errors = store->errors.load(relaxed);
  out->batch_us_sum = store->batch_latency.sum_us.load(relaxed);
  out->read_us_sum = store->read_latency.sum_us.load(relaxed);
  for (size_t i = 0; i < SE_HISTOGRAM_BUCKETS; ++i) {
    out->batch_us[i] = store->batch_latency.bucket[i].load(relaxed);
    out->read_us[i] = store->read_latency.bucket[i].load(relaxed);
  }
}

se_queue* se_queue_new(void) {
  try {
    return new (std::nothrow) se_queue;
  } catch (const std::system_error&) {
    return nullptr;
  }
}

void se_queue_free(se_queue* queue) { delete queue; }

se_job* se_job_new(se_store* store, se_queue* queue, const int64_t* ids, uint64_t n,
                   uint8_t* weights, uint8_t* scales, int abort_on_error) {
  auto* job = new (std::nothrow) se_job;
  if (job == nullptr) return nullptr;
  job->store = store;
  job->queue = queue;
  job->ids = ids;
  job->n = n;
  job->weights = weights;
  job->scales = scales;
  job->abort_on_error = abort_on_error != 0;
  return job;
}

void se_job_free(se_job* job) { delete job; }

void se_job_run(void* data) { static_cast<se_job*>(data)->run(); }

void se_job_start(void* data) {
  auto* job = static_cast<se_job*>(data);
  job->queue->start(job);
}

void se_job_wait(void* data) {
  auto* job = static_cast<se_job*>(data);
  job->queue->wait(job);
}

int se_job_status(const se_job* job) { return job->status.load(std::memory_order_relaxed); }

}  // extern "C"
