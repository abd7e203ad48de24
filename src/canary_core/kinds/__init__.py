"""The kinds of findings: which follows from which, and the names of what may have happened."""
