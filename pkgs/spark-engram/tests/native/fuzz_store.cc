// libFuzzer target: the bytes become the row pages of a file, and rows are read from it.
// Build: cmake -B build -DCMAKE_CXX_COMPILER=clang++ -DSPARK_ENGRAM_FUZZ=ON
//        -DSPARK_ENGRAM_SANITIZE=address,undefined
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "spark_engram.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  constexpr size_t kPages = 3;
  const int fd = memfd_create("fuzz", 0);
  if (fd < 0 || ftruncate(fd, (kPages + 1) * SE_PAGE_BYTES) != 0) return 0;
  if (bytes > kPages * SE_PAGE_BYTES) bytes = kPages * SE_PAGE_BYTES;
  if (pwrite(fd, data, bytes, SE_PAGE_BYTES) != static_cast<ssize_t>(bytes)) return 0;
  se_options options{};
  options.fd = fd;
  options.backend = SE_BACKEND_PREAD;
  options.depth = options.threads = options.cache_ways = 1;
  options.max_run_pages = 2;
  options.row_end = kPages * SE_ROWS_PER_PAGE;
  options.max_ids = 64;
  if (bytes >= 4) std::memcpy(&options.file_id, data, 4);
  se_store* store = nullptr;
  char message[64];
  if (se_store_open(&options, &store, message, sizeof message) == SE_OK) {
    int64_t ids[64];
    for (int i = 0; i < 64; ++i) ids[i] = bytes > 0 ? data[i % bytes] : i;
    static uint8_t weights[64 * SE_WEIGHT_BYTES];
    static uint8_t scales[64 * SE_SCALE_BYTES];
    se_store_gather(store, ids, 64, weights, scales, message, sizeof message);
    se_store_close(store);
  }
  close(fd);
  return 0;
}
