"""For authors of plugins: the conformance suite, faults, ``canary demo``, and the template of a new plugin."""
