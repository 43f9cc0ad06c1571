#include "page.h"

#include <algorithm>
#include <cstring>

#include "crc32c.h"

namespace spark_engram {

bool page_is_good(const uint8_t* data, uint64_t number, uint32_t file_id) {
  return load64(data + kPageNumberAt) == number && load32(data + kFileIdAt) == file_id &&
         load32(data + kPageCrcAt) == crc32c(data, kPageCrcAt);
}

}  // namespace spark_engram

using namespace spark_engram;

extern "C" {

uint32_t se_abi_version(void) { return SE_ABI_VERSION; }

uint32_t se_crc32c(const void* data, size_t bytes, uint32_t seed) {
  return crc32c(data, bytes, seed);
}

uint32_t se_pack_pages(const uint8_t* weights, const uint8_t* scales, uint64_t rows,
                       uint64_t first_page, uint32_t file_id, uint32_t seed, uint8_t* out) {
  for (uint64_t page = first_page; rows > 0; ++page, out += kPage) {
    const size_t here = std::min<uint64_t>(rows, kRowsPerPage);
    for (size_t row = 0; row < here; ++row) {
      std::memcpy(out + row * kRow, weights + row * kWeight, kWeight);
      std::memcpy(out + row * kRow + kWeight, scales + row * kScale, kScale);
    }
    std::memset(out + here * kRow, 0, kPageNumberAt - here * kRow);
    store64(out + kPageNumberAt, page);
    store32(out + kFileIdAt, file_id);
    store32(out + kPageCrcAt, crc32c(out, kPageCrcAt));
    seed = crc32c(out + kPageCrcAt, 4, seed);
    weights += here * kWeight;
    scales += here * kScale;
    rows -= here;
  }
  return seed;
}

int se_check_pages(const uint8_t* data, uint64_t pages, uint64_t first_page, uint32_t file_id,
                   uint32_t* crc, uint64_t* bad_page) {
  uint32_t sum = *crc;
  for (uint64_t i = 0; i < pages; ++i, data += kPage) {
    if (!page_is_good(data, first_page + i, file_id)) {
      *bad_page = first_page + i;
      return SE_CORRUPT;
    }
    sum = crc32c(data + kPageCrcAt, 4, sum);
  }
  *crc = sum;
  return SE_OK;
}

}  // extern "C"
