"""From findings to incidents: what belongs together, what probably happened, and what is kept of it on disk."""
