"""For people, beside the forwards: diagnosis and bundles, pages, metrics, the control socket, the log, ``canary``."""
