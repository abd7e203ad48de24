"""Every op in vectorised torch: the CPU back end, and the reference that the Triton kernels equal bit for bit.

Each op takes a `RegionState`, the batch and the region's table, and changes the state's tensors in place. Written for
clarity on the host: it may allocate and read back, so it never runs inside a graph.
"""
