"""A museum of real KV-cache bugs: the mechanism of each is patched into the real engine, and must be found as it is
declared. ``sglang``, ``transformers``, ``vllm``: one small file for each bug, named after it. ``stages``: the engines
that they run on. ``museum``: what a bug declares, and how it runs. ``table`` writes docs/bugs.md."""
