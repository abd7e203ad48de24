"""Differences between releases of vLLM, and between its two model runners. Nothing else of the plugin asks for a
version or reads a private attribute of a runner."""
