/* test_tee.c — what processes write arrives whole, once and by the line, however they end. */
#include "tee.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>

#include "check.h"

#define PATIENCE_NS (20 * SV_NS_PER_S)
#define LINE 100

static void make_pipe(int ends[2])
{
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
}

static void put_all(int descriptor, const char *bytes, size_t size)
{
    while (size > 0) {
        ssize_t count = write(descriptor, bytes, size);
        CHECK(count > 0);
        bytes += count;
        size -= (size_t)count;
    }
}

static void put_text(int descriptor, const char *text)
{
    put_all(descriptor, text, strlen(text));
}

static size_t waiting(int descriptor)
{
    int count;
    CHECK(ioctl(descriptor, FIONREAD, &count) == 0);
    return (size_t)count;
}

/* Reads so many bytes, waiting for them. */
static void expect(int descriptor, const char *text)
{
    char bytes[512];
    size_t size = strlen(text);
    CHECK(size <= sizeof bytes);
    for (size_t done = 0; done < size;) {
        ssize_t count = read(descriptor, bytes + done, size - done);
        CHECK(count > 0);
        done += (size_t)count;
    }
    CHECK(memcmp(bytes, text, size) == 0);
}

/* Reads what is there; 0: nothing, or there is no writer any more. */
static size_t take(int descriptor, char *bytes, size_t most)
{
    ssize_t count = read(descriptor, bytes, most);
    CHECK(count >= 0 || errno == EAGAIN);
    return count < 0 ? 0 : (size_t)count;
}

static void check_last(sv_tee *tee, const char *text)
{
    char bytes[SV_TEE_LAST];
    CHECK(sv_tee_last(tee, bytes, sizeof bytes) == strlen(text));
    CHECK(memcmp(bytes, text, strlen(text)) == 0);
}

static int threads(void)
{
    char line[256];
    int count = -1;
    FILE *status = fopen("/proc/self/status", "r");
    CHECK(status != NULL);
    while (fgets(line, sizeof line, status) != NULL)
        if (sscanf(line, "Threads: %d", &count) == 1)
            break;
    fclose(status);
    return count;
}

static int descriptors(void)
{
    int count = 0;
    for (int descriptor = 0; descriptor < 1000; descriptor++)
        count += fcntl(descriptor, F_GETFD) >= 0;
    return count;
}

static void wait_for_descriptors(int expected)
{
    while (descriptors() != expected)
        sv_yield();
}

/* Who has joined a thread may still find it in /proc. */
static void wait_for_threads(int expected)
{
    while (threads() != expected)
        sv_yield();
}

static void test_passes_on_and_remembers(void)
{
    int out[2], end, before = descriptors();
    sv_tee *tee;
    make_pipe(out);
    CHECK(sv_tee_open(out[1], &tee, &end) == 0);
    check_last(tee, "");
    put_text(end, "a line\nanother\n");
    expect(out[0], "a line\nanother\n");
    put_text(end, "no whole line");
    expect(out[0], "no whole line"); /* after a while */
    put_text(end, "\n");
    CHECK(sv_tee_settle(tee, PATIENCE_NS));
    CHECK(waiting(out[0]) == 1);
    check_last(tee, "a line\nanother\nno whole line\n");
    char few[5];
    CHECK(sv_tee_last(tee, few, sizeof few) == 5 && memcmp(few, "line\n", 5) == 0);
    close(end);
    sv_tee_close(tee);
    close(out[0]);
    close(out[1]);
    wait_for_descriptors(before);
}

static void test_remembers_the_end_of_much(void)
{
    int before = descriptors(), null = open("/dev/null", O_WRONLY | O_CLOEXEC), end;
    sv_tee *tee;
    char line[32], last[SV_TEE_LAST];
    CHECK(sv_tee_open(null, &tee, &end) == 0);
    for (int i = 0; i < 100000; i++) {
        snprintf(line, sizeof line, "line %d\n", i);
        put_text(end, line);
    }
    CHECK(sv_tee_settle(tee, PATIENCE_NS));
    CHECK(sv_tee_last(tee, last, sizeof last) == SV_TEE_LAST);
    CHECK(memcmp(last + SV_TEE_LAST - 11, "line 99999\n", 11) == 0);
    for (size_t i = 0; i < SV_TEE_LAST - 11; i++)
        if (last[i] == '\n')
            CHECK(memcmp(last + i, "\nline ", 6) == 0);
    close(end);
    close(null);
    sv_tee_close(tee);
    wait_for_descriptors(before);
}

/* A process writes its letter in lines, and is killed in the middle of one.  No line is in pieces:
 * one that loses its core in the middle for SV_TEE_HOLD_NS may be broken into, as tee.h says. */
static pid_t start_writer(int end, int letter, int lines)
{
    pid_t writer = fork();
    CHECK(writer >= 0);
    if (writer == 0) {
        char line[LINE + 1];
        memset(line, letter, LINE);
        line[LINE] = '\n';
        start_deadline();
        for (int i = 0; i < lines; i++)
            put_all(end, line, sizeof line);
        put_text(end, "part");
        kill(getpid(), SIGKILL);
    }
    return writer;
}

static void test_lines_of_many_stay_whole(void)
{
    enum { WRITERS = 8, LINES = 50 };
    static char text[WRITERS * (LINES * (LINE + 1) + 4) + 1];
    int out[2], before = descriptors(), ends[WRITERS];
    sv_tee *opened[WRITERS];
    pid_t writers[WRITERS];
    size_t size = 0;
    make_pipe(out);
    CHECK(fcntl(out[1], F_SETPIPE_SZ, 4096) > 0); /* soon full: then lines are taken in pieces */
    CHECK(fcntl(out[0], F_SETFL, O_NONBLOCK) == 0);
    sv_tee_pause(); /* the writers are forked: sanitizers want no thread about */
    for (int i = 0; i < WRITERS; i++) {
        CHECK(sv_tee_open(out[1], &opened[i], &ends[i]) == 0);
        writers[i] = start_writer(ends[i], 'a' + i, LINES);
        close(ends[i]);
    }
    sv_tee_resume();
    for (int i = 0; i < WRITERS; i++) {
        int status;
        CHECK(waitpid(writers[i], &status, 0) == writers[i]);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        while (!sv_tee_settle(opened[i], SV_NS_PER_S / 1000))
            size += take(out[0], text + size, sizeof text - size);
        char last[4];
        CHECK(sv_tee_last(opened[i], last, 4) == 4 && memcmp(last, "part", 4) == 0);
        sv_tee_close(opened[i]);
    }
    close(out[1]);
    for (size_t count = 1; count > 0; size += count)
        count = take(out[0], text + size, sizeof text - size);
    CHECK(size == sizeof text - 1);
    int lines = 0;
    for (size_t i = 0; i < size;) {
        if (strncmp(text + i, "part", 4) == 0) {
            i += 4;
            continue;
        }
        for (int j = 0; j < LINE; j++)
            CHECK(text[i + (size_t)j] == text[i]);
        CHECK(text[i + LINE] == '\n');
        i += LINE + 1;
        lines++;
    }
    CHECK(lines == WRITERS * LINES);
    close(out[0]);
    wait_for_descriptors(before);
}

/* Fills it; returns how much that took. */
static size_t fill(int descriptor)
{
    static const char zeros[1];
    size_t count = 0;
    int flags = fcntl(descriptor, F_GETFL);
    fcntl(descriptor, F_SETFL, flags | O_NONBLOCK);
    while (write(descriptor, zeros, 1) == 1)
        count++;
    fcntl(descriptor, F_SETFL, flags);
    return count;
}

static void drop(int descriptor, size_t count)
{
    char bytes[4096];
    while (count > 0) {
        ssize_t part = read(descriptor, bytes, count < sizeof bytes ? count : sizeof bytes);
        CHECK(part > 0);
        count -= (size_t)part;
    }
}

static void test_a_target_that_nobody_reads(void)
{
    int full[2], out[2], end, other_end, before = descriptors();
    sv_tee *tee, *other;
    make_pipe(full);
    make_pipe(out);
    size_t zeros = fill(full[1]);
    CHECK(sv_tee_open(full[1], &tee, &end) == 0);
    CHECK(sv_tee_open(out[1], &other, &other_end) == 0);
    put_text(end, "stuck\n");
    CHECK(!sv_tee_settle(tee, SV_NS_PER_S / 20));
    check_last(tee, "stuck\n");
    put_text(other_end, "not stuck\n");
    expect(out[0], "not stuck\n");
    CHECK((fcntl(full[1], F_GETFL) & O_NONBLOCK) == 0); /* it is the caller's, too */
    sv_tee_pause(); /* which does not wait for it */
    sv_tee_resume();
    fill(end); /* what may be held, and the pipe */
    close(end);
    sv_tee_close(tee);
    drop(full[0], zeros);
    expect(full[0], "stuck\n");
    close(full[0]); /* nobody will ever read the rest */
    close(full[1]);
    close(other_end);
    sv_tee_close(other);
    close(out[0]);
    close(out[1]);
    wait_for_descriptors(before);
}

static void test_a_long_line_is_not_broken_into(void)
{
    enum { LONG = 100000 };
    static char line[LONG];
    int out[2], ends[2], before = descriptors();
    sv_tee *opened[2];
    make_pipe(out);
    size_t zeros = fill(out[1]);
    for (int i = 0; i < 2; i++)
        CHECK(sv_tee_open(out[1], &opened[i], &ends[i]) == 0);
    memset(line, 'x', LONG - 1);
    line[LONG - 1] = '\n';
    put_all(ends[0], line, LONG);
    put_text(ends[1], "y\n");
    drop(out[0], zeros);
    for (int i = 0; i < 2; i++)
        close(ends[i]);
    int seen = 0, lines = 0;
    for (size_t done = 0; done < LONG + 2;) {
        char bytes[1000];
        ssize_t count = read(out[0], bytes, sizeof bytes);
        CHECK(count > 0);
        done += (size_t)count;
        for (ssize_t i = 0; i < count; i++) {
            if (bytes[i] == 'x')
                CHECK(seen++ == 0 || seen <= LONG - 1);
            if (bytes[i] == 'y')
                CHECK(seen == 0 || seen == LONG - 1);
            lines += bytes[i] == '\n';
        }
        CHECK(lines <= 2);
    }
    for (int i = 0; i < 2; i++)
        sv_tee_close(opened[i]);
    close(out[0]);
    close(out[1]);
    wait_for_descriptors(before);
}

static void test_targets_that_are_none(void)
{
    int out[2], end, before = descriptors();
    sv_tee *tee;
    make_pipe(out);
    int targets[] = {-1, 999, out[0]}; /* and one that is for reading */
    for (int i = 0; i < 3; i++) {
        CHECK(sv_tee_open(targets[i], &tee, &end) == 0);
        put_text(end, "heard\n");
        CHECK(sv_tee_settle(tee, PATIENCE_NS));
        check_last(tee, "heard\n");
        close(end);
        sv_tee_close(tee);
    }
    CHECK(waiting(out[0]) == 0);
    CHECK(sv_tee_open(out[1], &tee, &end) == 0);
    close(out[0]); /* its reader goes */
    put_text(end, "broken pipe\n");
    CHECK(sv_tee_settle(tee, PATIENCE_NS));
    check_last(tee, "broken pipe\n");
    close(end);
    sv_tee_close(tee);
    close(out[1]);
    wait_for_descriptors(before);
}

/* What outlives a worker, and has its descriptor 2, goes on. */
static void test_writes_after_the_close(void)
{
    int out[2], end, before = descriptors();
    sv_tee *tee;
    make_pipe(out);
    CHECK(sv_tee_open(out[1], &tee, &end) == 0);
    sv_tee_close(tee);
    put_text(end, "still here\n");
    expect(out[0], "still here\n");
    close(end);
    close(out[0]);
    close(out[1]);
    wait_for_descriptors(before);
}

static void test_forks(void)
{
    int out[2], end, status, before = descriptors();
    sv_tee *tee;
    make_pipe(out);
    sv_tee_pause();
    int others = threads(); /* a sanitizer's among them */
    sv_tee_resume();
    CHECK(sv_tee_open(out[1], &tee, &end) == 0);
    sv_tee_pause();
    sv_tee_pause();
    wait_for_threads(others);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        start_deadline();
        CHECK(!sv_tee_settle(tee, PATIENCE_NS)); /* a fork that nobody has told of */
        sv_tee_forget();
        CHECK(descriptors() == before + 3); /* out and end */
        sv_tee_close(tee);
        put_text(end, "the child\n");
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(waiting(out[0]) == 0);
    sv_tee_resume();
    wait_for_threads(others);
    sv_tee_resume();
    expect(out[0], "the child\n");
    CHECK(threads() == others + 1);
    close(end);
    sv_tee_close(tee);
    close(out[0]);
    close(out[1]);
    wait_for_descriptors(before);
    sv_tee_pause(); /* waits for the end of a thread that has nothing to do any more */
    wait_for_threads(others);
    sv_tee_resume();
}

/* Somebody closes what is not his, and opens something under the same number. */
static void test_a_descriptor_that_was_closed(void)
{
    int out[2], end, other[2], before = descriptors();
    sv_tee *tee;
    make_pipe(out);
    sv_tee_pause();
    CHECK(sv_tee_open(out[1], &tee, &end) == 0);
    make_pipe(other);
    put_text(other[1], "private");
    int source = end - 1; /* opened just before */
    int reader = dup(source); /* or there is no pipe any more */
    CHECK(reader >= 0 && dup2(other[0], source) == source);
    sv_tee_resume();
    put_text(end, "lost\n");
    CHECK(sv_tee_settle(tee, PATIENCE_NS));
    expect(source, "private");
    close(source);
    close(reader);
    close(other[0]);
    close(other[1]);
    close(end);
    sv_tee_close(tee);
    close(out[0]);
    close(out[1]);
    wait_for_descriptors(before);
}

static int event_descriptor(void)
{
    for (int number = 0; number < 64; number++) {
        char path[32], what[64] = "";
        snprintf(path, sizeof path, "/proc/self/fd/%d", number);
        if (readlink(path, what, sizeof what - 1) > 0 && strstr(what, "eventfd") != NULL)
            return number;
    }
    return -1;
}

/* The same, of what wakes the thread. */
static void test_an_alarm_that_was_closed(void)
{
    int out[2], end, other[2], before = descriptors();
    sv_tee *tee;
    make_pipe(out);
    CHECK(sv_tee_open(out[1], &tee, &end) == 0);
    make_pipe(other);
    put_text(other[1], "private");
    int alarm = event_descriptor();
    CHECK(alarm >= 0 && dup2(other[0], alarm) == alarm);
    put_text(end, "a line\n");
    expect(out[0], "a line\n");
    CHECK(sv_tee_settle(tee, PATIENCE_NS));
    close(end);
    sv_tee_close(tee);
    sv_tee_pause(); /* the thread has ended */
    sv_tee_resume();
    expect(alarm, "private");
    close(alarm);
    close(other[0]);
    close(other[1]);
    close(out[0]);
    close(out[1]);
    wait_for_descriptors(before);
}

int main(void)
{
    start_deadline();
    signal(SIGPIPE, SIG_IGN);
    test_lines_of_many_stay_whole(); /* first: it forks */
    test_passes_on_and_remembers();
    test_remembers_the_end_of_much();
    test_a_target_that_nobody_reads();
    for (int i = 0; i < 50; i++) /* now and then it ends between two looks at others */
        test_a_long_line_is_not_broken_into();
    test_targets_that_are_none();
    test_writes_after_the_close();
    test_forks();
    test_a_descriptor_that_was_closed();
    test_an_alarm_that_was_closed();
    return 0;
}
