"""Slots that SGLang's allocators hand out and take back, and for which request."""
