"""What caller and workers agree on beyond the layout: operations, flags, kinds of messages."""

cdef enum Operation:
    STEP = 1            # step the envs of the range; reset those whose episodes are over
    RESET = 2           # reset them; seeds lie in a slab
    COMMAND = 3         # a message on the channel says what to do
    CLOSE = 4           # close the envs and end
    TRACE = 5           # a message on the channel has memory to record into; no answer
    SETTINGS = 6        # a message on the channel has settings of automatic resets; no answer
    OPERATION_MASK = 7  # flags lie above
    FRAME_SHIFT = 8     # the number of the frame for the results lies above the flags

cdef enum Flag:
    MESSAGES = 8  # completion: the ring to the caller holds messages of this sequence
    LATE = 16     # a message is on the channel. Completion: errors, a command's results, infos that
                  # did not fit the ring. Request: actions, seeds or options that did not fit
    LINGER = 32   # request: of a batch step in which the last workers that are done stay awake

cdef enum MessageKind:
    INFO = 0         # an info
    FINAL = 1        # an info, and a final observation in the slab
    OBSERVATION = 2  # {"": observation}
    ACTION = 3       # {"": action}
    NUM_KINDS = 4
