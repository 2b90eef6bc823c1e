/* test_text.c — a reader sees a text whole or not at all, and never more than fits. */
#include "text.h"

#include "check.h"

#include <string.h>

struct shared {
    sv_text text;
    _Atomic uint32_t over;
    uint32_t rounds;
};

static void test_alone(void)
{
    static sv_text text;
    char bytes[SV_TEXT_BYTES], long_one[SV_TEXT_BYTES];
    CHECK(sv_text_read(&text, bytes) == 0);
    sv_text_write(&text, "nine char", 9);
    CHECK(sv_text_read(&text, bytes) == 9 && memcmp(bytes, "nine char", 9) == 0);
    memset(long_one, 'x', sizeof long_one);
    sv_text_write(&text, long_one, sizeof long_one);
    CHECK(sv_text_read(&text, bytes) == SV_TEXT_BYTES &&
          memcmp(bytes, long_one, sizeof long_one) == 0);
    sv_text_write(&text, "", 0);
    CHECK(sv_text_read(&text, bytes) == 0);
    atomic_store(&text.length, SV_TEXT_BYTES + 1); /* damaged */
    CHECK(sv_text_read(&text, bytes) == -1);
    atomic_store(&text.length, 0);
    atomic_store(&text.changes, 7); /* its writer died */
    CHECK(sv_text_read(&text, bytes) == -1);
}

/* Texts of one letter each, of several lengths. */
static void write_often(void *argument)
{
    struct shared *shared = argument;
    char bytes[SV_TEXT_BYTES];
    for (uint32_t round = 0; round < shared->rounds; round++) {
        memset(bytes, 'a' + (int)(round % 26), sizeof bytes);
        sv_text_write(&shared->text, bytes, round % 26 * 37 % SV_TEXT_BYTES);
    }
    atomic_store(&shared->over, 1);
}

static void test_reader(bool process, uint32_t rounds)
{
    struct shared *shared = shared_memory(sizeof *shared);
    shared->rounds = rounds;
    runner writer;
    run(&writer, process, write_often, shared);
    char bytes[SV_TEXT_BYTES];
    bool over;
    do {
        over = atomic_load(&shared->over);
        int64_t length = sv_text_read(&shared->text, bytes);
        for (int64_t i = 0; i < length; i++)
            CHECK(bytes[i] == bytes[0]);
        if (length > 0)
            CHECK(length == (bytes[0] - 'a') * 37 % (int64_t)SV_TEXT_BYTES);
    } while (!over);
    join(&writer);
    munmap(shared, sizeof *shared);
}

int main(int argc, char **argv)
{
    uint32_t rounds = rounds_or(argc, argv, 100000);
    start_deadline();
    test_alone();
    test_reader(false, rounds);
    test_reader(true, rounds);
    return 0;
}
