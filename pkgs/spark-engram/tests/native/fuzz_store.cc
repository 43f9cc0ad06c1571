// libFuzzer target: the bytes become the row pages of a file, and rows are read from it. With an
// odd first byte the pages' trailers are made valid, so that the row contents are reached.
// Build: cmake -B build -DCMAKE_CXX_COMPILER=clang++ -DSPARK_ENGRAM_FUZZ=ON
//        -DSPARK_ENGRAM_SANITIZE=address,undefined
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "crc32c.h"
#include "page.h"
#include "spark_engram.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  constexpr size_t kPages = 3;
  const int fd = memfd_create("fuzz", 0);
  if (fd < 0) return 0;
  if (bytes > kPages * SE_PAGE_BYTES) bytes = kPages * SE_PAGE_BYTES;
  static uint8_t pages[kPages * SE_PAGE_BYTES];
  std::memset(pages, 0, sizeof pages);
  std::memcpy(pages, data, bytes);
  uint32_t file_id = 0;
  std::memcpy(&file_id, pages, 4);
  for (size_t page = 0; page < kPages && (pages[0] & 1) != 0; ++page) {
    uint8_t* start = pages + page * SE_PAGE_BYTES;
    spark_engram::store64(start + spark_engram::kPageNumberAt, page);
    spark_engram::store32(start + spark_engram::kFileIdAt, file_id);
    spark_engram::store32(start + spark_engram::kPageCrcAt,
                          spark_engram::crc32c(start, spark_engram::kPageCrcAt));
  }
  if (pwrite(fd, pages, sizeof pages, SE_PAGE_BYTES) != sizeof pages) {
    close(fd);
    return 0;
  }
  se_options options{};
  options.fd = fd;
  options.backend = SE_BACKEND_PREAD;
  options.depth = options.threads = options.cache_ways = 1;
  options.max_run_pages = 2;
  options.row_end = kPages * SE_ROWS_PER_PAGE;
  options.max_ids = 64;
  options.file_id = file_id;
  options.cache_bytes = bytes > 1 ? data[1] * 100 : 0;
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
