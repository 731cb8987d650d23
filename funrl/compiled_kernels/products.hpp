// Products of rows with a matrix that was packed into panels: y[M, N] = x[M, K] w[N, K]^T.
//
// A panel holds the weights of PANEL outputs, [K / terms, PANEL, terms]. The terms of an output stand in some parts of
// equal size. Those of a part are added in chunks of CHUNK: each chunk from zero, one term after the other, then chunk
// after chunk; those of bfloat16 by tiles (tiles.hpp) where there are some. Then the parts are added by a binary tree:
// neighbours, then neighbours of these. The order depends on the size and the number of parts alone, so the bits of a row
// of y depend on no other row and not on the threads; and where each of several ranks has neighbouring parts, a power of
// two of them, and their sums are added by the rest of the tree, the result has the bits of one that has all parts.

#pragma once
#include "lanes.hpp"
#include "tiles.hpp"

namespace funrl {

constexpr int BLOCK_ROWS = 64;  // rows that meet a panel while it is in the cache
constexpr int MOST_PARTS = 8, LEVELS = 4;  // sums that are kept at most: of subtrees of 4, 2 and 1 parts, and of a part
template <class T> constexpr int64_t CHUNK = 256 / sizeof(T);  // a panel's chunk is 16 KiB, with AVX2 8 KiB

// The terms of a sum: `count` parts of `size` terms each, a multiple of the terms of a product.
struct Terms {
  int count;
  int64_t size;
  int64_t total() const { return count * size; }
};

// The sums of one panel, [LEVELS, BLOCK_ROWS, PANEL]; the result is in the first.
template <class T> struct Sums {
  static constexpr int64_t LEVEL = BLOCK_ROWS * PANEL;
  alignas(64) Real<T> y[LEVELS * LEVEL];
  // A part of this number finds as many sums before it, and is added to some of these.
  static int level(int part) { return __builtin_popcount(part); }
  static int merges(int part) { return __builtin_ctz(~part); }
};

// How a tile of sums begins and ends.
struct TileEnds {
  bool first;            // nothing is in y yet
  int merges;            // sums of the levels before that it is added to, in the end
  int pass, passes;      // over the same weights
};

// Fetches memory that one pass will read soon, or several passes will read later.
INLINE void fetch(const char* from, bool once) {
  if (once) __builtin_prefetch(from);
  else __builtin_prefetch(from, 0, 2);  // past the first cache, which has too few lines on their way for a whole chunk
}

// y[ROWS, SUMS registers] (+)= x[ROWS, count] w[count, SUMS registers]: all or some columns of a panel. Meanwhile it
// fetches its share of the next chunk, or where there are several passes of the one after it. From a term of x to the
// next are TERM numbers.
template <class T, int ROWS, int SUMS, int TERM>
void tile(const T* x, int64_t x_stride, const T* w, int count, Real<T>* y, TileEnds ends) {
  using P = Product<T>;
  constexpr int LINE = 64;
  typename P::Sum sum[ROWS][SUMS];
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int j = 0; j < SUMS; j++) sum[r][j] = typename P::Sum{};
  const bool once = ends.passes == 1;
  const T* next = w + (int64_t)(once ? 1 : 2) * count * PANEL;
  for (int k = 0; k < count; k += P::terms, w += PANEL * P::terms) {
    if (ends.pass-- == 0) {
      ends.pass = ends.passes - 1;
      UNROLL for (int i = 0; i < SUMS * (int)sizeof(Native); i += LINE)
        fetch((const char*)(next + k * PANEL) + i, once);
    }
    typename P::Weights weights[SUMS];
    UNROLL for (int j = 0; j < SUMS; j++) weights[j] = P::weights(w + j * P::width * P::terms);
    UNROLL for (int r = 0; r < ROWS; r++) {
      typename P::Factor factor = P::factor(x + r * x_stride + k * TERM);
      UNROLL for (int j = 0; j < SUMS; j++) sum[r][j] = P::add(sum[r][j], weights[j], factor);
    }
  }
  auto add = [&](const Real<T>* other) __attribute__((always_inline)) {
    UNROLL for (int r = 0; r < ROWS; r++)
      UNROLL for (int j = 0; j < SUMS; j++)
        sum[r][j] = (typename P::Sum)native_load(other + r * PANEL + j * P::width) + sum[r][j];
  };
  if (!ends.first) add(y);
  for (; ends.merges; ends.merges--) add(y -= Sums<T>::LEVEL);
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int j = 0; j < SUMS; j++) native_store(y + r * PANEL + j * P::width, (Native)sum[r][j]);
}

template <class T, int TERM, int ROWS = TILE_ROWS<T>>
INLINE void tile_of(int rows, const T* x, int64_t stride, const T* w, int n, Real<T>* y, TileEnds ends) {
  constexpr int SUMS = tile_registers<T>(ROWS), COLUMNS = SUMS * Product<T>::width;
  if (rows == ROWS)
    for (int column = 0; column < PANEL; column += COLUMNS)
      tile<T, ROWS, SUMS, TERM>(x, stride, w + column * Product<T>::terms, n, y + column, ends);
  else if constexpr (ROWS > 1) tile_of<T, TERM, ROWS - 1>(rows, x, stride, w, n, y, ends);
}

// Rows of the tiles for some rows: where these are few, and memory takes the time, a tile reads a panel from end to end.
template <class T> constexpr int rows_of_tile(int rows) {
  int whole = TILE_ROWS<T>;
  while (tile_registers<T>(whole) * Product<T>::width < PANEL) whole--;
  return rows <= 2 * whole ? whole : TILE_ROWS<T>;
}

// sums[rows, PANEL] = x[rows, K] panel, for up to BLOCK_ROWS rows.
template <class T, int TERM>
void multiply_panel(const T* x, int64_t stride, int rows, Terms terms, const T* panel, Sums<T>& sums) {
  const int most = rows_of_tile<T>(rows), passes = (rows + most - 1) / most;
  for (int part = 0; part < terms.count; part++, x += terms.size * TERM, panel += terms.size * PANEL) {
    Real<T>* y = sums.y + Sums<T>::level(part) * Sums<T>::LEVEL;
    for (int64_t k = 0; k < terms.size; k += CHUNK<T>) {
      const int count = terms.size - k < CHUNK<T> ? terms.size - k : CHUNK<T>;
      const int merges = k + count == terms.size ? Sums<T>::merges(part) : 0;
      for (int pass = 0, row = 0; pass < passes; pass++) {
        const int some = (rows - row) / (passes - pass);
        tile_of<T, TERM>(some, x + row * stride + k * TERM, stride, panel + k * PANEL, count, y + row * PANEL,
                   {k == 0, merges, pass, passes});
        row += some;
      }
    }
  }
}

#ifdef FUNRL_TILES
// The same by the matrix unit.
inline void multiply_panel(const Tiles& tiles, const Bfloat16* x, int64_t stride, int rows, Terms terms,
                           const Bfloat16* panel, Sums<Bfloat16>& sums) {
  for (int part = 0; part < terms.count; part++, x += terms.size, panel += terms.size * PANEL) {
    float* y = sums.y + Sums<Bfloat16>::level(part) * Sums<Bfloat16>::LEVEL;
    tiles.multiply(x, stride, terms.size, panel, y);
    for (int merge = 0; merge < Sums<Bfloat16>::merges(part); merge++, y -= Sums<Bfloat16>::LEVEL)
      for (int64_t i = 0; i < rows * PANEL; i += LANES)
        store(y - Sums<Bfloat16>::LEVEL + i, load(y - Sums<Bfloat16>::LEVEL + i) + load(y + i));
  }
}
#endif

// Calls then(row, panel, outputs[PANEL]) for rows of x and for panels of this thread's part of them. From a row of x to the
// next are `stride` numbers, from a term to the next TERM.
template <class T, int TERM = 1, class Then>
void multiply(const T* x, int64_t stride, int rows, Terms terms, const T* packed, int64_t panels, int thread, int threads,
              Then then) {
  Sums<T> sums;
  auto each_panel = [&](auto multiply_one) {
    for (int64_t panel = panels * thread / threads; panel < panels * (thread + 1) / threads; panel++) {
      multiply_one(packed + panel * PANEL * terms.total());
      for (int row = 0; row < rows; row++) then(row, panel, sums.y + row * PANEL);
    }
  };
#ifdef FUNRL_TILES
  static_assert(BLOCK_ROWS <= 4 * TILE_MOST_ROWS);
  if constexpr (Product<T>::terms == 2 && TERM == 1)
    if (tiles_allowed()) {
      const Tiles tiles(rows);
      return each_panel([&](const T* panel) { multiply_panel(tiles, x, stride, rows, terms, panel, sums); });
    }
#endif
  each_panel([&](const T* panel) { multiply_panel<T, TERM>(x, stride, rows, terms, panel, sums); });
}

// Panels of w[N, parts size], with zeros up to whole panels and to the size that `terms` has.
template <class T> void pack_panels(const T* w, int64_t N, int64_t size, Terms terms, T* out) {
  constexpr int pair = Product<T>::terms, BLOCK = 32;
  const int64_t K = terms.count * size;
  for (int64_t n0 = 0; n0 < N; n0 += PANEL)
    for (int part = 0; part < terms.count; part++, out += PANEL * terms.size)
      for (int64_t k0 = 0; k0 < terms.size; k0 += BLOCK) {
        const int64_t end = k0 + BLOCK < terms.size ? k0 + BLOCK : terms.size;
        for (int64_t n = 0; n < PANEL; n++) {
          const T* from = w + (n0 + n) * K + part * size;
          const int64_t filled = n0 + n >= N || k0 >= size ? k0 : end < size ? end : size;
          for (int64_t k = k0; k < filled; k++) out[(k / pair * PANEL + n) * pair + k % pair] = from[k];
          for (int64_t k = filled; k < end; k++) out[(k / pair * PANEL + n) * pair + k % pair] = T{};
        }
      }
}

}  // namespace funrl
