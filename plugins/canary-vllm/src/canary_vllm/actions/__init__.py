"""Actions on findings."""
