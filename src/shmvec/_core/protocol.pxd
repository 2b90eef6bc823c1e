"""What parent and worker agree on beyond the layout: operations, flags, messages."""

cdef enum Operation:
    STEP = 1      # step the envs of the range, resetting those that are done
    RESET = 2     # reset them without seed or options
    COMMAND = 3   # a message on the channel says what to do
    CLOSE = 4     # close the envs and end
    TRACE = 5     # a message on the channel has memory to record into; nothing answers this
    OPERATION = 7 # mask: flags lie above
    FRAME = 8     # bits to shift by: above the flags, the frame into which results go

cdef enum Flag:
    MESSAGES = 8  # completion: the ring to the parent holds messages of this sequence
    LATE = 16     # a message is on the channel.  Completion: errors, a command's results, what did
                  # not fit the ring.  Request: actions that did not
    TOGETHER = 32 # request: of a batch step in which the last to be done stay awake

cdef enum MessageKind:
    INFO = 0         # an info
    FINAL = 1        # an info, and a final observation in the slab
    OBSERVATION = 2  # {"": observation}
    ACTION = 3       # {"": action}
    KINDS = 4
