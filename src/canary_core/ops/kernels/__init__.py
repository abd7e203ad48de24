"""Every op as Triton kernels, equal bit for bit to the torch reference beside it (``canary_core.ops.torch``).

Launches never read back, never allocate, and take every number that changes from step to step from device memory, so
all of them may be captured in a CUDA graph. Names in kernels: ``p_`` pointers, ``i_`` indices, ``o_`` offsets, ``m_``
masks, ``b_`` loaded blocks, upper case for compile-time constants.
"""
