/* sum.h — checksums of messages and records, which show damage of the shared memory.
 *
 * Any code in a process may write to shared memory by accident, above all an env's C code with an index
 * too large.  If a wrong value would make the other side wait for ever, run out of memory or misread a
 * message, the writer adds a checksum, and the reader compares.
 *
 * Each step maps sums one to one, for any word.  So two texts that differ in one word always have
 * different 64-bit sums, and texts that differ in several words nearly always do.  (This does not help
 * against malice: code that can write there can compute a sum.)  If a sum is cut to 32 bits, one damage
 * in 2**32 goes unnoticed, so indices are also compared with their bounds.
 *
 * A step takes about 5 cycles for a word of 8 bytes.
 */
#ifndef SHMVEC_SUM_H
#define SHMVEC_SUM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SV_SUM_START UINT64_C(0x243f6a8885a308d3) /* not 0: zeroed memory must not look written */

static inline uint64_t sv_sum(uint64_t sum, uint64_t word)
{
    sum = (sum ^ word) * UINT64_C(0x9e3779b97f4a7c15); /* odd, so that no bit is lost */
    return sum ^ sum >> 32;
}

/* The sum of two words in one step. */
static inline uint64_t sv_sum_pair(uint64_t sum, uint32_t low, uint32_t high)
{
    return sv_sum(sum, low | (uint64_t)high << 32);
}

static inline uint64_t sv_sum_bytes(uint64_t sum, const void *bytes, size_t count)
{
    const char *next = bytes;
    uint64_t word;
    sum = sv_sum(sum, count); /* the last word is padded */
    for (; count >= sizeof word; count -= sizeof word, next += sizeof word) {
        memcpy(&word, next, sizeof word);
        sum = sv_sum(sum, word);
    }
    word = 0;
    memcpy(&word, next, count);
    return sv_sum(sum, word);
}

#endif
