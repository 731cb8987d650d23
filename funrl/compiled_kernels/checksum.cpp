// CRC-32C (Castagnoli) of bytes, by the processor's own instruction; and files that are read and written a piece at a
// time, each summed while it is in the processor's cache.
//
// The instruction takes 8 bytes in a cycle but answers after three, so three neighbouring blocks are summed at once and
// their sums joined: with S(x) the sum of a state x that is followed by a block of zeros, which is linear in x,
// sum(A B C) = S(S(sum(A)) ^ sum(B)) ^ sum(C) where B and C begin from 0.

#include <nmmintrin.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t BLOCK = 4096;
constexpr int64_t PIECE = 3 * BLOCK * 16;

uint64_t word(const unsigned char* at) {
  uint64_t x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

// S by the four bytes of a state.
struct Zeros {
  uint32_t table[4][256];

  Zeros() {
    uint32_t of_bit[32];
    for (int bit = 0; bit < 32; ++bit) {
      uint64_t state = uint32_t{1} << bit;
      for (int64_t i = 0; i < BLOCK; i += 8) state = _mm_crc32_u64(state, 0);
      of_bit[bit] = static_cast<uint32_t>(state);
    }
    for (int byte = 0; byte < 4; ++byte)
      for (int value = 0; value < 256; ++value) {
        uint32_t sum = 0;
        for (int bit = 0; bit < 8; ++bit)
          if (value >> bit & 1) sum ^= of_bit[8 * byte + bit];
        table[byte][value] = sum;
      }
  }

  uint64_t operator()(uint64_t x) const {
    return table[0][x & 255] ^ table[1][x >> 8 & 255] ^ table[2][x >> 16 & 255] ^ table[3][x >> 24 & 255];
  }
};

}  // namespace

// The checksum of some bytes, of which it is `before`, and `count` more; 0 is that of none.
extern "C" uint32_t funrl_crc32c(const void* data, int64_t count, uint32_t before) {
  static const Zeros followed;
  const auto* at = static_cast<const unsigned char*>(data);
  uint64_t a = ~before;
  for (; count >= 3 * BLOCK; count -= 3 * BLOCK, at += 3 * BLOCK) {
    uint64_t b = 0, c = 0;
    for (int64_t i = 0; i < BLOCK; i += 8) {
      a = _mm_crc32_u64(a, word(at + i));
      b = _mm_crc32_u64(b, word(at + BLOCK + i));
      c = _mm_crc32_u64(c, word(at + 2 * BLOCK + i));
    }
    a = followed(followed(a) ^ b) ^ c;
  }
  for (; count >= 8; count -= 8, at += 8) a = _mm_crc32_u64(a, word(at));
  auto last = static_cast<uint32_t>(a);
  for (; count > 0; --count) last = _mm_crc32_u8(last, *at++);
  return ~last;
}

namespace {

// Have Linux make the pages of a piece of new memory at once, which takes less than one after the other.
void populate(unsigned char* at, int64_t count) {
#ifdef MADV_POPULATE_WRITE
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), low = reinterpret_cast<uintptr_t>(at);
  const uintptr_t first = (low + page - 1) / page * page, last = (low + count) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_POPULATE_WRITE);
#endif
}

}  // namespace

// Read `count` bytes of a file from `offset` on; what is there, fewer where the file ends, or -errno.
extern "C" int64_t funrl_read_summed(int file, int64_t offset, void* data, int64_t count, uint32_t* sum) {
  auto* at = static_cast<unsigned char*>(data);
  int64_t done = 0;
  *sum = 0;
  while (done < count) {
    const int64_t piece = std::min(PIECE, count - done);
    populate(at + done, piece);
    const ssize_t found = pread(file, at + done, piece, offset + done);
    if (found < 0 && errno == EINTR) continue;
    if (found < 0) return -errno;
    if (found == 0) break;
    *sum = funrl_crc32c(at + done, found, *sum);
    done += found;
  }
  return done;
}

// Write `count` bytes to the end of a file; as many, or -errno.
extern "C" int64_t funrl_write_summed(int file, const void* data, int64_t count, uint32_t* sum) {
  const auto* at = static_cast<const unsigned char*>(data);
  int64_t done = 0;
  *sum = 0;
  while (done < count) {
    const ssize_t written = write(file, at + done, std::min(PIECE, count - done));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return -errno;
    *sum = funrl_crc32c(at + done, written, *sum);
    done += written;
  }
  return done;
}
