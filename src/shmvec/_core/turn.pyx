"""One thread at a time: a call takes its turn, and another thread's is refused."""

cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident()


cdef class Turn:
    """Held during a call, by one thread: another one is refused."""

    cdef unsigned long owner
    cdef int depth

    def __enter__(self):
        cdef unsigned long me = PyThread_get_thread_ident()
        if self.depth > 0 and self.owner != me:
            raise RuntimeError(
                "another thread waits for this vector env: use it in one thread at a time")
        self.owner = me
        self.depth += 1

    def __exit__(self, *error):
        self.depth -= 1
