"""From findings to incidents: related findings, probable causes, and bundles on disk."""
