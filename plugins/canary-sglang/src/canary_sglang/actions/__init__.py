"""What is done about a finding."""
