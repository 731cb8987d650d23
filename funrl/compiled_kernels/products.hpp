// Products of rows with a matrix that was packed into panels: y[M, N] = x[M, K] w[N, K]^T, sums in float32.
//
// A panel holds the weights of PANEL outputs, [K / terms, PANEL, terms]. The terms of an output are added in chunks of
// CHUNK: each chunk from zero, one term after the other, then chunk after chunk; those of bfloat16 by tiles (tiles.hpp)
// where there are some. This order depends on K alone, so the bits of a row of y depend on no other row and not on the
// threads.

#pragma once
#include "lanes.hpp"
#include "tiles.hpp"

namespace funrl {

constexpr int BLOCK_ROWS = 64;  // rows that meet a panel while it is in the cache
template <class T> constexpr int64_t CHUNK = 256 / sizeof(T);  // a panel's chunk is 16 KiB

// y[ROWS, PANEL] (+)= x[ROWS, count] w[count, PANEL]. Meanwhile it fetches its share of the next chunk: this is pass
// number `pass` of `passes` over the same weights.
template <class T, int ROWS>
void tile(const T* x, int64_t x_stride, const T* w, int count, float* y, bool first, int pass, int passes) {
  using P = Product<T>;
  Lanes sum[ROWS][TILE_LANES];
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int j = 0; j < TILE_LANES; j++) sum[r][j] = zeros();
  const T* next = w + (int64_t)count * PANEL;
  for (int k = 0; k < count; k += P::terms, w += PANEL * P::terms) {
    typename P::Weights weights[TILE_LANES];
    UNROLL for (int j = 0; j < TILE_LANES; j++) weights[j] = P::weights(w + j * LANES * P::terms);
    if (pass-- == 0) {
      pass = passes - 1;
      UNROLL for (int j = 0; j < TILE_LANES; j++) __builtin_prefetch(next + k * PANEL + j * LANES * P::terms);
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      typename P::Factor factor = P::factor(x + r * x_stride + k);
      UNROLL for (int j = 0; j < TILE_LANES; j++) sum[r][j] = P::add(sum[r][j], weights[j], factor);
    }
  }
  if (!first)
    UNROLL for (int r = 0; r < ROWS; r++)
      UNROLL for (int j = 0; j < TILE_LANES; j++) sum[r][j] = load(y + r * PANEL + j * LANES) + sum[r][j];
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int j = 0; j < TILE_LANES; j++) store(y + r * PANEL + j * LANES, sum[r][j]);
}

template <class T, int ROWS = TILE_ROWS>
INLINE void tile_of(int rows, const T* x, int64_t stride, const T* w, int n, float* y, bool first, int pass, int passes) {
  if (rows == ROWS) return tile<T, ROWS>(x, stride, w, n, y, first, pass, passes);
  if constexpr (ROWS > 1) tile_of<T, ROWS - 1>(rows, x, stride, w, n, y, first, pass, passes);
}

// y[rows, PANEL] = x[rows, K] panel, for up to BLOCK_ROWS rows. K is a multiple of the terms of a product.
template <class T> void multiply_panel(const T* x, int rows, int64_t K, const T* panel, float* y) {
  const int passes = (rows + TILE_ROWS - 1) / TILE_ROWS;
  for (int64_t k = 0; k < K; k += CHUNK<T>) {
    const int count = K - k < CHUNK<T> ? K - k : CHUNK<T>;
    for (int pass = 0, row = 0; pass < passes; pass++) {
      const int some = (rows - row) / (passes - pass);
      tile_of<T>(some, x + row * K + k, K, panel + k * PANEL, count, y + row * PANEL, k == 0, pass, passes);
      row += some;
    }
  }
}

// Calls then(row, panel, outputs[PANEL]) for rows of x and for panels of this thread's part of them.
template <class T, class Then>
void multiply(const T* x, int rows, int64_t K, const T* packed, int64_t panels, int thread, int threads, Then then) {
  alignas(64) float y[BLOCK_ROWS * PANEL];
  auto each_panel = [&](auto multiply_one) {
    for (int64_t panel = panels * thread / threads; panel < panels * (thread + 1) / threads; panel++) {
      multiply_one(packed + panel * PANEL * K);
      for (int row = 0; row < rows; row++) then(row, panel, y + row * PANEL);
    }
  };
#ifdef FUNRL_TILES
  static_assert(BLOCK_ROWS <= 4 * TILE_MOST_ROWS);
  if constexpr (Product<T>::terms == 2)
    if (tiles_allowed()) {
      const Tiles tiles(rows);
      return each_panel([&](const T* panel) { tiles.multiply(x, K, panel, y); });
    }
#endif
  each_panel([&](const T* panel) { multiply_panel(x, rows, K, panel, y); });
}

// Panels of w[N, K], with zeros up to whole panels and to K_padded.
template <class T> void pack_panels(const T* w, int64_t N, int64_t K, int64_t K_padded, T* out) {
  constexpr int terms = Product<T>::terms;
  for (int64_t n0 = 0; n0 < N; n0 += PANEL, out += PANEL * K_padded)
    for (int64_t n = 0; n < PANEL; n++)
      for (int64_t k = 0; k < K_padded; k++)
        out[(k / terms * PANEL + n) * terms + k % terms] = n0 + n < N && k < K ? w[(n0 + n) * K + k] : T{};
}

}  // namespace funrl
