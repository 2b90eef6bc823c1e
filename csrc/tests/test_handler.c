/* test_handler.c — errno survives a handler that does not keep it; flags stay; what it has written is
 * marked, the first thread runs it, another file under its descriptor's number is left alone, and it is
 * not called in the midst of what it would look at. */
#include "handler.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

static volatile sig_atomic_t handled;
static int ends[2];
static pthread_t handled_by;

static void careless(int number)
{
    handled = number;
    handled_by = pthread_self();
    CHECK(write(ends[1], "here", 4) == 4);
    errno = 0;
}

static void *raise_it(void *nothing)
{
    CHECK(raise(SIGUSR2) == 0);
    return nothing;
}

int main(void)
{
    char text[16];
    start_deadline();
    CHECK(pipe(ends) == 0);
    CHECK(fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0);
    CHECK(sv_handler_guard(SIGUSR2, ends[1], NULL, 0) == EINVAL);
    CHECK(sv_handler_guard(-1, ends[1], NULL, 0) == EINVAL);
    struct sigaction action = {.sa_handler = careless, .sa_flags = SA_RESTART}, found;
    CHECK(sigaction(SIGUSR2, &action, NULL) == 0);
    CHECK(sv_handler_guard(SIGUSR2, -1, NULL, 0) == EBADF);
    for (int times = 1; times <= 2; times++) {
        CHECK(sv_handler_guard(SIGUSR2, ends[1], NULL, 0) == 0);
        handled = 0;
        errno = EINTR;
        CHECK(raise(SIGUSR2) == 0);
        CHECK(errno == EINTR && handled == SIGUSR2);
        CHECK(read(ends[0], text, sizeof text) == 5 && memcmp(text, "here", 5) == 0);
    }
    CHECK(sigaction(SIGUSR2, NULL, &found) == 0);
    CHECK(found.sa_handler != careless && (found.sa_flags & SA_RESTART) != 0);

    pthread_t thread;
    handled = 0;
    CHECK(pthread_create(&thread, NULL, raise_it, NULL) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(handled == SIGUSR2 && pthread_equal(handled_by, pthread_self()));
    CHECK(read(ends[0], text, sizeof text) == 5);

    handled = 0; /* wherever raise() is, it is in here */
    CHECK(sv_handler_guard(SIGUSR2, ends[1], NULL, SIZE_MAX) == 0);
    errno = EINTR;
    CHECK(raise(SIGUSR2) == 0 && handled == 0 && errno == EINTR);
    CHECK(read(ends[0], text, sizeof text) == 2 && memcmp(text, "\1", 2) == 0);
    CHECK(sv_handler_guard(SIGUSR2, ends[1], text, sizeof text) == 0); /* and not in here */
    CHECK(raise(SIGUSR2) == 0 && handled == SIGUSR2);
    CHECK(read(ends[0], text, sizeof text) == 5 && memcmp(text, "here", 5) == 0);

    int other[2];
    handled = 0;
    CHECK(pipe(other) == 0 && dup2(other[1], ends[1]) == ends[1]);
    CHECK(fcntl(other[0], F_SETFL, O_NONBLOCK) == 0);
    CHECK(raise(SIGUSR2) == 0 && handled == 0);
    CHECK(read(other[0], text, sizeof text) == -1 && errno == EAGAIN);
    CHECK(close(ends[1]) == 0 && raise(SIGUSR2) == 0 && handled == 0);
    return 0;
}
