/* handler.c — see handler.h. */
#include "handler.h"

#include <errno.h>
#include <signal.h>
#include <stddef.h>

static void (*theirs)(int);

static void keep_errno(int number)
{
    int kept = errno;
    theirs(number);
    errno = kept;
}

int sv_handler_keep_errno(int number)
{
    struct sigaction action;
    if (sigaction(number, NULL, &action) != 0)
        return errno;
    if (action.sa_flags & SA_SIGINFO || action.sa_handler == SIG_DFL
        || action.sa_handler == SIG_IGN)
        return EINVAL;
    if (action.sa_handler == keep_errno)
        return 0;
    theirs = action.sa_handler;
    action.sa_handler = keep_errno;
    return sigaction(number, &action, NULL) == 0 ? 0 : errno;
}
