"""What parent and worker agree on beyond the layout: operations and flags of records."""

cdef enum Operation:
    STEP = 1      # step the envs of the range, resetting those that are done
    RESET = 2     # reset them without seed or options
    COMMAND = 3   # a message on the pipe says what to do
    CLOSE = 4     # close the envs and end

cdef enum Flag:
    INFOS = 1     # the info ring holds infos of this sequence
    LATE = 2      # a message follows on the pipe: errors, infos too large, a command's results
