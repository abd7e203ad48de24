"""The host's work around the ops: streams, order, and read-back."""
