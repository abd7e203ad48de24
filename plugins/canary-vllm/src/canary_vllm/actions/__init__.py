"""What is done about findings."""
