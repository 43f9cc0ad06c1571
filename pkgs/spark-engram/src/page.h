#pragma once

#include <cstddef>
#include <cstdint>

#include "spark_engram.h"

namespace spark_engram {

constexpr size_t kPage = SE_PAGE_BYTES;
constexpr size_t kRowsPerPage = SE_ROWS_PER_PAGE;
constexpr size_t kRow = SE_ROW_BYTES;
constexpr size_t kWeight = SE_WEIGHT_BYTES;
constexpr size_t kScale = SE_SCALE_BYTES;

// Where the trailer's members are in a page (FORMAT.md).
constexpr size_t kPageNumberAt = 4080;
constexpr size_t kFileIdAt = 4088;
constexpr size_t kPageCrcAt = 4092;

static_assert(kRowsPerPage * kRow <= kPageNumberAt);

// Numbers are stored little-endian whatever the machine is.
inline uint32_t load32(const uint8_t* at) {
  return uint32_t{at[0]} | uint32_t{at[1]} << 8 | uint32_t{at[2]} << 16 | uint32_t{at[3]} << 24;
}
inline uint64_t load64(const uint8_t* at) {
  return uint64_t{load32(at)} | uint64_t{load32(at + 4)} << 32;
}
inline void store32(uint8_t* at, uint32_t value) {
  for (int i = 0; i < 4; ++i) at[i] = static_cast<uint8_t>(value >> (8 * i));
}
inline void store64(uint8_t* at, uint64_t value) {
  for (int i = 0; i < 8; ++i) at[i] = static_cast<uint8_t>(value >> (8 * i));
}

// Whether the page at data is page number `number` of the file `file_id`, undamaged.
bool page_is_good(const uint8_t* data, uint64_t number, uint32_t file_id);

}  // namespace spark_engram
