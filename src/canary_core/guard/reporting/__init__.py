"""From a row of the violation ring to a line on stderr."""
