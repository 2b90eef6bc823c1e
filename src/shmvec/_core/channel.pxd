cdef class Channel:
    cdef readonly int descriptor
    cdef readonly str broken      # why the channel cannot be used any more; None: it can
    cdef bint mute                # the other end reads nothing any more
    cdef list outbox              # [(frame, descriptors)]: not written yet, or only in part
    cdef Py_ssize_t written       # bytes of the first of these frames that are written
    cdef list inbox               # [Message]: read, and not taken yet
    cdef char header[24]          # header of the message that is being read
    cdef Py_ssize_t header_read   # bytes of this header that were read
    cdef bytes body
    cdef Py_ssize_t body_read
    cdef list incoming            # descriptors that came with this message
    cdef bint flush(self) except -1
    cdef bint fill(self) except -1
    cdef Py_ssize_t read(self, char *target, Py_ssize_t most) except -2
    cdef Py_ssize_t write(self) except -2
