from shmvec._wrappers.chain cimport Twin


cdef class TransformObservation(Twin):
    cdef object transform(self, object func, object observation)


cdef class TransformAction(Twin):
    cdef object transform(self, object func, object action)
