#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define SE_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define SE_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace spark_engram {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // reflected 0x1EDC6F41

using Table = std::array<std::array<uint32_t, 256>, 8>;

constexpr Table make_table() {
  Table table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    table[0][byte] = crc;
  }
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (size_t slice = 1; slice < 8; ++slice) {
      const uint32_t before = table[slice - 1][byte];
      table[slice][byte] = (before >> 8) ^ table[0][before & 0xFF];
    }
  }
  return table;
}

constexpr Table kTable = make_table();

// State in, state out: no inversion at either end.
uint32_t update_portable(uint32_t crc, const uint8_t* data, size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t word = 0;
    std::memcpy(&word, data, 8);
    word ^= crc;
    crc = 0;
    for (size_t i = 0; i < 8; ++i) crc ^= kTable[7 - i][(word >> (8 * i)) & 0xFF];
  }
  for (; bytes > 0; ++data, --bytes) crc = (crc >> 8) ^ kTable[0][(crc ^ *data) & 0xFF];
  return crc;
}

#ifdef SE_CRC_TARGET

SE_CRC_TARGET inline uint32_t step8(uint32_t crc, uint64_t word) {
#if defined(__x86_64__)
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
#else
  return __crc32cd(crc, word);
#endif
}

SE_CRC_TARGET inline uint32_t step1(uint32_t crc, uint8_t byte) {
#if defined(__x86_64__)
  return _mm_crc32_u8(crc, byte);
#else
  return __crc32cb(crc, byte);
#endif
}

SE_CRC_TARGET uint32_t update_serial(uint32_t crc, const uint8_t* data, size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t word = 0;
    std::memcpy(&word, data, 8);
    crc = step8(crc, word);
  }
  for (; bytes > 0; ++data, --bytes) crc = step1(crc, *data);
  return crc;
}

// The instruction has a latency of three cycles and a throughput of one, so three streams run
// at once. A page's 4092 bytes are three lanes of 1360 and a rest of 12.
constexpr size_t kLane = 1360;

// Moving a state over kLane zero bytes is linear; one table of 256 for each byte of the state.
struct LaneShift {
  std::array<std::array<uint32_t, 256>, 4> table{};

  LaneShift() {
    std::array<uint32_t, 32> bit{};
    const std::array<uint8_t, kLane> zeros{};
    for (size_t i = 0; i < 32; ++i) bit[i] = update_portable(1U << i, zeros.data(), kLane);
    for (size_t byte = 0; byte < 4; ++byte) {
      for (uint32_t value = 0; value < 256; ++value) {
        uint32_t sum = 0;
        for (size_t i = 0; i < 8; ++i) {
          if (((value >> i) & 1) != 0) sum ^= bit[8 * byte + i];
        }
        table[byte][value] = sum;
      }
    }
  }

  uint32_t operator()(uint32_t crc) const {
    return table[0][crc & 0xFF] ^ table[1][(crc >> 8) & 0xFF] ^ table[2][(crc >> 16) & 0xFF] ^
           table[3][crc >> 24];
  }
};

SE_CRC_TARGET uint32_t update_lanes(uint32_t crc, const uint8_t* data, size_t bytes) {
  static const LaneShift shift;
  while (bytes >= 3 * kLane) {
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t i = 0; i < kLane; i += 8) {
      uint64_t a = 0;
      uint64_t b = 0;
      uint64_t c = 0;
      std::memcpy(&a, data + i, 8);
      std::memcpy(&b, data + kLane + i, 8);
      std::memcpy(&c, data + 2 * kLane + i, 8);
      crc = step8(crc, a);
      second = step8(second, b);
      third = step8(third, c);
    }
    crc = shift(shift(crc) ^ second) ^ third;
    data += 3 * kLane;
    bytes -= 3 * kLane;
  }
  return update_serial(crc, data, bytes);
}

bool have_instruction() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2") != 0;
#else
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}

#endif  // SE_CRC_TARGET

}  // namespace

uint32_t crc32c_portable(const void* data, size_t bytes, uint32_t seed) {
  return ~update_portable(~seed, static_cast<const uint8_t*>(data), bytes);
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t seed) {
#ifdef SE_CRC_TARGET
  static const bool fast = have_instruction();
  if (fast) return ~update_lanes(~seed, static_cast<const uint8_t*>(data), bytes);
#endif
  return crc32c_portable(data, bytes, seed);
}

}  // namespace spark_engram
