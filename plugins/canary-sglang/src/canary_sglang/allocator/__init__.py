"""What SGLang's allocators hand out and take back, and for whom."""
