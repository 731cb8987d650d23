// Vectors of 16 float32, and products of 16 weights with a number of the other operand.
//
// A vector is one register of AVX-512 or two of AVX2; either way a number of the result depends on the numbers in its
// own lane alone. Every multiplication and addition that is to be one rounding is written `fma`: the compiler must not
// choose (-ffp-contract=off), or the bits would depend on how a loop was unrolled.

#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <initializer_list>

namespace funrl {

#ifdef __AVX512F__
using Native = __m512;
constexpr int PARTS = 1, TILE_ROWS = 6, TILE_LANES = 4;  // a tile of sums fills the registers: 24 of 32
inline Native native_fma(Native a, Native b, Native c) { return _mm512_fmadd_ps(a, b, c); }
inline Native native_splat(float x) { return _mm512_set1_ps(x); }
inline Native native_load(const void* from) { return _mm512_loadu_ps(from); }
inline void native_store(void* to, Native x) { _mm512_storeu_ps(to, x); }
using NativeDouble = __m512d;
inline NativeDouble native_widen(const float* x) { return _mm512_cvtps_pd(_mm256_loadu_ps(x)); }
#else
using Native = __m256;
constexpr int PARTS = 2, TILE_ROWS = 3, TILE_LANES = 2;  // 12 of 16
inline Native native_fma(Native a, Native b, Native c) { return _mm256_fmadd_ps(a, b, c); }
inline Native native_splat(float x) { return _mm256_set1_ps(x); }
inline Native native_load(const void* from) { return _mm256_loadu_ps((const float*)from); }
inline void native_store(void* to, Native x) { _mm256_storeu_ps((float*)to, x); }
using NativeDouble = __m256d;
inline NativeDouble native_widen(const float* x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
#endif
typedef int32_t NativeInt __attribute__((vector_size(sizeof(Native))));
typedef float NativeFloat __attribute__((vector_size(sizeof(Native))));
constexpr int LANES = 16, WIDTH = LANES / PARTS;
constexpr int PANEL = TILE_LANES * LANES;  // outputs whose weights stand together

struct Lanes {
  NativeFloat part[PARTS];
};
struct LaneInts {
  NativeInt part[PARTS];
};

// Before loops over an array of vectors: the compiler must unroll them to keep the array in registers.
#define UNROLL _Pragma("GCC unroll 8")
#define EACH_PART for (int i = 0; i < PARTS; i++)
#define INLINE __attribute__((always_inline)) inline

INLINE Lanes load(const float* from) {
  Lanes y;
  EACH_PART y.part[i] = (NativeFloat)native_load(from + i * WIDTH);
  return y;
}
INLINE void store(float* to, Lanes x) { EACH_PART native_store(to + i * WIDTH, (Native)x.part[i]); }
INLINE Lanes splat(float x) {
  Lanes y;
  EACH_PART y.part[i] = (NativeFloat)native_splat(x);
  return y;
}
INLINE Lanes zeros() { return splat(0); }
INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
  Lanes y;
  EACH_PART y.part[i] = (NativeFloat)native_fma((Native)a.part[i], (Native)b.part[i], (Native)c.part[i]);
  return y;
}
#define LANEWISE(op)                                        \
  INLINE Lanes operator op(Lanes a, Lanes b) {              \
    Lanes y;                                                \
    EACH_PART y.part[i] = a.part[i] op b.part[i];           \
    return y;                                               \
  }
LANEWISE(+)
LANEWISE(-)
LANEWISE(*)
LANEWISE(/)
INLINE Lanes larger(Lanes a, Lanes b) {  // b where either is NaN
  Lanes y;
  EACH_PART y.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
  return y;
}
INLINE Lanes where_less(Lanes a, Lanes b, Lanes then, Lanes otherwise) {  // `otherwise` where either is NaN
  Lanes y;
  EACH_PART y.part[i] = a.part[i] < b.part[i] ? then.part[i] : otherwise.part[i];
  return y;
}
// Lanes first .. end - 1 of x, and `otherwise` in the rest.
INLINE Lanes where_within(Lanes x, int64_t first, int64_t end, Lanes otherwise) {
  const int32_t low = first < 0 ? 0 : first > LANES ? LANES : first, high = end < 0 ? 0 : end > LANES ? LANES : end;
  Lanes y;
  for (int i = 0; i < PARTS; i++) {
    NativeInt lane;
    for (int j = 0; j < WIDTH; j++) lane[j] = i * WIDTH + j;
    y.part[i] = ((lane >= low) & (lane < high)) ? x.part[i] : otherwise.part[i];
  }
  return y;
}
INLINE float sum_of(Lanes x) {
  float lane[LANES];
  store(lane, x);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] += lane[i + half];
  return lane[0];
}
INLINE float largest_of(Lanes x) {
  float lane[LANES], top;
  store(lane, x);
  top = lane[0];
  for (int i = 1; i < LANES; i++) top = lane[i] > top ? lane[i] : top;
  return top;
}

// A sum of vectors in float64.
class WideSum {
 public:
  void add(Lanes x) {
    float lane[LANES];
    store(lane, x);
    for (int i = 0; i < LANES; i += DOUBLES) sum[i / DOUBLES] += native_widen(lane + i);
  }
  double total() const {
    double all = 0;
    for (const NativeDouble& part : sum)
      for (int i = 0; i < DOUBLES; i++) all += part[i];
    return all;
  }

 private:
  static constexpr int DOUBLES = sizeof(NativeDouble) / sizeof(double);
  NativeDouble sum[LANES / DOUBLES] = {};
};

// e^x for x <= 0 within 2 ulp; 0 below -87, where e^x nears the smallest normal number. NaN stays NaN.
// Cephes' polynomial (Moshier, 1992) after x = n log 2 + r, |r| <= log(2) / 2.
INLINE Lanes exponential(Lanes x) {
  const Lanes lowest = splat(-87.0f), rounder = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to a whole number
  Lanes safe = where_less(x, lowest, lowest, x);
  Lanes n = fma(safe, splat(1.44269504f), rounder) - rounder;
  Lanes r = fma(n, splat(-0.693359375f), safe);
  r = fma(n, splat(2.12194440e-4f), r);
  Lanes p = splat(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, splat(c));
  p = fma(p * r, r, r + splat(1.0f));
  Lanes power;
  EACH_PART power.part[i] = (NativeFloat)((__builtin_convertvector(n.part[i], NativeInt) + 127) << 23);
  return where_less(x, lowest, zeros(), p * power);
}

// bfloat16, rounded to the nearest, ties to even; NaN stays NaN.
struct Bfloat16 {
  uint16_t bits;
};
INLINE float widen(float x) { return x; }
INLINE float widen(Bfloat16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
template <class T> INLINE T narrow(float x);
template <> INLINE float narrow<float>(float x) { return x; }
template <> INLINE Bfloat16 narrow<Bfloat16>(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return {(uint16_t)((x == x ? rounded : bits | 0x400000) >> 16)};
}
// x as it is after it has been stored as a T.
template <class T> INLINE float rounded(float x) { return widen(narrow<T>(x)); }
template <class T> INLINE Lanes rounded(Lanes x);
template <> INLINE Lanes rounded<float>(Lanes x) { return x; }
template <> INLINE Lanes rounded<Bfloat16>(Lanes x) {
#ifdef __AVX512BF16__
  const __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((Native)x.part[0]));
  return {(NativeFloat)_mm512_slli_epi32(wide, 16)};
#else
  Lanes y;
  for (int i = 0; i < PARTS; i++) {
    NativeInt bits = (NativeInt)x.part[i], up = (bits + 0x7fff + ((bits >> 16) & 1)) & (int32_t)0xffff0000;
    y.part[i] = x.part[i] == x.part[i] ? (NativeFloat)up : (NativeFloat)(bits | 0x400000);
  }
  return y;
#endif
}
INLINE void store(Bfloat16* to, Lanes x) {
#ifdef __AVX512BF16__
  const __m256bh half = _mm512_cvtneps_pbh((Native)x.part[0]);
  memcpy(to, &half, sizeof half);
#else
  typedef uint16_t Half __attribute__((vector_size(sizeof(Native) / 2)));
  typedef uint32_t Bits __attribute__((vector_size(sizeof(Native))));
  x = rounded<Bfloat16>(x);
  for (int i = 0; i < PARTS; i++) {
    Half half = __builtin_convertvector((Bits)x.part[i] >> 16, Half);
    memcpy(to + i * WIDTH, &half, sizeof half);
  }
#endif
}

// Products of the numbers of one operand with 16 of the other: `terms` numbers of each lane at a time.
template <class T> struct Product;

template <> struct Product<float> {
  static constexpr int terms = 1;
  using Weights = Lanes;
  using Factor = Lanes;
  static INLINE Weights weights(const float* from) { return load(from); }
  static INLINE Factor factor(const float* from) { return splat(*from); }
  static INLINE Lanes add(Lanes sum, Weights w, Factor x) { return fma(w, x, sum); }
};

template <> struct Product<Bfloat16> {
  static constexpr int terms = 2;
  struct Factor {
    NativeInt pair;
  };
  using Weights = LaneInts;  // two numbers of a lane stand side by side
  static INLINE Weights weights(const Bfloat16* from) {
    Weights w;
    EACH_PART w.part[i] = (NativeInt)native_load(from + 2 * i * WIDTH);
    return w;
  }
  static INLINE Factor factor(const Bfloat16* from) {
    int32_t pair;
    memcpy(&pair, from, 4);
    return {NativeInt{} + pair};
  }
  static INLINE Lanes add(Lanes sum, Weights w, Factor x) {
#ifdef __AVX512BF16__
    return {(NativeFloat)_mm512_dpbf16_ps((Native)sum.part[0], (__m512bh)w.part[0], (__m512bh)x.pair)};
#else
    const int32_t upper = (int32_t)0xffff0000;
    for (int i = 0; i < PARTS; i++) {
      Native partial = native_fma((Native)(w.part[i] & upper), (Native)(x.pair & upper), (Native)sum.part[i]);
      sum.part[i] = (NativeFloat)native_fma((Native)(w.part[i] << 16), (Native)(x.pair << 16), partial);
    }
    return sum;
#endif
  }
};

}  // namespace funrl
