"""What one may ask of a running engine's guard, and tell it, over a unix socket that only its user can open."""
