"""What one forward reads and writes."""
