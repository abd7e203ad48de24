"""Looks where a forward's own check doesn't: at the adapter, stored blocks, prefix caches, tables and stores."""
