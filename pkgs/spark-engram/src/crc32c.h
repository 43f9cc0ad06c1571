#pragma once

#include <cstddef>
#include <cstdint>

namespace spark_engram {

// CRC-32C (Castagnoli, RFC 3720 B.4) of data, continued from seed.
uint32_t crc32c(const void* data, size_t bytes, uint32_t seed = 0);

// The table-driven version, for tests and for processors without the instruction.
uint32_t crc32c_portable(const void* data, size_t bytes, uint32_t seed = 0);

}  // namespace spark_engram
