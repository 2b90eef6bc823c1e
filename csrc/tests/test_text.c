/* test_text.c — a reader sees a text whole or not at all, and never more than fits. */
#include "text.h"

#include "check.h"

struct shared {
    uint32_t rounds;
    sv_text texts[];
};

static void test_alone(void)
{
    static sv_text text, longest, damaged;
    char bytes[SV_TEXT_BYTES];
    memcpy(text.bytes, "its writer died", 15);
    CHECK(sv_text_length(&text) == 0);
    sv_text_publish(&text, "nine char", 9);
    CHECK(sv_text_length(&text) == 9 && memcmp(text.bytes, "nine char", 9) == 0);
    memset(bytes, 'x', sizeof bytes);
    sv_text_publish(&longest, bytes, sizeof bytes);
    CHECK(sv_text_length(&longest) == SV_TEXT_BYTES &&
          memcmp(longest.bytes, bytes, sizeof bytes) == 0);
    atomic_store(&damaged.length, SV_TEXT_BYTES + 1);
    CHECK(sv_text_length(&damaged) == 0);
}

/* The length of the text of a round; its bytes are all the same letter. */
static uint64_t length_in(uint32_t round)
{
    return 1 + round * 37 % SV_TEXT_BYTES;
}

static void publish_all(void *argument)
{
    struct shared *shared = argument;
    char bytes[SV_TEXT_BYTES];
    for (uint32_t round = 0; round < shared->rounds; round++) {
        memset(bytes, 'a' + (int)(round % 26), sizeof bytes);
        sv_text_publish(&shared->texts[round], bytes, length_in(round));
    }
}

static void test_reader(bool process, uint32_t rounds)
{
    size_t size = sizeof(struct shared) + rounds * sizeof(sv_text);
    struct shared *shared = shared_memory(size);
    shared->rounds = rounds;
    runner writer;
    run(&writer, process, publish_all, shared);
    for (uint32_t round = 0; round < rounds; round++) {
        const sv_text *text = &shared->texts[round];
        uint64_t length;
        while ((length = sv_text_length(text)) == 0)
            sv_pause();
        CHECK(length == length_in(round));
        for (uint64_t i = 0; i < length; i++)
            CHECK(text->bytes[i] == 'a' + (int)(round % 26));
    }
    join(&writer);
    munmap(shared, size);
}

int main(int argc, char **argv)
{
    uint32_t rounds = rounds_of(argc, argv, 20000);
    start_deadline();
    test_alone();
    test_reader(false, rounds);
    test_reader(true, rounds);
    return 0;
}
