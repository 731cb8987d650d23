// What a router and experts do to tokens: scores, a choice, and products of sorted rows with a matrix of their own.
//
// As in operators.hpp no bit of a token depends on another token, on the threads, or on how many rows an expert has.
// decode_step.cpp includes this file last.

#pragma once
#include "arguments.hpp"
#include "operators.hpp"

namespace funrl {

// y[M, N]: of rows ends[g - 1] .. ends[g] - 1 of x[M, K] the product with packed matrix g, and 0 behind the last end.
template <class T, class Out>
void grouped_linear(const T* x, int64_t size, Terms terms, const T* packed, Out* y, const int32_t* ends, int64_t groups,
                    int64_t M, int64_t N, int threads) {
  const int64_t K = terms.count * size, rows = groups ? ends[groups - 1] : 0;
  const bool direct = size == terms.size;
  std::vector<T> laid(direct ? 0 : rows * terms.total());
  for (int64_t m = 0; !direct && m < rows; m++) lay_out(x + m * K, K, K, K, terms, laid.data() + m * terms.total());
  const T* from = direct ? x : laid.data();
  const int64_t useful = std::min<int64_t>(threads, rows * N * K / (1 << 16) + 1);
  Pool::run((int)useful, [&](Team& team, int thread) {
    for (int64_t g = 0, first = 0; g < groups; first = ends[g++])
      for (int64_t low = first; low < ends[g]; low += BLOCK_ROWS)
        multiply(from + low * terms.total(), terms.total(), std::min<int64_t>(ends[g] - low, BLOCK_ROWS), terms,
                 packed + g * panels_of(N) * PANEL * terms.total(), panels_of(N), thread, team.size,
                 [&](int row, int64_t panel, const Real<T>* sums) {
                   const int64_t n = panel * PANEL, some = std::min<int64_t>(N - n, PANEL);
                   Out* to = y + (low + row) * N + n;
                   int64_t i = 0;
                   for (; i + LANES <= some; i += LANES) store(to + i, load(sums + i));
                   for (; i < some; i++) to[i] = narrow<Out>(sums[i]);
                 });
  });
  std::fill(y + rows * N, y + M * N, Out{});
}

// Panels of each of some matrices w[groups, N, K], one after the other.
template <class T> void pack_groups(const T* w, int64_t groups, int64_t N, int64_t size, Terms terms, T* out) {
  for (int64_t g = 0; g < groups; g++)
    pack_panels(w + g * N * terms.count * size, N, size, terms, out + g * panels_of(N) * PANEL * terms.total());
}

// Softmax of rows [M, N].
template <class R> void softmax_rows(const R* x, R* out, int64_t M, int64_t N, int threads) {
  in_threads(M, 8 * N, threads, [&](int64_t m) {
    const R* row = x + m * N;
    R* to = out + m * N;
    const int64_t whole = N / LANES * LANES;
    const int rest = N - whole;
    VectorOf<R> last = splat((R)-INFINITY), sum = zeros<R>();
    if (rest) {
      R lane[LANES];
      std::fill(std::copy(row + whole, row + N, lane), lane + LANES, (R)-INFINITY);
      last = load(lane);
    }
    VectorOf<R> top = last;
    for (int64_t i = 0; i < whole; i += LANES) top = larger(load(row + i), top);
    const VectorOf<R> largest = splat(largest_of(top));
    for (int64_t i = 0; i < whole; i += LANES) {
      const VectorOf<R> e = exponential(load(row + i) - largest);
      store(to + i, e);
      sum = sum + e;
    }
    const VectorOf<R> e = rest ? exponential(last - largest) : zeros<R>(), total = splat(sum_of(sum + e));
    for (int64_t i = 0; i < whole; i += LANES) store(to + i, load(to + i) / total);
    if (rest) put(to + whole, rest, e / total);
  });
}

template <class T> void sigmoid_numbers(const T* x, T* out, int64_t count, int threads) {
  each_vector(count, threads, [&](int64_t i, int some) { put(out + i, some, logistic(widened(x + i, some))); });
}

// The sum of squares of each row [M, D]: of `parts` equal parts of it each, then by a binary tree over these.
template <class T> void square_sums(const T* x, Real<T>* out, int64_t M, int64_t D, int64_t parts, int threads) {
  using R = Real<T>;
  const int64_t size = D / parts;
  in_threads(M, D, threads, [&](int64_t m) {
    WideRow<T> row(size);
    R sums[MOST_PARTS] = {};
    for (int64_t p = 0; p < parts; p++) {
      const R* part = row.read(x + m * D + p * size);
      VectorOf<R> squares = zeros<R>();
      for (int64_t i = 0; i < size; i += LANES) squares = fma(load(part + i), load(part + i), squares);
      sums[p] = sum_of(squares);
    }
    for (int64_t count = parts; count > 1; count /= 2)
      for (int64_t p = 0; p < count / 2; p++) sums[p] = sums[2 * p] + sums[2 * p + 1];
    out[m] = sums[0];
  });
}

// Rows of a norm over `size` numbers whose squares sum to `totals`, of which a row has D.
template <class T>
void scale_rows(const T* x, const Real<T>* totals, const T* weight, T* out, int64_t M, int64_t D, Real<T> size,
                Real<T> eps, Real<T> offset, int threads) {
  WideRow<T> wide_weight(D);
  const Real<T>* factor = wide_weight.read(weight, offset);
  in_threads(M, D, threads, [&](int64_t m) {
    const Real<T> scale = (Real<T>)1 / std::sqrt(totals[m] / size + eps);
    for (int64_t i = 0; i < D; i++) {
      const Real<T> unit = widen(x[m * D + i]) * scale;
      out[m * D + i] = narrow<T>((offset ? unit : rounded<T>(unit)) * factor[i]);
    }
  });
}

// Numbers of the `best` largest of each row [M, N], the largest first; of equal ones the first comes first.
template <class R> void largest_numbers(const R* x, int64_t* out, int64_t M, int64_t N, int64_t best, int threads) {
  in_threads(M, 2 * N, threads, [&](int64_t m) {
    const R* row = x + m * N;
    int64_t *to = out + m * best, count = 0;
    for (int64_t n = 0; n < N; n++) {
      // NaN is larger than all else, as it is to torch.
      auto before = [&](int64_t other) { return row[other] != row[other] || row[other] >= row[n]; };
      if (count == best && before(to[best - 1])) continue;
      int64_t place = count < best ? count++ : best - 1;
      for (; place && !before(to[place - 1]); place--) to[place] = to[place - 1];
      to[place] = n;
    }
  });
}

}  // namespace funrl

extern "C" {
// w [groups, N, parts size].
void funrl_pack_groups(int bits, const void* w, int64_t groups, int64_t N, int64_t size, int64_t parts, void* out) {
  WITH_TYPE(bits, pack_groups((const T*)w, groups, N, size, terms_of<T>(parts * size, parts), (T*)out));
}

// y [M, N] as a T, or where `wide` as a Real<T>. Returns 1 where the ends are not those of rows, else 0.
int funrl_grouped_linear(int bits, const void* x, const void* packed, const int32_t* ends, void* y, int wide,
                         int64_t groups, int64_t M, int64_t N, int64_t size, int64_t parts, int threads) {
  if (!all_ascend(ends, groups, M)) return 1;
  WITH_TYPE(bits, {
    const Terms terms = terms_of<T>(parts * size, parts);
    if (wide) grouped_linear((const T*)x, size, terms, (const T*)packed, (Real<T>*)y, ends, groups, M, N, threads);
    else grouped_linear((const T*)x, size, terms, (const T*)packed, (T*)y, ends, groups, M, N, threads);
  });
  return 0;
}

// Rows [M, N] of Real<T>.
void funrl_softmax(int bits, const void* x, void* out, int64_t M, int64_t N, int threads) {
  WITH_TYPE(bits, softmax_rows((const Real<T>*)x, (Real<T>*)out, M, N, threads));
}

void funrl_sigmoid(int bits, const void* x, void* out, int64_t count, int threads) {
  WITH_TYPE(bits, sigmoid_numbers((const T*)x, (T*)out, count, threads));
}

// out [M, best] of rows [M, N] of Real<T>.
void funrl_largest(int bits, const void* x, int64_t* out, int64_t M, int64_t N, int64_t best, int threads) {
  WITH_TYPE(bits, largest_numbers((const Real<T>*)x, out, M, N, best, threads));
}

// out [M] of Real<T>.
void funrl_square_sums(int bits, const void* x, void* out, int64_t M, int64_t D, int64_t parts, int threads) {
  WITH_TYPE(bits, square_sums((const T*)x, (Real<T>*)out, M, D, parts, threads));
}

// x [M, D] times 1 / sqrt(total / size + eps), rounded, times offset + weight.
void funrl_scale_rows(int bits, const void* x, const void* totals, const void* weight, void* out, int64_t M, int64_t D,
                      int64_t size, double eps, double offset, int threads) {
  WITH_TYPE(bits, scale_rows((const T*)x, (const Real<T>*)totals, (const T*)weight, (T*)out, M, D, (Real<T>)size,
                             (Real<T>)eps, (Real<T>)offset, threads));
}
}
