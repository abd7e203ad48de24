"""What the host does around the ops: which stream, in which order, how much, and what is read back when."""
