"""Work on the device: every op twice (``kernels``, ``torch``), with its memory."""
