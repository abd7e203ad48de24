"""NIXL on a machine that has none: what SGLang's manager uses of it, over Unix sockets.

Transfers are real in that bytes go from the addresses of one process to the addresses of another one, as the lists of
descriptors say; registration, back ends and devices are not.
"""
