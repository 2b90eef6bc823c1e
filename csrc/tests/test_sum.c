/* test_sum.c — any changed bit, byte or length gives another sum. */
#include "sum.h"
#include "check.h"

static void test_every_bit_counts(void)
{
    for (size_t length = 0; length <= 40; length++) {
        unsigned char bytes[41] = {0};
        for (size_t i = 0; i < length; i++)
            bytes[i] = (unsigned char)(i * 37);
        uint64_t sum = sv_sum_bytes(SV_SUM_START, bytes, length);
        CHECK(sum == sv_sum_bytes(SV_SUM_START, bytes, length));
        CHECK(sum != sv_sum_bytes(SV_SUM_START, bytes, length + 1)); /* a zero more */
        CHECK(sum != sv_sum_bytes(SV_SUM_START + 1, bytes, length));
        for (size_t bit = 0; bit < 8 * length; bit++) {
            bytes[bit / 8] ^= (unsigned char)(1u << bit % 8);
            uint64_t other = sv_sum_bytes(SV_SUM_START, bytes, length);
            CHECK(other != sum && (uint32_t)other != (uint32_t)sum);
            bytes[bit / 8] ^= (unsigned char)(1u << bit % 8);
        }
    }
}

static void test_zeroes_are_not_sums_of_themselves(void)
{
    CHECK((uint32_t)sv_sum_pair(SV_SUM_START, 0, 0) != 0);
    CHECK((uint32_t)sv_sum_bytes(SV_SUM_START, "", 0) != 0);
}

static void test_order_counts(void)
{
    CHECK(sv_sum_pair(SV_SUM_START, 1, 2) != sv_sum_pair(SV_SUM_START, 2, 1));
    CHECK(sv_sum(sv_sum(SV_SUM_START, 1), 2) != sv_sum(sv_sum(SV_SUM_START, 2), 1));
}

int main(void)
{
    start_deadline();
    test_every_bit_counts();
    test_zeroes_are_not_sums_of_themselves();
    test_order_counts();
    return 0;
}
