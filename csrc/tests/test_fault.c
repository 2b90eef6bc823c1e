/* test_fault.c — fault points: harmless unless armed, deadly where they are. */
#include "fault.h"

#include <sys/wait.h>

#include "check.h"

/* The signal that ended a child which armed `armed` and came to `point`; 0 if it lived. */
static int ended_by(int armed, int point)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        sv_fault_point = armed;
        SV_FAULT(point);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

int main(void)
{
    CHECK(sv_fault_point == 0);
    for (int point = 1; point <= SV_FAULT_POINTS; point++) {
        CHECK(ended_by(0, point) == 0);
        CHECK(ended_by(point, point) == SIGKILL);
        CHECK(ended_by(point + 1, point) == 0);
    }
    return 0;
}
