// A set-associative cache of rows with round-robin replacement. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>

#include "page.h"

namespace spark_engram {

class RowCache {
 public:
  // False when `bytes` is too small for one set or cannot be allocated.
  bool setup(uint64_t bytes, uint32_t ways);
  bool enabled() const { return sets_ > 0; }

  // Copies the row out and returns true if it is cached.
  bool find(uint64_t row, uint8_t* weight, uint8_t* scale) const;
  void insert(uint64_t row, const uint8_t* weight, const uint8_t* scale);

  // Bytes that one cached row costs: the row and its tag.
  static constexpr uint64_t kSlot = kRow + sizeof(uint64_t);

 private:
  uint64_t set_of(uint64_t row) const;

  uint64_t sets_ = 0;
  uint32_t ways_ = 0;
  std::unique_ptr<uint64_t[]> tags_;  // row + 1; 0 is an empty slot
  std::unique_ptr<uint8_t[]> rows_;
  std::unique_ptr<uint8_t[]> victims_;
};

}  // namespace spark_engram
