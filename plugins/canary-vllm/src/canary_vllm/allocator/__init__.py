"""What happens to blocks between forwards."""
