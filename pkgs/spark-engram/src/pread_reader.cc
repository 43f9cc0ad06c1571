// Reads with a pool of threads, for kernels and containers that refuse io_uring.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "reader.h"

namespace spark_engram {
namespace {

class PreadReader final : public Reader {
 public:
  explicit PreadReader(const ReaderOptions& options)
      : fd_(options.fd), slot_bytes_(options.max_run_pages * kPage) {}
  PreadReader(const PreadReader&) = delete;
  PreadReader& operator=(const PreadReader&) = delete;

  ~PreadReader() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  bool setup(uint32_t threads, std::string* reason) {
    buffer_ = allocate_aligned(threads * slot_bytes_);
    if (buffer_ == nullptr) {
      *reason = "no memory for read buffers";
      return false;
    }
    try {
      for (uint32_t i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error& error) {
      *reason = std::string("cannot start reader threads: ") + error.what();
      return false;
    }
    return true;
  }

  const char* name() const override { return "pread"; }

  Failure read(const Run* runs, size_t count, Sink& sink, Histogram& latency) override {
    // Waking the pool costs more than a few reads; one run never needs it.
    const size_t helpers = std::min(workers_.size(), count > 0 ? count - 1 : 0);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      runs_ = runs;
      count_ = count;
      sink_ = &sink;
      latency_ = &latency;
      next_.store(0, std::memory_order_relaxed);
      failed_.store(false, std::memory_order_relaxed);
      failure_ = Failure{};
      wanted_ = helpers;
      active_ = helpers;
    }
    for (size_t i = 0; i < helpers; ++i) wake_.notify_one();
    drain(0);
    std::unique_lock<std::mutex> lock(mutex_);
    // Threads that have not woken by now are no longer needed.
    active_ -= wanted_;
    wanted_ = 0;
    done_.wait(lock, [this] { return active_ == 0; });
    return failure_;
  }

 private:
  void work(size_t index) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stopping_ || wanted_ > 0; });
      if (stopping_) return;
      --wanted_;
      lock.unlock();
      drain(index);
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  void drain(size_t index) {
    uint8_t* buffer = buffer_.get() + index * slot_bytes_;
    while (!failed_.load(std::memory_order_relaxed)) {
      const size_t at = next_.fetch_add(1, std::memory_order_relaxed);
      if (at >= count_) return;
      const Failure failure = read_run(runs_[at], buffer);
      if (failure.status != SE_OK) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (failure_.status == SE_OK) failure_ = failure;
        failed_.store(true, std::memory_order_relaxed);
      }
    }
  }

  Failure read_run(const Run& run, uint8_t* buffer) {
    const size_t bytes = run.pages * kPage;
    const Clock::time_point started = Clock::now();
    size_t done = 0;
    while (done < bytes) {
      const ssize_t got = pread(fd_, buffer + done, bytes - done,
                                static_cast<off_t>(page_offset(run.page) + done));
      if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (got < 0) return {SE_SYSTEM, errno, run.page};
      if (got == 0) return {SE_SHORT, 0, run.page + done / kPage};
      done += static_cast<size_t>(got);
    }
    latency_->add(microseconds_since(started));
    uint64_t page = 0;
    const int status = sink_->deliver(run, buffer, &page);
    return {status, 0, page};
  }

  const int fd_;
  const size_t slot_bytes_;
  AlignedBuffer buffer_;
  std::vector<std::thread> workers_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  bool stopping_ = false;
  size_t wanted_ = 0;  // helpers asked for that have not woken
  size_t active_ = 0;  // helpers asked for that have not finished
  const Run* runs_ = nullptr;
  size_t count_ = 0;
  Sink* sink_ = nullptr;
  Histogram* latency_ = nullptr;
  std::atomic<size_t> next_{0};
  std::atomic<bool> failed_{false};
  Failure failure_;
};

}  // namespace

std::unique_ptr<Reader> make_pread_reader(const ReaderOptions& options, std::string* reason) {
  auto reader = std::make_unique<PreadReader>(options);
  if (!reader->setup(options.threads, reason)) return nullptr;
  return reader;
}

}  // namespace spark_engram
