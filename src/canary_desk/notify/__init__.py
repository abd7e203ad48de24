"""Notifications: events that somebody should act on, handed to a program or posted (``CANARY_NOTIFY``)."""
