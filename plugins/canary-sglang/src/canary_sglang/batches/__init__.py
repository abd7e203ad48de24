"""Reads and writes of SGLang's forwards, as `BatchView` objects."""
