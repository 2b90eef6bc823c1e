/* test_handler.c — errno survives a handler that does not keep it; flags stay. */
#include "handler.h"

#include <errno.h>
#include <signal.h>
#include <stddef.h>

#include "check.h"

static volatile sig_atomic_t handled;

static void careless(int number)
{
    handled = number;
    errno = 0;
}

int main(void)
{
    start_deadline();
    CHECK(sv_handler_keep_errno(SIGUSR2) == EINVAL);
    CHECK(sv_handler_keep_errno(-1) == EINVAL);
    struct sigaction action = {.sa_handler = careless, .sa_flags = SA_RESTART}, found;
    CHECK(sigaction(SIGUSR2, &action, NULL) == 0);
    for (int times = 1; times <= 2; times++) {
        CHECK(sv_handler_keep_errno(SIGUSR2) == 0);
        handled = 0;
        errno = EINTR;
        CHECK(raise(SIGUSR2) == 0);
        CHECK(errno == EINTR && handled == SIGUSR2);
    }
    CHECK(sigaction(SIGUSR2, NULL, &found) == 0);
    CHECK(found.sa_handler != careless && (found.sa_flags & SA_RESTART) != 0);
    return 0;
}
