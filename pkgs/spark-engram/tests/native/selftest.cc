// Exercises the core from many threads and with damaged files. Built with sanitizers by
// test_sanitizers.py; prints OK or the failed line.
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "crc32c.h"
#include "page.h"
#include "spark_engram.h"

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) {                                                      \
      std::fprintf(stderr, "FAILED line %d: %s\n", __LINE__, #condition);    \
      std::exit(1);                                                          \
    }                                                                        \
  } while (false)

namespace {

constexpr uint64_t kStart = 1000;
constexpr uint64_t kRows = 20011;  // the last page is not full
constexpr uint32_t kFileId = 0xC0FFEE42;

struct Random {
  uint64_t state;
  uint64_t operator()() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
  }
};

uint8_t weight_byte(uint64_t row, size_t i) { return static_cast<uint8_t>(row * 31 + i * 7); }
uint8_t scale_byte(uint64_t row, size_t i) { return static_cast<uint8_t>(row * 13 + i); }

std::string make_file(const char* folder) {
  std::vector<uint8_t> weights(kRows * SE_WEIGHT_BYTES);
  std::vector<uint8_t> scales(kRows * SE_SCALE_BYTES);
  for (uint64_t row = 0; row < kRows; ++row) {
    for (size_t i = 0; i < SE_WEIGHT_BYTES; ++i) {
      weights[row * SE_WEIGHT_BYTES + i] = weight_byte(row, i);
    }
    for (size_t i = 0; i < SE_SCALE_BYTES; ++i) {
      scales[row * SE_SCALE_BYTES + i] = scale_byte(row, i);
    }
  }
  const uint64_t pages = (kRows + SE_ROWS_PER_PAGE - 1) / SE_ROWS_PER_PAGE;
  std::vector<uint8_t> data((pages + 1) * SE_PAGE_BYTES);
  const uint32_t made = se_pack_pages(weights.data(), scales.data(), kRows, 0, kFileId, 0,
                                      data.data() + SE_PAGE_BYTES);
  uint32_t seen = 0;
  uint64_t bad = 0;
  CHECK(se_check_pages(data.data() + SE_PAGE_BYTES, pages, 0, kFileId, &seen, &bad) == SE_OK);
  CHECK(made == seen);
  std::string path = std::string(folder) + "/selftest.bin";
  const int fd = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
  CHECK(fd >= 0);
  CHECK(write(fd, data.data(), data.size()) == static_cast<ssize_t>(data.size()));
  close(fd);
  return path;
}

se_options options_for(int fd, uint32_t backend, Random& random) {
  se_options options{};
  options.fd = fd;
  options.backend = backend;
  options.depth = 1 + random() % 64;
  options.threads = 1 + random() % 12;
  options.max_run_pages = 1 + random() % 16;
  options.cache_ways = 1 + random() % 16;
  options.file_id = kFileId;
  options.row_start = kStart;
  options.row_end = kStart + kRows;
  options.max_ids = 1 + random() % 5000;
  options.cache_bytes = random() % 2 == 0 ? 0 : 200000;
  return options;
}

se_store* open_store(const se_options& options) {
  char message[256] = "";
  se_store* store = nullptr;
  if (se_store_open(&options, &store, message, sizeof message) != SE_OK) {
    std::fprintf(stderr, "FAILED to open: %s\n", message);
    std::exit(1);
  }
  return store;
}

void gather_and_check(se_store* store, Random& random, size_t most) {
  const size_t count = random() % most;
  std::vector<int64_t> ids(count);
  for (int64_t& id : ids) {
    id = static_cast<int64_t>(random() % (kRows + 2 * kStart));
    if (random() % 50 == 0) id = static_cast<int64_t>(random());
  }
  std::vector<uint8_t> weights(count * SE_WEIGHT_BYTES, 0xEE);
  std::vector<uint8_t> scales(count * SE_SCALE_BYTES, 0xEE);
  char message[256] = "";
  CHECK(se_store_gather(store, ids.data(), count, weights.data(), scales.data(), message,
                        sizeof message) == SE_OK);
  for (size_t i = 0; i < count; ++i) {
    const bool owned = ids[i] >= static_cast<int64_t>(kStart) &&
                       ids[i] < static_cast<int64_t>(kStart + kRows);
    const uint64_t row = static_cast<uint64_t>(ids[i]) - kStart;
    for (size_t j = 0; j < SE_WEIGHT_BYTES; ++j) {
      CHECK(weights[i * SE_WEIGHT_BYTES + j] == (owned ? weight_byte(row, j) : 0xEE));
    }
    for (size_t j = 0; j < SE_SCALE_BYTES; ++j) {
      CHECK(scales[i * SE_SCALE_BYTES + j] == (owned ? scale_byte(row, j) : 0xEE));
    }
  }
}

void crc_agrees(Random& random) {
  std::vector<uint8_t> data(20000);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
  for (int i = 0; i < 300; ++i) {
    const size_t at = random() % 64;
    const size_t bytes = random() % (data.size() - at);
    const auto seed = static_cast<uint32_t>(random());
    CHECK(spark_engram::crc32c(data.data() + at, bytes, seed) ==
          spark_engram::crc32c_portable(data.data() + at, bytes, seed));
  }
}

// One store shared by several threads: gathers, jobs and statistics at once.
void threads_share(int fd, uint32_t backend, Random& random) {
  se_store* store = open_store(options_for(fd, backend, random));
  std::vector<std::thread> threads;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([store, seed] {
      Random mine{seed * 977};
      for (int i = 0; i < 12; ++i) gather_and_check(store, mine, 400);
    });
  }
  threads.emplace_back([store] {
    int64_t id = kStart + 5;
    uint8_t weight[SE_WEIGHT_BYTES];
    uint8_t scale[SE_SCALE_BYTES];
    se_queue* queue = se_queue_new();
    se_job* job = se_job_new(store, queue, &id, 1, weight, scale, 1);
    for (int i = 0; i < 12; ++i) {
      id = static_cast<int64_t>(kStart) + 5 + i;
      if (i % 2 == 0) {
        se_job_run(job);
      } else {
        se_job_start(job);
        se_job_wait(job);
      }
      CHECK(weight[3] == weight_byte(5 + static_cast<uint64_t>(i), 3));
      se_stats stats;
      se_store_stats(store, &stats);
    }
    CHECK(se_job_status(job) == SE_OK);
    se_job_free(job);
    se_queue_free(queue);
  });
  for (std::thread& thread : threads) thread.join();
  se_store_close(store);
}

// Random damage anywhere in the row pages: an error or the right rows, nothing else.
void damage(const std::string& path, uint32_t backend, Random& random) {
  const std::string copy = path + ".damaged";
  std::vector<uint8_t> data((kRows / SE_ROWS_PER_PAGE + 2) * SE_PAGE_BYTES);
  const int from = open(path.c_str(), O_RDONLY);
  CHECK(read(from, data.data(), data.size()) == static_cast<ssize_t>(data.size()));
  close(from);
  for (int round = 0; round < 20; ++round) {
    std::vector<uint8_t> changed = data;
    for (int edits = 0; edits < 400; ++edits) {
      const size_t at = SE_PAGE_BYTES + random() % (changed.size() - SE_PAGE_BYTES - 8);
      const uint64_t value = random();
      std::memcpy(&changed[at], &value, 1 + random() % 8);
    }
    const int to = open(copy.c_str(), O_CREAT | O_TRUNC | O_RDWR, 0600);
    CHECK(write(to, changed.data(), changed.size()) == static_cast<ssize_t>(changed.size()));
    se_store* store = open_store(options_for(to, backend, random));
    int failures = 0;
    for (int i = 0; i < 60; ++i) {
      int64_t id = static_cast<int64_t>(kStart + random() % kRows);
      uint8_t weight[SE_WEIGHT_BYTES];
      uint8_t scale[SE_SCALE_BYTES];
      char message[8];  // too short for the text: must be cut, not overrun
      const int status = se_store_gather(store, &id, 1, weight, scale, message, sizeof message);
      const uint64_t row = static_cast<uint64_t>(id) - kStart;
      if (status == SE_OK) {
        CHECK(weight[100] == weight_byte(row, 100) && scale[7] == scale_byte(row, 7));
      } else {
        CHECK(status == SE_CORRUPT && std::strlen(message) == sizeof message - 1);
        ++failures;
      }
    }
    CHECK(failures > 0);
    se_store_close(store);
    close(to);
  }
  unlink(copy.c_str());
}

// Options that do not fit the file must be refused before anything is read.
void hostile_options(int fd, Random& random) {
  int opened = 0;
  for (int i = 0; i < 4000; ++i) {
    se_options options = options_for(fd, SE_BACKEND_PREAD, random);
    options.threads = 1;
    options.cache_bytes = 0;
    switch (random() % 6) {
      case 0: options.row_end = random(); break;
      case 1: options.row_start = random(); break;
      case 2: options.depth = static_cast<uint32_t>(random()); break;
      case 3: options.max_run_pages = static_cast<uint32_t>(random()); break;
      case 4: options.cache_ways = static_cast<uint32_t>(random() % 64); break;
      default: options.fd = static_cast<int32_t>(random() % 2 == 0 ? -1 : 100000);
    }
    se_store* store = nullptr;
    char message[64] = "";
    if (se_store_open(&options, &store, message, sizeof message) == SE_OK) {
      ++opened;
      se_store_close(store);
    } else {
      CHECK(store == nullptr && message[0] != '\0');
    }
  }
  CHECK(opened > 0);
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count == 3);  // folder, backend
  const uint32_t backend =
      std::strcmp(arguments[2], "pread") == 0 ? SE_BACKEND_PREAD : SE_BACKEND_IO_URING;
  Random random{88172645463325252ULL};
  crc_agrees(random);
  const std::string path = make_file(arguments[1]);
  const int fd = open(path.c_str(), O_RDONLY);
  CHECK(fd >= 0);
  for (int i = 0; i < 12; ++i) {
    se_store* store = open_store(options_for(fd, backend, random));
    for (int j = 0; j < 6; ++j) gather_and_check(store, random, 3000);
    se_store_close(store);
  }
  for (int i = 0; i < 4; ++i) threads_share(fd, backend, random);
  damage(path, backend, random);
  hostile_options(fd, random);
  close(fd);
  unlink(path.c_str());
  std::puts("OK");
  return 0;
}
