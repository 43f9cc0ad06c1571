#include "row_cache.h"

#include <cstring>
#include <new>

namespace spark_engram {

bool RowCache::setup(uint64_t bytes, uint32_t ways) {
  const uint64_t sets = bytes / (kSlot * ways);
  if (sets == 0) return false;
  tags_.reset(new (std::nothrow) uint64_t[sets * ways]());
  rows_.reset(new (std::nothrow) uint8_t[sets * ways * kRow]);
  victims_.reset(new (std::nothrow) uint8_t[sets]());
  if (tags_ == nullptr || rows_ == nullptr || victims_ == nullptr) return false;
  sets_ = sets;
  ways_ = ways;
  return true;
}

uint64_t RowCache::set_of(uint64_t row) const {
  // Fibonacci hashing; the high half spreads over any number of sets without a division.
  const uint64_t mixed = row * 0x9E3779B97F4A7C15ULL;
  return ((mixed >> 32) * sets_) >> 32;
}

bool RowCache::find(uint64_t row, uint8_t* weight, uint8_t* scale) const {
  const uint64_t first = set_of(row) * ways_;
  for (uint64_t slot = first; slot < first + ways_; ++slot) {
    if (tags_[slot] == row + 1) {
      std::memcpy(weight, &rows_[slot * kRow], kWeight);
      std::memcpy(scale, &rows_[slot * kRow + kWeight], kScale);
      return true;
    }
  }
  return false;
}

void RowCache::insert(uint64_t row, const uint8_t* weight, const uint8_t* scale) {
  const uint64_t set = set_of(row);
  const uint64_t first = set * ways_;
  for (uint64_t slot = first; slot < first + ways_; ++slot) {
    if (tags_[slot] == row + 1) return;
  }
  const uint64_t slot = first + victims_[set];
  victims_[set] = static_cast<uint8_t>((victims_[set] + 1) % ways_);
  tags_[slot] = row + 1;
  std::memcpy(&rows_[slot * kRow], weight, kWeight);
  std::memcpy(&rows_[slot * kRow + kWeight], scale, kScale);
}

}  // namespace spark_engram
