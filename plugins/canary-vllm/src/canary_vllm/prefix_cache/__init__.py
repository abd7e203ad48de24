"""What the prefix cache says of its blocks."""
