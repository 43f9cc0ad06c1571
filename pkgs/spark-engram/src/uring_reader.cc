#include "reader.h"

#ifndef SPARK_ENGRAM_HAVE_URING

namespace spark_engram {
std::unique_ptr<Reader> make_uring_reader(const ReaderOptions&, std::string* reason) {
  *reason = "this build has no io_uring backend (liburing was not found)";
  return nullptr;
}
}  // namespace spark_engram

#else

#include <liburing.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

namespace spark_engram {
namespace {

constexpr unsigned kSqpollIdleMs = 2000;
// One in flight, one being delivered.
constexpr size_t kBuffersPerRead = 2;

class UringReader final : public Reader {
 public:
  UringReader() = default;
  UringReader(const UringReader&) = delete;
  UringReader& operator=(const UringReader&) = delete;

  ~UringReader() override {
    if (ready_) io_uring_queue_exit(&ring_);
  }

  bool setup(const ReaderOptions& options, std::string* reason) {
    io_uring_params params{};
    int error = 0;
    if (options.sqpoll) {
      params.flags = IORING_SETUP_SQPOLL;
      params.sq_thread_idle = kSqpollIdleMs;
      error = io_uring_queue_init_params(options.depth, &ring_, &params);
    } else {
#ifdef IORING_SETUP_COOP_TASKRUN
      // Completions are reaped by the thread that waits for them: no interrupts needed.
      params.flags = IORING_SETUP_COOP_TASKRUN;
#endif
      error = io_uring_queue_init_params(options.depth, &ring_, &params);
      if (error == -EINVAL && params.flags != 0) {  // before Linux 5.19
        params = {};
        error = io_uring_queue_init_params(options.depth, &ring_, &params);
      }
    }
    if (error < 0) {
      *reason = std::string("io_uring refused: ") + std::strerror(-error);
      return false;
    }
    ready_ = true;
    error = io_uring_register_files(&ring_, &options.fd, 1);
    if (error < 0) {
      *reason = std::string("io_uring refused to register the file: ") + std::strerror(-error);
      return false;
    }
    depth_ = options.depth;
    slot_bytes_ = options.max_run_pages * kPage;
    const size_t slots = kBuffersPerRead * depth_;
    buffer_ = allocate_aligned(slots * slot_bytes_);
    if (buffer_ == nullptr) {
      *reason = "no memory for read buffers";
      return false;
    }
    const iovec whole{buffer_.get(), slots * slot_bytes_};
    error = io_uring_register_buffers(&ring_, &whole, 1);
    fixed_buffers_ = error == 0;
    if (!fixed_buffers_) {
      // Only slower: the kernel pins the pages for each read. Usually RLIMIT_MEMLOCK.
      *reason = std::string("read buffers are not registered: ") + std::strerror(-error) +
                " (raise the memlock limit)";
    }
    slots_.resize(slots);
    complete_.reserve(slots);
    free_.reserve(slots);
    for (uint32_t i = 0; i < slots; ++i) free_.push_back(i);
    return true;
  }

  const char* name() const override { return "io_uring"; }

  Failure read(const Run* runs, size_t count, Sink& sink, Histogram& latency) override {
    Failure failure = broken_;
    size_t next = 0;
    size_t in_flight = 0;
    while (in_flight > 0 || !complete_.empty() || (next < count && failure.status == SE_OK)) {
      // New reads go out before finished ones are looked at, so that the drive never waits.
      while (next < count && in_flight < depth_ && !free_.empty() && failure.status == SE_OK) {
        if (!start(free_.back(), runs[next])) break;
        free_.pop_back();
        ++next;
        ++in_flight;
      }
      const int submitted = complete_.empty() ? io_uring_submit_and_wait(&ring_, 1)
                                              : io_uring_submit(&ring_);
      if (submitted < 0 && submitted != -EINTR && submitted != -EAGAIN && submitted != -EBUSY) {
        // The ring itself failed. Reads may still be in flight: they write to our buffers, which
        // outlive this call, but their completions must not be taken for those of a later batch.
        broken_ = {SE_SYSTEM, -submitted, next < count ? runs[next].page : 0};
        return broken_;
      }
      for (const uint32_t index : complete_) {
        deliver(index, failure, sink);
        free_.push_back(index);
      }
      complete_.clear();
      unsigned head = 0;
      unsigned reaped = 0;
      io_uring_cqe* completion = nullptr;
      io_uring_for_each_cqe(&ring_, head, completion) {
        ++reaped;
        const auto index = static_cast<uint32_t>(io_uring_cqe_get_data64(completion));
        switch (take(index, completion->res, failure, latency)) {
          case Next::kAgain: break;
          case Next::kDeliver: complete_.push_back(index); --in_flight; break;
          case Next::kDrop: free_.push_back(index); --in_flight; break;
        }
      }
      io_uring_cq_advance(&ring_, reaped);
    }
    return failure;
  }

 private:
  struct Slot {
    Run run{};
    uint32_t done = 0;
    Clock::time_point started;
  };

  bool start(uint32_t index, const Run& run) {
    slots_[index] = Slot{run, 0, Clock::now()};
    return submit(index);
  }

  bool submit(uint32_t index) {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    if (entry == nullptr) {  // with SQPOLL the kernel may not have taken the last ones yet
      io_uring_submit(&ring_);
      entry = io_uring_get_sqe(&ring_);
      if (entry == nullptr) return false;
    }
    const Slot& slot = slots_[index];
    uint8_t* memory = buffer_.get() + index * slot_bytes_ + slot.done;
    const auto bytes = static_cast<unsigned>(slot.run.pages * kPage - slot.done);
    const uint64_t offset = page_offset(slot.run.page) + slot.done;
    if (fixed_buffers_) {
      io_uring_prep_read_fixed(entry, 0, memory, bytes, offset, 0);
    } else {
      io_uring_prep_read(entry, 0, memory, bytes, offset);
    }
    io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
    io_uring_sqe_set_data64(entry, index);
    return true;
  }

  enum class Next { kAgain, kDeliver, kDrop };

  // What to do with a slot after a completion.
  Next take(uint32_t index, int result, Failure& failure, Histogram& latency) {
    Slot& slot = slots_[index];
    const auto fail = [&](int status, int error, uint64_t page) {
      if (failure.status == SE_OK) failure = {status, error, page};
      return Next::kDrop;
    };
    if (result == -EINTR || result == -EAGAIN) {
      return submit(index) ? Next::kAgain : fail(SE_SYSTEM, -result, slot.run.page);
    }
    if (result < 0) return fail(SE_SYSTEM, -result, slot.run.page);
    if (result == 0) return fail(SE_SHORT, 0, slot.run.page + slot.done / kPage);
    slot.done += static_cast<uint32_t>(result);
    if (slot.done < slot.run.pages * kPage) {
      return submit(index) ? Next::kAgain
                           : fail(SE_SHORT, 0, slot.run.page + slot.done / kPage);
    }
    latency.add(microseconds_since(slot.started));
    return failure.status == SE_OK ? Next::kDeliver : Next::kDrop;
  }

  void deliver(uint32_t index, Failure& failure, Sink& sink) {
    if (failure.status != SE_OK) return;
    uint64_t page = 0;
    const int status = sink.deliver(slots_[index].run, buffer_.get() + index * slot_bytes_, &page);
    if (status != SE_OK) failure = {status, 0, page};
  }

  io_uring ring_{};
  bool ready_ = false;
  bool fixed_buffers_ = false;
  Failure broken_;  // once set, every later batch fails with it
  size_t depth_ = 0;
  size_t slot_bytes_ = 0;
  AlignedBuffer buffer_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> complete_;  // read, not yet delivered
  std::vector<uint32_t> free_;
};

}  // namespace

std::unique_ptr<Reader> make_uring_reader(const ReaderOptions& options, std::string* reason) {
  auto reader = std::make_unique<UringReader>();
  if (!reader->setup(options, reason)) return nullptr;
  return reader;
}

}  // namespace spark_engram

#endif  // SPARK_ENGRAM_HAVE_URING
