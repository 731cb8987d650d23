// Vectors of 16 numbers, float32 or float64, and products of 16 weights with a number of the other operand.
//
// A vector of float32 is one register of AVX-512 or two of AVX2, one of float64 twice as many; either way a number of the
// result depends on the numbers in its own lane alone. Every multiplication and addition that is to be one rounding is
// written `fma`: the compiler must not choose (-ffp-contract=off), or the bits would depend on how a loop was unrolled.

#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <cmath>
#include <initializer_list>

namespace funrl {

#ifdef __AVX512F__
using Native = __m512;
using NativeDouble = __m512d;
constexpr int REGISTERS = 32, PANEL = 64;
inline Native native_fma(Native a, Native b, Native c) { return _mm512_fmadd_ps(a, b, c); }
inline NativeDouble native_fma(NativeDouble a, NativeDouble b, NativeDouble c) { return _mm512_fmadd_pd(a, b, c); }
inline Native native_splat(float x) { return _mm512_set1_ps(x); }
inline NativeDouble native_splat(double x) { return _mm512_set1_pd(x); }
inline Native native_load(const void* from) { return _mm512_loadu_ps(from); }
inline void native_store(void* to, Native x) { _mm512_storeu_ps(to, x); }
inline NativeDouble native_widen_low(Native x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
inline NativeDouble native_widen_high(Native x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
#else
using Native = __m256;
using NativeDouble = __m256d;
constexpr int REGISTERS = 16, PANEL = 32;
inline Native native_fma(Native a, Native b, Native c) { return _mm256_fmadd_ps(a, b, c); }
inline NativeDouble native_fma(NativeDouble a, NativeDouble b, NativeDouble c) { return _mm256_fmadd_pd(a, b, c); }
inline Native native_splat(float x) { return _mm256_set1_ps(x); }
inline NativeDouble native_splat(double x) { return _mm256_set1_pd(x); }
inline Native native_load(const void* from) { return _mm256_loadu_ps((const float*)from); }
inline void native_store(void* to, Native x) { _mm256_storeu_ps((float*)to, x); }
inline NativeDouble native_widen_low(Native x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
inline NativeDouble native_widen_high(Native x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
#endif
constexpr int LANES = 16;
constexpr int PARTS = LANES * sizeof(float) / sizeof(Native), WIDTH = LANES / PARTS;  // registers of a vector of float32
// A panel is the outputs whose weights stand together; of a step's mlp, half of them are gates and half are ups.
static_assert(PANEL / 2 % LANES == 0, "half of a panel must be whole vectors");

template <class S> struct Register;
template <> struct Register<float> {
  using Intrinsic = Native;
  using Integer = int32_t;
};
template <> struct Register<double> {
  using Intrinsic = NativeDouble;
  using Integer = int64_t;
};

template <class S> struct VectorOf {
  using Number = S;
  using Intrinsic = typename Register<S>::Intrinsic;
  typedef S Native __attribute__((vector_size(sizeof(Intrinsic))));
  typedef typename Register<S>::Integer Integers __attribute__((vector_size(sizeof(Intrinsic))));
  static constexpr int parts = LANES * sizeof(S) / sizeof(Native), width = LANES / parts;
  Native part[parts];
};
using Lanes = VectorOf<float>;
using NativeInt = Lanes::Integers;
using NativeFloat = Lanes::Native;

// Before loops over an array of vectors: the compiler must unroll them to keep the array in registers.
#define UNROLL _Pragma("GCC unroll 8")
#define EACH_PART for (int i = 0; i < PARTS; i++)
#define EACH_PART_OF(V) for (int i = 0; i < V::parts; i++)
#define INLINE __attribute__((always_inline)) inline

template <class S> INLINE VectorOf<S> load(const S* from) {
  using V = VectorOf<S>;
  V y;
  EACH_PART_OF(V) y.part[i] = (typename V::Native)native_load(from + i * V::width);
  return y;
}
template <class S> INLINE void store(S* to, VectorOf<S> x) {
  using V = VectorOf<S>;
  EACH_PART_OF(V) native_store(to + i * V::width, (Native)x.part[i]);
}
template <class S> INLINE VectorOf<S> splat(S x) {
  using V = VectorOf<S>;
  V y;
  EACH_PART_OF(V) y.part[i] = (typename V::Native)native_splat(x);
  return y;
}
template <class S> INLINE VectorOf<S> zeros() { return splat<S>(0); }
template <class S> INLINE VectorOf<S> fma(VectorOf<S> a, VectorOf<S> b, VectorOf<S> c) {
  using V = VectorOf<S>;
  using I = typename V::Intrinsic;
  V y;
  EACH_PART_OF(V) y.part[i] = (typename V::Native)native_fma((I)a.part[i], (I)b.part[i], (I)c.part[i]);
  return y;
}
#define LANEWISE(op)                                                                \
  template <class S> INLINE VectorOf<S> operator op(VectorOf<S> a, VectorOf<S> b) { \
    VectorOf<S> y;                                                                  \
    EACH_PART_OF(VectorOf<S>) y.part[i] = a.part[i] op b.part[i];                   \
    return y;                                                                       \
  }
LANEWISE(+)
LANEWISE(-)
LANEWISE(*)
LANEWISE(/)
template <class S> INLINE VectorOf<S> larger(VectorOf<S> a, VectorOf<S> b) {  // b where either is NaN
  VectorOf<S> y;
  EACH_PART_OF(VectorOf<S>) y.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
  return y;
}
// `otherwise` where either is NaN.
template <class S>
INLINE VectorOf<S> where_less(VectorOf<S> a, VectorOf<S> b, VectorOf<S> then, VectorOf<S> otherwise) {
  VectorOf<S> y;
  EACH_PART_OF(VectorOf<S>) y.part[i] = a.part[i] < b.part[i] ? then.part[i] : otherwise.part[i];
  return y;
}
// Lanes first .. end - 1 of x, and `otherwise` in the rest.
template <class S> INLINE VectorOf<S> where_within(VectorOf<S> x, int64_t first, int64_t end, VectorOf<S> otherwise) {
  using V = VectorOf<S>;
  using Integer = typename Register<S>::Integer;
  const Integer low = first < 0 ? 0 : first > LANES ? LANES : first, high = end < 0 ? 0 : end > LANES ? LANES : end;
  V y;
  for (int i = 0; i < V::parts; i++) {
    typename V::Integers lane;
    for (int j = 0; j < V::width; j++) lane[j] = i * V::width + j;
    y.part[i] = ((lane >= low) & (lane < high)) ? x.part[i] : otherwise.part[i];
  }
  return y;
}
// All numbers of x, joined by a binary tree: those of the second half to those of the first. Shuffles of AVX2 are faster
// than memory, those of AVX-512 are not.
template <class S, class Join> INLINE S fold(VectorOf<S> x, Join join) {
  using V = VectorOf<S>;
  if constexpr (REGISTERS == 32) {
    S lane[LANES];
    store(lane, x);
    for (int half = LANES / 2; half; half /= 2)
      for (int i = 0; i < half; i++) lane[i] = join(lane[i], lane[i + half]);
    return lane[0];
  }
  UNROLL for (int half = V::parts / 2; half; half /= 2)
    UNROLL for (int i = 0; i < half; i++) x.part[i] = join(x.part[i], x.part[i + half]);
  typename V::Native y = x.part[0];
  UNROLL for (int half = V::width / 2; half; half /= 2) {
    typename V::Native other;
    UNROLL for (int j = 0; j < V::width; j++) other[j] = y[j ^ half];
    y = join(y, other);
  }
  return y[0];
}
template <class S> INLINE S sum_of(VectorOf<S> x) {
  return fold<S>(x, [](auto a, auto b) { return a + b; });
}
template <class S> INLINE S largest_of(VectorOf<S> x) {
  return fold<S>(x, [](auto a, auto b) { return a > b ? a : b; });
}

// A sum of vectors in float64.
class WideSum {
 public:
  INLINE void add(Lanes x) {
    UNROLL for (int i = 0; i < PARTS; i++) {
      sum[2 * i] += native_widen_low((Native)x.part[i]);
      sum[2 * i + 1] += native_widen_high((Native)x.part[i]);
    }
  }
  INLINE void add(VectorOf<double> x) {
    UNROLL for (int i = 0; i < LANES / DOUBLES; i++) sum[i] += (NativeDouble)x.part[i];
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
  return where_less(x, lowest, zeros<float>(), p * power);
}
// The same within 1 ulp of float64, 0 below -708; a polynomial at Chebyshev's points, with a relative error of 1.6e-17.
// Register by register, or the numbers between would not fit the registers.
INLINE VectorOf<double> exponential(VectorOf<double> x) {
  using V = VectorOf<double>;
  using N = V::Native;
  auto fused = [](N a, N b, N c) { return (N)native_fma((NativeDouble)a, (NativeDouble)b, (NativeDouble)c); };
  auto all = [](double number) { return (N)native_splat(number); };
  const N lowest = all(-708.0), rounder = all(6755399441055744.0);  // 1.5 * 2^52
  V y;
  UNROLL for (int i = 0; i < V::parts; i++) {
    const N safe = x.part[i] < lowest ? lowest : x.part[i], shifted = fused(safe, all(1.4426950408889634), rounder);
    const N n = shifted - rounder;
    N r = fused(n, all(-0.693147180559663), safe), p = all(2.510038549551032e-08);
    r = fused(n, all(-2.8235290563031577e-13), r);
    UNROLL for (double c : {2.7620088445409746e-07, 2.7557268459997064e-06, 2.4801521295954376e-05, 0.00019841269863053618,
                            0.0013888888917213717, 0.008333333333330062, 0.04166666666662413, 0.16666666666666669, 0.5})
      p = fused(p, r, all(c));
    p = fused(r * r, p, r) + 1.0;
    const N power = (N)(((V::Integers)shifted + 1023) << 52);  // the last bits of `shifted` are those of n
    y.part[i] = x.part[i] < lowest ? N{} : p * power;
  }
  return y;
}
// tanh x of any x, by e^(-2 |x|).
template <class S> INLINE VectorOf<S> hyperbolic_tangent(VectorOf<S> x) {
  const VectorOf<S> zero = zeros<S>(), one = splat<S>(1), size = where_less(x, zero, zero - x, x);
  const VectorOf<S> e = exponential(splat<S>(-2) * size), y = (one - e) / (one + e);
  return where_less(x, zero, zero - y, y);
}

// bfloat16, rounded to the nearest, ties to even; NaN stays NaN.
struct Bfloat16 {
  uint16_t bits;
};
INLINE float widen(float x) { return x; }
INLINE double widen(double x) { return x; }
INLINE float widen(Bfloat16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

// What numbers stored as a T are computed in: float64, else float32.
template <class T> struct ComputedIn {
  using Number = float;
};
template <> struct ComputedIn<double> {
  using Number = double;
};
template <class T> using Real = typename ComputedIn<T>::Number;
template <class T> using Vector = VectorOf<Real<T>>;

template <class T> INLINE T narrow(Real<T> x) { return x; }
template <> INLINE Bfloat16 narrow<Bfloat16>(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return {(uint16_t)((x == x ? rounded : bits | 0x400000) >> 16)};
}
// x as it is after it has been stored as a T.
template <class T> INLINE Real<T> rounded(Real<T> x) { return widen(narrow<T>(x)); }
template <class T> INLINE Vector<T> rounded(Vector<T> x) { return x; }
template <> INLINE Lanes rounded<Bfloat16>(Lanes x) {
  Lanes y;
#ifdef __AVX512BF16__
  const __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((Native)x.part[0]));
  y.part[0] = (NativeFloat)_mm512_slli_epi32(wide, 16);
#else
  for (int i = 0; i < PARTS; i++) {
    NativeInt bits = (NativeInt)x.part[i], up = (bits + 0x7fff + ((bits >> 16) & 1)) & (int32_t)0xffff0000;
    y.part[i] = x.part[i] == x.part[i] ? (NativeFloat)up : (NativeFloat)(bits | 0x400000);
  }
#endif
  return y;
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

// Products of the numbers of one operand with a register of the other: `terms` numbers of each lane at a time.
template <class T> struct Product {
  static constexpr int terms = 1, width = VectorOf<T>::width;  // width: sums of a register
  using Sum = typename VectorOf<T>::Native;
  using Weights = Sum;
  using Factor = Sum;
  static INLINE Weights weights(const T* from) { return (Sum)native_load(from); }
  static INLINE Factor factor(const T* from) { return (Sum)native_splat(*from); }
  static INLINE Sum add(Sum sum, Weights w, Factor x) {
    using I = typename VectorOf<T>::Intrinsic;
    return (Sum)native_fma((I)w, (I)x, (I)sum);
  }
};

template <> struct Product<Bfloat16> {
  static constexpr int terms = 2, width = WIDTH;
  using Sum = NativeFloat;
  using Weights = NativeInt;  // two numbers of a lane stand side by side
  using Factor = NativeInt;
  static INLINE Weights weights(const Bfloat16* from) { return (Weights)native_load(from); }
  static INLINE Factor factor(const Bfloat16* from) {
    int32_t pair;
    memcpy(&pair, from, 4);
    return Factor{} + pair;
  }
  static INLINE Sum add(Sum sum, Weights w, Factor x) {
#ifdef __AVX512BF16__
    return (Sum)_mm512_dpbf16_ps((Native)sum, (__m512bh)w, (__m512bh)x);
#else
    const int32_t upper = (int32_t)0xffff0000;
    const Native partial = native_fma((Native)(w & upper), (Native)(x & upper), (Native)sum);
    return (Sum)native_fma((Native)(w << 16), (Native)(x << 16), partial);
#endif
  }
};

// Taking weights of bfloat16 apart costs more than sums that do not fit the 16 registers of AVX2: tiles stay wide.
template <class T> constexpr bool WIDE_TILES = Product<T>::terms == 2 && REGISTERS == 16;
template <class T> constexpr int TILE_ROWS = WIDE_TILES<T> ? 3 : 6;
// Registers that the sums of one row take in a tile of some rows: all sums, a factor and as many weights fit. A single row
// reads its weights from memory.
template <class T> constexpr int tile_registers(int rows) {
  int count = PANEL / Product<T>::width;
  while (!WIDE_TILES<T> && count > 1 && (rows + (rows > 1)) * count + 1 > REGISTERS) count /= 2;
  return count;
}

}  // namespace funrl
