"""Every op as Triton kernels, equal bit for bit to the torch reference (``canary_core.ops.torch``).

Launches never read back, never allocate, and take every changing number from device memory, so all of them may be
captured in a CUDA graph. Names in kernels: ``p_`` pointers, ``i_`` indices, ``o_`` offsets, ``m_`` masks, ``b_`` loaded
blocks, upper case for compile-time constants.
"""
