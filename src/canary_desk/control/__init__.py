"""Questions and commands to a running engine's guard, over a unix socket open to its user only."""
