"""``canary fleet``: incidents of many engines as one view, grouped by probable cause."""
