"""Where the bytes of each slot lie."""
