// Products of bfloat16 by the matrix unit of a processor (AMX), where it has one and the system lets it be used.
//
// A tile holds 16 rows of 64 bytes. An instruction adds 32 terms to each of the sums of 16 rows and 16 outputs: of those
// of even and of odd number each a sum, then both to what there is. All terms of an output are added so, from the first
// to the last; the order depends on K alone, and a row's sums on no other row.

#pragma once
#include "lanes.hpp"

#if defined(__AMX_BF16__) && defined(__AVX512F__)
#define FUNRL_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef FUNRL_TILES
namespace funrl {

constexpr int TILE_BYTES = 64, TILE_TERMS = 32, TILE_MOST_ROWS = 16, TILE_OUTPUTS = 16;

// Whether the system gives this process the tiles. It is asked once.
inline bool tiles_allowed() {
  constexpr int request_permission = 0x1023, tile_data = 18;  // of arch_prctl(2), and a component of the state
  static const bool allowed = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return allowed;
}

// Tiles of this thread for products of up to BLOCK_ROWS rows with a panel; they are given back at the end.
//
// The rows are taken in groups of equal size; the last group begins early where they do not divide, and computes again
// what the one before it has computed. Two groups read a panel together.
class Tiles {
 public:
  explicit Tiles(int rows) : rows(rows), groups(rows <= 16 ? 1 : rows <= 32 ? 2 : 4), group((rows + groups - 1) / groups) {
    struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 8; i++) shapes.bytes[i] = TILE_BYTES, shapes.rows[i] = TILE_MOST_ROWS;
    for (int i = 0; i < 4; i++) shapes.rows[i] = group;  // sums
    shapes.rows[4] = group;
    if (groups > 1) shapes.rows[5] = group;
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;

  // y[rows, PANEL] = x[rows, K] panel. K is even; from a row of x to the next are `stride` numbers.
  void multiply(const Bfloat16* x, int64_t stride, int64_t K, const Bfloat16* panel, float* y) const {
    written();
    if (groups == 1) return one_group(x, stride, K, panel, y);
    for (int i = 0; i < groups; i += 2) {
      const int first = start(i), second = start(i + 1);
      for (int half = 0; half < PANEL; half += 2 * TILE_OUTPUTS)
        two_groups(x + first * stride, x + second * stride, stride, K, panel + 2 * half, y + first * PANEL + half,
                   y + second * PANEL + half);
    }
  }

 private:
  static constexpr int PANEL_BYTES = PANEL * 2 * sizeof(Bfloat16), SUM_BYTES = PANEL * sizeof(float);
  static constexpr int NEXT = 2 * TILE_OUTPUTS;  // numbers from one tile of weights to the next in a panel
  const int rows, groups, group;

  // The compiler does not know that a tile is loaded from memory: what was written before is to be there.
  static void written() { asm volatile("" ::: "memory"); }

  int start(int i) const { return i * group < rows - group ? i * group : rows - group; }

  static void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  void one_group(const Bfloat16* x, int64_t row, int64_t K, const Bfloat16* panel, float* y) const {
    clear_sums();
    auto add = [](const Bfloat16* x, int64_t stride, const Bfloat16* w) {
      _tile_loadd(4, x, stride);
      _tile_loadd(5, w, PANEL_BYTES);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, w + NEXT, PANEL_BYTES);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, w + 2 * NEXT, PANEL_BYTES);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, w + 3 * NEXT, PANEL_BYTES);
      _tile_dpbf16ps(3, 4, 5);
    };
    int64_t k = 0;
    for (; k + TILE_TERMS <= K; k += TILE_TERMS) add(x + k, row * sizeof(Bfloat16), panel + k * PANEL);
    if (k < K) {
      Rest rest;
      const Bfloat16* w = rest.of_weights(panel + k * PANEL, PANEL, K - k);
      const Bfloat16* last = rest.of_rows(0, x + k, row, group, K - k);
      written();
      add(last, TILE_BYTES, w);
    }
    _tile_stored(0, y, SUM_BYTES);
    _tile_stored(1, y + TILE_OUTPUTS, SUM_BYTES);
    _tile_stored(2, y + 2 * TILE_OUTPUTS, SUM_BYTES);
    _tile_stored(3, y + 3 * TILE_OUTPUTS, SUM_BYTES);
  }

  // Half of a panel.
  void two_groups(const Bfloat16* x, const Bfloat16* other, int64_t row, int64_t K, const Bfloat16* panel, float* y,
                  float* other_y) const {
    clear_sums();
    auto add = [](const Bfloat16* x, const Bfloat16* other, int64_t stride, const Bfloat16* w) {
      _tile_loadd(4, x, stride);
      _tile_loadd(6, w, PANEL_BYTES);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w + NEXT, PANEL_BYTES);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, other, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    };
    int64_t k = 0;
    for (; k + TILE_TERMS <= K; k += TILE_TERMS) add(x + k, other + k, row * sizeof(Bfloat16), panel + k * PANEL);
    if (k < K) {
      Rest rest;
      const Bfloat16* w = rest.of_weights(panel + k * PANEL, PANEL / 2, K - k);
      const Bfloat16* last = rest.of_rows(0, x + k, row, group, K - k);
      const Bfloat16* other_last = rest.of_rows(1, other + k, row, group, K - k);
      written();
      add(last, other_last, TILE_BYTES, w);
    }
    _tile_stored(0, y, SUM_BYTES);
    _tile_stored(1, y + TILE_OUTPUTS, SUM_BYTES);
    _tile_stored(2, other_y, SUM_BYTES);
    _tile_stored(3, other_y + TILE_OUTPUTS, SUM_BYTES);
  }

  // The last terms, fewer than a tile has, with zeros behind them.
  struct Rest {
    alignas(64) Bfloat16 x[2][TILE_MOST_ROWS * TILE_TERMS] = {};
    alignas(64) Bfloat16 w[TILE_TERMS * PANEL] = {};

    const Bfloat16* of_rows(int which, const Bfloat16* from, int64_t stride, int count, int terms) {
      for (int i = 0; i < count; i++) memcpy(x[which] + i * TILE_TERMS, from + i * stride, terms * sizeof *from);
      return x[which];
    }
    const Bfloat16* of_weights(const Bfloat16* from, int outputs, int terms) {
      for (int k = 0; k < terms; k += 2) memcpy(w + k * PANEL, from + k * PANEL, 2 * outputs * sizeof *from);
      return w;
    }
  };
};

}  // namespace funrl
#endif
