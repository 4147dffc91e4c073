/* SPDX-License-Identifier: Apache-2.0
 *
 * Loops over all values of a gradient, and Golomb-Rice coding. fallback.py has the same functions in NumPy.
 *
 * No Python.h: native.py calls these functions through ctypes, which releases the GIL. Pointers and lengths come from
 * native.py and are trusted; the bytes of a message are not, so each decoder checks every position that it reads or
 * returns. Entries are 64-bit: 2 * position + (1 if negative).
 */

#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bit streams are read and written as little-endian words; the NumPy fallback serves other machines"
#endif

/* native.py refuses a library whose version is not its own, such as that of an older editable installation. */
#define VERSION 3

#define EXPORT __attribute__((visibility("default")))
/* The loader chooses by CPU between AVX2 and what all x86-64 have; other architectures vectorize by default. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORIZED __attribute__((target_clones("avx2", "default")))
#else
#define VECTORIZED
#endif

/* Values per block. A block whose largest magnitude is below the bound has no entry and is not read again. */
#define BLOCK 32
#define MAGNITUDE 0x7fffffff
#define INFINITE 0x7f800000

/* Results below 0. */
#define NOT_FINITE (-1)
#define TRUNCATED (-1)
#define BEYOND_THE_END (-2)
#define NOT_CANONICAL (-3)

EXPORT int64_t tfdist_version(void) { return VERSION; }

static inline int32_t bits_of(float value) {
  int32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* Writes the entries of a block; counts those beyond the capacity, too. */
static inline int64_t emit(const float *values, int64_t length, int32_t bound, int64_t first, int64_t *entries,
                           int64_t count, int64_t capacity) {
  if (capacity - count >= BLOCK) {
    /* Without a branch: most values of a block are no entries, and the next one overwrites them. */
    for (int64_t i = 0; i < length; i++) {
      int32_t bits = bits_of(values[i]);
      entries[count] = (first + i) * 2 + (bits < 0);
      count += (bits & MAGNITUDE) > bound;
    }
    return count;
  }
  for (int64_t i = 0; i < length; i++) {
    int32_t bits = bits_of(values[i]);
    if ((bits & MAGNITUDE) > bound) {
      if (count < capacity) entries[count] = (first + i) * 2 + (bits < 0);
      count++;
    }
  }
  return count;
}

static inline __attribute__((always_inline)) int32_t add_block(const float *a, const float *b, float *out,
                                                               int64_t length) {
  int32_t largest = 0;
  for (int64_t i = 0; i < length; i++) {
    float sum = a[i] + b[i];
    int32_t magnitude = bits_of(sum) & MAGNITUDE;
    out[i] = sum;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

/* out = a + b; entries where |out| > bound. Returns their number, or NOT_FINITE. `out` overlaps neither a nor b. */
EXPORT VECTORIZED int64_t tfdist_add(const float *restrict a, const float *restrict b, float *restrict out,
                                     int64_t size, float bound, int64_t first, int64_t *entries, int64_t capacity) {
  const int32_t limit = bits_of(bound);
  int64_t count = 0;
  for (int64_t start = 0; start < size; start += BLOCK) {
    const int64_t left = size - start;
    const int64_t length = left < BLOCK ? left : BLOCK;
    int32_t largest = left < BLOCK ? add_block(a + start, b + start, out + start, left)
                                   : add_block(a + start, b + start, out + start, BLOCK);
    if (largest > limit) {
      if (largest >= INFINITE) return NOT_FINITE;
      count = emit(out + start, length, limit, first + start, entries, count, capacity);
    }
  }
  return count;
}

static inline __attribute__((always_inline)) int32_t correct_block(const float *velocity, const float *accumulated,
                                                                   const float *gradient, float momentum,
                                                                   float *new_velocity, float *out, int64_t length) {
  int32_t largest = 0;
  for (int64_t i = 0; i < length; i++) {
    float moved = momentum * velocity[i] + gradient[i];
    float sum = accumulated[i] + moved;
    int32_t magnitude = bits_of(sum) & MAGNITUDE;
    new_velocity[i] = moved;
    out[i] = sum;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

/* new_velocity = momentum * velocity + gradient, out = accumulated + new_velocity; entries as those of tfdist_add. */
EXPORT VECTORIZED int64_t tfdist_correct(const float *restrict velocity, const float *restrict accumulated,
                                         const float *restrict gradient, float momentum, float *restrict new_velocity,
                                         float *restrict out, int64_t size, float bound, int64_t first,
                                         int64_t *entries, int64_t capacity) {
  const int32_t limit = bits_of(bound);
  int64_t count = 0;
  for (int64_t s = 0; s < size; s += BLOCK) {
    const int64_t left = size - s;
    const int64_t length = left < BLOCK ? left : BLOCK;
    int32_t largest =
        left < BLOCK
            ? correct_block(velocity + s, accumulated + s, gradient + s, momentum, new_velocity + s, out + s, left)
            : correct_block(velocity + s, accumulated + s, gradient + s, momentum, new_velocity + s, out + s, BLOCK);
    if (largest > limit) {
      if (largest >= INFINITE) return NOT_FINITE;
      count = emit(out + s, length, limit, first + s, entries, count, capacity);
    }
  }
  return count;
}

/* Adds `value` where an entry is positive and -value where it is negative; all positions are in the tensor. */
EXPORT int64_t tfdist_scatter(float *values, int64_t first, const int64_t *entries, int64_t count, float value) {
  for (int64_t i = 0; i < count; i++) {
    int64_t entry = entries[i];
    values[(entry >> 1) - first] += entry & 1 ? -value : value;
  }
  return 0;
}

/* Sum of (gap >> k): the zeros of the unary stream. */
EXPORT int64_t tfdist_rice_zeros(const int64_t *entries, int64_t count, int64_t k) {
  int64_t zeros = 0, next = 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t position = entries[i] >> 1;
    zeros += (position - next) >> k;
    next = position + 1;
  }
  return zeros;
}

static inline float of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline __attribute__((always_inline)) uint8_t take_byte(float *values, int64_t length, float scale) {
  uint32_t byte = 0;
  for (int64_t j = 0; j < length; j++) {
    uint32_t sign = (uint32_t)bits_of(values[j]) >> 31;
    byte |= sign << j;
    values[j] -= of_bits((uint32_t)bits_of(scale) ^ sign << 31);
  }
  return (uint8_t)byte;
}

/* Writes the sign bits of values, and subtracts the signs times a scale that is not negative. */
EXPORT VECTORIZED int64_t tfdist_take_signs(float *restrict values, int64_t size, float scale, uint8_t *restrict bits) {
  int64_t full = size / 8;
  for (int64_t i = 0; i < full; i++) bits[i] = take_byte(values + 8 * i, 8, scale);
  if (size % 8) bits[full] = take_byte(values + 8 * full, size % 8, scale);
  return 0;
}

static inline __attribute__((always_inline)) void add_byte(float *values, int64_t length, float scale, uint32_t byte) {
  for (int64_t j = 0; j < length; j++) values[j] += of_bits((uint32_t)bits_of(scale) ^ (byte >> j & 1) << 31);
}

/* Adds signs times a scale. `bits` has (size + 7) / 8 bytes. */
EXPORT VECTORIZED int64_t tfdist_add_signs(float *restrict values, int64_t size, float scale,
                                           const uint8_t *restrict bits) {
  int64_t full = size / 8;
  for (int64_t i = 0; i < full; i++) add_byte(values + 8 * i, 8, scale, bits[i]);
  if (size % 8) add_byte(values + 8 * full, size % 8, scale, bits[full]);
  return 0;
}

static inline void put_bits(uint8_t *stream, int64_t bit, uint64_t value) {
  /* Bits that are not yet written are 0, and 8 bytes behind the stream may be written. */
  uint64_t word;
  memcpy(&word, stream + (bit >> 3), sizeof word);
  word |= value << (bit & 7);
  memcpy(stream + (bit >> 3), &word, sizeof word);
}

/* Writes three streams into zeroed memory that has 8 bytes to spare behind each of them. signs may be null. k <= 56. */
EXPORT int64_t tfdist_rice_encode(const int64_t *entries, int64_t count, int64_t k, uint8_t *signs,
                                  uint8_t *remainders, uint8_t *unary) {
  const uint64_t mask = ((uint64_t)1 << k) - 1;
  int64_t next = 0, bit = 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t position = entries[i] >> 1;
    int64_t gap = position - next;
    next = position + 1;
    if (signs) signs[i >> 3] |= (uint8_t)((entries[i] & 1) << (i & 7));
    put_bits(remainders, i * k, (uint64_t)gap & mask);
    bit += gap >> k;
    unary[bit >> 3] |= (uint8_t)(1 << (bit & 7));
    bit++;
  }
  return 0;
}

static inline uint64_t load(const uint8_t *stream, int64_t length, int64_t byte) {
  uint64_t word = 0;
  if (byte + 8 <= length) {
    memcpy(&word, stream + byte, sizeof word);
  } else if (byte < length) {
    memcpy(&word, stream + byte, (size_t)(length - byte));
  }
  return word;
}

/* Reads `count` entries below `size` from the three streams. Returns 0 or why not. k <= 56; signs may be null. */
EXPORT int64_t tfdist_rice_decode(const uint8_t *signs, const uint8_t *remainders, int64_t remainders_length,
                                  const uint8_t *unary, int64_t unary_length, int64_t count, int64_t k, int64_t size,
                                  int64_t *entries) {
  const uint64_t mask = ((uint64_t)1 << k) - 1;
  int64_t next = 0, byte = 0, zeros = 0, done = 0;
  while (done < count) {
    if (byte >= unary_length) return TRUNCATED;
    uint64_t word = load(unary, unary_length, byte);
    int64_t used = 0;
    while (word && done < count) {
      int64_t run = __builtin_ctzll(word);
      /* A shift by 64 is undefined. */
      word = run == 63 ? 0 : word >> (run + 1);
      used += run + 1;
      zeros += run;
      if (zeros > (size >> k)) return BEYOND_THE_END;
      int64_t bit = done * k;
      uint64_t rest = (load(remainders, remainders_length, bit >> 3) >> (bit & 7)) & mask;
      int64_t gap = (zeros << k) | (int64_t)rest;
      if (gap >= size - next) return BEYOND_THE_END;
      int64_t negative = signs ? (signs[done >> 3] >> (done & 7)) & 1 : 0;
      entries[done++] = (next + gap) * 2 + negative;
      next += gap + 1;
      zeros = 0;
    }
    if (done < count) {
      zeros += 64 - used;
      byte += 8;
      continue;
    }
    /* The last byte that has a bit is the last byte, and nothing is set behind that bit. */
    if (word || byte + ((used + 7) >> 3) != unary_length) return NOT_CANONICAL;
  }
  return 0;
}
