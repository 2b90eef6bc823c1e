from shmvec._wrappers.chain cimport Twin


cdef class Transform(Twin):
    """Steps a wrapper that applies its attribute ``func``."""
    cdef object func  # the one that the wrapper had when this twin was made
    cdef tuple cells  # of the variables that it refers to, in the order of their names

    cdef object transform(self, object func, object value)


cdef class TransformObservation(Transform):
    pass


cdef class TransformAction(Transform):
    pass
