// What a step does to single tokens, and each of it for many tokens by itself, with what a backward pass needs.
//
// A trainer that calls these has the bits of the step. The work is split among threads by rows; where a result is a sum
// over rows, by columns. No bit depends on how.

#pragma once
#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "lanes.hpp"
#include "paged_attention.hpp"
#include "products.hpp"
#include "sampling.hpp"
#include "team.hpp"

namespace funrl {

INLINE int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }
INLINE int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

// Terms of a sum over K numbers in some parts: one part is padded to whole vectors, several to what a product takes.
template <class T> Terms terms_of(int64_t K, int64_t parts) {
  constexpr int pair = Product<T>::terms;
  const int64_t size = K / parts;
  return {(int)parts, parts == 1 ? padded(size) : (size + pair - 1) / pair * pair};
}

// A row of K numbers, `size` of each `stride`, as parts with zeros behind each.
template <class T> void lay_out(const T* from, int64_t size, int64_t stride, int64_t K, Terms terms, T* to) {
  const int64_t part = K / terms.count;
  for (int64_t p = 0, i = 0; p < terms.count; p++) {
    for (int64_t n = 0; n < part; n++, i++) *to++ = from[i / size * stride + i % size];
    for (int64_t n = part; n < terms.size; n++) *to++ = T{};
  }
}

// A number that depends on all bits of some memory: polynomials over 32-bit words, in many lanes that are joined at the end.
inline uint64_t digest_of(const char* memory, int64_t bytes) {
  constexpr int VECTORS = 8;
  typedef uint32_t Words __attribute__((vector_size(64)));
  Words sum[VECTORS] = {}, word;
  int64_t at = 0;
  for (; at + (int64_t)sizeof sum <= bytes; at += sizeof sum)
    UNROLL for (int i = 0; i < VECTORS; i++) {
      memcpy(&word, memory + at + i * sizeof word, sizeof word);
      sum[i] = sum[i] * 0x9e3779b1u + word;
    }
  Words rest[VECTORS] = {};
  memcpy(rest, memory + at, bytes - at);
  uint64_t digest = bytes;
  for (int i = 0; i < VECTORS; i++)
    for (int lane = 0; lane < 16; lane++)
      digest = (digest ^ (sum[i][lane] * 0x9e3779b1u + rest[i][lane])) * 0x100000001b3u;
  return digest;
}

// Work for each of `count` things of `cost` operations, in threads where that is worth it.
template <class Work> void in_threads(int64_t count, int64_t cost, int threads, Work work) {
  constexpr int64_t LEAST = 1 << 15;  // operations of a thread
  const int64_t useful = std::min<int64_t>(threads, count * cost / LEAST + 1);
  Pool::run((int)useful, [&](Team& team, int thread) {
    for (int64_t i = count * thread / team.size; i < count * (thread + 1) / team.size; i++) work(i);
  });
}

// y[M, N] = x[M, K] w^T + bias, each number rounded once to Out. A row of x has `size` numbers of each part.
template <class T, class Out>
void linear(const T* x, int64_t size, Terms terms, const T* packed, const T* bias, Out* y, int64_t M, int64_t N,
            int threads) {
  const int64_t K = terms.count * size;
  const bool direct = size == terms.size;
  std::vector<T> laid(direct ? 0 : M * terms.total());
  std::vector<Real<T>> wide_bias(bias ? panels_of(N) * PANEL : 0);
  for (int64_t n = 0; bias && n < N; n++) wide_bias[n] = widen(bias[n]);
  for (int64_t m = 0; !direct && m < M; m++) lay_out(x + m * K, K, K, K, terms, laid.data() + m * terms.total());
  const T* rows = direct ? x : laid.data();
  Pool::run(threads, [&](Team& team, int thread) {
    for (int64_t first = 0; first < M; first += BLOCK_ROWS)
      multiply(rows + first * terms.total(), terms.total(), M - first < BLOCK_ROWS ? M - first : BLOCK_ROWS, terms,
               packed, panels_of(N), thread, team.size, [&](int row, int64_t panel, const Real<T>* sums) {
                 const int64_t n = panel * PANEL, some = N - n < PANEL ? N - n : PANEL;
                 Out* to = y + (first + row) * N + n;
                 int64_t i = 0;
                 for (; i + LANES <= some; i += LANES) {
                   const Vector<T> sum = load(sums + i);
                   store(to + i, bias ? sum + load(wide_bias.data() + n + i) : sum);
                 }
                 for (; i < some; i++) to[i] = narrow<Out>(bias ? sums[i] + wide_bias[n + i] : sums[i]);
               });
  });
}

// Columns of x[rows, N] in blocks of WIDTH, [blocks, rows, WIDTH], with zeros behind the last column: blocks low .. high - 1.
// Some rows at a time, as a line of each may be in the same place of the cache.
template <int WIDTH> void copy_columns(const float* x, int64_t rows, int64_t N, int64_t low, int64_t high, float* out) {
  constexpr int64_t TOGETHER = 8;
  for (int64_t first = 0; first < rows; first += TOGETHER)
    for (int64_t block = low; block < high; block++) {
      const int64_t n = block * WIDTH, some = std::min<int64_t>(WIDTH, N - n);
      for (int64_t row = first; row < std::min(rows, first + TOGETHER); row++) {
        float* to = out + (block * rows + row) * WIDTH;
        if (some == WIDTH) memcpy(to, x + row * N + n, WIDTH * sizeof(float));
        else std::fill(std::copy_n(x + row * N + n, some, to), to + WIDTH, 0.0f);
      }
    }
}

// y[N, K] = a[M, N]^T b[M, K], or added to y. The sums over M are taken in blocks of SUMMED rows, one after the other.
inline void transposed_product(const float* a, const float* b, float* y, int64_t M, int64_t N, int64_t K, bool add,
                               int threads) {
  constexpr int64_t SUMMED = 512;
  const int64_t blocks = (N + BLOCK_ROWS - 1) / BLOCK_ROWS, panels = panels_of(K), most = std::min(M, SUMMED);
  const auto columns = std::make_unique_for_overwrite<float[]>(blocks * BLOCK_ROWS * most);
  const auto packed = std::make_unique_for_overwrite<float[]>(panels * PANEL * most);
  Pool::run(threads, [&](Team& team, int thread) {
    auto first_of = [&](int64_t count, int i) { return count * i / team.size; };
    for (int64_t m = 0; m < M; m += SUMMED) {
      const int64_t rows = std::min(M - m, SUMMED);
      const bool more = add || m;
      copy_columns<BLOCK_ROWS>(a + m * N, rows, N, first_of(blocks, thread), first_of(blocks, thread + 1), columns.get());
      copy_columns<PANEL>(b + m * K, rows, K, first_of(panels, thread), first_of(panels, thread + 1), packed.get());
      team.barrier();
      for (int64_t first = 0; first < N; first += BLOCK_ROWS)
        multiply<float, BLOCK_ROWS>(columns.get() + first * rows, 1, std::min<int64_t>(BLOCK_ROWS, N - first), {1, rows},
                                    packed.get(), panels, thread, team.size, [&](int row, int64_t panel, const float* sums) {
          const int64_t k = panel * PANEL, some = std::min<int64_t>(PANEL, K - k);
          float* to = y + (first + row) * K + k;
          int64_t i = 0;
          for (; i + LANES <= some; i += LANES) store(to + i, more ? load(to + i) + load(sums + i) : load(sums + i));
          for (; i < some; i++) to[i] = more ? to[i] + sums[i] : sums[i];
        });
      team.barrier();
    }
  });
}

// out = x / sqrt(mean(x^2) + eps) * weight; x and weight are padded with zeros. `once`: rounded at the end alone.
template <class R> R norm_scale(const R* x, int64_t size, R eps) {
  VectorOf<R> squares = zeros<R>();
  for (int64_t i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  return (R)1 / std::sqrt(sum_of(squares) / (R)size + eps);
}
template <class T, class Out>
void normalise(const Real<T>* x, const Real<T>* weight, Out* out, int64_t size, Real<T> eps, bool once = false) {
  const Vector<T> scale = splat(norm_scale(x, size, eps));
  for (int64_t i = 0; i < size; i += LANES) {
    const Vector<T> unit = load(x + i) * scale;
    store(out + i, rounded<T>((once ? unit : rounded<T>(unit)) * load(weight + i)));
  }
}

// Rows of numbers as the functions above take them: those that stand so already are not copied.
template <class T> class WideRow {
 public:
  WideRow(int64_t size) : size(size), numbers(padded(size)) {}
  const Real<T>* read(const T* from, Real<T> offset = 0) {
    if constexpr (std::is_same_v<T, Real<T>>)
      if (!offset && size % LANES == 0) return from;
    if (offset)
      for (int64_t i = 0; i < size; i++) numbers[i] = offset + widen(from[i]);
    else
      for (int64_t i = 0; i < size; i++) numbers[i] = widen(from[i]);
    return numbers.data();
  }
  // Where results for `to` are to stand before `write`.
  Real<T>* space(T* to) {
    if constexpr (std::is_same_v<T, Real<T>>)
      if (size % LANES == 0) return to;
    return numbers.data();
  }
  void write(T* to) const {
    if (std::is_same_v<T, Real<T>> && size % LANES == 0) return;
    for (int64_t i = 0; i < size; i++) to[i] = narrow<T>(numbers[i]);
  }

 private:
  const int64_t size;
  std::vector<Real<T>> numbers;
};

template <class T>
void norm_rows(const T* x, const T* weight, T* out, int64_t M, int64_t D, Real<T> eps, Real<T> offset, int threads) {
  WideRow<T> wide_weight(D);
  const Real<T>* factor = wide_weight.read(weight, offset);
  const int64_t useful = std::min<int64_t>(threads, M * D / (1 << 15) + 1);
  Pool::run((int)useful, [&](Team& team, int thread) {
    WideRow<T> row(D), result(D);
    for (int64_t m = M * thread / team.size; m < M * (thread + 1) / team.size; m++) {
      normalise<T>(row.read(x + m * D), factor, result.space(out + m * D), D, eps, offset != 0);
      result.write(out + m * D);
    }
  });
}

// With u = x s, s = 1 / sqrt(mean(x^2) + eps): d_x = s (g w - u mean(g w u)), and d_weight is the sum of g u over rows.
template <class T>
void norm_gradients(const T* grad, const T* x, const T* weight, T* d_x, T* d_weight, int64_t M, int64_t D, Real<T> eps,
                    Real<T> offset, int threads) {
  using R = Real<T>;
  WideRow<T> wide_weight(D);
  const R* w = wide_weight.read(weight, offset);
  std::vector<R> scales(M);
  const int64_t useful = std::min<int64_t>(threads, M * D / (1 << 15) + 1);
  Pool::run((int)useful, [&](Team& team, int thread) {
    WideRow<T> row(D), given(D), result(D);
    for (int64_t m = M * thread / team.size; m < M * (thread + 1) / team.size; m++) {
      const R *u = row.read(x + m * D), *g = given.read(grad + m * D);
      R* to = result.space(d_x + m * D);
      const R s = scales[m] = norm_scale(u, D, eps);
      VectorOf<R> along = zeros<R>();
      for (int64_t i = 0; i < D; i += LANES) along = fma(load(g + i) * load(w + i), load(u + i) * splat(s), along);
      const VectorOf<R> mean = splat(sum_of(along) / (R)D);
      for (int64_t i = 0; i < D; i += LANES) {
        const VectorOf<R> part = load(g + i) * load(w + i) - load(u + i) * splat(s) * mean;
        store(to + i, part * splat(s));
      }
      result.write(d_x + m * D);
    }
    team.barrier();
    const int64_t low = D * thread / team.size, high = D * (thread + 1) / team.size;
    std::vector<R> total(high - low), some(high - low);
    for (int64_t first = 0; first < M; first += BLOCK_ROWS) {
      std::fill(some.begin(), some.end(), (R)0);
      for (int64_t m = first; m < std::min(M, first + BLOCK_ROWS); m++)
        for (int64_t i = low; i < high; i++) some[i - low] += widen(grad[m * D + i]) * (widen(x[m * D + i]) * scales[m]);
      for (int64_t i = 0; i < high - low; i++) total[i] += some[i];
    }
    for (int64_t i = low; i < high; i++) d_weight[i] = narrow<T>(total[i - low]);
  });
}

// Turns a head by its position, given cosines and sines of the pairs (i, i + size / 2); with sign -1 back.
template <class T>
void turn(Real<T>* __restrict head, const Real<T>* __restrict cosine, const Real<T>* __restrict sine, Real<T> sign,
          int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i++) {
    const Real<T> first = head[i], second = head[half + i], along = cosine[i], across = sign * sine[i];
    head[i] = rounded<T>(rounded<T>(first * along) - second * across);
    head[half + i] = rounded<T>(rounded<T>(second * along) + first * across);
  }
}

// The sine of a row is negated in its first half, as `rotary` makes it.
template <class T>
void turn_rows(const T* x, const T* cosine, const T* sine, T* out, int64_t M, int64_t heads, int64_t size,
               int64_t turned, int64_t rows, int sign, int threads) {
  in_threads(M, heads * size, threads, [&](int64_t m) {
    static thread_local std::vector<Real<T>> space;
    space.resize(3 * turned);
    Real<T> *row = space.data(), *along = row + turned, *across = along + turned;
    for (int64_t i = 0; i < turned; i++) along[i] = widen(cosine[m % rows * turned + i]);
    for (int64_t i = 0; i < turned / 2; i++) across[i] = widen(sine[m % rows * turned + turned / 2 + i]);
    for (int64_t h = m * heads; h < (m + 1) * heads; h++) {
      for (int64_t i = 0; i < turned; i++) row[i] = widen(x[h * size + i]);
      turn<T>(row, along, across, (Real<T>)sign, turned);
      for (int64_t i = 0; i < turned; i++) out[h * size + i] = narrow<T>(row[i]);
      for (int64_t i = turned; i < size; i++) out[h * size + i] = x[h * size + i];
    }
  });
}

// 1 / (1 + e^-x), without overflow.
template <class S> INLINE VectorOf<S> logistic(VectorOf<S> x) {
  const VectorOf<S> one = splat<S>(1), e = exponential(where_less(x, zeros<S>(), x, zeros<S>() - x));
  return where_less(x, zeros<S>(), e, one) / (one + e);
}
// x / (1 + e^-x).
template <class S> INLINE VectorOf<S> silu(VectorOf<S> x) {
  const VectorOf<S> one = splat<S>(1), e = exponential(where_less(x, zeros<S>(), x, zeros<S>() - x));
  return x * where_less(x, zeros<S>(), e, one) / (one + e);
}
// x / 2 (1 + tanh z), z = sqrt(2 / pi) (x + 0.044715 x^3).
template <class S> INLINE VectorOf<S> gelu_tangent(VectorOf<S> x) {
  const VectorOf<S> inside = fma(splat<S>(0.044715) * x * x, x, x);
  return hyperbolic_tangent(splat<S>(0.7978845608028654) * inside);
}
// The activations of `gated`, in their order there: the second is an approximation of the third.
enum Activation { SILU, GELU_TANH, GELU_ERF };
// (1 + erf(x / sqrt 2)) / 2, number by number: it is rare, and the products beside it take longer.
template <class S> INLINE VectorOf<S> normal_below(VectorOf<S> x) {
  S lane[LANES];
  store(lane, x);
  for (int i = 0; i < LANES; i++) lane[i] = (S)0.5 * (1 + std::erf(lane[i] * (S)0.7071067811865476));
  return load(lane);
}
template <class S> INLINE VectorOf<S> activation(VectorOf<S> x, int kind) {
  if (kind == GELU_ERF) return x * normal_below<S>(x);
  return kind == GELU_TANH ? splat<S>(0.5) * x * (splat<S>(1) + gelu_tangent(x)) : silu(x);
}
template <class S> INLINE VectorOf<S> activation_slope(VectorOf<S> x, int kind) {
  const VectorOf<S> one = splat<S>(1), half = splat<S>(0.5);
  if (kind == SILU) {
    const VectorOf<S> y = logistic(x);
    return y * (one + x * (one - y));
  }
  if (kind == GELU_ERF)
    return normal_below<S>(x) + splat<S>(0.3989422804014327) * x * exponential(zeros<S>() - half * x * x);
  const VectorOf<S> t = gelu_tangent(x);
  const VectorOf<S> inside = splat<S>(0.7978845608028654) * (one + splat<S>(3 * 0.044715) * x * x);
  return half * (one + t) + half * x * (one - t * t) * inside;
}

// Calls work(first, count) for vectors of numbers, in threads; the last may have fewer, the count of others is a constant.
template <class Work> void each_vector(int64_t count, int threads, Work work) {
  const int64_t vectors = count / LANES, rest = count % LANES;
  in_threads(vectors, 4 * LANES, threads, [&](int64_t i) { work(i * LANES, std::integral_constant<int, LANES>()); });
  if (rest) work(vectors * LANES, (int)rest);
}
template <class T> INLINE Vector<T> widened(const T* from, int count) {
  if constexpr (std::is_same_v<T, Real<T>>)
    if (count == LANES) return load(from);
  Real<T> lane[LANES] = {};
  if (count == LANES) {
    for (int i = 0; i < LANES; i++) lane[i] = widen(from[i]);
    return load(lane);
  }
  for (int i = 0; i < LANES; i++)
    if (i < count) lane[i] = widen(from[i]);
  return load(lane);
}
template <class T> INLINE void put(T* to, int count, Vector<T> x) {
  if (count == LANES) return store(to, x);
  Real<T> lane[LANES];
  store(lane, x);
  for (int i = 0; i < count; i++) to[i] = narrow<T>(lane[i]);
}

// Calls work(kind) with the kind of an activation as a constant.
template <class Work> void with_activation(int kind, Work work) {
  if (kind == SILU) work(std::integral_constant<int, SILU>());
  else if (kind == GELU_TANH) work(std::integral_constant<int, GELU_TANH>());
  else work(std::integral_constant<int, GELU_ERF>());
}

template <class T> void gate_numbers(const T* gate, const T* up, T* out, int64_t count, int kind, int threads) {
  with_activation(kind, [&](auto kind) {
    each_vector(count, threads, [=](int64_t i, auto some) {
      const Vector<T> active = rounded<T>(activation(widened(gate + i, some), kind));
      put(out + i, some, active * widened(up + i, some));
    });
  });
}

template <class T>
void gate_gradients(const T* grad, const T* gate, const T* up, T* d_gate, T* d_up, int64_t count, int kind,
                    int threads) {
  with_activation(kind, [&](auto kind) {
    each_vector(count, threads, [=](int64_t i, auto some) {
      const Vector<T> g = widened(grad + i, some), x = widened(gate + i, some);
      put(d_up + i, some, g * rounded<T>(activation(x, kind)));
      put(d_gate + i, some, rounded<T>(g * widened(up + i, some)) * activation_slope(x, kind));
    });
  });
}

template <class R> R scale_of(int64_t size) { return (R)1 / std::sqrt((R)size); }

template <class T> void attend_sequences(const Sequences<T>& all, Logits<T> logits, int threads) {
  // Where there are fewer sequences and heads than threads, these share their query rows, if that is worth other pages.
  constexpr int64_t LEAST = 64;  // rows of a share
  const int64_t whole = all.count * all.kv_heads, rows = whole ? all.tokens * all.heads / whole : 0;
  const int64_t shares = whole >= threads ? 1 : std::min<int64_t>(2 * threads, rows / LEAST + 1);
  Pool::run(threads, [&](Team& team, int) {
    SequenceScratch<T> scratch;
    for (int64_t task; (task = team.next.fetch_add(1)) < whole * shares;) {
      const int64_t s = task / shares / all.kv_heads, kv = task / shares % all.kv_heads;
      if (all.queries(s)) attend_sequence(all, s, kv, task % shares, shares, logits, scratch);
    }
  });
}

template <class R> void largest_logits(const R* logits, int64_t M, int64_t V, R* tops, int threads) {
  in_threads(M, V, threads, [&](int64_t m) { tops[m] = largest_logit(LogitBlocks<R>(logits + m * V, V, 1)); });
}

template <class R>
void logit_moments(const R* logits, int64_t M, int64_t V, int parts, const R* tops, R temperature, const int64_t* ids,
                   int64_t n, bool more, double* above, double* sums, int threads) {
  in_threads(M, 4 * V, threads, [&](int64_t m) {
    const LogitBlocks<R> row(logits + m * V, V, parts);
    if (more) moment_sums<true>(row, tops[m], temperature, sums + 3 * m);
    else moment_sums<false>(row, tops[m], temperature, sums + 3 * m);
    for (int64_t i = m * n; i < (m + 1) * n; i++) above[i] = (double)logits[m * V + ids[i]] - tops[m];
  });
}

}  // namespace funrl
