"""The prefix cache's books about its blocks."""
