cdef class Channel:
    cdef readonly int descriptor
    cdef readonly str broken      # why nothing can be read or written any more; None: all is well
    cdef bint mute                # the other end takes nothing any more
    cdef list outbox              # [(frame, descriptors)]: not written yet, or only in part
    cdef Py_ssize_t written       # bytes of the first of these that are
    cdef list inbox               # [Message]: read, and not taken yet
    cdef char header[24]          # of the message that is being read,
    cdef Py_ssize_t header_read   # and how much of it is there
    cdef bytes body
    cdef Py_ssize_t body_read
    cdef list incoming            # descriptors that came with it
    cdef bint flush(self) except -1
    cdef bint fill(self) except -1
    cdef Py_ssize_t read(self, char *target, Py_ssize_t most) except -2
    cdef Py_ssize_t write(self) except -2
