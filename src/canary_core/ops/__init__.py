"""What runs on the device: every op twice (``kernels``, ``reference``), with the memory it works on."""
