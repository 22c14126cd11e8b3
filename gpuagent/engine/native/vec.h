// Sixteen floats at a time, in the compiler's portable vector types.
//
// GCC and Clang turn these into AVX-512, pairs of AVX2 registers or NEON, as -march=native says,
// and contract a * b + c into fused multiply-adds everywhere alike. That is what makes a token's
// result independent of its batch: whichever loop computes it, the same operations follow in the
// same order.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
typedef float VecU __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t IVecU __attribute__((vector_size(64), aligned(4), may_alias));

static inline Vec load(const float* p) { return *reinterpret_cast<const VecU*>(p); }
static inline Vec load(const int8_t* p) {
#if defined(__AVX512F__)  // GCC 12 takes the general form apart into single bytes
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#endif
    typedef int8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));
    IVec wide = __builtin_convertvector(*reinterpret_cast<const Bytes*>(p), IVec);
    return __builtin_convertvector(wide, Vec);
}

static inline void store(float* p, Vec v) { *reinterpret_cast<VecU*>(p) = v; }
static inline void store(int8_t* p, IVec v) {  // the low byte of each
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
    for (int i = 0; i < LANES; i++) p[i] = int8_t(v[i]);
#endif
}
// Element by element, which becomes one broadcast from memory. `Vec{} + x` was rejected: it adds a
// zero first, to turn -0 into 0, and then broadcasts within registers, two operations more for
// every two multiply-adds.
static inline Vec splat(float x) {
    return Vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

// What fits into one register; products are summed in these.
#if defined(__AVX512F__)
constexpr int PART_LANES = 16;
typedef float Part __attribute__((vector_size(64)));
static inline Part splat_part(float x) { return splat(x); }
#elif defined(__AVX__)
constexpr int PART_LANES = 8;
typedef float Part __attribute__((vector_size(32)));
static inline Part splat_part(float x) { return Part{x, x, x, x, x, x, x, x}; }
#else
constexpr int PART_LANES = 4;
typedef float Part __attribute__((vector_size(16)));
static inline Part splat_part(float x) { return Part{x, x, x, x}; }
#endif
constexpr int PARTS = LANES / PART_LANES;
static inline Part load_part(const float* p) {
    typedef float PartU __attribute__((vector_size(4 * PART_LANES), aligned(4), may_alias));
    return *reinterpret_cast<const PartU*>(p);
}
static inline void load_parts(Part (&to)[PARTS], const float* from) {
    for (int p = 0; p < PARTS; p++) to[p] = load_part(from + p * PART_LANES);
}
static inline void load_parts(Part (&to)[PARTS], const int8_t* from) {
    Vec whole = load(from);
    std::memcpy(to, &whole, sizeof whole);
}
static inline Vec whole_of(const Part (&parts)[PARTS]) {
    Vec whole;
    std::memcpy(&whole, parts, sizeof whole);
    return whole;
}

static inline Vec rounded(Vec x) {  // to integers, |x| < 2^22
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds
    return (x + magic) - magic;
}
static inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

template <int D, class V>
static inline V rotated(V v) {
    IVec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return __builtin_shuffle(v, (lanes + D) & 15);
}

template <class V>
static inline auto sum_of(V v) {
    v += rotated<8>(v);
    v += rotated<4>(v);
    v += rotated<2>(v);
    v += rotated<1>(v);
    return v[0];
}

static inline float max_of(Vec v) {
    v = maximum(v, rotated<8>(v));
    v = maximum(v, rotated<4>(v));
    v = maximum(v, rotated<2>(v));
    v = maximum(v, rotated<1>(v));
    return v[0];
}

// e^x to about one unit in the last place: x = n ln 2 + r with |r| <= ln 2 / 2, and a polynomial
// for e^r (Cephes expf). Below -87 the result is 2^-126, above 88 it is about 2^127.
static inline Vec exp_of(Vec x) {
    x = x < -87.0f ? splat(-87.0f) : x;  // NaN passes both
    x = x > 88.0f ? splat(88.0f) : x;
    Vec n = rounded(x * 1.44269504088896341f);
    Vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    IVec bits = (__builtin_convertvector(n, IVec) + 127) << 23;
    return p * (Vec)bits;
}

static inline Vec silu(Vec x) { return x / (1.0f + exp_of(-x)); }
