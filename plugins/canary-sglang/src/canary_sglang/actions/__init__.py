"""Actions on findings: aborting requests, evicting nodes of the prefix cache."""
